"""The divergence of a student from a teacher: what a user reads, as `api` has the losses."""

from collections.abc import Collection
from typing import Any

from xent.core.dispatch import select
from xent.core.validate_divergence import linear_divergence_call, logits_divergence_call

__all__ = ["divergence", "linear_divergence"]


def divergence(
    logits: Any,
    teacher: Any,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    sample_weight: Any = None,
    normalizer: Any = None,
    axis: int = -1,
    stats: Collection[str] = (),
    backend: str = "auto",
) -> Any:
    """Compute the Kullback-Leibler or generalised Jensen-Shannon divergence of a student from a teacher.

    With the options at their defaults this is ``F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1),
    reduction="batchmean", log_target=True)`` of rows. The gradient of "mean" and "sum" is computed in the same pass,
    and multiplied by the upstream gradient in backward; with "none", and for PyTorch's float16 logits, backward
    computes it from the logits.

    For p, the student's distribution, and q, the teacher's, both softmax(act(z) / T) with the temperature T, and act(z)
    = k tanh(s z / k) with a softcap k, s z without, of each side's own::

        beta = 0       l = KL(q || p) = sum_c q_c (log q_c - log p_c)             dl/dx_c = p_c - q_c
        beta = 1       l = KL(p || q) = sum_c p_c (log p_c - log q_c)             dl/dx_c = p_c (log p_c - log q_c - l)
        between        m = (1 - beta) p + beta q
                       l = beta KL(q || m) + (1 - beta) KL(p || m)
                       dl/dx_c = (1 - beta) p_c (log p_c - log m_c - KL(p || m))

    "none" returns a_i l_i with a = sample_weight, "sum" their sum, "mean" their sum over ``normalizer``, or over sum_i
    a_i where it is not given; 0 where that is 0. Nothing is multiplied by T^2: do so where the gradient should not
    shrink with the temperature.

    Each class is added up as q (e^u - 1 - u) with u = log p - log q, which has the same sum: no term is negative, so
    that the result has no cancellation where the two are close, and is exactly 0 where they are equal.

    Parameters
    ----------
    logits : array (..., V); float64, float32, bfloat16 or float16
        The student's unnormalised scores z. Any strides. Sums over V are accumulated in float32 (float64 for float64).
    teacher : array (..., V), LinearTeacher or TopKTeacher
        Logits of the teacher, with the shape of ``logits`` and any float dtype, scaled and capped already; or what they
        are computed from; or its most probable classes (beta = 0 only), whose log-probabilities were taken at this
        temperature. It gets no gradient.
    beta : float in [0, 1]
        0 for the forward divergence KL(q || p), 1 for the reverse one, 0.5 for the Jensen-Shannon divergence.
    temperature : float > 0
        Divides the logits of both sides after scale and softcap.
    softcap, logit_scale, axis
        Of the student, as in `xent.cross_entropy`; teacher logits have their classes on the same axis.
    reduction : {"mean", "sum", "none"}
        What becomes of the rows' divergences.
    sample_weight : array (...), optional
        Weight a of each row; booleans are a mask. A row of weight 0 has exactly 0 loss and gradient, whatever either
        side holds there. No gradient.
    normalizer : float >= 0 or 0-d array, optional
        What "mean" divides by, as in `xent.cross_entropy`. No gradient.
    stats : collection of str
        "entropy" is the only name: -sum_c p_c log p_c of the student in nats, of each row, 0 in rows of weight 0. No
        gradient.
    backend : str
        As in `xent.cross_entropy`.

    Returns
    -------
    loss : array
        0-d, or the rows' shape with reduction "none"; float32, or float64 for float64 logits and for NumPy. Where the
        teacher excludes a class that the student has (a logit of -inf), KL(p || q) is inf and has no gradient: NaN.
    stats : Stats
        Only where ``stats`` names any.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong type, dtype, shape or range; a teacher of another vocabulary; a `TopKTeacher` with beta
        other than 0. Where its values are on the CPU: a class that a row has twice, and log-probabilities whose mass
        exceeds 1 by more than rounding. On an accelerator nothing synchronises to look, nor does MLX: such a row's loss
        and gradient are NaN, and with XENT_CHECK_TARGETS=1 it is this error.
    IndexError
        Likewise an id outside [0, V).
    BackendError, RuntimeError, NotImplementedError
        As in `xent.cross_entropy`.

    References
    ----------
    Distillation: Hinton et al. 2015, arXiv:1503.02531. The generalised divergence: Agarwal et al. 2024,
    arXiv:2306.13649, section 2; the limits at beta 0 and 1 are the divergences themselves.

    Examples
    --------
    >>> import numpy as np, xent
    >>> student, teacher = np.array([[2.0, 0.0, 0.0]]), np.array([[0.0, 1.0, 0.0]])
    >>> float(xent.divergence(student, teacher).round(4)), float(xent.divergence(student, student))
    (0.8403, 0.0)
    """
    call = logits_divergence_call(
        logits,
        teacher,
        axis=axis,
        sample_weight=sample_weight,
        normalizer=normalizer,
        beta=beta,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        reduction=reduction,
        stats=stats,
    )
    loss, found = select(backend, call).run_divergence(call)
    return (loss, found) if call.stats else loss


def linear_divergence(
    input: Any,
    linear_weight: Any,
    teacher: Any,
    *,
    linear_bias: Any = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    sample_weight: Any = None,
    normalizer: Any = None,
    workspace: int | None = None,
    stats: Collection[str] = (),
    backend: str = "auto",
) -> Any:
    """Compute the divergence of a linear classifier from a teacher, without memory for either's logits.

    This is ``divergence(F.linear(input, linear_weight, linear_bias), teacher, ...)`` with logits in float32, whatever
    the dtype of hidden states and classifiers, in chunks of rows: the logits of both sides are computed for one chunk,
    the student's become their gradient, which is multiplied back, and then comes the next chunk. Options that are not
    described here mean what they mean in `xent.divergence`.

    Parameters
    ----------
    input : array (..., D); float64, float32, bfloat16 or float16
        The student's hidden states.
    linear_weight : array (V, D), the dtype of input; or QuantizedWeight
        The student's classifier. Under torch.autocast any float dtype. For MLX also a frozen quantized one.
    teacher : LinearTeacher, TopKTeacher or array (..., V)
        As in `xent.divergence`; a `LinearTeacher` may have another width, and its logits never exist all at once.
    linear_bias : array (V,), optional
        Bias of the student's classifier.
    beta, temperature, softcap, logit_scale, normalizer, stats, backend
        As in `xent.divergence`.
    reduction : {"mean", "sum", "none"}
        With "mean" and "sum" gradients are computed together with the loss; with "none", which takes any upstream
        gradient, backward computes the logits of both sides again.
    sample_weight : array (...), optional
        Weight of each row. Rows of weight 0 are left out of all matrix products (PyTorch; on CUDA where there are
        several chunks).
    workspace : int, optional
        Bytes that the logits of both sides, alive at one time, may take (at least one row's).

    Returns
    -------
    loss : array
        0-d, or ``input.shape[:-1]`` with reduction "none"; float32, or float64 for float64 input and for NumPy.
    stats : Stats
        Only where ``stats`` names any.

    Raises
    ------
    TypeError, ValueError, IndexError, BackendError, RuntimeError, NotImplementedError
        As `xent.divergence` does.

    Examples
    --------
    >>> import numpy as np, xent
    >>> hidden, classifier = np.eye(4), 2 * np.eye(4)
    >>> teacher = xent.LinearTeacher(np.ones((4, 2)), np.zeros((4, 2)))
    >>> float(xent.linear_divergence(hidden, classifier, teacher).round(4))
    0.4545
    """
    call = linear_divergence_call(
        input,
        linear_weight,
        teacher,
        linear_bias=linear_bias,
        workspace=workspace,
        sample_weight=sample_weight,
        normalizer=normalizer,
        beta=beta,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        reduction=reduction,
        stats=stats,
    )
    loss, found = select(backend, call).run_divergence(call)
    return (loss, found) if call.stats else loss
