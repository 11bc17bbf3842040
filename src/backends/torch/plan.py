"""A cache of validated kinds of calls. A repeated call of a known kind skips validation and dispatch.

The kind of a call is a key of everything that validation and dispatch read: types, dtypes, devices and layouts of the
arrays, whether their shapes fit each other, which gradients are needed, the types of the options and whether their
values are allowed, autocast, and environment variables. Row counts and option values are not in the key; they are read
at every call. Keys contain no arrays.
"""

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.backends.torch import driver, private
from xent.backends.torch.environment import checks_targets, chosen_backend
from xent.backends.torch.options import Options, without_tensors
from xent.core.sampling import of_log_probs, tempered
from xent.core.spec import LOG_PROB_STATS, STAT_NAMES, LossSpec, Stats, Support
from xent.core.validate_options import check_number, loss_spec

__all__ = ["Found", "find_linear", "find_logits", "forget", "keep", "run_linear", "run_logits"]

_MOST = 1024
_PLAIN_TYPES, _STRIDED = private.PLAIN_TYPES, torch.strided
_kinds: dict[Hashable, str] = {}


Sampling = tuple[Any, Any, Any]
"""The arguments that only the log-probability functions have: (temperature, support, entropy)."""


class Found(NamedTuple):
    """The result of a look-up: the key of the call, its options, and the backend of its kind, None if it is new."""

    key: Hashable
    spec: LossSpec
    device: torch.device
    kernel: str | None
    scales: tuple[Tensor | None, Tensor | None]
    """Logit scale and softcap if they are tensors; the options then have NaN for them."""


def find_logits(
    logits: Any, target: Any, weight: Any, sample_weight: Any, normalizer: Any, axis: Any, inplace: Any, backend: Any,
    options: tuple[Any, ...], stats: Any, sampling: Sampling | None = None,
) -> Found | None:  # fmt: skip
    """Look up the kind of a call of `xent.cross_entropy`, or with `sampling` of `xent.log_probs`.

    Return None if a tracer, transform or mode is active, or if an argument needs full validation.
    """
    if private.is_watched() or type(axis) is not int or type(inplace) is not bool:
        return None
    numbers, scales, bent = _scales(options, sampling)
    spec = None if bent is None else _spec(numbers, stats, sampling)
    first = _facts(logits)
    if spec is None or first is None:
        return None
    shape = logits.shape
    dims = len(shape)
    if not -dims <= axis < dims:
        return None
    place = axis % dims
    rows = shape[:-1] if place == dims - 1 else shape[:place] + shape[place + 1 :]
    shared = _shared(target, shape, rows, shape[place], weight, sample_weight, normalizer, spec.reduction)
    sampled = () if sampling is None else _sampled(target, sampling)
    if shared is None or sampled is None:
        return None
    key = ("logits", first, place == dims - 1, inplace, bent, shared, sampled, _common(spec, backend))
    return Found(key, without_tensors(spec, *scales), logits.device, _kinds.get(key), scales)


def find_linear(
    source: Any, linear_weight: Any, linear_bias: Any, target: Any, weight: Any, sample_weight: Any, normalizer: Any,
    shift: Any, workspace: Any, backend: Any, options: tuple[Any, ...], stats: Any, sampling: Sampling | None = None,
) -> Found | None:  # fmt: skip
    """Look up the kind of a call of `xent.linear_cross_entropy`, or with `sampling` of `xent.linear_log_probs`."""
    if private.is_watched() or type(shift) is not int or (workspace is not None and type(workspace) is not int):
        return None
    numbers, scales, bent = _scales(options, sampling)
    spec = None if bent is None else _spec(numbers, stats, sampling)
    facts = (_facts(source), _facts(linear_weight))
    bias = None if linear_bias is None else _facts(linear_bias)
    if spec is None or None in facts or (bias is None) != (linear_bias is None):
        return None
    shape, classifier = source.shape, linear_weight.shape
    if not len(shape) or len(classifier) != 2:
        return None
    rows, vocabulary = shape[:-1], classifier[0]
    fits = classifier[1] == shape[-1] and (linear_bias is None or linear_bias.shape == (vocabulary,))
    probabilities = (*rows, vocabulary)
    shared = _shared(target, probabilities, rows, vocabulary, weight, sample_weight, normalizer, spec.reduction)
    sampled = () if sampling is None else _sampled(target, sampling)
    if shared is None or sampled is None:
        return None
    if not fits or shift < 0 or (shift and not rows) or (workspace is not None and workspace <= 0):
        return None
    autocast = None
    if private.any_autocast() and torch.is_autocast_enabled(source.device.type):
        autocast = torch.get_autocast_dtype(source.device.type)
    key = ("linear", facts, bias, autocast, bent, shared, sampled, _common(spec, backend))
    return Found(key, without_tensors(spec, *scales), source.device, _kinds.get(key), scales)


def keep(found: Found, kernel: str) -> None:
    """Store the backend that served the kind."""
    if found.device.type in ("cpu", "cuda"):  # on mps it may change: see `passed`
        if len(_kinds) >= _MOST:
            _kinds.clear()
        _kinds[found.key] = kernel


def forget() -> None:
    """Clear the cache."""
    _kinds.clear()


def run_logits(
    found: Found,
    logits: Tensor,
    target: Tensor,
    weight: Any,
    sample_weight: Any,
    normalizer: Any,
    axis: int,
    inplace: bool,
    sampling: Sampling | None = None,
) -> Any:
    """Run a call whose kind is known; with `sampling`, return the loss of each row and Stats."""
    options = _options(found, target, weight, sample_weight, normalizer, sampling)
    made = driver.run_logits(logits, options, axis % logits.dim(), inplace, True)
    return made if sampling is None or found.spec.stats else (made, Stats())


def run_linear(
    found: Found, source: Tensor, linear_weight: Tensor, linear_bias: Any, target: Tensor, weight: Any,
    sample_weight: Any, normalizer: Any, shift: int, workspace: int | None, sampling: Sampling | None = None,
) -> Any:  # fmt: skip
    """Run a call whose kind is known; with `sampling`, return the loss of each row and Stats."""
    options = _options(found, target, weight, sample_weight, normalizer, sampling)
    made = driver.run_linear(source, linear_weight, linear_bias, options, shift, workspace, True)
    return made if sampling is None or found.spec.stats else (made, Stats())


def _options(
    found: Found, target: Tensor, weight: Any, sample_weight: Any, normalizer: Any, sampling: Sampling | None
) -> Options:
    assert found.kernel is not None
    temperature = ids = offsets = None
    if sampling is not None:
        given, support, _ = sampling
        temperature = given if isinstance(given, Tensor) else None
        if support is not None:
            ids, offsets = support.ids, support.offsets
    arrays = (target, weight, sample_weight, normalizer, temperature, ids, offsets)
    return Options(*arrays, *found.scales, found.spec, found.kernel)


def _facts(tensor: Any) -> tuple[Any, ...] | None:
    """Return a tensor's part of the key, or None if it is not a plain dense tensor."""
    if type(tensor) not in _PLAIN_TYPES or tensor.is_nested or tensor.layout is not _STRIDED or tensor.is_neg():
        return None
    return tensor.dtype, tensor.device, tensor.requires_grad


def _shared(
    target: Any, probabilities: Any, rows: Any, vocabulary: int, weight: Any, sample_weight: Any, normalizer: Any,
    reduction: str,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Return the part of the key for the arrays that both functions have, or None if one does not fit."""
    facts = _facts(target)
    if facts is None or vocabulary == 0:
        return None
    if target.shape != (probabilities if facts[0].is_floating_point else rows):
        return None
    weights = samples = divisor = None
    if weight is not None:
        weights = _facts(weight)
        if weights is None or weight.shape != (vocabulary,):
            return None
    if sample_weight is not None:
        samples = _facts(sample_weight)
        if samples is None or sample_weight.shape != rows:
            return None
    if normalizer is not None:
        if reduction != "mean":
            return None
        if type(normalizer) in (int, float):
            divisor = (type(normalizer),)
            if not 0 <= normalizer < float("inf"):
                return None
        else:
            divisor = _facts(normalizer)
            if divisor is None or normalizer.dim():
                return None
    return facts, weights, samples, divisor


def _sampled(target: Any, sampling: Sampling) -> tuple[Any, ...] | None:
    """Return the part of the key for temperature and support, or None if one does not fit."""
    temperature, support, _ = sampling
    if not isinstance(target, Tensor):
        return None
    rows, each, ragged = target.shape, None, None
    if type(temperature) not in (int, float):
        each = _facts(temperature)
        if each is None or temperature.shape != rows:
            return None
    if support is not None:
        if type(support) is not Support:
            return None
        ragged = _facts(support.ids), _facts(support.offsets)
        if None in ragged or support.ids.dim() != 1 or support.offsets.shape != (rows.numel() + 1,):
            return None
    return "log-probabilities", each, ragged


def _common(spec: LossSpec, backend: Any) -> tuple[Any, ...]:
    """Return the part of the key for options, autograd mode and environment variables."""
    return (
        backend if isinstance(backend, str) else None,  # no kind has None: dispatch refuses other types
        spec.reduction,
        spec.softcap is None,
        spec.stats,
        torch.is_grad_enabled(),
        chosen_backend(),
        checks_targets(),
    )


def _scales(options: tuple[Any, ...], sampling: Sampling | None) -> tuple[Any, Any, tuple[Any, ...] | None]:
    """Return (options with 1 for tensors, the tensors among logit scale and softcap, their part of the key).

    The tensors are divided by a temperature that is a number. The part of the key is None if one does not fit.
    """
    softcap, logit_scale = options[-2:]
    if not isinstance(softcap, Tensor) and not isinstance(logit_scale, Tensor):
        return options, (None, None), ()
    scales = [value if isinstance(value, Tensor) else None for value in (logit_scale, softcap)]
    bent = tuple([None if value is None else _facts(value) for value in scales])
    if any(value is not None and (facts is None or value.dim()) for value, facts in zip(scales, bent, strict=True)):
        return options, (None, None), None
    if sampling is not None and type(sampling[0]) in (int, float) and sampling[0] > 0:
        scales = [None if value is None else tempered(value, sampling[0]) for value in scales]
    numbers = (1.0 if isinstance(value, Tensor) else value for value in (softcap, logit_scale))
    return (*options[:-2], *numbers), tuple(scales), bent


def _spec(options: tuple[Any, ...], stats: Any, sampling: Sampling | None) -> LossSpec | None:
    """Return the options that need no array, validated; None if validation fails."""
    if type(stats) is not tuple:
        if type(stats) not in (list, set, frozenset):
            return None
        stats = tuple(stats)
    try:
        if options[-1] == 0:  # 0.0 and -0.0 are equal keys, but give zeros of other signs in gradients
            return None
        if sampling is None:
            return _checked(*options, stats)
        temperature, _, entropy = sampling
        return _checked_sampling(*options, stats, temperature if type(temperature) in (int, float) else None, entropy)
    except (TypeError, ValueError):
        return None


@lru_cache(maxsize=256, typed=True)
def _checked(
    reduction: Any, ignore_index: Any, label_smoothing: Any, z_loss: Any, softcap: Any, logit_scale: Any, stats: Any
) -> LossSpec:
    return loss_spec(
        "torch",
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        stats=stats,
    )


@lru_cache(maxsize=256, typed=True)
def _checked_sampling(*given: Any) -> LossSpec | None:
    *options, stats, temperature, entropy = given
    if type(entropy) is not bool or not all(name in LOG_PROB_STATS for name in stats):
        return None
    if temperature is not None:
        check_number("temperature", temperature, "finite and > 0", lambda value: 0 < value < float("inf"))
    names = tuple(name for name in STAT_NAMES if name in stats or (entropy and name == "entropy"))
    return of_log_probs(_checked(*options, ()), names, temperature)
