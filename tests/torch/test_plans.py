"""Calls of PyTorch's plain tensors are planned once for each signature, and a plan depends on no value."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import xent
from xent.backends.torch import planned
from xent.backends.torch.codec import places_of
from xent.backends.torch.plan import Plan
from xent.backends.torch.prepare import prepare
from xent.core.call import Allowed, ArraySlot, Call, Classes, Given

D, V = 4, 11


def tokens(rows: int, width: int = V) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).requires_grad_()


def ids(rows: int) -> Tensor:
    return torch.arange(rows) % V


WEIGHT = torch.randn(V, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
CALLS: dict[str, Callable[[int, float], Any]] = {
    "cross_entropy": lambda n, x: xent.cross_entropy(tokens(n), ids(n), label_smoothing=x / 4, normalizer=x),
    "strided": lambda n, x: xent.cross_entropy(tokens(2 * n).view(2, n, V)[:, :-1], ids(2 * n - 2).view(2, -1)),
    "linear_cross_entropy": lambda n, x: xent.linear_cross_entropy(tokens(n, D), WEIGHT, ids(n), z_loss=x / 100),
    "heads": lambda n, x: xent.linear_cross_entropy(tokens(2 * n, D).view(2, n, D), WEIGHT, ids(n), shift=(1, 2)),
    "log_probs": lambda n, x: xent.log_probs(tokens(n), ids(n), temperature=x, softcap=3 * x),
    "temperatures": lambda n, x: xent.log_probs(tokens(n), ids(n), temperature=torch.full((n,), x)),
    "linear_log_probs": lambda n, x: xent.linear_log_probs(tokens(n, D), WEIGHT, ids(n), logit_scale=x + 1),
    "divergence": lambda n, x: xent.divergence(tokens(n), tokens(n).detach().flip(0), temperature=x, beta=x / 5),
    "top k": lambda n, x: xent.divergence(tokens(n), top_k(n), sample_weight=torch.full((n,), x)),
    "linear_divergence": lambda n, x: xent.linear_divergence(tokens(n, D), WEIGHT, teacher(n, x)),
}


def top_k(rows: int) -> xent.TopKTeacher:
    return xent.TopKTeacher(ids(rows)[:, None], torch.full((rows, 1), -0.5))


def teacher(rows: int, scale: float) -> xent.LinearTeacher:
    return xent.LinearTeacher(tokens(rows, 3).detach(), torch.ones(V, 3), logit_scale=scale + 1)


def plans() -> dict[Any, Any]:
    return planned._PLANS


@pytest.mark.parametrize("name", CALLS)
def test_batches_of_all_lengths_and_all_numbers_share_a_plan(name: str) -> None:
    planned.clear()
    CALLS[name](5, 0.3)
    known = set(plans())
    for rows in range(3, 9):
        CALLS[name](rows, 0.1 * rows)
    assert set(plans()) == known
    (before,) = plans().values()
    planned.clear()
    CALLS[name](7, 0.9)
    (after,) = plans().values()
    assert before.plan.call == after.plan.call, "it depends on rows or numbers"
    assert before.plan.requested == after.plan.requested


def test_results_of_later_calls_are_those_of_first_calls() -> None:
    for name, call in CALLS.items():
        planned.clear()
        call(4, 0.25)
        later = call(6, 0.6)
        planned.clear()
        torch.testing.assert_close(later, call(6, 0.6), rtol=0, atol=0, msg=name)


def test_a_plan_takes_no_tensor() -> None:
    with pytest.raises(TypeError, match="a plan is made from slots"):
        Plan(Call(Given(tokens(3), 1), Classes(ids(3))), (True, False, False), "torch")


def test_a_slot_has_no_number_of_rows() -> None:
    slot = ArraySlot(0, (5, V), (0,), torch.float32, torch.device("cpu"), False, True).without_rows()
    assert slot.shape == (None, V)
    with pytest.raises(TypeError):
        slot.shape[0] * 2


def test_values_that_python_takes_for_equal_do_not_share_a_plan() -> None:
    z, y = tokens(3), ids(3)
    assert xent.cross_entropy(z, y, label_smoothing=1.0) == xent.cross_entropy(z, y, label_smoothing=1)
    with pytest.raises(TypeError, match="label_smoothing must be a number"):
        xent.cross_entropy(z, y, label_smoothing=True)
    xent.cross_entropy(z, y, ignore_index=1)
    for wrong in (True, 1.0):
        with pytest.raises(TypeError, match="ignore_index must be an int"):
            xent.cross_entropy(z, y, ignore_index=wrong)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (ValueError, r"target of class indices must have shape \(8,\)", lambda: xent.cross_entropy(tokens(8), ids(7))),
        (ValueError, r"label_smoothing must be in \[0, 1\]", lambda: CALLS["cross_entropy"](8, 4.5)),
        (ValueError, "normalizer must be finite", lambda: xent.cross_entropy(tokens(8), ids(8), normalizer=-0.1)),
        (ValueError, "temperature must be finite and > 0", lambda: CALLS["log_probs"](8, 0.0)),
        (ValueError, "temperature must be > 0 in every row", lambda: CALLS["temperatures"](8, -1.0)),
        (ValueError, "z_loss must be finite and >= 0, got nan", lambda: CALLS["linear_cross_entropy"](8, float("nan"))),
        (IndexError, "target.* is 11", lambda: xent.cross_entropy(tokens(8), ids(8) + 4)),
        (ValueError, "logit_scale must be finite", lambda: CALLS["linear_divergence"](8, 1e400)),
        (ValueError, "sample_weight must have shape", lambda: weighed(8, 7)),
    ],
    ids=range(9),
)
def test_a_later_call_raises_what_a_first_call_raises(kind: Any, message: str, call: Callable[[], Any]) -> None:
    planned.clear()
    with pytest.raises(kind, match=message) as first:
        call()
    weighed(8, 8)
    xent.cross_entropy(tokens(8), ids(8))
    xent.cross_entropy(tokens(8), ids(8), normalizer=0.1)
    for valid in CALLS.values():
        valid(8, 0.5)
    with pytest.raises(kind) as later:
        call()
    assert str(later.value) == str(first.value)


def weighed(rows: int, weights: int) -> Tensor:
    return xent.divergence(tokens(rows), tokens(rows).detach(), sample_weight=torch.ones(weights))


def test_plans_hold_no_tensors() -> None:
    planned.clear()
    z, y = tokens(5), ids(5)
    loss = xent.cross_entropy(z, y, reduction="none")
    loss.sum().backward()
    alive = [weakref.ref(tensor) for tensor in (z, y, loss)]
    assert len(plans()) == 1
    del z, y, loss
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3


def test_threads_share_plans() -> None:
    planned.clear()
    wrong: list[int] = []

    def work(start: int) -> None:
        for rows in range(start, start + 20):
            z, y = tokens(rows), ids(rows)
            (grad,) = torch.autograd.grad(xent.cross_entropy(z, y), z)
            (expected,) = torch.autograd.grad(F.cross_entropy(z, y), z)
            if not torch.allclose(grad, expected, atol=1e-6):
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(3 + place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, len(plans())) == ([], 1)


def test_a_call_without_rows_has_its_tensors_where_a_call_with_rows_has_them() -> None:
    """The values in a support on an accelerator are not checked. A plan records once where a call has tensors."""
    calls = []
    for rows in (3, 0):
        logits = torch.empty(rows, V, device="meta")
        classes = [torch.empty(size, dtype=torch.int64, device="meta") for size in (rows, 2 * rows, rows + 1)]
        calls.append(prepare(Call(Given(logits, 1), Allowed(*classes)), (True,)))
    assert places_of(calls[0]) == places_of(calls[1])
