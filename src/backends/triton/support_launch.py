"""The launch of the kernel for rows with a support."""

from xent.backends.triton.facts import Facts
from xent.backends.triton.launch import launch, next_power_of_2
from xent.backends.triton.results import Results
from xent.backends.triton.row_launches import Block
from xent.backends.triton.support_kernel import support_kernel

__all__ = ["launch_support"]


def launch_support(facts: Facts, results: Results, block: Block) -> None:
    """Fold and finish the rows of a block, and write their gradient if `block.grad` is not None."""
    support, place = facts.support, block.place
    assert support is not None
    loss, statistics = results.loss, results.statistics
    if not block.count:
        return
    launch(
        support_kernel,
        block.count,
        (
            block.logits,
            *place.logits,
            place.skew,
            block.grad,
            *place.grad,
            block.order,
            block.start,
            *support,
            len(support[0]),
            None if block.grad is None else results.held(len(support[0])),
            facts.target,
            block.target_logits,
            *facts.upstreams,
            loss,
            *statistics,
            *facts.rows,
            *facts.scales,
        ),
        {
            "SHIFTED": facts.shift > 0,
            **place.constants(),
            **facts.bent,
            "BLOCK": max(min(next_power_of_2(facts.vocabulary), 1024), 2 * place.vector),
        },
        num_warps=4,
    )
