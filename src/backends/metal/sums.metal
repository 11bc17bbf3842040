// The sums over a row's logits from which its loss is computed, in one read.
//
// With m the largest x so far, sums relative to m are::
//
//     total = sum_c exp(x_c - m)                log p_c = (x_c - m) - log total
//     mixed = sum_c exp(x_c - m) (m - x_c)      entropy = log total + mixed / total
//     below = sum_c share_c (m - x_c)           sum_c share_c (-log p_c) = below + log total sum_c share_c
//     squares = sum_c exp(2 (x_c - m))          log sum_c p_c^2 = log squares - 2 log total
//     level = sum_c x_c, with the target
//
// All other terms are positive, so nothing cancels. When m grows, the difference is added to each m - x_c.

namespace xent {

struct Sums {
  float peak;         // m
  float total;
  float mixed;
  float shares;       // sum_c share_c
  float below;
  float given;        // `shares` and `below` with the caller's class probabilities, without smoothing and class weights
  float given_below;
  float squares;
  float level;
  float best;         // the largest logit by `order`, and the lowest of its columns
  uint at;
};

inline Sums no_sums() {
  Sums sums;
  sums.peak = sums.best = -INFINITY;
  sums.total = sums.mixed = sums.shares = sums.below = sums.given = sums.given_below = 0.0f;
  sums.squares = sums.level = 0.0f;
  sums.at = 0xFFFFFFFF;
  return sums;
}

// Rescale the sums to a larger peak. If all classes so far were -inf, there is nothing to rescale.
template <typename K>
inline void raise(thread Sums& sums, float peak) {
  if (sums.peak != -INFINITY) {
    float growth = peak - sums.peak;
    float shrink = exact_exp(-growth);
    if constexpr (K::mixed) sums.mixed = shrink * (sums.mixed + growth * sums.total);
    if constexpr (K::shares) sums.below += times(sums.shares, growth);
    if constexpr (K::given) sums.given_below += times(sums.given, growth);
    if constexpr (K::squares) sums.squares *= shrink * shrink;
    sums.total *= shrink;
  }
  sums.peak = peak;
}

// Add one class. `shift` is the peak, or 0 if that is -inf, so that exp(-inf - shift) is 0 and not NaN.
template <typename K>
inline void add(thread Sums& sums, float shift, float x, float share, float given) {
  float power = exponential<typename K::T>(x - shift);
  sums.total += power;
  if constexpr (K::mixed) sums.mixed += times(power, shift - x);
  if constexpr (K::squares) sums.squares += power * power;
  if constexpr (K::shares) {
    sums.shares += share;
    sums.below += times(share, shift - x);
  }
  if constexpr (K::given) {
    sums.given += given;
    sums.given_below += times(given, shift - x);
  }
}

inline void consider(thread Sums& sums, float key, uint column) {
  if (key > sums.best || (key == sums.best && column < sums.at)) {
    sums.best = key;
    sums.at = column;
  }
}

// Combine the sums of the lanes of a SIMD-group; afterwards all lanes have the result.
template <typename K>
inline void join_lanes(thread Sums& sums) {
  raise<K>(sums, metal::simd_max(sums.peak));
  sums.total = metal::simd_sum(sums.total);
  if constexpr (K::mixed) sums.mixed = metal::simd_sum(sums.mixed);
  if constexpr (K::shares) {
    sums.shares = metal::simd_sum(sums.shares);
    sums.below = metal::simd_sum(sums.below);
  }
  if constexpr (K::given) {
    sums.given = metal::simd_sum(sums.given);
    sums.given_below = metal::simd_sum(sums.given_below);
  }
  if constexpr (K::squares) sums.squares = metal::simd_sum(sums.squares);
  if constexpr (K::level) sums.level = metal::simd_sum(sums.level);
  if constexpr (K::best) {
    float best = metal::simd_max(sums.best);
    sums.at = metal::simd_min(sums.best == best ? sums.at : 0xFFFFFFFF);
    sums.best = best;
  }
}

// Combine the sums of all threads of the threadgroup, once; afterwards all threads have the result.
//
// `shared` has room for the sums of 32 SIMD-groups.
template <typename K>
inline void join(thread Sums& sums, threadgroup Sums* shared, uint lane, uint group, uint groups) {
  join_lanes<K>(sums);
  if (groups == 1) return;
  if (lane == 0) shared[group] = sums;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  sums = no_sums();
  if (lane < groups) sums = shared[lane];
  join_lanes<K>(sums);
}

}  // namespace xent
