"""Train on a mesh of processes: tensor parallelism on one dimension, FSDP2 on the other.

    torchrun --nproc-per-node 4 examples/tp_fsdp2.py

The processes in a row of the mesh have the same tokens and each a shard of every weight, as in `tp.py`. FSDP2 shards
these shards again over the columns, and gathers its part when the model is called. The loss then gets a classifier that
is sharded over the row only. Each row has its own tokens; the token count is over all rows.
"""

import argparse
import os

import torch
import torch.distributed as dist
from common import batches, make_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from tp import PLAN

from xent.integrations.transformers import patch


def main() -> None:
    """Train, and print the loss at each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", help="file for the trained weights")
    options = parser.parse_args()

    dist.init_process_group()
    processes = dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    shape, names = (processes // 2, 2), ("dp", "tp")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    row, rows = mesh.get_local_rank("dp"), mesh["dp"].size()
    column = mesh.get_group("dp")

    model = make_model().to(device)
    parallelize_module(model, mesh["tp"], PLAN)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])  # the classifier belongs to this group
    patch(model)
    # foreach=False: weights are on two kinds of mesh.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    for step, (tokens, labels) in enumerate(batches(options.steps)):
        mine = slice(row, None, rows)
        tokens, labels = tokens[mine].to(device), labels[mine].to(device)
        count = (labels[:, 1:] != -100).sum()
        dist.all_reduce(count, group=column)

        loss = model(tokens, labels=labels, num_items_in_batch=count).loss
        total = loss.detach().clone()
        dist.all_reduce(total, group=column)
        if dist.get_rank() == 0:
            print(f"step {step}: {total:.6f}", flush=True)

        (loss * rows).backward()
        optimizer.step()
        optimizer.zero_grad()

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if options.save and dist.get_rank() == 0:
        torch.save(weights, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
