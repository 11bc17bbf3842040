"""Divergences in MLX: gradients under transformations, rows without weight, invalid teachers."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import xent
from tests.mlx.quantized import expect_right_products
from tests.targets import Target
from xent.backends.mlx import autograd
from xent.integrations.mlx import classifier

RNG = np.random.default_rng(0)
STUDENT = RNG.normal(0, 2, (6, 11))
TEACHER = RNG.normal(0, 2, (6, 11))
HIDDEN, CLASSIFIER = RNG.normal(size=(6, 8)), RNG.normal(size=(11, 8))
WIDE, WIDE_CLASSIFIER = RNG.normal(size=(6, 5)), RNG.normal(size=(11, 5))


def arrays(*values: Any, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, ...]:
    return tuple(mx.array(value, dtype=dtype) for value in values)


def top_k(logits: Any, tail: str = "bucket") -> xent.TopKTeacher:
    log_q = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
    ids = np.argsort(-log_q, -1)[:, :4]
    return xent.TopKTeacher(mx.array(ids), mx.array(np.take_along_axis(log_q, ids, -1), dtype=mx.float32), tail=tail)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_under_compile(target: Target, compiled: bool, reduction: str) -> None:
    x, w, wide, wide_w = arrays(HIDDEN, CLASSIFIER, WIDE, WIDE_CLASSIFIER)

    def loss(x: mx.array, w: mx.array, wide: mx.array) -> mx.array:
        teacher = xent.LinearTeacher(wide, wide_w)
        made: mx.array = xent.linear_divergence(x, w, teacher, beta=0.5, reduction=reduction, backend=target.name)
        return made.sum()

    expected = mx.value_and_grad(loss, argnums=(0, 1))(x, w, wide)
    function = mx.value_and_grad(loss, argnums=(0, 1))
    found = (mx.compile(function) if compiled else function)(x, w, wide)
    np.testing.assert_allclose(np.array(found[0]), np.array(expected[0]), rtol=1e-5)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["logits", "linear", "bucket"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rows_of_weight_0_are_not_read(target: Target, kind: str, reduction: str) -> None:
    weight = np.array([1.0, 0.0, 2.0, 0.0, 1.0, 0.5])
    results = []
    for value in (0.5, np.nan):
        given = [array.copy() for array in (HIDDEN, WIDE, TEACHER)]
        for array in given:
            array[weight == 0] = value
        x, wide, logits, w, wide_w, a = arrays(*given, CLASSIFIER, WIDE_CLASSIFIER, weight)
        teacher: Any = {"logits": logits, "linear": xent.LinearTeacher(wide, wide_w), "bucket": None}[kind]
        if kind == "bucket":
            teacher = top_k(TEACHER)
            rows = mx.array(weight == 0)[:, None]
            log_probs = mx.where(rows, value if value != 0.5 else -9.0, teacher.log_probs)
            teacher = xent.TopKTeacher(mx.where(rows, 99, teacher.ids), log_probs)

        def loss(x: mx.array, w: mx.array, teacher: Any = teacher, a: mx.array = a) -> mx.array:
            options: dict[str, Any] = {"sample_weight": a, "reduction": reduction, "backend": target.name}
            made: mx.array = xent.linear_divergence(x, w, teacher, **options)
            return made.sum()

        value_of, grads = mx.value_and_grad(loss, argnums=(0, 1))(x, w)
        results.append([np.array(value_of), *map(np.array, grads)])
        assert not results[-1][1][weight == 0].any()
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_equal_distributions(target: Target, beta: float) -> None:
    (z,) = arrays(STUDENT)
    loss, grad = mx.value_and_grad(lambda x: xent.divergence(x, z, beta=beta, backend=target.name))(z)
    assert loss.item() == 0
    assert not mx.any(grad).item()


def test_second_derivatives_and_forward_mode_raise(target: Target) -> None:
    z, t = arrays(STUDENT, TEACHER)

    def loss(x: mx.array) -> mx.array:
        made: mx.array = xent.divergence(x, t, backend=target.name)
        return made

    with pytest.raises(RuntimeError, match="xent computes no second derivatives"):
        mx.grad(lambda x: mx.grad(loss)(x).square().sum())(z)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        mx.jvp(loss, [z], [z])


def test_invalid_teachers(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    (z,) = arrays(STUDENT)
    good = top_k(TEACHER)
    outside, twice = np.array(good.ids), np.array(good.ids)
    outside[1, 2], twice[2, 0] = 11, twice[2, 1]
    heavy = np.array(good.log_probs)
    heavy[3, 0] = 0.5
    for teacher, row, error in (
        (xent.TopKTeacher(mx.array(outside), good.log_probs), 1, IndexError),
        (xent.TopKTeacher(mx.array(twice), good.log_probs), 2, ValueError),
        (xent.TopKTeacher(good.ids, mx.array(heavy)), 3, ValueError),
    ):
        loss = np.array(xent.divergence(z, teacher, reduction="none", backend=target.name))
        assert np.flatnonzero(np.isnan(loss)).tolist() == [row]
        with monkeypatch.context() as patch:
            patch.setenv("XENT_CHECK_TARGETS", "1")
            with pytest.raises(error, match=rf"of row \[{row}\]"):
                xent.divergence(z, teacher, backend=target.name)


def test_axis(target: Target) -> None:
    z, t = arrays(STUDENT.reshape(2, 3, 11), TEACHER.reshape(2, 3, 11))
    expected = xent.divergence(z, t, reduction="none", backend=target.name)
    moved = [mx.moveaxis(array, -1, 1) for array in (z, t)]
    found = xent.divergence(*moved, axis=1, reduction="none", backend=target.name)
    np.testing.assert_array_equal(np.array(found), np.array(expected))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("biased", [False, True])
def test_quantized_classifiers(target: Target, dtype: mx.Dtype, bits: int, biased: bool) -> None:
    """Student and teacher: value and gradients equal those of the unpacked weights."""
    mx.random.seed(0)
    heads = [nn.Linear(width, 48, bias=biased) for width in (64, 96)]
    packed = [nn.QuantizedLinear.from_linear(head, group_size=32, bits=bits) for head in heads]
    for head in packed:
        head.set_dtype(dtype)
    (weight, bias), (teacher, teacher_bias) = map(classifier, packed)
    x, wide = (mx.random.normal((2, 5, width)).astype(dtype) for width in (64, 96))
    expect_right_products(x.reshape(-1, 64), weight)
    expect_right_products(wide.reshape(-1, 96), teacher)

    def unpacked(given: xent.QuantizedWeight) -> mx.array:
        parts = {"scales": given.scales.astype(mx.float32), "biases": given.biases.astype(mx.float32)}
        return mx.dequantize(given.packed, **parts, group_size=given.group_size, bits=given.bits)

    def plain(x: mx.array) -> mx.array:
        sides = []
        for rows, given, shift in ((x, weight, bias), (wide, teacher, teacher_bias)):
            logits = rows.astype(mx.float32) @ unpacked(given).T
            sides.append(nn.log_softmax(logits if shift is None else logits + shift.astype(mx.float32), axis=-1))
        log_p, log_q = sides
        return (mx.exp(log_q) * (log_q - log_p)).sum(-1).mean()

    def ours(x: mx.array) -> mx.array:
        source = xent.LinearTeacher(wide, teacher, teacher_bias)
        made: mx.array = xent.linear_divergence(x, weight, source, linear_bias=bias, backend=target.name)
        return made

    expected, slope = mx.value_and_grad(plain)(x)
    found, gradient = mx.value_and_grad(ours)(x)
    assert gradient.dtype == dtype
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    difference = (gradient.astype(mx.float32) - slope.astype(mx.float32)).square().sum().sqrt().item()
    most = 1e-5 if dtype == mx.float32 else 1e-2
    assert difference <= most * slope.astype(mx.float32).square().sum().sqrt().item()


def test_array_outside_of_a_transformation_is_not_seen_as_traced(target: Target) -> None:
    """Even if the first call of the process was inside of a transformation."""
    x, w = arrays(HIDDEN, CLASSIFIER)
    teacher = top_k(TEACHER)

    def loss(x: mx.array, w: mx.array) -> mx.array:
        made: mx.array = xent.linear_divergence(x, w, teacher, reduction="none", backend=target.name)
        return made.sum()

    autograd._probe.cache_clear()
    mx.eval(mx.value_and_grad(loss, argnums=(0, 1))(x, w))
    assert not autograd.is_traced(mx.zeros(3))


@pytest.mark.parametrize("ids", [[0, 2, 9], [0, 0, 2], [-1, 2, 3], [10**6, 1, 2]], ids=str)
def test_invalid_ids_of_a_subset_are_nan(ids: list[int]) -> None:
    student, teacher = mx.zeros((2, 3)), xent.Subset(mx.zeros((2, 7)), mx.array(ids))
    assert mx.isnan(xent.divergence(student, teacher)).item()
    linear = xent.LinearTeacher(mx.zeros((2, 4)), mx.zeros((7, 4)))
    assert mx.isnan(xent.divergence(student, xent.Subset(linear, mx.array(ids)))).item()
