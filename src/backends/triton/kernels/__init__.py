"""The kernels, and the device functions that they share.

- `maths`, `memory`: arithmetic, and access to rows in vectors.
- `algebra`: the finish. What a row's loss, statistics and gradient are, from its sums.
- `fold`, `gradient`: the first and the second pass over a row. `rows_kernel` has both.
- `sums`: the sums of tiles, products, ranks and saved rows. `beside`: kernels that read no logits.

Triton's interpreter cannot combine a scalar condition and a block of conditions with &. Use `tl.where`.
"""

__all__: list[str] = []
