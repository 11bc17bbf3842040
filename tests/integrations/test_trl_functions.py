"""The replacements of TRL's kernels have the same results and gradients, or are closer to those of float32."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import trl.trainer.utils as trainer_utils
from torch import Tensor
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as TheirDivergence
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS
from trl.kernels.chunked_logprob import ChunkedLogProbFunction as TheirLogProbs

from tests.integrations.models import batch, device, make
from xent.integrations.transformers import patch
from xent.integrations.transformers.deferred import is_open
from xent.integrations.trl import (
    ChunkedDivergenceFunction,
    ChunkedLogProbFunction,
    entropy_from_logits,
    selective_log_softmax_and_entropy,
)

ROWS, VOCABULARY = 9, 33
LOG_PROBS = ChunkedLogProbFunction, TheirLogProbs
DIVERGENCES = ChunkedDivergenceFunction, TheirDivergence
Side = list[Any]
"""Hidden states, classifier and bias or None; of a divergence those of the student, then those of the teacher."""


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(device)


def sides(*widths: int, rows: int = ROWS, dtype: torch.dtype = torch.float32, bias: bool = False) -> Side:
    generator, drawn = torch.Generator().manual_seed(0), []
    for width in widths:
        shapes = [(rows, width), (VOCABULARY, width), *([(VOCABULARY,)] if bias else [])]
        tensors = [draw(generator, *shape).to(dtype).requires_grad_() for shape in shapes]
        drawn += tensors if bias else [*tensors, None]
    return drawn


side = partial(sides, 16)
student_and_teacher = partial(sides, 16, 24)
TARGETS = torch.randint(VOCABULARY, (64,), generator=torch.Generator().manual_seed(5)).to(device)
GENERATOR = torch.Generator().manual_seed(1)
UPSTREAM = [draw(GENERATOR, ROWS) for _ in range(2)]


def log_probs(function: Any, inputs: Side, targets: Tensor | None = None, **options: Any) -> tuple[Any, ...]:
    names = {"temperature": 1.0, "chunk": 32768, "softcap": None, "scale": 1, "outputs": OPTIONAL_OUTPUTS}
    targets = TARGETS[: len(inputs[0])] if targets is None else targets
    return function.apply(*inputs, targets, *(names | options).values())


def divergences(function: Any, inputs: Side, beta: float = 0.5, **options: Any) -> tuple[Any, ...]:
    names = {"temperature": 1.0, "scale": 1.0, "softcap": None, "teacher_scale": 1.0, "teacher_softcap": None}
    return function.apply(*inputs, beta, *(names | options).values())


def wide(inputs: Side) -> Side:
    """Return the inputs in float32, for results of TRL's functions that nothing rounds."""
    return [None if each is None else each.detach().float().requires_grad_() for each in inputs]


def gradients(results: Any, inputs: Side, upstream: Sequence[Tensor | None] = UPSTREAM) -> list[Tensor]:
    """Return the gradients of the inputs that have one, for upstream gradients of the first results."""
    pairs = [(each, factor) for each, factor in zip(results, upstream, strict=False) if factor is not None]
    leaves = [each for each in inputs if each is not None and each.requires_grad]
    factors = [factor.to(each.dtype) for each, factor in pairs]
    found = torch.autograd.grad([each for each, _ in pairs], leaves, factors, allow_unused=True)
    return [each for each in found if each is not None]


def compare(
    functions: tuple[Any, Any],
    compute: Callable[..., Any],
    inputs: Side,
    upstreams: Sequence[Sequence[Tensor | None]],
    error: float,
    **options: Any,
) -> None:
    """Compare results and gradients with TRL's."""
    ours, theirs = (compute(function, inputs, **options) for function in functions)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.dtype, mine.requires_grad) == (other.dtype, other.requires_grad)
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=error)
    for upstream in upstreams:
        mine, other = (gradients(compute(function, inputs, **options), inputs, upstream) for function in functions)
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"softcap": 2.0},
        {"scale": -1.5},
        {"temperature": 1.3, "softcap": 1.5, "scale": 0.4, "bias": True},
        {"chunk": 20, "bias": True},
    ],
    ids=str,
)
def test_log_probs(options: dict[str, Any]) -> None:
    inputs = side(bias=options.get("bias", False))
    named = {name: value for name, value in options.items() if name != "bias"}
    upstreams = [UPSTREAM, UPSTREAM[:1], [None, UPSTREAM[1]]]
    compare(LOG_PROBS, log_probs, inputs, upstreams, 2e-6, **named)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.2, "scale": 0.5, "softcap": 2.0, "teacher_scale": 1.5, "teacher_softcap": 3.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True])
def test_divergences(options: dict[str, Any], beta: float, bias: bool) -> None:
    inputs = student_and_teacher(bias=bias)
    compare(DIVERGENCES, divergences, inputs, [UPSTREAM[:1]], 5e-6, beta=beta, **options)
    assert len(gradients(divergences(DIVERGENCES[0], inputs, beta, **options), inputs, UPSTREAM[:1])) == 2 + bias


@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy"), ("is_top1", "mean_logits"), ["entropy"]])
def test_outputs_that_are_not_requested_are_none(outputs: Any) -> None:
    ours, theirs = (log_probs(function, side(), outputs=outputs) for function in LOG_PROBS)
    assert [each is None for each in ours] == [each is None for each in theirs]
    assert type(ours) is tuple


def errors(results: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    """Return the largest error of each result."""
    return [(each - true).abs().max().item() for each, true in zip(results, truth, strict=False)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probs_are_not_rounded(dtype: torch.dtype) -> None:
    """Results and gradients come closer to those of float32 than TRL's, whose logits are rounded."""
    inputs, upstream = side(rows=64, dtype=dtype), draw(torch.Generator().manual_seed(1), 2, 64)
    truth = log_probs(TheirLogProbs, leaves := wide(inputs))
    exact = gradients(truth, leaves, upstream)
    wrong, slopes = [], []
    for function in LOG_PROBS:
        results = log_probs(function, inputs)
        found = gradients(results, inputs, upstream)
        assert {each.dtype for each in found} == {dtype}
        wrong.append(errors(results[:4], truth))
        slopes.append(errors(found, exact))
    ours, theirs = wrong
    assert max(ours) < 1e-4 < min(theirs[:2])
    assert all(mine <= 1.01 * other for mine, other in zip(*slopes, strict=True))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_bfloat16_divergences(beta: float) -> None:
    inputs = student_and_teacher(dtype=torch.bfloat16)
    truth = divergences(TheirDivergence, leaves := wide(inputs), beta)
    true, slopes = gradients(truth, leaves, UPSTREAM[:1]), []
    for function in DIVERGENCES:
        results = divergences(function, inputs, beta)
        found = gradients(results, inputs, UPSTREAM[:1])
        assert {each.dtype for each in found} == {torch.bfloat16}
        assert max(errors(results, truth)) < 1e-4
        slopes.append(errors(found, true))
    assert all(mine <= 1.5 * other for mine, other in zip(*slopes, strict=True))


def test_dtypes_of_divergences_that_differ_and_autocast() -> None:
    """The trainer keeps the teacher's classifier in the dtype in which it was loaded."""
    inputs = student_and_teacher()
    inputs[4] = inputs[4].detach().bfloat16()
    ours, theirs = (divergences(function, inputs) for function in DIVERGENCES)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)
    with torch.autocast(device, torch.bfloat16):
        ours, theirs = (divergences(function, inputs) for function in DIVERGENCES)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_results_are_float32_for_float64() -> None:
    ours, theirs = (log_probs(function, side(dtype=torch.float64)) for function in LOG_PROBS)
    assert [each.dtype for each in ours] == [each.dtype for each in theirs]
    torch.testing.assert_close(ours, theirs)


def test_autocast_of_log_probs() -> None:
    inputs = side()
    truth = log_probs(TheirLogProbs, wide([each if each is None else each.bfloat16() for each in inputs]))
    wrong = []
    for function in LOG_PROBS:
        with torch.autocast(device, torch.bfloat16):
            results = log_probs(function, inputs)
        assert {each.dtype for each in gradients(results, inputs)} == {torch.float32}
        wrong.append(errors(results, truth[:1])[0])
    assert wrong[0] < 1e-4 < wrong[1]


def test_head_in_float32() -> None:
    """GRPO's cast_lm_head_to_fp32: the hidden states are float32, the classifier is not."""
    inputs = side()
    inputs[1] = inputs[1].detach().bfloat16().requires_grad_()
    ours, theirs = (log_probs(function, inputs) for function in LOG_PROBS)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    mine, other = gradients(ours, inputs), gradients(theirs, inputs)
    assert mine[1].dtype == torch.bfloat16
    torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-4)


def test_no_rows() -> None:
    for inputs, results in (
        (few := side(rows=0), log_probs(LOG_PROBS[0], few)),
        (few := student_and_teacher(rows=0), divergences(DIVERGENCES[0], few)),
    ):
        assert {tuple(each.shape) for each in results} == {(0,)}
        assert not gradients(results, inputs, [UPSTREAM[0][:0]])[1].any()


def test_rows_without_a_target() -> None:
    inputs, targets = side(), TARGETS[:ROWS].clone()
    targets[[2, 5]] = -100
    results = log_probs(LOG_PROBS[0], inputs, targets)
    assert not any(each[[2, 5]].any() for each in results)
    assert not gradients(results, inputs)[0][[2, 5]].any()


def test_weights_released_before_backward() -> None:
    """As with DeepSpeed ZeRO-3, which gathers them again only for its own modules."""
    inputs = side(bias=True)
    expected = gradients(log_probs(LOG_PROBS[0], inputs), inputs)
    for weight in inputs[1:]:
        weight.ds_id = 1
    results = log_probs(LOG_PROBS[0], inputs)
    for weight in inputs[1:]:
        weight.data = torch.empty(0, device=device)
    torch.testing.assert_close(gradients(results, inputs), expected, rtol=0, atol=0)


def test_compiled_log_probs() -> None:
    torch.compiler.reset()
    inputs = side()

    def step(inputs: Side) -> tuple[Any, ...]:
        return log_probs(ChunkedLogProbFunction, inputs, temperature=0.7)

    expected = step(inputs)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, inputs), gradients(expected, inputs))
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
