"""Calls with DTensors: their placements describe the shard, and gradients return with matching placements.

One dimension of the mesh shards the classes. The other dimensions shard rows or replicate. A plain tensor beside
DTensors must be whole: the same on every rank, with all rows and all classes.

The call runs on local parts. Gradients go through `DTensor.to_local`. Those of logits and of the classifier are this
rank's own. That of replicated hidden states is Partial, so that autograd sums it over ranks once. If the hidden states
had been gathered, the same collective also scatters the sum.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from xent.backends.torch.shards.ranges import group_of
from xent.core.arrays import describe
from xent.core.call import Shards
from xent.core.describe import NO_SUBSET
from xent.core.spec import ROW_STATS, LinearTeacher, Stats, Subset, TopKTeacher, VocabParallel

__all__ = ["is_cut", "of_linear", "of_logits"]

_OF_TOP_K = ("ids", "log_probs")


def is_cut(array: Any, axis: Any) -> bool:
    """Return whether an array is a DTensor whose classes, on that axis, are sharded."""
    if not isinstance(array, DTensor) or not isinstance(axis, int) or not array.dim():
        return False
    return any(placement.is_shard(axis % array.dim()) for placement in array.placements)


def of_logits(function: Callable[..., Any], logits: DTensor, arguments: dict[str, Any]) -> Any:
    """Call a function of logits (..., V) with DTensors."""
    axis = arguments["axis"] % logits.dim()
    cut = _Cut("logits", logits, axis, arguments.get("vocab_parallel"))
    for place, placement in enumerate(logits.placements):
        if place != cut.place and isinstance(placement, Shard) and cut.mesh.size(place) > 1:
            cut.rows[place] = placement.dim if placement.dim < axis else placement.dim - 1
    own = cut.own(arguments, logits, axis)
    return cut.results(function(logits.to_local(), **own, vocab_parallel=cut.shards()), arguments)


def of_linear(function: Callable[..., Any], input: Any, weight: DTensor, arguments: dict[str, Any]) -> Any:
    """Call a function of hidden states (..., D) and a classifier (V, D) with DTensors."""
    cut = _Cut("linear_weight", weight, 0, arguments.get("vocab_parallel"))
    for place, placement in enumerate(weight.placements):
        if place != cut.place and not placement.is_replicate():
            raise ValueError(
                f"linear_weight has placements {weight.placements}: dimension {cut.name} of its mesh has the classes "
                f"in shards, and dimension {cut.named(place)} must have it whole"
            )
    lead = 1 if isinstance(arguments.get("shift"), (tuple, list)) else 0
    source, axis, reduces = cut.hidden(input, lead)
    placements = [Partial() if place in cut.rows else placement for place, placement in enumerate(weight.placements)]
    bias = arguments.get("linear_bias")
    if bias is not None:
        if not isinstance(bias, DTensor) or tuple(bias.placements) != tuple(weight.placements):
            raise ValueError(
                f"linear_bias must have the placements of linear_weight, {weight.placements}, got {_placed(bias)}"
            )
        bias = bias.to_local(grad_placements=placements)
    own = cut.own(arguments | {"linear_bias": bias}, input, -1)
    shards = cut.shards(axis, reduces)
    made = function(source, weight.to_local(grad_placements=placements), **own, vocab_parallel=shards)
    return cut.results(made, arguments, lead)


class _Cut:
    """The mesh dimensions over which classes and rows are sharded."""

    def __init__(self, name: str, array: DTensor, axis: int, vocab_parallel: Any) -> None:
        """Describe an array with classes on `axis`. `vocab_parallel.size` may say that they end in padding."""
        _check(name, array)
        self.mesh, self.classes = array.device_mesh, array.shape[axis]
        places = [place for place, placement in enumerate(array.placements) if placement.is_shard(axis)]
        if len(places) > 1:
            raise ValueError(
                f"{name} has its classes in shards on several dimensions of its mesh, by placements "
                f"{array.placements}: one must have them. FSDP2 gathers a classifier that it shards as well for the "
                "forward of the module that holds it: call xent there"
            )
        self.place = places[0]
        """The dimension of the mesh that shards the classes."""
        self.name = self.named(self.place)
        self.rows: dict[int, int] = {}
        """Dimension of the mesh -> axis of the rows that it shards."""
        step = -(-self.classes // self.mesh.size(self.place))
        self.first = min(self.mesh.get_group(self.place).rank() * step, self.classes)
        self.count = min(step, self.classes - self.first)
        given = vocab_parallel if isinstance(vocab_parallel, VocabParallel) else VocabParallel(vocab_parallel)
        if vocab_parallel is not None and (
            group_of(given) is not self.mesh.get_group(self.place) or given.first is not None or given.sequence_parallel
        ):
            raise ValueError(
                "DTensors say themselves where their shards are: leave out vocab_parallel, or, where the classes end "
                f"in padding, pass xent.VocabParallel(mesh, size=...) with the dimension {self.name} of their mesh"
            )
        self.size = self.classes if given.size is None else given.size

    def named(self, place: int) -> str:
        """Return the name of a mesh dimension in error messages."""
        names = self.mesh.mesh_dim_names
        return str(place) if names is None else repr(names[place])

    def shards(self, axis: int | None = None, reduces: bool = True) -> Shards:
        """Return the description of this rank's shard."""
        return Shards(self.mesh.get_group(self.place), self.first, self.size, axis, reduces)

    def hidden(self, input: Any, lead: int) -> tuple[Tensor, int | None, bool]:
        """Return (hidden states, axis along which tokens are split, whether the call sums the gradient over ranks).

        `lead`: the number of axes of the input before those of the target.
        """
        others = [place for place in range(self.mesh.ndim) if place != self.place and self.mesh.size(place) > 1]
        if not isinstance(input, DTensor):
            if others:
                raise ValueError(
                    f"input must be a DTensor on the mesh of linear_weight, whose dimension {self.named(others[0])} "
                    f"may have other rows on other ranks; got {describe(input)}"
                )
            return input, None, True
        _check("input", input)
        if input.device_mesh != self.mesh:
            raise ValueError(f"input must be on the mesh of linear_weight, {self.mesh}; got {input.device_mesh}")
        placements = list(input.placements)
        for axis, whole in ((input.dim() - 1, "its last axis"), *([(0, "its axis of heads")] if lead else [])):
            if any(placement.is_shard(axis) for placement in placements):
                raise ValueError(f"input must have {whole} whole, got placements {input.placements}")
        for place in others:
            placement = placements[place]
            if isinstance(placement, Shard):
                self.rows[place] = placement.dim - lead
        mine = placements[self.place]
        if isinstance(mine, Shard):
            if mine.dim - lead in self.rows.values():
                raise ValueError(f"input has one axis in shards twice, by placements {input.placements}")
            return input.to_local(), mine.dim - input.dim(), True
        placements[self.place] = Partial()
        return input.to_local(grad_placements=placements), None, False

    def own(self, arguments: dict[str, Any], source: Any, axis: int) -> dict[str, Any]:
        """Return the arguments, with this rank's part of arrays; `axis` is that of the classes of a float target."""
        own = {name: value for name, value in arguments.items() if name != "vocab_parallel"}
        of_classes = {"weight": 0}
        if "teacher" in own:
            own["teacher"] = self._teacher(own["teacher"], axis, source)
        elif own["target"].is_floating_point():
            of_classes["target"] = axis % own["target"].dim()
        for name in ("weight", "target", "sample_weight", "temperature"):
            if isinstance(own.get(name), Tensor):
                own[name] = self._part(name, own[name], of_classes.get(name), source)
        for name in ("normalizer", "softcap", "logit_scale"):
            if isinstance(own.get(name), DTensor):
                own[name] = own[name].full_tensor()
        if self.rows:
            self._refuse_means_of_parts(own, source)
        return own

    def _teacher(self, teacher: Any, axis: int, source: Any) -> Any:
        """Return this rank's part of a teacher."""
        if isinstance(teacher, Subset):
            raise ValueError(NO_SUBSET)
        if isinstance(teacher, TopKTeacher):
            parts: dict[str, Any] = {
                name: self._part(f"teacher.{name}", getattr(teacher, name), None, source) for name in _OF_TOP_K
            }
            return replace(teacher, **parts)
        if not isinstance(teacher, LinearTeacher):
            return self._part("teacher", teacher, axis % teacher.dim(), source)
        wanted = tuple(Shard(0) if place == self.place else Replicate() for place in range(self.mesh.ndim))
        parts = {"input": self._part("teacher.input", teacher.input, None, source)}
        for name in ("weight", "bias"):
            array = getattr(teacher, name)
            if array is None:
                continue
            if not isinstance(array, DTensor) or tuple(array.placements) != wanted or array.shape[0] != self.classes:
                raise ValueError(
                    f"{name} of the teacher must be cut like the student, a DTensor with placements {wanted} of "
                    f"{self.classes} classes; got {_placed(array)}"
                )
            parts[name] = array.to_local()
        return replace(teacher, **parts)

    def _part(self, name: str, array: Tensor, axis: int | None, source: Any) -> Tensor:
        """Return this rank's part of an array with classes on `axis`, or None, whose other axes are rows."""
        wanted: list[Placement] = [Replicate()] * self.mesh.ndim
        has_rows = array.dim() > (axis is not None)
        if has_rows:
            for place, row in self.rows.items():
                wanted[place] = Shard(row if axis is None or row < axis else row + 1)
        if axis is not None:
            wanted[self.place] = Shard(axis)
        if isinstance(array, DTensor):
            _check(name, array)
            if tuple(array.placements) == tuple(wanted):
                return array.to_local()
            if axis is not None and not all(placement.is_replicate() for placement in array.placements):
                raise ValueError(f"{name} must have placements {tuple(wanted)}, or be whole; got {array.placements}")
            return array.redistribute(self.mesh, wanted).to_local()
        if self.rows and has_rows:
            raise ValueError(
                f"{name} must be a DTensor like {source.placements}, since rows are in shards too on the dimension "
                f"{self.named(next(iter(self.rows)))} of the mesh; got {describe(array)}"
            )
        if axis is None:
            return array
        if array.shape[axis] != self.classes:
            raise ValueError(
                f"{name} must have all {self.classes} classes where it is no DTensor beside DTensors, got "
                f"{describe(array)}"
            )
        return array.narrow(axis, self.first, self.count)

    def _refuse_means_of_parts(self, arguments: dict[str, Any], source: Any) -> None:
        """Raise an error for results that this rank's rows alone do not determine."""
        shift = arguments.get("shift", 0)
        lead = isinstance(shift, (tuple, list))
        if (any(shift) if lead else shift) and source.dim() - (3 if lead else 2) in self.rows.values():
            raise ValueError(
                f"shift={shift} needs the last axis of the rows whole, got placements {source.placements}: shift the "
                "target before it is cut, and leave out shift"
            )
        if arguments.get("support") is not None:
            raise ValueError(
                "a support goes with whole rows: redistribute them, or pass local tensors and vocab_parallel"
            )
        if arguments.get("reduction") == "mean" and arguments["normalizer"] is None:
            raise ValueError(
                "a mean over rows in shards needs normalizer=, the number of tokens on all ranks; or take "
                'reduction "sum"'
            )
        if "accuracy" in arguments["stats"] and "reduction" in arguments:
            raise ValueError("accuracy is a mean over rows, which are in shards: count hits among the predictions")

    def results(self, made: Any, arguments: dict[str, Any], lead: int = 0) -> Any:
        """Return the results as DTensors if the target or the teacher's array of rows is one, else as plain tensors."""
        teacher = arguments.get("teacher")
        rows_of = {TopKTeacher: "ids", LinearTeacher: "input"}.get(type(teacher))
        of_rows = arguments["target"] if teacher is None else teacher if rows_of is None else getattr(teacher, rows_of)
        if not isinstance(of_rows, DTensor):
            return made
        places, losses = range(self.mesh.ndim), "reduction" in arguments
        each_row = not losses or arguments["reduction"] == "none"
        sums = [Partial() if place in self.rows else Replicate() for place in places]
        rows = [Shard(self.rows[place] + lead) if place in self.rows else Replicate() for place in places]
        flat = (*ROW_STATS, *(["z_loss"] if each_row else []), *([] if losses else ["accuracy"]))

        def placed(values: Any, per_row: bool) -> Any:
            if isinstance(values, Stats):
                named = {name: getattr(values, name) for name in Stats.__dataclass_fields__}
                return Stats(**{name: placed(value, name in flat) for name, value in named.items()})
            if values is None:
                return None
            return DTensor.from_local(values, self.mesh, rows if per_row else sums, run_check=False)

        return tuple(placed(part, each_row) for part in made) if isinstance(made, tuple) else placed(made, each_row)


def _placed(array: Any) -> str:
    """Return the placements and the shape of an array for error messages."""
    return f"placements {array.placements} of {array.shape}" if isinstance(array, DTensor) else describe(array)


def _check(name: str, array: DTensor) -> None:
    """Raise an error for placements other than Replicate and Shard as DTensor cuts it."""
    for placement in array.placements:
        if not (placement.is_replicate() or type(placement) is Shard):
            raise ValueError(
                f"{name} must be in shards or whole, got placements {array.placements}: redistribute it first; where "
                "FSDP2 has it in pieces, make the call in the forward of the module that holds it"
            )
