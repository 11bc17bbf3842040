"""Repeated launches skip Triton's binder: they run the program that was compiled for arguments of their kind."""

import inspect
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDABackend

from xent.backends.torch.replay import replayed
from xent.backends.triton import launch as launching
from xent.backends.triton.hopper.door import descriptor
from xent.backends.triton.launch import _examined, cdiv, launch, next_power_of_2

ARGUMENTS: list[Any] = [
    None,
    *(True, False, 1.5, -0.0, 1.0),
    *(0, 1, -1, 16, 17, -100, 2**31 - 1, 2**31, 2**40 + 1, -(2**31) - 1),
    *(torch.zeros(8, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool)),
    torch.zeros(8)[1:],
    torch.zeros(8)[4:],
    torch.zeros(8, dtype=torch.int64)[1:],
    *(descriptor(torch.zeros(size, 64, dtype=torch.bfloat16), [64, 64]) for size in (64, 128)),
    descriptor(torch.zeros(64, 64, dtype=torch.bfloat16), [32, 64]),
    descriptor(torch.zeros(64, 64, dtype=torch.float16), [64, 64]),
]


def kind_of(argument: Any) -> Any:
    """Return the argument's part of the key in `launch`."""
    return _examined((argument,))[0]


def compiled_for(argument: Any) -> Any:
    """Return the specialisation that Triton itself uses."""
    from triton.runtime.jit import native_specialize_impl

    # Kernels of `launch.kernel` are specialised for types only. Descriptors for the copy engine are always specialised.
    return native_specialize_impl(CUDABackend, argument, False, False, False)


def test_arguments_of_one_kind_have_one_specialisation() -> None:
    pairs = [pair for pair in combinations(ARGUMENTS, 2) if kind_of(pair[0]) == kind_of(pair[1])]
    assert len(pairs) >= 10
    for one, other in pairs:
        assert compiled_for(one) == compiled_for(other), (one, other)


class Compiled(triton.compiler.CompiledKernel):
    """A compiled kernel that records the arguments of its launches."""

    def __init__(self, launches: list[Any]) -> None:
        self.launches = launches
        self.streams: list[Any] = []

    function = packed_metadata = None

    def run(self, *given: Any) -> None:  # type: ignore[override]
        *grid, stream, _, _, _, _, _ = given[:9]
        self.streams.append(stream)
        self.launches.append((tuple(grid), given[9:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launches.append(("looked at", grid, arguments))


class Kernel(triton.JITFunction):
    """A kernel with three arguments and two constants that records Triton's launches."""

    def __init__(self, compiled: Any) -> None:
        self.fn, self.arg_names, self.compiled = self, ["x", "count", "factor", "BLOCK", "EXACT"], compiled
        self.looks: list[Any] = []

    def __hash__(self) -> int:
        return id(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def look(*arguments: Any, **constants: Any) -> Any:
            self.looks.append((grid, arguments, constants))
            return self.compiled

        return look


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Simulate GPUs; `index` is that of the current one, `stream` its current stream."""
    device = SimpleNamespace(index=0, stream="the stream")
    active = SimpleNamespace(
        get_current_device=lambda: device.index, get_current_stream=lambda index: (index, device.stream)
    )
    monkeypatch.setattr(launching, "_IS_TRIED", True)
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    return device


def test_triton_binds_each_kind_once(device: SimpleNamespace) -> None:
    launches: list[Any] = []
    kernel, x = Kernel(Compiled(launches)), torch.zeros(8)
    for index, arguments, options, looks in (
        (0, (x, 7, 2.0), {"BLOCK": 32, "EXACT": True, "num_warps": 4}, 1),
        (0, (torch.ones(8), 9, 3.0), {"EXACT": True, "num_warps": 4, "BLOCK": 32}, 2),
        (0, (torch.ones(8), 9, 3.0), {"BLOCK": 32, "EXACT": True, "num_warps": 4}, 2),
        (0, (x[1:], 1, 3.0), {"EXACT": True, "BLOCK": 32, "num_warps": 4}, 2),
        (0, (x, 2**31, 3.0), {"BLOCK": 32, "EXACT": True, "num_warps": 4}, 3),
        (0, (x.half(), 9, 3.0), {"BLOCK": 32, "EXACT": True, "num_warps": 4}, 4),
        (0, (None, 9, 3.0), {"BLOCK": 32, "EXACT": True, "num_warps": 4}, 5),
        (0, (x, 9, 3.0), {"BLOCK": 32, "EXACT": False, "num_warps": 4}, 6),
        (0, (x, 9, 3.0), {"BLOCK": 32, "EXACT": True, "num_warps": 8}, 7),
        (1, (x, 9, 3.0), {"BLOCK": 32, "EXACT": True, "num_warps": 4}, 8),
        (1, (x, 9, 4.0), {"BLOCK": 32, "EXACT": True, "num_warps": 4}, 8),
    ):
        device.index = index
        warps = options.pop("num_warps")
        launch(kernel, 3, arguments, options, num_warps=warps)
        assert len(kernel.looks) == looks
    assert [(grid, arguments[1:]) for grid, arguments in launches] == [
        ((3, 1, 1), (9, 3.0, 32, True)),
        ((3, 1, 1), (1, 3.0, 32, True)),
        ((3, 1, 1), (9, 4.0, 32, True)),
    ]


def test_profilers_see_every_launch(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton itself launches while a hook is installed: it calls the hook with what it knows of the kernel."""
    launches: list[Any] = []
    kernel = Kernel(Compiled(launches))
    hook = triton.knobs.runtime.launch_enter_hook
    for hooks, found in (([], (1, 1, 1)), ([print], "looked at"), ([], (1, 1, 1))):
        monkeypatch.setattr(hook, "calls", hooks)
        launch(kernel, 1, (torch.zeros(8), 7, 2.0), {"BLOCK": 32, "EXACT": True})
        launch(kernel, 1, (torch.zeros(8), 7, 2.0), {"BLOCK": 32, "EXACT": True})
        assert launches[-1][0] == found


def test_a_repeated_call_runs_on_the_current_stream(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a profiler's hook is installed, of which the recorded call knew nothing."""
    launches: list[Any] = []
    compiled = Compiled(launches)
    kernel, hook = Kernel(compiled), triton.knobs.runtime.launch_enter_hook

    def call(values: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            launch(kernel, 1, (values, 7, 2.0), {"BLOCK": 32, "EXACT": True})
        return torch.empty(2)

    for stream in ("first", "recorded", "third", "fourth"):
        device.stream = stream
        replayed(call, torch.zeros(8))
        assert compiled.streams[-1] == (0, stream)
    assert len(compiled.streams) == len(launches) == 7  # Triton itself launched once
    monkeypatch.setattr(hook, "calls", [print])
    replayed(call, torch.zeros(8))
    assert [launched[0] for launched in launches[-2:]] == ["looked at"] * 2
    assert len(compiled.streams) == 7


def test_descriptors_are_made_again_when_a_call_is_repeated(device: SimpleNamespace) -> None:
    launches: list[Any] = []
    kernel = Kernel(Compiled(launches))

    def call(values: torch.Tensor) -> torch.Tensor:
        launch(kernel, 3, (descriptor(values[64:], [64, 64]), 7, 2.0), {"BLOCK": 32, "EXACT": True})
        return torch.empty(2)

    for calls in range(1, 5):
        values = torch.zeros(128, 64, dtype=torch.bfloat16)
        replayed(call, values)
        assert len(kernel.looks) + len(launches) == calls
    (_, first), (_, last) = launches[0], launches[-1]
    assert len(launches) == 3
    assert last[0].base.data_ptr() == values[64:].data_ptr()
    assert {**vars(last[0]), "base": None} == {**vars(first[0]), "base": None}
    assert last[1:] == first[1:]


def test_each_kernel_runs_its_own_program(device: SimpleNamespace) -> None:
    launches: list[list[Any]] = [[], []]
    kernels, x = [Kernel(Compiled(noted)) for noted in launches], torch.zeros(8)
    for kernel in kernels * 2:
        launch(kernel, 1, (x, 7, 2.0), {"BLOCK": 32, "EXACT": True})
    assert [len(kernel.looks) for kernel in kernels] == [1, 1]
    assert [len(noted) for noted in launches] == [1, 1]


def test_launches_without_compilation_are_not_cached(device: SimpleNamespace) -> None:
    kernel = Kernel(None)
    for _ in range(2):
        launch(kernel, 1, (torch.zeros(8), 7, 2.0), {"BLOCK": 32, "EXACT": True})
    assert len(kernel.looks) == 2


def test_full_cache_is_cleared(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching, "_MOST", 2)
    kernel = Kernel(Compiled([]))
    for block in (16, 32, 64, 16):
        launch(kernel, 1, (torch.zeros(8), 7, 2.0), {"BLOCK": block, "EXACT": True})
    assert [constants["BLOCK"] for *_, constants in kernel.looks] == [16, 32, 64, 16]
    assert len(launching._compiled) == 2


def test_untested_releases_launch_through_triton(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_IS_TRIED", False)
    kernel, launches = Kernel(None), 3
    for _ in range(launches):
        launch(kernel, 5, (torch.zeros(8), 7, 2.0), {"BLOCK": 32, "EXACT": True}, num_warps=4, maxnreg=64)
    given = {"BLOCK": 32, "EXACT": True, "num_warps": 4, "maxnreg": 64}
    assert [(grid, constants) for grid, _, constants in kernel.looks] == [((5,), given)] * launches


def test_the_interpreter_gets_no_options() -> None:
    given: list[dict[str, Any]] = []
    kernel: dict[tuple[int, ...], Any] = {(5,): lambda *_, **constants: given.append(constants)}
    launch(kernel, 5, (), {"BLOCK": 32}, num_warps=4, maxnreg=64, enable_fp_fusion=False)
    assert given == [{"BLOCK": 32}]


def test_kernels_are_specialised_for_types_and_constants_only() -> None:
    def function(x, count: "i64", factor: "fp32", EXACT: tl.constexpr, BLOCK: tl.constexpr):  # noqa: F821
        pass

    made = launching.kernel(function)
    if isinstance(made, triton.JITFunction):
        assert all(each.do_not_specialize or each.is_constexpr for each in made.params)
        assert all(each.do_not_specialize_on_alignment or each.is_constexpr for each in made.params)
    names = [name for name, each in inspect.signature(function).parameters.items() if launching._is_constant(each)]
    assert names == ["EXACT", "BLOCK"]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 31, 32, 33, 2**40, 2**40 + 1])
def test_sizes(count: int) -> None:
    assert cdiv(count, 32) == triton.cdiv(count, 32)
    assert next_power_of_2(count) == max(triton.next_power_of_2(count), 1)
