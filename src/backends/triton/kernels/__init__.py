"""The kernels, and the device functions that they share.

- `maths`, `memory`: arithmetic, and access to rows in vectors.
- `algebra`: the finish. What a row's loss, statistics and gradient are, from its sums.
- `fold`, `gradient`, `exchange`: the first and the second pass over a row, and the exchange between its programs.
- Modules whose names end in "kernel" or "kernels" have kernels.

Triton's interpreter cannot combine a scalar condition and a block of conditions with &. Use `tl.where`.
"""

__all__: list[str] = []
