"""Calls with DTensors: their placements describe the shard, and gradients return with matching placements.

One dimension of the mesh shards the classes. The other dimensions shard rows or replicate. A plain tensor beside
DTensors must be whole: the same on every rank, with all rows and all classes.

The call runs on local parts. Gradients go through `DTensor.to_local`. Those of logits and of the classifier are this
rank's own. That of replicated hidden states is Partial, so that autograd sums it over ranks once. If the hidden states
had been gathered, the same collective also scatters the sum.

A classifier that FSDP2 shards has the same placements, but then each rank has its own tokens. So calls with a
classifier compare the tokens of all ranks first, for which the host waits.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from xent.backends.torch.shards.ranges import group_of
from xent.core.call import Shards, describe
from xent.core.describe import Arguments
from xent.core.spec import Array, LinearTeacher, Stats, TopKTeacher, VocabParallel

__all__ = ["is_cut", "of_linear", "of_logits"]

_ROWS_OF = {TopKTeacher: ("ids", "log_probs"), LinearTeacher: ("input",)}
"""The arrays with one row per token of a teacher that is no array itself."""


def is_cut(array: Array, axis: object) -> bool:
    """Return whether an array is a DTensor whose classes, on that axis, are sharded."""
    if not isinstance(array, DTensor) or not isinstance(axis, int) or not array.dim():
        return False
    return any(placement.is_shard(axis % array.dim()) for placement in array.placements)


def of_logits(function: Callable[..., Any], logits: DTensor, arguments: Arguments) -> Any:
    """Call a function of logits (..., V) with DTensors."""
    axis = arguments["axis"] % logits.dim()
    cut = _Cut("logits", logits, axis, arguments)
    cut.shard_rows(logits, lambda dim: dim - (dim > axis))
    own = cut.own(logits, axis)
    return cut.results(function(logits.to_local(), **own, vocab_parallel=cut.shards(None, True)))


def of_linear(function: Callable[..., Any], input: Array, weight: DTensor, arguments: Arguments) -> Any:
    """Call a function of hidden states (..., D) and a classifier (V, D) with DTensors."""
    cut, placements, bias = _Cut("linear_weight", weight, 0, arguments), weight.placements, arguments.get("linear_bias")
    for place, placement in enumerate(placements):
        if place != cut.place and not placement.is_replicate():
            raise ValueError(
                f"linear_weight has placements {placements}: dimension {cut.name} of its mesh has the classes "
                f"in shards, and dimension {cut.named(place)} must have it whole"
            )
    source, axis, reduces = cut.hidden(input)
    grads = [Partial() if place in cut.rows else placement for place, placement in enumerate(placements)]
    own = cut.own(input, -1)
    if bias is not None:
        if not isinstance(bias, DTensor) or tuple(bias.placements) != tuple(placements):
            raise ValueError(
                f"linear_bias must have the placements of linear_weight, {placements}, got {_placed(bias)}"
            )
        own["linear_bias"] = bias.to_local(grad_placements=grads)
    local = weight.to_local(grad_placements=grads)
    return cut.results(function(source, local, **own, vocab_parallel=cut.shards(axis, reduces, True)))


class _Cut:
    """The mesh dimensions over which classes and rows are sharded."""

    def __init__(self, name: str, array: DTensor, axis: int, arguments: Arguments) -> None:
        """Describe an array with classes on `axis`. `vocab_parallel.size` may say that they end in padding."""
        _check(name, array)
        self.mesh, self.classes, self._arguments = array.device_mesh, array.shape[axis], arguments
        self.lead = int(isinstance(arguments.get("shift"), (tuple, list)))
        """The number of axes of the input before those of the target."""
        places = [place for place, placement in enumerate(array.placements) if placement.is_shard(axis)]
        if len(places) > 1:
            raise ValueError(
                f"{name} has its classes in shards on several dimensions of its mesh, by placements "
                f"{array.placements}: one must have them. FSDP2 gathers a classifier that it shards as well for the "
                "forward of the module that holds it: call xent there"
            )
        self.place = places[0]
        """The dimension of the mesh that shards the classes."""
        self.name, self._group = self.named(self.place), self.mesh.get_group(self.place)
        self.rows: dict[int, int] = {}
        """Dimension of the mesh -> axis of the rows that it shards."""
        step = -(-self.classes // self._group.size())
        self._first = min(self._group.rank() * step, self.classes)
        self._count = min(step, self.classes - self._first)
        argument = arguments.get("vocab_parallel")
        parallel = argument if isinstance(argument, VocabParallel) else VocabParallel(argument)
        if argument is not None and (
            group_of(parallel) is not self._group
            or parallel.first not in (None, self._first)
            or parallel.sequence_parallel
        ):
            raise ValueError(
                "DTensors say themselves where their shards are: leave out vocab_parallel; or pass the dimension "
                f"{self.name} of their mesh, as xent.VocabParallel(mesh, size=...) if the classes end in padding, or "
                f"with first={self._first} too if the tokens are known to be the same on all ranks"
            )
        self._is_sure = parallel.first is not None and parallel.size is not None
        """Whether the caller knows that the tokens are the same on all ranks of the group."""
        self._size = self.classes if parallel.size is None else parallel.size

    def named(self, place: int) -> str:
        """Return the name of a mesh dimension in error messages."""
        names = self.mesh.mesh_dim_names
        return str(place) if names is None else repr(names[place])

    def shards(self, axis: int | None, reduces: bool, exchanges: bool = False) -> Shards:
        """Return the description of this rank's shard. `exchanges`: unless the caller passed `first` and `size`."""
        return Shards(self._group, self._first, self._size, axis, reduces, exchanges and not self._is_sure)

    def shard_rows(self, array: DTensor, row_of: Callable[[int], int]) -> None:
        """Set the rows that the other dimensions of the mesh shard, for an array with axis `row_of(dim)` on `dim`."""
        for place, placement in enumerate(array.placements):
            if place != self.place and isinstance(placement, Shard) and self.mesh.size(place) > 1:
                self.rows[place] = row_of(placement.dim)

    def hidden(self, input: Array) -> tuple[Tensor, int | None, bool]:
        """Return (hidden states, axis along which tokens are split, whether the call sums the gradient over ranks)."""
        others = [place for place in range(self.mesh.ndim) if place != self.place and self.mesh.size(place) > 1]
        if not isinstance(input, DTensor):
            if others:
                raise ValueError(
                    f"input must be a DTensor on the mesh of linear_weight, whose dimension {self.named(others[0])} "
                    f"may have other rows on other ranks; got {describe(input)}"
                )
            return input, None, True
        _check("input", input)
        placements = list(input.placements)
        if input.device_mesh != self.mesh:
            raise ValueError(f"input must be on the mesh of linear_weight, {self.mesh}; got {input.device_mesh}")
        for axis, whole in ((input.dim() - 1, "its last axis"), *[(0, "its axis of heads")] * self.lead):
            if any(placement.is_shard(axis) for placement in placements):
                raise ValueError(f"input must have {whole} whole, got placements {input.placements}")
        self.shard_rows(input, lambda dim: dim - self.lead)
        placement = placements[self.place]
        if isinstance(placement, Shard):
            if placement.dim - self.lead in self.rows.values():
                raise ValueError(f"input has one axis in shards twice, by placements {input.placements}")
            return input.to_local(), placement.dim - input.dim(), True
        placements[self.place] = Partial()
        return input.to_local(grad_placements=placements), None, False

    def own(self, source: Array, axis: int) -> Arguments:
        """Return the arguments, with this rank's part of arrays; `axis` is that of the classes of a float target."""
        own = {name: value for name, value in self._arguments.items() if name != "vocab_parallel"}
        of_classes = {"weight": 0, "teacher": axis}
        if "target" in own and own["target"].is_floating_point():
            of_classes["target"] = axis
        for name in ("weight", "target", "teacher", "sample_weight", "temperature"):
            if isinstance(own.get(name), Tensor):
                own[name] = self._part(name, own[name], of_classes.get(name), source)
        for name in ("normalizer", "softcap", "logit_scale"):
            if isinstance(own.get(name), DTensor):
                own[name] = own[name].full_tensor()
        if type(own.get("teacher")) in _ROWS_OF:
            own["teacher"] = self._teacher(own["teacher"], source)
        if self.rows:  # this rank's rows alone do not determine these results
            shift = own.get("shift", 0)
            if (any(shift) if self.lead else shift) and source.dim() - 2 - self.lead in self.rows.values():
                raise ValueError(
                    f"shift={shift} needs the last axis of the rows whole, got placements {source.placements}: shift "
                    "the target before it is cut, and leave out shift"
                )
            if own.get("support") is not None:
                raise ValueError(
                    "a support goes with whole rows: redistribute them, or pass local tensors and vocab_parallel"
                )
            if own.get("reduction") == "mean" and own["normalizer"] is None:
                raise ValueError(
                    "a mean over rows in shards needs normalizer=, the number of tokens on all ranks; or take "
                    'reduction "sum"'
                )
            if "reduction" in own and "accuracy" in own["stats"]:
                raise ValueError("accuracy is a mean over rows, which are in shards: count hits among the predictions")
        return own

    def _teacher(self, teacher: Any, source: Any) -> Any:
        """Return this rank's part of a teacher that is no array."""
        names = _ROWS_OF[type(teacher)]
        parts = {name: self._part(f"teacher.{name}", getattr(teacher, name), None, source) for name in names}
        placements = tuple(Shard(0) if place == self.place else Replicate() for place in range(self.mesh.ndim))
        for name in ("weight", "bias"):
            array = getattr(teacher, name, None)
            if array is None:
                continue
            if (
                not isinstance(array, DTensor)
                or tuple(array.placements) != placements
                or array.shape[0] != self.classes
            ):
                raise ValueError(
                    f"{name} of the teacher must be cut like the student, a DTensor with placements {placements} of "
                    f"{self.classes} classes; got {_placed(array)}"
                )
            parts[name] = array.to_local()
        return replace(teacher, **parts)

    def _part(self, name: str, array: Tensor, axis: int | None, source: DTensor) -> Tensor:
        """Return this rank's part of an array with classes on `axis`, or None, whose other axes are rows."""
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        axis = None if axis is None else axis % array.dim()
        has_rows = array.dim() > (axis is not None)
        if has_rows:
            for place, row in self.rows.items():
                placements[place] = Shard(row if axis is None or row < axis else row + 1)
        if axis is not None:
            placements[self.place] = Shard(axis)
        if isinstance(array, DTensor):
            _check(name, array)
            cut = axis is not None and not all(placement.is_replicate() for placement in array.placements)
            if cut and tuple(array.placements) != tuple(placements):
                raise ValueError(
                    f"{name} must have placements {tuple(placements)}, or be whole; got {array.placements}"
                )
            return array.redistribute(self.mesh, placements).to_local()
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
        return array.narrow(axis, self._first, self._count)

    def results(self, local: Any) -> Any:
        """Return the results as DTensors if the target or the teacher's array of rows is one, else as plain tensors."""
        teacher = self._arguments.get("teacher")
        names = _ROWS_OF.get(type(teacher))
        of_rows = getattr(teacher, names[0]) if names else self._arguments.get("target", teacher)
        if not isinstance(of_rows, DTensor):
            return local
        places = range(self.mesh.ndim)
        sums = [Partial() if place in self.rows else Replicate() for place in places]
        rows = [Shard(self.rows[place] + self.lead) if place in self.rows else Replicate() for place in places]

        def placed(array: Any) -> Any:
            if isinstance(array, Stats):
                return Stats(**{name: placed(getattr(array, name)) for name in Stats.__dataclass_fields__})
            if array is None:
                return None
            return DTensor.from_local(array, self.mesh, rows if array.dim() else sums, run_check=False)

        return tuple(map(placed, local)) if isinstance(local, tuple) else placed(local)


def _placed(array: Array) -> str:
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
