"""Validate the arguments of the losses and describe the call. Errors name the argument, its value and what is allowed.

This module checks shapes and dtypes of arrays, with `validate_arrays`; `validate_options` checks numbers and names. The
backends check the values in `target` (see `XENT_CHECK_TARGETS` in `xent.cross_entropy`), because reading them may
synchronise with the device.
"""

from typing import Any

from xent.core.arrays import FLOAT_DTYPES, INTEGER_DTYPES, dtype_name, framework_of, number_of, one_framework
from xent.core.shards import check_tokens, shards_of
from xent.core.spec import LinearCall, LogitsCall
from xent.core.validate_arrays import (
    check_classifier,
    check_float,
    check_normalizer,
    check_sample_weight,
    class_axis,
    parts_of,
)
from xent.core.validate_options import check_shift_and_workspace, heads_of, loss_spec

__all__ = ["linear_call", "logits_call"]


def logits_call(
    logits: Any,
    target: Any,
    *,
    weight: Any,
    sample_weight: Any,
    normalizer: Any,
    axis: int,
    inplace: bool,
    vocab_parallel: Any = None,
    **loss: Any,
) -> LogitsCall:
    """Check the arguments of `xent.cross_entropy` and describe the call."""
    normalizer = number_of(framework_of(logits), normalizer)
    framework = one_framework(
        logits=logits,
        target=target,
        weight=weight,
        sample_weight=sample_weight,
        normalizer=normalizer,
        **_scales(framework_of(logits), **loss),
    )
    spec = loss_spec(framework, **loss)
    axis, shape = class_axis(logits, axis), tuple(logits.shape)
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace must be a bool, got {inplace!r}")
    rows = shape[:axis] + shape[axis + 1 :]
    shards = shards_of(framework, vocab_parallel)
    if shards is not None and shards.axis is not None:
        raise ValueError(
            "sequence_parallel=True is for functions of hidden states, which they gather; logits must hold all tokens "
            "on every rank: leave sequence_parallel out, or pass hidden states to xent.linear_cross_entropy"
        )
    _check_rows("logits", shape, rows, shape[axis], shape, target, weight, sample_weight, shards is not None)
    normalizer = check_normalizer(framework, normalizer, spec.reduction)
    return LogitsCall(logits, target, weight, sample_weight, normalizer, spec, axis, inplace, vocab_parallel=shards)


def linear_call(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any,
    weight: Any,
    sample_weight: Any,
    normalizer: Any,
    shift: Any,
    workspace: int | None,
    head_weight: Any = None,
    vocab_parallel: Any = None,
    **loss: Any,
) -> LinearCall:
    """Check the arguments of `xent.linear_cross_entropy` and describe the call."""
    normalizer = number_of(framework_of(input), normalizer)
    framework = one_framework(
        input=input,
        **parts_of(linear_weight, "linear_weight"),
        target=target,
        linear_bias=linear_bias,
        weight=weight,
        sample_weight=sample_weight,
        normalizer=normalizer,
        **_scales(framework_of(input), **loss),
    )
    spec = loss_spec(framework, **loss)
    check_classifier(framework, input, linear_weight, linear_bias)
    vocabulary = linear_weight.shape[0]
    check_shift_and_workspace(shift, workspace)
    shards = shards_of(framework, vocab_parallel)
    heads = heads_of(framework, shift, head_weight, spec.reduction)
    rows = tuple(input.shape[:-1])
    if shards is not None and shards.axis is not None:
        rows = check_tokens(input, target, shards.axis, None if heads is None else len(heads.shift))
    if heads is not None:
        count = len(heads.shift)
        if len(rows) < 2 or rows[0] != count:
            raise ValueError(
                f"shift={heads.shift} needs input of shape ({count}, ..., T, D), with the hidden states of each head; "
                f"got {tuple(input.shape)}"
            )
        rows, shift = rows[1:], 0
    elif shift and not rows:
        raise ValueError(f"shift={shift} needs a sequence axis: input of shape (..., T, D), got {tuple(input.shape)}")
    _check_rows(
        "input",
        tuple(input.shape),
        rows,
        vocabulary,
        (*rows, vocabulary),
        target,
        weight,
        sample_weight,
        shards is not None,
    )
    normalizer = check_normalizer(framework, normalizer, spec.reduction)
    return LinearCall(
        input,
        linear_weight,
        linear_bias,
        target,
        weight,
        sample_weight,
        normalizer,
        spec,
        shift,
        workspace,
        heads=heads,
        vocab_parallel=shards,
    )


def _scales(framework: str | None, *, softcap: Any, logit_scale: Any, **_: Any) -> dict[str, Any]:
    """Return those of softcap and logit scale that are PyTorch tensors, by name."""
    given = {"softcap": number_of(framework, softcap), "logit_scale": number_of(framework, logit_scale)}
    return {name: value for name, value in given.items() if framework == "torch" == framework_of(value)}


def _check_rows(
    source: str,
    source_shape: tuple[int, ...],
    rows: tuple[int, ...],
    vocabulary: int,
    probabilities: tuple[int, ...],
    target: Any,
    weight: Any,
    sample_weight: Any,
    in_shards: bool,
) -> None:
    """Check arguments per row and per class against `rows`, the shape of index targets, and `vocabulary`.

    A shard of the vocabulary may be empty.
    """
    if vocabulary == 0 and not in_shards:
        raise ValueError(f"there must be at least one class, got 0 with {source} of shape {source_shape}")
    dtype, shape = dtype_name(target), tuple(target.shape)
    if dtype in INTEGER_DTYPES or (dtype == "uint64" and framework_of(target) == "numpy"):
        if shape != rows:
            other = source == "logits" and shape == source_shape[:1] + source_shape[2:]
            raise ValueError(
                f"target of class indices must have shape {rows} for {source} of shape {source_shape}, got {shape}"
                + ("; if the classes are on axis 1, pass axis=1" if other else "")
            )
    elif dtype in FLOAT_DTYPES:
        if shape != probabilities:
            raise ValueError(
                f"target of class probabilities (dtype {dtype}) must have shape {probabilities} for {source} of shape "
                f"{source_shape}, got {shape}; class indices need an integer dtype"
            )
    else:
        raise TypeError(
            f"target must hold class indices ({', '.join(INTEGER_DTYPES)}) or class probabilities "
            f"({', '.join(FLOAT_DTYPES)}), got dtype {dtype}"
        )
    if weight is not None:
        check_float("weight", weight)
        if tuple(weight.shape) != (vocabulary,):
            raise ValueError(f"weight must have shape ({vocabulary},), one per class; got {tuple(weight.shape)}")
    check_sample_weight(sample_weight, rows)
