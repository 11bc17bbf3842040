"""A script for several processes: tensor-parallel models train as in one process, without storing logits.

Every process has the same batch, and compares with the whole model in the same process.
"""

import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers.distributed import DistributedConfig
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from tests.distributed.fsdp import averages, whole
from tests.integrations.models import batch, device, make
from xent.backends.torch.shards import ranges
from xent.integrations.transformers import explain, patch, unpatch
from xent.integrations.transformers.deferred import DeferredLogits, is_open, real

__all__ = ["LAYOUTS", "MESHES"]

CONFIGURED = hasattr(DistributedConfig, "tp_size")
"""Whether a configuration holds the plan; in transformers 5.0 it is an argument of from_pretrained."""
_LAYERS = {
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


def by_torch(head: Any, **more: Any) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    """Return a function that parallelises a model with PyTorch's styles."""
    return lambda model, mesh: parallelize_module(model, mesh, {**_LAYERS, "lm_head": head, **more})


def by_torch_head_alone(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Parallelise the head of a model."""
    return parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


def by_torch_with_tokens_in_shards(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Parallelise a model so that each rank normalises its own tokens."""
    cut = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
    parallelize_module(model, mesh, {"model.norm": cut})
    head = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    return by_torch(head, **{"model.norm": SequenceParallel(use_local_output=True)})(model, mesh)


def by_plan(plan: Any = "auto") -> Callable[[Any, DeviceMesh], Any]:
    """Return a function that saves a model, and loads it with one of transformers' plans."""

    def parallelise(model: Any, mesh: DeviceMesh) -> Any:
        if CONFIGURED:
            return load(model, distributed_config=DistributedConfig(tp_size=mesh.size(), tp_plan=plan))
        return load(model, tp_plan=plan)

    return parallelise


def load(model: Any, **options: Any) -> Any:
    """Save a model in one process, and load it in all of them."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    return transformers.AutoModelForCausalLM.from_pretrained(folder[0], **options)


def by_plan_of_patched(model: Any, mesh: DeviceMesh) -> Any:
    """Load a model with a plan after `patch()`, which patches the model before the plan is applied."""
    with patch():
        return by_plan()(model, mesh)


def by_weight(model: Any, mesh: DeviceMesh) -> Any:
    """Replace only the head's weight by a DTensor; without xent such a head fails when it is called."""
    model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]))
    return model


LAYOUTS: dict[str, tuple[str, Callable[[Any, DeviceMesh], Any], str]] = {
    "torch, logits in shards": ("llama", by_torch(ColwiseParallel(use_local_output=False)), ""),
    "torch, logits gathered": ("llama", by_torch(ColwiseParallel(output_layouts=Replicate())), ""),
    "torch, with a bias": ("phi", by_torch_head_alone, ""),
    "torch, soft cap": ("gemma2", by_torch(ColwiseParallel(use_local_output=False)), ""),
    "torch, tokens in shards": ("llama", by_torch_with_tokens_in_shards, ""),
    "torch, a weight alone": ("llama", by_weight, ""),
    "torch, head on its columns": (
        "llama",
        by_torch(RowwiseParallel(input_layouts=Replicate())),
        "the head's weight has placements (Shard(dim=1),)",
    ),
    "plan auto": ("llama", by_plan(), ""),
    "plan auto, tied": ("llama-tied", by_plan(), ""),
    "plan auto, soft cap": ("gemma2", by_plan(), ""),
    "plan replicate": (
        "llama",
        by_plan({"lm_head": "replicate"}),
        "" if CONFIGURED else "the head's weight has placements (Replicate(),)",
    ),
    "plan rowwise": (
        "llama",
        by_plan({"lm_head": "rowwise_split_input"}),
        "the head's weight has placements (Shard(dim=1),)",
    ),
    "plan auto, patched before": (
        "llama",
        by_plan_of_patched,
        "transformers made the head tensor-parallel after patch(model)",
    ),
}
"""Name -> (model, how it is parallelised, why its training is not fused, or "")."""
for way, its in (("plan replicate", "replicate"), ("plan rowwise", "rowwise_split_input")):
    if its not in ALL_PARALLEL_STYLES:  # transformers 5.17 lacks the first, 5.0 the second
        del LAYOUTS[way]
if not CONFIGURED:  # the plan does not reach a patched head
    del LAYOUTS["plan auto, patched before"]


def make_for(name: str, parallelise: Any) -> Any:
    """Return a model. If PyTorch's styles parallelise it, its head is untied, as they would separate it anyway."""
    model = make(name)
    if parallelise.__module__ == __name__ and "plan" not in parallelise.__qualname__:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def step(model: Any, inputs: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Return the outputs, and the gradient of every parameter, whole."""
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    return outputs, {name: whole(value.grad) for name, value in model.named_parameters()}


def compare(name: str, parallelise: Callable[[Any, DeviceMesh], Any], why: str, mesh: DeviceMesh) -> None:
    """Compare a parallelised and patched model with the same one in one piece."""
    inputs, single = batch(), make_for(name, parallelise)
    model = parallelise(make_for(name, parallelise), mesh).train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = None if parallelise is by_weight else model(inputs["input_ids"]).logits
        expected, wanted = step(single, inputs)
        if parallelise is not by_plan_of_patched:
            patch(model)
        with mock.patch.object(ranges, "_exchange", wraps=ranges._exchange) as exchange:
            outputs, found = step(model, inputs)
        again, _ = step(model, inputs)
    assert exchange.called == (parallelise is by_weight)  # a plan gives all ranks the same tokens
    if plain is not None:
        torch.testing.assert_close(whole(plain), expected.logits)
    torch.testing.assert_close(outputs.loss, expected.loss)
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-6)
    assert torch.equal(again.loss, outputs.loss)
    said = [str(one.message) for one in caught if "xent" in str(one.message)]
    assert is_open(outputs.logits) == (not why)
    if why:
        assert len(said) == 1, said
        assert f"takes the memory of its logits, as without xent: {why}" in said[0], said
        assert f"Training: not fused: {why}" in explain(model), explain(model)
        if parallelise is by_plan_of_patched:
            patch(model)
            assert is_open(model(**inputs).logits)
    else:
        assert not said, said
        assert "Training: fused." in explain(model)
        if plain is not None:
            check_logits(model, inputs, plain, expected.logits)
    with torch.no_grad():
        judged = model(**inputs)
        torch.testing.assert_close(judged.loss, expected.loss)
        torch.testing.assert_close(whole(real_logits(judged.logits)), expected.logits)
    unpatch(model)
    if plain is not None:
        assert type(model(inputs["input_ids"]).logits) is type(plain)
    assert model.get_output_embeddings().__class__ is nn.Linear


def real_logits(logits: Any) -> Any:
    """Return logits after reading them."""
    return real(logits, None) if isinstance(logits, DeferredLogits) else logits


def check_logits(model: Any, inputs: dict[str, Tensor], plain: Any, expected: Tensor) -> None:
    """Compare logits that are read, and the gradients through them."""
    weight, upstream = model.get_output_embeddings().weight, torch.rand_like(expected)
    made = []
    for logits in (plain, model(inputs["input_ids"]).logits):
        if isinstance(plain, DTensor):
            assert (logits.placements, logits.device_mesh) == (plain.placements, plain.device_mesh)
            logits = logits.full_tensor()
        made.append((logits.detach() + 0, *torch.autograd.grad((logits * upstream).sum(), weight)))
    for one, other in zip(*made, strict=True):
        assert torch.equal(whole(one), whole(other))


def compare_compiled(mesh: DeviceMesh) -> None:
    """Compare a compiled step, which computes its logits and warns."""
    inputs = batch()
    expected, wanted = step(make("llama", num_hidden_layers=0), inputs)
    model = by_torch_head_alone(make("llama", num_hidden_layers=0), mesh).train()
    patch(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = torch.compile(model, backend="aot_eager")(**inputs)
    outputs.loss.backward()
    torch.testing.assert_close(outputs.loss, expected.loss)
    for name, value in model.named_parameters():
        torch.testing.assert_close(whole(value.grad), wanted[name], rtol=1e-4, atol=1e-6)
    assert [one for one in caught if "torch.compile defers no logits with classes in shards" in str(one.message)]


def by_plan_and_fsdp2(mesh: DeviceMesh) -> Any:
    """Load a model with the plans that transformers has for a mesh of two dimensions."""
    config = DistributedConfig(tp_size=mesh["tp"].size(), fsdp_size=mesh["dp"].size())
    return load(make("llama"), distributed_config=config)


def by_torch_and_fsdp2(head_alone: bool) -> Callable[[DeviceMesh], Any]:
    """Return a function that parallelises a model with PyTorch's styles, and shards it with FSDP2."""

    def parallelise(mesh: DeviceMesh) -> Any:
        model = by_torch(ColwiseParallel(use_local_output=False))(make("llama"), mesh["tp"])
        if head_alone:
            fully_shard(model.lm_head, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    return parallelise


MESHES: dict[str, Callable[[DeviceMesh], Any]] = {
    "plan auto with fsdp2": by_plan_and_fsdp2,
    "torch with fsdp2": by_torch_and_fsdp2(False),
    "torch with fsdp2, head alone": by_torch_and_fsdp2(True),
}
"""Name -> how a two-dimensional mesh is used."""
if not hasattr(DistributedConfig, "dp_replicate_size"):  # transformers 5.17 loads half of the processes' weights
    del MESHES["plan auto with fsdp2"]


def compare_on_mesh(parallelise: Callable[[DeviceMesh], Any], mesh: DeviceMesh) -> None:
    """Compare training with rows on one dimension of a mesh and classes on the other with the model in one piece."""
    inputs, rank, ranks = batch(), mesh.get_local_rank("dp"), mesh["dp"].size()
    expected, wanted = step(make("llama"), inputs)
    count = (inputs["labels"][:, 1:] != -100).sum()
    model = parallelise(mesh).train()
    patch(model)
    mine = {name: value[rank::ranks] for name, value in inputs.items()}
    outputs = model(**mine, num_items_in_batch=count)
    assert is_open(outputs.logits)
    (outputs.loss * (ranks if averages(mesh["dp"]) else 1)).backward()
    total = outputs.loss.detach().clone()
    dist.all_reduce(total, group=mesh.get_group("dp"))
    torch.testing.assert_close(total, expected.loss)
    found = {name: whole(value.grad) for name, value in model.named_parameters()}
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def main() -> None:
    """Compare all ways, and print their names."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    if dist.get_world_size() == 4:
        square = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
        for way, parallelise_mesh in MESHES.items():
            compare_on_mesh(parallelise_mesh, square)
            print(f"compared: {way}\n", end="", flush=True)  # one write: ranks may share a pipe
        return
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("tp",))
    for way, (name, parallelise, why) in LAYOUTS.items():
        compare(name, parallelise, why, mesh)
        print(f"compared: {way}\n", end="", flush=True)  # one write: ranks may share a pipe
    compare_compiled(mesh)


if __name__ == "__main__":
    main()
