"""The launch of the kernel for rows whose targets are class probabilities."""

from xent.backends.triton.facts import Facts
from xent.backends.triton.geometry import rows_of
from xent.backends.triton.launch import launch, next_power_of_2
from xent.backends.triton.probabilities_kernel import probabilities_kernel
from xent.backends.triton.results import Results
from xent.backends.triton.row_launches import Block

__all__ = ["launch_probabilities"]


def launch_probabilities(facts: Facts, results: Results, block: Block) -> None:
    """Fold and finish the rows of a block, and write their gradient if `block.grad` is not None."""
    given, place = facts.probabilities, block.place
    assert given is not None
    rows = rows_of(given)
    if rows is None:
        given = given.contiguous()
        rows = rows_of(given)
    assert rows is not None
    loss, statistics = results.loss, results.statistics
    if not block.count:
        return
    launch(
        probabilities_kernel,
        block.count,
        (
            block.logits,
            *place.logits,
            block.grad,
            *place.grad,
            block.order,
            block.start,
            given,
            *rows,
            given.stride(-1),
            facts.sample_weight,
            facts.class_weight,
            *facts.upstreams,
            facts.scratch,
            loss,
            *statistics,
            facts.count,
            facts.length,
            facts.shift,
            facts.vocabulary,
            *facts.numbers,
        ),
        {
            "SHIFTED": facts.shift > 0,
            "GROUPED": place.grouped or rows[0] < facts.count,
            "MEAN": facts.mean,
            "ALL_ROWS": facts.all_rows,
            **facts.bent,
            "BLOCK": min(next_power_of_2(facts.vocabulary), 1024),
        },
        num_warps=4,
    )
