"""Train on several processes with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/ddp.py

The processes have different numbers of tokens with a target, so the mean of their means is not the mean over all
tokens. Each loss is therefore divided by the token count over all processes. DistributedDataParallel averages gradients
over processes although they must be summed, so the loss is also multiplied by the number of processes. In a model
without `patch`, pass the count as `normalizer` of `xent.linear_cross_entropy`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from common import batches, make_model
from torch.nn.parallel import DistributedDataParallel

from xent.integrations.transformers import patch


def main() -> None:
    """Train, and print the loss at each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--plain", action="store_true", help="leave the model as transformers made it")
    parser.add_argument("--find-unused", action="store_true", help="find_unused_parameters, which the Trainer sets")
    parser.add_argument("--save", help="file for the trained weights")
    options = parser.parse_args()

    dist.init_process_group()
    rank, processes = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    model = make_model().to(device)
    if not options.plain:
        patch(model)
    unused = options.find_unused
    wrapped = DistributedDataParallel(model, find_unused_parameters=unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for step, (tokens, labels) in enumerate(batches(options.steps)):
        mine = slice(rank, None, processes)
        tokens, labels = tokens[mine].to(device), labels[mine].to(device)
        count = (labels[:, 1:] != -100).sum()
        dist.all_reduce(count)

        loss = wrapped(tokens, labels=labels, num_items_in_batch=count).loss
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: {total:.6f}", flush=True)

        (loss * processes).backward()
        optimizer.step()
        optimizer.zero_grad()

    if options.save and rank == 0:
        torch.save(model.state_dict(), options.save)
    del wrapped  # it keeps the process group alive
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
