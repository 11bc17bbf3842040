"""The public teacher classes, and the tolerance of a top-k teacher's mass."""

from dataclasses import dataclass
from typing import Any

__all__ = ["TAILS", "LinearTeacher", "Subset", "TopKTeacher", "mass_tolerance"]

TAILS = ("bucket", "renormalize", "drop")
_TOLERANCES = {"bfloat16": 2e-2, "float16": 4e-3}


@dataclass(frozen=True, eq=False)
class LinearTeacher:
    """A teacher given as hidden states and a classifier. Its logits are not stored, and it gets no gradient.

    Its logits are ``input @ weight.T + bias``, followed by its own scale and softcap, and by the temperature of the
    call. Its width D' may differ from the student's; its vocabulary may only in a `Subset`.

    Parameters
    ----------
    input : array (..., D'); float64, float32, bfloat16 or float16
        Hidden states, one for each row of the student.
    weight : array (V, D'), the dtype of input; or QuantizedWeight
        The teacher's classifier. For MLX it may be quantized.
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
    """A teacher given as its K most probable classes per row, as stored predictions are. It gets no gradient.

    Let q_k = exp(log_probs_k) be the teacher's probabilities, p_k the student's, and t = 1 - sum_k q_k the teacher's
    mass on the other classes. ``tail`` selects how t is treated:

    - "bucket": all other classes form one bucket, so that both distributions have K + 1 cells. The divergence is at
      least 0, and 0 only if the student has the teacher's probabilities at the K classes.
    - "renormalize": q_k / sum_k q_k replaces q_k; all other classes have teacher probability 0.
    - "drop": sum_k q_k (log q_k - log p_k), without a term for t. This is not a divergence: it may be negative, and its
      minimum is not where student and teacher agree.

    Parameters
    ----------
    ids : integer array (..., K)
        Classes in [0, V), in any order, each at most once in a row.
    log_probs : float array (..., K)
        Their log-probabilities over the whole vocabulary, at the temperature of the call. To pad rows with fewer than K
        classes, use -inf; the id of such an entry is ignored.
    tail : {"bucket", "renormalize", "drop"}
        How the mass on the other classes is treated.

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
class Subset:
    """A teacher with a larger vocabulary, restricted to the student's classes: for a draft model with fewer classes.

    Class c of the student is class ``ids[c]`` of the teacher. The teacher's probabilities are renormalised over these
    classes, q_c = e^(t_ids[c]) / sum_k e^(t_ids[k]). Logits of other classes are not computed: each call gathers the
    rows ``ids`` of the classifier once (V' x D' elements).

    Parameters
    ----------
    teacher : LinearTeacher or array (..., V)
        The teacher with all V classes.
    ids : integer array (V',)
        The classes in [0, V) that the student has, in the student's order, each once.

    Examples
    --------
    >>> import numpy as np, xent
    >>> teacher = xent.LinearTeacher(np.eye(3), np.array([[2.0, 0, 0], [0, 9, 9], [0, 0, 2], [5, 5, 5]]))
    >>> float(xent.divergence(np.zeros((3, 2)), xent.Subset(teacher, np.array([2, 0]))).round(4))
    0.2185
    """

    teacher: Any
    ids: Any


def mass_tolerance(dtype: str) -> float:
    """Return how far the sum of probabilities may exceed 1 by rounding, for log-probabilities of that dtype."""
    return _TOLERANCES.get(dtype, 1e-4)
