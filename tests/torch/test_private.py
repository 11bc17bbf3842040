"""PyTorch's private functions: what each must detect, and correct results in a release without any of them."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from xent.backends.torch import private


class NoticesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class NoticesOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


class Module(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


RUNS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "torch.compile": lambda f, x: torch.compile(f, backend="eager", fullgraph=True)(x),
    "AOT Autograd": lambda f, x: torch.compile(f, backend="aot_eager")(x),
    "torch.export": lambda f, x: torch.export.export(Module(f), (x,), strict=False),
    "make_fx": lambda f, x: make_fx(f)(x),
    "make_fx, fake": lambda f, x: make_fx(f, tracing_mode="fake")(x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "torch.jit.trace": lambda f, x: torch.jit.trace(f, x, check_trace=False),
    "vmap": lambda f, x: torch.vmap(f)(x),
    "func.grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "func.vjp": lambda f, x: torch.func.vjp(f, x),
    "func.jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
}
CONTEXTS: dict[str, Callable[[], Any]] = {
    "forward_ad": forward_ad.dual_level,
    "function mode": NoticesFunctions,
    "dispatch mode": NoticesOperations,
    "FLOP counter": lambda: FlopCounterMode(display=False),
    "fake tensors": FakeTensorMode,
    "device": lambda: torch.device("cpu"),
    "default device": default_device,
}


def test_a_plain_call_is_not_watched() -> None:
    assert not private.is_watched()
    with torch.no_grad(), torch.autocast("cpu"):
        assert not private.is_watched()
    with torch.inference_mode(), torch.autograd.graph.save_on_cpu():
        assert not private.is_watched()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch 2.9 deprecates torch.jit.trace
@pytest.mark.parametrize("how", RUNS)
def test_tracers_are_detected(how: str) -> None:
    torch._dynamo.reset()
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(private.is_watched())
        return x * (2 if private.is_watched() else 3)

    made = RUNS[how](function, torch.ones(2, 3))
    if how in ("torch.compile", "AOT Autograd"):
        assert torch.equal(made, torch.full((2, 3), 2.0))  # the branch that the graph has
    else:
        assert seen
        assert all(seen)


@pytest.mark.parametrize("context", CONTEXTS)
def test_modes_are_detected(context: str) -> None:
    with CONTEXTS[context]():
        assert private.is_watched()
    assert not private.is_watched()


WITHOUT = """
import torch
from torch.autograd import forward_ad
names = ["_are_functorch_transforms_active", "_len_torch_function_stack", "_len_torch_dispatch_stack", "_is_tracing"]
hidden = [(torch._C, name) for name in names]
names = ["is_functorch_wrapped_tensor", "get_unwrapped", "maybe_get_level", "get_interpreter_stack"]
hidden += [(torch._C._functorch, name) for name in (*names, "is_legacy_batchedtensor", "unwrap_if_dead")]
hidden += [(torch._C._autograd, "_get_current_graph_task_keep_graph"), (forward_ad, "_current_level")]
held = [(module, name, getattr(module, name)) for module, name in hidden]
for module, name in hidden:
    delattr(module, name)
import xent
from xent.backends.torch import private
level = forward_ad.__dict__.get("_current_level")
assert level is None and private.is_watched() and private.keeps_graph()
for module, name, value in held:  # PyTorch itself needs them
    setattr(module, name, value)
x, y = torch.randn(4, 9, requires_grad=True), torch.arange(4)
for reduction in ("mean", "none"):
    def loss(x):
        return xent.cross_entropy(x, y, reduction=reduction).sum()
    def plain(x):
        return torch.nn.functional.cross_entropy(x, y, reduction=reduction).sum()
    expected = torch.autograd.grad(plain(x), x)[0]
    torch.testing.assert_close(torch.autograd.grad(loss(x), x)[0], expected)
    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), expected)
    batched = torch.autograd.grad(loss(x), x, torch.tensor([1.0, 2.0]), is_grads_batched=True)[0]
    torch.testing.assert_close(batched[1], 2 * expected)
"""


@pytest.mark.parametrize("is_private", [True, False], ids=("private", "public"))
def test_allocations_have_size_stride_and_dtype(is_private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_private:
        monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    made = private.allocator(torch.device("cpu"))((3, 4), (1, 8), torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype, made.device.type) == ((3, 4), (1, 8), torch.bfloat16, "cpu")
    assert made.untyped_storage().nbytes() >= 2 * (2 + 3 * 8 + 1)
    assert not made.requires_grad


def test_results_without_private_functions() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)
