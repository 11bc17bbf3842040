"""Run a case in shards on each process, or in one piece. A test combines and compares the results."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import xent
from tests.distributed.cuts import Cut
from tests.distributed.pool import device, group
from tests.targets import backend_of
from xent.command.check.case import LOSSES, Case, make_inputs, placed
from xent.command.check.harnesses import harness_of
from xent.core.spec import LOG_PROB_STATS, STAT_NAMES

__all__ = ["AXES", "Way", "in_one_piece", "in_shards"]

AXES = {"logits": -1, "linear_weight": 0, "linear_bias": 0}
"""The axis along which an array is sharded."""


@dataclass(frozen=True)
class Way:
    """The way in which a case is run."""

    ranks: int
    cut: Cut
    backend: str = "torch"
    reports: bool = False
    """Whether all statistics are requested, not only those of the case."""
    needs: tuple[bool, ...] = (True, True, True)
    """The differentiable arrays that require a gradient."""
    compiled: bool = False
    inplace: bool = False
    sequence_parallel: bool = False
    seed: int = 0

    def vocab_parallel(self, rank: int) -> Any:
        """Return the `vocab_parallel` argument: a group, or a VocabParallel."""
        said: dict[str, Any] = {"sequence_parallel": True} if self.sequence_parallel else {}
        if self.cut.says_first:
            said["first"] = self.cut.firsts[rank]
        if self.cut.says_first or self.cut.says_size:
            said["size"] = self.cut.vocabulary
        return xent.VocabParallel(group(self.ranks), **said) if said else group(self.ranks)


def in_shards(case: Case, way: Way) -> dict[str, Any] | None:
    """Return this process's results as NumPy arrays: those of `case.results`, gradients, statistics; None if absent."""
    rank = dist.get_rank()
    if rank >= way.ranks:
        return None
    return _results(case, way, rank)


def in_one_piece(case: Case, way: Way) -> dict[str, Any]:
    """Return the results of the same call on the whole vocabulary."""
    return _results(case, way, None)


def _results(case: Case, way: Way, rank: int | None) -> dict[str, Any]:
    harness = harness_of(backend_of("torch"), str(device()))
    wide = "float64" if case.dtype == "float64" else "float32"
    inputs = make_inputs(case, way.seed)

    def mine(array: Any, axis: int | None) -> Any:
        return array if rank is None or axis is None else way.cut.take(array, rank, axis)

    leaves = {}
    for (name, value), need in zip(inputs.differentiable.items(), way.needs, strict=False):
        part = mine(value, AXES.get(name))
        if name == "input" and way.sequence_parallel and rank is not None:
            part = np.array_split(part, _stops(part.shape[-2], way.ranks), -2)[rank]
        leaves[name] = harness.array(part, case.dtype).requires_grad_(need)
    given, known = dict(inputs.options), inputs.target
    if "weight" in given:
        given["weight"] = mine(given["weight"], 0)
    if isinstance(known, xent.LinearTeacher):
        known = replace(known, weight=mine(known.weight, 0), bias=None if known.bias is None else mine(known.bias, 0))
    elif isinstance(known, np.ndarray) and known.dtype.kind == "f":
        known = mine(known, -1)
    of_logits = case.is_divergence and not isinstance(known, xent.TopKTeacher)
    options = placed(harness, given, wide) | case.keywords | {"backend": way.backend}
    options[case.target] = placed(harness, known, case.dtype if of_logits else wide)
    if way.reports:
        allowed = STAT_NAMES if case.function in LOSSES else LOG_PROB_STATS
        options["stats"] = (*case.stats, *(name for name in allowed if name not in case.stats))
    if rank is not None:
        options["vocab_parallel"] = way.vocab_parallel(rank)
    upstream = [None if inputs.upstream is None else harness.array(np.asarray(inputs.upstream), wide)]
    for name in case.results[1:]:
        upstream.append(harness.array(inputs.others[name], wide) if name in inputs.others else None)
    return _run(case, way, leaves, options, upstream)


def _stops(length: int, ranks: int) -> list[int]:
    step = -(-length // ranks)
    return [min((rank + 1) * step, length) for rank in range(ranks - 1)]


def _run(
    case: Case, way: Way, leaves: dict[str, torch.Tensor], options: dict[str, Any], upstream: list[Any]
) -> dict[str, Any]:
    function = getattr(xent, case.function)
    if way.compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    given = {name: leaf * 1 for name, leaf in leaves.items()} if way.inplace else leaves
    returned = function(**given, **options, **({"inplace": True} if way.inplace else {}))
    found = case.results_in(returned)
    asked = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = {}
    if asked:
        pairs = [(found[name], grad) for name, grad in zip(case.results, upstream, strict=True) if grad is not None]
        outputs, grads = zip(*pairs, strict=True)
        made = torch.autograd.grad(outputs, list(asked.values()), grads, retain_graph=case.is_divergence)
        gradients = dict(zip(asked, made, strict=True))
        if case.is_divergence:
            assert all(map(torch.equal, made, torch.autograd.grad(outputs, list(asked.values()), grads)))
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.detach(), before[name], rtol=0, atol=0, equal_nan=True)
    named = found | gradients
    if way.reports:
        named |= {f"stats.{name}": getattr(returned[-1], name) for name in options["stats"]}
    return {name: _numpy(value) for name, value in named.items()}


def _numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()
