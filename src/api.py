"""The public functions: their arguments and what these mean. They contain no algorithm.

Each goes to `xent.backends.evaluate`, with its arguments in the order of its parameters. Log-probabilities are a
cross-entropy loss with reduction "none", negated.
"""

from collections.abc import Collection, Sequence
from typing import Any

from xent.backends.evaluate import evaluate
from xent.core.describe import describe_divergence, describe_log_probs, describe_loss, describe_top_k
from xent.core.signature import register
from xent.core.spec import Array, Group, Scalar, Support, Teacher

__all__ = [
    "cross_entropy",
    "divergence",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "linear_top_k",
    "log_probs",
    "top_k",
]


def cross_entropy(
    logits: Array,
    target: Array,
    *,
    weight: Array = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    sample_weight: Array = None,
    normalizer: Scalar = None,
    axis: int = -1,
    inplace: bool = False,
    stats: Collection[str] = (),
    vocab_parallel: Group = None,
    backend: str = "auto",
) -> Any:
    """Compute the cross entropy between logits and target classes.

    With default options this equals ``F.cross_entropy(logits.float().flatten(0, -2), target.flatten())``, in one pass
    over the logits. With reduction "mean" and "sum" the same pass computes the gradient, and the backward pass
    multiplies it by the upstream gradient. With "none", and for float16 logits in PyTorch, the backward pass computes
    the gradient from the logits and the saved log-sum-exp of each row.

    For row i, class c, raw logits z, softcap k and scale s::

        x_ic = k * tanh(s * z_ic / k)   with softcap,   s * z_ic   without
        l_i  = a_i * [(1-e) w_y (lse_i - x_iy) + (e/V) sum_c w_c (lse_i - x_ic) + z_loss * lse_i^2]

    where lse_i = log sum_c exp(x_ic), y = target_i, e = label_smoothing, w = weight and a = sample_weight. w and a are
    1 by default, and a_i is 0 for rows whose target is ignore_index. "none" returns l_i, "sum" returns sum_i l_i, and
    "mean" divides that sum by ``normalizer``, by default by sum_i a_i w_y. If the divisor is 0, the mean is 0.

    For class probabilities q the target distribution is ``(1-e) q + e/V``, ignore_index does not apply, and "mean"
    divides by sum_i a_i by default.

    Parameters
    ----------
    logits : array (..., V); float64, float32, bfloat16 or float16
        Unnormalised scores z. Any strides. Sums over V are accumulated in float32 (float64 for float64).
    target : integer array (...), or float array (..., V)
        Class indices in [0, V) or ignore_index; or class probabilities. Class probabilities that require a gradient get
        one: the backward pass computes it from the logits, so it cannot be combined with ``inplace``.
    weight : float array (V,), optional
        Weight w of each class, >= 0. No gradient.
    ignore_index : int
        Rows with this target have exactly 0 loss and 0 gradient, whatever values their logits have.
    reduction : {"mean", "sum", "none"}
        How the losses of the rows are combined, see above.
    label_smoothing : float in [0, 1]
        Share e of the target distribution that is spread evenly over all classes. This and the next three options
        may be 0-d arrays, in PyTorch of any real dtype. Their values may change between calls of a compiled function
        without compiling it again. They are not checked on accelerators and in MLX. They get no gradient; only
        ``logit_scale`` may have one, in PyTorch. Another tensor that requires one is a ValueError.
    z_loss : float >= 0
        Factor of the squared log-sum-exp, which keeps logits from drifting (PaLM, section 5).
    softcap : float > 0, optional
        Bound k of the logits (Gemma 2, section 2). Values above 1e30 are replaced by 1e30.
    logit_scale : float, or 0-d tensor of PyTorch
        Factor s of the logits; 1 / temperature. A tensor may have any real dtype and be on the logits' device or the
        CPU. If it requires a gradient, the backward pass computes (1/s) sum_ic z_ic dL/dz_ic with one more pass over
        the logits and their gradient, and with the rounding of that gradient. (Scales below 2^-60 are replaced by
        2^-60.) The value of a tensor on the CPU is checked. The value of a tensor on an accelerator is neither checked
        nor read by the host, except with XENT_CHECK_TARGETS=1 and with ``vocab_parallel``. With ``vocab_parallel`` each
        pass over the logits reads it once, and a scale that requires a gradient is a ValueError. If the scale is on the
        CPU and requires a gradient, and the logits are on an accelerator, the backward pass synchronises.
    sample_weight : array with the shape of index targets, optional
        Weight a of each row; booleans are a mask. A row with weight 0 has exactly 0 loss and gradient. No gradient.
    normalizer : float >= 0 or 0-d array, optional
        The divisor of "mean", for example the token count over all micro-batches and ranks. The value of an array is
        not checked. With "sum" and "none", which do not divide, it is a ValueError. No gradient.
    axis : int
        The axis of the classes; 1 gives PyTorch's layout.
    inplace : bool
        Write the gradient into the logits' memory, in the pass that computes it. This overwrites the logits; an
        operation that saved them for its own backward pass raises an error. For a leaf, .grad then shares the leaf's
        memory. A gradient that is computed in the backward pass uses new memory if the graph is retained. ``inplace``
        has no effect under torch.compile, which plans memory, nor on MLX arrays, which are immutable: MLX reuses memory
        that nothing else refers to.
    stats : collection of str
        Names among "lse", "nll", "entropy", "predictions", "log_sum_sq_probs", "mean_logit", "z_loss", "accuracy" and
        "count": see `xent.Stats`.
    vocab_parallel : process group, DeviceMesh of one dimension, or VocabParallel, optional
        PyTorch only: the vocabulary is in shards, and each rank of the group passes its own: see `xent.VocabParallel`.
        Logits that are DTensors with the classes sharded need no such argument.
    backend : str
        "auto", or a name that `xent.backends()` lists. The environment variable XENT_BACKEND overrides "auto".

    Returns
    -------
    loss : array
        0-d, or the shape of index targets with reduction "none"; float32, or float64 for float64 logits and for NumPy.
    stats : Stats
        Returned only if ``stats`` names any: the result is then a tuple (loss, stats).

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape or range, or the arrays are of several frameworks or devices.
    IndexError
        A target is outside [0, V) and is not ignore_index. Only targets on the CPU are checked, because a check on an
        accelerator would synchronise; MLX, which is lazy, is not checked on any device. Without the check, loss and
        gradient of that row are NaN. XENT_CHECK_TARGETS=1 in the environment turns the check on everywhere, except
        while mx.compile traces.
    BackendError
        The named backend cannot serve the call.
    RuntimeError, NotImplementedError
        Not supported: second derivatives, forward-mode derivatives, torch.vmap and mx.vmap, torch.func.functionalize,
        torch.jit.trace.

    References
    ----------
    Label smoothing: Szegedy et al. 2016, arXiv:1512.00567, section 7. z-loss: Chowdhery et al. 2022, arXiv:2204.02311,
    section 5. Softcap: Gemma Team 2024, arXiv:2408.00118, section 2.

    Examples
    --------
    >>> import numpy as np, xent
    >>> logits = np.array([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [9.0, 9.0, 9.0]])
    >>> float(xent.cross_entropy(logits, np.array([0, 1, -100])).round(4))
    0.3955
    """
    arguments = (
        logits, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale,
        sample_weight, normalizer, axis, inplace, stats, vocab_parallel, backend,
    )  # fmt: skip
    return evaluate("cross_entropy", arguments)


def linear_cross_entropy(
    input: Array,
    linear_weight: Array,
    target: Array,
    *,
    linear_bias: Array = None,
    weight: Array = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    sample_weight: Array = None,
    normalizer: Scalar = None,
    shift: int | Sequence[int] = 0,
    head_weight: Sequence[float] | None = None,
    workspace: int | None = None,
    stats: Collection[str] = (),
    vocab_parallel: Group = None,
    backend: str = "auto",
) -> Any:
    """Compute the cross entropy of a linear classifier without storing its (tokens x vocabulary) logits.

    This equals ``cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...)``, computed in chunks of rows:
    compute the logits of a chunk, replace them by their gradient, multiply that into the gradients of input and
    classifier, and go on with the next chunk. For bfloat16 and float16 inputs the target's logit of each row is
    computed in float32, which removes most of the rounding error of the loss. If a forward pass computes no gradient
    (under no_grad, or with "none") and targets are class indices, backend "triton" computes all logits in float32: in
    tiles that are accumulated into the sums of each row and overwritten, or on Hopper GPUs in registers. Options that
    are not described here have the meaning they have in `xent.cross_entropy`.

    Parameters
    ----------
    input : array (..., D); float64, float32, bfloat16 or float16
        Hidden states.
    linear_weight : array (V, D), the dtype of input; or QuantizedWeight or QuantizedRows
        The classifier, as torch.nn.Linear and torch.nn.Embedding store it. Under torch.autocast any float dtype. For
        MLX it may be a frozen quantized classifier.
    target : integer array (...), or float array (..., V)
        Class indices in [0, V) or ignore_index; or class probabilities. Class probabilities that require a gradient get
        one: the backward pass computes the logits again for it, chunk by chunk, in PyTorch in float32.
    linear_bias : array (V,), optional
        Bias of the classifier.
    weight : float array (V,), optional
        Weight of each class.
    ignore_index : int
        Rows with this target have exactly 0 loss and 0 gradient. PyTorch skips them in the matrix products: on the CPU
        always; on CUDA if the call has several chunks. The host then waits once for the number of remaining rows, while
        the device computes the first chunk. On CUDA a call of a single chunk, a CUDA graph, and a forward pass without
        gradients on backend "triton" compute all rows and do not synchronise.
    reduction : {"mean", "sum", "none"}
        With "mean" and "sum" the gradients are computed together with the loss, by three matrix products. With "none"
        the upstream gradient differs per row, so the backward pass computes the logits again: four matrix products.
    label_smoothing, z_loss, softcap, logit_scale, sample_weight, normalizer, backend
        As in `xent.cross_entropy`. The gradient of a trained ``logit_scale`` is computed from the gradients of
        ``input`` and of the bias, or, if only the classifier is trained, from the classifier's. These are computed for
        it even if they are not needed otherwise.
    vocab_parallel : process group, DeviceMesh of one dimension, or VocabParallel, optional
        As in `xent.cross_entropy`. The gradient of the classifier is that of the rank's shard. The gradient of
        ``input``, which is the same on every rank, is summed over ranks. A classifier that is a DTensor with its rows
        sharded needs no such argument.
    shift : int >= 0, or tuple of H such ints
        Row t predicts target t + shift along the last sequence axis (axis -2 of input). With shift=1 a language model
        passes its labels unchanged, and no hidden state is copied. ``sample_weight`` is aligned with ``target``: entry
        t + shift is the weight of row t. The last ``shift`` rows have no target and count as ignored; in a sequence of
        at most ``shift`` rows all rows are ignored. A tuple is for H heads that share one classifier (multi-token
        prediction): input is (H, ..., T, D), target is (..., T), and head j predicts target t + shift[j]. The loss is
        the sum over heads of ``head_weight[j]`` times the reduced loss of head j. With "none" it is (H, ..., T).
        ``normalizer`` divides the sum of each head. The heads share one pass and one gradient of the classifier.
    head_weight : tuple of H numbers, optional
        The factor of each head's loss, by default 1. It needs a tuple as ``shift``, and "mean" or "sum".
    workspace : int, optional
        Bound in bytes on the logits that exist at one time (at least one row is computed); None chooses a default for
        the device and size. A smaller workspace means more chunks: slower, and on GPUs a bfloat16 gradient of the
        classifier is rounded once per chunk. If every chunk contributes to every class, its error is 1.3 to 1.6 times
        the unfused error with 4 chunks and up to 3 times with 16. With more than 16 chunks (MLX: more than 8) the sum
        is accumulated in float32, which takes twice the memory.
    stats : collection of str
        As in `xent.cross_entropy`. With several heads, statistics per row have the shape (H, ..., T), and "accuracy"
        and "count" are over the rows of all heads. With "lse", "nll" or "entropy", logits are float32 for every dtype
        of input, which may change the last bits of the loss. On CPUs and in MLX that takes longer for 16-bit inputs.

    Returns
    -------
    loss : array
        0-d, or ``input.shape[:-1]`` with reduction "none"; float32, or float64 for float64 input and for NumPy.
    stats : Stats
        Returned only if ``stats`` names any. Entry t of a per-row statistic belongs to row t of input.

    Raises
    ------
    TypeError, ValueError, IndexError, BackendError, RuntimeError, NotImplementedError
        As in `xent.cross_entropy`.

    References
    ----------
    Chunking with gradients in the forward pass: Hsu et al. 2024, Liger Kernel, arXiv:2410.10989, section 3.2.
    Several heads: Gloeckle et al. 2024, arXiv:2404.19737, section 2.

    Examples
    --------
    >>> import numpy as np, xent
    >>> hidden, classifier = np.eye(4)[None], 2 * np.eye(4)
    >>> float(xent.linear_cross_entropy(hidden, classifier, np.array([[0, 1, 2, 3]]), shift=1).round(4))
    2.3408
    >>> heads = np.stack([hidden, hidden])
    >>> labels = np.array([[0, 1, 2, 3]])
    >>> float(xent.linear_cross_entropy(heads, classifier, labels, shift=(1, 2), head_weight=(1.0, 0.5)).round(4))
    3.5111
    """
    arguments = (
        input, linear_weight, target, linear_bias, weight, ignore_index, reduction, label_smoothing, z_loss,
        softcap, logit_scale, sample_weight, normalizer, shift, head_weight, workspace, stats,
        vocab_parallel, backend,
    )  # fmt: skip
    return evaluate("linear_cross_entropy", arguments)


def log_probs(
    logits: Array,
    target: Array,
    *,
    temperature: Scalar = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    support: Support | None = None,
    axis: int = -1,
    entropy: bool = False,
    stats: Collection[str] = (),
    vocab_parallel: Group = None,
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
        Names among "lse", "predictions", "log_sum_sq_probs", "mean_logit", "accuracy" and "rank", one value per row
        each: see `xent.Stats`. Only "lse" has a gradient. "rank" reads the logits once more; with hidden states, chunks
        of rows then have all their logits.

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
    arguments = (
        logits, target, temperature, softcap, logit_scale, ignore_index, support, axis, entropy, stats,
        vocab_parallel, backend,
    )  # fmt: skip
    return evaluate("log_probs", arguments)


def linear_log_probs(
    input: Array,
    linear_weight: Array,
    target: Array,
    *,
    linear_bias: Array = None,
    temperature: Scalar = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    support: Support | None = None,
    shift: int = 0,
    entropy: bool = False,
    workspace: int | None = None,
    stats: Collection[str] = (),
    vocab_parallel: Group = None,
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
    arguments = (
        input, linear_weight, target, linear_bias, temperature, softcap, logit_scale, ignore_index, support,
        shift, entropy, workspace, stats, vocab_parallel, backend,
    )  # fmt: skip
    return evaluate("linear_log_probs", arguments)


def divergence(
    logits: Array,
    teacher: Teacher,
    *,
    kind: str = "kl",
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    sample_weight: Array = None,
    normalizer: Scalar = None,
    axis: int = -1,
    stats: Collection[str] = (),
    vocab_parallel: Group = None,
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
    arguments = (
        logits, teacher, kind, beta, temperature, softcap, logit_scale, reduction, sample_weight, normalizer,
        axis, stats, vocab_parallel, backend,
    )  # fmt: skip
    return evaluate("divergence", arguments)


def linear_divergence(
    input: Array,
    linear_weight: Array,
    teacher: Teacher,
    *,
    linear_bias: Array = None,
    kind: str = "kl",
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    sample_weight: Array = None,
    normalizer: Scalar = None,
    shift: int = 0,
    workspace: int | None = None,
    stats: Collection[str] = (),
    vocab_parallel: Group = None,
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
    linear_weight : array (V, D), the dtype of input; or QuantizedWeight or QuantizedRows
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
    arguments = (
        input, linear_weight, teacher, linear_bias, kind, beta, temperature, softcap, logit_scale, reduction,
        sample_weight, normalizer, shift, workspace, stats, vocab_parallel, backend,
    )  # fmt: skip
    return evaluate("linear_divergence", arguments)


def top_k(
    logits: Array,
    k: int,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    axis: int = -1,
    vocab_parallel: Group = None,
    backend: str = "auto",
) -> Any:
    """Find the most probable classes of each row, and their log-probabilities over all classes.

    With default options and K = k this equals ``logits.float().log_softmax(-1).topk(k)``. The result has no gradient.

    Parameters
    ----------
    logits : array (..., V); float64, float32, bfloat16 or float16
        Unnormalised scores z. Any strides.
    k : int in [1, V]
        The number K of classes. All ranks of a vocabulary in shards pass the same; a shard may have fewer classes.
    temperature : float > 0
        Divides the logits after scale and softcap.
    softcap, logit_scale, axis, backend
        As in `xent.divergence`.
    vocab_parallel : process group, DeviceMesh of one dimension, or VocabParallel, optional
        As in `xent.cross_entropy`. Every call exchanges k and the ranges of classes, for which the host waits, with
        ``first`` and ``size`` too; a CUDA graph cannot capture it. Results are plain tensors, the same on every rank.

    Returns
    -------
    TopKTeacher
        ``ids`` (..., K), int64 (int32 in MLX): the K classes with the largest logits, the largest first and the lowest
        class first among equal ones. The order is that of z (of -z with a negative scale), which a softcap could round
        to equal numbers. ``log_probs`` (..., K), float32, or float64 for float64 logits and for NumPy. K is the last
        axis, whatever ``axis`` is. A row with NaN has NaN log-probabilities, and with a scale of 0 one with an infinite
        logit too. Classes with a logit of -inf have -inf.

    Raises
    ------
    TypeError, ValueError, BackendError
        As in `xent.cross_entropy`; also if ``k`` differs between ranks.

    Examples
    --------
    >>> import numpy as np, xent
    >>> teacher = xent.top_k(np.log([[0.2, 0.1, 0.7]]), 2)
    >>> teacher.ids, np.exp(teacher.log_probs).round(4)
    (array([[2, 0]]), array([[0.7, 0.2]]))
    """
    return evaluate("top_k", (logits, k, temperature, softcap, logit_scale, axis, vocab_parallel, backend))


def linear_top_k(
    input: Array,
    linear_weight: Array,
    k: int,
    *,
    linear_bias: Array = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    workspace: int | None = None,
    vocab_parallel: Group = None,
    backend: str = "auto",
) -> Any:
    """Find the most probable classes of each row from hidden states, without storing the (tokens x vocabulary) logits.

    This equals ``top_k(F.linear(input, linear_weight, linear_bias), k, ...)`` with at least float32 logits for every
    dtype of hidden states and classifier, computed in chunks of rows. ``xent.linear_divergence(hidden, head,
    xent.linear_top_k(teacher_hidden, teacher_head, 64))`` is a distillation from the 64 most probable classes.

    Parameters
    ----------
    input : array (..., D); float64, float32, bfloat16 or float16
        Hidden states.
    linear_weight, linear_bias
        As in `xent.linear_divergence`.
    workspace : int, optional
        Bound in bytes on the logits that exist at one time (at least one row is computed).
    k, temperature, softcap, logit_scale, vocab_parallel, backend
        As in `xent.top_k`. ``sequence_parallel`` is a ValueError.

    Returns
    -------
    TopKTeacher
        As from `xent.top_k`.

    Raises
    ------
    TypeError, ValueError, BackendError
        As in `xent.top_k`.

    Examples
    --------
    >>> import numpy as np, xent
    >>> xent.linear_top_k(np.eye(3), np.diag([1.0, 2.0, 3.0]), 1).log_probs.round(4)
    array([[-0.5514],
           [-0.2395],
           [-0.0949]])
    """
    arguments = (
        input, linear_weight, k, linear_bias, temperature, softcap, logit_scale, workspace, vocab_parallel, backend,
    )  # fmt: skip
    return evaluate("linear_top_k", arguments)


for _functions, _describe in (
    ((cross_entropy, linear_cross_entropy), describe_loss),
    ((log_probs, linear_log_probs), describe_log_probs),
    ((divergence, linear_divergence), describe_divergence),
    ((top_k, linear_top_k), describe_top_k),
):
    for _function in _functions:
        register(_function, _describe)
