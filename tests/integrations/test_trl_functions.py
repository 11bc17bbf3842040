"""The replacements of TRL's kernels have the same results and gradients, or are closer to float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import trl.trainer.utils as trainer_utils
from torch import Tensor
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS
from trl.kernels.chunked_logprob import ChunkedLogProbFunction as Theirs

from tests.integrations.models import batch, device, make
from xent.integrations.transformers import patch
from xent.integrations.transformers.deferred import is_open
from xent.integrations.trl import ChunkedLogProbFunction, entropy_from_logits, selective_log_softmax_and_entropy

NAMES = ("log_probs", *OPTIONAL_OUTPUTS)
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": -1.5},
    "all": {"temperature": 1.3, "softcap": 1.5, "scale": 0.4, "bias": True},
    "two tiles": {"chunk": 20, "bias": True},
}


def inputs(rows: int = 9, dtype: torch.dtype = torch.float32, bias: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    made = {"hidden": torch.randn(rows, 16, generator=generator), "weight": torch.randn(33, 16, generator=generator)}
    if bias:
        made["bias"] = torch.randn(33, generator=generator)
    moved = {name: each.to(device, dtype).requires_grad_() for name, each in made.items()}
    return {"bias": None, **moved, "targets": torch.randint(33, (rows,), generator=generator).to(device)}


def apply(function: Any, given: dict[str, Any], outputs: Any = OPTIONAL_OUTPUTS, **options: Any) -> tuple[Any, ...]:
    arguments = [given[name] for name in ("hidden", "weight", "bias", "targets")]
    rest = options.get("temperature", 1.0), options.get("chunk", 32768), options.get("softcap"), options.get("scale", 1)
    return function.apply(*arguments, *rest, outputs)


def gradients(results: tuple[Any, ...], given: dict[str, Any], upstream: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the differentiable inputs, for upstream gradients of the named results."""
    wanted = {name: each for name, each in given.items() if each is not None and each.requires_grad}
    outputs = {name: each for name, each in zip(NAMES, results, strict=True) if name in upstream}
    found = torch.autograd.grad(list(outputs.values()), list(wanted.values()), [upstream[name] for name in outputs])
    return dict(zip(wanted, found, strict=True))


def upstreams(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(rows, generator=generator).to(device) for name in ("log_probs", "entropy")}


def definition(given: dict[str, Any], **options: Any) -> tuple[Tensor, ...]:
    """Return the results of these names, computed in float64 by their definitions."""
    wide = {name: None if each is None else each.double() for name, each in given.items()}
    cap = options.get("softcap")
    x = F.linear(wide["hidden"], wide["weight"], wide["bias"]) * options.get("scale", 1)
    x = (x if cap is None else cap * torch.tanh(x / cap)) / options.get("temperature", 1.0)
    log_p = x.log_softmax(-1)
    chosen = log_p.gather(-1, given["targets"][:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return chosen, entropy, (2 * log_p).logsumexp(-1), x.mean(-1), x.argmax(-1) == given["targets"]


@pytest.mark.parametrize("name", OPTIONS)
def test_float32(name: str) -> None:
    options = dict(OPTIONS[name])
    given = inputs(bias=options.pop("bias", False))
    upstream = upstreams(9)
    ours, theirs, truth = (
        apply(ChunkedLogProbFunction, given, **options),
        apply(Theirs, given, **options),
        definition(given, **options),
    )
    for mine, other, true in zip(ours, theirs, truth, strict=True):
        assert mine.dtype == other.dtype
        assert mine.requires_grad == other.requires_grad
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(mine.double(), true.double(), rtol=1e-5, atol=2e-6)
    for chosen in (("log_probs",), ("entropy",), ("log_probs", "entropy")):
        some = {each: upstream[each] for each in chosen}
        mine, other = (gradients(apply(f, given, **options), given, some) for f in (ChunkedLogProbFunction, Theirs))
        true = gradients(definition(given, **options), given, {each: some[each].double() for each in some})
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy"), ("is_top1", "mean_logits"), ["entropy"]])
def test_outputs_that_are_not_requested_are_none(outputs: Any) -> None:
    given = inputs()
    ours, theirs = apply(ChunkedLogProbFunction, given, outputs), apply(Theirs, given, outputs)
    assert [each is None for each in ours] == [each is None for each in theirs]
    assert type(ours) is tuple


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_rounded_logits(dtype: torch.dtype) -> None:
    """Results and gradients come closer to float64 than TRL's, whose logits are rounded."""
    given, upstream = inputs(64, dtype), upstreams(64)
    truth = definition(given)
    true = gradients(truth, given, {name: each.double() for name, each in upstream.items()})
    errors = []
    for function in (ChunkedLogProbFunction, Theirs):
        results = apply(function, given)
        found = gradients(results, given, upstream)
        values = {
            name: (each - right).abs().max().item()
            for name, each, right in zip(NAMES[:4], results, truth, strict=False)
        }
        assert {each.dtype for each in found.values()} == {dtype}
        errors.append(values | {name: (each - true[name]).abs().max().item() for name, each in found.items()})
    ours, theirs = errors
    assert all(ours[name] < 1e-4 < theirs[name] for name in ("log_probs", "entropy"))
    assert all(ours[name] < 1e-4 for name in ("log_sum_sq_probs", "mean_logits"))
    assert all(ours[name] <= 1.01 * theirs[name] for name in ("hidden", "weight"))


def test_results_are_float32_for_float64() -> None:
    given = inputs(dtype=torch.float64)
    ours, theirs = apply(ChunkedLogProbFunction, given), apply(Theirs, given)
    assert [each.dtype for each in ours] == [each.dtype for each in theirs]
    torch.testing.assert_close(ours, theirs)


def test_first_of_equal_logits_is_the_prediction() -> None:
    weight = torch.eye(4, device=device)
    given = {"hidden": torch.ones(4, 4, device=device), "weight": weight, "bias": None}
    given["targets"] = torch.arange(4, device=device)
    for function in (ChunkedLogProbFunction, Theirs):
        assert apply(function, given)[-1].tolist() == [True, False, False, False]


def test_autocast() -> None:
    given, upstream = inputs(), upstreams(9)
    rounded = {name: each if name == "targets" or each is None else each.bfloat16() for name, each in given.items()}
    truth = definition(rounded)
    errors = []
    for function in (ChunkedLogProbFunction, Theirs):
        with torch.autocast(device, torch.bfloat16):
            results = apply(function, given)
        found = gradients(results, given, upstream)
        assert {each.dtype for each in found.values()} == {torch.float32}
        errors.append((results[0] - truth[0]).abs().max().item())
    assert errors[0] < 1e-4 < errors[1]


def test_head_in_float32() -> None:
    """GRPO's cast_lm_head_to_fp32: the hidden states are float32, the classifier is not."""
    given = inputs()
    given["weight"] = given["weight"].detach().bfloat16().requires_grad_()
    upstream = upstreams(9)
    ours, theirs = apply(ChunkedLogProbFunction, given), apply(Theirs, given)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    mine, other = gradients(ours, given, upstream), gradients(theirs, given, upstream)
    assert mine["weight"].dtype == torch.bfloat16
    torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-4)


def test_no_rows() -> None:
    given = inputs(0)
    results = apply(ChunkedLogProbFunction, given)
    assert [tuple(each.shape) for each in results] == [(0,)] * 5
    found = gradients(results, given, {"log_probs": results[0].detach()})
    assert not found["weight"].any()


def test_rows_without_a_target() -> None:
    given, upstream = inputs(), upstreams(9)
    given["targets"][[2, 5]] = -100
    results = apply(ChunkedLogProbFunction, given)
    assert not any(each[[2, 5]].any() for each in results)
    assert not gradients(results, given, upstream)["hidden"][[2, 5]].any()


def test_weights_released_before_backward() -> None:
    """As with DeepSpeed ZeRO-3, which gathers them again only for its own modules."""
    given, upstream = inputs(bias=True), upstreams(9)
    expected = gradients(apply(ChunkedLogProbFunction, given), given, upstream)
    for name in ("weight", "bias"):
        given[name].ds_id = 1
    results = apply(ChunkedLogProbFunction, given)
    for name in ("weight", "bias"):
        given[name].data = torch.empty(0, device=device)
    found = gradients(results, given, upstream)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_compiled() -> None:
    torch.compiler.reset()
    given, upstream = inputs(), upstreams(9)

    def step(given: dict[str, Any]) -> tuple[Any, ...]:
        return apply(ChunkedLogProbFunction, given, temperature=0.7)

    expected = step(given)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(given)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, given, upstream), gradients(expected, given, upstream))
    torch.compiler.reset()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(), (7,), (3, 4)])
def test_from_logits(shape: tuple[int, ...], masked: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(*shape, 19, generator=generator).to(device).requires_grad_()
    index = torch.randint(19, shape, generator=generator, dtype=torch.int32).to(device)
    mask = torch.randint(2, shape, generator=generator).to(device) if masked else None
    ours = selective_log_softmax_and_entropy(logits, index, 0.7, mask)
    if shape:
        theirs = trainer_utils.selective_log_softmax_and_entropy(logits, index.long(), temperature=0.7, row_mask=mask)
    else:
        log_p = (logits / 0.7).log_softmax(-1)
        kept = 1 if mask is None else mask
        theirs = log_p[index] * kept, -(log_p.exp() * log_p).sum() * kept
    torch.testing.assert_close(ours, theirs)
    upstream = [torch.randn(shape, generator=generator).to(device) for _ in ours]
    torch.testing.assert_close(
        torch.autograd.grad(ours, logits, upstream), torch.autograd.grad(theirs, logits, upstream)
    )


def test_masked_logits_are_not_read() -> None:
    logits = torch.randn(2, 5, device=device)
    logits[1] = torch.nan
    logits.requires_grad_()
    results = selective_log_softmax_and_entropy(
        logits, torch.tensor([1, 7], device=device), row_mask=torch.tensor([True, False], device=device)
    )
    (gradient,) = torch.autograd.grad(results[0].sum() + results[1].sum(), logits)
    assert not results[0][1]
    assert not results[1][1]
    assert not gradient[1].any()
    assert gradient[0].any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16], ids=str)
def test_masked_rows_of_any_integer_dtype(dtype: torch.dtype) -> None:
    """-100 in uint8 is 156, which is a class of 200."""
    logits, index = torch.randn(3, 200, device=device), torch.tensor([1, 7, 100], device=device)
    mask = torch.tensor([1, 0, 1], device=device)
    expected = selective_log_softmax_and_entropy(logits, index, row_mask=mask)
    assert expected[0][1] == 0
    found = selective_log_softmax_and_entropy(logits, index.to(dtype), row_mask=mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("theirs", [True, False], ids=["TRL's function", "xent's"])
def test_entropy_of_a_patched_model(theirs: bool) -> None:
    """TRL's function takes parts of the rows on a CPU; on a GPU it calls a kernel, which reads all logits."""
    function = trainer_utils.entropy_from_logits if theirs and device == "cpu" else entropy_from_logits
    model, inputs = make("gemma2"), batch(rows=4, length=40)
    expected = trainer_utils.entropy_from_logits(model(**inputs).logits)
    with patch(model), torch.no_grad():
        outputs = model(**inputs)
        torch.testing.assert_close(function(outputs.logits), expected, rtol=1e-5, atol=1e-5)
        assert is_open(outputs.logits)


def test_entropy_has_the_gradient_of_logits() -> None:
    logits = torch.randn(3, 4, 33, device=device, requires_grad=True)
    results = [function(logits) for function in (trainer_utils.entropy_from_logits, entropy_from_logits)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*[torch.autograd.grad(each.square().sum(), logits)[0] for each in results])
