"""The loss with products in 8 bits is that of the quantized factors in float64, with exact targets, on every backend.

The reference quantizes hidden states and classifier with one scale per row, and computes the loss of their logits in
float64. The gradient of the logits is quantized too; its rounding bounds the error of each element.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import xent
from tests.conftest import asked_for
from tests.covering import crossed
from tests.options import OPTIONS
from tests.targets import Target
from xent.backends.torch import fp8, fp8_source
from xent.core.spec import BackendError

V, WIDTH, ROWS = 70, 24, 20
E4M3 = 2.0**-4
"""Half the distance of neighbouring codes, relative to the smaller one."""


def inputs(target: Target, seed: int = 0, lead: tuple[int, ...] = (ROWS,)) -> dict[str, Tensor]:
    """Return bfloat16 hidden states, classifier and bias that require gradients, and targets; one row is ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*lead, WIDTH, generator=generator)
    weight, bias = torch.randn(V, WIDTH, generator=generator) / 4, torch.randn(V, generator=generator) / 4
    ids = torch.randint(V, lead[-1:], generator=generator)
    ids[1] = -100
    ids[5:9] = ids[5]
    leaves = {"input": hidden, "linear_weight": weight, "linear_bias": bias}
    made = {name: leaf.to(target.device).bfloat16().requires_grad_() for name, leaf in leaves.items()}
    return made | {"target": ids.to(target.device)}


LIKELY = (3, 11, 12, 30, 41, 42, 60, 69)
"""The classes that are exact in all rows, besides the target."""


@pytest.fixture(autouse=True)
def likely_classes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the same classes exact in all rows, unless a test wants the likeliest ones."""
    if "likeliest" in request.node.name:
        return
    kinds: list[type[fp8.Arithmetic]] = [fp8.Arithmetic]
    if "triton" in asked_for():
        from xent.backends.triton.fp8 import GpuArithmetic

        kinds.append(GpuArithmetic)
    for kind in kinds:
        monkeypatch.setattr(kind, "likeliest", _likely_in_all_rows)


def _likely_in_all_rows(_: fp8.Arithmetic, logits: Tensor, count: int) -> Tensor:
    return torch.tensor(LIKELY, device=logits.device)[:count].expand(len(logits), -1).contiguous()


def dequantized(matrix: Tensor) -> Tensor:
    """Return a matrix with quantized rows in float64."""
    matrix = matrix.detach().float()
    scale = matrix.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale == 0, 1, scale)
    return (matrix * scale.reciprocal()).to(torch.float8_e4m3fn).double() * scale.double()


def options_of(name: str, given: dict[str, Tensor]) -> dict[str, Any]:
    """Return named options with arrays for the inputs; class probabilities replace the target."""
    options, device, ids = dict(OPTIONS[name]), given["input"].device, given["target"]
    if options.pop("probabilities", False):
        generator = torch.Generator().manual_seed(3)
        options["target"] = torch.randn(*ids.shape, V, generator=generator).softmax(-1).to(device)
    if "weight" in options:
        options["weight"] = torch.linspace(0.5, 1.5, V, device=device)
    if "sample_weight" in options:
        options["sample_weight"] = torch.linspace(0, 2, len(ids), device=device)
    if "ignore_index" in options:
        ids[1] = options["ignore_index"]
    if options.get("normalizer") == "array":
        options["normalizer"] = torch.tensor(13.5, device=device)
    return options


def expected(given: dict[str, Tensor], options: dict[str, Any], upstream: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss in float64, and for each leaf the gradient and a bound of the errors of its elements."""
    hidden, weight, bias = (given.get(name) for name in ("input", "linear_weight", "linear_bias"))
    assert hidden is not None
    assert weight is not None
    h8, w8 = dequantized(hidden), dequantized(weight)
    z = h8 @ w8.t()
    ids, shifts = options.get("target", given["target"]), options.get("shift", 0)
    places = None
    if not ids.is_floating_point():
        shifts = shifts if isinstance(shifts, tuple) else (shifts,)
        moved = torch.stack([torch.cat((ids[shift:], ids.new_full((shift,), -100))) for shift in shifts])
        places = moved.reshape(hidden.shape[:-1]).clamp(min=0)[..., None]
    exact = hidden.detach().double() @ weight.detach().double().t()
    is_exact = torch.zeros_like(z, dtype=torch.bool)
    if options.get("logit_scale", 1) > 0:
        is_exact[..., list(LIKELY)] = True
    if places is not None:
        is_exact.scatter_(-1, places, True)
    z = torch.where(is_exact, exact, z)
    if bias is not None:
        z = z + bias.detach().double()
    z = z.requires_grad_()
    named = {"target": ids} | options
    loss = xent.linear_cross_entropy(z, torch.eye(V, dtype=z.dtype, device=z.device), backend="torch", **named)
    (grad,) = torch.autograd.grad(loss, z, upstream)
    h8, is_exact = h8.flatten(0, -2), is_exact.flatten(0, -2)
    g = grad.flatten(0, -2).where(is_exact, 0)
    others = grad.flatten(0, -2).where(~is_exact, 0)
    flat, size = hidden.detach().double().flatten(0, -2), others.abs()
    rows, classes = g @ weight.detach().double(), g.t() @ flat
    # The smallest code of a row or column of the gradient, and what roundings of logits and results add.
    of_rows = (size * w8.abs().amax(-1)).amax(1, keepdim=True) / w8.abs().amax(-1) * 2.0**-17
    of_columns = size.amax(0) * 2.0**-17
    more = 2.0**-7 * (1 + z.detach().abs().max())
    pairs = {
        "input": (others @ w8 + rows, (size * (E4M3 + more) + of_rows) @ w8.abs() + more * g.abs() @ w8.abs()),
        "linear_weight": (
            others.t() @ h8 + classes,
            (size * (E4M3 + more) + of_columns).t() @ h8.abs() + more * (g.abs().t() @ h8.abs() + g.abs().sum() * 0.01),
        ),
        "linear_bias": (grad.flatten(0, -2).sum(0), more * grad.abs().flatten(0, -2).sum(0)),
    }
    return loss.detach(), {name: pairs[name] for name in pairs if name in given}


def judge(target: Target, given: dict[str, Tensor], options: dict[str, Any], **others: Any) -> None:
    """Compare the loss and the gradients of a call with the reference."""
    loss = xent.linear_cross_entropy(**given | options, precision="fp8", backend=target.name, **others)
    upstream = None if loss.dim() == 0 else torch.linspace(-1, 2, loss.numel(), device=loss.device).view(loss.shape)
    of_loss = None if upstream is None else upstream.double()
    reference, pairs = expected(given, options, of_loss)
    assert ((loss - reference).abs() <= 2e-2 * (1 + reference.abs())).all()
    gradients = torch.autograd.grad(loss, [given[name] for name in pairs], upstream)
    for (name, (right, bound)), gradient in zip(pairs.items(), gradients, strict=True):
        error = (gradient.double() - right.view(gradient.shape)).abs()
        assert gradient.dtype == torch.bfloat16
        assert (error <= bound.view(gradient.shape) + 1e-9).all(), (name, float((error / bound).max()))
        assert error.norm() <= 0.1 * right.norm(), name


@pytest.mark.parametrize(
    *crossed(options=list(OPTIONS), reduction=["mean", "sum", "none"], bias=[False, True], workspace=[None, 2 * 80 * 7])
)
def test_options(target: Target, options: str, reduction: str, bias: bool, workspace: int | None) -> None:
    given = inputs(target)
    if not bias:
        del given["linear_bias"]
    named = options_of(options, given) | {"reduction": reduction}
    if reduction != "mean":
        named.pop("normalizer", None)
    judge(target, given, named, workspace=workspace)


@pytest.mark.parametrize("shift", [0, 2, (1, 2, 3)])
@pytest.mark.parametrize("workspace", [None, 1])
def test_shifts_and_heads(target: Target, shift: Any, workspace: int | None) -> None:
    lead = (len(shift), ROWS) if isinstance(shift, tuple) else (ROWS,)
    judge(target, inputs(target, lead=lead), {"shift": shift}, workspace=workspace)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantize the gradient of 32 classes at a time, and multiply 16 at a time into that of the classifier."""
    monkeypatch.setattr(fp8_source, "_GROUP", 32)
    monkeypatch.setattr(fp8_source, "_PIECE_BYTES", 1)
    monkeypatch.setattr(fp8_source, "_LEAST_PIECE", 16)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("options", ["plain", "smoothing", "probabilities", "weight"])
@pytest.mark.parametrize("workspace", [None, 2 * 80 * 7])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_blocks_of_classes(target: Target, options: str, workspace: int | None, reduction: str) -> None:
    given = inputs(target)
    judge(target, given, options_of(options, given) | {"reduction": reduction}, workspace=workspace)


def test_the_likeliest_classes_are_exact(target: Target) -> None:
    """Rows whose probability is nearly all that of a few classes have the loss and gradients of bfloat16."""
    given = inputs(target)
    with torch.no_grad():
        given["input"] *= 3
        given["linear_weight"][8:] /= 64
        given["linear_weight"][:8] += 3 * given["linear_weight"][:8].sign()
        given["linear_bias"].zero_()
    results = []
    for precision in (None, "fp8"):
        loss = xent.linear_cross_entropy(**given, reduction="none", precision=precision, backend=target.name)
        leaves = [given["input"], given["linear_weight"]]
        results.append((loss.detach(), *(each.float() for each in torch.autograd.grad(loss.sum(), leaves))))
    (loss, *gradients), (own_loss, *own_gradients) = results
    torch.testing.assert_close(own_loss, loss, rtol=2e-3, atol=2e-3)
    for gradient, own in zip(gradients, own_gradients, strict=True):
        assert (own - gradient).norm() <= 5e-3 * gradient.norm()


@pytest.mark.usefixtures("small_blocks")
def test_layouts(target: Target) -> None:
    """A classifier that is transposed in memory, and strided hidden states and bias. No product is the first sum."""
    given = inputs(target, lead=(3 * WIDTH,))
    own = {
        "input": torch.stack([given["input"].detach()] * 2, -1)[..., 0].requires_grad_(),
        "linear_weight": given["linear_weight"].detach().t().contiguous().t().requires_grad_(),
        "linear_bias": torch.stack([given["linear_bias"].detach()] * 3, -1)[..., 1].requires_grad_(),
    }
    results = []
    for leaves in ({name: given[name] for name in own}, own):
        loss = xent.linear_cross_entropy(**leaves, target=given["target"], precision="fp8", backend=target.name)
        results.append((loss, *torch.autograd.grad(loss, list(leaves.values()))))
    for expected, computed in zip(*results, strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("classes", [1, 2, 9])
def test_few_classes(target: Target, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All classes are exact."""
    given = inputs(target)
    for name in ("linear_weight", "linear_bias"):
        given[name] = given[name].detach()[:classes].requires_grad_()
    given["target"] %= classes
    kind = "xent.backends.triton.fp8.GpuArithmetic" if target.name == "triton" else "xent.backends.torch.fp8.Arithmetic"
    everything = torch.arange(min(classes, 8), device=target.device)
    monkeypatch.setattr(f"{kind}.likeliest", lambda _, z, count: everything.expand(len(z), -1).contiguous())
    results = []
    for precision in (None, "fp8"):
        loss = xent.linear_cross_entropy(**given, reduction="sum", precision=precision, backend=target.name)
        results.append((loss, *torch.autograd.grad(loss, [given["input"], given["linear_weight"]])))
    for expected, computed in zip(*results, strict=True):
        torch.testing.assert_close(computed, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("workspace", [None, 2 * 80 * 7])
def test_leaves_have_the_same_bits_alone(target: Target, workspace: int | None) -> None:
    gradients: dict[str, list[Tensor | None]] = {"input": [], "linear_weight": []}
    for trained in (("input", "linear_weight"), ("input",), ("linear_weight",)):
        given = inputs(target)
        for name in ("input", "linear_weight", "linear_bias"):
            given[name].requires_grad_(name in trained)
        xent.linear_cross_entropy(**given, precision="fp8", backend=target.name, workspace=workspace).backward()
        for name in trained:
            gradients[name].append(given[name].grad)
    for first, second in gradients.values():
        assert torch.equal(first, second)  # type: ignore[arg-type]


@pytest.mark.parametrize("run", [16, 32])
def test_the_target_is_exact(target: Target, run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With zeros for all other classes, everything is as in float64, rounded once.

    Kernels sum `run` rows of a class at a time.
    """
    if target.name == "triton":
        monkeypatch.setattr("xent.backends.triton.fp8._RUN", run)
    given = inputs(target)
    del given["linear_bias"]
    given["target"].fill_(4)
    with torch.no_grad():
        others = torch.arange(V, device=target.device) != 4
        given["linear_weight"][others] = 0
    loss = xent.linear_cross_entropy(**given, reduction="sum", precision="fp8", backend=target.name)
    loss.backward()
    wide = {name: value.detach().double().requires_grad_() for name, value in given.items() if name != "target"}
    right = xent.linear_cross_entropy(**wide, target=given["target"], reduction="sum", backend="torch")
    right.backward()
    assert loss.item() == pytest.approx(right.item(), rel=1e-6)
    own, exact = given["input"].grad, wide["input"].grad
    assert own is not None
    assert exact is not None
    assert torch.equal(own, exact.bfloat16())
    own, exact = given["linear_weight"].grad, wide["linear_weight"].grad
    assert own is not None
    assert exact is not None
    torch.testing.assert_close(own[4].double(), exact[4], rtol=2.0**-8, atol=1e-3)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["input", "linear_weight"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_infinities_and_nan(target: Target, value: float, name: str, reduction: str) -> None:
    """They give NaN where they do in float32: products in bfloat16 of some CPUs also give NaN in other rows."""
    found = []
    for precision in (None, "fp8"):
        given = inputs(target)
        if precision is None:
            wide = {name: value.detach().float().requires_grad_() for name, value in given.items() if name != "target"}
            given = wide | {"target": given["target"]}
        with torch.no_grad():
            given[name][2, 3] = value
        loss = xent.linear_cross_entropy(**given, reduction=reduction, precision=precision, backend=target.name)
        loss.sum().backward()
        leaves = ("input", "linear_weight", "linear_bias")
        given["input"].grad[1] = 0  # type: ignore[index]  # the ignored row, which a single part computes
        found.append([given[leaf].grad.isnan() for leaf in leaves] + [loss.isnan() | loss.isinf()])  # type: ignore[union-attr]
    for plain, own in zip(*found, strict=True):
        assert (own | ~plain).all()


def test_ignored_rows_enter_no_scale(target: Target) -> None:
    results = []
    for value in (0.0, 1e30, float("nan")):
        given = inputs(target)
        with torch.no_grad():
            given["input"][1] = value
        loss = xent.linear_cross_entropy(**given, precision="fp8", backend=target.name)
        loss.backward()
        results.append((loss.detach(), *(given[name].grad for name in ("input", "linear_weight", "linear_bias"))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_zeros(target: Target) -> None:
    given = inputs(target)
    with torch.no_grad():
        given["input"].zero_()
        given["linear_weight"].zero_()
        given["linear_bias"].zero_()
    loss = xent.linear_cross_entropy(**given, precision="fp8", backend=target.name)
    loss.backward()
    assert loss.item() == pytest.approx(float(torch.tensor(float(V)).log()))
    assert all(given[name].grad.isfinite().all() for name in ("input", "linear_weight"))  # type: ignore[union-attr]


def test_logits_do_not_depend_on_parts(target: Target) -> None:
    """The losses of rows have the same bits in every part, so the backward pass has the logits of the forward pass."""
    given = inputs(target)
    losses = [
        xent.linear_cross_entropy(**given, reduction="none", precision="fp8", backend=target.name, workspace=workspace)
        for workspace in (None, 1, 2 * 80 * 7)
    ]
    for loss in losses[1:]:
        if target.device == "cpu":
            assert torch.equal(losses[0], loss)
        torch.testing.assert_close(losses[0], loss, rtol=1e-3, atol=1e-3)


def test_the_same_bits_again(target: Target) -> None:
    runs = []
    for _ in range(2):
        given = inputs(target)
        given["target"].fill_(3)
        loss = xent.linear_cross_entropy(**given, precision="fp8", backend=target.name)
        loss.backward(retain_graph=True)
        first = [given[name].grad.clone() for name in ("input", "linear_weight", "linear_bias")]  # type: ignore[union-attr]
        loss.backward()
        for name, gradient in zip(("input", "linear_weight", "linear_bias"), first, strict=True):
            assert torch.equal(given[name].grad, 2 * gradient)  # type: ignore[arg-type]
        runs.append((loss.detach(), *first))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("trained", [("input",), ("linear_weight",), ("linear_bias",), ()])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_leaves(target: Target, trained: tuple[str, ...], reduction: str) -> None:
    """Gradients of some leaves have the bits of those of all."""
    results = []
    for names in (("input", "linear_weight", "linear_bias"), trained):
        given = inputs(target)
        for name in ("input", "linear_weight", "linear_bias"):
            given[name].requires_grad_(name in names)
        loss = xent.linear_cross_entropy(**given, reduction=reduction, precision="fp8", backend=target.name)
        if names:
            loss.sum().backward()
        results.append([loss.detach(), *(given[name].grad for name in trained)])
    for all_leaves, some in zip(*results, strict=True):
        assert torch.equal(all_leaves, some)  # type: ignore[arg-type]


def test_autocast(target: Target) -> None:
    """Gradients of float32 leaves are float32, of products of bfloat16 copies."""
    given = inputs(target)
    wide = {name: value.detach().float().requires_grad_() for name, value in given.items() if name != "target"}
    with torch.autocast(target.device.split(":")[0], torch.bfloat16):
        loss = xent.linear_cross_entropy(**wide, target=given["target"], precision="fp8", backend=target.name)
    loss.backward()
    own = xent.linear_cross_entropy(**given, precision="fp8", backend=target.name)
    own.backward()
    assert torch.equal(loss, own)
    for name, leaf in wide.items():
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        torch.testing.assert_close(leaf.grad.bfloat16(), given[name].grad, rtol=2.0**-6, atol=1e-5)


def test_compiled(target: Target) -> None:
    given = inputs(target)

    def loss_of(**given: Any) -> Any:
        return xent.linear_cross_entropy(**given, precision="fp8", backend=target.name)

    plain, compiled = loss_of(**given), torch.compile(loss_of, fullgraph=True)(**given)
    leaves = [given[name] for name in ("input", "linear_weight", "linear_bias")]
    assert torch.equal(plain, compiled)
    for own, other in zip(torch.autograd.grad(plain, leaves), torch.autograd.grad(compiled, leaves), strict=True):
        assert torch.equal(own, other)


def test_no_rows(target: Target) -> None:
    given = inputs(target)
    given = given | {"input": given["input"].detach()[:0].requires_grad_(), "target": given["target"][:0]}
    loss = xent.linear_cross_entropy(**given, precision="fp8", backend=target.name)
    loss.backward()
    assert loss.item() == 0
    assert not given["linear_weight"].grad.any()  # type: ignore[union-attr]


def test_refusals(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(target)
    with pytest.raises(ValueError, match="precision must be None or 'fp8', got 'int8'"):
        xent.linear_cross_entropy(**given, precision="int8")
    with pytest.raises(TypeError, match="precision must be None or 'fp8', got 8"):
        xent.linear_cross_entropy(**given, precision=8)  # type: ignore[arg-type]
    wide = {name: value.detach().float() for name, value in given.items() if name != "target"}
    with pytest.raises(TypeError, match=r"needs matrix products in torch\.bfloat16, got torch\.float32"):
        xent.linear_cross_entropy(**wide, target=given["target"], precision="fp8", backend=target.name)
    head = xent.QuantizedRows(given["linear_weight"].detach(), (V, WIDTH), lambda *_: given["linear_weight"])
    with pytest.raises(ValueError, match="quantizes the classifier itself"):
        xent.linear_cross_entropy(given["input"], head, given["target"], precision="fp8")
    if target.name == "triton":
        from xent.backends.triton import fp8

        monkeypatch.delattr(torch.nn.functional, "scaled_mm", raising=False)
        reason = fp8.unavailable(torch.device("cuda"))
        assert reason is not None
        assert reason.startswith("precision='fp8' needs torch.nn.functional.scaled_mm")
    if target.name == "torch" and target.device == "cpu":
        monkeypatch.delenv("XENT_BACKEND", raising=False)
        with pytest.raises(BackendError, match="it emulates precision='fp8'"):
            xent.linear_cross_entropy(**given, precision="fp8")
