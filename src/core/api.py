"""The two functions: what a user reads. Describe the call, choose who serves it, run it; nothing else."""

from collections.abc import Collection, Sequence
from typing import Any

from xent.backends import dtensors_of, plans_of, told_to_peers
from xent.core import validate
from xent.core.dispatch import select

__all__ = ["cross_entropy", "linear_cross_entropy"]


def cross_entropy(
    logits: Any,
    target: Any,
    *,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    sample_weight: Any = None,
    normalizer: Any = None,
    axis: int = -1,
    inplace: bool = False,
    stats: Collection[str] = (),
    vocab_parallel: Any = None,
    backend: str = "auto",
) -> Any:
    """Compute the cross entropy between logits and target classes.

    With the options at their defaults this is ``F.cross_entropy(logits.float().flatten(0, -2), target.flatten())``, in
    one pass. The gradient of "mean" and "sum" is computed in the same pass, and multiplied by the upstream gradient in
    backward. With "none", and for PyTorch's float16 logits, backward computes it from the logits and each row's norm.

    For row i, class c, raw logits z, softcap k and scale s::

        x_ic = k * tanh(s * z_ic / k)   with softcap,   s * z_ic   without
        l_i  = a_i * [(1-e) w_y (lse_i - x_iy) + (e/V) sum_c w_c (lse_i - x_ic) + z_loss * lse_i^2]

    where lse_i = log sum_c exp(x_ic), y = target_i, e = label_smoothing, w = weight and a = sample_weight (both 1 where
    not given), and a_i = 0 where the target is ignore_index. "none" returns l_i, "sum" their sum, "mean" their sum over
    ``normalizer``, or over sum_i a_i w_y where it is not given; 0 where that is 0.

    For class probabilities q, ``(1-e) q + e/V`` takes the place of the smoothed one-hot target, ignore_index does not
    apply, and "mean" divides by sum_i a_i, the row count.

    Parameters
    ----------
    logits : array (..., V); float64, float32, bfloat16 or float16
        Unnormalised scores z. Any strides. Sums over V are accumulated in float32 (float64 for float64).
    target : integer array (...), or float array (..., V)
        Class indices in [0, V) or ignore_index; or class probabilities, which get a gradient where they ask for one:
        backward computes it from the logits, which ``inplace`` must then leave alone.
    weight : float array (V,), optional
        Weight w of each class, >= 0. No gradient.
    ignore_index : int
        Rows with this target have exactly 0 loss and 0 gradient, whatever their logits hold.
    reduction : {"mean", "sum", "none"}
        What becomes of the rows' losses.
    label_smoothing : float in [0, 1]
        Share e of the target that is spread over all classes. For MLX this and the next three may be 0-d arrays, whose
        values are not checked and may change from call to call of a compiled function; they get no gradient.
    z_loss : float >= 0
        Factor of the squared log normaliser, which keeps logits from drifting (PaLM, section 5).
    softcap : float > 0, optional
        Bound k of the logits (Gemma 2, section 2). For PyTorch also a 0-d tensor, as ``logit_scale`` may be; it gets no
        gradient, and one that asks for it is a ValueError. Beyond 1e30 it is taken for that.
    logit_scale : float, or 0-d tensor of PyTorch
        Factor s of the logits; 1 / temperature. A tensor of any real dtype, on the logits' device or the CPU, gets its
        gradient if it asks for one: (1/s) sum_ic z_ic dL/dz_ic, a pass over the logits and their gradient in backward,
        with the rounding of that gradient (a scale below 2^-60 is taken for 2^-60; at 0 float16 gives NaN). The value
        of a tensor on the CPU is checked. That of one on an accelerator is neither checked nor read by the host, but
        for XENT_CHECK_TARGETS=1, and with ``vocab_parallel``, where each pass over the logits reads it once and a scale
        that asks for a gradient is a ValueError. A trained scale on the CPU makes backward wait for logits elsewhere.
    sample_weight : array with the shape of index targets, optional
        Weight a of each row; booleans are a mask. A row with weight 0 has exactly 0 loss and gradient. No gradient.
    normalizer : float >= 0 or 0-d array, optional
        What "mean" divides by: the token count over all micro-batches and ranks, say; an array's value is not checked.
        With "sum" and "none", which divide by nothing, it is a ValueError. No gradient.
    axis : int
        The axis of the classes; 1 gives PyTorch's layout.
    inplace : bool
        Write the gradient into the logits' memory, in the pass that computes it. The logits are lost; an operation that
        saved them for its own backward raises. The .grad of a leaf then shares the leaf's memory. A gradient that
        backward computes takes new memory if the graph is retained. No effect under torch.compile, which plans memory,
        and on MLX arrays, which are values: memory that nothing else refers to is reused in any case.
    stats : collection of str
        Names out of "lse", "nll", "entropy", "predictions", "z_loss", "accuracy", "count": see `xent.Stats`.
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
        Only where ``stats`` names any.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong type, dtype, shape or range; arrays of several frameworks or devices.
    IndexError
        A target outside [0, V) that is not ignore_index, where the values are on the CPU. On an accelerator nothing
        synchronises to look, nor does MLX, which computes later, on any device: loss and gradient of that row are NaN,
        and with XENT_CHECK_TARGETS=1 in the environment it is this IndexError (not while mx.compile traces).
    BackendError
        The named backend cannot serve the call.
    RuntimeError, NotImplementedError
        Second derivatives; forward-mode derivatives; torch.vmap and mx.vmap; torch.func.functionalize;
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
    plans = plans_of(logits) if vocab_parallel is None else None
    found = None
    if plans is not None:
        options = (reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale)
        arrays = (logits, target, weight, sample_weight, normalizer)
        found = plans.find_logits(*arrays, axis, inplace, backend, options, stats)
        if found is not None and found.kernel is not None:
            return plans.run_logits(found, *arrays, axis, inplace)
    arguments = {
        "target": target,
        "weight": weight,
        "sample_weight": sample_weight,
        "normalizer": normalizer,
        "axis": axis,
        "inplace": inplace,
        "vocab_parallel": vocab_parallel,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "stats": stats,
    }
    parts = dtensors_of(logits, axis)
    if parts is not None:
        return parts.of_logits(cross_entropy, logits, arguments | {"backend": backend})
    with told_to_peers(vocab_parallel, logits):
        call = validate.logits_call(logits, **arguments)
        chosen = select(backend, call)
        loss, reported = chosen.run(call)
    if plans is not None and found is not None:
        plans.keep(found, chosen.name)
    return (loss, reported) if call.loss.stats else loss


def linear_cross_entropy(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any = None,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    sample_weight: Any = None,
    normalizer: Any = None,
    shift: int | Sequence[int] = 0,
    head_weight: Sequence[float] | None = None,
    workspace: int | None = None,
    stats: Collection[str] = (),
    vocab_parallel: Any = None,
    backend: str = "auto",
) -> Any:
    """Compute the cross entropy of a linear classifier without memory for its (tokens x vocabulary) logits.

    This is ``cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...)``, in chunks of rows: the logits
    of one chunk are computed, replaced by their gradient, and multiplied back before those of the next. In bfloat16 and
    float16 each target's logit is computed in float32, so that the loss has little of their rounding. Where a forward
    pass computes no gradient (under no_grad, or with "none") and targets are class indices, backend "triton" computes
    all logits in float32: in tiles that are added to each row's sums and overwritten, or on Hopper in registers.
    Options that are not described here mean what they mean in `xent.cross_entropy`.

    Parameters
    ----------
    input : array (..., D); float64, float32, bfloat16 or float16
        Hidden states.
    linear_weight : array (V, D), the dtype of input; or QuantizedWeight
        The classifier, as torch.nn.Linear and torch.nn.Embedding store it. Under torch.autocast any float dtype. For
        MLX also a frozen quantized one.
    target : integer array (...), or float array (..., V)
        Class indices in [0, V) or ignore_index; or class probabilities, which get a gradient where they ask for one:
        backward computes the logits once more for it, chunk by chunk, in float32 on PyTorch.
    linear_bias : array (V,), optional
        Bias of the classifier.
    weight : float array (V,), optional
        Weight of each class.
    ignore_index : int
        Rows with this target have exactly 0 loss and 0 gradient. PyTorch on the CPU leaves them out of the matrix
        products. On CUDA this needs several chunks: the host then waits once for the number of rows that are left,
        while the device computes the first chunk. A single chunk, a CUDA graph, and on backend "triton" a forward pass
        without gradients compute all rows and wait for nothing.
    reduction : {"mean", "sum", "none"}
        With "mean" and "sum" gradients are computed together with the loss (three matrix products); with "none", which
        takes any upstream gradient, backward computes the logits again (four).
    label_smoothing, z_loss, softcap, logit_scale, sample_weight, normalizer, backend
        As in `xent.cross_entropy`. The gradient of a trained ``logit_scale`` is summed from that of ``input``, or of a
        classifier that is trained alone, and that of the bias, and computes these where nobody else asks for them.
    vocab_parallel : process group, DeviceMesh of one dimension, or VocabParallel, optional
        As in `xent.cross_entropy`. The classifier's gradient is the shard's own; that of ``input``, which is the same
        on every rank, is the sum over ranks, on every rank. A classifier that is a DTensor with its rows sharded needs
        no such argument.
    shift : int >= 0, or tuple of H such ints
        Row t predicts target t + shift along the last sequence axis (axis -2 of input), so that a language model passes
        its labels as they are with shift=1 and no hidden state is copied. ``sample_weight`` goes with ``target``: entry
        t + shift weighs row t. The last ``shift`` rows have no target and count as ignored; in a sequence that is no
        longer than ``shift``, all of them. A tuple is for H heads of one classifier (multi-token prediction): input is
        (H, ..., T, D), and head j predicts t + shift[j] of the one target (..., T). The loss is the sum over heads of
        ``head_weight[j]`` times head j's own reduced loss; with "none" it is (H, ..., T), each head's own rows.
        ``normalizer`` divides the sum of each head. Class indices make one gradient of the classifier for all heads;
        with class probabilities, or with ``vocab_parallel``, each head is a call of its own.
    head_weight : tuple of H numbers, optional
        How much each head counts, 1 each where it is not given. It needs a tuple as ``shift``, and "mean" or "sum".
    workspace : int, optional
        Bytes that the logits alive at one time may take (at least one row's); None chooses well for the device. A
        smaller workspace means more chunks: slower, and on GPUs a bfloat16 gradient of the classifier is rounded once
        per chunk. Where every chunk adds to every class, that has 1.3 to 1.6 times the unfused error with 4 chunks and
        up to 3 times with 16. A sum of more than 16 chunks (MLX: more than 8) is accumulated in float32, in twice the
        memory.
    stats : collection of str
        As in `xent.cross_entropy`. Per row, those of heads are (H, ..., T); "accuracy" and "count" are over the rows of
        all heads. For class indices, backend "triton" computes lse, nll and entropy from float32 logits, whatever the
        dtype of input. The loss of a call that asks for them may differ in its last bits.

    Returns
    -------
    loss : array
        0-d, or ``input.shape[:-1]`` with reduction "none"; float32, or float64 for float64 input and for NumPy.
    stats : Stats
        Only where ``stats`` names any. Entry t of a per-row statistic belongs to row t of input.

    Raises
    ------
    TypeError, ValueError, IndexError, BackendError, RuntimeError, NotImplementedError
        As `xent.cross_entropy` does.

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
    plans = plans_of(input) if vocab_parallel is None else None
    found = None
    if plans is not None and head_weight is None:
        options = (reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale)
        arrays = (input, linear_weight, linear_bias, target, weight, sample_weight, normalizer)
        found = plans.find_linear(*arrays, shift, workspace, backend, options, stats)
        if found is not None and found.kernel is not None:
            return plans.run_linear(found, *arrays, shift, workspace)
    arguments = {
        "target": target,
        "linear_bias": linear_bias,
        "weight": weight,
        "sample_weight": sample_weight,
        "normalizer": normalizer,
        "shift": shift,
        "head_weight": head_weight,
        "workspace": workspace,
        "vocab_parallel": vocab_parallel,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "stats": stats,
    }
    parts = dtensors_of(linear_weight, 0)
    if parts is not None:
        return parts.of_linear(linear_cross_entropy, input, linear_weight, arguments | {"backend": backend})
    with told_to_peers(vocab_parallel, input):
        call = validate.linear_call(input, linear_weight, **arguments)
        chosen = select(backend, call)
        loss, reported = chosen.run(call)
    if plans is not None and found is not None:
        plans.keep(found, chosen.name)
    return (loss, reported) if call.loss.stats else loss
