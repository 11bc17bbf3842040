// A row's gradient with respect to its raw logits: see the docstring of the package for the formulas.

namespace xent {

// The gradient's coefficients of a row.
struct Slopes {
  float peak;
  float log_sum;
  float of_lse;     // sum of all shares, plus 2 zeta lse
  float scale;      // r
  float at_target;  // the whole gradient there
  // With upstream gradients u, n, v of lse, nll and entropy H, Q = sum_c q_c (1 for a target):
  float alpha;      // r of_lse + u + n Q - v H
  float beta;       // -v
  float given;      // n
};

// For the target the bracket of the gradient is (1-e) w_y (p_y - 1) and the rest, with p_y - 1 = expm1(log p_y).
template <typename K>
inline Slopes slopes_of(Target target, Numbers numbers, float shares, float scale, float peak, float log_sum) {
  Slopes slopes;
  slopes.peak = peak;
  slopes.log_sum = log_sum;
  slopes.scale = scale;
  float others = K::target ? numbers.spread * numbers.weights : shares;
  if (numbers.z_loss != 0.0f) others += 2.0f * numbers.z_loss * (peak + log_sum);
  slopes.of_lse = K::target ? target.share + others : others;
  float log_p = (target.x - peak) - log_sum;
  float bracket = target.share * expm1(log_p) + others * exact_exp(log_p) - target.spread;
  slopes.at_target = scale * bracket * target.slope;
  slopes.alpha = slopes.beta = slopes.given = 0.0f;
  return slopes;
}

// Add the gradients of a row's statistics. `upstream` has those of lse, nll and entropy, and the entropy itself; `given`
// is the sum of the class probabilities, 1 for a target index.
template <typename Given>
inline void add_upstream(thread Slopes& slopes, Target target, Given upstream, float given) {
  float of_nll = upstream[1], of_entropy = upstream[2];
  float others = upstream[0] - of_entropy * upstream[3];
  slopes.alpha = slopes.scale * slopes.of_lse + times(of_nll, given) + others;
  slopes.beta = -of_entropy;
  slopes.given = of_nll;
  float log_p = (target.x - slopes.peak) - slopes.log_sum;
  float bracket = of_nll * expm1(log_p) + times(exact_exp(log_p), others + slopes.beta * log_p);
  slopes.at_target += bracket * target.slope;
}

// Turn `N` neighbouring columns of raw logits into their gradients.
template <typename K, bool UPSTREAM, uint N, typename F>
inline void differentiate(thread float (&z)[N], uint first, Slopes slopes, F facts) {
  Numbers numbers = facts.numbers;
  uint y = facts.target.y;
  XENT_UNROLL
  for (uint i = 0; i < N; ++i) {
    float slope;
    float x = activate<typename K::T, K::capped>(z[i], numbers.softcap, numbers.logit_scale, slope);
    float log_p = (x - slopes.peak) - slopes.log_sum;
    float p = exponential<typename K::T>(log_p);
    float share = 0.0f, given = 0.0f;
    if constexpr (K::shares) share = share_of<K>(facts, first + i, given);
    if constexpr (UPSTREAM) {
      float of_p = times(p, metal::fma(slopes.beta, log_p, slopes.alpha));
      z[i] = (of_p - slopes.scale * share - slopes.given * given) * slope;
    } else {
      z[i] = slopes.scale * metal::fma(slopes.of_lse, p, -share) * slope;
    }
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
template <typename K, bool UPSTREAM, uint N, typename F>
inline void write_packs(device typename K::T* grad, thread uint4 (&packs)[N], uint index, Slopes slopes, F facts) {
  using T = typename K::T;
  XENT_UNROLL
  for (uint k = 0; k < N; ++k, index += facts.columns.threads) {
    if (index < facts.columns.packs) {
      float z[16 / sizeof(T)];
      unpack<T>(packs[k], z);
      differentiate<K, UPSTREAM>(z, index * width<T>, slopes, facts);
      store_pack(grad, index, z);
    }
  }
}

// Write the gradient of a row: first of the packs in registers, then of the others, which are read again in reverse
// order, because those that were read last may still be in cache.
template <typename K, bool UPSTREAM, uint HELD, typename F>
inline void write_gradient(
    const device typename K::T* logits,
    device typename K::T* grad,
    thread uint4 (&held)[HELD],
    Slopes slopes,
    F facts) {
  using T = typename K::T;
  Columns columns = facts.columns;
  write_packs<K, UPSTREAM>(grad, held, columns.first, slopes, facts);
  uint begin = columns.first + HELD * columns.threads, step = batch * columns.threads;
  uint rounds = begin < columns.packs ? (columns.packs - begin + step - 1) / step : 0;
  for (uint round = rounds; round > 0; --round) {
    uint index = begin + (round - 1) * step;
    uint4 packs[batch];
    load_packs(logits, packs, columns, index);
    write_packs<K, UPSTREAM>(grad, packs, index, slopes, facts);
  }
  if (columns.edge < columns.count) {
    float edge[1] = {static_cast<float>(logits[columns.edge])};
    differentiate<K, UPSTREAM>(edge, columns.edge, slopes, facts);
    grad[columns.edge] = static_cast<T>(edge[0]);
  }
}

}  // namespace xent
