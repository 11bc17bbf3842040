"""What both launchers share: the Metal sources, threads of a row, the error of a kernel, and the gradient checks.

Kernel bodies get the signatures that MLX generates, or ours for PyTorch.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "FORWARD_OUTPUTS",
    "LIMITS",
    "KernelError",
    "backward_kernel",
    "checked_by",
    "fitting",
    "forward_kernel",
    "library",
    "row_sizes",
    "threads_and_held",
    "warn_once",
]

FORWARD_OUTPUTS = ("loss", "norm", "nll", "entropy", "predictions", "log_sum_sq_probs", "mean_logit", "grad")
_INPUTS = (
    "logits",
    "numbers",
    "target",
    "target_logits",
    "probabilities",
    "class_weight",
    "bend",
    "weight",
    "scale",
    "dead",
)
_HEADERS = ("maths", "sums", "loss", "gradient")
# Offsets of a row in MLX's arrays, which are contiguous. signature.metal has those for PyTorch.
_CONTIGUOUS = """
uint V = static_cast<uint>(logits_shape[1]);
uint row = threadgroup_position_in_grid.y;
size_t start = static_cast<size_t>(row) * V;
size_t grad_start = start;
size_t probabilities_start = start;
size_t norm_start = 2 * static_cast<size_t>(row);
size_t norm_part = 1;
size_t bend_start = 2 * static_cast<size_t>(row);
constexpr bool IN_PLACE = false;
"""
_Kernel = Callable[..., list[Any]]
_Made = TypeVar("_Made")
_SIMD_WIDTH = 32
_PACK = 16  # bytes that a thread loads at one time
_MOST_HELD = 8

LIMITS = (512, 256, 128, 64, 32)
"""The possible numbers of threads of a threadgroup, largest first.

With 512 threads, each has about 100 registers, up to 32 of them for logits. A kernel with more registers has a lower
limit.
"""
_warned: set[str] = set()


class KernelError(RuntimeError):
    """A kernel cannot run on this GPU with any number of threads; the message is the compiler's or the driver's."""


def warn_once(error: KernelError, framework: str) -> None:
    """Warn once that the framework's own operations replace a kernel that cannot run on this GPU, and why."""
    message = (
        f"a Metal kernel of xent does not run on this GPU, and {framework}'s operations take its place: {error}. "
        "Results stay correct; please report this with the output of python -m xent"
    )
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def fitting(made_within: Callable[[int], _Made], allows: Callable[[_Made, int], bool]) -> tuple[_Made, int]:
    """Return what is made for the largest limit of threads that its pipeline allows, and that limit."""
    for limit in LIMITS:
        made = made_within(limit)
        if allows(made, limit):
            return made, limit
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
def forward_kernel() -> _Kernel:
    """Return the kernel of forward.metal, to be launched by MLX."""
    return _mlx_kernel("forward", _INPUTS, FORWARD_OUTPUTS)


@cache
def backward_kernel() -> _Kernel:
    """Return the kernel of backward.metal, to be launched by MLX."""
    return _mlx_kernel("backward", (*_INPUTS, "norm", "upstream"), ("grad",))


def _mlx_kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> _Kernel:
    import mlx.core as mx

    made: Any = mx.fast.metal_kernel(
        name=f"xent_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        header=_headers(),
        source=f"{_CONTIGUOUS}\n{_read(name)}",
    )
    kernel: _Kernel = made
    return kernel


def library(name: str, arguments: Sequence[str]) -> str:
    """Return a complete source, ASCII only, with the kernel "forward" or "backward" for these template arguments.

    Its name in the library is xent_forward or xent_backward.
    """
    instance, place = f"{name}_rows<{', '.join(arguments)}>", count()
    buffers = re.compile(r"^    ((?:const )?(?:device|constant) .*),$", re.MULTILINE)
    signature = buffers.sub(lambda line: f"    {line[1]} [[buffer({next(place)})]],", _read("signature"))
    return "\n".join(
        [
            "#include <metal_stdlib>",
            "using namespace metal;",
            _headers(),
            signature.replace("NAME", name),
            _read(name),
            "}",
            f'template [[host_name("xent_{name}")]] [[kernel]] decltype({instance}) {instance};',
        ]
    )


def _headers() -> str:
    return "\n".join(_read(header) for header in _HEADERS)


def _read(name: str) -> str:
    return (Path(__file__).parent / f"{name}.metal").read_text(encoding="utf-8")


def checked_by(harness: Any, ran: Callable[[], set[str]]) -> Any:
    """Return the harness of a framework for these kernels: without float64, and with rows that reach every loop.

    `ran` returns the names of the kernels that have run, with the largest number of threads that each allows.
    """

    @contextmanager
    def watched() -> Iterator[set[str]]:
        seen: set[str] = set()
        yield seen
        seen.update(ran())

    harness.dtypes = tuple(dtype for dtype in harness.dtypes if dtype != "float64")
    harness.kernels, harness.seconds = ("forward", "backward"), 0.3
    harness.watched, harness.sizes = watched, lambda dtype: row_sizes(4 if dtype == "float32" else 2)
    return harness
