// The signature of both kernels for torch.mps.compile_shader, and the offsets of a row in each array. NAME is forward or
// backward. A kernel does not access the arrays that it has no use for.
//
// logits, grad and probabilities (R, V) have row strides in elements; grad may be the logits. The largest x of row r is
// norm[r * norm_row], and its log_sum is norm_part elements after it. Its scale is bend[r * bend_row], and its softcap
// is the next element. Other arrays are as in forward.metal. `sources` numbers the buffers in this order.

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
    const device T* logits,
    const device long* target,
    const device float* target_logits,
    const device Probability* probabilities,
    const device float* class_weight,
    const device float* total_weight,
    const device float* bend,
    const device float* weight,
    const device float* scale,
    const device bool* dead,
    device float* loss,
    device float* norm,
    device float* nll,
    device float* entropy,
    device long* predictions,
    device float* log_sum_sq_probs,
    device float* mean_logit,
    device T* grad,
    constant long& vocabulary,
    constant long& logits_row,
    constant long& grad_row,
    constant long& probabilities_row,
    constant long& norm_row,
    constant long& norm_behind,
    constant long& bend_row,
    constant float& label_smoothing,
    constant float& z_loss,
    constant float& softcap,
    constant float& logit_scale,
    constant float& spread,
    const device float* upstream,
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
