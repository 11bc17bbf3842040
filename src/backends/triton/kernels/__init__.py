"""The kernels, and the device functions that they share.

- `algebra`: arithmetic, and the finish: what a row's loss, statistics and gradient are, from its sums.
- `fold`: how rows are loaded, and the first pass over a row. `rows_kernel` has both passes, and how rows are stored.
- `divergence_kernel` and `classes_kernels`: dense teachers; supports and top-k teachers.
- `sums`: kernels that read no logits: the sums of tiles, products, ranks and saved rows, and others.

Triton's interpreter cannot combine a scalar condition and a block of conditions with &. Use `tl.where`.
"""

__all__: list[str] = []
