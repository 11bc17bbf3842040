"""Logit scale and softcap as 0-d tensors, and the gradient of a trained scale, as in CLIP."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import xent
from tests.cases import FUNCTIONS
from tests.covering import crossed
from tests.targets import Target
from xent.core.spec import STAT_NAMES

ROWS, WIDTH, CLASSES = 6, 8, 11
SCALE = 0.7
DTYPES = ["float64", "float32", "bfloat16", "float16"]


@pytest.fixture(params=["read", "not read"])
def values(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return a function as it is, or compiled, so that the values of tensors cannot be read, as on an accelerator."""
    if request.param == "read":
        return lambda function: function
    torch._dynamo.reset()
    return lambda function: torch.compile(function, backend="aot_eager")


def drawn(target: Target, dtype: str = "float32") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        "input": torch.randn(ROWS, WIDTH, generator=generator),
        "linear_weight": torch.randn(CLASSES, WIDTH, generator=generator),
        "linear_bias": torch.randn(CLASSES, generator=generator),
    }
    return {name: tensor.to(target.device, getattr(torch, dtype)) for name, tensor in made.items()}


def target_of(target: Target, kind: str = "classes") -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "probabilities":
        return torch.randn(ROWS, CLASSES, generator=generator).softmax(-1).to(target.device)
    classes = torch.randint(CLASSES, (ROWS,), generator=generator)
    classes[2] = -100
    return classes.to(target.device)


def placed(target: Target, options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.tensor(value, device=target.device) if isinstance(value, list) else value
        for name, value in options.items()
    }


WEIGHT = [0.5 + 0.1 * one for one in range(CLASSES)]
SAMPLE = [1.0, 0.0, 2.0, 0.5, 1.5, 3.0]
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "softcap": {"softcap": 2.0},
    "softcap, none": {"softcap": 2.0, "reduction": "none"},
    "weight, smoothing, z_loss": {"weight": WEIGHT, "label_smoothing": 0.1, "z_loss": 0.05},
    "all of it": {
        "weight": WEIGHT, "label_smoothing": 0.1, "z_loss": 0.05, "softcap": 3.0, "sample_weight": SAMPLE,
        "normalizer": 5.0,
    },
    "sample weights, none": {"sample_weight": SAMPLE, "reduction": "none"},
    "probabilities": {"target": "probabilities"},
    "probabilities, smoothing, softcap": {"target": "probabilities", "label_smoothing": 0.1, "softcap": 2.0},
    "negative": {"logit_scale": -0.4, "z_loss": 0.05},
    "tiny": {"logit_scale": 1e-30},
    "small, none": {"logit_scale": 1e-6, "reduction": "none"},
    "zero": {"logit_scale": 0.0},
}  # fmt: skip


def sources_of(target: Target, function: str, dtype: str) -> tuple[Tensor, ...]:
    made = tuple(drawn(target, dtype).values())
    if function == "cross_entropy":
        return (torch.nn.functional.linear(*made),)
    return made[:2] if function == "linear_cross_entropy" else made


def pair(target: Target, function: str, name: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the loss, and a function that computes it by its definition."""
    options = placed(target, OPTIONS[name])
    classes = target_of(target, options.pop("target", "classes"))
    options.pop("logit_scale", None)

    def loss(scale: Any, source: Tensor, *rest: Tensor) -> Tensor:
        given = {"logit_scale": scale, "backend": target.name} | options
        if function == "cross_entropy":
            found = xent.cross_entropy(source, classes, **given)
        else:
            bias = rest[1] if len(rest) > 1 else None
            found = xent.linear_cross_entropy(source, rest[0], classes, linear_bias=bias, workspace=150, **given)
        return found

    def plain(scale: Any, source: Tensor, *rest: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(source, *rest) if rest else source
        return target.harness.unfused_loss(logits, classes, logit_scale=scale, **options)

    return loss, plain


def asking(*tensors: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in tensors)


def upstream_of(loss: Tensor) -> Tensor:
    return torch.linspace(1.2, 2.1, loss.numel(), device=loss.device).to(loss.dtype).view(loss.shape)


@pytest.mark.parametrize(
    *crossed(
        costly="values",
        function=["cross_entropy", "linear_cross_entropy", "with a bias"],
        name=list(OPTIONS),
        dtype=DTYPES,
        values=["read", "not read"],
    ),
    indirect=["values"],
)
def test_gradient_of_a_scale(target: Target, values: Callable[..., Any], function: str, name: str, dtype: str) -> None:
    """All gradients equal those of the definition in float64, up to the rounding of each logit's gradient."""
    number = OPTIONS[name].get("logit_scale", SCALE)
    if not target.takes(dtype):
        return
    loss, plain = pair(target, function, name)
    sources = sources_of(target, function, dtype)
    scale = torch.tensor(number, dtype=torch.float64 if dtype == "float64" else torch.float32, device=target.device)
    logits = torch.nn.functional.linear(*sources) if len(sources) > 1 else sources[0]
    wide = asking(scale, *sources, dtype=torch.float64)
    expected = plain(*wide)
    truth = torch.autograd.grad(expected, wide, upstream_of(expected))
    each = torch.full_like(logits, number, dtype=torch.float64).requires_grad_()  # a separate scale for each logit
    found = plain(1.0, each * logits.double())
    (terms,) = torch.autograd.grad(found, each, upstream_of(found))
    eps = torch.finfo(getattr(torch, dtype)).eps
    allowed = float(terms.abs().sum()) * (eps if sources[0].itemsize == 2 else 8 * eps)
    assert float(truth[0].abs()) > 4 * allowed

    leaves, loss = asking(scale, *sources), values(loss)
    found = loss(*leaves)
    torch.testing.assert_close(found.double(), expected.detach(), rtol=4 * eps, atol=4 * eps)
    gradients = torch.autograd.grad(found, leaves, upstream_of(found))
    assert abs(float(gradients[0] - truth[0])) <= allowed
    for one, other in zip(gradients[1:], truth[1:], strict=True):
        # Scales near 0 are replaced by 2^-60. Numbers below the normal ones are a spacing apart.
        spacing = eps * torch.finfo(getattr(torch, dtype)).smallest_normal
        least = max(8 * eps * float(other.abs().max()), 2e-18, spacing)
        torch.testing.assert_close(one.double(), other, rtol=8 * eps, atol=least)
    (alone,) = asking(scale)  # without other gradients
    (gradient,) = torch.autograd.grad(found := loss(alone, *sources), alone, upstream_of(found))
    assert abs(float(gradient - truth[0])) <= allowed
    assert (gradient.dtype, gradient.shape) == (scale.dtype, ())
    if len(sources) > 1:
        (alone,), (weight,) = asking(scale), asking(sources[1])
        found = loss(alone, sources[0], weight, *sources[2:])
        both = torch.autograd.grad(found, (alone, weight), upstream_of(found))
        assert abs(float(both[0] - truth[0])) <= allowed
        torch.testing.assert_close(both[1], gradients[2], rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize(
    *crossed(
        costly="values",
        option=[("logit_scale", 2), ("logit_scale", -1), ("logit_scale", 0), ("softcap", 2)],
        dtype=[*DTYPES, "int64"],
        on_cpu=[False, True],
        function=["cross_entropy", "linear_cross_entropy", "log_probs", "linear_log_probs"],
        values=["read", "not read"],
    ),
    indirect=["values"],
)
def test_tensor_equals_the_number(
    target: Target, values: Callable[..., Any], option: tuple[str, int], dtype: str, on_cpu: bool, function: str
) -> None:
    name, number = option
    if dtype == "float64" and target.device.startswith("mps") and not on_cpu:
        return
    arrays, classes = drawn(target), target_of(target)
    sources = (torch.nn.functional.linear(*arrays.values()),)
    sources = sources if "linear" not in function else (arrays["input"], arrays["linear_weight"])
    sources = asking(*sources)
    stats = ("lse", "predictions", "mean_logit") if "log_probs" in function else STAT_NAMES
    options = {"softcap": 2.0, "stats": stats, "backend": target.name}
    results = []
    for value in (number, torch.tensor(number, dtype=getattr(torch, dtype), device="cpu" if on_cpu else target.device)):
        call = getattr(xent, function)
        run = values(lambda value, call=call: call(*sources, classes, **(options | {name: value})))
        loss, found = run(value)
        results.append((loss, *torch.autograd.grad(loss.sum(), sources), *(getattr(found, one) for one in stats)))
    torch.testing.assert_close(*results, rtol=2e-06, atol=2e-06)


def test_a_small_temperature_of_a_float16_scale_does_not_overflow(target: Target) -> None:
    (logits,), classes = sources_of(target, "cross_entropy", "float32"), target_of(target)
    options = {"temperature": 1e-3, "backend": target.name}
    found = xent.log_probs(
        logits, classes, logit_scale=torch.tensor(100.0, dtype=torch.float16, device=target.device), **options
    )
    torch.testing.assert_close(found, xent.log_probs(logits, classes, logit_scale=100.0, **options))


@pytest.mark.parametrize("function", ["log_probs", "linear_log_probs"])
@pytest.mark.parametrize("temperature", ["number", "rows"])
def test_log_probabilities_train_a_scale(
    target: Target, values: Callable[..., Any], function: str, temperature: str
) -> None:
    arrays, classes = drawn(target), target_of(target)
    divisor = 0.8 if temperature == "number" else torch.linspace(0.5, 2, ROWS).to(target.device)
    sources = (torch.nn.functional.linear(*arrays.values()),)
    sources = sources if "linear" not in function else (arrays["input"], arrays["linear_weight"])
    scale, *leaves = asking(torch.tensor(SCALE).to(target.device), *sources)
    options = {"softcap": 3.0, "temperature": divisor, "entropy": True, "backend": target.name}

    def run(scale: Tensor, *leaves: Tensor) -> Any:
        return getattr(xent, function)(*leaves, classes, logit_scale=scale, **options)

    found = values(run)(scale, *leaves)
    wide = asking(scale, *sources, dtype=torch.float64)
    logits = wide[1] if len(wide) == 2 else wide[1] @ wide[2].t()
    heat = torch.as_tensor(divisor).to(logits).expand(ROWS)
    rows = target.harness.unfused_rows(
        logits, classes.clamp(min=0), classes < 0, softcap=3.0, logit_scale=wide[0], temperature=heat
    )
    plain = -rows["nll"], rows["entropy"]
    upstream = upstream_of(plain[0]), upstream_of(plain[1]).flip(0)
    gradients = torch.autograd.grad(found, (scale, *leaves), [one.float() for one in upstream])
    for one, other in zip(gradients, torch.autograd.grad(plain, wide, upstream), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", ["classes", "probabilities"])
def test_heads_shifts_and_axes_train_a_scale(target: Target, reduction: str, kind: str) -> None:
    """Each call equals the separate calls that it combines."""
    arrays, y = drawn(target), target_of(target, kind)
    x = torch.stack([arrays["input"], arrays["input"].flip(0)])
    w, (scale,) = arrays["linear_weight"], asking(torch.tensor(SCALE).to(target.device))
    options = {"logit_scale": scale, "reduction": reduction, "backend": target.name}

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, scale, upstream_of(loss))[0]

    together = gradient(xent.linear_cross_entropy(x, w, y, shift=(1, 2), **options))
    each = [xent.linear_cross_entropy(one, w, y, shift=k, **options) for one, k in zip(x, (1, 2), strict=True)]
    torch.testing.assert_close(together, gradient(torch.stack(each) if reduction == "none" else each[0] + each[1]))
    moved = y.roll(-1, 0) if kind == "classes" else None
    if moved is not None:
        moved[-1] = -100
        expected = gradient(xent.linear_cross_entropy(x[0], w, moved, **options))
        torch.testing.assert_close(gradient(xent.linear_cross_entropy(x[0], w, y, shift=1, **options)), expected)
    z = x[0] @ w.t()
    given = y.t() if kind == "probabilities" else y
    found = xent.cross_entropy(z.t().contiguous(), given, axis=0, **options)
    torch.testing.assert_close(gradient(found), gradient(xent.cross_entropy(z, y, **options)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_without_a_target_do_not_contribute(target: Target, function: str) -> None:
    loss, _ = pair(target, function, "mean")
    sources = sources_of(target, function, "float32")
    scale, other = asking(*[torch.tensor(SCALE).to(target.device)] * 2)
    (expected,) = torch.autograd.grad(loss(scale, *sources), scale)
    spoilt = sources[0].clone()
    spoilt[2, :2] = torch.tensor([torch.nan, torch.inf])  # the target is ignored
    (found,) = torch.autograd.grad(loss(other, spoilt, *sources[1:]), other)
    torch.testing.assert_close(found, expected)
    (nothing,) = torch.autograd.grad(xent.cross_entropy(spoilt[2:3], target_of(target)[2:3], logit_scale=scale), scale)
    assert float(nothing) == 0


def test_meta_tensors_have_a_scale(target: Target) -> None:
    x, w = (tensor.to("meta") for tensor in sources_of(target, "linear_cross_entropy", "float32"))
    (scale,) = asking(torch.tensor(SCALE, device="meta"))
    loss = xent.linear_cross_entropy(x, w, target_of(target).to("meta"), logit_scale=scale, backend=target.name)
    (gradient,) = torch.autograd.grad(loss, scale)
    assert (gradient.device.type, gradient.shape) == ("meta", ())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_errors_name_the_option(target: Target, function: str) -> None:
    sources, y = sources_of(target, function, "float32"), target_of(target)

    def run(compiled: bool = False, **options: Any) -> Any:
        def call(sources: Any) -> Any:
            return getattr(xent, function)(*sources, y, backend=target.name, **options)

        return (torch.compile(call, backend="aot_eager") if compiled else call)(sources)

    (cap,) = asking(torch.tensor(2.0).to(target.device))
    for compiled in (False, True):
        torch._dynamo.reset()
        with pytest.raises(
            Exception, match=r"softcap requires a gradient, which xent does not compute: pass softcap\.detach"
        ):
            run(compiled, softcap=cap)
    assert float(run(softcap=cap.detach())) == float(run(softcap=2.0))
    for option in ("softcap", "logit_scale"):
        with pytest.raises(TypeError, match=f"{option} must be a number or a 0-d tensor of one, got torch array of sh"):
            run(**{option: torch.ones(1, device=target.device)})
        with pytest.raises(TypeError, match=f"{option} must be a number or a 0-d tensor of one, got torch array of sh"):
            run(**{option: torch.tensor(True, device=target.device)})
        if target.device != "meta":
            with pytest.raises(ValueError, match=f"{option} on meta"):
                run(**{option: torch.ones((), device="meta")})
        if target.device == "cpu":
            with pytest.raises(ValueError, match=f"{option} must be finite.*, got nan"):
                run(**{option: torch.tensor(float("nan"))})


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inplace_with_a_trained_scale_is_an_error(target: Target, reduction: str) -> None:
    (logits,) = sources_of(target, "cross_entropy", "float32")
    (scale,) = asking(torch.tensor(SCALE).to(target.device))
    options = {"inplace": True, "reduction": reduction, "backend": target.name}
    with pytest.raises(ValueError, match="inplace=True overwrites the logits"):
        xent.cross_entropy(logits, target_of(target), logit_scale=scale, **options)
    (logits,) = asking(logits)
    expected = xent.cross_entropy(logits, target_of(target), logit_scale=SCALE, reduction=reduction).sum()
    found = xent.cross_entropy(logits * 1, target_of(target), logit_scale=scale.detach(), **options).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (found, expected)))


def test_divergences_accept_numbers_only(target: Target) -> None:
    (logits,) = sources_of(target, "cross_entropy", "float32")
    with pytest.raises(TypeError, match="logit_scale must be a number"):
        xent.divergence(logits, logits, logit_scale=torch.tensor(1.0), backend=target.name)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("compiled", [False, True])
def test_shards_accept_a_scale_without_gradient(group: None, function: str, compiled: bool) -> None:
    torch._dynamo.reset()
    target = Target("torch", "cpu")
    sources, y = asking(*sources_of(target, function, "float32")), target_of(target)

    def run(scale: Any, cap: Any) -> Any:
        options = {"logit_scale": scale, "softcap": cap, "stats": ("predictions",), "vocab_parallel": dist.group.WORLD}
        loss, stats = getattr(xent, function)(*sources, y, **options)
        return loss, stats.predictions

    call = torch.compile(run, backend="aot_eager") if compiled else run
    results = []
    for numbers in ((-0.7, 2.0), (torch.tensor(-0.7), torch.tensor(2.0))):
        loss, predictions = call(*numbers)
        results.append((loss, predictions, *torch.autograd.grad(loss, sources)))
    torch.testing.assert_close(*results)
    (scale,) = asking(torch.tensor(0.7))
    with pytest.raises(Exception, match="logit_scale requires a gradient, which xent does not compute"):
        call(scale, 2.0)
