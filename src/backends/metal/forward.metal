// The body of the forward kernel: losses and results of a row, and its gradient with GRAD. Its signature is MLX's, with
// contiguous.metal, or that of forward_signature.metal.
//
// Arrays that the call does not have, and results that nobody asked for, are bound to something that is not touched.
// logits (R, V); numbers (6,); bend (R, 2); target, target_logits, weight, scale, dead (R,); probabilities (R, V);
// class_weight (V,).

threadgroup float shared[352];
threadgroup uint shared_at[32];

using K = xent::Kind<T, TARGET, WEIGHTED, SMOOTHED, CAPPED, ENTROPY, NLL, PREDICTIONS, SQUARES, LEVEL>;
uint thread_index = thread_position_in_threadgroup.x;
uint threads = threads_per_threadgroup.x;
xent::Columns columns = xent::share_out<T>(V, thread_index);

if (dead[row] && SKIPS_DEAD) {
  if (thread_index == 0) {
    loss[row] = 0.0f;
    if (NORM) norm[norm_start] = norm[norm_start + norm_part] = 0.0f;
  }
  if (GRAD) xent::clear(grad + grad_start, columns, thread_index, threads);
  return;
}

// The row is on its way before anything waits for memory.
uint4 held[HELD];
xent::load_packs(logits + start, held, columns, thread_index, threads);

xent::Numbers given = xent::read_numbers(numbers);
if (BENT) given = xent::bent(given, bend, bend_start);
uint y = V;
float z_y = 0.0f;
if (TARGET) {
  y = static_cast<uint>(target[row]);
  z_y = EXACT ? static_cast<float>(target_logits[row]) : static_cast<float>(logits[start + y]);
}
xent::Target one = xent::target_of<K>(y, z_y, given, class_weight);
auto shares = xent::shares_from(probabilities + (TARGET ? 0 : probabilities_start), class_weight);

xent::Sums sums =
    xent::read_row<K, HELD>(logits + start, held, columns, one, given, shares, thread_index, threads);
xent::join<typename K::Sought>(
    sums, shared, shared_at, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup);
xent::Found found = xent::finish<K>(sums, one, given);

if (thread_index == 0) {
  loss[row] = dead[row] ? 0.0f : weight[row] * found.loss;
  if (NORM) {
    norm[norm_start] = found.peak;
    norm[norm_start + norm_part] = found.log_sum;
  }
  if (NLL) nll[row] = found.nll;
  if (ENTROPY) entropy[row] = found.entropy;
  if (PREDICTIONS) predictions[row] = static_cast<int>(sums.at);
  if (SQUARES) log_sum_sq_probs[row] = found.log_sum_sq_probs;
  if (LEVEL) mean_logit[row] = found.mean_logit;
}
if (GRAD) {
  // All threads have read the target's logit before one writes its gradient there.
  if (IN_PLACE) metal::threadgroup_barrier(metal::mem_flags::mem_device);
  if (dead[row]) {
    xent::clear(grad + grad_start, columns, thread_index, threads);
  } else {
    xent::Slopes slopes = xent::slopes_of<K>(one, given, sums.shares, scale[row], found.peak, found.log_sum);
    xent::write_gradient<K, false, HELD>(
        logits + start, grad + grad_start, held, columns, one, slopes, given, shares, thread_index, threads);
  }
}
