"""Memory and work in MLX: one chunk in memory at a time, and no result that is not needed."""

import io
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

import xent
from tests.targets import Target
from xent.backends.mlx.devices import chunk_device

MIB = 2**20
N, D, V, ROWS = 1024, 32, 16384, 64
LOGITS = N * V * 4


@pytest.fixture(scope="module")
def arrays() -> tuple[mx.array, mx.array, mx.array]:
    mx.random.seed(0)
    made = mx.random.normal((N, D)), 0.1 * mx.random.normal((V, D)), mx.random.randint(0, V, (N,))
    mx.eval(made)
    return made


def peak(call: Callable[[], Any]) -> int:
    """Return the peak bytes of a call above those before it, measured in the second call, after compilation."""
    if chunk_device() == "mlx-cuda":
        pytest.skip("on NVIDIA MLX holds all that a graph of a hundred operations uses until it is done")
    mx.eval(call())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    made = call()
    mx.eval(made)
    return mx.get_peak_memory() - before


def linear(target: Target, y: mx.array, **options: Any) -> Callable[..., mx.array]:
    options = {"workspace": ROWS * V * 4, "backend": target.name} | options
    return lambda x, w: xent.linear_cross_entropy(x, w, y, **options).sum()


@pytest.mark.parametrize(
    ("options", "compiled", "most"),
    [
        ({}, False, 45),
        ({"softcap": 5.0, "label_smoothing": 0.1}, False, 45),
        ({"workspace": None}, False, 45),
        ({"reduction": "none"}, True, 60),
    ],
    ids=str,
)
def test_only_one_chunk_of_logits_exists_at_a_time(
    target: Target, arrays: Any, options: dict[str, Any], compiled: bool, most: int
) -> None:
    x, w, y = arrays
    step = mx.value_and_grad(linear(target, y, **options), argnums=(0, 1))
    step = mx.compile(step) if compiled else step
    assert peak(lambda: step(x, w)) <= most * MIB


def test_order_of_evaluation_does_not_change_the_peak(target: Target, arrays: Any) -> None:
    x, w, y = arrays
    step = mx.value_and_grad(linear(target, y), argnums=(0, 1))

    def loss_first() -> Any:
        loss, gradients = step(x, w)
        mx.eval(loss)
        mx.eval(gradients)
        return loss, gradients

    assert peak(loss_first) <= 45 * MIB


def test_loss_without_backward_needs_no_memory_for_gradients(target: Target, arrays: Any) -> None:
    x, w, y = arrays
    assert peak(lambda: linear(target, y)(x, w)) <= 24 * MIB
    logits = mx.zeros((N, V)) + 1
    mx.eval(logits)
    assert peak(lambda: xent.cross_entropy(logits, y, backend=target.name)) <= 0.3 * LOGITS


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 1.1),
        ({"reduction": "none"}, 1.1),
        ({"softcap": 5.0, "label_smoothing": 0.1}, 2.3),
    ],  # concatenated from pieces
    ids=str,
)
def test_memory_of_logits_is_their_gradient(target: Target, arrays: Any, options: dict[str, Any], most: float) -> None:
    logits = mx.zeros((N, V)) + 1
    mx.eval(logits)
    grad = mx.grad(lambda z: xent.cross_entropy(z, arrays[2], backend=target.name, **options).sum())
    assert peak(lambda: grad(logits)) <= most * LOGITS


def test_frozen_classifier_costs_nothing(target: Target) -> None:
    wide = mx.random.normal((64, 512)), mx.random.normal((4000, 512)), mx.random.randint(0, 4000, (64,))
    mx.eval(wide)
    x, w, y = wide

    def loss(x: mx.array, w: mx.array) -> mx.array:
        return xent.linear_cross_entropy(x, w, y, workspace=MIB // 4, backend=target.name)

    size = w.nbytes
    assert peak(lambda: mx.grad(loss)(x, mx.stop_gradient(w))) >= 0
    for step in (mx.grad(lambda x: loss(x, w)), mx.compile(mx.grad(lambda x: loss(x, mx.stop_gradient(w))))):
        assert peak(lambda step=step: step(x)) <= 0.5 * size
    both = mx.grad(loss, argnums=(0, 1))
    assert peak(lambda: both(x, w)) >= size


def products(array: mx.array | list[mx.array]) -> int:
    """Count the matrix products in the graph of an array."""
    drawing = io.StringIO()
    mx.export_to_dot(drawing, *(array if isinstance(array, list) else [array]))
    return sum(drawing.getvalue().count(f'label ="{name}"') for name in ("Matmul", "AddMM"))


@pytest.mark.parametrize(
    ("asks", "expected"),
    [((True, True, True), 3), ((True, False, False), 2), ((False, True, False), 2), ((False,) * 3, 1)],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("stopped", [False, True])
def test_number_of_matrix_products(
    target: Target, asks: tuple[bool, ...], expected: int, reduction: str, stopped: bool
) -> None:
    """`stopped`: what needs no gradient is an argument of the transformation, behind `mx.stop_gradient`."""
    arrays = [mx.ones((6, 8)), mx.ones((11, 8)), mx.ones((11,))]
    mx.eval(arrays)
    y = mx.zeros((6,), mx.int32)
    chosen = [array for array, asked in zip(arrays, asks, strict=True) if asked or stopped]

    def loss(given: list[mx.array]) -> mx.array:
        taken = iter(given)
        whole = (next(taken) if asked or stopped else array for array, asked in zip(arrays, asks, strict=True))
        x, w, b = (array if asked else mx.stop_gradient(array) for array, asked in zip(whole, asks, strict=True))
        options = {"linear_bias": b, "workspace": 2 * 11 * 4, "reduction": reduction, "backend": target.name}
        return xent.linear_cross_entropy(x, w, y, **options).sum()

    if not any(asks):
        assert products(loss(chosen)) == 3
        return
    value, gradients = mx.value_and_grad(loss)(chosen)
    chunks = 3
    again = chunks if reduction == "none" else 0
    made = [gradient for gradient, asked in zip(gradients, asks, strict=True) if asked] if stopped else gradients
    assert products([value, *made]) == chunks * expected + again


@pytest.mark.parametrize("compiled", [False, True])
def test_four_heads_hold_one_gradient_of_the_classifier(target: Target, compiled: bool) -> None:
    """Four separate calls hold four gradients of 15.6 MiB, and take 70 MiB or more. Chunks of logits take 7.8 MiB."""
    x, w = mx.random.normal((4, 16, 128)), mx.random.normal((32000, 128))
    y = mx.random.randint(0, 32000, (16,))
    mx.eval(x, w, y)
    step = mx.value_and_grad(
        lambda x, w: xent.linear_cross_entropy(x, w, y, shift=(1, 2, 3, 4), backend=target.name), argnums=(0, 1)
    )
    step = mx.compile(step) if compiled else step
    assert peak(lambda: step(x, w)) <= 50 * MIB
