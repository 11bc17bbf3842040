"""Validate the arguments of the losses and of the log-probabilities, and describe the call. Errors name the argument.

This module checks the shapes and dtypes of arrays, with `validate_arrays`; `options` checks numbers and names. Backends
check the values in a target (see `XENT_CHECK_TARGETS` in `xent.cross_entropy`), because reading them may synchronise
with the device.
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
from xent.core.call import Allowed, Call, Classes, Given, Options, Probabilities, Product, array_of, replaced
from xent.core.options import (
    check_numbers,
    check_stats,
    divided,
    head_weights,
    loss_options,
    one_shift,
    shift_and_workspace,
)
from xent.core.shards import check_tokens, shards_of
from xent.core.spec import LOG_PROB_STATS, STAT_NAMES, Support
from xent.core.validate_arrays import (
    check_classifier,
    check_float,
    check_normalizer,
    check_sample_weight,
    check_sequence,
    class_axis,
    parts_of,
)

__all__ = ["as_log_probs", "linear_log_probs_call", "linear_loss_call", "log_probs_call", "loss_call"]

_NO_WEIGHTS: dict[str, Any] = {"weight": None, "sample_weight": None, "normalizer": None}
_OF_LOG_PROBS: dict[str, Any] = _NO_WEIGHTS | {"reduction": "none", "label_smoothing": 0.0, "z_loss": 0.0, "stats": ()}
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
    arrays = {"target": target, "weight": weight, "sample_weight": sample_weight, "normalizer": normalizer}
    framework, arrays = _arrays_of(logits, {"logits": logits} | arrays, numbers)
    activation, options = loss_options(framework, **numbers)
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
    known = _target_of("logits", shape, rows, shape, shape[axis], target, shards is not None)
    options = _weighted(framework, options, arrays, rows, shape[axis])
    return Call(Given(logits, axis, inplace), known, activation, options, shards)


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
    framework, arrays = _arrays_of(input, arrays, numbers)
    activation, options = loss_options(framework, **numbers)
    check_classifier(framework, input, linear_weight, linear_bias)
    shift, workspace = shift_and_workspace(shift, workspace)
    shards = shards_of(framework, vocab_parallel)
    weights = head_weights(framework, shift, head_weight, options.reduction)
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
    vocabulary = linear_weight.shape[0]
    known = _target_of("input", tuple(input.shape), rows, (*rows, vocabulary), vocabulary, target, shards is not None)
    options = _weighted(framework, options, arrays, rows, vocabulary)
    options = replaced(options, shift=shift, heads=heads, head_weight=weights)
    return Call(Product(input, linear_weight, linear_bias, workspace), known, activation, options, shards)


def log_probs_call(
    logits: Any, target: Any, *, temperature: Any, support: Any, entropy: Any, stats: Any, **others: Any
) -> Call:
    """Check the arguments of `xent.log_probs` and describe the call: a loss with reduction "none", not negated."""
    names = _names(stats, entropy)
    _check_classes(target)
    call = loss_call(logits, target, inplace=False, **_OF_LOG_PROBS, **others)
    return as_log_probs(call, target, temperature, support, names)


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
    names = _names(stats, entropy)
    _check_classes(target)
    call = linear_loss_call(input, linear_weight, target, shift=one_shift(shift), **_OF_LOG_PROBS, **others)
    return as_log_probs(call, target, temperature, support, names)


def as_log_probs(call: Call, target: Any, temperature: Any, support: Any, stats: tuple[str, ...]) -> Call:
    """Return a loss with reduction "none" as log-probabilities with these statistics; validate the other arguments.

    A 0-d tensor or MLX array is treated as a temperature per row: its value may be invalid, and may not be known yet.
    """
    array, rows = array_of(call), tuple(target.shape)
    number = number_of(framework_of(array), temperature)
    is_number = number is not temperature or framework_of(number) is None
    arrays = {"logits" if isinstance(call.source, Given) else "input": array}
    arrays |= {} if is_number else {"temperature": temperature}
    framework = one_framework(**arrays, **_arrays_of_support(support))
    activation = call.activation
    if is_number:
        check_numbers(framework, ", or an array of floats", temperature=number)
        activation = divided(activation, number)
    else:
        if framework == "torch" and not temperature.shape:
            temperature = temperature.expand(rows)
        _check_rows_of(framework, temperature, rows)
        activation = replaced(activation, temperature=temperature)
    if support is not None:
        call = replaced(call, target=_allowed(target, support, math.prod(rows)))
    options = replaced(call.options, stats=stats, exact=True, accuracy_of_rows=True)
    return replaced(call, activation=activation, options=options)


def _arrays_of(first: Any, arrays: dict[str, Any], numbers: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the framework of a call's arrays, and the arrays with a normalizer of NumPy as a Python number."""
    owner = framework_of(first)
    arrays = arrays | {"normalizer": number_of(owner, arrays["normalizer"])}
    others = {name: numbers[name] for name in _TENSORS if type(numbers[name]) not in PLAIN}
    tensors = {name: value for name, value in others.items() if owner == "torch" == framework_of(value)}
    return one_framework(**arrays, **tensors), arrays


def _target_of(
    source: str,
    shape: tuple[int, ...],
    rows: tuple[int, ...],
    probabilities: tuple[int, ...],
    vocabulary: int,
    target: Any,
    in_shards: bool,
) -> Classes | Probabilities:
    """Check a target against `rows` and `probabilities`, the shapes of class indices and of class probabilities.

    `source` is the name of the array of this `shape`. A shard of the vocabulary may be empty.
    """
    if vocabulary == 0 and not in_shards:
        raise ValueError(f"there must be at least one class, got 0 with {source} of shape {shape}")
    dtype, found = dtype_name(target), tuple(target.shape)
    if dtype in INTEGER_DTYPES or (dtype == "uint64" and framework_of(target) == "numpy"):
        if found != rows:
            other = source == "logits" and found == shape[:1] + shape[2:]
            raise ValueError(
                f"target of class indices must have shape {rows} for {source} of shape {shape}, got {found}"
                + ("; if the classes are on axis 1, pass axis=1" if other else "")
            )
        return Classes(target)
    if dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"target must hold class indices ({', '.join(INTEGER_DTYPES)}) or class probabilities "
            f"({', '.join(FLOAT_DTYPES)}), got dtype {dtype}"
        )
    if found != probabilities:
        raise ValueError(
            f"target of class probabilities (dtype {dtype}) must have shape {probabilities} for {source} of shape "
            f"{shape}, got {found}; class indices need an integer dtype"
        )
    return Probabilities(target)


def _weighted(
    framework: str, options: Options, arrays: dict[str, Any], rows: tuple[int, ...], vocabulary: int
) -> Options:
    """Check weights and normalizer, and return the options with them."""
    weight = arrays["weight"]
    if weight is arrays["sample_weight"] is arrays["normalizer"] is None:
        return options
    if weight is not None:
        check_float("weight", weight)
        if tuple(weight.shape) != (vocabulary,):
            raise ValueError(f"weight must have shape ({vocabulary},), one per class; got {tuple(weight.shape)}")
    return replaced(
        options,
        weight=weight,
        sample_weight=check_sample_weight(arrays["sample_weight"], rows),
        normalizer=check_normalizer(framework, arrays["normalizer"], options.reduction),
    )


def _names(stats: Any, entropy: Any) -> tuple[str, ...]:
    """Return the names of the statistics to request from a backend, validated and in the order of `STAT_NAMES`."""
    if not isinstance(entropy, bool):
        raise TypeError(f"entropy must be a bool, got {shown(entropy)}")
    check_stats(stats, LOG_PROB_STATS, ": pass entropy=True")
    return tuple(name for name in STAT_NAMES if name in stats or (entropy and name == "entropy"))


def _check_classes(target: Any) -> None:
    """Raise TypeError for class probabilities, which only the losses accept."""
    if framework_of(target) is None or dtype_name(target) in (*INTEGER_DTYPES, "uint64"):
        return
    raise TypeError(f"target must hold class indices ({', '.join(INTEGER_DTYPES)}), got dtype {dtype_name(target)}")


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
    offsets = support.offsets
    if offsets.shape[0] != rows + 1:
        raise ValueError(
            f"support.offsets must have {rows + 1} entries, one more than there are rows of target; got "
            f"{offsets.shape[0]}"
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
