// The backward kernel's signature for torch.mps.compile_shader: see forward_signature.metal.

template <
    typename T,
    typename Probability,
    bool TARGET,
    bool EXACT,
    bool WEIGHTED,
    bool SMOOTHED,
    bool CAPPED,
    bool BENT,
    bool UPSTREAM>
[[kernel, max_total_threads_per_threadgroup(512)]] void backward_rows(
    const device T* logits [[buffer(0)]],
    const device long* target [[buffer(1)]],
    const device float* target_logits [[buffer(2)]],
    const device Probability* probabilities [[buffer(3)]],
    const device float* class_weight [[buffer(4)]],
    const device float* total_weight [[buffer(5)]],
    const device float* bend [[buffer(6)]],
    const device float* scale [[buffer(7)]],
    const device bool* dead [[buffer(8)]],
    const device float* norm [[buffer(9)]],
    const device float* upstream [[buffer(10)]],
    device T* grad [[buffer(11)]],
    constant long& vocabulary [[buffer(12)]],
    constant long& logits_row [[buffer(13)]],
    constant long& grad_row [[buffer(14)]],
    constant long& probabilities_row [[buffer(15)]],
    constant long& norm_row [[buffer(16)]],
    constant long& norm_behind [[buffer(17)]],
    constant long& bend_row [[buffer(18)]],
    constant float& label_smoothing [[buffer(19)]],
    constant float& z_loss [[buffer(20)]],
    constant float& softcap [[buffer(21)]],
    constant float& logit_scale [[buffer(22)]],
    constant float& spread [[buffer(23)]],
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
