// The sums over a row's logits from which its loss is computed, in one read.
//
// They have the names of `xent.backends.torch.contract`. With m the largest x so far, and a target index left out of all
// but `level` and `key`::
//
//     rest = sum_c exp(x_c - m)                 log p_c = (x_c - m) - log rest
//     mixed = sum_c exp(x_c - m) (x_c - m)      entropy = log rest - mixed / rest
//     cost = sum_c share_c (m - x_c)            sum_c share_c (-log p_c) = cost + mass log rest
//     surprise = sum_c q_c (m - x_c)            sum_c q_c (-log p_c) = surprise + given log rest
//     squares = sum_c exp(2 (x_c - m))          log sum_c p_c^2 = log squares - 2 log rest
//     level = sum_c x_c
//
// All terms of a sum but `level` have one sign, so nothing cancels. When m grows, the difference is added to each
// m - x_c.

namespace xent {

struct Sums {
  float peak;      // m
  float rest;
  float mixed;
  float mass;      // sum_c share_c
  float cost;
  float given;     // sum_c q_c
  float surprise;
  float squares;
  float level;
  float key;       // the largest logit by `order`, and the lowest of its columns
  uint place;
};

inline Sums no_sums() {
  Sums sums;
  sums.peak = sums.key = -INFINITY;
  sums.rest = sums.mixed = sums.mass = sums.cost = sums.given = sums.surprise = 0.0f;
  sums.squares = sums.level = 0.0f;
  sums.place = 0xFFFFFFFF;
  return sums;
}

// Rescale the sums to a larger peak. If all classes so far were -inf, there is nothing to rescale.
template <typename K>
inline void raise(thread Sums& sums, float peak) {
  if (sums.peak != -INFINITY) {
    float growth = peak - sums.peak;
    float shrink = exact_exp(-growth);
    if constexpr (K::mixed) sums.mixed = shrink * (sums.mixed - growth * sums.rest);
    if constexpr (K::mass) sums.cost += times(sums.mass, growth);
    if constexpr (K::given) sums.surprise += times(sums.given, growth);
    if constexpr (K::squares) sums.squares *= shrink * shrink;
    sums.rest *= shrink;
  }
  sums.peak = peak;
}

// Add one class. `shift` is the peak, or 0 if that is -inf, so that exp(-inf - shift) is 0 and not NaN.
template <typename K>
inline void add(thread Sums& sums, float shift, float x, float share, float given) {
  float power = exponential<typename K::T>(x - shift);
  sums.rest += power;
  if constexpr (K::mixed) sums.mixed += times(power, x - shift);
  if constexpr (K::squares) sums.squares += power * power;
  if constexpr (K::mass) {
    sums.mass += share;
    sums.cost += times(share, shift - x);
  }
  if constexpr (K::given) {
    sums.given += given;
    sums.surprise += times(given, shift - x);
  }
}

inline void consider(thread Sums& sums, float key, uint column) {
  if (key > sums.key || (key == sums.key && column < sums.place)) {
    sums.key = key;
    sums.place = column;
  }
}

// Combine the sums of the lanes of a SIMD-group; afterwards all lanes have the result.
template <typename K>
inline void join_lanes(thread Sums& sums) {
  raise<K>(sums, metal::simd_max(sums.peak));
  sums.rest = metal::simd_sum(sums.rest);
  if constexpr (K::mixed) sums.mixed = metal::simd_sum(sums.mixed);
  if constexpr (K::mass) {
    sums.mass = metal::simd_sum(sums.mass);
    sums.cost = metal::simd_sum(sums.cost);
  }
  if constexpr (K::given) {
    sums.given = metal::simd_sum(sums.given);
    sums.surprise = metal::simd_sum(sums.surprise);
  }
  if constexpr (K::squares) sums.squares = metal::simd_sum(sums.squares);
  if constexpr (K::level) sums.level = metal::simd_sum(sums.level);
  if constexpr (K::key) {
    float largest = metal::simd_max(sums.key);
    sums.place = metal::simd_min(sums.key == largest ? sums.place : 0xFFFFFFFF);
    sums.key = largest;
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
