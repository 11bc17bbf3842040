// The parameters of a launch: the terms of the loss, the numeric options, and the target of a row.

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
    bool LEVEL>
struct Kind {
  using T = Logit;
  static constexpr constant bool target = TARGET;
  static constexpr constant bool weighted = WEIGHTED;
  static constexpr constant bool smoothed = SMOOTHED;
  static constexpr constant bool capped = CAPPED;
  static constexpr constant bool entropy = ENTROPY;
  static constexpr constant bool nll = NLL;
  static constexpr constant bool predictions = PREDICTIONS;
  static constexpr constant bool squares = SQUARES;
  static constexpr constant bool level = LEVEL;
  using Sought = Wanted<ENTROPY, SMOOTHED || !TARGET, NLL && !TARGET, PREDICTIONS, SQUARES, LEVEL>;
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

// The shares: the factor of each -log p_c in the loss.
template <typename Probabilities, typename ClassWeight>
struct Shares {
  Probabilities probabilities;  // of this row
  ClassWeight class_weight;
};

// Return the share of class c: (e/V) w_c, plus that of its probability q_c. The share of a target index is added later.
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

// The target class of an index. It is not included in the row's sums: if its p is nearly 1, the gradient consists of
// the other classes, whose small sum would be rounded away beside 1.
struct Target {
  uint y;       // V, which is not a column, for class probabilities
  float x;
  float slope;  // dx/dz
  float share;  // (1-e) w_y
  float spread; // (e/V) w_y
};

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

// What a thread knows of its row.
template <typename Probabilities, typename ClassWeight>
struct Facts {
  Columns columns;
  Numbers numbers;
  Target target;
  Shares<Probabilities, ClassWeight> shares;
};

// Return the facts of a row from the arrays of a launch; `logits` and `probabilities` begin with the row.
template <
    typename K,
    bool EXACT,
    bool BENT,
    typename Given,
    typename Bend,
    typename Class,
    typename Known,
    typename Logits,
    typename Probabilities,
    typename ClassWeight>
inline Facts<Probabilities, ClassWeight> facts_of(
    Columns columns,
    uint row,
    Given numbers,
    Bend bend,
    Class target,
    Known target_logits,
    Logits logits,
    Probabilities probabilities,
    ClassWeight class_weight) {
  Facts<Probabilities, ClassWeight> facts;
  facts.columns = columns;
  facts.numbers = read_numbers(numbers);
  if constexpr (BENT) {
    facts.numbers.logit_scale = bend[0];
    facts.numbers.softcap = bend[1];
  }
  uint y = columns.count;
  float z = 0.0f;
  if constexpr (K::target) {
    y = static_cast<uint>(target[row]);
    if constexpr (EXACT) z = static_cast<float>(target_logits[row]);
    else z = static_cast<float>(logits[y]);
  }
  facts.target = target_of<K>(y, z, facts.numbers, class_weight);
  facts.shares.probabilities = probabilities;
  facts.shares.class_weight = class_weight;
  return facts;
}

}  // namespace xent
