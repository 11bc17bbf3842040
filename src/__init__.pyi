"""The types of the public functions, for type checkers; their texts stand with the functions.

An array is anything with a shape and a dtype: tensors and arrays of PyTorch, MLX and NumPy. Results have the type of
the first array. A test compares the names of the arguments with the
functions.
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol, TypedDict, TypeVar, overload

from typing_extensions import Unpack

from xent.core.spec import (
    BackendError,
    BackendInfo,
    LinearTeacher,
    QuantizedRows,
    QuantizedWeight,
    Stats,
    Subset,
    Support,
    TopKTeacher,
    VocabParallel,
)

__version__: str

__all__ = [
    "BackendError",
    "BackendInfo",
    "LinearTeacher",
    "QuantizedRows",
    "QuantizedWeight",
    "Stats",
    "Subset",
    "Support",
    "TopKTeacher",
    "VocabParallel",
    "__version__",
    "backends",
    "cross_entropy",
    "divergence",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "linear_top_k",
    "log_probs",
    "top_k",
]

class _Array(Protocol):
    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...

_A = TypeVar("_A", bound=_Array)
_Number = float | _Array

class _Shared(TypedDict, total=False):
    softcap: _Number | None
    logit_scale: _Number
    vocab_parallel: Any
    backend: str

class _OfLogits(TypedDict, total=False):
    axis: int

class _OfLinear(TypedDict, total=False):
    linear_bias: _Array | None
    workspace: int | None

class _Weighted(_Shared, total=False):
    reduction: str
    sample_weight: _Array | None
    normalizer: _Number | None

class _Loss(_Weighted, total=False):
    weight: _Array | None
    ignore_index: int
    label_smoothing: _Number
    z_loss: _Number

class _LogitsLoss(_Loss, _OfLogits, total=False):
    inplace: bool

class _LinearLoss(_Loss, _OfLinear, total=False):
    shift: int | Sequence[int]
    head_weight: Sequence[float] | None

class _LogProbs(_Shared, total=False):
    temperature: _Number
    ignore_index: int
    support: Support | None

class _LogitsLogProbs(_LogProbs, _OfLogits, total=False): ...

class _LinearLogProbs(_LogProbs, _OfLinear, total=False):
    shift: int

class _TopK(_Shared, total=False):
    temperature: float

class _LogitsTopK(_TopK, _OfLogits, total=False): ...
class _LinearTopK(_TopK, _OfLinear, total=False): ...

class _Divergence(_Weighted, total=False):
    kind: str
    beta: float
    temperature: float

class _LogitsDivergence(_Divergence, _OfLogits, total=False): ...

class _LinearDivergence(_Divergence, _OfLinear, total=False):
    shift: int

def backends() -> list[BackendInfo]: ...
def top_k(logits: _Array, k: int, **options: Unpack[_LogitsTopK]) -> TopKTeacher: ...
def linear_top_k(
    input: _Array, linear_weight: _Array | QuantizedWeight | QuantizedRows, k: int, **options: Unpack[_LinearTopK]
) -> TopKTeacher: ...
@overload
def cross_entropy(logits: _A, target: _Array, *, stats: tuple[()] = (), **options: Unpack[_LogitsLoss]) -> _A: ...  # type: ignore[overload-overlap]
@overload
def cross_entropy(
    logits: _A, target: _Array, *, stats: Collection[str], **options: Unpack[_LogitsLoss]
) -> tuple[_A, Stats]: ...
@overload
def linear_cross_entropy(  # type: ignore[overload-overlap]
    input: _A,
    linear_weight: _Array | QuantizedWeight | QuantizedRows,
    target: _Array,
    *,
    stats: tuple[()] = (),
    **options: Unpack[_LinearLoss],
) -> _A: ...
@overload
def linear_cross_entropy(
    input: _A,
    linear_weight: _Array | QuantizedWeight | QuantizedRows,
    target: _Array,
    *,
    stats: Collection[str],
    **options: Unpack[_LinearLoss],
) -> tuple[_A, Stats]: ...
@overload
def log_probs(  # type: ignore[overload-overlap]
    logits: _A,
    target: _Array,
    *,
    entropy: Literal[False] = False,
    stats: tuple[()] = (),
    **options: Unpack[_LogitsLogProbs],
) -> _A: ...
@overload
def log_probs(  # type: ignore[overload-overlap]
    logits: _A, target: _Array, *, entropy: Literal[True], stats: tuple[()] = (), **options: Unpack[_LogitsLogProbs]
) -> tuple[_A, _A]: ...
@overload
def log_probs(
    logits: _A,
    target: _Array,
    *,
    entropy: Literal[False] = False,
    stats: Collection[str],
    **options: Unpack[_LogitsLogProbs],
) -> tuple[_A, Stats]: ...
@overload
def log_probs(
    logits: _A, target: _Array, *, entropy: Literal[True], stats: Collection[str], **options: Unpack[_LogitsLogProbs]
) -> tuple[_A, _A, Stats]: ...
@overload
def log_probs(
    logits: _Array, target: _Array, *, entropy: bool, stats: Collection[str] = (), **options: Unpack[_LogitsLogProbs]
) -> Any: ...
@overload
def linear_log_probs(  # type: ignore[overload-overlap]
    input: _A,
    linear_weight: _Array | QuantizedWeight | QuantizedRows,
    target: _Array,
    *,
    entropy: Literal[False] = False,
    stats: tuple[()] = (),
    **options: Unpack[_LinearLogProbs],
) -> _A: ...
@overload
def linear_log_probs(  # type: ignore[overload-overlap]
    input: _A,
    linear_weight: _Array | QuantizedWeight | QuantizedRows,
    target: _Array,
    *,
    entropy: Literal[True],
    stats: tuple[()] = (),
    **options: Unpack[_LinearLogProbs],
) -> tuple[_A, _A]: ...
@overload
def linear_log_probs(
    input: _A,
    linear_weight: _Array | QuantizedWeight | QuantizedRows,
    target: _Array,
    *,
    entropy: Literal[False] = False,
    stats: Collection[str],
    **options: Unpack[_LinearLogProbs],
) -> tuple[_A, Stats]: ...
@overload
def linear_log_probs(
    input: _A,
    linear_weight: _Array | QuantizedWeight | QuantizedRows,
    target: _Array,
    *,
    entropy: Literal[True],
    stats: Collection[str],
    **options: Unpack[_LinearLogProbs],
) -> tuple[_A, _A, Stats]: ...
@overload
def linear_log_probs(
    input: _Array,
    linear_weight: _Array | QuantizedWeight | QuantizedRows,
    target: _Array,
    *,
    entropy: bool,
    stats: Collection[str] = (),
    **options: Unpack[_LinearLogProbs],
) -> Any: ...
@overload
def divergence(  # type: ignore[overload-overlap]
    logits: _A,
    teacher: _Array | LinearTeacher | Subset | TopKTeacher,
    *,
    stats: tuple[()] = (),
    **options: Unpack[_LogitsDivergence],
) -> _A: ...
@overload
def divergence(
    logits: _A,
    teacher: _Array | LinearTeacher | Subset | TopKTeacher,
    *,
    stats: Collection[str],
    **options: Unpack[_LogitsDivergence],
) -> tuple[_A, Stats]: ...
@overload
def linear_divergence(  # type: ignore[overload-overlap]
    input: _A,
    linear_weight: _Array | QuantizedWeight | QuantizedRows,
    teacher: _Array | LinearTeacher | Subset | TopKTeacher,
    *,
    stats: tuple[()] = (),
    **options: Unpack[_LinearDivergence],
) -> _A: ...
@overload
def linear_divergence(
    input: _A,
    linear_weight: _Array | QuantizedWeight | QuantizedRows,
    teacher: _Array | LinearTeacher | Subset | TopKTeacher,
    *,
    stats: Collection[str],
    **options: Unpack[_LinearDivergence],
) -> tuple[_A, Stats]: ...
