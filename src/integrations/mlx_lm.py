"""Loss and log-probabilities of the models of mlx-lm and mlx-vlm from hidden states, without logits.

`loss` replaces `mlx_lm.tuner.trainer.default_loss`. The models return logits, or an object that has them. To get the
hidden states, the model runs with a temporary head that stores its input and returns a few known numbers instead of
logits (probes). From the numbers that the model returns for the probes, a softcap or a scale of the logits is derived,
so that no configuration has to be read.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from xent.api import linear_cross_entropy, linear_log_probs
from xent.backends.mlx.autograd import is_differentiated
from xent.integrations.mlx import FUSE_FIRST, classifier, is_adapted

__all__ = ["log_probs", "loss"]

_PROBES = (0.0, 2.0**-13, 1.0, -7.0, 40.0, 1e9)
_Inputs = Mapping[str, Any] | None
_HINT = "use mlx_lm.tuner.trainer.default_loss for this model, or xent.log_probs on its logits"


def loss(
    model: nn.Module, batch: mx.array, lengths: mx.array, *, inputs: _Inputs = None, **options: Any
) -> tuple[mx.array, mx.array]:
    """Compute the same as ``mlx_lm.tuner.trainer.default_loss``, without storing the logits.

    The result is the mean cross entropy in float32 of the tokens t with lengths[i, 0] <= t <= lengths[i, 1], each
    predicted from the tokens before it. Pass the function to mlx-lm: ``train(..., loss=loss)``,
    ``evaluate(..., loss=loss)``; to set options use ``functools.partial(loss, z_loss=1e-4)``.

    The head may be a Linear layer or a tied Embedding, quantized or not, frozen or trained. A softcap or a scale of the
    logits is read from the model.

    Parameters
    ----------
    model : mlx.nn.Module
        A model of mlx-lm or mlx-vlm: tokens (B, T) to logits (B, T, V), or to an object with these as ``logits``.
    batch : integer array (B, T + 1)
        Tokens, padded.
    lengths : integer array (B, 2)
        The first and the last position that is counted in each row.
    inputs : mapping of str to values, optional
        Other arguments of the model, by their names: ``{"pixel_values": images}`` for one of mlx-vlm. What has a value
        per token, such as a mask, must be that of the tokens ``batch[:, :-1]``.
    **options
        Options of `xent.linear_cross_entropy`: label_smoothing, z_loss, weight, workspace, backend.

    Returns
    -------
    loss : 0-d float32 array
        0, not NaN, if no token is counted.
    ntoks : 0-d int32 array
        The number of counted tokens.

    Raises
    ------
    ValueError, TypeError
        The model's head was not found or has another type, or the model changes its logits by more than a scale and a
        softcap.

    Examples
    --------
    >>> import mlx.core as mx
    >>> from mlx_lm.models import llama  # doctest: +SKIP
    >>> model = llama.Model(llama.ModelArgs.from_dict(config))  # doctest: +SKIP
    >>> (value, ntoks), grads = nn.value_and_grad(model, loss)(model, batch, lengths)  # doctest: +SKIP
    """
    counts = _counts(batch, lengths)
    mean_loss = linear_cross_entropy(**_linear(model, batch, counts, inputs), **options)
    return mean_loss, counts.sum()


def log_probs(
    model: nn.Module,
    batch: mx.array,
    lengths: mx.array | None = None,
    *,
    inputs: _Inputs = None,
    **options: Any,
) -> Any:
    """Compute the log-probability of each token of a batch, given the tokens before it, without storing the logits.

    This equals ``mx.take_along_axis(nn.log_softmax(model(batch[:, :-1]), -1), batch[:, 1:, None], -1)`` without the
    last axis, from float32 logits for models of every dtype. The head may be of the same types as for `loss`.

    Parameters
    ----------
    model : mlx.nn.Module
        A model of mlx-lm or mlx-vlm: tokens (B, T) to logits (B, T, V), or to an object with these as ``logits``.
    batch : integer array (B, T + 1)
        Tokens, padded.
    lengths : integer array (B, 2), optional
        The first and the last position that is counted in each row, as in `loss`. The others have log-probability 0 and
        no gradient. None: all are counted.
    inputs : mapping of str to values, optional
        Other arguments of the model, as in `loss`.
    **options
        Options of `xent.linear_log_probs`: temperature, support, entropy, stats, workspace, backend. ``temperature``
        and ``support`` are aligned with the tokens ``batch[:, 1:]``.

    Returns
    -------
    log_probs : float32 array (B, T)
        Entry [i, t] is the log-probability of ``batch[i, t + 1]``. With ``entropy`` or ``stats`` the result is a tuple,
        as from `xent.linear_log_probs`.

    Raises
    ------
    ValueError, TypeError
        As in `loss`.

    Examples
    --------
    >>> import mlx.core as mx
    >>> from mlx_lm.models import llama  # doctest: +SKIP
    >>> model = llama.Model(llama.ModelArgs.from_dict(config))  # doctest: +SKIP
    >>> answers = log_probs(model, batch, lengths).sum(-1)  # doctest: +SKIP
    """
    counts = mx.ones(batch[:, 1:].shape, mx.bool_) if lengths is None else _counts(batch, lengths)
    return linear_log_probs(**_linear(model, batch, counts, inputs), **options)


def _counts(batch: mx.array, lengths: mx.array) -> mx.array:
    """Return the mask (B, T) of the counted tokens among those after the first."""
    steps = mx.arange(1, batch.shape[1])
    return mx.logical_and(steps >= lengths[:, 0:1], steps <= lengths[:, 1:])


def _linear(model: nn.Module, batch: mx.array, counts: mx.array, inputs: _Inputs) -> dict[str, Any]:
    """Return the arguments of `xent.linear_cross_entropy` for the hidden states of all tokens but the last."""
    head, hidden, softcap, scale = _before_head(model, batch[:, :-1], inputs or {})
    weight, bias = classifier(head)
    if isinstance(weight, mx.array):
        common = mx.result_type(weight, hidden)
        weight, hidden = weight.astype(common), hidden.astype(common)
        bias = None if bias is None else bias.astype(common)
    return {
        "input": hidden,
        "linear_weight": weight,
        "target": mx.where(counts, batch[:, 1:].astype(mx.int64), -100),
        "linear_bias": bias,
        "softcap": softcap,
        "logit_scale": scale,
    }


def _before_head(
    model: nn.Module, tokens: mx.array, inputs: Mapping[str, Any]
) -> tuple[nn.Module, mx.array, float | None, float]:
    """Return the head, its input (the hidden states, (B, T, D)), and softcap and scale of the logits."""
    seen: list[tuple[nn.Module, mx.array]] = []
    kind = type(model).__module__
    with _capturing(model, seen):
        try:
            output = model(tokens, **inputs)
        except ValueError as error:
            if not seen:
                raise
            raise ValueError(f"{kind} combines the output of its head with something: {_hint(model)}") from error
    if len(seen) != 1:
        raise ValueError(f"the head of {kind} was called {len(seen)} times where once was expected: {_hint(model)}")
    head, hidden = seen[0]
    return head, hidden, *_after_head(getattr(output, "logits", output), hidden.ndim, kind)


@contextmanager
def _capturing(model: nn.Module, seen: list[tuple[nn.Module, mx.array]]) -> Iterator[None]:
    """Make every module that may be the head append (itself, its input) to `seen` and return the probes."""

    def capture(module: nn.Module, hidden: mx.array) -> mx.array:
        seen.append((module, hidden))
        return mx.array(_PROBES).reshape((1,) * (hidden.ndim - 1) + (-1,))

    changed = [(module, type(module)) for module in _candidates(model)]
    try:
        for module, kind in changed:
            method = "as_linear" if hasattr(kind, "as_linear") else "__call__"
            module.__class__ = type(kind.__name__, (kind,), {method: capture})
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind


def _hint(model: nn.Module) -> str:
    adapted = [f"model.{name}" for name, module in _outside_layers(model) if is_adapted(module)]
    return f"LoRA wraps {adapted[0]}. {FUSE_FIRST}; or {_HINT}" if adapted else _HINT


def _outside_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return names and modules that belong neither to the list of layers nor to what mlx-vlm adds for other media.

    The embeddings of these are not those of tokens.
    """
    return [
        (name, module)
        for name, module in model.named_modules()
        if not name.startswith(("vision", "visual", "audio")) and not any(map(str.isdigit, name.split(".")))
    ]


def _candidates(model: nn.Module) -> list[nn.Module]:
    """Return the modules outside of the layers that may be the head: embeddings, linear layers with V outputs."""
    modules = _outside_layers(model)
    embeddings = [module for _, module in modules if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))]
    sizes = {module["weight"].shape[0] for module in embeddings}
    heads = [
        module
        for name, module in modules
        if isinstance(module, (nn.Linear, nn.QuantizedLinear))
        and (module["weight"].shape[0] in sizes or name.split(".")[-1] == "lm_head")
    ]
    return embeddings + heads


def _after_head(response: Any, ndim: int, kind: str) -> tuple[float | None, float]:
    """Return the softcap and scale that turn the probes into the numbers that the model returned for them."""
    more = ValueError(f"{kind} does more to its logits than a scale and a softcap: {_HINT}")
    is_known = isinstance(response, mx.array) and (response.size, response.ndim) == (len(_PROBES), ndim)
    if not is_known or is_differentiated(response):
        raise more
    try:
        numbers: Any = response.reshape(-1).astype(mx.float32).tolist()
    except ValueError as error:  # the numbers depend on an argument of a traced function, which has no value yet
        raise more from error
    tiny, unit, largest = numbers[1] / _PROBES[1], numbers[2], numbers[-1] / _PROBES[-1]
    straight = abs(largest - unit) <= 1e-4 * abs(unit)
    softcap: float | None
    softcap, scale = (None, unit) if straight else (abs(numbers[-1]), tiny)
    expected = mx.array(_PROBES) * scale
    if softcap is not None:
        expected = softcap * mx.tanh(expected / softcap)
    if not mx.allclose(mx.array(numbers), expected, rtol=1e-4, atol=1e-9).item():
        raise more
    return softcap, 1.0 if abs(scale - 1) < 1e-5 else scale
