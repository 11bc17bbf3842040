"""Record which memory a call allocates, and which PyTorch operations and kernel launches it starts.

A call cannot be recorded if the host reads values from an accelerator other than through `note_object` and
`note_check`, or if an operation uses memory that is neither an argument nor allocated by the call.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent.backends.torch.private import DispatchMode, allocator, direct, storage_of
from xent.backends.torch.slots import Memory, Place, Slots

__all__ = [
    "Derived",
    "OtherwiseError",
    "Recording",
    "is_recording",
    "note_check",
    "note_launch",
    "note_object",
    "paused",
    "record",
]

_aten = torch.ops.aten
_FACTORIES = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

Launch = Callable[[int, list[Any], Any], None]
"""(programs, arguments, queue): start a kernel. Arguments are numbers, None, and tensors or their addresses."""


class OtherwiseError(Exception):
    """A repeated call goes on otherwise than the recorded one did. Its arguments are unchanged."""


class Derived(NamedTuple):
    """An argument of a launch that is made from a tensor."""

    tensor: Tensor
    make: Callable[[Tensor], Any]


_recorders: dict[int, "_Recorder"] = {}
"""Thread -> the recorder of the call that the thread runs."""

Step = Callable[[Memory], None]


@dataclass(eq=False, slots=True)
class Recording:
    """The operations of a call, in order."""

    slots: int
    steps: list[tuple[Step, tuple[int, ...]]]
    """Each with the slots that are not used after it."""
    results: Callable[[Memory], Any]
    waits: bool
    """Whether the host waits for the device."""

    def repeat(self, tensors: list[Tensor]) -> Any:
        """Run the operations with these tensors as arguments, and return the results; or raise `OtherwiseError`."""
        memory: Memory = [*tensors, *(None,) * (self.slots - len(tensors))]
        for step, unused in self.steps:
            step(memory)
            for slot in unused:
                memory[slot] = None
        return self.results(memory)


def record(
    function: Callable[..., Any], arguments: tuple[Any, ...], tensors: list[Tensor]
) -> tuple[Any, Recording | None]:
    """Return `function(*arguments)`, and a recording of it, None if it cannot be recorded.

    `tensors`: all tensors among the arguments.
    """
    if DispatchMode is None:
        return function(*arguments), None
    recorder, thread = _Recorder(tensors), threading.get_ident()
    _recorders[thread] = recorder
    try:
        with recorder:
            results = function(*arguments)
    finally:
        del _recorders[thread]
    return results, recorder.recording(results)


def is_recording() -> bool:
    """Whether this thread runs a call that is recorded."""
    return bool(_recorders) and threading.get_ident() in _recorders


@contextmanager
def paused() -> Iterator[None]:
    """Record no operations of this thread meanwhile."""
    recorder = _recorders[threading.get_ident()]
    recorder.paused = True
    try:
        yield
    finally:
        recorder.paused = False


def note_launch(
    launch: Launch | None, programs: int, arguments: Any, by_address: bool, queue: Callable[[], Any]
) -> None:
    """Record the launch of a kernel; `launch` is None if it cannot be repeated.

    `by_address`: whether `launch` takes the addresses of tensors. `queue` finds where kernels are started at present. A
    repeated call asks it once.
    """
    _recorders[threading.get_ident()].note_launch(launch, programs, arguments, by_address, queue)


def note_object(make: Callable[[Tensor], Any], tensor: Tensor) -> int:
    """Record that the host made an object from a tensor; return its slot."""
    return _recorders[threading.get_ident()].note_object(make, tensor)


def note_check(slot: int, check: Callable[[Any], bool], passed: bool) -> None:
    """Record that the call goes on as it did if the object in a slot passes a check; if it did not, record nothing."""
    _recorders[threading.get_ident()].note_check(slot, check, passed)


class _Recorder(DispatchMode or object):  # type: ignore[misc]
    """Records the operations of a call while it is the active dispatch mode."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._slots = Slots(tensors[0].device)
        self._steps: list[tuple[Step, set[int]]] = []
        self._allocations: set[Step] = set()
        for tensor in tensors:
            self._slots.add(tensor)
        self.paused = False
        """Whether operations are not the call's, but part of a launch, as in Triton's interpreter, or of an object."""
        self._queue: int | None = None
        """The slot of the queue of the call's launches."""
        self._waits = False
        self._failed = self._slots.overlap()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        if not (self._failed or self.paused):
            self._note(function, args, kwargs, made)
        return made

    def _note(self, function: Any, args: Any, kwargs: Any, made: Any) -> None:
        if function in _FACTORIES:
            self._note_memory(made)
            return
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        known = {storage_of(tensor) for tensor in given}
        fresh = [tensor for tensor in _tensors((made,)) if storage_of(tensor) not in known]
        elsewhere = any(tensor.device != self._slots.device for tensor in fresh)
        if elsewhere or any(tag in function.tags for tag in _READS) or (fresh and made is not fresh[0]):
            self._failed = True
            return
        if not fresh and not function._schema.is_mutable:
            return  # a view
        fill, used = self._filled((*args, *kwargs.values()), False)
        call, count, names = direct(function), len(args), tuple(kwargs)

        def run(memory: Memory) -> Any:
            values = fill(memory)
            return call(*values[:count], **dict(zip(names, values[count:], strict=True)))

        if not fresh:
            self._steps.append((run, used))
            return
        slot = self._slots.add(made)

        def step(memory: Memory) -> None:
            memory[slot] = run(memory)

        self._steps.append((step, {slot, *used}))

    def _note_memory(self, tensor: Tensor) -> None:
        if tensor.device != self._slots.device:
            self._failed = True
            return
        size, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        empty, slot = allocator(tensor.device), self._slots.add(tensor)

        def allocate(memory: Memory) -> None:
            memory[slot] = empty(size, stride, dtype)

        self._steps.append((allocate, {slot}))
        self._allocations.add(allocate)

    def note_launch(
        self, launch: Launch | None, programs: int, arguments: Any, by_address: bool, queue: Callable[[], Any]
    ) -> None:
        """See `note_launch`."""
        if launch is None:
            self._failed = True
            return
        if self._queue is None:
            self._queue = self._slots.reserve()
            self._steps.append((partial(_put, self._queue, queue), set()))
        fill, used = self._filled(arguments, by_address)
        slot = self._queue
        self._steps.append((lambda memory: launch(programs, fill(memory), memory[slot]), used))

    def note_object(self, make: Callable[[Tensor], Any], tensor: Tensor) -> int:
        """See `note_object`."""
        slot, place = self._slots.reserve(), self._slots.find(tensor)
        if place is None:
            self._failed = True
            return slot

        def step(memory: Memory) -> None:
            memory[slot] = make(place.tensor(memory))

        self._steps.append((step, {slot, place.slot}))
        return slot

    def note_check(self, slot: int, check: Callable[[Any], bool], passed: bool) -> None:
        """See `note_check`."""
        self._failed |= not passed
        self._waits = True

        def step(memory: Memory) -> None:
            if not check(memory[slot]):
                raise OtherwiseError

        self._steps.append((step, {slot}))

    def _filled(self, values: Any, by_address: bool) -> tuple[Callable[[Memory], list[Any]], set[int]]:
        """Return a function that returns `values` with the tensors of another call, and the slots of the tensors."""
        constants = list(values)
        addresses: list[tuple[int, int, int]] = []
        others: list[tuple[int, Callable[[Memory], Any]]] = []
        used: set[int] = set()
        for index, value in enumerate(values):
            if isinstance(value, (Tensor, Derived)):
                place = self._slots.find(value.tensor if isinstance(value, Derived) else value)
                constants[index] = None
                if place is None:
                    self._failed = True
                    continue
                used.add(place.slot)
                if isinstance(value, Derived):
                    others.append((index, partial(_derived, value.make, place)))
                elif by_address:
                    addresses.append((index, place.slot, place.offset * place.itemsize))
                else:
                    others.append((index, place.tensor))
            elif isinstance(value, (list, tuple)) and next(_tensors(value), None) is not None:
                self._failed, constants[index] = True, None

        def fill(memory: Memory) -> list[Any]:
            filled = constants.copy()
            for index, slot, offset in addresses:
                filled[index] = memory[slot].data_ptr() + offset
            for index, made in others:
                filled[index] = made(memory)
            return filled

        return fill, used

    def recording(self, results: Any) -> Recording | None:
        """Return what was recorded of a call with these results."""
        template = self._template(results)
        if self._failed:
            return None
        needed = {place.slot for place in map(self._slots.find, _tensors((results,))) if place is not None}
        steps = []
        for step, used in reversed(self._steps):
            if step in self._allocations and not used & needed:
                continue
            steps.append((step, tuple(used - needed)))
            needed |= used
        return Recording(len(self._slots.spans), steps[::-1], template, self._waits)

    def _template(self, value: Any) -> Callable[[Memory], Any]:
        """Return a function that builds `value` from the memory of another call."""
        if isinstance(value, Tensor):
            place = self._slots.find(value)
            if place is None:
                self._failed = True
                return lambda memory: None
            return place.tensor
        if isinstance(value, (list, tuple)):
            parts = [self._template(part) for part in value]
            kind = value.__class__
            if hasattr(kind, "_fields"):
                return lambda memory: kind(*(part(memory) for part in parts))
            return lambda memory: kind([part(memory) for part in parts])
        return lambda memory: value


def _put(slot: int, queue: Callable[[], Any], memory: Memory) -> None:
    memory[slot] = queue()


def _derived(make: Callable[[Tensor], Any], place: Place, memory: Memory) -> Any:
    return make(place.tensor(memory))


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
