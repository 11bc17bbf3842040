"""Divergences from a teacher and their gradients, in MLX's own operations.

See `xent.backends.divergence_terms` for the terms. Invalid values of a top-k teacher make a row NaN.
"""

from collections.abc import Collection

import mlx.core as mx

from xent.backends.divergence_terms import divergence_terms, teacher_cells
from xent.backends.mlx.devices import class_sum, exact_exp
from xent.backends.mlx.kernels import Facts, Results, activate
from xent.core.call import Dense, Given, Options, TopK, array_of

__all__ = ["backward", "forward"]


def forward(logits: mx.array, facts: Facts, requested: Collection[str]) -> Results:
    """Return the results of a block, with the gradient of its logits. MLX computes it only if it is needed."""
    x, slope = facts.activate(logits)
    loss, derivative = _divergence(facts, x)
    results = {"loss": mx.where(facts.excluded, 0, loss * facts.weight)}
    if "entropy" in requested:
        log_p, p = _softmax(x)
        results["entropy"] = mx.where(facts.skippable, 0, 0 - class_sum(mx.where(p == 0, 0, p * log_p)))
    factor = (facts.scale * facts.number("logit_scale"))[:, None]
    grad = mx.where(facts.excluded[:, None], 0, derivative * (factor if slope is None else factor * slope))
    # A gradient is rounded to float16 only after the upstream gradient is multiplied in.
    dtype = array_of(facts.call).dtype
    results["grad"] = grad if dtype == mx.float16 and isinstance(facts.call.source, Given) else grad.astype(dtype)
    return results


def backward(logits: mx.array, facts: Facts, norm: None) -> mx.array:
    """Return the gradient of a block. Divergences have no norm."""
    return forward(logits, facts, ())["grad"]


def _divergence(facts: Facts, x: mx.array) -> tuple[mx.array, mx.array]:
    """Return the divergence (R,) and its derivative (R, V) with respect to x."""
    target, options = facts.call.target, facts.call.options
    if isinstance(target, Dense):
        assert facts.teacher is not None
        scale, softcap, _ = target.activation
        (log_p, p), (log_q, q) = _softmax(x), _softmax(activate(facts.teacher.astype(x.dtype), scale, softcap)[0])
        terms, v, factor = divergence_terms(mx, options, p, q, log_p, log_q)
        return class_sum(terms), p - q if v is None else _pulled(p, v) * factor
    assert isinstance(target, TopK)
    assert facts.ids is not None
    assert facts.log_q is not None
    ids = mx.where((facts.ids < 0) | facts.excluded[:, None], x.shape[-1], facts.ids)
    return _from_top_k(options, x, ids, facts.log_q, target)


def _from_top_k(
    options: Options, x: mx.array, ids: mx.array, log_q: mx.array, teacher: TopK
) -> tuple[mx.array, mx.array]:
    """Return the divergence (R,) from K classes of each row, and its derivative (R, V). Entries with id V are none."""
    vocabulary, tail = x.shape[-1], teacher.tail
    known = ids < vocabulary
    log_p, p = _softmax(x)
    if tail == "renormalize":
        log_q = _softmax(log_q)[0]
    q = exact_exp(log_q)
    mass, safe = class_sum(q)[:, None], mx.minimum(ids, vocabulary - 1)
    log_p_k, p_k = (mx.take_along_axis(array, safe, -1) for array in (log_p, p))
    if tail != "bucket" and options.kind == "kl":
        loss = mx.where(known, q * (log_q - log_p_k), 0).sum(-1)
        return loss, _put(p * mass, ids, p_k * mass - q)
    # All other classes are one more cell. Their shares of it do not depend on the teacher.
    others = _put(x, ids, mx.full(ids.shape, -mx.inf, x.dtype))
    largest = others.max(-1, keepdims=True)
    empty = largest == -mx.inf
    log_shares, shares = _softmax(mx.where(empty, 0, others))
    log_sum_others = largest - log_shares.max(-1, keepdims=True)
    log_p_others = log_sum_others - (x.max(-1) - log_p.max(-1))[:, None]
    q, log_q, whole = teacher_cells(mx, teacher, q, log_q, mass, empty)
    p = mx.concatenate([mx.where(known, p_k, 0), exact_exp(log_p_others)], -1)
    log_p = mx.concatenate([log_p_k, log_p_others], -1)
    terms, v, factor = divergence_terms(mx, options, p, q, log_p, log_q)
    loss = class_sum(terms) + (whole[:, 0] - 1 if v is None else 0)
    derivative = p * whole - q if v is None else _pulled(p, v) * factor
    return loss, _put(derivative[:, -1:] * shares, ids, derivative[:, :-1])


def _softmax(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return log p and p; p is more accurate than the exponential of the rounded log p."""
    y = x - mx.max(x, axis=-1, keepdims=True)
    e = exact_exp(y)
    total = class_sum(e)[:, None]
    return y - mx.log(total), e / total


def _put(array: mx.array, ids: mx.array, new: mx.array) -> mx.array:
    """Return values (R, V) with new ones (R, K) at the classes `ids`; id V is ignored."""
    wide = mx.concatenate([array, mx.zeros((len(array), 1), array.dtype)], axis=-1)
    return mx.put_along_axis(wide, ids, new.astype(array.dtype), axis=-1)[:, : array.shape[-1]]


def _pulled(p: mx.array, u: mx.array) -> mx.array:
    """Return p (sum_c p_c u_c - u), 0 where p is 0; see `refold` in `xent.backends.torch.portable.divergence`."""
    u = u - mx.take_along_axis(u, mx.argmax(p, axis=-1, keepdims=True), -1)
    mean = class_sum(mx.where(p == 0, 0, p * u))[:, None]
    return mx.where(p == 0, 0, p * (mean - u))
