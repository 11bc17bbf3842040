"""The public functions for log-probabilities of given tokens and for the entropy.

A backend computes them as a cross-entropy loss with reduction "none", negated, and its statistics.
"""

from collections.abc import Collection
from typing import Any

from xent.core.describe import linear_log_probs_call, log_probs_call
from xent.core.dispatch import evaluate
from xent.core.spec import Support

__all__ = ["linear_log_probs", "log_probs"]


def log_probs(
    logits: Any,
    target: Any,
    *,
    temperature: Any = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    support: Support | None = None,
    axis: int = -1,
    entropy: bool = False,
    stats: Collection[str] = (),
    vocab_parallel: Any = None,
    backend: str = "auto",
) -> Any:
    """Compute the log-probability of each target class, and the entropy of each row's distribution.

    With default options this equals ``logits.float().log_softmax(-1).gather(-1, target[..., None])[..., 0]``, in one
    pass. The backward pass computes the gradient from the logits and the saved log-sum-exp of each row.

    For row i, class c, raw logits z, softcap k, scale s and temperature T::

        x_ic = k * tanh(s * z_ic / k) / T_i   with softcap,   s * z_ic / T_i   without
        lp_i = x_iy - lse_i        H_i = lse_i - sum_c p_ic x_ic        lse_i = log sum_c exp(x_ic)

    and for upstream gradients u of lp and v of H::

        dL/dx_ic = u_i ([c == y] - p_ic) - v_i p_ic (log p_ic + H_i)

    Parameters
    ----------
    logits : array (..., V); float64, float32, bfloat16 or float16
        Unnormalised scores z. Any strides. Sums over V are accumulated in float32 (float64 for float64).
    target : integer array (...)
        Class indices in [0, V) or ignore_index.
    temperature : float > 0, 0-d float array, or float array with the target's shape
        Divides the logits after scale and softcap: one number for all rows, or one per row. No gradient. (A 0-d array
        of PyTorch or MLX is used as one per row.)
    softcap, logit_scale, axis, vocab_parallel, backend
        As in `xent.cross_entropy`.
    ignore_index : int
        Rows with this target have log-probability and entropy 0, and exactly 0 gradient.
    support : Support, optional
        The classes that a sampler allowed for each row. All sums over classes are over these. If the target is not
        among them, the log-probability is -inf and contributes no gradient.
    entropy : bool
        Whether to return the entropy of each row as well.
    stats : collection of str
        Names among "lse", "predictions", "log_sum_sq_probs", "mean_logit" and "accuracy", one value per row each: see
        `xent.Stats`. Only "lse" has a gradient.

    Returns
    -------
    log_probs : array, the target's shape
        float32, or float64 for float64 logits and for NumPy.
    entropy : array, the target's shape
        Only with ``entropy=True``: the result is then a tuple. Both are differentiable.
    stats : Stats
        Last in the tuple, only if ``stats`` names any.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape or range, for example a temperature that is not > 0.
    IndexError
        As in `xent.cross_entropy`, also for ids of a support outside [0, V).
    BackendError, RuntimeError, NotImplementedError
        As in `xent.cross_entropy`.

    References
    ----------
    The softmax and its temperature: Hinton et al. 2015, arXiv:1503.02531, section 2. The entropy's gradient follows
    from its definition.

    Examples
    --------
    >>> import numpy as np, xent
    >>> logits = np.array([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> log_probs, entropy = xent.log_probs(logits, np.array([0, 1]), temperature=0.5, entropy=True)
    >>> log_probs.round(4), entropy.round(4)
    (array([-0.036 , -0.2395]), array([0.1773, 0.6656]))
    """
    return evaluate(
        log_probs,
        log_probs_call,
        backend,
        logits,
        target=target,
        temperature=temperature,
        support=support,
        axis=axis,
        vocab_parallel=vocab_parallel,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        entropy=entropy,
        stats=stats,
    )


def linear_log_probs(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any = None,
    temperature: Any = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    support: Support | None = None,
    shift: int = 0,
    entropy: bool = False,
    workspace: int | None = None,
    stats: Collection[str] = (),
    vocab_parallel: Any = None,
    backend: str = "auto",
) -> Any:
    """Compute log-probabilities of targets from hidden states, without storing the (tokens x vocabulary) logits.

    This equals ``log_probs(F.linear(input, linear_weight, linear_bias), target, ...)`` with at least float32 logits for
    every dtype of hidden states and classifier. The forward pass accumulates the sums of each row tile by tile; the
    backward pass computes the logits again, chunk by chunk. Asking for a gradient or for the entropy does not change
    the bits of the results.

    Parameters
    ----------
    input : array (..., D); float64, float32, bfloat16 or float16
        Hidden states.
    linear_weight, linear_bias, workspace, vocab_parallel
        As in `xent.linear_cross_entropy`.
    target : integer array (...)
        Class indices in [0, V) or ignore_index.
    shift : int >= 0
        Row t predicts target t + shift along the last sequence axis (axis -2 of input). Entries of ``temperature`` and
        rows of ``support`` are aligned with the target. The last ``shift`` rows have no target and count as ignored.
    temperature, softcap, logit_scale, ignore_index, support, entropy, stats, backend
        As in `xent.log_probs`.

    Returns
    -------
    log_probs, entropy, stats
        As from `xent.log_probs`, of the shape ``input.shape[:-1]``.

    Raises
    ------
    TypeError, ValueError, IndexError, BackendError, RuntimeError, NotImplementedError
        As in `xent.log_probs`.

    Examples
    --------
    >>> import numpy as np, xent
    >>> hidden, classifier = np.eye(4)[None], 2 * np.eye(4)
    >>> xent.linear_log_probs(hidden, classifier, np.array([[0, 1, 2, 2]])).round(4)
    array([[-0.3408, -0.3408, -0.3408, -2.3408]])
    """
    return evaluate(
        linear_log_probs,
        linear_log_probs_call,
        backend,
        input,
        linear_weight,
        target=target,
        linear_bias=linear_bias,
        temperature=temperature,
        support=support,
        shift=shift,
        workspace=workspace,
        vocab_parallel=vocab_parallel,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        entropy=entropy,
        stats=stats,
    )
