"""The launches of `xent check triton --full`, recorded on CPU tensors without running a kernel.

A recording has everything that a kernel is compiled for: the kinds of its arguments, constants and options. Calls on
the CPU take the same paths as on a GPU, except where PyTorch computes something else there before a launch (float32
products of 16-bit factors), so that a few signatures of linear losses differ.
"""

import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from triton.experimental.gluon.language.nvidia import hopper as instructions

import xent
from xent.backends.torch import planned
from xent.backends.triton import TritonBackend, largest, launches, machine
from xent.backends.triton.hopper import products
from xent.command.check.case import Case, make_inputs, placed
from xent.command.check.harnesses import harness_of
from xent.command.check.run import FUNCTIONS, cases_of
from xent.core.call import Activation

__all__ = ["Launch", "check_cases", "hopper", "rebuilt", "record"]

_MULTIPROCESSORS = 132
IN_SHARDS = (
    Case("cross_entropy", (24,), 1000, "float32", "", {"weight": True, "sample_weight": True}),
    *(Case("linear_cross_entropy", (24,), 1000, dtype, "", hidden=32) for dtype in ("float32", "bfloat16", "float16")),
    Case("linear_cross_entropy", (24,), 1000, "bfloat16", "", {"sample_weight": True}, "none", hidden=32),
    Case("linear_log_probs", (24,), 1000, "bfloat16", "", {"temperature": "rows"}, "none", hidden=32, entropy=True),
)
"""Calls with a vocabulary in shards, which compare their rows between ranks."""
_PATCHED = {"is_padded": lambda tensor: True, "looks_at_targets": lambda device: False}


class Launch(NamedTuple):
    """A kernel and what it is compiled for."""

    module: str
    name: str
    arguments: tuple[Any, ...]
    """Of each: None, a number, ("tensor", dtype, whether aligned), ("group", class, members) or a descriptor."""
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]


def check_cases(full: bool) -> list[Case]:
    """Return the cases of the check on a GPU."""
    from xent.command.check.triton_harness import TritonHarness

    harness = TritonHarness("cuda")
    return [
        case for function in FUNCTIONS for dtype in harness.dtypes for case in cases_of(harness, function, dtype, full)
    ]


def record(cases: Iterable[Case]) -> tuple[list[Launch], list[str]]:
    """Return the different launches of cases and of the Hopper products, and descriptions of cases that failed."""
    found = {}
    failed = []
    with _recording(found):
        for case in cases:
            try:
                _call(case)
            except Exception as error:
                failed.append(f"{case}: {type(error).__name__}: {error}")
        if hasattr(instructions, "warpgroup_mma"):  # not in Triton 3.4, which cannot compile the products
            _call_hopper()
            with patch.object(products, "off", lambda *_: None):  # the kernel that joins the products' sums
                _call(Case("linear_log_probs", (24,), 1000, "bfloat16", "", hidden=32, reduction="none", entropy=True))
        for dtype in (torch.bfloat16, torch.float32):
            for k in (3, 64):
                largest.largest(torch.zeros(2, 5000, dtype=dtype), k, Activation())
            largest.count_above(torch.zeros(2, 5000, dtype=dtype), torch.zeros(2))
        with _alone() as group:
            for case in IN_SHARDS:
                _call(case, vocab_parallel=xent.VocabParallel(group, first=0, size=case.vocabulary))
    return list(found), failed


@contextmanager
def _recording(found: dict[Launch, None]) -> Iterator[None]:
    """Let backend "triton" serve CPU tensors, and add its launches to `found` instead of running them."""
    from xent.backends.triton import steps

    def launch(self: Any, kind: Any, programs: int, *arguments: Any) -> None:
        function, kinds = self._function, tuple(map(_kind, arguments))
        constants, options = tuple(self._constants.items()), tuple(self._options.items())
        found[Launch(function.fn.__module__, function.__name__, kinds, constants, options)] = None

    launch_partition = steps.TritonSteps.partition

    def partition(self: Any) -> tuple[torch.Tensor, torch.Tensor]:
        launch_partition(self)
        return torch.arange(self.setting.count), torch.tensor(self.setting.count)

    replaced = _PATCHED | {"multiprocessors": lambda device: _MULTIPROCESSORS}
    planned.clear()
    with ExitStack() as stack:
        stack.enter_context(patch.object(TritonBackend, "missing", None))
        stack.enter_context(patch.object(machine, "DEVICES", ("cpu",)))
        stack.enter_context(patch.object(launches.Launch, "__call__", launch))
        stack.callback(planned.clear)
        stack.enter_context(patch.object(steps.TritonSteps, "partition", partition))
        # A case may skip rows by their targets, in code that all backends of PyTorch share.
        for module in [one for name, one in sys.modules.items() if name.startswith("xent.backends.t")]:
            if module is not launches:
                for name, value in replaced.items():
                    if name in vars(module):
                        stack.enter_context(patch.object(module, name, value))
        yield


def _kind(argument: Any) -> Any:
    if argument is None or isinstance(argument, (bool, int, float)):
        return None if argument is None else type(argument)(1)  # numbers are not specialised
    if isinstance(argument, tuple):
        return "group", type(argument), tuple(map(_kind, argument))
    if isinstance(argument, torch.Tensor):
        return "tensor", argument.dtype, argument.data_ptr() % 16 == 0
    return "descriptor", argument.base.dtype, tuple(argument.block_shape)


def rebuilt(kind: Any) -> Any:
    """Return an argument of a kind, with little memory."""
    if not isinstance(kind, tuple):
        return kind
    what, first, second = kind
    if what == "group":
        return first(*map(rebuilt, second))
    if what == "tensor":
        return torch.empty(64, dtype=first)[0 if second else 1 :]
    return products._descriptor(torch.empty(second, dtype=first), second[0])


@contextmanager
def _alone() -> Iterator[Any]:
    """Return a context with a process group of this process, in which a call with shards makes its launches."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        yield dist.group.WORLD
        dist.destroy_process_group()


def _call(case: Case, **more: Any) -> None:
    """Call the function of a case with and without gradients. `more`: other arguments."""
    backend = TritonBackend()
    harness = harness_of(backend, "cpu")
    inputs = make_inputs(case)
    leaves = {name: harness.array(value, case.dtype) for name, value in inputs.differentiable.items()}
    options = placed(harness, inputs.options, case.wide)
    if case.trained:
        leaves["target"] = harness.array(inputs.target, case.wide)
    else:
        of_logits = case.is_divergence and case.teacher in ("logits", "linear")
        options[case.target] = placed(harness, inputs.target, case.dtype if of_logits else case.wide)
    given = {case.results[0]: inputs.upstream} | inputs.others

    def call() -> dict[str, Any]:
        found = getattr(xent, case.function)(**leaves, **options, **case.keywords, **more, backend="triton")
        return case.results_in(found)

    if case.alone:
        call()
    for leaf in leaves.values():
        leaf.requires_grad_()
    results = call()
    pairs = [(results[name], harness.array(values, case.wide)) for name, values in given.items() if values is not None]
    torch.autograd.backward([result for result, _ in pairs], [values for _, values in pairs])


def _call_hopper() -> None:
    """Launch the product for Hopper GPUs with all its constants."""
    for dtype in (torch.bfloat16, torch.float16):
        hidden, weight = torch.zeros(128, 64, dtype=dtype), torch.zeros(256, 64, dtype=dtype)
        classes, sums, grad = (
            torch.zeros(128, dtype=torch.int32),
            torch.zeros(4, 1, 128),
            torch.zeros(128, 256, dtype=dtype),
        )
        numbers = launches.Numbers(1.0, 0.0, 0.0, 5.0, 0.5)
        for capped, entropy in product((False, True), repeat=2):
            variant = products.Variant(dtype, capped, entropy)
            products.product(variant, numbers, hidden, weight, classes, None, sums)
            writing = variant._replace(writes=True)
            products.product(writing, numbers, hidden, weight, classes, sums[:, 0], grad)


def hopper(launch: Launch) -> bool:
    """Whether a kernel is for Hopper GPUs alone: it uses their copy engine and matrix instructions."""
    return ".hopper." in launch.module
