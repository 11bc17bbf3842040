// A row's gradient with respect to its raw logits: see the docstring of the package for the formulas.

namespace xent {

// The gradient's coefficients of a row: p (alpha + beta log p) - scale share - given q, times dx/dz. With the upstream
// gradients u, n, v of lse, nll and entropy H, and Q = sum_c q_c (1 for a target):
struct Slopes {
  float peak;
  float log_sum;
  float scale;      // r
  float alpha;      // r (sum of all shares + 2 zeta lse) + u + n Q - v H
  float beta;       // -v
  float given;      // n
  float at_target;  // the whole gradient there
};

// For the target the bracket of the gradient is (1-e) w_y (p_y - 1) and the rest, with p_y - 1 = expm1(log p_y).
template <typename K, typename Given>
inline Slopes slopes_of(
    Target target, Numbers numbers, Sums sums, float scale, float peak, float log_sum, Given upstream) {
  Slopes slopes;
  slopes.peak = peak;
  slopes.log_sum = log_sum;
  slopes.scale = scale;
  slopes.beta = slopes.given = 0.0f;
  float others = K::target ? numbers.spread * numbers.weights : sums.mass;
  if (numbers.z_loss != 0.0f) others += 2.0f * numbers.z_loss * (peak + log_sum);
  float log_p = (target.x - peak) - log_sum, p = exact_exp(log_p);
  slopes.alpha = scale * (K::target ? target.share + others : others);
  slopes.at_target = scale * (target.share * expm1(log_p) + others * p - target.spread) * target.slope;
  if constexpr (K::upstream) {
    float more = upstream[0] - upstream[2] * upstream[3];
    slopes.given = upstream[1];
    slopes.beta = -upstream[2];
    slopes.alpha += times(slopes.given, K::target ? 1.0f : sums.given) + more;
    slopes.at_target += (slopes.given * expm1(log_p) + times(p, more + slopes.beta * log_p)) * target.slope;
  }
  return slopes;
}

// Turn `N` neighbouring columns of raw logits into their gradients.
template <typename K, uint N, typename F>
inline void differentiate(thread float (&z)[N], uint first, Slopes slopes, F facts) {
  Numbers numbers = facts.numbers;
  uint y = facts.target.y;
  XENT_UNROLL
  for (uint i = 0; i < N; ++i) {
    float slope, share = 0.0f;
    float x = activate<typename K::T, K::capped>(z[i], numbers.softcap, numbers.logit_scale, slope);
    float log_p = (x - slopes.peak) - slopes.log_sum;
    float p = exponential<typename K::T>(log_p);
    float factor = slopes.alpha;
    if constexpr (K::upstream) factor = p == 0.0f ? 0.0f : metal::fma(slopes.beta, log_p, factor);
    if constexpr (K::mass) {
      float given;
      share = slopes.scale * share_of<K>(facts, first + i, given);
      if constexpr (K::upstream) share += slopes.given * given;
    }
    z[i] = metal::fma(factor, p, -share) * slope;
  }
  if (K::target && y - first < N) {
    XENT_UNROLL
    for (uint i = 0; i < N; ++i) z[i] = first + i == y ? slopes.at_target : z[i];
  }
}

// Write zeros to a row's gradient.
template <typename T>
inline void clear(device T* grad, Columns columns) {
  float zeros[16 / sizeof(T)] = {};
  for (uint index = columns.first; index < columns.packs; index += columns.threads) store_pack(grad, index, zeros);
  if (columns.edge < columns.count) grad[columns.edge] = static_cast<T>(0.0f);
}

// Write the gradients of the packs that `load_packs` has read.
template <typename K, uint N, typename F>
inline void write_packs(device typename K::T* grad, thread uint4 (&packs)[N], uint index, Slopes slopes, F facts) {
  using T = typename K::T;
  XENT_UNROLL
  for (uint k = 0; k < N; ++k, index += facts.columns.threads) {
    if (index < facts.columns.packs) {
      float z[16 / sizeof(T)];
      unpack<T>(packs[k], z);
      differentiate<K>(z, index * width<T>, slopes, facts);
      store_pack(grad, index, z);
    }
  }
}

// Write the gradient of a row: first of the packs in registers, then of the others, which are read again in reverse
// order, because those that were read last may still be in cache.
template <typename K, uint HELD, typename F>
inline void write_gradient(
    const device typename K::T* logits,
    device typename K::T* grad,
    thread uint4 (&held)[HELD],
    Slopes slopes,
    F facts) {
  using T = typename K::T;
  Columns columns = facts.columns;
  write_packs<K>(grad, held, columns.first, slopes, facts);
  uint begin = columns.first + HELD * columns.threads, step = batch * columns.threads;
  uint rounds = begin < columns.packs ? (columns.packs - begin + step - 1) / step : 0;
  for (uint round = rounds; round > 0; --round) {
    uint index = begin + (round - 1) * step;
    uint4 packs[batch];
    load_packs(logits, packs, columns, index);
    write_packs<K>(grad, packs, index, slopes, facts);
  }
  if (columns.edge < columns.count) {
    float edge[1] = {static_cast<float>(logits[columns.edge])};
    differentiate<K>(edge, columns.edge, slopes, facts);
    grad[columns.edge] = static_cast<T>(edge[0]);
  }
}

}  // namespace xent
