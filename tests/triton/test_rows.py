"""Rows of logits, of one block and several, on and off boundaries of memory, and hard ones, against float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.targets import Target

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ROWS = 5  # with an odd number of classes, rows have this many different offsets from a boundary


def draw(target: Target, vocabulary: int, dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return logits and classes, with the first class, the last class and ignored rows."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    classes = torch.randint(vocabulary, (rows,), generator=generator)
    classes[0], classes[-1], classes[2::4] = 0, vocabulary - 1, -100
    return logits.to(target.device, dtype), classes.to(target.device)


def padded(values: Tensor, start: int = 0) -> Tensor:
    """Return a copy that begins `start` elements after a boundary, in memory of whole vectors, as on a GPU."""
    memory = torch.full((-(-(start + values.numel()) // 8) * 8,), 1000, dtype=values.dtype, device=values.device)
    return memory[start : start + values.numel()].view(values.shape).copy_(values)


def differentiated(logits: Tensor, classes: Tensor, **options: Any) -> list[Tensor]:
    """Return the rows' losses, the gradient for separate upstream gradients, and the gradient of the sum."""
    found = []
    for reduction in ("none", "sum"):
        leaf = logits.detach().requires_grad_()
        loss = xent.cross_entropy(leaf, classes, reduction=reduction, **options)
        upstream = torch.ones_like(loss) if reduction == "sum" else torch.linspace(-1, 2, len(classes)).to(loss)
        found += [loss.detach(), *torch.autograd.grad(loss, leaf, upstream)]
    return [found[0], found[1], found[3]]


def compare(logits: Tensor, classes: Tensor, backend: str, **options: Any) -> None:
    found = differentiated(logits, classes, backend=backend, **options)
    wide = {name: value.cpu().double() if isinstance(value, Tensor) else value for name, value in options.items()}
    expected = differentiated(logits.cpu().double(), classes.cpu(), backend="torch", **wide)
    close = CLOSE[logits.dtype]
    for one, other, near in zip(found, expected, (3e-6, close, close), strict=True):
        smallest = 2.0**-24 if logits.dtype == torch.float16 else 2e-7
        torch.testing.assert_close(one.cpu().double(), other, rtol=near, atol=smallest)


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "weight, z_loss": {"weight": True, "z_loss": 0.1},
    "weight, smoothing, z_loss": {"weight": True, "label_smoothing": 0.2, "z_loss": 0.1},
    "scale": {"logit_scale": -0.7},
    "softcap": {"softcap": 4.0},
    "softcap, scale, smoothing": {"softcap": 4.0, "logit_scale": 1.5, "label_smoothing": 0.1},
}


def given(target: Target, name: str, vocabulary: int) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    if options.pop("weight", False):
        options["weight"] = torch.linspace(0, 2, vocabulary, device=target.device)
    return options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 2, 7, 8, 9, 16, 17, 33, 1023, 1024, 1025, 4096, 4097, 8192, 8200, 12_291])
def test_sizes(target: Target, vocabulary: int, dtype: torch.dtype) -> None:
    """Sizes around multiples of a vector and of a block, each with one of the options."""
    logits, classes = draw(target, vocabulary, dtype)
    logits = padded(logits)
    names = list(OPTIONS)
    for name in {"plain", names[vocabulary % len(names)]}:
        compare(logits, classes, target.name, **given(target, name, vocabulary))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("vocabulary", [33, 8201])
@pytest.mark.parametrize("start", [0, 3])
def test_rows_off_boundaries(target: Target, name: str, dtype: torch.dtype, vocabulary: int, start: int) -> None:
    values, classes = draw(target, vocabulary, dtype, rows=4)
    compare(padded(values, start), classes, target.name, **given(target, name, vocabulary))


def bits(target: Target, logits: Tensor, classes: Tensor, **options: Any) -> Tensor:
    loss, stats = xent.cross_entropy(
        logits, classes, reduction="none", stats=("lse", "nll", "entropy"), backend=target.name, **options
    )
    return torch.stack([loss, stats.lse, stats.nll, stats.entropy], -1).reshape(-1, 4)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("vocabulary", [33, 1001, 8201])
@pytest.mark.parametrize("name", ["plain", "weight, smoothing, z_loss"])
def test_bits_of_a_row_do_not_depend_on_its_address(
    target: Target, vocabulary: int, dtype: torch.dtype, name: str
) -> None:
    """Equal rows at all offsets between two boundaries; then some of them alone."""
    values, _ = draw(target, vocabulary, dtype, rows=1)
    logits, options = padded(values.repeat(9, 1)), given(target, name, vocabulary)
    classes = torch.full((9,), vocabulary // 2, device=target.device)
    found = bits(target, logits, classes, **options)
    assert torch.equal(found, found[:1].expand(9, -1))
    for some in (logits[3:4], logits[5], logits[2:3].view(1, 1, -1), padded(values, 5)):
        alone = bits(target, some, classes[: some.shape[:-1].numel()].view(some.shape[:-1]), **options)
        assert torch.equal(alone, found[:1])


KINDS: dict[str, Callable[[Tensor, int], Any]] = {
    "sure": lambda row, y: row[y].fill_(40),
    "surest": lambda row, y: row[y].fill_(3e4),
    "hopeless": lambda row, y: row[y].fill_(-3e4),
    "first block far below": lambda row, y: row[:8].fill_(-3e4),
    "first block far above": lambda row, y: row[:8].add_(300),
    "last block far above": lambda row, y: row[-8:].add_(300),
    "all far above": lambda row, y: row.add_(2000),
    "all far below": lambda row, y: row.sub_(2000),
    "all the same": lambda row, y: row.fill_(-3e4),
    "first block impossible": lambda row, y: row[:8].fill_(-INF),
    "last block impossible": lambda row, y: row[-8:].fill_(-INF),
    "first blocks impossible, others far below": lambda row, y: [row.sub_(2000), row[:16].fill_(-INF)],
    "target impossible": lambda row, y: row[y].fill_(-INF),
    "target alone possible": lambda row, y: [row[:y].fill_(-INF), row[y + 1 :].fill_(-INF)],
    "all impossible": lambda row, y: row.fill_(-INF),
    "one infinite": lambda row, y: row[y - 1].fill_(INF),
    "target infinite": lambda row, y: row[y].fill_(INF),
    "one NaN": lambda row, y: row[y - 1].fill_(NAN),
    "target NaN": lambda row, y: row[y].fill_(NAN),
    "huge": lambda row, y: row.mul_(1e30 if row.dtype != torch.float16 else 1e4),
}


def exact(x: Tensor, y: int) -> list[Tensor]:
    """Return the same as `differentiated`, with a 1 - p of very probable targets that does not cancel in float64."""
    others = torch.cat([x[:, :y], x[:, y + 1 :]], 1).logsumexp(1)
    above = others - x[:, y]
    nll = torch.where(x.amax(1) == INF, NAN, torch.nn.functional.softplus(above, threshold=50))
    grad = (x - x.logsumexp(1, keepdim=True)).exp()
    grad[:, y] = -above.sigmoid()
    grad[nll.isnan()] = NAN
    return [nll, torch.linspace(-1, 2, len(x)).double()[:, None] * grad, grad]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocabulary", "y"), [(31, 3), (8200, 20), (8201, 8200), (12_288, 5000)])
def test_hard_rows(target: Target, dtype: torch.dtype, vocabulary: int, y: int) -> None:
    """The target in the first, a middle and the last block. Each row must not affect the others."""
    logits = 2 * torch.randn(len(KINDS), vocabulary, generator=torch.Generator().manual_seed(y))
    logits = padded(logits.to(target.device, dtype))
    for row, kind in zip(logits, KINDS.values(), strict=True):
        kind(row, y)
    classes = torch.full((len(KINDS),), y, device=target.device)
    found = differentiated(logits, classes, backend=target.name)
    for output, (one, other) in enumerate(zip(found, exact(logits.cpu().double(), y), strict=True)):
        for kind, row, right in zip(KINDS, one.cpu().double(), other, strict=True):
            close = {"rtol": max(CLOSE[dtype], 1e-5) if output else 3e-6, "atol": 1e-30}
            if dtype == torch.float16 and output:
                close["atol"] = 2.0**-24
            torch.testing.assert_close(
                row,
                right,
                **close,
                equal_nan=True,
                msg=lambda text, kind=kind, output=output: f"{kind} {output}: {text}",
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"logit_scale": -0.7}, {"label_smoothing": 0.1}, {"z_loss": 0.1}], ids=str)
@pytest.mark.parametrize("vocabulary", [2048, 2051])
def test_loss_and_gradient_with_a_softcap(
    target: Target, dtype: torch.dtype, options: dict[str, float], vocabulary: int
) -> None:
    """The gradient's rounding averages out: what is left over all classes is the error of a factor."""
    logits, classes = draw(target, vocabulary, dtype)
    classes[2::4] = 7
    found = differentiated(logits, classes, softcap=5.0, backend=target.name, **options)
    exact = differentiated(logits.cpu().double(), classes.cpu(), softcap=5.0, backend="torch", **options)
    torch.testing.assert_close(found[0].cpu().double(), exact[0], rtol=1e-5, atol=1e-5)
    for gradient, truth in zip(found[1:], exact[1:], strict=True):
        others = torch.ones_like(truth).scatter_(1, classes.cpu()[:, None], 0) * truth
        assert abs(float((gradient.cpu().double() * others).sum() / others.square().sum()) - 1) < 2e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("logit_scale", [1.0, -0.5])
def test_masked_classes_have_no_gradient_with_a_softcap(target: Target, dtype: torch.dtype, logit_scale: float) -> None:
    logits, classes = draw(target, 2048, dtype)
    logits[:, 100:300] = -INF
    logits[:, 500:600] = -1e4
    for softcap in (1.0, 30.0):
        loss, *gradients = differentiated(
            logits, classes, softcap=softcap, logit_scale=logit_scale, backend=target.name
        )
        assert bool(loss.isfinite().all())
        for gradient in gradients:
            assert bool((gradient[0] != 0).any())
            # With a negative scale, s z is +inf: the reciprocal of the exponential is at least 2e-38.
            assert gradient[:, 100:300].abs().max() <= (0 if logit_scale > 0 else 1e-36)
            assert gradient[:, 500:600].abs().max() <= (0 if logit_scale > 0 else 1e-36)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "two axes": lambda t: t.flatten(0, 1),
    "one row": lambda t: t[1, 2],
    "one row of a matrix": lambda t: t.flatten(0, 1)[4:5],
    "axes of one": lambda t: t[1:2, 2:3],
    "all but the last token": lambda t: t[:, :-1],
    "all but the first token": lambda t: t[:, 1:],
    "last token": lambda t: t[:, -1:],
    "every other token": lambda t: t[:, ::2],
    "leading axes swapped": lambda t: t.transpose(0, 1),
    "fewer classes": lambda t: t[..., :-3],
    "later classes": lambda t: t[..., 3:],
    "expanded": lambda t: t[:1].expand(5, -1, -1),
    "expanded tokens": lambda t: t[:, :1].expand(-1, 5, -1),
    "a token of a wide batch": lambda t: t.view(1, 3, 4, -1)[:, :, 1],
    "four axes": lambda t: t.view(3, 2, 2, -1)[:, :, :1],
    "groups of groups": lambda t: t.view(3, 2, 2, -1)[:, :1, :1],
    "classes first": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
}


GAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "last token": lambda batch: batch[:, :-1],
    "first token": lambda batch: batch[:, 1:],
    "last classes": lambda batch: batch[..., :31],
    "first classes": lambda batch: batch[..., 1:],
    "token and classes": lambda batch: batch[:, :-1, :31],
    "long rows": lambda batch: batch.view(2, -1)[:, :-1],
    "every other token": lambda batch: batch[:, ::2],
    "every other class": lambda batch: batch[..., ::2],
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GAPS)
def test_nothing_is_written_around_a_gradient_in_place(
    target: Target, name: str, dtype: torch.dtype, reduction: str
) -> None:
    """The gradient is written to the logits' memory, and scaled there, and what lies between rows is untouched."""
    torch.manual_seed(0)
    batch = padded(3 * torch.randn(2, 9, 33, device=target.device).to(dtype))
    before, given = batch.clone(), GAPS[name](batch)
    classes = torch.zeros(given.shape[:-1], dtype=torch.int64, device=target.device)
    leaf = given.detach().clone().requires_grad_()
    loss = xent.cross_entropy(leaf, classes, reduction=reduction, backend=target.name).sum()
    (expected,) = torch.autograd.grad(1.5 * loss, leaf)
    given = given.detach().requires_grad_()
    loss = xent.cross_entropy(given, classes, reduction=reduction, inplace=True, backend=target.name).sum()
    (grad,) = torch.autograd.grad(1.5 * loss, given)
    torch.testing.assert_close(grad, expected, rtol=CLOSE[dtype], atol=2.0**-24)
    inside = torch.zeros(batch.shape, dtype=torch.bool, device=target.device)
    GAPS[name](inside).fill_(True)
    assert torch.equal(batch[~inside], before[~inside])


@pytest.mark.parametrize("upstream", [1.0, 0.3])
@pytest.mark.parametrize("sizes", [(50, 3), (3, 500), (0, 7), (7, 0)], ids=str)
def test_gradients_of_both_factors_are_scaled(target: Target, sizes: tuple[int, int], upstream: float) -> None:
    rows, width = sizes
    leaves = [torch.randn(size, device=target.device).requires_grad_() for size in ((rows, width), (90, width))]
    classes = torch.zeros(rows, dtype=torch.int64, device=target.device)
    wide = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    loss = xent.linear_cross_entropy(*leaves, classes, reduction="sum", backend=target.name)
    plain = torch.nn.functional.cross_entropy(wide[0] @ wide[1].t(), classes.cpu(), reduction="sum")
    made = torch.autograd.grad(loss, leaves, torch.full_like(loss, upstream))
    for one, other in zip(made, torch.autograd.grad(upstream * plain, wide), strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("vocabulary", [33, 48])
def test_float16_gradients_are_computed_in_the_backward_pass(target: Target, vocabulary: int, reduction: str) -> None:
    """A mean over many rows, or a row weight, could leave its range before a loss scale is applied."""
    logits, classes = draw(target, vocabulary, torch.float16)
    weights = torch.full((ROWS,), 1e-4, device=target.device)
    options = {"reduction": reduction, "sample_weight": weights, "normalizer": 1e3 if reduction == "mean" else None}
    leaf, wide = logits.requires_grad_(), logits.detach().cpu().double().requires_grad_()
    upstream = 1e7
    found = xent.cross_entropy(leaf, classes, backend=target.name, **options)
    options["sample_weight"] = weights.cpu().double()
    expected = xent.cross_entropy(wide, classes.cpu(), backend="torch", **options)
    (grad,) = torch.autograd.grad(found, leaf, torch.full_like(found, upstream))
    (right,) = torch.autograd.grad(expected, wide, torch.full_like(expected, upstream))
    assert grad.dtype == torch.float16
    torch.testing.assert_close(grad.cpu().double(), right, rtol=1e-3, atol=1e-6)
