"""The public functions for the divergence of a student from a teacher."""

from collections.abc import Collection
from typing import Any

from xent.core.describe_divergence import divergence_call, linear_divergence_call
from xent.core.dispatch import evaluate

__all__ = ["divergence", "linear_divergence"]


def divergence(
    logits: Any,
    teacher: Any,
    *,
    kind: str = "kl",
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    sample_weight: Any = None,
    normalizer: Any = None,
    axis: int = -1,
    stats: Collection[str] = (),
    vocab_parallel: Any = None,
    backend: str = "auto",
) -> Any:
    """Compute the Kullback-Leibler or Jensen-Shannon divergence, or the total variation, of a student from a teacher.

    With default options and logits (N, V) this equals ``F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1),
    reduction="batchmean", log_target=True)``. With reduction "mean" and "sum" the same pass computes the gradient, and
    the backward pass multiplies it by the upstream gradient. With "none", and for float16 logits in PyTorch, the
    backward pass computes the gradient from the logits.

    The student's distribution p and the teacher's q are softmax(act(z) / T) of their logits z. T is the temperature.
    act(z) is k tanh(s z / k) with a softcap k, and s z without; each side has its own k and scale s::

        beta = 0       l = KL(q || p) = sum_c q_c (log q_c - log p_c)             dl/dx_c = p_c - q_c
        beta = 1       l = KL(p || q) = sum_c p_c (log p_c - log q_c)             dl/dx_c = p_c (log p_c - log q_c - l)
        between        m = (1 - beta) p + beta q
                       l = beta KL(q || m) + (1 - beta) KL(p || m)
                       dl/dx_c = (1 - beta) p_c (log p_c - log m_c - KL(p || m))
        kind "tv"      l = 1/2 sum_c |p_c - q_c|
                       dl/dx_c = 1/2 p_c (s_c - sum_k p_k s_k), s = sign(p - q)

    "none" returns a_i l_i with a = sample_weight, "sum" returns sum_i a_i l_i, and "mean" divides that sum by
    ``normalizer``, by default by sum_i a_i. If the divisor is 0, the mean is 0. The result is not multiplied by T^2;
    multiply it if the size of the gradient should not depend on the temperature.

    The sum over classes is computed from terms q (e^u - 1 - u) with u = log p - log q, which have the same sum. No term
    is negative, so nothing cancels if the distributions are close, and the result is exactly 0 if they are equal.

    Parameters
    ----------
    logits : array (..., V); float64, float32, bfloat16 or float16
        The student's unnormalised scores z. Any strides. Sums over V are accumulated in float32 (float64 for float64).
    teacher : array (..., V), LinearTeacher, TopKTeacher or Subset
        The teacher, which gets no gradient: its logits, with the shape of ``logits``, any float dtype, and scale and
        softcap already applied; or its hidden states and classifier; or its most probable classes (beta = 0 only), with
        log-probabilities at this temperature. A `Subset` restricts one of the first two to the student's classes.
    kind : {"kl", "tv"}
        "kl" for the divergences that ``beta`` selects; "tv" for the total variation, which is 1 minus the probability
        that speculative decoding accepts a token of the student. With a `TopKTeacher` the classes left are one class
        (tail "bucket"), or have no teacher probability ("renormalize").
    beta : float in [0, 1]
        With kind "kl": 0 for the forward divergence KL(q || p), 1 for the reverse one, 0.5 for the Jensen-Shannon
        divergence.
    temperature : float > 0
        Divides the logits of both sides after scale and softcap.
    softcap, logit_scale, axis
        Applied to the student's logits, as in `xent.cross_entropy`. Teacher logits have their classes on the same axis.
    reduction : {"mean", "sum", "none"}
        How the divergences of the rows are combined, see above.
    sample_weight : array (...), optional
        Weight a of each row; booleans are a mask. A row with weight 0 has exactly 0 loss and gradient, whatever values
        student and teacher have there. No gradient.
    normalizer : float >= 0 or 0-d array, optional
        The divisor of "mean", as in `xent.cross_entropy`. No gradient.
    stats : collection of str
        "entropy" is the only name: the student's -sum_c p_c log p_c in nats, one value per row, 0 for rows with weight
        0. No gradient.
    vocab_parallel : process group, DeviceMesh of one dimension, or VocabParallel, optional
        PyTorch only, as in `xent.cross_entropy`: the classes of student and teacher are in shards, cut alike. The
        ``ids`` of a `TopKTeacher` are those of all classes, the same on every rank. DTensors need no such argument;
        results are DTensors if the teacher's logits, hidden states or ids are.
    backend : str
        As in `xent.cross_entropy`.

    Returns
    -------
    loss : array
        0-d, or the shape of the rows with reduction "none"; float32, or float64 for float64 logits and for NumPy. If
        the teacher excludes a class (a logit of -inf) that the student does not, KL(p || q) is inf and its gradient is
        NaN.
    stats : Stats
        Returned only if ``stats`` names any: the result is then a tuple (loss, stats).

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape or range; the teacher has another vocabulary; a `TopKTeacher` is used
        with beta other than 0, or with kind "tv" and tail "drop"; ``beta`` is not 0 with kind "tv"; a `TopKTeacher` has
        a class twice in one row, or log-probabilities whose mass exceeds 1 by more than rounding; a `Subset` has a
        class twice. The last three are checked only for values on the CPU of PyTorch and NumPy, because a check on an
        accelerator would synchronise. Without it, loss and gradient of that row, with a `Subset` of all rows, are NaN.
        XENT_CHECK_TARGETS=1 turns the check on everywhere.
    IndexError
        An id of a `TopKTeacher` is outside [0, V), or one of a `Subset` is no class of its teacher, checked in the same
        cases.
    BackendError, RuntimeError, NotImplementedError
        As in `xent.cross_entropy`.

    References
    ----------
    Distillation: Hinton et al. 2015, arXiv:1503.02531. The generalised divergence: Agarwal et al. 2024,
    arXiv:2306.13649, section 2; the limits at beta 0 and 1 are the divergences themselves. Total variation and the
    acceptance of speculative decoding: Leviathan et al. 2023, arXiv:2211.17192, section 3.2.

    Examples
    --------
    >>> import numpy as np, xent
    >>> student, teacher = np.array([[2.0, 0.0, 0.0]]), np.array([[0.0, 1.0, 0.0]])
    >>> float(xent.divergence(student, teacher).round(4)), float(xent.divergence(student, student))
    (0.8403, 0.0)
    """
    return evaluate(
        divergence,
        divergence_call,
        backend,
        logits,
        teacher=teacher,
        axis=axis,
        sample_weight=sample_weight,
        normalizer=normalizer,
        kind=kind,
        beta=beta,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        reduction=reduction,
        stats=stats,
        vocab_parallel=vocab_parallel,
    )


def linear_divergence(
    input: Any,
    linear_weight: Any,
    teacher: Any,
    *,
    linear_bias: Any = None,
    kind: str = "kl",
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    sample_weight: Any = None,
    normalizer: Any = None,
    shift: int = 0,
    workspace: int | None = None,
    stats: Collection[str] = (),
    vocab_parallel: Any = None,
    backend: str = "auto",
) -> Any:
    """Compute the divergence of a linear classifier from a teacher, without storing the logits of either.

    This equals ``divergence(F.linear(input, linear_weight, linear_bias), teacher, ...)`` with at least float32 logits
    for every dtype of hidden states and classifiers. It is computed in chunks of rows: compute the logits of both sides
    for a chunk, replace the student's by their gradient, multiply that into the gradients of input and classifier, and
    go on with the next chunk. Options that are not described here have the meaning they have in `xent.divergence`.

    Parameters
    ----------
    input : array (..., D); float64, float32, bfloat16 or float16
        The student's hidden states.
    linear_weight : array (V, D), the dtype of input; or QuantizedWeight
        The student's classifier. Under torch.autocast any float dtype. For MLX it may be a frozen quantized classifier.
    teacher : LinearTeacher, TopKTeacher, Subset or array (..., V)
        As in `xent.divergence`. A `LinearTeacher` may have another width; its logits are not stored either.
    linear_bias : array (V,), optional
        Bias of the student's classifier.
    kind, beta, temperature, softcap, logit_scale, normalizer, stats, vocab_parallel, backend
        As in `xent.divergence`.
    reduction : {"mean", "sum", "none"}
        With "mean" and "sum" the gradients are computed together with the loss. With "none" the upstream gradient
        differs per row, so the backward pass computes the logits of both sides again.
    sample_weight : array (...), optional
        Weight of each row. PyTorch skips rows with weight 0 in all matrix products (on CUDA if the call has several
        chunks).
    shift : int >= 0
        Row t of student and teacher takes the sample weight t + shift along the last sequence axis (axis -2 of input),
        and the last ``shift`` rows of a sequence have weight 0. Row t of a language model predicts token t + 1, so
        ``sample_weight=labels != -100, shift=1`` selects the rows that predict the labelled tokens.
    workspace : int, optional
        Bound in bytes on the logits of both sides that exist at one time (at least one row is computed).

    Returns
    -------
    loss : array
        0-d, or ``input.shape[:-1]`` with reduction "none"; float32, or float64 for float64 input and for NumPy.
    stats : Stats
        Returned only if ``stats`` names any.

    Raises
    ------
    TypeError, ValueError, IndexError, BackendError, RuntimeError, NotImplementedError
        As in `xent.divergence`.

    Examples
    --------
    >>> import numpy as np, xent
    >>> hidden, classifier = np.eye(4), 2 * np.eye(4)
    >>> teacher = xent.LinearTeacher(np.ones((4, 2)), np.zeros((4, 2)))
    >>> float(xent.linear_divergence(hidden, classifier, teacher).round(4))
    0.4545
    """
    return evaluate(
        linear_divergence,
        linear_divergence_call,
        backend,
        input,
        linear_weight,
        teacher=teacher,
        linear_bias=linear_bias,
        shift=shift,
        workspace=workspace,
        sample_weight=sample_weight,
        normalizer=normalizer,
        kind=kind,
        beta=beta,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        reduction=reduction,
        stats=stats,
        vocab_parallel=vocab_parallel,
    )
