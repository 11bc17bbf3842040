"""`Call`: the one description of a call, from the public function to the loop of a framework; and of its arrays.

A public function validates its arguments and makes one `Call`. A driver flattens it to rows (`prepare`), which gives a
`Call` again: a prepared call. A new option is one field here. Where a record is unpacked, mypy names the line.
"""

import reprlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from xent.core.spec import Array, Scalar, bounded

__all__ = [
    "FLOAT_DTYPES",
    "INTEGER_DTYPES",
    "Activation",
    "Allowed",
    "ArraySlot",
    "Call",
    "Classes",
    "Dense",
    "Given",
    "GroupSlot",
    "Largest",
    "NumberSlot",
    "Options",
    "Probabilities",
    "Product",
    "QuantizedSlot",
    "Shards",
    "Source",
    "Target",
    "TopK",
    "array_of",
    "describe",
    "differs",
    "dtype_name",
    "fields_of",
    "framework_of",
    "gathered",
    "replaced",
    "shown",
    "tolerance",
    "vocabulary_of",
    "without_temperature",
]

FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")
INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32")
_TOLERANCES = {"bfloat16": 2e-2, "float16": 4e-3}


class Given(NamedTuple):
    """Logits in memory, (..., V) with the classes on `axis` (>= 0; in a prepared call the last axis)."""

    logits: Array
    axis: int
    inplace: bool = False
    """Whether the gradient may overwrite them."""


class Product(NamedTuple):
    """Logits input @ weight.T + bias: (..., D), (V, D) and (V,) or None."""

    input: Array
    weight: Array
    """An array, for MLX a `xent.QuantizedWeight`, or for PyTorch a `xent.QuantizedRows`."""
    bias: Array = None
    workspace: int | None = None
    """Bytes that the logits alive at one time may take; None for the device's default."""
    dtype: str | None = None
    """Name of the dtype of the matrix products, such as "bfloat16"; only in a prepared call (autocast selects it)."""


Source = Given | Product


class Classes(NamedTuple):
    """Target classes, integers with the shape of the rows; (N,) in a prepared call."""

    ids: Array


class Allowed(NamedTuple):
    """Target classes, and the classes that a sampler allowed: row i has ``classes[offsets[i]:offsets[i + 1]]``."""

    ids: Array
    classes: Array
    """(M,) integers."""
    offsets: Array
    """(N + 1,) integers of `xent.Support`."""
    begin: Array = None
    """(N,) integers, only in a prepared call, like `end`: row i has ``classes[begin[i]:end[i]]``."""
    end: Array = None
    broken: Array = None
    """0-d bool tensor: whether the offsets are invalid. None if their values have been checked."""


class Probabilities(NamedTuple):
    """Class probabilities, with the shape of the logits; (..., V) in a prepared call, with the same leading axes."""

    probs: Array
    order: Array = None
    """(N,) int64, only in a prepared call: the row of `probs` that each row has, -1 for a row without a target.
    None if row i has row i."""


class Activation(NamedTuple):
    """x = softcap * tanh(logit_scale * z / softcap) / temperature."""

    logit_scale: Scalar = 1.0
    """A number or a 0-d array, like `softcap`."""
    softcap: Scalar = None
    temperature: Scalar = None
    """None for 1; a number, which `without_temperature` moves into the other two; or one per row, 0-d or with the
    target's shape, (N,) in a prepared call."""


class Dense(NamedTuple):
    """A teacher whose logits of all V classes are given or computed. Its activation contains the temperature."""

    source: Source
    activation: Activation = Activation()
    ids: Array = None
    """(V',) integers: the teacher's classes that the student has, in its order. None for all; in a prepared call None,
    and the source has these classes only."""


class TopK(NamedTuple):
    """A teacher known at K classes: ids and log-probabilities (..., K), (N, K) in a prepared call; -inf pads."""

    ids: Array
    log_probs: Array
    tail: str = "bucket"


class Largest(NamedTuple):
    """No target: the k most probable classes of each row are the result."""

    k: int


Target = Classes | Allowed | Probabilities | Dense | TopK | Largest


class Options(NamedTuple):
    """What a row's loss is made of, and what is returned. Numbers may be 0-d arrays."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: Scalar = 0.0
    z_loss: Scalar = 0.0
    weight: Array = None
    """(V,), of a shard its own classes."""
    sample_weight: Array = None
    """The target's shape; (N,) in a prepared call."""
    normalizer: Scalar = None
    stats: tuple[str, ...] = ()
    """In the order of `xent.core.spec.STAT_NAMES`, then "rank", of log-probabilities: the number of larger logits."""
    exact: bool = False
    """Whether logits that the call computes must be float32 or float64, for every input dtype."""
    is_log_probs: bool = False
    """Whether the call is for log-probabilities: losses to negate in the end, and an accuracy per row, 1 or 0."""
    kind: str = "kl"
    """Of a divergence: "kl", with `beta`, or "tv"."""
    beta: Scalar = 0.0
    shift: int | tuple[int, ...] = 0
    """Row t has the target t + shift; a tuple has one shift per head. 0 in a prepared call."""
    heads: int | None = None
    """The number of heads; the rows of a prepared call are head after head. None for one without an axis of heads."""
    head_weight: Array | tuple[Scalar, ...] = None
    """The factor of each head's reduced loss, H numbers or a tensor (H,); None for 1 each."""


class Shards(NamedTuple):
    """The part of a vocabulary in shards that this rank has: the classes [first, first + its rows) of `size`."""

    group: Any
    """A process group, or in a custom operation its name."""
    first: int | None
    size: int | None
    axis: int | None = None
    """The axis of the hidden states along which tokens are split; None if every rank has all tokens."""
    reduces: bool = True
    """Whether the call sums the gradient of the hidden states over ranks."""
    exchanges: bool = False
    """Whether ranks exchange their ranges and rows although `first` and `size` are known."""


class Call(NamedTuple):
    """A validated call."""

    source: Source
    target: Target
    activation: Activation = Activation()
    options: Options = Options()
    shards: Shards | None = None


def without_temperature(call: Call) -> Call:
    """Return the call with the one temperature of all rows in scale and softcap. No 16-bit dtype rounds these.

    k tanh(s z / k) / T = k' tanh(s' z / k') with k' = k / T and s' = s / T.
    """
    temperature, target = call.activation.temperature, call.target
    if temperature is None or not (isinstance(temperature, (int, float)) or isinstance(target, (Dense, TopK, Largest))):
        return call
    if isinstance(target, Dense):
        target = replaced(target, activation=_without_temperature(target.activation))
    return replaced(call, target=target, activation=_without_temperature(call.activation))


def _without_temperature(activation: Activation) -> Activation:
    scale, softcap, temperature = activation
    return Activation(_wide(scale) / temperature, None if softcap is None else bounded(_wide(softcap) / temperature))


def _wide(value: Scalar) -> Scalar:
    """Convert a 0-d array to float64, on mps and for MLX to float32 if it is not float64; return numbers unchanged."""
    framework = framework_of(value)
    if framework == "torch":
        import torch

        return value.to(torch.float32 if value.device.type == "mps" else torch.float64)
    if framework == "mlx":
        import mlx.core as mx

        return value if value.dtype == mx.float64 else value.astype(mx.float32)
    return value


def array_of(call: Call) -> Array:
    """Return the array whose framework and device are those of the call."""
    return call.source.logits if isinstance(call.source, Given) else call.source.input


@dataclass(frozen=True, slots=True)
class ArraySlot:
    """Stands for a tensor in the description of a PyTorch call: what decides how the call runs, without values.

    Calls are described and checked with slots (`xent.core.signature`), so it has what these read of a tensor.
    """

    place: int
    """Its place among the operands of the call."""
    shape: tuple[Any, ...]
    """None for the size of an axis of rows."""
    rows: tuple[int, ...]
    """The axes of rows."""
    dtype: Any
    device: Any
    requires_grad: bool
    is_dense: bool
    """Whether it is contiguous."""

    is_nested: ClassVar[bool] = False
    layout: ClassVar[str] = "torch.strided"

    def dim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    def is_contiguous(self) -> bool:
        """Return whether it is contiguous."""
        return self.is_dense

    def without_rows(self) -> "ArraySlot":
        """Return it without the sizes of axes of rows."""
        return replace(self, shape=tuple([None if axis in self.rows else n for axis, n in enumerate(self.shape)]))


@dataclass(frozen=True, slots=True)
class NumberSlot:
    """Stands for the number of an option."""

    place: int
    bucket: str
    """What decides how the call runs: "neutral" for a number without effect, else "given"; or the kind of a beta."""


@dataclass(frozen=True, slots=True)
class GroupSlot:
    """Stands for a process group."""

    place: int


@dataclass(frozen=True, slots=True)
class QuantizedSlot:
    """Stands for a `xent.QuantizedRows`."""

    place: int
    shape: tuple[int, int]


def differs(number: Scalar, neutral: float) -> bool:
    """Return whether an option is not known to have its neutral value; that of an array is not known."""
    if isinstance(number, NumberSlot):
        return number.bucket != "neutral"
    return not isinstance(number, (int, float)) or number != neutral


_Record = TypeVar("_Record", bound=tuple[Any, ...])


def fields_of(record: tuple[Any, ...]) -> dict[str, Any]:
    """Return the fields of a NamedTuple by name: `_asdict`, which Dynamo of PyTorch 2.8 does not trace."""
    kind: Any = type(record)
    return dict(zip(kind._fields, record, strict=True))


def replaced(record: _Record, **fields: Any) -> _Record:
    """Return a NamedTuple with other values in some fields: `_replace`, which Dynamo of PyTorch 2.8 does not trace."""
    kind: Any = type(record)
    changed: _Record = kind(**dict(zip(kind._fields, record, strict=True)) | fields)
    return changed


def vocabulary_of(source: Source) -> int:
    """Return the number of classes that a source has here: V, or those of a shard with its padding."""
    size: int = source.logits.shape[source.axis] if isinstance(source, Given) else source.weight.shape[0]
    return size


def gathered(source: Source, ids: Array) -> Source:
    """Return the logits of these classes: columns of stored ones, or rows of the classifier."""
    if isinstance(source, Given):
        return replaced(source, logits=source.logits[(slice(None),) * source.axis + (ids,)])
    bias = None if source.bias is None else source.bias[ids]
    return replaced(source, weight=source.weight[ids], bias=bias)


def framework_of(value: object) -> str | None:
    """Return "torch", "mlx" or "numpy", or None if `value` is no array of these frameworks.

    The framework is not looked up in sys.modules: torch.compile would then recompile whenever a module is imported.
    """
    if value is None or isinstance(value, (int, float)):
        return None
    if isinstance(value, np.ndarray):
        return "numpy"
    if hasattr(value, "requires_grad"):
        try:
            import torch
        except ImportError:
            return None
        if isinstance(value, torch.Tensor):
            return "torch"
        return "torch" if isinstance(value, ArraySlot) else None
    if any((base.__module__, base.__name__) == ("mlx.core", "array") for base in type(value).__mro__):
        return "mlx"
    return None


def dtype_name(array: Array) -> str:
    """Return the name of the dtype without its framework: "float32", "bfloat16", "int64"."""
    return str(array.dtype).rpartition(".")[2]


def tolerance(teacher: TopK) -> float:
    """Return how far rounding may raise the sum of a teacher's probabilities above 1."""
    return _TOLERANCES.get(dtype_name(teacher.log_probs), 1e-4)


def describe(value: Any) -> str:
    """Describe a value for an error message: shape, dtype and framework of an array, or the type of anything else."""
    framework = framework_of(value)
    if framework is None:
        return "None" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"
    return f"{framework} array of shape {tuple(value.shape)}, dtype {dtype_name(value)}"


def shown(value: object) -> str:
    """Return a value as it is written in Python, abbreviated if it is long; an array is described."""
    return reprlib.repr(value) if framework_of(value) is None else describe(value)
