"""The k most probable classes of rows in MLX's own operations, part by part: see `xent.backends.torch.top_k`.

MLX's sorts keep the order of equal elements.
"""

from math import prod

import mlx.core as mx

from xent.backends.mlx.autograd import guarded
from xent.backends.mlx.devices import accumulation_dtype, chunk_device, class_sum, exact_exp
from xent.backends.mlx.facts import aligned
from xent.backends.mlx.kernels import activate, ordered
from xent.backends.mlx.sources import Logits
from xent.core.call import Activation, Call, Largest, array_of, vocabulary_of, without_temperature
from xent.core.chunks import rows_per_chunk

__all__ = ["run"]

_BLOCK = 16  # classes


def run(call: Call) -> tuple[mx.array, mx.array]:
    """Return ids and log-probabilities (..., K)."""
    call = guarded(aligned(without_temperature(call)))
    source, target, shape = call.source, call.target, tuple(array_of(call).shape[:-1])
    assert isinstance(target, Largest)
    count, acc, parts = prod(shape), accumulation_dtype(array_of(call).dtype), list[tuple[mx.array, mx.array]]()
    logits, workspace = Logits(source, None, True, None), getattr(source, "workspace", None)
    step = rows_per_chunk(count, vocabulary_of(source), acc.size, workspace, chunk_device())
    for start in range(0, count, step):
        part = logits.load(slice(start, min(start + step, count)), list(parts[-1]) if parts else [])
        parts.append(_of_rows(part.logits, call.activation, target.k))
    if not parts:
        parts = [(mx.array([], dtype=mx.int32), mx.array([], dtype=acc))]
    ids, log_probs = (mx.concatenate(list(column)) for column in zip(*parts, strict=True))
    return ids.reshape(*shape, target.k), log_probs.reshape(*shape, target.k)


def _of_rows(z: mx.array, activation: Activation, k: int) -> tuple[mx.array, mx.array]:
    scale, softcap, _ = activation
    places = _largest(ordered(z, mx.array(scale)), k)
    x, _ = activate(z.astype(accumulation_dtype(z.dtype)), scale, softcap)
    top = mx.take_along_axis(x, places, -1)
    peak = top[:, :1]
    total = class_sum(exact_exp(x - mx.where(peak == -mx.inf, 0, peak)))[:, None]
    log_probs = mx.where(top == -mx.inf, top, top - peak) - mx.log(mx.where(total == 0, 1, total))
    return places.astype(mx.int32), log_probs


def _largest(z: mx.array, k: int) -> mx.array:
    """Return the places (R, k) of the k largest logits (R, C), the largest first, the first among equals."""
    count = z.shape[1]
    if count <= k * _BLOCK:
        return mx.argsort(-z, axis=-1)[:, :k]
    z = mx.pad(z, [(0, 0), (0, -count % _BLOCK)], constant_values=-mx.inf)
    blocks = mx.sort(_largest(z.reshape(len(z), -1, _BLOCK).max(-1), k), axis=-1)
    places = (blocks[:, :, None] * _BLOCK + mx.arange(_BLOCK, dtype=blocks.dtype)).reshape(len(z), -1)
    order = mx.argsort(-mx.take_along_axis(z, places, -1), axis=-1)[:, :k]
    return mx.take_along_axis(places, order, -1)
