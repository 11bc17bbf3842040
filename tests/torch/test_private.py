"""Correct results in a release of PyTorch without its private functions."""

import subprocess
import sys

WITHOUT = """
import importlib
import torch
from torch.autograd import forward_ad
names = ["_are_functorch_transforms_active", "_len_torch_function_stack", "_len_torch_dispatch_stack", "_is_tracing"]
names += ["_is_any_autocast_enabled", "_AutoDispatchBelowAutograd"]
hidden = [(torch._C, name) for name in names]
names = ["is_functorch_wrapped_tensor", "get_unwrapped", "maybe_get_level", "get_interpreter_stack"]
hidden += [(torch._C._functorch, name) for name in (*names, "is_legacy_batchedtensor", "unwrap_if_dead")]
hidden += [(torch._C._autograd, "_get_current_graph_task_keep_graph"), (forward_ad, "_current_level")]
hidden = [(module, name) for module, name in hidden if hasattr(module, name)]
held = [(module, name, getattr(module, name)) for module, name in hidden]
for module, name in hidden:
    delattr(module, name)
import xent
importlib.import_module("xent.backends.torch.private")
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
    kept = loss(x)
    batched = torch.func.vmap(lambda one: torch.autograd.grad(kept, x, one, retain_graph=True)[0])(torch.arange(2.0))
    torch.testing.assert_close(batched[1], expected)
    first = torch.autograd.grad(kept, x, retain_graph=True)[0].clone()
    torch.testing.assert_close(torch.autograd.grad(3 * kept, x)[0], 3 * first)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], expected)
"""


def test_results_without_private_functions() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)
