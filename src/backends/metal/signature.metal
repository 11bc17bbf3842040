// The signature of both kernels for torch.mps.compile_shader, and the offsets of a row in each array. NAME is forward or
// backward. A kernel does not access the arrays that it has no use for.
//
// logits, grad and probabilities (R, V) have row strides in elements; grad may be the logits. The largest x of row r is
// norm[r * norm_row], and its log_sum is norm_part elements after it. Its scale is bend[r * bend_row], and its softcap
// is the next element. Other arrays are as in forward.metal.

template <
    typename T,
    typename Probability,
    bool TARGET,
    bool EXACT,
    bool WEIGHTED,
    bool SMOOTHED,
    bool CAPPED,
    bool BENT,
    bool NORM,
    bool NLL,
    bool ENTROPY,
    bool PREDICTIONS,
    bool SQUARES,
    bool LEVEL,
    bool GRAD,
    bool SKIPS_DEAD,
    bool UPSTREAM,
    int HELD>
[[kernel, max_total_threads_per_threadgroup(512)]] void NAME_rows(
    const device T* logits [[buffer(0)]],
    const device long* target [[buffer(1)]],
    const device float* target_logits [[buffer(2)]],
    const device Probability* probabilities [[buffer(3)]],
    const device float* class_weight [[buffer(4)]],
    const device float* total_weight [[buffer(5)]],
    const device float* bend [[buffer(6)]],
    const device float* weight [[buffer(7)]],
    const device float* scale [[buffer(8)]],
    const device bool* dead [[buffer(9)]],
    device float* loss [[buffer(10)]],
    device float* norm [[buffer(11)]],
    device float* nll [[buffer(12)]],
    device float* entropy [[buffer(13)]],
    device long* predictions [[buffer(14)]],
    device float* log_sum_sq_probs [[buffer(15)]],
    device float* mean_logit [[buffer(16)]],
    device T* grad [[buffer(17)]],
    constant long& vocabulary [[buffer(18)]],
    constant long& logits_row [[buffer(19)]],
    constant long& grad_row [[buffer(20)]],
    constant long& probabilities_row [[buffer(21)]],
    constant long& norm_row [[buffer(22)]],
    constant long& norm_behind [[buffer(23)]],
    constant long& bend_row [[buffer(24)]],
    constant float& label_smoothing [[buffer(25)]],
    constant float& z_loss [[buffer(26)]],
    constant float& softcap [[buffer(27)]],
    constant float& logit_scale [[buffer(28)]],
    constant float& spread [[buffer(29)]],
    const device float* upstream [[buffer(30)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]]) {
uint V = static_cast<uint>(vocabulary);
uint row = threadgroup_position_in_grid.y;
size_t start = static_cast<size_t>(row) * static_cast<size_t>(logits_row);
size_t grad_start = static_cast<size_t>(row) * static_cast<size_t>(grad_row);
size_t probabilities_start = static_cast<size_t>(row) * static_cast<size_t>(probabilities_row);
size_t norm_start = static_cast<size_t>(row) * static_cast<size_t>(norm_row);
size_t norm_part = static_cast<size_t>(norm_behind);
size_t bend_start = static_cast<size_t>(row) * static_cast<size_t>(bend_row);
float weights = WEIGHTED ? total_weight[0] : static_cast<float>(V);
float numbers[6] = {label_smoothing, z_loss, softcap, logit_scale, spread, weights};
constexpr bool IN_PLACE = true;
