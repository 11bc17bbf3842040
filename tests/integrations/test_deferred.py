"""Deferred logits behave like computed logits in every operation."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.integrations.models import deferring, device
from xent.integrations.transformers import calls
from xent.integrations.transformers.deferred import DeferredLogits, is_open
from xent.integrations.trl import entropy_from_logits


def heads(bias: bool = True) -> tuple[nn.Linear, nn.Linear, Tensor]:
    """Return a head, a deferring head with the same weights, and hidden states (2, 5, 8) that require a gradient."""
    torch.manual_seed(0)
    plain = nn.Linear(8, 16, bias=bias, device=device)
    twin = deferring(copy.deepcopy(plain))
    return plain, twin, torch.randn(2, 5, 8, device=device, requires_grad=True)


TARGET = torch.tensor([[1, 2, 3, -100, 5], [6, 7, -100, 9, 15]], device=device)

NUMBERS = torch.linspace(-2, 2, 16, device=device)


def mean(logits: Tensor, target: Tensor = TARGET, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.flatten(), **options)


FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": mean,
    "sum": lambda z: mean(z, reduction="sum"),
    "none": lambda z: (mean(z, reduction="none") * torch.arange(10.0, device=device)).sum(),
    "smoothing": lambda z: mean(z, label_smoothing=0.2),
    "weight": lambda z: mean(z, weight=torch.arange(16.0, device=device)),
    "module": lambda z: nn.CrossEntropyLoss()(z.view(10, 16), TARGET.view(-1)),
    "float": lambda z: mean(z.float()),
    "to": lambda z: mean(z.to(torch.float64)).float(),
    "to its device": lambda z: mean(z.to(z.device).to(dtype=torch.float32, device=z.device, non_blocking=True)),
    "scales": lambda z: mean(3 * z / 7 * -2),
    "softcap": lambda z: mean(torch.tanh(z / 2) * 2),
    "softcap and scale": lambda z: mean(0.5 * (F.tanh(z * 3) * 4)),
    "shift": lambda z: mean(z[..., :-1, :].contiguous(), TARGET[..., 1:]),
    "shift, not contiguous": lambda z: mean(z[:, :-1], TARGET[:, 1:]),
    "first classes": lambda z: mean(z[..., :12], TARGET.clamp(max=11)),
    "first classes in one view": lambda z: F.cross_entropy(z[..., :12].view(-1, 12), TARGET.clamp(max=11).flatten()),
    "more classes than there are": lambda z: F.cross_entropy(z[..., :99].view(-1, 16), TARGET.flatten()),
    "one row": lambda z: F.cross_entropy(z[1, 2], TARGET[1, 1]),
    "flatten": lambda z: F.cross_entropy(z.flatten(0, 1), TARGET.flatten()),
    "torch.reshape": lambda z: F.cross_entropy(torch.reshape(z, (-1, 16)), TARGET.flatten()),
    "view": lambda z: F.cross_entropy(z.view(-1, 16), TARGET.flatten()),
    "mask": lambda z: F.cross_entropy(z[TARGET >= 0], TARGET[TARGET >= 0]),
    "clone": lambda z: mean(z.clone()),
    "a number a class": lambda z: mean(z + NUMBERS),
    "a number a class, from the left": lambda z: mean(NUMBERS[None, None] + z),
    "a number a class, and the first classes": lambda z: mean(
        torch.add(z, NUMBERS)[..., :12] * 2, TARGET.clamp(max=11)
    ),
    "sum of dtypes": lambda z: mean(z + z.to(torch.float64)).float(),
    "two numbers a class": lambda z: mean(z + NUMBERS + NUMBERS),
    "probabilities": lambda z: F.cross_entropy(z.view(10, 16), torch.full((10, 16), 1 / 16, device=device)),
    "trained probabilities": lambda z: F.cross_entropy(
        z.view(10, 16), torch.full((10, 16), 1 / 16, device=device, requires_grad=True)
    ),
}

LOOKED_AT: dict[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda z: F.nll_loss(z.log_softmax(-1).view(10, 16), TARGET.flatten()),
    "classes in front": lambda z: F.cross_entropy(z.transpose(1, 2), TARGET),
    "tensor scale": lambda z: mean(z * torch.tensor(3.0, device=device)),
    "negative cap": lambda z: mean(torch.tanh(z) * -3),
    "tanh twice": lambda z: mean(z.tanh().tanh()),
    "scale 0": lambda z: mean(z * 0),
    "plus": lambda z: mean(z + 1),
    "a number a row": lambda z: mean(z + NUMBERS[:5, None]),
    "a number an element": lambda z: mean(z + NUMBERS.expand(2, 5, 16)),
    "a number a class of another dtype": lambda z: mean(z + NUMBERS.double()).float(),
    "a number a class after a scale": lambda z: mean(z * 2 + NUMBERS),
    "a new axis": lambda z: mean((z + NUMBERS.view(1, 1, 1, 16))[0]),
    "infinite scale": lambda z: mean(z * float("inf")).detach().nan_to_num() + mean(z),
    "scaled, and another": lambda z: mean(z * 2 + z * 0.5),
    "sum over rows": lambda z: mean(z + z[:1]),
    "an ellipsis for no axis": lambda z: mean(z[:, :, :12, ...], TARGET.clamp(max=11)),
    "classes in the middle": lambda z: F.cross_entropy(z, TARGET.new_zeros(2, 16)),
    "elements": lambda z: z[torch.ones(2, 5, 16, dtype=torch.bool, device=device)].sum(),
    "some classes": lambda z: mean(z[..., ::2], TARGET.clamp(max=7)),
    "last classes": lambda z: mean(z[..., 3:], TARGET.clamp(max=12)),
    "chosen rows": lambda z: z[torch.tensor([1, 0, 1])].logsumexp(-1).sum(),
    "lower precision": lambda z: mean(z.to(torch.bfloat16).float()),
    "stacked": lambda z: mean(torch.stack([z, z]).mean(0)),
    "written to": lambda z: mean(z.mul_(2).clone()),
    "classes left out": lambda z: _leave_out(z),
    "looked at before": lambda z: z.max().detach() + mean(z),
    "scaled sum": lambda z: mean(torch.add(z, z, alpha=2)),
    "rounded": lambda z: z.div(0.1, rounding_mode="floor").sum() + mean(z),
    "names": lambda z: mean(torch.reshape(input=torch.mul(z, other=2), shape=(-1, 16))),
    "squares of rows": lambda z: (torch.reshape(z, (-1, 16)) * 2).square().sum(),
    "squares of one class": lambda z: (z[0, :, 3, ...] * 2).square().sum(),
    "squares of some classes": lambda z: (z[:, :, 2:5, ...] * 2).square().sum(),
    "another function": lambda z: _Square.apply(z).sum(),
}


def _leave_out(z: Tensor) -> Tensor:
    z[..., 4:6] = -1e9
    return mean(z, TARGET.where(TARGET != 5, 1))


class _Square(torch.autograd.Function):
    """A Function that calls PyTorch without going through __torch_function__."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return 2 * z * gradient


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("use", [*FUSED, *LOOKED_AT])
def test_every_use_equals_that_of_logits(use: str, bias: bool, fused: list[tuple[int, ...]]) -> None:
    plain, deferring, hidden = heads(bias)
    function = {**FUSED, **LOOKED_AT}[use]
    expected = function(plain(hidden) * 1)
    wanted = torch.autograd.grad(expected, (hidden, *plain.parameters()))
    logits = deferring(hidden)
    loss = function(logits)
    found = torch.autograd.grad(loss, (hidden, *deferring.parameters()))
    assert len(fused) == (use in FUSED)
    assert type(loss) is Tensor
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(found, wanted, rtol=1e-05, atol=1e-06)
    if use in FUSED:
        assert is_open(logits)
        assert torch.equal(logits.detach(), plain(hidden))
        assert not is_open(logits)


def test_sum_with_trained_numbers(fused: list[tuple[int, ...]]) -> None:
    """A constant that is added to the logits gets its gradient; if it changes, reading the logits raises."""
    plain, deferring, hidden = heads()
    numbers = NUMBERS.clone().requires_grad_()
    ours, theirs = ((mean(head(hidden) + numbers), numbers, hidden, *head.parameters()) for head in (deferring, plain))
    assert len(fused) == 1
    torch.testing.assert_close(*[torch.autograd.grad(loss, of) for loss, *of in (ours, theirs)])
    logits = deferring(hidden) + numbers
    torch.testing.assert_close((deferring(hidden) + numbers).detach(), plain(hidden) + numbers)
    numbers.data.mul_(2)
    with pytest.raises(RuntimeError, match="never computed"):
        logits.sum()


def test_other_tensors_that_take_logits_as_an_argument() -> None:
    """A method of another tensor does something to that tensor, not to the logits."""
    plain, deferring, hidden = heads()
    other = torch.arange(3, device=device)
    for z in (plain(hidden), deferring(hidden)):
        assert torch.equal(other.to(z), other.float())


def test_constant_of_another_dtype_after_a_conversion() -> None:
    plain, deferring, hidden = heads()
    results = []
    for head in (plain, deferring):
        head.to(torch.bfloat16)
        results.append(mean(head(hidden.to(torch.bfloat16)).float() + NUMBERS))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)


def test_sum_of_two_heads(fused: list[tuple[int, ...]]) -> None:
    """LoRA on the head adds a second product, and the loss uses both in one call."""
    plain, deferring, hidden = heads()
    small, small_twin, _ = heads(bias=False)
    parts = []
    for head, other in ((plain, small), (deferring, small_twin)):
        loss = mean(head(hidden) + other(hidden.flip(-1)) * 0.5)
        parts.append((loss, *torch.autograd.grad(loss, (hidden, *head.parameters(), other.weight))))
    assert fused == [(10, 16)]
    torch.testing.assert_close(*parts, rtol=1e-05, atol=1e-06)


def test_sum_with_bias_in_both(fused: list[tuple[int, ...]]) -> None:
    plain, deferring, hidden = heads()
    torch.testing.assert_close(mean(deferring(hidden) + deferring(hidden)), mean(plain(hidden) * 2))
    assert fused == [(10, 16)]


def test_properties_known_without_computing() -> None:
    plain, deferring, hidden = heads()
    logits, real = deferring(hidden), plain(hidden)
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda"):
        assert getattr(logits, name) == getattr(real, name)
    assert (logits.size(), logits.size(-1), logits.dim(), logits.numel(), len(logits)) == ((2, 5, 16), 16, 3, 160, 2)
    assert isinstance(logits, Tensor)
    assert torch.is_tensor(logits)
    assert logits in {logits}
    assert is_open(logits)


@pytest.mark.parametrize(
    "look",
    [
        lambda z: z.detach().cpu().numpy().tolist(),
        lambda z: z.tolist(),
        lambda z: z.stride(),
        lambda z: str(z),
        lambda z: copy.deepcopy(z.detach()).tolist(),
        lambda z: _saved(z).tolist(),
        lambda z: [row.sum().item() for row in z],
        lambda z: torch.topk(z, 3).indices.tolist(),
        lambda z: (z > 0).tolist(),
        lambda z: torch.compile(lambda x: x.exp().sum(), backend="eager")(z).item(),
        # Tensors, which may still be deferred.
        lambda z: z.flatten(),
        lambda z: z.flatten(0, 1),
        lambda z: z.view(5, -1),
        lambda z: z.view(-1, 16)[:3],
        lambda z: z[..., ::2],
        lambda z: z[..., :4, :99],
        lambda z: z[0],
        lambda z: z[:, -1:, :7],
        lambda z: z.to("meta"),
        # Errors.
        lambda z: z[0, 0, 0, 0],
        lambda z: z[:, :-1].view(-1, 16),
        lambda z: z.view(3, -1),
    ],
)
def test_reading_the_logits(look: Callable[[Tensor], Any]) -> None:
    plain, deferring, hidden = heads()
    with torch.no_grad():
        assert outcome(look, deferring(hidden)) == outcome(look, plain(hidden).clone())


def outcome(look: Callable[[Tensor], Any], logits: Tensor) -> Any:
    """Return a result or an error; of a tensor its device, and its shape before and after it is computed."""
    try:
        result = look(logits)
    except (IndexError, RuntimeError) as error:
        return type(error), str(error)
    return (result.shape, result.device, (result + 0).shape) if isinstance(result, Tensor) else result


def _saved(logits: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    return torch.load(file)


def test_gradient_of_logits_that_were_read_before_the_step() -> None:
    plain, deferring, hidden = heads()
    logits, real = deferring(hidden), plain(hidden)
    seen = []
    for z in (logits, real):
        z.retain_grad()
        z.register_hook(seen.append)
        mean(z).backward()
    torch.testing.assert_close(logits.grad, real.grad)
    torch.testing.assert_close(*seen)
    hooked = deferring(hidden)
    hooked.register_hook(seen.append)
    mean(hooked).backward()
    torch.testing.assert_close(seen[1:2], seen[2:])


def test_views_and_copies_before_writes_to_the_logits() -> None:
    plain, deferring, hidden = heads()
    with torch.no_grad():
        for head in (plain, deferring):
            logits = head(hidden) if head is deferring else head(hidden).clone()
            view, copied = logits.view(10, 16)[2:], logits * 2
            logits.zero_()
            assert F.cross_entropy(view, TARGET.flatten()[2:]).item() == pytest.approx(math.log(16))
            assert view.abs().max() == 0
            assert copied.abs().max() > 0


@pytest.mark.parametrize("changed", ["weight", "hidden states"])
@pytest.mark.parametrize(
    "use",
    [
        mean,
        lambda z: z.sum(),
        lambda z: _Square.apply(z),
        lambda z: z.float().clone().sum(),
        lambda z: mean(z * 2),
        lambda z: mean(z + z * 0.5),
        lambda z: mean(z[:, :-1], TARGET[:, 1:]),
        lambda z: z[TARGET > 0].sum(),
    ],
)
def test_logits_used_after_the_weights_changed(use: Callable[[Tensor], Any], changed: str) -> None:
    """Reading stale logits raises, as does reading results derived from them: they would have the new weights."""
    _, deferring, hidden = heads()
    logits = deferring(hidden)
    with torch.no_grad():
        (deferring.weight if changed == "weight" else hidden).mul_(2)
    with pytest.raises(RuntimeError, match="never computed, and cannot be"):
        use(logits)


def test_without_gradients() -> None:
    _, deferring, hidden = heads()
    with torch.no_grad():
        detached = deferring(hidden)
        from_tracked = deferring(hidden).float() * 2
    assert not detached.requires_grad
    assert not mean(detached).requires_grad
    assert not mean(from_tracked).requires_grad
    with torch.enable_grad():
        tracked = deferring(hidden)
    with torch.no_grad():
        assert not mean(tracked).requires_grad
        assert not mean(tracked * 2).requires_grad
        tracked.sum()
    assert mean(tracked).requires_grad  # read under no_grad, and still differentiable
    torch.autograd.grad(mean(tracked), hidden)


class _Sink(torch.autograd.Function):
    """Copies outputs, like the Function of DistributedDataParallel."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_logits_passed_on_by_another_function() -> None:
    plain, deferring, hidden = heads()
    handed = _Sink.apply(deferring(hidden))
    assert isinstance(handed, DeferredLogits)
    wanted = torch.autograd.grad(mean(plain(hidden)), (hidden, plain.weight))
    found = torch.autograd.grad(mean(handed), (hidden, deferring.weight))
    torch.testing.assert_close(found, wanted)


def test_gradient_that_needs_a_gathered_weight() -> None:
    """DeepSpeed's ZeRO-3 gathers a weight with this attribute only during the head's call."""
    _, deferring, hidden = heads()
    deferring.weight.ds_id = 0  # type: ignore[attr-defined]
    squares = _Square.apply(deferring(hidden))
    with pytest.raises(RuntimeError, match="a patched model reached an operation that xent cannot follow"):
        squares.sum().backward()


class _Tagged(Tensor):
    """A subclass of Tensor with its own meaning."""


@pytest.mark.parametrize(
    "spoil",
    [
        lambda head: head.register_forward_hook(lambda module, args, output: None),
        lambda head: setattr(head, "bias", nn.Parameter(head.bias.half())),
        lambda head: setattr(head, "weight", nn.Parameter(head.weight.as_subclass(_Tagged))),
        lambda head: head.half(),
        lambda head: head.to("meta"),
    ],
    ids=["hook", "dtype of the bias", "another class of tensor", "dtype", "device"],
)
def test_heads_that_cannot_defer(spoil: Callable[[nn.Linear], Any]) -> None:
    """If logits cannot be deferred, the head computes them like torch.nn.Linear."""
    plain, deferring, hidden = heads()
    results = []
    for head in (plain, deferring):
        spoil(head)
        try:
            results.append(type(head(hidden)))
        except RuntimeError as error:
            results.append(str(error))
    assert results[0] == results[1]


def test_inputs_for_which_heads_do_not_defer() -> None:
    plain, deferring, hidden = heads()
    assert type(deferring(hidden.as_subclass(_Tagged))) is type(plain(hidden.as_subclass(_Tagged)))
    with torch.no_grad():
        assert is_open(deferring(hidden))
        assert type(deferring(hidden[:, -1:])) is Tensor  # generation, one token at a time
        assert type(deferring(hidden[0, 0])) is Tensor


def test_transforms_and_traces_do_not_defer() -> None:
    plain, deferring, hidden = heads()
    expected = plain(hidden)
    assert type(torch.func.vmap(deferring)(hidden)) is Tensor
    for compute in (
        torch.jit.trace(deferring, hidden.detach()),
        torch.export.export(deferring, (hidden.detach(),)).module(),
    ):
        torch.testing.assert_close(compute(hidden), expected)


@pytest.mark.filterwarnings("ignore:another backend computes this call")  # which has no float64
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_dtype_of_the_loss(dtype: torch.dtype, autocast: bool, fused: list[tuple[int, ...]]) -> None:
    plain, deferring, hidden = heads()
    dtypes = []
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        for head in (plain, deferring):
            logits = head.to(dtype)(hidden.to(dtype))
            dtypes.append((logits.dtype, mean(logits).dtype, mean(logits, reduction="none").dtype))
    assert dtypes[0] == dtypes[1]
    assert len(fused) == (0 if autocast and dtype == torch.float64 else 2)


def test_target_out_of_range() -> None:
    _, deferring, hidden = heads()
    if device == "cpu":
        with pytest.raises(IndexError, match="classes are 0 to 15"):
            mean(deferring(hidden), TARGET + 1)


def gradients_of(loss: Tensor, head: nn.Module, hidden: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*head.parameters(), hidden]))


@pytest.mark.parametrize("grad", [True, False])
def test_values_read_in_inference_mode_are_used_outside_of_it(grad: bool) -> None:
    """A metric that is computed in inference mode does not cut the logits off from their graph."""
    plain, deferring, hidden = heads()
    gradients = []
    for head in (plain, deferring):
        with torch.set_grad_enabled(grad):
            logits = head(hidden)
        with torch.inference_mode():
            assert logits.argmax(-1).is_inference()
        loss = mean(logits * 1) + mean(head(hidden)) + (logits.logsumexp(-1) * hidden.sum(-1)).mean()
        gradients.append(gradients_of(loss, head, hidden))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [lambda z: z, lambda z: z[0], lambda z: z.float() * 2, lambda z: z.double()])
def test_values_read_in_a_checkpoint(inside: Callable[[Tensor], Tensor], reentrant: bool) -> None:
    plain, deferring, hidden = heads()
    gradients = []
    for head in (plain, deferring):
        logits = head(hidden)
        loss = checkpoint(lambda z: inside(z).log_softmax(-1).exp().square().sum(), logits, use_reentrant=reentrant)
        hidden.grad = None
        loss.backward()
        gradients.append([hidden.grad, head.weight.grad, head.bias.grad])
    torch.testing.assert_close(*gradients)


def test_second_derivatives_of_values() -> None:
    plain, deferring, hidden = heads()
    gradients = []
    for head in (plain, deferring):
        parameters = [*head.parameters(), hidden]
        first = torch.autograd.grad(_Square.apply(head(hidden)).sum(), parameters, create_graph=True)
        gradients.append(torch.autograd.grad(sum(each.square().sum() for each in first), parameters))
    torch.testing.assert_close(*gradients)


def test_a_parametrized_weight_is_computed_once_per_call() -> None:
    calls = []

    class Counting(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            calls.append(1)
            return weight * 2

    plain, deferring, hidden = heads()
    for head in (plain, deferring):
        parametrize.register_parametrization(head, "weight", Counting())
    calls.clear()
    losses = [mean(head(hidden)) for head in (plain, deferring)]
    assert len(calls) == 2
    torch.testing.assert_close(*losses)
    for head in (plain, deferring):
        torch.manual_seed(1)
        parametrizations.spectral_norm(head.train())
    torch.testing.assert_close(*[[mean(head(hidden)) for _ in range(3)] for head in (plain, deferring)])


def test_a_mask_that_changes_before_the_logits_are_read() -> None:
    plain, deferring, hidden = heads()
    mask = torch.tensor([[True, False, True, False, True]] * 2, device=device)
    chosen, expected = deferring(hidden)[mask], plain(hidden)[mask]
    mask[:] = False
    torch.testing.assert_close(chosen + 0, expected)


READ: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda z: z.argmax(-1),
    "argmax of a kept axis": lambda z: torch.argmax(z, dim=2, keepdim=True),
    "argmax of shifted logits": lambda z: z[..., :-1, :].contiguous().argmax(dim=-1),
    "argmax of the first classes": lambda z: z[..., :12].argmax(-1),
    "argmax of chosen rows": lambda z: z[TARGET >= 0].argmax(-1),
    "argmax of one row": lambda z: z[1, 2].argmax(0),
    "argmax of no rows": lambda z: z[:0].argmax(-1),
    "max": lambda z: z.max(-1),
    "max of a kept axis": lambda z: torch.max(z * -3, dim=-1, keepdim=True),
    "logsumexp": lambda z: z.logsumexp(-1),
    "logsumexp after a softcap": lambda z: torch.logsumexp(torch.tanh(z / 2) * 2, dim=-1),
    "logsumexp with numbers and in another dtype": lambda z: (z + NUMBERS).double().logsumexp(-1),
    "logsumexp of a sum": lambda z: (z + z).logsumexp(-1),
    "topk": lambda z: z.topk(3),
    "topk of the smallest on a kept axis": lambda z: torch.topk(z, k=2, dim=2, largest=False),
    "entropy": entropy_from_logits,
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("use", READ)
def test_reading_without_storing(use: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are computed from chunks of three rows, and their gradients from the same chunks."""
    monkeypatch.setattr(calls, "rows_per_chunk", lambda *args: 8)
    plain, deferring, hidden = heads()
    logits = deferring(hidden)
    with torch.set_grad_enabled(grad):
        ours, theirs = tree_leaves(READ[use](logits)), tree_leaves(READ[use](plain(hidden)))
    assert is_open(logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    if grad and "argmax" not in use:
        torch.testing.assert_close(
            *[
                gradients_of(read[0].square().sum(), deferring if read is ours else plain, hidden)
                for read in (ours, theirs)
            ]
        )


def test_rows_that_are_read_in_chunks_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL splits the rows and takes the log-probabilities of a part without gradients."""
    monkeypatch.setattr(calls, "rows_per_chunk", lambda *args: 8)
    plain, deferring, hidden = heads()
    logits = deferring(hidden)
    with torch.no_grad():
        for read in (
            lambda z: [F.log_softmax(part, dim=-1) for part in z.reshape(-1, 16).split(4, dim=0)],
            lambda z: [part.softmax(-1, dtype=torch.float64) for part in torch.split(z, 1)],
            lambda z: z[0, :3].log_softmax(1),
        ):
            assert is_open(logits)
            torch.testing.assert_close(read(logits), read(plain(hidden)))
        assert is_open(logits)
        torch.testing.assert_close(logits.softmax(-1), plain(hidden).softmax(-1))
    assert not is_open(logits)  # all probabilities take as much memory as all logits


def test_reading_after_the_weights_changed() -> None:
    _, deferring, hidden = heads()
    logits = deferring(hidden)
    squares = logits.logsumexp(-1).square().sum()
    with torch.no_grad():
        deferring.weight.mul_(2)
    for late in (lambda: logits.argmax(-1), squares.backward):
        with pytest.raises(RuntimeError, match="never computed, and cannot be"):
            late()


MOVES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "to": lambda z, there: z.to(there),
    "to another dtype": lambda z, there: z.to(there, torch.float64),
    "send_to_device": lambda z, there: send_to_device({"logits": z}, there, non_blocking=True)["logits"],
    "cuda": lambda z, there: z.cuda() if there == "cuda" else z.to(device=there),
}


@pytest.mark.parametrize("move", MOVES)
def test_moved_to_another_device(move: str, fused: list[tuple[int, ...]]) -> None:
    """Accelerate moves the outputs of a model to the device of its inputs; nothing is computed for that.

    On a machine without GPU the other device is "meta", whose tensors have no values.
    """
    plain, deferring, hidden = heads()
    there = "meta" if device == "cpu" else "cpu"
    logits, real = deferring(hidden), plain(hidden)
    loss = mean(logits)
    moved = MOVES[move](logits, there)
    assert is_open(logits)
    assert is_open(moved)
    assert (moved.device.type, moved.dtype) == (there, MOVES[move](real, there).dtype)
    torch.testing.assert_close(loss, mean(real))
    assert moved.argmax(-1).device.type == there
    assert moved[:, :-1].float().logsumexp(-1).device.type == there
    assert is_open(logits)
    if there == "cpu":
        target, elsewhere = TARGET.cpu(), MOVES[move](real, there)
        weight = NUMBERS.exp().to(there, elsewhere.dtype)
        losses = [mean(each, target, weight=weight) for each in (moved, elsewhere)]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(moved[target >= 0].argmax(-1), elsewhere[target >= 0].argmax(-1))
        torch.testing.assert_close(gradients_of(losses[0], deferring, hidden), gradients_of(losses[1], plain, hidden))
        assert len(fused) == 2
        assert is_open(logits)
        torch.testing.assert_close(moved + 0, elsewhere)
