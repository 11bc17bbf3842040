// The body of the kernel. Forward: loss and results of a row, and with GRAD its gradient. Backward, with KNOWN: the
// gradient from `known`, a norm (the largest x, and log sum_c exp(x_c - largest)). `sources` has the signatures.
//
// Missing arrays, and results that are not needed, are bound to placeholders that are not accessed.
// logits (R, V); numbers (8,); row_activation, known (R, 2); target, target_logits, weight, scale, excluded (R,);
// probabilities (R, V); class_weight (V,); upstream (R, 4): the upstream gradients of lse, nll and entropy, and the
// entropy itself.

threadgroup xent::Sums shared[32];

using K = xent::Kind<
    T,
    TARGET,
    CLASS_WEIGHT,
    SMOOTHED,
    CAPPED,
    ENTROPY,
    NLL || UPSTREAM,
    PREDICTIONS,
    LOG_SUM_SQ_PROBS,
    MEAN_LOGIT,
    UPSTREAM>;
uint thread_index = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;
uint packs = V / xent::width<T>;
xent::Columns columns = {V, packs, metal::min(packs * xent::width<T> + thread_index, V), thread_index, threads};

if (excluded[row] && (KNOWN || SKIPS_EXCLUDED)) {
  if (!KNOWN && thread_index == 0) {
    loss[row] = 0.0f;
    if (NORM) norm[2 * row] = norm[2 * row + 1] = 0.0f;
  }
  if (GRAD) xent::clear(grad + grad_start, columns);
  return;
}

// Start loading the row before anything waits for memory.
uint4 held[HELD];
xent::load_packs(logits + start, held, columns, thread_index);

xent::Facts<decltype(probabilities + 0), decltype(class_weight + 0)> facts;
facts.columns = columns;
facts.probabilities = probabilities + (TARGET ? 0 : row * V);
facts.class_weight = class_weight;
facts.numbers = {
    1.0f - numbers[0],
    numbers[4],
    numbers[1],
    ROW_ACTIVATION ? row_activation[2 * row + 1] : numbers[2],
    ROW_ACTIVATION ? row_activation[2 * row] : numbers[3],
    numbers[5]};
float z = 0.0f, w = 1.0f;
facts.target.y = V;
if constexpr (TARGET) {
  uint y = facts.target.y = static_cast<uint>(target[row]);
  z = TARGET_LOGITS ? target_logits[row] : static_cast<float>(logits[start + y]);
  if (CLASS_WEIGHT) w = class_weight[y];
}
facts.target.x = xent::activate<float, CAPPED>(z, facts.numbers.softcap, facts.numbers.logit_scale, facts.target.slope);
facts.target.share = facts.numbers.keep * w;
facts.target.spread = facts.numbers.spread * w;

xent::Sums sums = xent::no_sums();
if (!KNOWN) {
  sums = xent::read_row<K, HELD>(logits + start, held, facts);
} else if (!TARGET) {
  for (uint column = thread_index; column < V; column += threads) {
    float q;
    sums.mass += xent::share_of<K>(facts, column, q);
    sums.given += q;
  }
}
if (!KNOWN || !TARGET) {
  xent::join<K>(
      sums, shared, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup);
}

float peak, log_sum;
if (KNOWN) {
  peak = known[2 * row];
  log_sum = known[2 * row + 1];
} else {
  xent::Results results = xent::finish<K>(sums, facts.target, facts.numbers);
  peak = sums.peak;
  log_sum = results.log_sum;
  if (thread_index == 0) {
    loss[row] = excluded[row] ? 0.0f : weight[row] * results.loss;
    if (NORM) {
      norm[2 * row] = peak;
      norm[2 * row + 1] = log_sum;
    }
    if (NLL) nll[row] = results.nll;
    if (ENTROPY) entropy[row] = results.entropy;
    if (PREDICTIONS) predictions[row] = static_cast<int>(sums.place);
    if (LOG_SUM_SQ_PROBS) log_sum_sq_probs[row] = results.log_sum_sq_probs;
    if (MEAN_LOGIT) mean_logit[row] = sums.level / static_cast<float>(V);
  }
}
if (GRAD) {
  // All threads must have read the target's logit before one of them overwrites it with its gradient.
  if (IN_PLACE) metal::threadgroup_barrier(metal::mem_flags::mem_device);
  if (excluded[row]) {
    xent::clear(grad + grad_start, columns);
  } else {
    xent::Slopes slopes = xent::slopes_of<K>(
        facts.target, facts.numbers, sums, scale[row], peak, log_sum, upstream + (UPSTREAM ? 4 * row : 0));
    xent::write_gradient<K, HELD>(logits + start, grad + grad_start, held, slopes, facts);
  }
}
