"""Rows that several programs share: the same results as float64."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

import xent
from tests.targets import Target
from tests.triton.noted import note_launches
from tests.triton.test_rows import DTYPES, OPTIONS, compare, draw, given, padded
from xent.backends.torch import replay
from xent.backends.triton import row_launches
from xent.backends.triton.geometry import geometry, sizes
from xent.backends.triton.launch import is_interpreted
from xent.backends.triton.rows_kernel import rows_kernel

STATS = ("lse", "nll", "entropy", "predictions", "accuracy", "log_sum_sq_probs", "mean_logit", "z_loss", "count")
SHARED = [2, 8]  # 4 where rows are too short for 8


@pytest.mark.parametrize(
    ("dtype", "vocabulary", "aligned", "odd"),
    [
        (torch.bfloat16, 61_440, 1, 1),
        (torch.bfloat16, 61_441, 1, 4),
        (torch.bfloat16, 80_000, 1, 4),
        (torch.bfloat16, 100_352, 4, 4),
        (torch.bfloat16, 128_256, 4, 4),
        (torch.bfloat16, 256_000, 4, 8),
        (torch.bfloat16, 10**6, 8, 8),
        (torch.float32, 30_000, 1, 1),
        (torch.float32, 32_000, 1, 4),
        (torch.float32, 50_257, 4, 4),
        (torch.float32, 128_256, 4, 8),
        (torch.float32, 256_000, 8, 8),
    ],
)
@pytest.mark.parametrize("predicts", [False, True])
def test_long_rows_are_shared_if_their_gradient_is_written(
    dtype: torch.dtype, vocabulary: int, aligned: int, odd: int, predicts: bool
) -> None:
    pitch = -(-vocabulary // 8) * 8
    base = torch.empty(2, pitch + 8, dtype=dtype)
    for start, parts in ((0, aligned), (1, odd)):
        place = geometry(base[:, start : start + vocabulary], None)
        assert place is not None
        size = sizes(vocabulary, dtype.itemsize, place, True, predicts, False, True)
        assert size.parts == parts
        assert size.share == vocabulary or size.share % place.vector == 0
        least = vocabulary - (size.parts - 1) * size.share
        assert size.block + place.vector <= least <= size.share
        assert sizes(vocabulary, dtype.itemsize, place, False, predicts, False, True).parts == 1
        assert sizes(vocabulary, dtype.itemsize, place, True, predicts, False, False).parts == 1
        capped = sizes(vocabulary, dtype.itemsize, place, True, predicts, True, True)
        assert capped.parts == (1 if dtype == torch.bfloat16 else parts)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("small", SHARED, indirect=True)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("vocabulary", "stride"), [(65, 72), (124, 128), (123, 123)])
def test_options(
    target: Target, name: str, dtype: torch.dtype, vocabulary: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = note_launches(monkeypatch)
    logits, classes = draw(target, vocabulary, dtype)
    rows = padded(torch.zeros(len(classes), stride, device=target.device, dtype=dtype))[:, :vocabulary]
    compare(rows.copy_(logits), classes, target.name, **given(target, name, vocabulary))
    parts = {constants["PARTS"] for kernel, _, constants in noted if kernel == "rows_kernel"}
    assert (max(parts) > 1) == ("smoothing" not in name)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("small", SHARED, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"logit_scale": -0.5, "z_loss": 0.1}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("vocabulary", [120, 119])
def test_statistics(
    target: Target, dtype: torch.dtype, reduction: str, options: dict[str, Any], vocabulary: int
) -> None:
    logits, classes = draw(target, vocabulary, dtype, rows=9)
    logits[1, 40:] -= 3000
    logits[3, :60] = -1e4
    logits[4, 50] = 200
    logits[5, :] = 1  # the first of equal classes is the prediction
    classes[5] = 60
    found = []
    for backend, values in ((target.name, padded(logits)), ("torch", logits.cpu().double())):
        leaf = values.detach().requires_grad_()
        loss, stats = xent.cross_entropy(
            leaf, classes.to(leaf.device), reduction=reduction, stats=STATS, backend=backend, **options
        )
        (grad,) = torch.autograd.grad(loss, leaf)
        found.append([loss.detach(), *(getattr(stats, name) for name in STATS), grad])
    for name, one, other in zip(("loss", *STATS), *(each[:-1] for each in found), strict=True):
        torch.testing.assert_close(
            one.cpu().double(), other.double(), rtol=2e-6, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    near = 2e-5 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(found[0][-1].cpu().double(), found[1][-1], rtol=near, atol=1e-8)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("small", SHARED, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("which", ["lse", "nll", "entropy"])
def test_gradients_of_statistics(target: Target, dtype: torch.dtype, which: str) -> None:
    """Also of rows without a weight."""
    logits, classes = draw(target, 120, dtype, rows=6)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0, 0.0], device=target.device)
    found = []
    for backend, values in ((target.name, padded(logits)), ("torch", logits.cpu().double())):
        leaf, device = values.detach().requires_grad_(), values.device
        loss, stats = xent.cross_entropy(
            leaf, classes.to(device), stats=(which,),
            sample_weight=weights.to(leaf), backend=backend,
        )  # fmt: skip
        found.append(torch.autograd.grad(loss + getattr(stats, which).sum() / 7, leaf)[0])
    near = 2e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(found[0].cpu().double(), found[1], rtol=near, atol=1e-7)


def fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x y + z rounded once, as on a GPU; the interpreter rounds twice."""
    exact = x.data.astype(np.float64) * y.data + z.data
    return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("small", SHARED, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shift", [240, -253, 257])
def test_references_that_round(target: Target, dtype: torch.dtype, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of parts contain the rounding of their own m log2(e), of up to 1.5e-5; beyond 256 they contain none."""
    if target.device == "cpu":
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fused)
    logits, classes = draw(target, 120, dtype, rows=12)
    logits = padded((shift + logits.float().round()).to(dtype))
    _, stats = xent.cross_entropy(
        logits.requires_grad_(), classes, reduction="sum", stats=("nll",), backend=target.name
    )
    expected = torch.nn.functional.cross_entropy(logits.cpu().double(), classes.cpu(), reduction="none")
    torch.testing.assert_close(stats.nll.cpu().double(), expected, rtol=0, atol=3e-6)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("small", SHARED, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_gradients_in_place(target: Target, dtype: torch.dtype) -> None:
    """A target's logit may be overwritten before another program of its row would read it."""
    logits, _ = draw(target, 120, dtype, rows=8)
    classes = torch.tensor([0, 119, 30, 60, 99, -100, 7, 52], device=target.device)
    apart, inside = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = xent.cross_entropy(apart, classes, backend=target.name)
    found = xent.cross_entropy(inside * 1, classes, inplace=True, backend=target.name)
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found, inside)[0], torch.autograd.grad(expected, apart)[0])


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "aligned", "parts"),
    [
        (128_256, torch.bfloat16, True, 4),
        (100_277, torch.bfloat16, False, 4),
        (205_005, torch.float32, True, 8),
        (102_405, torch.float32, False, 8),
    ],
)
def test_launches(
    target: Target, vocabulary: int, dtype: torch.dtype, aligned: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch on a GPU, and two in the interpreter, with as many programs as parts."""
    values, classes = draw(target, vocabulary, dtype, rows=3)
    logits = padded(values)
    if aligned:
        logits = padded(torch.nn.functional.pad(values, (0, -vocabulary % 8)))[:, :vocabulary]
    noted = note_launches(monkeypatch)
    compare(logits, classes, target.name)
    rows = [(programs, constants["PHASE"]) for kernel, programs, constants in noted if kernel == "rows_kernel"]
    in_turn = is_interpreted(rows_kernel)
    assert rows[-2:] == ([(3 * parts, 1), (3 * parts, 2)] if in_turn else [(3, 0), (3 * parts, 0)])


@pytest.mark.parametrize("count", [16, 132])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_who_shares(target: Target, count: int, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not GPUs with few multiprocessors, where the programs of a row may not all run, and not rows with smoothing."""
    replay.forget()
    noted: list[Any] = []
    monkeypatch.setattr(row_launches, "is_interpreted", lambda kernel: False)
    monkeypatch.setattr(row_launches, "multiprocessors", lambda device: count)
    monkeypatch.setattr(row_launches, "launch", lambda *given, **_: noted.append(given))
    leaf = torch.zeros(3, 128_256, dtype=torch.bfloat16, device=target.device, requires_grad=True)
    classes = torch.zeros(3, dtype=torch.int64, device=target.device)
    xent.cross_entropy(leaf, classes, label_smoothing=smoothing, backend=target.name)
    shares = count == 132 and not smoothing
    expected = (12, 4, 0) if shares else (3, 1, 0)
    assert [(programs, constants["PARTS"], constants["PHASE"]) for _, programs, _, constants in noted] == [expected]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("small", [4], indirect=True)
def test_words_are_0_before_each_call(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in calls that repeat a recording. Words of an earlier call would have tags."""
    if not is_interpreted(rows_kernel):
        pytest.skip("launches of compiled kernels are repeated by address; test_repeated_calls compares results")
    replay.forget()
    first = list(inspect.signature(rows_kernel.fn).parameters).index("words")
    seen = []

    class Watched:
        fn = rows_kernel.fn

        def __getitem__(self, grid: Any) -> Any:
            def run(*arguments: Any, **constants: Any) -> None:
                seen.append((constants["PHASE"], bool((arguments[first] == 0).all())))
                rows_kernel[grid](*arguments, **constants)

            return run

    monkeypatch.setattr(row_launches, "rows_kernel", Watched())
    logits, classes = draw(target, 120, torch.float32)
    for _ in range(5):
        xent.cross_entropy(logits.requires_grad_(), classes, backend=target.name)
    assert seen == [(1, True), (2, False)] * 5


@pytest.mark.parametrize(("vocabulary", "dtype"), [(128_256, torch.bfloat16), (102_405, torch.float32)])
def test_repeated_calls(target: Target, vocabulary: int, dtype: torch.dtype) -> None:
    values, classes = draw(target, vocabulary, dtype, rows=3)
    logits = padded(values)
    for factor in (1, -1, 0.5, 2):
        compare(padded(factor * logits), classes, target.name)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("small", [4], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"stats": ("entropy", "accuracy")}, {"logit_scale": -0.5, "softcap": 3.0}], ids=str
)
def test_linear_losses_in_chunks(target: Target, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The logits of targets are given, rows are in another order, and targets are shifted."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(2, 9, 16, generator=generator), torch.randn(120, 16, generator=generator) / 4
    classes = torch.randint(120, (2, 9), generator=generator)
    classes[0, 2:5], classes[1, 1:] = -100, 119
    found = []
    for backend, device, to in ((target.name, target.device, dtype), ("torch", "cpu", torch.float64)):
        leaves = [value.to(dtype).to(device, to).requires_grad_() for value in (hidden, weight)]
        made = xent.linear_cross_entropy(
            *leaves, classes.to(device), shift=1, workspace=5 * 120 * 8, backend=backend, **options
        )
        loss = made[0] if options.get("stats") else made
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    near = 3e-6 if dtype == torch.float32 else 2.0**-7
    for one, other in zip(*found, strict=True):
        close = near * float(other.abs().max())
        torch.testing.assert_close(one.cpu().double(), other, rtol=near, atol=close)
