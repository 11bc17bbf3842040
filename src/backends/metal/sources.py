"""What both launchers share: the Metal sources, template arguments, and threads of a row.

The body of the kernel gets the signature that MLX generates, or ours for PyTorch.
"""

from collections.abc import Callable, Container, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from xent.core.spec import BackendError

__all__ = [
    "INPUTS",
    "LIMITS",
    "OUTPUTS",
    "RAN",
    "KernelError",
    "Template",
    "kernel_for",
    "library",
    "mlx_kernel",
    "row_sizes",
    "threads_and_held",
]

Template = dict[str, Any]
"""Template arguments of the kernel by name: numbers, flags, and types as text or as MLX's dtypes."""
INPUTS = {
    "logits": "T",
    "numbers": "float",
    "target": "long",
    "target_logits": "float",
    "probabilities": "Probability",
    "class_weight": "float",
    "row_activation": "float",
    "weight": "float",
    "scale": "float",
    "excluded": "bool",
    "known": "float",
    "upstream": "float",
}
"""The arguments of rows.metal, and their types in PyTorch's kernel. MLX declares those of its arrays."""
OUTPUTS = {
    "loss": "float",
    "norm": "float",
    "nll": "float",
    "entropy": "float",
    "predictions": "long",
    "log_sum_sq_probs": "float",
    "mean_logit": "float",
    "grad": "T",
}
"""The results, likewise."""
_SIZES = ("vocabulary", "logits_row", "grad_row")
_POSITIONS = {
    "threadgroup_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threads_per_threadgroup": "uint3",
    "thread_index_in_simdgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
}
_ROW = """
uint V = static_cast<uint>({});
size_t row = threadgroup_position_in_grid.y;
size_t start = row * static_cast<size_t>({});
size_t grad_start = row * static_cast<size_t>({});
constexpr bool IN_PLACE = {};
"""
_SIMD_WIDTH = 32
_PACK = 16  # bytes that a thread loads at one time
_MOST_HELD = 8
RAN: set[str] = set()
"""The kernels that a check has run, each with the largest number of threads that its pipeline allows."""

LIMITS = (512, 256, 128, 64, 32)
"""The possible numbers of threads of a threadgroup, largest first.

With 512 threads, each has about 100 registers, up to 32 of them for logits. A kernel with more registers has a lower
limit.
"""


class KernelError(BackendError):
    """A kernel cannot run on this GPU with any number of threads, for a reason of the compiler or the driver."""

    def __init__(self, reason: object) -> None:
        super().__init__(
            f"a Metal kernel of xent does not run on this GPU: {reason}. Backend 'torch' or 'mlx' serves the call. "
            "Please report this with the output of python -m xent"
        )


def kernel_for(
    arguments: Mapping[str, Any], requested: Container[str], allows: Callable[[Template, int], bool], **more: Any
) -> tuple[Template, int]:
    """Return the template arguments of a launch, and the number of threads per row.

    Each name of an argument or result, in capitals, says whether the argument is not None, or the result
    `requested`. `more`: types, SMOOTHED, CAPPED, and SKIPS_EXCLUDED (whether no statistics of excluded rows are
    needed). The kernel is that for the largest of `LIMITS` that its pipeline `allows`.
    """
    flags = {name: array is not None for name, array in arguments.items()} | {
        name: name in requested for name in OUTPUTS
    }
    template = more | {name.upper(): flag for name, flag in flags.items()}
    for limit in LIMITS:
        threads, held = threads_and_held(arguments["logits"].shape[1], arguments["logits"].itemsize, limit)
        template["HELD"] = 4 if template["KNOWN"] else held if template["GRAD"] else 1
        if allows(template, limit):
            RAN.add(f"{'backward' if template['KNOWN'] else 'forward'} with {limit} threads")
            return template, threads
    raise KernelError(f"its pipeline allows fewer than {LIMITS[-1]} threads a threadgroup")


def threads_and_held(vocabulary: int, itemsize: int, limit: int = LIMITS[0]) -> tuple[int, int]:
    """Return (number of threads per row, at most `limit`; number of 16-byte packs that each keeps in registers)."""
    packs = max(vocabulary * itemsize // _PACK, 1)
    threads = min(-(-packs // _SIMD_WIDTH) * _SIMD_WIDTH, limit)
    held = 1
    while held < _MOST_HELD and held * threads < packs:
        held *= 2
    return threads, held


def row_sizes(itemsize: int) -> dict[str, int]:
    """Return vocabulary sizes that reach every loop of the kernels with unaligned rows: {reason: size}."""
    width, most = _PACK // itemsize, LIMITS[0]
    held = {f"{packs} packs a thread": packs * most * width - 1 for packs in (2, 4, 8)}
    return {
        "less than a pack": width - 1,
        "several SIMD-groups": 3 * _SIMD_WIDTH * width + 3,
        f"{most} threads": most * width,
        **held,
        "beyond registers": 13 * most * width + 5,
        "a loop beyond registers": 21 * most * width + width + 1,
    }


@cache
def mlx_kernel() -> Any:
    """Return the kernel, to be launched by MLX, whose arrays are contiguous."""
    import mlx.core as mx

    return mx.fast.metal_kernel(
        name="xent_rows",
        input_names=list(INPUTS),
        output_names=list(OUTPUTS),
        header=_headers(),
        source=_ROW.format("logits_shape[1]", "V", "V", "false") + _read("rows"),
    )


def library(constants: Template) -> str:
    """Return a complete source for PyTorch, ASCII only, with the kernel xent_rows for these template arguments.

    Rows of logits and gradient have strides, and the gradient may overwrite the logits.
    """
    buffers = [f"const device {kind}* {name}" for name, kind in INPUTS.items()]
    buffers += [f"device {kind}* {name}" for name, kind in OUTPUTS.items()]
    buffers += [f"constant long& {name}" for name in _SIZES]
    parameters = [f"{buffer} [[buffer({place})]]" for place, buffer in enumerate(buffers)]
    parameters += [f"{kind} {name} [[{name}]]" for name, kind in _POSITIONS.items()]
    kinds = [f"{'typename' if isinstance(value, str) else type(value).__name__} {n}" for n, value in constants.items()]
    arguments = ", ".join(value if isinstance(value, str) else str(int(value)) for value in constants.values())
    instance = f"rows<{arguments}>"
    return "\n".join(
        [
            "#include <metal_stdlib>",
            "using namespace metal;",
            _headers(),
            f"template <{', '.join(kinds)}>",
            "[[kernel, max_total_threads_per_threadgroup(512)]] void rows(",
            ",\n".join(parameters) + ") {",
            _ROW.format(*_SIZES, "true"),
            _read("rows"),
            "}",
            f'template [[host_name("xent_rows")]] [[kernel]] decltype({instance}) {instance};',
        ]
    )


def _headers() -> str:
    return "\n".join(_read(header) for header in ("maths", "sums", "loss", "gradient"))


def _read(name: str) -> str:
    return (Path(__file__).parent / f"{name}.metal").read_text(encoding="utf-8")
