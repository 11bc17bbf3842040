"""Tensors and transforms that xent does not serve: an error in terms of the caller's tensors, never a wrong number."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import xent
from tests.targets import Target
from xent.integrations.torch import LinearCrossEntropyLoss

NO_FORWARD_MODE = "{} carries a tangent, and xent computes no forward-mode derivatives"


@pytest.fixture
def tensors(target: Target) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = {
        "logits": torch.randn(6, 11, generator=generator),
        "input": torch.randn(6, 8, generator=generator),
        "linear_weight": torch.randn(11, 8, generator=generator),
        "target": torch.randint(11, (6,), generator=generator),
        "sample_weight": torch.rand(6, generator=generator),
    }
    return {name: tensor.to(target.device) for name, tensor in drawn.items()}


def loss_of(tensors: dict[str, Tensor], target: Target, name: str) -> Callable[[Tensor], Any]:
    """Return the loss as a function of one of its tensors."""
    if name in ("input", "linear_weight"):
        function, names = xent.linear_cross_entropy, ("input", "linear_weight", "target")
    else:
        function, names = xent.cross_entropy, ("logits", "target", "sample_weight")
    arguments = {key: tensors[key] for key in names}
    return lambda tensor: function(**(arguments | {name: tensor}), backend=target.name)


@pytest.mark.parametrize("name", ["logits", "sample_weight", "input", "linear_weight"])
def test_forward_mode_raises(target: Target, tensors: dict[str, Tensor], name: str) -> None:
    function, values = loss_of(tensors, target, name), tensors[name]
    with pytest.raises(NotImplementedError, match=NO_FORWARD_MODE.format(name)):
        torch.func.jvp(function, (values,), (values,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(values, values)
        with pytest.raises(NotImplementedError, match=NO_FORWARD_MODE.format(name)):
            function(dual)


def test_forward_mode_over_reverse_mode_raises(target: Target, tensors: dict[str, Tensor]) -> None:
    gradient = torch.func.grad(loss_of(tensors, target, "logits"))
    with pytest.raises(NotImplementedError, match="forward mode AD"):
        torch.func.jvp(gradient, (tensors["logits"],), (tensors["logits"],))


@pytest.mark.parametrize("name", ["logits", "input"])
@pytest.mark.parametrize("compiled", [False, True])
def test_vmap_raises(target: Target, tensors: dict[str, Tensor], name: str, compiled: bool) -> None:
    mapped = torch.vmap(loss_of(tensors, target, name))
    with pytest.raises(NotImplementedError, match=f"{name} is batched by torch.vmap, which xent does not support"):
        (torch.compile(mapped, backend="aot_eager") if compiled else mapped)(tensors[name].expand(3, -1, -1))


@pytest.mark.parametrize("name", ["logits", "input", "linear_weight", "target", "sample_weight"])
def test_sparse_tensors_raise(target: Target, tensors: dict[str, Tensor], name: str) -> None:
    sparse = tensors[name].to_sparse()
    with pytest.raises(TypeError, match=f"{name} must be a dense tensor, got layout torch.sparse_coo"):
        loss_of(tensors, target, name)(sparse)


def test_nested_tensors_raise(target: Target, tensors: dict[str, Tensor]) -> None:
    jagged = torch.nested.nested_tensor([tensors["logits"][:2], tensors["logits"][2:]], layout=torch.jagged)
    classes = torch.nested.nested_tensor_from_jagged(tensors["target"], jagged.offsets())
    with pytest.raises(TypeError, match="logits must be a dense tensor, got a nested one"):
        xent.cross_entropy(jagged, classes, backend=target.name)
    xent.cross_entropy(jagged.values(), classes.values(), backend=target.name)  # what the error recommends


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch was built without torch.distributed")
@pytest.mark.filterwarnings("ignore:DTensor random operators")  # PyTorch 2.6
def test_sharded_tensors_raise() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(torch.randn(11, 8), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(TypeError, match=r"linear_weight must be a plain tensor, got a DTensor: .*full_tensor\(\)"):
            xent.linear_cross_entropy(torch.randn(6, 8), weight, torch.zeros(6, dtype=torch.int64))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("option", "value"), [("shift", -1), ("workspace", 1e9), ("z_loss", -1.0)])
def test_modules_refuse_wrong_options_when_they_are_made(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} must be"):
        LinearCrossEntropyLoss(8, 11, **{option: value})
