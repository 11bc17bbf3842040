"""Validate the arguments of the losses and of the log-probabilities, and describe the call. Errors name the argument.

Backends check the values in a target (see `XENT_CHECK_TARGETS` in `xent.cross_entropy`), because reading them may
synchronise with the device.
"""

import math
from typing import Any

from xent.core.arrays import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    PLAIN,
    describe,
    dtype_name,
    framework_of,
    number_of,
    one_framework,
    shown,
)
from xent.core.call import (
    Allowed,
    Call,
    Classes,
    Given,
    Probabilities,
    Product,
    Shards,
    Source,
    array_of,
    replaced,
    vocabulary_of,
)
from xent.core.spec import LOG_PROB_STATS, STAT_NAMES, Support
from xent.core.validate import (
    check_classifier,
    check_dtype,
    check_numbers,
    check_sequence,
    check_shape,
    check_stats,
    check_tokens,
    check_weights,
    class_axis,
    divided,
    head_weights,
    loss_options,
    one_shift,
    parts_of,
    shards_of,
    shift_and_workspace,
)

__all__ = ["linear_log_probs_call", "linear_loss_call", "log_probs_call", "loss_call"]

_NO_WEIGHTS: dict[str, Any] = {"weight": None, "sample_weight": None, "normalizer": None}
_OF_LOG_PROBS: dict[str, Any] = _NO_WEIGHTS | {
    "reduction": "none",
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "exact": True,
    "accuracy_of_rows": True,
}
_TENSORS = ("label_smoothing", "z_loss", "softcap", "logit_scale")
"""Numbers that may be PyTorch tensors."""


def loss_call(
    logits: Any,
    target: Any,
    *,
    weight: Any,
    sample_weight: Any,
    normalizer: Any,
    axis: Any,
    inplace: Any,
    vocab_parallel: Any = None,
    **numbers: Any,
) -> Call:
    """Check the arguments of `xent.cross_entropy` and describe the call."""
    arrays = {"logits": logits, "target": target}
    arrays |= {"weight": weight, "sample_weight": sample_weight, "normalizer": normalizer}
    framework = _framework_of(logits, arrays, numbers)
    axis, shape = class_axis(logits, axis), tuple(logits.shape)
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace must be a bool, got {shown(inplace)}")
    shards = shards_of(framework, vocab_parallel)
    if shards is not None and shards.axis is not None:
        raise ValueError(
            "sequence_parallel=True is for functions of hidden states, which they gather; logits must hold all tokens "
            "on every rank: leave sequence_parallel out, or pass hidden states to xent.linear_cross_entropy"
        )
    rows = shape[:axis] + shape[axis + 1 :]
    return _call(framework, Given(logits, axis, inplace), arrays, numbers, rows, shape, shards, {})


def linear_loss_call(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any,
    weight: Any,
    sample_weight: Any,
    normalizer: Any,
    shift: Any,
    workspace: Any,
    head_weight: Any = None,
    vocab_parallel: Any = None,
    **numbers: Any,
) -> Call:
    """Check the arguments of `xent.linear_cross_entropy` and describe the call."""
    arrays = {"input": input, **parts_of(linear_weight, "linear_weight"), "target": target, "linear_bias": linear_bias}
    arrays |= {"weight": weight, "sample_weight": sample_weight, "normalizer": normalizer}
    framework = _framework_of(input, arrays, numbers)
    check_classifier(framework, input, linear_weight, linear_bias)
    shift, workspace = shift_and_workspace(shift, workspace)
    shards = shards_of(framework, vocab_parallel)
    weights = head_weights(framework, shift, head_weight, numbers["reduction"])
    heads = len(shift) if isinstance(shift, tuple) else None
    rows = tuple(input.shape[:-1])
    if shards is not None and shards.axis is not None:
        rows = check_tokens(input, target, shards.axis, heads)
    if heads is not None:
        if len(rows) < 2 or rows[0] != heads:
            raise ValueError(
                f"shift={shift} needs input of shape ({heads}, ..., T, D), with the hidden states of each head; "
                f"got {tuple(input.shape)}"
            )
        rows = rows[1:]
    else:
        check_sequence(shift, input)
    source = Product(input, linear_weight, linear_bias, workspace)
    own = {"shift": shift, "heads": heads, "head_weight": weights}
    return _call(framework, source, arrays, numbers, rows, (*rows, linear_weight.shape[0]), shards, own)


def log_probs_call(
    logits: Any, target: Any, *, temperature: Any, support: Any, entropy: Any, stats: Any, **others: Any
) -> Call:
    """Check the arguments of `xent.log_probs` and describe the call: a loss with reduction "none", not negated."""
    others |= {"stats": _names(target, stats, entropy), "inplace": False}
    return _as_log_probs(loss_call(logits, target, **_OF_LOG_PROBS, **others), temperature, support)


def linear_log_probs_call(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    temperature: Any,
    support: Any,
    entropy: Any,
    stats: Any,
    shift: Any,
    **others: Any,
) -> Call:
    """Check the arguments of `xent.linear_log_probs` and describe the call, as `log_probs_call` does."""
    others |= {"stats": _names(target, stats, entropy), "shift": one_shift(shift)}
    return _as_log_probs(
        linear_loss_call(input, linear_weight, target, **_OF_LOG_PROBS, **others), temperature, support
    )


def _as_log_probs(call: Call, temperature: Any, support: Any) -> Call:
    """Return a loss with reduction "none" as log-probabilities at this temperature and with this support.

    A 0-d tensor or MLX array is treated as a temperature per row: its value may be invalid, and may not be known yet.
    """
    source, target, activation, options, shards = call
    assert isinstance(target, Classes)
    array, rows = array_of(call), tuple(target.ids.shape)
    framework: Any = framework_of(array)
    temperature = number_of(framework, temperature)
    is_number = framework_of(temperature) is None
    others = _arrays_of_support(support) | ({} if is_number else {"temperature": temperature})
    if others:
        one_framework({"logits" if isinstance(source, Given) else "input": array, **others})
    if is_number:
        check_numbers(framework, {"temperature": temperature}, ", or an array of floats")
        activation = divided(activation, temperature)
    else:
        if framework == "torch" and not temperature.shape:
            temperature = temperature.expand(rows)
        _check_rows_of(framework, temperature, rows)
        activation = replaced(activation, temperature=temperature)
    return Call(
        source,
        target if support is None else _allowed(target.ids, support, math.prod(rows)),
        activation,
        options,
        shards,
    )


def _framework_of(first: Any, arrays: dict[str, Any], numbers: dict[str, Any]) -> str:
    """Return the framework of a call's arrays; in `arrays`, replace a normalizer of NumPy by a Python number."""
    others = {name: numbers[name] for name in _TENSORS if type(numbers[name]) not in PLAIN}
    if not others and type(arrays["normalizer"]) in PLAIN:
        return one_framework(arrays)
    owner = framework_of(first)
    arrays["normalizer"] = number_of(owner, arrays["normalizer"])
    tensors = {name: value for name, value in others.items() if owner == "torch" == framework_of(value)}
    return one_framework(arrays | tensors)


def _call(
    framework: str,
    source: Source,
    arrays: dict[str, Any],
    numbers: dict[str, Any],
    rows: tuple[int, ...],
    probabilities: tuple[int, ...],
    shards: Shards | None,
    others: dict[str, Any],
) -> Call:
    """Check the options, the target and the weights, and describe the call, with `others` among its options.

    `rows` and `probabilities` are the shapes of class indices and of class probabilities. A shard of the vocabulary may
    be empty.
    """
    given = {name: arrays[name] for name in ("weight", "sample_weight", "normalizer")}
    activation, options = loss_options(framework, **numbers, **given, **others)
    name, target, vocabulary = next(iter(arrays)), arrays["target"], vocabulary_of(source)
    shape = tuple(arrays[name].shape)
    if vocabulary == 0 and shards is None:
        raise ValueError(f"there must be at least one class, got 0 with {name} of shape {shape}")
    dtype, found = dtype_name(target), tuple(target.shape)
    if dtype in INTEGER_DTYPES or (dtype == "uint64" and framework == "numpy"):
        if found != rows:
            other = isinstance(source, Given) and found == shape[:1] + shape[2:]
            raise ValueError(
                f"target of class indices must have shape {rows} for {name} of shape {shape}, got {found}"
                + ("; if the classes are on axis 1, pass axis=1" if other else "")
            )
        known: Classes | Probabilities = Classes(target)
    elif dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"target must hold class indices ({', '.join(INTEGER_DTYPES)}) or class probabilities "
            f"({', '.join(FLOAT_DTYPES)}), got dtype {dtype}"
        )
    else:
        check_shape(
            target,
            probabilities,
            f"target of class probabilities (dtype {dtype}) must have shape {{}} for {name} of shape {shape}, got "
            "{}; class indices need an integer dtype",
        )
        known = Probabilities(target)
    if options.weight is not None:
        check_dtype("weight", options.weight)
        check_shape(options.weight, (vocabulary,), "weight must have shape {}, one per class; got {}")
    check_weights(framework, options.sample_weight, options.normalizer, rows, options.reduction)
    return Call(source, known, activation, options, shards)


def _names(target: Any, stats: Any, entropy: Any) -> tuple[str, ...]:
    """Return the names of the statistics to request from a backend, validated and in the order of `STAT_NAMES`.

    Raise TypeError for a target of class probabilities, which only the losses accept.
    """
    if not isinstance(entropy, bool):
        raise TypeError(f"entropy must be a bool, got {shown(entropy)}")
    check_stats(stats, LOG_PROB_STATS, ": pass entropy=True")
    if framework_of(target) is not None and dtype_name(target) not in (*INTEGER_DTYPES, "uint64"):
        raise TypeError(f"target must hold class indices ({', '.join(INTEGER_DTYPES)}), got dtype {dtype_name(target)}")
    return tuple(name for name in STAT_NAMES if name in stats or (entropy and name == "entropy"))


def _arrays_of_support(support: Any) -> dict[str, Any]:
    """Return the arrays of a support, by the names that error messages use."""
    if support is None:
        return {}
    if not isinstance(support, Support):
        raise TypeError(f"support must be a xent.Support or None, got {describe(support)}")
    arrays = {"support.ids": support.ids, "support.offsets": support.offsets}
    for name, part in arrays.items():
        if framework_of(part) is None:
            raise TypeError(f"{name} must be a 1-d integer array, got {describe(part)}")
    return arrays


def _allowed(ids: Any, support: Support, rows: int) -> Allowed:
    """Return target classes with a support. Raise TypeError or ValueError if it does not fit that many rows."""
    for name in ("ids", "offsets"):
        part = getattr(support, name)
        if dtype_name(part) not in INTEGER_DTYPES or len(part.shape) != 1:
            raise TypeError(f"support.{name} must be a 1-d integer array, got {describe(part)}")
    offsets, count = support.offsets, support.offsets.shape[0]
    if count != rows + 1:
        raise ValueError(
            f"support.offsets must have {rows + 1} entries, one more than there are rows of target; got {count}"
        )
    return Allowed(ids, support.ids, offsets[:-1], offsets[1:])


def _check_rows_of(framework: str, temperature: Any, rows: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError for an array that has no temperature for each row."""
    if dtype_name(temperature) not in FLOAT_DTYPES:
        raise TypeError(f"temperature must be a number, or an array of floats; got {describe(temperature)}")
    if tuple(temperature.shape) not in ((rows, ()) if framework == "mlx" else (rows,)):
        raise ValueError(
            f"temperature must be a number or have the target's shape {rows}, one for each row; got "
            f"{tuple(temperature.shape)}"
        )
