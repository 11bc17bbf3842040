"""Calls with DTensors: their placements describe the shard, and gradients return with matching placements.

One dimension of the mesh shards the classes. The other dimensions shard rows or replicate. A plain tensor beside
DTensors must be whole: the same on every rank, with all rows and all classes.

The call runs on local parts. Gradients go through `DTensor.to_local`. Those of logits and of the classifier are this
rank's own. That of replicated hidden states is Partial, so that autograd sums it over ranks once. If the hidden states
had been gathered, the same collective also scatters the sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from xent.backends.torch.sharded.peers import group_of
from xent.core.arrays import describe
from xent.core.spec import ROW_STATS, Shards, Stats, VocabParallel

__all__ = ["is_cut", "of_linear", "of_logits"]

_PER_ROW = ("sample_weight", "temperature")


def is_cut(array: Any, axis: Any) -> bool:
    """Return whether an array is a DTensor whose classes, on that axis, are sharded."""
    if not isinstance(array, DTensor) or not isinstance(axis, int) or not array.dim():
        return False
    return any(placement.is_shard(axis % array.dim()) for placement in array.placements)


def of_logits(function: Callable[..., Any], logits: DTensor, arguments: dict[str, Any]) -> Any:
    """Call a function of logits (..., V) with DTensors."""
    axis = arguments["axis"] % logits.dim()
    cut = _Cut.of("logits", logits, axis, arguments)
    if "weight" in arguments:
        arguments = arguments | {"weight": cut.own_classes("weight", arguments["weight"], 0)}
    target = arguments["target"]
    if _is_probabilities(target):
        arguments = arguments | {"target": cut.own_classes("target", target, axis)}
    arguments = cut.own_rows(arguments, logits)
    made = function(logits.to_local(), **arguments, vocab_parallel=cut.shard())
    return cut.results(made, target, arguments)


def of_linear(function: Callable[..., Any], input: Any, weight: DTensor, arguments: dict[str, Any]) -> Any:
    """Call a function of hidden states (..., D) and a classifier (V, D) with DTensors."""
    cut = _Cut.of("linear_weight", weight, 0, arguments)
    for place, placement in enumerate(weight.placements):
        if place != cut.place and not placement.is_replicate():
            raise ValueError(
                f"linear_weight has placements {weight.placements}: dimension {cut.name} of its mesh has the classes "
                f"in shards, and dimension {cut.named(place)} must have it whole"
            )
    lead = 1 if isinstance(arguments.get("shift"), (tuple, list)) else 0
    source, axis, reduces = cut.own_hidden(input, lead)
    placements = [Partial() if place in cut.rows else placement for place, placement in enumerate(weight.placements)]
    bias = arguments.get("linear_bias")
    if bias is not None:
        if not isinstance(bias, DTensor) or tuple(bias.placements) != tuple(weight.placements):
            raise ValueError(
                f"linear_bias must have the placements of linear_weight, {weight.placements}, got {_of(bias)}"
            )
        bias = bias.to_local(grad_placements=placements)
    arguments = arguments | {"linear_bias": bias}
    if "weight" in arguments:
        arguments = arguments | {"weight": cut.own_classes("weight", arguments["weight"], 0)}
    target = arguments["target"]
    if _is_probabilities(target):
        arguments = arguments | {"target": cut.own_classes("target", target, target.dim() - 1)}
    arguments = cut.own_rows(arguments, input)
    shard = cut.shard(axis, reduces)
    made = function(source, weight.to_local(grad_placements=placements), **arguments, vocab_parallel=shard)
    return cut.results(made, target, arguments, lead)


@dataclass(frozen=True)
class _Cut:
    """The mesh dimensions over which classes and rows are sharded."""

    mesh: DeviceMesh
    place: int
    """The dimension of the mesh that shards the classes."""
    vocabulary: int
    size: int
    """The number of classes without padding."""
    rows: dict[int, int]
    """Dimension of the mesh -> axis of the rows that it shards."""

    @classmethod
    def of(cls, name: str, array: DTensor, axis: int, arguments: dict[str, Any]) -> "_Cut":
        """Describe an array with classes on `axis`. Remove `vocab_parallel` from the arguments."""
        mesh, placements = array.device_mesh, array.placements
        places = [place for place, placement in enumerate(placements) if placement.is_shard(axis)]
        if len(places) > 1:
            raise ValueError(
                f"{name} has its classes in shards on several dimensions of its mesh, by placements {placements}: one "
                "must have them. FSDP2 gathers a classifier that it shards as well for the forward of the module that "
                "holds it: call xent there"
            )
        _check(name, array)
        vocabulary = array.shape[axis]
        rows = {}
        for place, placement in enumerate(placements):
            if place != places[0] and isinstance(placement, Shard) and mesh.size(place) > 1:
                rows[place] = placement.dim if placement.dim < axis else placement.dim - 1
        made = cls(mesh, places[0], vocabulary, vocabulary, rows)
        return replace(made, size=made._size(arguments.pop("vocab_parallel", None)))

    @property
    def name(self) -> str:
        """The name of the dimension of the classes in error messages."""
        return self.named(self.place)

    def named(self, place: int) -> str:
        """Return the name of a mesh dimension in error messages."""
        names = self.mesh.mesh_dim_names
        return str(place) if names is None else repr(names[place])

    def _size(self, given: Any) -> int:
        """Return V. `vocab_parallel.size` may make it smaller than the DTensors' size."""
        if given is None:
            return self.vocabulary
        shards = given if isinstance(given, VocabParallel) else VocabParallel(given)
        if (
            group_of(shards) is not self.mesh.get_group(self.place)
            or shards.first is not None
            or shards.sequence_parallel
        ):
            raise ValueError(
                "DTensors say themselves where their shards are: leave out vocab_parallel, or, where the classes end "
                f"in padding, pass xent.VocabParallel(mesh, size=...) with the dimension {self.name} of their mesh"
            )
        return self.vocabulary if shards.size is None else shards.size

    def shard(self, axis: int | None = None, reduces: bool = True) -> Shards:
        """Return the description of this rank's shard."""
        return Shards(self.mesh.get_group(self.place), self._range()[0], self.size, axis, reduces)

    def _range(self) -> tuple[int, int]:
        """Return the range [first, stop) of this rank's classes, as DTensor cuts them."""
        step = -(-self.vocabulary // self.mesh.size(self.place))
        first = min(self.mesh.get_local_rank(self.place) * step, self.vocabulary)
        return first, min(first + step, self.vocabulary)

    def own_classes(self, name: str, array: Any, axis: int) -> Any:
        """Return this rank's classes of an array that is whole or sharded like the classes."""
        if not isinstance(array, Tensor):
            return array
        if isinstance(array, DTensor):
            _check(name, array)
            wanted = self._placements(array, axis)
            if tuple(array.placements) == wanted:
                return array.to_local()
            if not all(placement.is_replicate() for placement in array.placements):
                raise ValueError(f"{name} must have placements {wanted}, or be whole; got {array.placements}")
            array = array.to_local()
        if array.shape[axis] != self.vocabulary:
            raise ValueError(
                f"{name} must have all {self.vocabulary} classes where it is no DTensor beside DTensors, got "
                f"{describe(array)}"
            )
        first, stop = self._range()
        return array.narrow(axis, first, stop - first)

    def _placements(self, array: Tensor, axis: int) -> tuple[Placement, ...]:
        """Return the placements of an array with classes on `axis`; other axes are rows."""
        found: list[Placement] = [Replicate()] * self.mesh.ndim
        if array.dim() > 1:
            for place, row in self.rows.items():
                found[place] = Shard(row if row < axis else row + 1)
        found[self.place] = Shard(axis)
        return tuple(found)

    def own_hidden(self, input: Any, lead: int) -> tuple[Tensor, int | None, bool]:
        """Return (hidden states, axis along which tokens are split, whether the call sums the gradient over ranks).

        `lead`: the number of axes of the input before those of the target.
        """
        if not isinstance(input, DTensor):
            others = [place for place in range(self.mesh.ndim) if place != self.place and self.mesh.size(place) > 1]
            if others:
                raise ValueError(
                    f"input must be a DTensor on the mesh of linear_weight, whose dimension {self.named(others[0])} "
                    f"may have other rows on other ranks; got {describe(input)}"
                )
            return input, None, True
        _check("input", input)
        if input.device_mesh != self.mesh:
            raise ValueError(f"input must be on the mesh of linear_weight, {self.mesh}; got {input.device_mesh}")
        last = input.dim() - 1
        for place, placement in enumerate(input.placements):
            if placement.is_shard(last):
                raise ValueError(f"input must have its last axis whole, got placements {input.placements}")
            if lead and placement.is_shard(0):
                raise ValueError(f"input must have its axis of heads whole, got placements {input.placements}")
            if place != self.place and isinstance(placement, Shard) and self.mesh.size(place) > 1:
                self.rows[place] = placement.dim - lead
        mine = input.placements[self.place]
        if isinstance(mine, Shard):
            if mine.dim - lead in self.rows.values():
                raise ValueError(f"input has one axis in shards twice, by placements {input.placements}")
            return input.to_local(), mine.dim - input.dim(), True
        placements = list(input.placements)
        placements[self.place] = Partial()
        return input.to_local(grad_placements=placements), None, False

    def own_rows(self, arguments: dict[str, Any], source: Tensor) -> dict[str, Any]:
        """Return the arguments, with arrays that have rows replaced by this rank's rows."""
        found = dict(arguments)
        for name in ("target", *_PER_ROW):
            array = found.get(name)
            if isinstance(array, DTensor):
                _check(name, array)
                wanted = self._placements_of_rows()
                if tuple(array.placements) != wanted:
                    array = array.redistribute(self.mesh, wanted)
                found[name] = array.to_local()
            elif isinstance(array, Tensor) and self.rows and array.dim():
                raise ValueError(
                    f"{name} must be a DTensor like {source.placements}, since rows are in shards too on the dimension "  # type: ignore[attr-defined]
                    f"{self.named(next(iter(self.rows)))} of the mesh; got {describe(array)}"
                )
        if isinstance(found.get("normalizer"), DTensor):
            found["normalizer"] = found["normalizer"].full_tensor()
        if self.rows:
            self._refuse_local_means(found)
        return found

    def _refuse_local_means(self, arguments: dict[str, Any]) -> None:
        """Raise an error for results that would be means over this rank's rows only."""
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

    def _placements_of_rows(self, lead: int = 0) -> tuple[Placement, ...]:
        places = range(self.mesh.ndim)
        return tuple(Shard(self.rows[place] + lead) if place in self.rows else Replicate() for place in places)

    def results(self, made: Any, target: Any, arguments: dict[str, Any], lead: int = 0) -> Any:
        """Return the results as DTensors if the target is one, else as plain tensors."""
        if not isinstance(target, DTensor):
            return made
        reduced = arguments.get("reduction", "none") != "none"
        sums = tuple(Partial() if place in self.rows else Replicate() for place in range(self.mesh.ndim))
        rows = self._placements_of_rows(lead)

        def placed(values: Any, per_row: bool) -> Any:
            if values is None:
                return None
            return DTensor.from_local(values, self.mesh, rows if per_row else sums, run_check=False)

        def of(part: Any) -> Any:
            if not isinstance(part, Stats):
                return placed(part, not reduced)
            flat = (*ROW_STATS, *([] if reduced else ["z_loss"]), *([] if "reduction" in arguments else ["accuracy"]))
            named = {name: getattr(part, name) for name in Stats.__dataclass_fields__}
            return Stats(**{name: placed(values, name in flat) for name, values in named.items()})

        return tuple(map(of, made)) if isinstance(made, tuple) else of(made)


def _is_probabilities(target: Any) -> bool:
    return isinstance(target, Tensor) and target.is_floating_point()


def _check(name: str, array: DTensor) -> None:
    """Raise an error for placements other than Replicate and Shard as DTensor cuts it."""
    for placement in array.placements:
        if not (placement.is_replicate() or type(placement) is Shard):
            raise ValueError(
                f"{name} must be in shards or whole, got placements {array.placements}: redistribute it first; where "
                "FSDP2 has it in pieces, make the call in the forward of the module that holds it"
            )


def _of(array: Any) -> str:
    return f"placements {array.placements}" if isinstance(array, DTensor) else describe(array)
