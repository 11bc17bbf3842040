"""Reading logits after the weights have changed raises an error, for every kind of change."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.integrations.models import batch, deferring, device, make, read
from xent.integrations.transformers import patch

REFUSED = "never computed, and cannot be computed now: "


class OldStyle(torch.optim.Optimizer):
    """Writes through `.data`, as many optimizers outside of PyTorch do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        """Make a step so small that bfloat16 weights rarely change."""
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(weight.grad.data, alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    **{
        f"{name} {key}": lambda weights, name=name, key=key: getattr(torch.optim, name)(weights, lr=1e-3, **{key: True})
        for name, keys in {
            "Adadelta": ("foreach",),
            "Adagrad": ("foreach", "fused"),
            "Adam": ("foreach", "fused", "amsgrad"),
            "AdamW": ("foreach", "fused", "amsgrad"),
            "Adamax": ("foreach",),
            "ASGD": ("foreach",),
            "NAdam": ("foreach",),
            "RAdam": ("foreach",),
            "RMSprop": ("foreach",),
            "Rprop": ("foreach",),
            "SGD": ("foreach", "fused", "maximize"),
        }.items()
        for key in keys
    },
    **{
        f"{name} of matrices": lambda weights, name=name: getattr(torch.optim, name)(
            [w for w in weights if w.ndim == 2]
        )
        for name in ("Adafactor", "Muon")
        if hasattr(torch.optim, name)
    },
    "LBFGS": lambda weights: torch.optim.LBFGS(weights, lr=1e-3),
    "transformers' Adafactor": lambda weights: transformers.Adafactor(weights, lr=1e-3, relative_step=False),
    "old style": lambda weights: OldStyle(weights, lr=1e-3),
    "too small a step to see": lambda weights: OldStyle(weights, lr=1e-30),
}


def test_every_optimizer_of_pytorch_is_here() -> None:
    kinds = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
    tested = {name.partition(" ")[0] for name in OPTIMIZERS}
    assert kinds - {"Optimizer", "SparseAdam"} <= tested  # the head's gradient is not sparse


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, frozen: bool) -> None:
    """With a frozen head the logits are the same after the step, and can be read."""
    model = make("llama")
    model.lm_head.weight.requires_grad_(not frozen)
    patch(model)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    plain = read(model(**batch()).logits)
    kept = [model(**batch()) for _ in range(2)]
    kept[0].loss.backward()
    if frozen:
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight) if weight.grad is None and weight.requires_grad else weight.grad
        optimizer = OPTIMIZERS[name]([weight for weight in model.parameters() if weight.requires_grad])
    optimizer.step(lambda: kept[0].loss.detach()) if name == "LBFGS" else optimizer.step()
    if frozen:
        assert torch.equal(read(kept[0].logits), plain)
        return
    for look in (lambda z: z.sum(), lambda z: z.argmax(-1), lambda z: (z[:, :-1] * 2).tolist()):
        with pytest.raises(RuntimeError, match=REFUSED + r"the weights were changed by an optimizer's step"):
            look(kept[0].logits)
    with pytest.raises(RuntimeError, match=REFUSED):
        model.loss_function(kept[1].logits, batch()["labels"], vocab_size=96)


def test_optimizer_of_another_model() -> None:
    """Its steps do not affect these logits."""
    model, other = make("llama"), make("llama")
    patch(model)
    plain = read(model(**batch()).logits)
    outputs = model(**batch())
    other(**batch()).loss.backward()
    torch.optim.AdamW(other.parameters(), fused=True).step()
    assert torch.equal(read(outputs.logits), plain)


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("compiled", ["model", "step"])
def test_compiled(compiled: str, fused_step: bool) -> None:
    torch.compiler.reset()
    model = make("llama", num_hidden_layers=0)
    patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=fused_step)
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled == "model" else model
    step = torch.compile(optimizer.step, backend="aot_eager") if compiled == "step" else optimizer.step
    for _ in range(3):
        kept = call(**batch())
        torch.testing.assert_close(read(call(**batch()).logits), read(model(**batch()).logits))
        kept.loss.backward()
        step()
        with pytest.raises(RuntimeError, match=REFUSED):
            kept.logits.sum()
    torch.compiler.reset()


CHANGES: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "data.add_": (lambda head: head.weight.data.add_(1e-3), r"written to through parameter\.data"),
    "data.copy_": (lambda head: head.weight.data.copy_(head.weight.data * 2), r"written to through parameter\.data"),
    "data of the bias": (lambda head: head.bias.data.mul_(2), r"written to through parameter\.data"),
    "data = ...": (lambda head: setattr(head.weight, "data", head.weight.data + 1), "moved, replaced"),
    "NaN": (lambda head: head.weight.data.fill_(torch.nan), r"written to through parameter\.data"),
    "dtype": (lambda head: head.to(torch.float64), "moved, replaced"),
    "in place": (lambda head: nn.init.zeros_(head.weight), "weights were written to in place"),
    "load_state_dict": (lambda head: head.load_state_dict(nn.Linear(8, 16).state_dict()), "written to in place"),
    "freed": (lambda head: head.weight.untyped_storage().resize_(0), "sharded or offloaded"),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", CHANGES)
def test_writes(kind: str, mode: Any) -> None:
    happen, message = CHANGES[kind]
    head = deferring(nn.Linear(8, 16, device=device))
    with mode():
        logits = head(torch.randn(2, 5, 8, device=device))
    happen(head)
    with pytest.raises(RuntimeError, match=REFUSED + ".*" + message):
        logits.sum()


@pytest.mark.parametrize("how", ["sum", "C++"])
def test_unchanged_weights(how: str) -> None:
    """NaN, gaps in memory, assigning the same data, or a change of another tensor do not count as a change."""
    plain = nn.Linear(8, 16, device=device)
    with torch.no_grad():
        plain.weight = nn.Parameter(torch.randn(8, 16, device=device).T)
        plain.weight[3, 3] = torch.nan
        head = deferring(copy.deepcopy(plain))
    hidden = torch.randn(2, 5, 8, device=device)
    logits = head(hidden)
    head.weight.data = head.weight.data
    torch.zeros(3).add_(1)
    found = logits.detach() if how == "sum" else torch.relu(logits + 0)
    expected = plain(hidden).detach() if how == "sum" else plain(hidden).relu()
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)


def test_backward_of_logits_read_outside_of_python() -> None:
    """The recomputation in the backward pass raises too."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return z + z

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    head = deferring(nn.Linear(8, 16, device=device))
    doubled = Double.apply(head(torch.randn(2, 5, 8, device=device, requires_grad=True)))
    head.weight.data.mul_(2)
    with pytest.raises(RuntimeError, match=r"written to through parameter\.data"):
        doubled.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_to_hidden_states_without_gradients(mode: Any) -> None:
    """In inference mode, where nothing counts writes, the logits are those of the hidden states at the call."""
    model = make("llama").eval()
    with mode():
        plain = model(**batch()).logits
        with patch(model):
            outputs = model(**batch(), output_hidden_states=True)
            outputs.hidden_states[-1][:, 2:] = 0
            if mode is torch.inference_mode:
                assert torch.equal(outputs.logits + 0, plain)
            else:
                with pytest.raises(RuntimeError, match=REFUSED + "the hidden states were written to in place"):
                    outputs.logits.sum()


def test_steps_count_only_for_the_weights_of_patched_heads() -> None:
    model, other = make("llama"), make("llama")
    weights = [*model.parameters(), *other.parameters()]
    patch(model)
    model(**batch())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    before = [weight._version for weight in weights]
    torch.optim.SGD(weights, fused=True).step()
    moved = [weight for weight, version in zip(weights, before, strict=True) if weight._version != version]
    assert len(moved) == 1
    assert moved[0] is model.lm_head.weight
