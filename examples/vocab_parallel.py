"""The loss of a classifier whose classes are in shards, given as plain tensors with a process group or as a DTensor.

    torchrun --nproc-per-node 2 examples/vocab_parallel.py

Every process has the same hidden states and labels, and computes the same loss, bit for bit. Each loss is compared with
that of the whole classifier, and with PyTorch's `loss_parallel`.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import xent

VOCABULARY, WIDTH = 1000, 64


def main() -> None:
    """Compute the loss in each way, and print it."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    dist.init_process_group()
    rank, processes = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 16, WIDTH, generator=generator).to(device).requires_grad_()
    labels = torch.randint(VOCABULARY, (4, 16), generator=generator).to(device)
    classifier = torch.randn(VOCABULARY, WIDTH, generator=generator).to(device)

    whole = classifier.clone().requires_grad_()
    expected = xent.linear_cross_entropy(hidden, whole, labels, shift=1)
    wanted = torch.autograd.grad(expected, (hidden, whole))

    def check(way: str, loss: Tensor, gradients: tuple[Tensor, ...]) -> None:
        """Compare a loss and the given gradients with those of the whole classifier."""
        torch.testing.assert_close(loss, expected)
        for found, other in zip(gradients, wanted, strict=False):
            torch.testing.assert_close(found, other)
        if rank == 0:
            print(f"{way}: {loss:.6f}", flush=True)

    def joined(shard: Tensor, axis: int) -> Tensor:
        """Concatenate the shards of all processes."""
        parts: list[Tensor] = [torch.empty(0, device=device)] * processes
        dist.all_gather_object(parts, shard.cpu())
        return torch.cat([part.to(device) for part in parts], axis)

    # A process group: the shards follow each other in the order of ranks.
    shard = classifier.chunk(processes)[rank].clone().requires_grad_()
    loss = xent.linear_cross_entropy(
        hidden,
        shard,
        labels,
        shift=1,
        vocab_parallel=dist.group.WORLD,
    )
    # shard.grad is that of the shard. hidden.grad is the sum over ranks.
    loss.backward()

    check("process group", loss, (hidden.grad, joined(shard.grad, 0)))

    # A DeviceMesh with one dimension. Of a larger mesh pass mesh["tp"].
    mesh = init_device_mesh(device.type, (processes,), mesh_dim_names=("tp",))
    loss = xent.linear_cross_entropy(
        hidden,
        shard,
        labels,
        shift=1,
        vocab_parallel=mesh,
    )

    # A DTensor has its placements, so nothing else needs to be passed.
    weight = DTensor.from_local(shard, mesh, [Shard(0)])
    loss = xent.linear_cross_entropy(hidden, weight, labels, shift=1)

    gradients = torch.autograd.grad(loss, (hidden, shard))
    check("DTensor", loss, (gradients[0], joined(gradients[1], 0)))

    # Sequence parallelism: a rank has the hidden states of its own tokens, and
    # the labels of all.
    mine = hidden.detach().chunk(processes, dim=1)[rank].requires_grad_()
    cut = xent.VocabParallel(mesh, sequence_parallel=True)
    loss = xent.linear_cross_entropy(
        mine,
        shard,
        labels,
        shift=1,
        vocab_parallel=cut,
    )

    gradients = torch.autograd.grad(loss, (mine, shard))
    check("tokens in shards", loss, (joined(gradients[0], 1), joined(gradients[1], 0)))

    # Padding: the classifier has more rows than there are classes. The last rows
    # are ignored.
    missing = -VOCABULARY % (64 * processes)
    rows = F.pad(classifier, (0, 0, 0, missing)).chunk(processes)[rank]
    padded = xent.VocabParallel(mesh, size=VOCABULARY)
    loss = xent.linear_cross_entropy(
        hidden,
        rows,
        labels,
        shift=1,
        vocab_parallel=padded,
    )

    check("padding", loss, ())

    # Logits in shards: the loss of loss_parallel(), and xent's.
    logits = F.linear(DTensor.from_local(hidden[:, :-1], mesh, [Replicate()]), weight)
    with loss_parallel():
        theirs = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        before = torch.autograd.grad(theirs, (hidden, shard), retain_graph=True)

    loss = xent.cross_entropy(logits, labels[:, 1:])
    after = torch.autograd.grad(loss, (hidden, shard))

    torch.testing.assert_close(theirs.full_tensor(), loss)
    torch.testing.assert_close(after, before)
    check("logits in shards", loss, (after[0], joined(after[1], 0)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
