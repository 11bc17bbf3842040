"""Logit scale and softcap as 0-d tensors, and the gradient of a trained scale, as in CLIP."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import xent
from tests.cases import DTYPES, FUNCTIONS, LOG_PROBS
from tests.covering import crossed
from tests.options import LOG_PROB_OPTIONS, OPTIONS
from tests.targets import Target
from xent.command.check.case import Case, make_inputs, placed
from xent.core.spec import LOG_PROB_STATS, STAT_NAMES

SCALE, SEED = 0.7, 2
"""Of arrays with which no gradient of a scale nearly cancels."""
SCALES = {"scale, negative": -0.7, "small": 1e-6, "tiny": 1e-30, "zero": 0.0}
LEAST = {"float64": 2.0**-300}
"""A trained scale closer to 0 is replaced by this, or by 2^-60 if sums are float32."""
NAMES = [*(name for name in OPTIONS if "scale" not in name), *SCALES]


@pytest.fixture(params=["read", "not read"])
def values(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return a function as it is, or compiled, so that the values of tensors cannot be read, as on an accelerator."""
    if request.param == "read":
        return lambda function: function
    torch._dynamo.reset()
    return lambda function: torch.compile(function, backend="aot_eager")


def case_of(function: str, name: str = "plain", dtype: str = "float32", reduction: str = "mean") -> Case:
    options = {key: value for key, value in OPTIONS.get(name, {}).items() if key != "logit_scale"}
    return Case(function, (6,), 11, dtype, name, options, reduction, 8, bias="smoothing" in name)


def calls_of(target: Target, case: Case) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]:
    """Return the call as a function of scale and sources, the same in the framework's own operations, and sources."""
    inputs = make_inputs(case, SEED)
    options = placed(target.harness, inputs.options, "float32")
    (classes,) = target.arrays(inputs.target)

    def call(scale: Any, *sources: Tensor, **more: Any) -> Any:
        named = dict(zip(inputs.differentiable, sources, strict=True))
        given = {"target": classes, "logit_scale": scale, "backend": target.name} | options | case.keywords | more
        return getattr(xent, case.function)(**named, **given)

    def plain(scale: Any, *sources: Tensor) -> Any:
        logits = torch.nn.functional.linear(*sources) if case.is_linear else sources[0]
        given = {"logit_scale": scale} | options
        if case.function in FUNCTIONS:
            return target.harness.unfused_loss(logits, classes, reduction=case.reduction, **given)
        given["temperature"] = torch.as_tensor(given.get("temperature", 1.0)).to(logits).expand(6)
        rows = target.harness.unfused_rows(logits, classes.clamp(min=0), classes < 0, **given)
        return -rows["nll"], rows["entropy"]

    return call, plain, target.arrays(*inputs.differentiable.values(), dtype=case.dtype)


def asking(*tensors: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in tensors)


def upstream_of(loss: Tensor) -> Tensor:
    return torch.linspace(1.2, 2.1, loss.numel(), device=loss.device).to(loss.dtype).view(loss.shape)


def gradients(loss: Tensor, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, leaves, upstream_of(loss))


@pytest.mark.parametrize(
    *crossed(
        costly="values",
        function=FUNCTIONS,
        name=NAMES,
        dtype=DTYPES,
        reduction=["mean", "sum", "none"],
        values=["read", "not read"],
    ),
    indirect=["values"],
)
def test_gradient_of_a_scale(
    target: Target, values: Callable[..., Any], function: str, name: str, dtype: str, reduction: str
) -> None:
    """All gradients equal those of the definition in float64, up to the rounding of each logit's gradient."""
    number = SCALES.get(name, SCALE)
    if not target.takes(dtype):
        return
    loss, plain, sources = calls_of(target, case_of(function, name, dtype, reduction))
    scale = torch.tensor(number, dtype=torch.float64 if dtype == "float64" else torch.float32, device=target.device)
    logits = torch.nn.functional.linear(*sources) if len(sources) > 1 else sources[0]
    replaced = scale.double().clamp(min=LEAST.get(dtype, 2.0**-60)) if number >= 0 else scale
    wide = asking(replaced, *sources, dtype=torch.float64)
    expected = plain(*wide)
    truth = gradients(expected, wide)
    each = torch.full_like(logits, number, dtype=torch.float64).requires_grad_()  # a separate scale for each logit
    rescaled = each * logits.double()
    rescaled = [rescaled, torch.eye(logits.shape[1]).to(rescaled)] if len(sources) > 1 else [rescaled]
    (terms,) = gradients(plain(1.0, *rescaled), (each,))
    eps = torch.finfo(getattr(torch, dtype)).eps
    allowed = float(terms.abs().sum()) * (eps if sources[0].itemsize == 2 else 8 * eps)
    assert float(truth[0].abs()) > 4 * allowed

    leaves = asking(scale, *sources)
    found = values(loss)(*leaves)
    torch.testing.assert_close(found.double(), expected.detach(), rtol=4 * eps, atol=4 * eps)
    made = gradients(found, leaves)
    for one, other in zip(made[1:], truth[1:], strict=True):
        # Numbers below the normal ones are a spacing apart.
        spacing = eps * torch.finfo(getattr(torch, dtype)).smallest_normal
        least = max(8 * eps * float(other.abs().max()), spacing)
        torch.testing.assert_close(one.double(), other, rtol=8 * eps, atol=least)
    (alone,) = asking(scale)  # without other gradients
    frozen = [asking(scale)[0], sources[0], *asking(*sources[1:])]
    of_scale = [made[0], *gradients(loss(alone, *sources), (alone,)), *gradients(loss(*frozen), tuple(frozen[:1]))]
    for gradient in of_scale:
        assert (gradient.dtype, gradient.shape) == (scale.dtype, ())
        assert abs(float(gradient - truth[0])) <= allowed


@pytest.mark.parametrize(
    *crossed(
        costly="values",
        option=[("logit_scale", 2), ("logit_scale", -1), ("logit_scale", 0), ("softcap", 2)],
        dtype=[*DTYPES, "int64"],
        on_cpu=[False, True],
        function=[*FUNCTIONS, *LOG_PROBS],
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
    call, _, sources = calls_of(target, case_of(function))
    sources, stats = asking(*sources), LOG_PROB_STATS if function in LOG_PROBS else STAT_NAMES

    def run(value: Any) -> Any:
        return call(SCALE, *sources, **{"softcap": 2.0, "stats": stats, name: value})

    tensor = torch.tensor(number, dtype=getattr(torch, dtype), device="cpu" if on_cpu else target.device)
    results = []
    for loss, found in (run(number), values(run)(tensor)):
        results.append((loss, *torch.autograd.grad(loss.sum(), sources), *(getattr(found, one) for one in stats)))
    torch.testing.assert_close(*results, rtol=2e-06, atol=2e-06)


def test_a_small_temperature_of_a_float16_scale_does_not_overflow(target: Target) -> None:
    call, _, sources = calls_of(target, case_of("log_probs"))
    scale = torch.tensor(100.0, dtype=torch.float16, device=target.device)
    torch.testing.assert_close(*(call(one, *sources, temperature=1e-3) for one in (scale, 100.0)))


@pytest.mark.parametrize("function", LOG_PROBS)
@pytest.mark.parametrize("name", ["softcap, scale", "softcap, temperature of each row"])
def test_log_probabilities_train_a_scale(target: Target, values: Callable[..., Any], function: str, name: str) -> None:
    options = {key: value for key, value in LOG_PROB_OPTIONS[name].items() if key != "logit_scale"}
    call, plain, sources = calls_of(target, replace(case_of(function), options=options, entropy=True))
    leaves = asking(torch.tensor(SCALE).to(target.device), *sources)
    wide = asking(*leaves, dtype=torch.float64)
    expected = plain(*wide)
    upstream = upstream_of(expected[0]), upstream_of(expected[1]).flip(0)
    found = torch.autograd.grad(values(call)(*leaves), leaves, [one.float() for one in upstream])
    for one, other in zip(found, torch.autograd.grad(expected, wide, upstream), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["plain", "probabilities"])
def test_heads_train_a_scale(target: Target, reduction: str, name: str) -> None:
    """The call equals the separate calls that it combines."""
    case = case_of("linear_cross_entropy", name, reduction=reduction)
    call, _, (hidden, weight) = calls_of(target, case)
    x, (scale,) = torch.stack([hidden, hidden.flip(0)]), asking(torch.tensor(SCALE).to(target.device))
    each = [call(scale, one, weight, shift=shift) for one, shift in zip(x, (1, 2), strict=True)]
    losses = call(scale, x, weight, shift=(1, 2)), torch.stack(each) if reduction == "none" else each[0] + each[1]
    torch.testing.assert_close(*(gradients(loss, (scale,)) for loss in losses))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_without_a_target_do_not_contribute(target: Target, function: str) -> None:
    case = case_of(function)
    loss, _, (source, *rest) = calls_of(target, case)
    ignored = make_inputs(case, SEED).target == -100
    assert ignored.any()
    spoilt = source.clone()
    spoilt[torch.from_numpy(ignored)] = torch.nan
    scale, other = asking(*[torch.tensor(SCALE).to(target.device)] * 2)
    torch.testing.assert_close(
        gradients(loss(other, spoilt, *rest), (other,)), gradients(loss(scale, source, *rest), (scale,))
    )
    nothing = torch.full((6,), -100, device=target.device)
    assert float(gradients(loss(scale, spoilt, *rest, target=nothing), (scale,))[0]) == 0


@pytest.mark.parametrize("function", FUNCTIONS)
def test_errors_name_the_option(target: Target, function: str) -> None:
    call, _, sources = calls_of(target, case_of(function))

    def run(**options: Any) -> Any:
        return call(1.0, *sources, **options)

    (cap,) = asking(torch.tensor(2.0).to(target.device))
    torch._dynamo.reset()
    for one in (run, torch.compile(run, backend="aot_eager")):
        with pytest.raises(
            Exception, match=r"softcap requires a gradient, which xent does not compute: pass softcap\.detach"
        ):
            one(softcap=cap)
    assert float(run(softcap=cap.detach())) == float(run(softcap=2.0))
    for option in ("softcap", "logit_scale"):
        for wrong in (torch.ones(1, device=target.device), torch.tensor(True, device=target.device)):
            with pytest.raises(
                TypeError, match=f"{option} must be a number or a 0-d tensor of one, got torch array of"
            ):
                run(**{option: wrong})
        with pytest.raises(ValueError, match=f"{option} on meta"):
            run(**{option: torch.ones((), device="meta")})
        if target.device == "cpu":
            with pytest.raises(ValueError, match=f"{option} must be finite.*, got nan"):
                run(**{option: torch.tensor(float("nan"))})
    for option in ("z_loss", "label_smoothing"):
        with pytest.raises(ValueError, match=f"{option} must be .*, got -1"):
            run(**{option: torch.tensor(-1.0)})


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inplace_with_a_trained_scale_is_an_error(target: Target, reduction: str) -> None:
    call, _, sources = calls_of(target, case_of("cross_entropy", reduction=reduction))
    scale, logits = asking(torch.tensor(SCALE).to(target.device), *sources)
    with pytest.raises(ValueError, match="inplace=True overwrites the logits"):
        call(scale, logits * 1, inplace=True)
    losses = call(SCALE, logits), call(scale.detach(), logits * 1, inplace=True)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(gradients(loss, (logits,)) for loss in losses))


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
def test_shards_accept_a_scale_without_gradient(group: None, compiled: bool) -> None:
    torch._dynamo.reset()
    calls = [calls_of(Target("torch", "cpu"), case_of(function)) for function in FUNCTIONS]
    leaves = [asking(*sources) for *_, sources in calls]

    def run(scale: Any, cap: Any) -> list[Tensor]:
        more = {"softcap": cap, "stats": ("predictions",), "vocab_parallel": dist.group.WORLD}
        made = [call(scale, *sources, **more) for (call, *_), sources in zip(calls, leaves, strict=True)]
        return [*(loss for loss, _ in made), *(stats.predictions for _, stats in made)]

    numbers, tensors = (-0.7, 2.0), (torch.tensor(-0.7), torch.tensor(2.0))
    found, expected = (torch.compile(run, backend="aot_eager") if compiled else run)(*tensors), run(*numbers)
    torch.testing.assert_close(found, expected)
    every = [leaf for sources in leaves for leaf in sources]
    torch.testing.assert_close(*(torch.autograd.grad(made[:2], every) for made in (found, expected)))
    (scale,) = asking(torch.tensor(0.7))
    with pytest.raises(Exception, match="logit_scale requires a gradient, which xent does not compute"):
        run(scale, 2.0)
