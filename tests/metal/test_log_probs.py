"""Log-probabilities with the Metal kernels: the tests of backend "mlx" that need no `mx.compile`.

The emulator cannot be traced. test_tensors.py has PyTorch's.
"""

from tests.mlx.test_log_probs import (  # noqa: F401
    test_invalid_offsets_give_nan_in_every_row,
    test_logits_are_never_rounded_to_16_bits,
)
from tests.mlx.test_quantized import test_results_of_rows_are_those_of_the_unpacked_weight  # noqa: F401
