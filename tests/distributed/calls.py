"""One case, in shards as each process runs it or in one piece; what comes back is put together and judged by a test."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import xent
from tests.distributed.cuts import Cut
from tests.distributed.pool import device, group
from xent.backends import TABLE
from xent.backends.torch.sharded import layout
from xent.core.check.cases import Case, make_inputs
from xent.core.spec import DIFFERENTIABLE, STAT_NAMES

__all__ = ["AXES", "FACTORS_OF_STATISTICS", "Way", "in_one_piece", "in_shards"]

AXES = {"logits": -1, "linear_weight": 0, "linear_bias": 0}
"""Along which axis an array is cut."""
FACTORS_OF_STATISTICS = {"lse": 0.5, "nll": -0.7, "entropy": 0.3}
"""What the upstream gradient of a statistic is of that of the loss, backwards."""


@dataclass(frozen=True)
class Way:
    """How a case is run."""

    ranks: int
    cut: Cut
    backend: str = "torch"
    stats: tuple[str, ...] = ()
    needs: tuple[bool, ...] = (True, True, True)
    """Which of the arrays that are differentiated ask for a gradient."""
    compiled: bool = False
    inplace: bool = False
    through_statistics: bool = False
    """Whether gradients come through lse, nll and entropy too."""
    sequence_parallel: bool = False

    def vocab_parallel(self, rank: int) -> Any:
        """Return the argument: a group, or what has to be said beside it."""
        said: dict[str, Any] = {"sequence_parallel": True} if self.sequence_parallel else {}
        if self.cut.says_first:
            said["first"] = self.cut.firsts[rank]
        if self.cut.says_first or self.cut.says_size:
            said["size"] = self.cut.vocabulary
        return xent.VocabParallel(group(self.ranks), **said) if said else group(self.ranks)


def in_shards(case: Case, way: Way) -> dict[str, Any] | None:
    """Return this process's results as NumPy arrays: "loss", gradients and statistics by name; None if it has none."""
    rank = dist.get_rank()
    if rank >= way.ranks:
        return None
    layout.forget()  # a rank may have met a shard of this size in another layout
    return _results(case, way, rank)


def in_one_piece(case: Case, way: Way) -> dict[str, Any]:
    """Return the results of the same call on the whole vocabulary."""
    return _results(case, way, None)


def _results(case: Case, way: Way, rank: int | None) -> dict[str, Any]:
    harness = TABLE["torch"]().harness(str(device()))
    wide = "float64" if case.dtype == "float64" else "float32"
    inputs = make_inputs(case)

    def mine(array: Any, axis: int | None) -> Any:
        return array if rank is None or axis is None else way.cut.take(array, rank, axis)

    leaves = {}
    for (name, value), need in zip(inputs.differentiable.items(), way.needs, strict=False):
        part = mine(value, AXES.get(name))
        if name == "input" and way.sequence_parallel and rank is not None:
            pieces = np.array_split(part, _stops(part.shape[-2], way.ranks), -2)
            part = pieces[rank]
        leaves[name] = harness.array(part, case.dtype).requires_grad_(need)
    options = {
        name: harness.array(mine(value, 0 if name == "weight" else None), wide) if np.ndim(value) else value
        for name, value in inputs.options.items()
    }
    for name, value in inputs.options.items():
        if isinstance(value, np.ndarray) and not value.ndim:
            options[name] = harness.array(value, wide)
    floats = inputs.target.dtype.kind == "f"
    options["target"] = harness.array(mine(inputs.target, -1 if floats else None), wide if floats else None)
    options |= {"reduction": case.reduction, "backend": way.backend}
    if case.function == "linear_cross_entropy":
        options |= {"shift": case.shift, "workspace": case.workspace}
    if rank is not None:
        options["vocab_parallel"] = way.vocab_parallel(rank)
    return _run(case, way, leaves, options, harness.array(np.asarray(inputs.upstream), wide))


def _stops(length: int, ranks: int) -> list[int]:
    step = -(-length // ranks)
    return [min((rank + 1) * step, length) for rank in range(ranks - 1)]


def _run(
    case: Case, way: Way, leaves: dict[str, torch.Tensor], options: dict[str, Any], upstream: torch.Tensor
) -> dict[str, Any]:
    function = getattr(xent, case.function)
    if way.compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    given = {name: leaf * 1 for name, leaf in leaves.items()} if way.inplace else leaves
    if way.inplace:
        options = options | {"inplace": True}
    made = function(**given, **options, stats=way.stats)
    loss, found = made if way.stats else (made, xent.Stats())
    outputs, gradients = [loss], [upstream]
    if way.through_statistics:
        outputs += [getattr(found, name) for name in DIFFERENTIABLE]
        gradients += [
            upstream.flip(tuple(range(upstream.dim()))) * FACTORS_OF_STATISTICS[name] for name in DIFFERENTIABLE
        ]
    asked = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    named = {"loss": loss}
    if asked:
        grads = torch.autograd.grad(outputs, list(asked.values()), gradients)
        named |= dict(zip(asked, grads, strict=True))
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.detach(), before[name], rtol=0, atol=0, equal_nan=True)
    named |= {f"stats.{name}": getattr(found, name) for name in STAT_NAMES if getattr(found, name) is not None}
    return {name: harness_free(value) for name, value in named.items()}


def harness_free(tensor: torch.Tensor) -> Any:
    """Return a tensor as a NumPy array, floats as float64."""
    tensor = tensor.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()
