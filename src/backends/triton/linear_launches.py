"""Launches around the matrix products of a linear loss, and the scaling of any gradient."""

import torch
from torch import Tensor

from xent.backends.torch import steps
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.rows import is_dense
from xent.backends.torch.schedule import Part
from xent.backends.triton.coefficients_kernel import coefficients_kernel
from xent.backends.triton.facts import Facts
from xent.backends.triton.geometry import rows_of
from xent.backends.triton.launch import cdiv, launch, next_power_of_2
from xent.backends.triton.linear_kernels import scale_kernel, take_kernel
from xent.backends.triton.machine import multiprocessors
from xent.backends.triton.results import Results
from xent.backends.triton.tile_kernels import finish_kernel
from xent.backends.triton.tiles import Sums

__all__ = ["launch_coefficients", "launch_finish", "launch_take", "scale"]

_SCALED = 4096  # elements of a block of `scale_kernel`


def launch_take(
    facts: Facts,
    order: Tensor | None,
    linear: Linear,
    part: Part,
    target_logits: Tensor | None,
    taken: Tensor | None,
    classes: Tensor | None = None,
) -> None:
    """Write a part's target logits, hidden states and target classes to those tensors that are not None."""
    hidden, weight, bias = linear.hidden, linear.classifier, linear.classifier_bias
    if part.stop == part.start:
        return
    few = facts.divides_few()
    launch(
        take_kernel,
        part.stop - part.start,
        (
            hidden,
            *hidden.stride(),
            weight,
            *weight.stride(),
            bias,
            0 if bias is None else bias.stride(0),
            taken,
            target_logits,
            classes,
            order,
            part.start,
            facts.target,
            facts.sample_weight,
            facts.class_weight,
            facts.scratch,
            *facts.rows,
            hidden.shape[1],
        ),
        {
            "SHIFTED": facts.shift > 0,
            "MEAN": facts.mean,
            "FEW": few,
            "STATISTICS": facts.statistics,
            "BLOCK": min(next_power_of_2(max(hidden.shape[1], 1)), 2048),
        },
        num_warps=4,
    )


def launch_finish(facts: Facts, results: Results, sums: Sums, target_logits: Tensor, norm: Tensor | None) -> None:
    """Compute the results of all rows from their sums; write `norm` if it is not None."""
    launch(
        finish_kernel,
        cdiv(facts.count, 256),
        (
            *sums,
            target_logits,
            facts.target,
            facts.sample_weight,
            facts.class_weight,
            facts.scratch,
            results.loss,
            *results.statistics,
            norm,
            *facts.rows,
            *facts.numbers,
        ),
        {
            "MEAN": facts.mean,
            **facts.constants,
            "Z_LOSS": facts.spec.z_loss != 0,
            "BLOCK": 256,
        },
        num_warps=4,
    )


def launch_coefficients(
    facts: Facts,
    order: Tensor | None,
    part: Part,
    target_logits: Tensor,
    norm: Tensor,
    entropy: Tensor | None,
    made: Tensor,
    classes: Tensor,
) -> None:
    """Write the gradient coefficients of a part's logits, (4, R), and its target classes."""
    launch(
        coefficients_kernel,
        part.stop - part.start,
        (
            made,
            classes,
            target_logits,
            order,
            part.start,
            facts.target,
            facts.sample_weight,
            facts.class_weight,
            *facts.upstreams,
            norm,
            entropy,
            *facts.rows,
            *facts.numbers[:5],
        ),
        {"Z_LOSS": facts.spec.z_loss != 0, **facts.constants},
        num_warps=1,
    )


def scale(grads: list[Tensor], upstream: Tensor, deferred: Tensor | None, inplace: bool) -> list[Tensor]:
    """Return gradients times 0-d factors, rounded once; in their own memory with `inplace`."""
    if inplace and len(grads) > 1 and is_dense(grads[0]) and is_dense(grads[1]):
        first, other, *rest = grads
        _launch_scale(first, first, other, upstream, deferred)
        return [first, other, *scale(rest, upstream, deferred, True)]
    made = []
    for grad in grads:
        if is_dense(grad) or (inplace and grad.stride(-1) == 1 and rows_of(grad) is not None):
            made.append(out := grad if inplace else torch.empty_like(grad))
            _launch_scale(grad, out, None, upstream, deferred)
        else:
            made += steps.scale([grad], upstream, deferred, inplace)
    return made


def _launch_scale(grad: Tensor, out: Tensor, other: Tensor | None, upstream: Tensor, deferred: Tensor | None) -> None:
    """Scale a gradient into `out`, and in place another one without gaps."""
    place: tuple[int, int, int] | None = (1, 0, 0)
    rows, length, size = 1, grad.numel(), _SCALED
    if not is_dense(grad):
        place = rows_of(grad)
        rows, length = grad.shape[:-1].numel(), grad.shape[-1]
        size = min(next_power_of_2(length), _SCALED)
    assert place is not None
    count = 0 if other is None else other.numel()
    blocks = max(rows * cdiv(length, size), cdiv(count, size))
    if blocks:
        launch(
            scale_kernel,
            min(blocks, 4 * multiprocessors(grad.device)),
            (grad, *place, out, other, upstream, deferred, rows, length, count),
            {"GROUPED": place[0] < rows, "INPLACE": out is grad, "BLOCK": size},
            num_warps=8,
        )
