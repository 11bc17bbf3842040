// The body of the backward kernel: a row's gradient from its norm: the largest x, and log sum_c exp(x_c - largest).
// Arrays and signatures are as in forward.metal. upstream (R, 4) has the upstream gradients of lse, nll and entropy,
// and the entropy itself.

threadgroup xent::Sums shared[32];

using K = xent::Kind<T, TARGET, WEIGHTED, SMOOTHED, CAPPED, false, UPSTREAM, false, false, false>;
uint thread_index = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;
xent::Columns columns = xent::share_out<T>(V, thread_index, threads);

if (dead[row]) {
  xent::clear(grad + grad_start, columns);
  return;
}

// Start loading the row before anything waits for memory.
uint4 packs[xent::batch];
xent::load_packs(logits + start, packs, columns, thread_index);

auto facts = xent::facts_of<K, EXACT, BENT>(
    columns,
    row,
    numbers,
    bend + (BENT ? bend_start : 0),
    target,
    target_logits,
    logits + start,
    probabilities + (TARGET ? 0 : probabilities_start),
    class_weight);

xent::Sums sums = xent::no_sums();
if (!TARGET) {
  for (uint column = thread_index; column < V; column += threads) {
    float q;
    sums.shares += xent::share_of<K>(facts, column, q);
    sums.given += q;
  }
  xent::join<K>(
      sums, shared, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup);
}

xent::Slopes slopes = xent::slopes_of<K>(
    facts.target, facts.numbers, sums.shares, scale[row], norm[norm_start], norm[norm_start + norm_part]);
if (UPSTREAM) {
  const size_t place = 4 * static_cast<size_t>(row);
  xent::add_upstream(slopes, facts.target, upstream + place, TARGET ? 1.0f : sums.given);
}
// If the gradient overwrites the logits, only the thread that writes the target's gradient needs the target's logit.
xent::write_gradient<K, UPSTREAM, xent::batch>(logits + start, grad + grad_start, packs, slopes, facts);
