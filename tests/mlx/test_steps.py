"""The steps of the row algebra over ranges of classes have the results of one block with all classes."""

from dataclasses import fields, replace
from functools import reduce
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.mlx import test_statistics as given
from xent.backends.adapter import as_loss_call
from xent.backends.mlx import block, fused
from xent.backends.mlx.block import Block
from xent.backends.mlx.facts import gather_facts
from xent.backends.mlx.finish import coefficients, finish, merge
from xent.backends.mlx.kernels import Asked, RowFacts
from xent.core.describe import loss_call

N, V = given.N, given.V
LOGITS = given.X @ given.W.T
RANGES = [[(0, 10), (10, 1), (11, 26)], [(0, 36), (36, 1)], [(0, V)]]
ASKED = Asked(norm=True, nll=True, entropy=True, predictions=True, log_sum_sq_probs=True, mean_logit=True)
NEUTRAL: dict[str, Any] = {
    "weight": None, "sample_weight": None, "normalizer": None, "axis": -1, "inplace": False, "reduction": "none",
    "ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "logit_scale": 1.0, "stats": (),
}  # fmt: skip


def facts_of(logits: mx.array, target: mx.array, options: str, exact: bool = False) -> RowFacts:
    call = as_loss_call(loss_call(logits, target, **NEUTRAL | given.OPTIONS[options]))
    facts = gather_facts(call, target, V, logits.dtype)
    more = {"lse": given.UPSTREAM["lse"], "entropy": given.UPSTREAM["entropy"], "H": mx.ones((N,))}
    rows = replace(facts.all_rows(), upstream=more)
    return replace(rows, target_logits=LOGITS[:, 0] + 0.1) if exact else rows


@pytest.mark.parametrize("ranges", RANGES, ids=str)
@pytest.mark.parametrize("options", given.OPTIONS)
@pytest.mark.parametrize("kind", ["indices", "probabilities", "exact target logits"])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_ranges_of_classes(
    ranges: list[tuple[int, int]], options: str, kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "device_type", lambda: device)
    logits = mx.concatenate([mx.full((N, 12), -mx.inf), LOGITS[:, 12:]], axis=-1) if kind == "indices" else LOGITS
    target = given.GIVEN if kind == "probabilities" else mx.maximum(given.TARGET, 12)
    facts = facts_of(logits, target, options, exact=kind == "exact target logits")
    blocks = [Block(logits[:, first : first + count], facts.classes(first, count)) for first, count in ranges]
    whole = Block(logits, facts)
    sums, expected = reduce(merge, [some.fold(ASKED) for some in blocks]), whole.fold(ASKED)
    found, wanted = finish(sums, facts, ASKED), finish(expected, facts, ASKED)
    for field in fields(found):
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        assert (one is None) == (other is None) == (field.name == "grad")
        if one is not None:
            np.testing.assert_allclose(np.array(one), np.array(other), rtol=3e-5, atol=3e-5, err_msg=field.name)
    total = sum((some.total() for some in blocks), mx.array(0.0))
    parts = coefficients(facts, sums.peak + sums.log_sum, total)
    grads = [Block(some.z, some.facts).gradient(parts, sums.peak, sums.log_sum) for some in blocks]
    lse = expected.peak + expected.log_sum
    full = whole.gradient(coefficients(facts, lse, whole.total()), expected.peak, expected.log_sum)
    np.testing.assert_allclose(np.array(mx.concatenate(grads, axis=-1)), np.array(full), rtol=1e-4, atol=1e-4)


def test_fused_operations_are_for_all_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "has_fused_loss", lambda: True)
    logits, target = LOGITS.astype(mx.bfloat16), mx.maximum(given.TARGET, 0)
    facts = replace(facts_of(logits, target, "plain"), upstream={})
    assert fused.fuses(logits, facts)
    assert not fused.fuses(logits, facts.classes(0, V))
