"""With reduction "none" lse, nll and entropy are differentiable: their gradients are those of MLX's own operations."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.targets import Target
from xent.backends.mlx.kernels import KERNELS, RowFacts

RNG = np.random.default_rng(11)
N, D, V = 24, 8, 37
X, W, B = (mx.array(RNG.normal(size=shape), mx.float32) for shape in ((N, D), (V, D), (V,)))
TARGET = mx.array(np.where(np.arange(N) % 5 == 1, -100, RNG.integers(0, V, N)))
GIVEN = mx.softmax(mx.array(2 * RNG.normal(size=(N, V)), mx.float32), axis=-1)
UPSTREAM = {name: mx.array(RNG.normal(size=(N,)), mx.float32) for name in ("loss", "lse", "nll", "entropy")}
WEIGHT = mx.array(np.where(np.arange(V) % 6 == 0, 0, RNG.uniform(0.5, 2, V)), mx.float32)
SAMPLE = mx.array(np.where(np.arange(N) % 7 == 2, 0, RNG.uniform(0.5, 2, N)), mx.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap, scale": {"softcap": 3.0, "logit_scale": -0.7},
    "all": {
        "weight": WEIGHT,
        "sample_weight": SAMPLE,
        "label_smoothing": 0.1,
        "z_loss": 0.05,
        "softcap": 4.0,
        "logit_scale": 1.3,
    },
}
CHOSEN = [("lse",), ("nll",), ("entropy",), ("loss", "lse"), ("loss", "lse", "nll", "entropy")]


def plain(
    logits: mx.array,
    target: mx.array,
    weight: mx.array | None = None,
    sample_weight: mx.array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> dict[str, mx.array]:
    """Return loss and statistics of each row, from operations that MLX differentiates."""
    x = logits * logit_scale
    x = x if softcap is None else softcap * mx.tanh(x / softcap)
    log_p = x - mx.logsumexp(x, axis=-1, keepdims=True)
    counts, given = mx.ones((len(x),), mx.bool_), target
    if target.ndim == 1:
        counts, given = target != -100, (mx.arange(V) == target[:, None]).astype(x.dtype)
    weight = mx.ones((V,), x.dtype) if weight is None else weight
    share = weight * ((1 - label_smoothing) * given + label_smoothing / V)
    lse = mx.logsumexp(x, axis=-1)
    a = mx.ones((len(x),), x.dtype) if sample_weight is None else sample_weight
    made = {
        "loss": a * (-(share * log_p).sum(-1) + z_loss * mx.square(lse)),
        "lse": lse,
        "nll": -(given * log_p).sum(-1),
        "entropy": -(mx.exp(log_p) * log_p).sum(-1),
    }
    return {name: mx.where(counts, value, 0) for name, value in made.items()}


def weighed(made: dict[str, mx.array], names: tuple[str, ...]) -> mx.array:
    return sum(((made[name] * UPSTREAM[name].astype(made[name].dtype)).sum() for name in names), mx.array(0.0))


def fused(on: Target, names: tuple[str, ...], function: str, **options: Any) -> Callable[..., mx.array]:
    stats = tuple(name for name in names if name != "loss")

    def call(*arrays: mx.array) -> mx.array:
        bias = {"linear_bias": arrays[2]} if len(arrays) == 3 else {}
        found = getattr(xent, function)(*arrays[:2], **bias, **options, reduction="none", stats=stats, backend=on.name)
        return weighed({"loss": found[0]} | {name: getattr(found[1], name) for name in stats}, names)

    return call


def close(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        size = np.abs(np.array(other)).max()
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("names", CHOSEN, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("target_array", [TARGET, GIVEN], ids=["indices", "probabilities"])
@pytest.mark.parametrize("wrap", [lambda f: f, mx.compile], ids=["eager", "compiled"])
def test_gradients_of_statistics(
    target: Target, names: tuple[str, ...], options: str, target_array: mx.array, wrap: Any
) -> None:
    logits = X @ W.T
    call = fused(target, names, "cross_entropy", **OPTIONS[options])
    found = wrap(mx.grad(lambda z: call(z, target_array)))(logits)
    expected = mx.grad(lambda z: weighed(plain(z, target_array, **OPTIONS[options]), names))(logits)
    close([found], [expected])


@pytest.mark.parametrize("names", CHOSEN, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("wrap", [lambda f: f, mx.compile], ids=["eager", "compiled"])
def test_gradients_of_statistics_of_a_classifier(
    target: Target, names: tuple[str, ...], options: str, wrap: Any
) -> None:
    """Weights of 0, whose rows have statistics, and unused outputs are included."""
    ours = fused(target, names, "linear_cross_entropy", target=TARGET, workspace=5 * V * 4, **OPTIONS[options])
    found = wrap(mx.grad(lambda x, w, b: ours(x, w, b), argnums=(0, 1, 2)))(X, W, B)
    theirs = mx.grad(lambda x, w, b: weighed(plain(x @ w.T + b, TARGET, **OPTIONS[options]), names), argnums=(0, 1, 2))
    close(found, theirs(X, W, B))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_low_precision(target: Target, dtype: mx.Dtype) -> None:
    logits, names = (X @ W.T).astype(dtype), CHOSEN[-1]
    found = mx.grad(lambda z: fused(target, names, "cross_entropy")(z, TARGET))(logits)
    expected = mx.grad(lambda z: weighed(plain(z.astype(mx.float32), TARGET), names))(logits)
    assert found.dtype == dtype
    close([found.astype(mx.float32)], [expected.astype(mx.float32)], 2.0**-8)


def test_unused_statistic_costs_nothing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upstream gradient of an unused output is recognised as 0."""
    seen = []
    right = KERNELS[target.name]

    def watched(logits: mx.array, facts: RowFacts, norm: mx.array) -> mx.array:
        seen.append(set(facts.upstream))
        return right.backward(logits, facts, norm)

    monkeypatch.setitem(KERNELS, target.name, replace(right, backward=watched))
    options = {"reduction": "none", "stats": ("lse", "entropy"), "backend": target.name}
    step = mx.grad(lambda z: xent.cross_entropy(z, TARGET, **options)[0].sum())
    used = mx.grad(lambda z: xent.cross_entropy(z, TARGET, **options)[1].lse.sum())
    for wrapped in (step, mx.compile(step), used):
        mx.eval(wrapped(X @ W.T))
    assert seen == [set(), set(), {"lse", "H"}]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_of_statistics_raise(target: Target, reduction: str) -> None:
    def entropy(z: mx.array) -> mx.array:
        return xent.cross_entropy(z, TARGET, reduction=reduction, stats=("entropy",), backend=target.name)[1].entropy

    gradient = mx.grad(lambda z: entropy(z).sum())
    if reduction == "mean":
        assert not gradient(X @ W.T).any()
        return
    with pytest.raises(RuntimeError, match="no second derivatives"):
        mx.grad(lambda z: gradient(z).sum())(X @ W.T)
