"""The kernels, and the device functions that they share.

- `algebra`: arithmetic, and the finish: what a row's loss, statistics and gradient are, from its sums.
- `memory`: access to rows, in vectors.
- `fold`: the first pass over a row. `rows_kernel` has both passes. `classes_kernels`: those of supports and top-k rows.
- `sums`: the sums of tiles, products, ranks and saved rows. `beside`: kernels that read no logits.

Triton's interpreter cannot combine a scalar condition and a block of conditions with &. Use `tl.where`.
"""

__all__: list[str] = []
