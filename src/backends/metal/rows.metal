// A row, from its logits to its loss, and to the gradient of those logits: see the package's documentation for the
// formulas. A threadgroup has one row.

namespace xent {

// What is fixed when a kernel is built.
template <
    typename Logit,
    bool TARGET,    // class indices, not probabilities
    bool WEIGHTED,  // class weights
    bool SMOOTHED,
    bool CAPPED,
    bool ENTROPY,
    bool NLL,
    bool PREDICTIONS>
struct Kind {
  using T = Logit;
  static constexpr constant bool target = TARGET;
  static constexpr constant bool weighted = WEIGHTED;
  static constexpr constant bool smoothed = SMOOTHED;
  static constexpr constant bool capped = CAPPED;
  static constexpr constant bool entropy = ENTROPY;
  static constexpr constant bool nll = NLL;
  static constexpr constant bool predictions = PREDICTIONS;
  using Sought = Wanted<ENTROPY, SMOOTHED || !TARGET, NLL && !TARGET, PREDICTIONS>;
};

// The numbers among the options, which may change from launch to launch.
struct Numbers {
  float keep;    // 1 - e
  float spread;  // e / V
  float z_loss;
  float softcap;
  float logit_scale;
  float weights;  // sum_c w_c
};

template <typename Given>
inline Numbers read_numbers(Given given) {
  Numbers numbers;
  numbers.keep = 1.0f - given[0];
  numbers.z_loss = given[1];
  numbers.softcap = given[2];
  numbers.logit_scale = given[3];
  numbers.spread = given[4];
  numbers.weights = given[5];
  return numbers;
}

// What the loss multiplies each -log p_c with.
template <typename Probabilities, typename ClassWeight>
struct Shares {
  Probabilities probabilities;  // of this row
  ClassWeight class_weight;
};

template <typename Probabilities, typename ClassWeight>
inline Shares<Probabilities, ClassWeight> shares_from(Probabilities probabilities, ClassWeight class_weight) {
  Shares<Probabilities, ClassWeight> shares;
  shares.probabilities = probabilities;
  shares.class_weight = class_weight;
  return shares;
}

// Return class c's share: (e/V) w_c, and what its probability q_c adds. The share of the one target is added later.
template <typename K, typename S>
inline float share_of(S shares, Numbers numbers, uint column, thread float& given) {
  float share = numbers.spread;
  given = 0.0f;
  if constexpr (!K::target) {
    given = static_cast<float>(shares.probabilities[column]);
    share = numbers.keep * given + numbers.spread;
  }
  if constexpr (K::weighted && (K::smoothed || !K::target)) share *= shares.class_weight[column];
  return share;
}

// The one class that indices name. It is kept out of the row's sums: where its p is nearly 1, all others together are
// the row's gradient, and beside that 1 they would be lost.
struct Target {
  uint y;       // V, which is no column, for probabilities
  float x;
  float slope;  // dx/dz
  float share;  // (1-e) w_y
  float spread; // (e/V) w_y
};

// Add `N` neighbouring columns of raw logits to a thread's sums.
template <typename K, uint N, typename S>
inline void add_columns(
    thread Sums& sums, thread float (&z)[N], uint first, uint y, Numbers numbers, S shares) {
  XENT_UNROLL
  for (uint i = 0; i < N; ++i) {
    if constexpr (K::predictions) consider(sums, order(z[i], numbers.logit_scale), first + i);
    float slope;
    z[i] = activate<typename K::T, K::capped>(z[i], numbers.softcap, numbers.logit_scale, slope);
  }
  if (K::target && y - first < N) {
    XENT_UNROLL
    for (uint i = 0; i < N; ++i) z[i] = first + i == y ? -INFINITY : z[i];
  }
  float largest = z[0];
  XENT_UNROLL
  for (uint i = 1; i < N; ++i) largest = metal::max(largest, z[i]);
  if (largest > sums.peak) raise<typename K::Sought>(sums, largest);
  float shift = sums.peak == -INFINITY ? 0.0f : sums.peak;
  XENT_UNROLL
  for (uint i = 0; i < N; ++i) {
    float share = 0.0f, given = 0.0f;
    if constexpr (K::smoothed || !K::target) {
      share = share_of<K>(shares, numbers, first + i, given);
      if (K::target && first + i == y) share = 0.0f;
    }
    add<typename K::T, typename K::Sought>(sums, shift, z[i], share, given);
  }
}

// A row as the gradient sees it.
struct Slopes {
  float peak;
  float log_sum;
  float of_lse;     // sum of all shares, and 2 zeta lse
  float scale;      // r
  float at_target;  // the whole gradient there
};

// Turn `N` neighbouring columns of raw logits into their gradients.
template <typename K, uint N, typename S>
inline void differentiate(thread float (&z)[N], uint first, uint y, Slopes slopes, Numbers numbers, S shares) {
  XENT_UNROLL
  for (uint i = 0; i < N; ++i) {
    float slope;
    float x = activate<typename K::T, K::capped>(z[i], numbers.softcap, numbers.logit_scale, slope);
    float p = exponential<typename K::T>((x - slopes.peak) - slopes.log_sum);
    float share = 0.0f, given = 0.0f;
    if constexpr (K::smoothed || !K::target) share = share_of<K>(shares, numbers, first + i, given);
    z[i] = slopes.scale * (slopes.of_lse * p - share) * slope;
  }
  if (K::target && y - first < N) {
    XENT_UNROLL
    for (uint i = 0; i < N; ++i) z[i] = first + i == y ? slopes.at_target : z[i];
  }
}

template <typename K, typename ClassWeight>
inline Target target_of(uint y, float z, Numbers numbers, ClassWeight class_weight) {
  Target target;
  target.y = y;
  target.x = activate<float, K::capped>(z, numbers.softcap, numbers.logit_scale, target.slope);
  float w = 1.0f;
  if constexpr (K::weighted && K::target) w = class_weight[y];
  target.share = numbers.keep * w;
  target.spread = numbers.spread * w;
  return target;
}

inline float z_term(Numbers numbers, float lse) {
  return numbers.z_loss == 0.0f ? 0.0f : numbers.z_loss * lse * lse;
}

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
  return slopes;
}

// Write zeros to a row's gradient.
template <typename T>
inline void clear(device T* grad, Columns columns, uint thread_index, uint threads) {
  float zeros[16 / sizeof(T)] = {};
  for (uint index = thread_index; index < columns.packs; index += threads) store_pack(grad, index, zeros);
  if (columns.edge < columns.count) grad[columns.edge] = static_cast<T>(0.0f);
}

// Packs that a thread has on their way at a time where it does not keep them.
constant constexpr uint batch = 4;

// Read packs `index`, `index + threads`, ... as far as there are any.
template <typename T, uint N>
inline void load_packs(const device T* logits, thread uint4 (&packs)[N], Columns columns, uint index, uint threads) {
  XENT_UNROLL
  for (uint k = 0; k < N; ++k) {
    if (index + k * threads < columns.packs) packs[k] = load_pack(logits, index + k * threads);
  }
}

// Add what `load_packs` read to a thread's sums.
template <typename K, uint N, typename S>
inline void add_packs(
    thread Sums& sums,
    thread uint4 (&packs)[N],
    Columns columns,
    uint index,
    uint threads,
    uint y,
    Numbers numbers,
    S shares) {
  using T = typename K::T;
  XENT_UNROLL
  for (uint k = 0; k < N; ++k) {
    if (index + k * threads < columns.packs) {
      float z[16 / sizeof(T)];
      unpack<T>(packs[k], z);
      add_columns<K>(sums, z, (index + k * threads) * width<T>, y, numbers, shares);
    }
  }
}

// Read a row once into a thread's sums; its first packs have been read, and are kept.
template <typename K, uint HELD, typename S>
inline Sums read_row(
    const device typename K::T* logits,
    thread uint4 (&held)[HELD],
    Columns columns,
    Target target,
    Numbers numbers,
    S shares,
    uint thread_index,
    uint threads) {
  Sums sums = no_sums();
  add_packs<K>(sums, held, columns, thread_index, threads, target.y, numbers, shares);
  for (uint index = thread_index + HELD * threads; index < columns.packs; index += batch * threads) {
    uint4 packs[batch];
    load_packs(logits, packs, columns, index, threads);
    add_packs<K>(sums, packs, columns, index, threads, target.y, numbers, shares);
  }
  if (columns.edge < columns.count) {
    float edge[1] = {static_cast<float>(logits[columns.edge])};
    add_columns<K>(sums, edge, columns.edge, target.y, numbers, shares);
  }
  return sums;
}

// Write the gradients of what `load_packs` read.
template <typename K, uint N, typename S>
inline void write_packs(
    device typename K::T* grad,
    thread uint4 (&packs)[N],
    Columns columns,
    uint index,
    uint threads,
    uint y,
    Slopes slopes,
    Numbers numbers,
    S shares) {
  using T = typename K::T;
  XENT_UNROLL
  for (uint k = 0; k < N; ++k) {
    if (index + k * threads < columns.packs) {
      float z[16 / sizeof(T)];
      unpack<T>(packs[k], z);
      differentiate<K>(z, (index + k * threads) * width<T>, y, slopes, numbers, shares);
      store_pack(grad, index + k * threads, z);
    }
  }
}

// Write the gradient of a row: first of the packs that the threads hold, then of the others, which are read again, those
// first that were read last and are found in cache.
template <typename K, uint HELD, typename S>
inline void write_gradient(
    const device typename K::T* logits,
    device typename K::T* grad,
    thread uint4 (&held)[HELD],
    Columns columns,
    Target target,
    Slopes slopes,
    Numbers numbers,
    S shares,
    uint thread_index,
    uint threads) {
  using T = typename K::T;
  write_packs<K>(grad, held, columns, thread_index, threads, target.y, slopes, numbers, shares);
  uint begin = thread_index + HELD * threads, step = batch * threads;
  uint rounds = begin < columns.packs ? (columns.packs - begin + step - 1) / step : 0;
  for (uint round = rounds; round > 0; --round) {
    uint index = begin + (round - 1) * step;
    uint4 packs[batch];
    load_packs(logits, packs, columns, index, threads);
    write_packs<K>(grad, packs, columns, index, threads, target.y, slopes, numbers, shares);
  }
  if (columns.edge < columns.count) {
    float edge[1] = {static_cast<float>(logits[columns.edge])};
    differentiate<K>(edge, columns.edge, target.y, slopes, numbers, shares);
    grad[columns.edge] = static_cast<T>(edge[0]);
  }
}

// What one thread writes about a row.
struct Found {
  float peak;
  float log_sum;
  float loss;  // before the row's weight
  float nll;
  float entropy;
};

// Add the target to the sums of all other classes, and make the row's results of them.
template <typename K>
inline Found finish(thread Sums& sums, Target target, Numbers numbers) {
  Found found;
  if constexpr (!K::target) {
    found.log_sum = exact_log(sums.total);
    found.loss = sums.below + sums.shares * found.log_sum;
    found.nll = sums.given_below + sums.given * found.log_sum;
    found.entropy = found.log_sum + sums.mixed / sums.total;
  } else {
    if (target.x > sums.peak) raise<typename K::Sought>(sums, target.x);
    float shift = sums.peak == -INFINITY ? 0.0f : sums.peak;
    float power = exact_exp(target.x - shift);
    found.log_sum = target.x == sums.peak ? log1p(sums.total) : exact_log(sums.total + power);
    float log_p = (target.x - sums.peak) - found.log_sum;
    found.loss = -times(target.share, log_p);
    if constexpr (K::smoothed) {
      found.loss += (sums.shares + target.spread) * found.log_sum + sums.below;
      found.loss += times(target.spread, shift - target.x);
    }
    found.nll = -log_p;
    found.entropy = found.log_sum + (sums.mixed + times(power, shift - target.x)) * exact_exp(-found.log_sum);
  }
  found.peak = sums.peak;
  found.loss += z_term(numbers, found.peak + found.log_sum);
  return found;
}

}  // namespace xent
