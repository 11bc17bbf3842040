"""Losses of a classifier with one shard per rank: xent's, the textbook's, PyTorch's, Liger's, and a floor.

Unlike contenders on one device they run a whole step, `step(shards)`: forward pass, mean and backward pass, because
`loss_parallel` needs its context for both. They return the detached loss. Gradients are in `.grad`; that of the hidden
states is summed over ranks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.cases import Case
from benchmarks.contenders.entry import LossFunction, contender, find_peer
from benchmarks.process import Absent

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Shards"]


class Shards(Protocol):
    """The tensors of a rank: all hidden states `input` and targets, its own `tokens` of them, and its rows `weight`."""

    group: Any
    first: int
    """The class of the shard's first row."""
    input: Tensor
    target: Tensor
    tokens: Tensor
    weight: Tensor
    teacher: tuple[Tensor, Tensor]
    """The hidden states and the shard of the classifier of a divergence's teacher."""


@contender("products + all-reduce", "sharded", kind="floor")
def _floor(case: Case) -> LossFunction:
    """Return three products and one all-reduce, in buffers that are reused."""
    import torch
    import torch.distributed as dist

    made: list[Tensor] = []

    def step(shards: Shards) -> None:
        rows, weight = shards.input.detach(), shards.weight.detach()
        if not made:
            made.extend(map(rows.new_empty, ((len(rows), len(weight)), rows.shape, weight.shape)))
        logits, of_input, of_weight = made
        torch.mm(rows, weight.T, out=logits)
        torch.mm(logits, weight, out=of_input)
        dist.all_reduce(of_input, group=shards.group)
        torch.mm(logits.T, rows, out=of_weight)

    return step


@contender("xent", "sharded", kind="ours")
def _xent(case: Case, sequence_parallel: bool = False, log_probabilities: bool = False) -> LossFunction:
    import xent

    def step(shards: Shards) -> Tensor:
        source = shards.tokens if sequence_parallel else shards.input
        # Without first and size, ranks would exchange them in every call, for which the host waits.
        first, size = shards.first, case.vocabulary
        where = xent.VocabParallel(shards.group, first, size, sequence_parallel)
        if case.teacher:
            teacher = xent.LinearTeacher(*shards.teacher)
            loss = xent.linear_divergence(source, shards.weight, teacher, vocab_parallel=where)
        elif log_probabilities:
            loss = -xent.linear_log_probs(source, shards.weight, shards.target, vocab_parallel=where).mean()
        else:
            loss = xent.linear_cross_entropy(source, shards.weight, shards.target, vocab_parallel=where)
        loss.backward()
        return loss.detach()

    return step


contender("xent sequence parallel", "sharded", kind="ours")(partial(_xent, sequence_parallel=True))
contender("xent log-probabilities", "sharded", kind="ours")(partial(_xent, log_probabilities=True))


@contender("textbook", "sharded", holds_logits=True)
def _textbook(case: Case) -> LossFunction:
    from benchmarks.contenders.textbook import linear, vocab_parallel_divergence, vocab_parallel_loss

    def step(shards: Shards) -> Tensor:
        logits = linear(shards.input, shards.weight, shards.group)
        if case.teacher:
            hidden, weight = shards.teacher
            loss = vocab_parallel_divergence(logits, hidden @ weight.T, shards.group).mean()
        else:
            loss = vocab_parallel_loss(logits, shards.target, shards.first, shards.group).mean()
        del logits
        loss.backward()
        return loss.detach()

    return step


@contender("loss_parallel", "sharded", holds_logits=True)
def _loss_parallel(case: Case) -> LossFunction:
    """PyTorch's loss_parallel on float32 logits, as in torchtitan; with bfloat16 logits it would round the loss."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh(case.device, (case.ranks,))
    shape, stride = torch.Size((case.vocabulary, case.hidden)), (case.hidden, 1)

    def step(shards: Shards) -> Tensor:
        rows = DTensor.from_local(shards.input, mesh, [Replicate()], run_check=False)
        weight = DTensor.from_local(shards.weight, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        with loss_parallel():
            loss: Any = F.cross_entropy(F.linear(rows, weight).float(), shards.target)
            loss.backward()
        return loss.to_local().detach()

    return step


@contender("Liger", "sharded")
def _liger(case: Case) -> LossFunction:
    """Liger's loss from hidden states, in chunks of 512 tokens."""
    name = "liger_fused_linear_scaled_cross_entropy_tp"
    function = find_peer("liger_kernel.transformers.functional", name, case.device)
    if case.vocabulary % case.ranks:
        raise Absent("Liger-Kernel takes equal shards only")

    def step(shards: Shards) -> Tensor:
        loss = function(shards.input, shards.weight, shards.target, shards.group).mean()
        loss.backward()
        return loss.detach()

    return step
