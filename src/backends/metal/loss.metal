// The parameters of a launch: the terms of the loss, the numeric options, and the target of a row; and the row's loss,
// from one read of its logits: see the docstring of the package for the formulas.

namespace xent {

// Template arguments of a kernel.
template <
    typename Logit,
    bool TARGET,    // class indices, not probabilities
    bool WEIGHTED,  // class weights
    bool SMOOTHED,
    bool CAPPED,
    bool ENTROPY,
    bool NLL,
    bool PREDICTIONS,
    bool SQUARES,
    bool LEVEL,
    bool UPSTREAM>  // gradients of statistics
struct Kind {
  using T = Logit;
  static constexpr constant bool target = TARGET;
  static constexpr constant bool weighted = WEIGHTED;
  static constexpr constant bool smoothed = SMOOTHED;
  static constexpr constant bool capped = CAPPED;
  // The sums that the kernel needs besides `rest`.
  static constexpr constant bool mixed = ENTROPY;
  static constexpr constant bool mass = SMOOTHED || !TARGET;
  static constexpr constant bool given = NLL && !TARGET;
  static constexpr constant bool key = PREDICTIONS;
  static constexpr constant bool squares = SQUARES;
  static constexpr constant bool level = LEVEL;
  static constexpr constant bool upstream = UPSTREAM;
};

// The numeric options, which may differ between launches.
struct Numbers {
  float keep;    // 1 - e
  float spread;  // e / V
  float z_loss;
  float softcap;
  float logit_scale;
  float weights;  // sum_c w_c
};

// The target class of an index. It is not included in the row's sums: if its p is nearly 1, the gradient consists of
// the other classes, whose small sum would be rounded away beside 1.
struct Target {
  uint y;       // V, which is not a column, for class probabilities
  float x;
  float slope;  // dx/dz
  float share;  // (1-e) w_y
  float spread; // (e/V) w_y
};

// What a thread knows of its row.
template <typename Probabilities, typename ClassWeight>
struct Facts {
  Columns columns;
  Numbers numbers;
  Target target;
  Probabilities probabilities;  // of this row
  ClassWeight class_weight;
};

// Return the share of class c, the factor of -log p_c in the loss: (e/V) w_c, plus that of its probability q_c. The share
// of a target index is added later.
template <typename K, typename F>
inline float share_of(F facts, uint column, thread float& given) {
  float share = facts.numbers.spread;
  given = 0.0f;
  if constexpr (!K::target) {
    given = static_cast<float>(facts.probabilities[column]);
    share = facts.numbers.keep * given + facts.numbers.spread;
  }
  if constexpr (K::weighted && K::mass) share *= facts.class_weight[column];
  return share;
}

// Add `N` neighbouring columns of raw logits to a thread's sums.
template <typename K, uint N, typename F>
inline void add_columns(thread Sums& sums, thread float (&z)[N], uint first, F facts) {
  Numbers numbers = facts.numbers;
  uint y = facts.target.y;
  XENT_UNROLL
  for (uint i = 0; i < N; ++i) {
    if constexpr (K::key) consider(sums, order(z[i], numbers.logit_scale), first + i);
    float slope;
    z[i] = activate<typename K::T, K::capped>(z[i], numbers.softcap, numbers.logit_scale, slope);
    if constexpr (K::level) sums.level += z[i];
  }
  if (K::target && y - first < N) {
    XENT_UNROLL
    for (uint i = 0; i < N; ++i) z[i] = first + i == y ? -INFINITY : z[i];
  }
  float largest = z[0];
  XENT_UNROLL
  for (uint i = 1; i < N; ++i) largest = metal::max(largest, z[i]);
  if (largest > sums.peak) raise<K>(sums, largest);
  float shift = sums.peak == -INFINITY ? 0.0f : sums.peak;
  XENT_UNROLL
  for (uint i = 0; i < N; ++i) {
    float share = 0.0f, given = 0.0f;
    if constexpr (K::mass) {
      share = share_of<K>(facts, first + i, given);
      if (K::target && first + i == y) share = 0.0f;
    }
    add<K>(sums, shift, z[i], share, given);
  }
}

// Add the packs that `load_packs` has read to a thread's sums.
template <typename K, uint N, typename F>
inline void add_packs(thread Sums& sums, thread uint4 (&packs)[N], uint index, F facts) {
  using T = typename K::T;
  XENT_UNROLL
  for (uint k = 0; k < N; ++k, index += facts.columns.threads) {
    if (index < facts.columns.packs) {
      float z[16 / sizeof(T)];
      unpack<T>(packs[k], z);
      add_columns<K>(sums, z, index * width<T>, facts);
    }
  }
}

// Add a row to a thread's sums, reading it once. Its first packs have been read already, and stay in registers.
template <typename K, uint HELD, typename F>
inline Sums read_row(const device typename K::T* logits, thread uint4 (&held)[HELD], F facts) {
  Columns columns = facts.columns;
  Sums sums = no_sums();
  add_packs<K>(sums, held, columns.first, facts);
  uint step = batch * columns.threads;
  for (uint index = columns.first + HELD * columns.threads; index < columns.packs; index += step) {
    uint4 packs[batch];
    load_packs(logits, packs, columns, index);
    add_packs<K>(sums, packs, index, facts);
  }
  if (columns.edge < columns.count) {
    float edge[1] = {static_cast<float>(logits[columns.edge])};
    add_columns<K>(sums, edge, columns.edge, facts);
  }
  return sums;
}

// The results of a row, which one thread writes.
struct Results {
  float log_sum;
  float loss;  // before the row's weight
  float nll;
  float entropy;
  float log_sum_sq_probs;
};

// Add the target to the sums of all other classes, and compute the row's results.
template <typename K>
inline Results finish(thread Sums& sums, Target target, Numbers numbers) {
  Results results;
  if constexpr (!K::target) {
    results.log_sum = exact_log(sums.rest);
    results.loss = sums.cost + sums.mass * results.log_sum;
    results.nll = sums.surprise + sums.given * results.log_sum;
    results.entropy = results.log_sum - sums.mixed / sums.rest;
    results.log_sum_sq_probs = exact_log(sums.squares) - 2.0f * results.log_sum;
  } else {
    if (target.x > sums.peak) raise<K>(sums, target.x);
    float shift = sums.peak == -INFINITY ? 0.0f : sums.peak;
    float power = exact_exp(target.x - shift);
    results.log_sum = target.x == sums.peak ? log1p(sums.rest) : exact_log(sums.rest + power);
    float log_p = (target.x - sums.peak) - results.log_sum;
    results.loss = -times(target.share, log_p);
    if constexpr (K::smoothed) {
      results.loss += (sums.mass + target.spread) * results.log_sum + sums.cost;
      results.loss += times(target.spread, shift - target.x);
    }
    results.nll = -log_p;
    results.entropy = results.log_sum - (sums.mixed + times(power, target.x - shift)) * exact_exp(-results.log_sum);
    float log_squares = target.x == sums.peak ? log1p(sums.squares) : exact_log(sums.squares + power * power);
    results.log_sum_sq_probs = log_squares - 2.0f * results.log_sum;
  }
  float lse = sums.peak + results.log_sum;
  if (numbers.z_loss != 0.0f) results.loss += numbers.z_loss * lse * lse;
  return results;
}

}  // namespace xent
