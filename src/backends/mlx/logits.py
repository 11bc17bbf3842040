"""`cross_entropy` in MLX: one block, the logits that exist."""

from dataclasses import replace

import mlx.core as mx

from xent.backends.mlx.autograd import scaled, with_gradients
from xent.backends.mlx.facts import Facts
from xent.backends.mlx.kernels import Found, Kernels
from xent.backends.mlx.results import asked_for, reduced
from xent.backends.mlx.tracing import is_differentiated

__all__ = ["run"]


def run(logits: mx.array, facts: Facts, kernels: Kernels) -> tuple[mx.array, Found]:
    """Return the loss of logits (..., V), flat with reduction "none", and what was found out about the rows.

    The gradient of a mean or sum is made with the loss if it may be asked for, else from the norm.
    """
    reduces = facts.spec.reduction != "none"
    asked = asked_for(facts.spec, grad=reduces and is_differentiated(logits), norm=True)
    block = mx.stop_gradient(logits).reshape(facts.count, facts.vocabulary)
    found = kernels.forward(block, facts.all_rows(), asked)
    kept = [] if found.grad is None else [found.grad]
    found = replace(found, grad=None)  # what is kept here alone gives its memory to what is made of it

    def gradients(upstream: mx.array | None) -> list[mx.array]:
        now = facts
        if not reduces:
            now, upstream = facts.with_upstream(upstream), None
        assert found.norm is not None
        grad = kept.pop() if kept else kernels.backward(block, now.all_rows(), found.norm)
        return [scaled(grad, facts.factor(upstream), logits.dtype).reshape(logits.shape)]

    return with_gradients(reduced(found.loss, facts), [logits], gradients), found
