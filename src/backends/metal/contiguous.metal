// Offsets of a row in MLX's arrays, which are contiguous. The signatures for PyTorch define their own offsets.

uint V = static_cast<uint>(logits_shape[1]);
uint row = threadgroup_position_in_grid.y;
size_t start = static_cast<size_t>(row) * V;
size_t grad_start = start;
size_t probabilities_start = start;
size_t norm_start = 2 * static_cast<size_t>(row);
size_t norm_part = 1;
size_t bend_start = 2 * static_cast<size_t>(row);
constexpr bool IN_PLACE = false;
