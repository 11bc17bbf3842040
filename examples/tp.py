"""Train on several processes with tensor parallelism: each process has the same tokens and a part of each weight.

    torchrun --nproc-per-node 2 examples/tp.py

The classifier is sharded by its rows, the classes. The loss is computed from the shards: the processes exchange a few
numbers per token, but no logits. For a model of transformers `patch` does this. In your own model, call
`xent.linear_cross_entropy(hidden, head.weight, labels, shift=1)`; the weight is a DTensor, which tells its placements.
"""

import argparse
import os

import torch
import torch.distributed as dist
from common import batches, make_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from xent.integrations.transformers import patch

PLAN = {
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    # Logits are a DTensor with its classes in shards.
    "lm_head": ColwiseParallel(use_local_output=False),
}


def main() -> None:
    """Train, and print the loss at each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", help="file for the trained weights")
    options = parser.parse_args()

    dist.init_process_group()
    rank, processes = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (processes,), mesh_dim_names=("tp",))

    model = make_model().to(device)
    parallelize_module(model, mesh, PLAN)
    patch(model)
    # foreach=False: some weights are sharded, some are not.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    for step, (tokens, labels) in enumerate(batches(options.steps)):
        tokens, labels = tokens.to(device), labels.to(device)
        count = (labels[:, 1:] != -100).sum()

        loss = model(tokens, labels=labels, num_items_in_batch=count).loss
        if rank == 0:
            print(f"step {step}: {loss:.6f}", flush=True)

        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if options.save and rank == 0:
        torch.save(weights, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
