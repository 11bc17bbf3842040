"""Teachers whose distribution a student is compared with, and one call of a divergence, described once.

A distribution comes from logits that exist (`StoredLogits`), from a classifier (`LinearLogits`), or, for a teacher,
from its most probable classes (`TopKTeacher`). The first two are the same for both sides; a temperature is folded into
them.
"""

from dataclasses import dataclass
from typing import Any

__all__ = ["TAILS", "DivergenceCall", "LinearLogits", "LinearTeacher", "StoredLogits", "TopKTeacher", "mass_tolerance"]

TAILS = ("bucket", "renormalize", "drop")
_TOLERANCES = {"bfloat16": 2e-2, "float16": 4e-3}


@dataclass(frozen=True, eq=False)
class LinearTeacher:
    """A teacher given as hidden states and a classifier: its logits never exist all at once. It gets no gradient.

    Its logits are ``input @ weight.T + bias``, then scaled and capped as the student's are, and divided by the same
    temperature. Its width may differ from the student's, its vocabulary may not.

    Parameters
    ----------
    input : array (..., D'); float64, float32, bfloat16 or float16
        Hidden states, one for each row of the student.
    weight : array (V, D'), the dtype of input; or QuantizedWeight
        The teacher's classifier. For MLX also a quantized one.
    bias : array (V,), the dtype of input, optional
        Bias of the classifier.
    softcap : float > 0, optional
        Bound of the teacher's logits, as in `xent.cross_entropy`.
    logit_scale : float
        Factor of the teacher's logits.

    Examples
    --------
    >>> import numpy as np, xent
    >>> teacher = xent.LinearTeacher(np.eye(3), 2 * np.eye(3))
    >>> float(xent.divergence(np.zeros((3, 3)), teacher).round(4))
    0.433
    """

    input: Any
    weight: Any
    bias: Any = None
    softcap: float | None = None
    logit_scale: float = 1.0


@dataclass(frozen=True, eq=False)
class TopKTeacher:
    """A teacher known at K classes of each row: what is stored of a large model's predictions. It gets no gradient.

    With q_k = exp(log_probs_k) and t = 1 - sum_k q_k, the mass that is left, ``tail`` says what becomes of t:

    - "bucket": the classes left are one cell of two distributions over K + 1 cells. The divergence is at least 0, and 0
      only where the student has the teacher's probabilities at the K classes.
    - "renormalize": q_k / sum_k q_k takes the place of q_k: all other classes have teacher probability 0.
    - "drop": sum_k q_k (log q_k - log p_k), in which t is left out. This is no divergence: it may be negative, and is
      not smallest where student and teacher agree.

    Parameters
    ----------
    ids : integer array (..., K)
        Classes in [0, V), in any order, each at most once in a row.
    log_probs : float array (..., K)
        Their log-probabilities over the whole vocabulary, at the temperature of the call. An entry of -inf stands for
        no class, and its id is not used: so rows with fewer than K classes are padded.
    tail : {"bucket", "renormalize", "drop"}
        What becomes of the mass that is left.

    Examples
    --------
    >>> import numpy as np, xent
    >>> teacher = xent.TopKTeacher(ids=np.array([[2, 0]]), log_probs=np.log([[0.7, 0.2]]))
    >>> float(xent.divergence(np.log([[0.2, 0.1, 0.7]]), teacher).round(4))
    0.0
    """

    ids: Any
    log_probs: Any
    tail: str = "bucket"


@dataclass(frozen=True, eq=False)
class StoredLogits:
    """Logits that exist; the classes are on the call's `axis`."""

    logits: Any
    softcap: float | None
    logit_scale: float


@dataclass(frozen=True, eq=False)
class LinearLogits:
    """Logits (..., V) of hidden states and a classifier."""

    input: Any
    weight: Any
    bias: Any
    softcap: float | None
    logit_scale: float


@dataclass(frozen=True, eq=False)
class DivergenceCall:
    """A validated call. `rows` is the shape of a per-row loss; `normalizer` is a number, a 0-d array or None.

    `temperature` is in `softcap` and `logit_scale` of both sides already, and in the log-probabilities of a
    `TopKTeacher`. `workspace` is in bytes.
    """

    student: StoredLogits | LinearLogits
    teacher: StoredLogits | LinearLogits | TopKTeacher
    sample_weight: Any
    normalizer: Any
    beta: float
    reduction: str
    rows: tuple[int, ...]
    vocabulary: int
    temperature: float = 1.0
    axis: int = -1
    workspace: int | None = None
    stats: tuple[str, ...] = ()

    @property
    def array(self) -> Any:
        """The student's first array, whose framework and device are the call's."""
        return self.student.logits if isinstance(self.student, StoredLogits) else self.student.input


def mass_tolerance(dtype: str) -> float:
    """Return by how much rounding may lift the sum of probabilities whose logarithms have that dtype above 1."""
    return _TOLERANCES.get(dtype, 1e-4)
