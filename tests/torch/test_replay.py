"""Functions of PyTorch's operations are recorded and repeated with other tensors; what cannot be is called as it is."""

import gc
import math
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xent.backends.torch import replay
from xent.backends.torch.linear_call import Linear
from xent.backends.torch.recorder import Derived, Recording, is_recording, note_check, note_launch, note_object, paused
from xent.core.spec import LossSpec


@pytest.fixture
def recordings() -> dict[Any, Any]:
    """Return the kinds of calls; there are none at first."""
    return replay._kinds


def recorded(kinds: dict[Any, Any]) -> int:
    return sum(isinstance(found, Recording) for found in kinds.values())


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self.function(*arguments)


def product(left: Tensor, right: Tensor, scale: float) -> tuple[Tensor, list[Tensor | None]]:
    """Use views, padding, products into given memory, temporaries, and operations in place."""
    room = torch.empty(left.shape[0], 8)
    padded = F.pad(right, (0, 8 - right.shape[1]))
    torch.mm(left, padded, out=room)
    some = room[1:, :4]
    some += 1
    total = (left @ right).sum(0) * scale
    return room.t()[2:], [total, None, left.new_zeros(0)]


def other(*sizes: int) -> Tensor:
    return torch.randn(sizes)


def test_third_call_repeats_the_second() -> None:
    function = Counted(product)
    for call in range(5):
        left, right = other(4, 3), other(3, 5)
        found = replay.replayed(function, left, right, 2.0)
        expected = product(left, right, 2.0)
        assert torch.equal(found[0], expected[0])
        assert found[0].stride() == expected[0].stride()
        assert torch.equal(found[1][0], expected[1][0])
        assert found[1][1] is None
        assert found[1][2].shape == (0,)
        assert function.calls == min(call + 1, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda left, right, scale: (other(5, 3), right, scale),
        lambda left, right, scale: (left.double(), right.double(), scale),
        lambda left, right, scale: (other(3, 4).t(), right, scale),
        lambda left, right, scale: (other(16)[1:13].view(4, 3), right, scale),
        lambda left, right, scale: (left, right, 3.0),
        lambda left, right, scale: (left, right, 2),
    ],
    ids=["shape", "dtype", "strides", "alignment", "value", "type"],
)
def test_another_kind_is_not_repeated(change: Callable[..., Any]) -> None:
    function = Counted(lambda left, right, scale: (left @ right).float() * scale)
    for _ in range(3):
        arguments = other(4, 3), other(3, 5), 2.0
        replay.replayed(function, *arguments)
    assert function.calls == 2
    changed = change(*arguments)
    assert torch.equal(replay.replayed(function, *changed), function.function(*changed))
    assert function.calls == 3


def test_booleans_and_integers_are_told_apart() -> None:
    function = Counted(scaled)
    for _ in range(3):
        replay.replayed(function, other(4), 1)
    replay.replayed(function, other(4), True)
    assert function.calls == 3


@pytest.mark.parametrize("same_first", [True, False])
def test_one_tensor_twice_and_two_tensors_are_told_apart(same_first: bool) -> None:
    function = Counted(torch.sub)
    for call in range(6):
        left, right = other(4), other(4)
        if (call < 3) == same_first:
            right = left
        assert torch.equal(replay.replayed(function, left, right), left - right)
    assert function.calls == 4


def test_signs_of_zeros_are_told_apart(recordings: dict[Any, Any]) -> None:
    for sign in (1.0, 1.0, 1.0, -1.0):
        found = replay.replayed(scaled, torch.ones(2), sign * 0.0)
        assert torch.copysign(torch.ones(2), found).tolist() == [sign, sign]
    assert recorded(recordings) == 1


def scaled(values: Tensor, scale: float) -> Tensor:
    return values * scale


def test_recording_does_not_import_the_compiler() -> None:
    """It takes a second, in the middle of training."""
    program = """
import sys, torch
from xent.backends.torch.recorder import record
values = torch.ones(2)
results, recording = record(lambda values: values + 1, (values,), [values])
assert recording is not None and results.tolist() == [2, 2]
print("torch._dynamo" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["False"]


def test_slices_of_one_memory_are_told_apart() -> None:
    function = Counted(lambda left, right: left - right)
    for _ in range(4):
        whole = other(20)
        left, right = whole[12:16], whole[4:8]
        assert torch.equal(replay.replayed(function, left, right), left - right)
    assert function.calls == 2


def test_arguments_that_overlap_are_not_recorded() -> None:
    function = Counted(lambda left, right: left - right)
    for _ in range(4):
        whole = other(20)
        assert torch.equal(replay.replayed(function, whole[8:16], whole[4:12]), whole[8:16] - whole[4:12])
    assert function.calls == 4


def test_the_same_tensor_twice_is_written_once() -> None:
    function = Counted(lambda values, place: (torch.mul(values, 2, out=place), values + 0))
    for _ in range(4):
        values = other(8)
        twice = 2 * values
        found = replay.replayed(function, values, values)
        assert found[0].data_ptr() == values.data_ptr()
        assert torch.equal(found[1], twice)
    assert function.calls == 2


OUTSIDE = torch.arange(4.0)


def outside_in_freed_memory(values: Tensor) -> Tensor:
    """Use a tensor that may lie where the first one was."""
    first = values + 1
    total = first.sum()
    del first
    return values * torch.tensor([1.0, 2.0, 3.0, 4.0]) + total


def number_in_freed_memory(values: Tensor) -> Tensor:
    total = values.sum()
    made = values * total
    del total
    made[0] = 7.0
    return made


@pytest.mark.parametrize(
    "function",
    [
        lambda values: values * float(values.sum()),
        lambda values: values[values > 0],
        lambda values: values + OUTSIDE,
        lambda values: torch.cat([values, values]),
        outside_in_freed_memory,
        number_in_freed_memory,
    ],
    ids=["host reads", "shape from data", "outside tensor", "list of tensors", "freed memory", "number"],
)
def test_what_cannot_be_repeated_is_called(function: Callable[[Tensor], Tensor]) -> None:
    counted = Counted(function)
    for call in range(4):
        values = other(4)
        assert torch.equal(replay.replayed(counted, values), function(values))
        assert counted.calls == call + 1


class Length:
    """The sum of a tensor, read by the host."""

    def __init__(self, values: Tensor) -> None:
        with paused() if is_recording() else nullcontext():
            self.number = float(values.sum())
        self.slot = note_object(Length, values) if is_recording() else None

    def is_usual(self) -> bool:
        if self.slot is not None:
            note_check(self.slot, Length.is_usual, self.number > 0)
        return self.number > 0


@pytest.mark.parametrize("unusual", [1, 3])
def test_calls_that_go_on_otherwise_are_called(unusual: int, recordings: dict[Any, Any]) -> None:
    """The unusual call is the one that would be recorded, or one that would be repeated."""
    function = Counted(lambda values: values * 2 if Length(values + 1).is_usual() else values.sum())
    for call in range(5):
        values = torch.rand(4) if call != unusual else -3 - torch.rand(4)
        expected = values * 2 if call != unusual else values.sum()
        assert torch.equal(replay.replayed(function, values), expected)
        assert recorded(recordings) == (unusual == 3 and call in (1, 2))
    assert function.calls == {1: 5, 3: 4}[unusual]


def test_objects_of_other_memory_are_not_recorded(recordings: dict[Any, Any]) -> None:
    function = Counted(lambda values: values * 2 if Length(OUTSIDE).is_usual() else values)
    for _ in range(3):
        replay.replayed(function, other(4))
    assert recorded(recordings) == 0


def test_arguments_made_from_tensors_are_made_again() -> None:
    """Like the descriptors of Hopper's copy engine."""
    seen: list[Tensor] = []

    def launch(programs: int, arguments: list[Any], queue: Any) -> None:
        assert queue == "a queue"
        description, place = arguments
        place.copy_(description["base"])
        seen.append(description["base"])

    def call(values: Tensor) -> Tensor:
        place, part = torch.empty(2), values[1:3]
        with paused() if is_recording() else nullcontext():
            launch(1, [{"base": part}, place], "a queue")
        if is_recording():
            arguments = (Derived(part, lambda tensor: {"base": tensor}), place)
            note_launch(launch, 1, arguments, False, lambda: "a queue")
        return place

    for _ in range(4):
        values = other(4)
        assert torch.equal(replay.replayed(call, values), values[1:3])
        assert seen[-1].data_ptr() == values[1:].data_ptr()


def test_recordings_keep_no_tensor_alive(recordings: dict[Any, Any]) -> None:
    kept = []
    for _ in range(3):
        left, right = other(4, 3), other(3, 5)
        kept += [weakref.ref(left), weakref.ref(right), weakref.ref(replay.replayed(product, left, right, 2.0)[0])]
    del left, right
    gc.collect()
    assert any(isinstance(made, Recording) for made in recordings.values())
    assert not any(reference() is not None for reference in kept)


class Alive(TorchDispatchMode):
    """Counts how many results of operations are alive at once, at most."""

    most = 0

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.made.append(weakref.ref(made))
        self.most = max(self.most, sum(reference() is not None for reference in self.made))
        return made


def test_memory_is_freed_after_its_last_use(recordings: dict[Any, Any]) -> None:
    def chain(values: Tensor) -> Tensor:
        for _ in range(8):
            values = values + 1
        return values.sum()

    for _ in range(3):
        with Alive() as alive:
            total = replay.replayed(chain, torch.zeros(4))
        assert float(total) == 32
        assert len(alive.made) >= 9
        assert alive.most <= 3
    assert recorded(recordings) == 1


def test_errors_leave_the_recorder_off(recordings: dict[Any, Any]) -> None:
    def fails(values: Tensor) -> Tensor:
        if calls.calls > 1:
            raise RuntimeError("stop")
        return values + 1

    calls = Counted(fails)
    replay.replayed(calls, other(4))
    with pytest.raises(RuntimeError, match="stop"):
        replay.replayed(calls, other(4))
    assert not is_recording()
    for _ in range(3):
        found = replay.replayed(product, torch.ones(4, 3), torch.ones(3, 5), 1.0)
        assert torch.equal(found[1][0], torch.full((5,), 12.0))
    assert recorded(recordings) == 1


def test_the_number_of_kinds_is_bounded(recordings: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was called once is dropped first, then all."""
    monkeypatch.setattr(replay, "_MOST", 8)
    for _ in range(2):
        replay.replayed(product, other(4, 3), other(3, 5), 1.0)
    for rows in range(5, 40):
        replay.replayed(product, other(rows, 3), other(3, 5), 1.0)
        assert len(recordings) <= 8
        assert recorded(recordings) == 1
    for rows in range(5, 40):
        for _ in range(2):
            replay.replayed(product, other(rows, 3), other(3, 5), 1.0)
        assert len(recordings) <= 8


def test_tensors_of_other_classes_are_not_recorded(recordings: dict[Any, Any]) -> None:
    class Special(Tensor):
        pass

    for _ in range(3):
        made = replay.replayed(scaled, other(4).as_subclass(Special), 2.0)
        assert isinstance(made, Special)
    assert not recordings


def test_fields_of_a_linear_call_are_all_its_fields() -> None:
    """What is missing there is missing in the key of a repeated call."""
    linear = Linear(other(2, 3), other(4, 3), None, 1, 8, torch.float32, (True, False, False))
    assert all(one is getattr(linear, field.name) for one, field in zip(linear.fields, fields(Linear), strict=True))


def test_options_are_told_apart_by_every_field() -> None:
    changed = {
        "reduction": "sum",
        "ignore_index": 7,
        "label_smoothing": 0.5,
        "z_loss": 0.5,
        "softcap": 0.5,
        "logit_scale": -1.0,
        "stats": ("lse",),
        "exact": True,
        "accuracy_of_rows": True,
    }
    assert list(changed) == [field.name for field in fields(LossSpec)]
    specs = [LossSpec(), *(LossSpec(**{name: value}) for name, value in changed.items())]
    specs += [LossSpec(z_loss=-0.0), LossSpec(z_loss=0), LossSpec(logit_scale=True), LossSpec(logit_scale=1)]
    assert len({spec.identity for spec in specs}) == len(specs)
    assert LossSpec(logit_scale=math.nan).identity == LossSpec(logit_scale=float("nan")).identity


def test_threads_record_their_own_calls() -> None:
    barrier = threading.Barrier(2)
    wrong: list[str] = []

    def run(seed: float) -> None:
        def both(values: Tensor) -> Tensor:
            made = values + seed
            barrier.wait(timeout=30)
            return made * 2

        for _ in range(4):
            values = other(4)
            function: Callable[[Tensor], Tensor] = both
            if not torch.equal(replay.replayed(function, values), (values + seed) * 2):
                wrong.append(str(seed))
            if any(isinstance(made, Recording) for kind, made in replay._kinds.items() if kind[0] is both):
                return

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert recorded(replay._kinds) == 2


def test_threads_make_room_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that call many kinds, such as sequences of many lengths, drop kinds while others add and drop theirs."""
    monkeypatch.setattr(replay, "_MOST", 8)
    errors: list[Exception] = []

    def run(thread: int) -> None:
        values = torch.ones(4)
        try:
            for number in range(3000):
                replay.replayed(_same, values, (thread, number))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


def _same(values: Tensor, number: tuple[int, int]) -> Tensor:
    return values
