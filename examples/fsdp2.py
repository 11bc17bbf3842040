"""Train on several processes with FSDP2, which shards every weight, including the classifier.

    torchrun --nproc-per-node 2 examples/fsdp2.py

The classifier belongs to the outermost group: FSDP2 gathers it when the model is called, and it stays gathered while
the loss is computed. With --shard-head it has its own group, and is gathered a second time for the loss. The token
count is over all processes, as in `ddp.py`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from common import batches, make_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from xent.integrations.transformers import patch


def main() -> None:
    """Train, and print the loss at each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--shard-head", action="store_true", help="give the classifier a group of its own")
    parser.add_argument("--patch-last", action="store_true", help="patch the sharded model, rather than the model")
    parser.add_argument("--save", help="file for the trained weights")
    options = parser.parse_args()

    dist.init_process_group()
    rank, processes = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (processes,))

    model = make_model().to(device)
    if not options.patch_last:
        patch(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if options.shard_head:
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if options.patch_last:
        patch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for step, (tokens, labels) in enumerate(batches(options.steps)):
        mine = slice(rank, None, processes)
        tokens, labels = tokens[mine].to(device), labels[mine].to(device)
        count = (labels[:, 1:] != -100).sum()
        dist.all_reduce(count)

        loss = model(tokens, labels=labels, num_items_in_batch=count).loss
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: {total:.6f}", flush=True)

        (loss * processes).backward()
        optimizer.step()
        optimizer.zero_grad()

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if options.save and rank == 0:
        torch.save(weights, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
