"""The Metal kernels on PyTorch tensors, which have their own signatures.

Without an Apple GPU the emulator runs them, for CPU tensors instead of tensors on "mps".
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.calls import results_of
from tests.cases import EVERYWHERE, FUNCTIONS, LOG_PROBS, SHAPES, log_prob_cases, paired_cases
from tests.covering import FULL
from tests.divergence.cases import divergence_cases
from tests.metal.test_rows import test_columns_of_minus_infinity  # noqa: F401
from tests.options import option_cases
from tests.targets import Target
from tests.test_gradients import passes
from tests.test_log_probs import test_same_bits_with_and_without_gradients_and_statistics  # noqa: F401
from tests.test_promises import test_nan_and_infinity_affect_only_their_row  # noqa: F401
from tests.test_stats import compare_rows
from tests.torch.test_layouts import test_views  # noqa: F401
from xent.backends.metal import torch_machine
from xent.backends.proof import Proof
from xent.backends.torch import planned as plans
from xent.backends.torch.contract import STEPS
from xent.command.check.case import Case, make_inputs
from xent.command.check.run import check_all, chunk_cases, planned

METAL = {"backend": "metal"}
DEVICE = torch_machine.DEVICES[0]
VERSIONS = f"torch {torch.__version__}"
TARGETS = [Target("metal", DEVICE, "torch")]


def matrix() -> list[Case]:
    """Return every named option and shape of both functions, each with one dtype and reduction."""
    cases = []
    for function in FUNCTIONS:
        dealt = cycle(product(EVERYWHERE, ("mean", "sum", "none")))
        named = [case for case in option_cases(function, "float32") if case.reduction == "mean"]
        cases += [replace(case, dtype=dtype, reduction=how) for case, (dtype, how) in zip(named, dealt, strict=False)]
        shapes = [replace(shape, function=function, name=name) for name, shape in SHAPES.items() if not shape.offset]
        cases += [replace(case, dtype=dtype, reduction=how) for case, (dtype, how) in zip(shapes, dealt, strict=False)]
    return cases


def rows() -> list[Case]:
    """Return cases of log-probabilities and of losses whose statistics carry gradients, each with one dtype."""
    shapes = [case for function in LOG_PROBS for case in log_prob_cases(function) if case.dtype != "float64"]
    return shapes + [case for name in (*FUNCTIONS, *LOG_PROBS) for case in paired_cases(name, EVERYWHERE, 1 + FULL)]


@pytest.mark.parametrize("case", matrix() + rows(), ids=str)
def test_loss_and_gradients(target: Target, case: Case) -> None:
    """MLX arrays, whose kernels have another signature and the same body, have every combination of two options."""
    passes(target, case)


OF_LOGITS = [case for case in matrix() if case.function == "cross_entropy"][::2]
OF_LOGITS += paired_cases("cross_entropy", EVERYWHERE, 1)


@pytest.mark.parametrize("case", OF_LOGITS, ids=str)
def test_inplace_and_statistics(target: Target, case: Case) -> None:
    inputs = make_inputs(case)
    for one, other in zip(
        *(results_of(target, case, inputs, inplace=inplace) for inplace in (False, True)), strict=True
    ):
        target.same(one, other)
    compare_rows(replace(case, dtype="float32"), target)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", EVERYWHERE)
def test_long_rows_and_chunks(target: Target, function: str, dtype: str) -> None:
    plain = Case(function, (5,), 1, dtype, "", hidden=16, ignored=0.0, alone=True)
    cases = [
        replace(plain, name=name, vocabulary=vocabulary, reduction=reduction)
        for name, vocabulary in target.harness.sizes(dtype).items()
        for reduction in ("mean", "none")
    ]
    cases += chunk_cases(function, dtype) if plain.is_linear else []
    for case in cases[EVERYWHERE.index(dtype) :: 3]:
        target.judge(case)


def draw(rows: int = 6, vocabulary: int = 300, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = (2 * torch.randn(rows, vocabulary)).to(DEVICE, dtype)
    target = torch.randint(vocabulary, (rows,)).to(DEVICE)
    target[2] = -100
    return logits, target


def outcome(logits: Tensor, target: Tensor, upstream: Tensor | None = None, **options: Any) -> list[Tensor]:
    leaf = logits.detach().requires_grad_()
    loss = xent.cross_entropy(leaf, target, **options)
    (grad,) = torch.autograd.grad(loss, leaf, upstream)
    return [loss.detach(), grad]


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at no values, as on a GPU."""
    for module in ("portable.facts", "prepare"):
        monkeypatch.setattr(f"xent.backends.torch.{module}.looks_at_targets", lambda device: False)
    monkeypatch.setattr("xent.backends.torch.prepare.check_rows", lambda *_: None)


@pytest.mark.usefixtures("unchecked")
def test_target_out_of_range_gives_nan_in_its_row() -> None:
    logits, target = draw()
    target[3], target[4] = 10**9, -7
    loss, grad = outcome(logits, target, torch.ones(6, device=DEVICE), reduction="none", **METAL)
    assert loss.isnan().tolist() == grad.isnan().all(1).tolist() == [False, False, False, True, True, False]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrong", [0.0, -1.0, torch.nan])
@pytest.mark.parametrize("linear", [False, True])
def test_temperature_that_is_not_positive_gives_nan_in_its_row(linear: bool, wrong: float) -> None:
    """Ignored rows are not affected."""
    logits, target = draw()
    heat, leaf = torch.full((6,), 0.7, device=DEVICE), logits.requires_grad_()
    heat[[1, 2, 5]] = wrong
    sources = (leaf, torch.eye(300, device=DEVICE)) if linear else (leaf,)
    function = xent.linear_log_probs if linear else xent.log_probs
    found = function(*sources, target, temperature=heat, entropy=True, **METAL)
    (grad,) = torch.autograd.grad(found, leaf, [torch.ones(6, device=DEVICE)] * 2)
    for one in (*found, grad.sum(1)):
        assert one.isnan().tolist() == [False, True, False, False, False, True]
    assert not grad[2].any()


def test_same_bits_with_and_without_a_gradient() -> None:
    logits, target = draw(vocabulary=9000)
    with_gradient, _ = outcome(logits, target, **METAL)
    assert torch.equal(xent.cross_entropy(logits, target, **METAL), with_gradient)


def one_case(_: object, function: str, dtype: str, full: bool) -> Sequence[Case]:
    """Return the first case of a function instead of all cases."""
    cases = divergence_cases if function.endswith("divergence") else option_cases
    return cases(function, dtype)[:1]


def test_auto_selects_metal_after_the_check_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    TARGETS[0].backend.load()
    start = STEPS["metal"]
    monkeypatch.setitem(STEPS, "metal", lambda setting: [ran.append("metal"), start(setting)][1])
    logits, target = draw()
    xent.cross_entropy(logits, target)
    assert not ran
    monkeypatch.setattr("xent.command.check.run.cases_of", one_case)
    works = [work for work in planned(["metal"], full=True) if work.backend.framework == "torch"]
    assert not any(line.failed for line in check_all(works))
    ran.clear()
    xent.cross_entropy(logits, target)
    plans.clear()  # later tests run as if no check had passed
    assert ran == ["metal"]
    assert Proof("metal", VERSIONS).passed
    monkeypatch.setattr(Proof, "fingerprint", lambda proof: "other sources")
    assert not Proof("metal", VERSIONS).passed


def test_failed_check_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proof, "remember", lambda proof: pytest.fail("it was remembered"))
    monkeypatch.setattr("xent.command.check.run.cases_of", one_case)
    monkeypatch.setattr("xent.command.check.run.judge_case", lambda *_: 1 / 0)
    works = [work for work in planned(["metal"], full=True) if work.backend.framework == "torch"]
    assert all(line.failed for line in check_all(works))


def test_unwritable_cache_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Proof, "file", lambda proof: tmp_path / "file" / "passed.txt")
    with pytest.warns(RuntimeWarning, match="this cannot be remembered"):
        Proof("metal", VERSIONS).remember()
    assert not Proof("metal", VERSIONS).passed


def test_other_devices_and_float64_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = draw()
    with pytest.raises(xent.BackendError, match="Metal has no float64, which backend 'torch' serves"):
        xent.cross_entropy(logits.cpu().double(), target.cpu(), **METAL)
    monkeypatch.setattr(torch_machine, "DEVICES", ("other",))
    plans.clear()
    with pytest.raises(xent.BackendError, match=r"it serves other tensors and got a .*, which backend 'torch' serves"):
        xent.cross_entropy(logits, target, **METAL)


def test_reason_if_metal_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert (torch_machine.find()[0] or "").startswith("its kernels are for Apple GPUs, and PyTorch finds none here (")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert torch_machine.find() == (None, {"torch": torch.__version__}, ("mps",))
    monkeypatch.setenv("PYTORCH_MPS_FAST_MATH", "1")
    assert (torch_machine.find()[0] or "").startswith("PYTORCH_MPS_FAST_MATH=1 compiles")
