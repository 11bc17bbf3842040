"""Run pairs of calls that differ in one thing, each pair in its own process; `test_second_calls` runs this program.

`python -m tests.torch.second_calls BACKEND DEVICE FUNCTION` writes the results as JSON. Each process is a fork of one
that has imported everything but made no call, so that the state after a first call can be compared with a fresh one.
"""

import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import xent
from xent.backends import TABLE

__all__ = ["FUNCTIONS", "SAMPLE", "Call", "main", "pairs_of"]

FUNCTIONS = ("cross_entropy", "linear_cross_entropy", "log_probs", "linear_log_probs")

ROWS, WIDTH, CLASSES = 6, 8, 12
REPEATED = 3
"""How often the first call is made."""


class SeesFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class SeesOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "xent":
            self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    """Behaves like a Tensor."""


class Call:
    """The arguments and the context of one call. The same objects may be changed and passed again."""

    def __init__(self, device: str, backend: str, function: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        self.device, self.function, self.linear = device, function, function.startswith("linear")
        self.tensors: dict[str, Any] = {"logits": drawn(ROWS, CLASSES).requires_grad_()}
        if self.linear:
            self.tensors = {
                "input": drawn(ROWS, WIDTH).requires_grad_(),
                "linear_weight": drawn(CLASSES, WIDTH).requires_grad_(),
                "linear_bias": drawn(CLASSES).requires_grad_(),
            }
        self.tensors["target"] = torch.arange(ROWS, device=device)
        self.options: dict[str, Any] = {"backend": backend, "stats": ["nll"]}
        if function.endswith("log_probs"):
            self.options = {"backend": backend, "stats": ["lse"], "entropy": True}
        self.around: Callable[[], Any] = contextlib.nullcontext
        self.how = "backward"
        self.upstream: Callable[[Tensor], Any] = lambda loss: (
            torch.linspace(1, 2, loss.numel()).view(loss.shape).to(loss)
        )

    @property
    def first(self) -> str:
        return "input" if self.linear else "logits"

    def loss(self, **changed: Any) -> Any:
        arguments = {**self.tensors, **self.options, **changed}
        return getattr(xent, self.function)(**arguments)

    def run(self) -> Any:
        """Return all results in a form for JSON."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with self.around() as context:
                    made = self._run()
                made.append(sorted(getattr(context, "seen", ())))
            except Exception as error:
                made = [type(error).__name__, str(error).partition("\n")[0]]
        return [[described(one) for one in made], sorted({str(one.message) for one in caught})]

    def _run(self) -> list[Any]:
        first = self.tensors[self.first]
        if self.how != "backward":
            return [TRANSFORMS[self.how](lambda value: value_of(self.loss(**{self.first: value})), first)]
        made = self.loss()
        made = made if isinstance(made, tuple) else (made,)
        results = [one for part in made for one in (vars(part).items() if isinstance(part, xent.Stats) else (part,))]
        asking = [one for one in made if isinstance(one, Tensor) and one.requires_grad]
        if not asking:
            return results
        leaves = [one for one in self.tensors.values() if isinstance(one, Tensor) and one.requires_grad]
        upstream = [torch.linspace(1, 2, one.numel(), device=one.device).view(one.shape).to(one) for one in asking]
        return [*results, *torch.autograd.grad(asking, leaves, upstream, allow_unused=True)]


def value_of(made: Any) -> Any:
    return made[0] if isinstance(made, tuple) else made


def forward_mode(function: Any, value: Tensor) -> Any:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(value.detach(), torch.ones_like(value)))


def backward_twice(function: Any, value: Tensor, retain: bool) -> Any:
    loss = function(value).sum()
    passes = [torch.autograd.grad(loss, value, retain_graph=retain)[0].clone() for _ in range(2)]
    return passes[1]


def twice_differentiated(function: Any, value: Tensor) -> Any:
    (gradient,) = torch.autograd.grad(function(value).sum(), value, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), value)[0]


def batched(function: Any, value: Tensor) -> Any:
    upstream = torch.tensor([1.0, 2.0], device=value.device)
    return torch.autograd.grad(function(value).sum(), value, upstream, is_grads_batched=True)[0]


def negative_upstream(function: Any, value: Tensor) -> Any:
    loss = function(value).sum()
    upstream = torch.complex(torch.zeros_like(loss), torch.ones_like(loss)).detach().conj().imag
    return torch.autograd.grad(loss, value, upstream)[0]


def faked(function: Any, value: Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        made = function(mode.from_tensor(value.detach()))
    return [str(made.shape), str(made.dtype), type(made).__name__]


def compiled(function: Any, value: Tensor) -> Any:
    torch._dynamo.reset()
    made = torch.compile(function, backend="aot_eager")(value).sum()
    return torch.autograd.grad(made, value)[0]


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "func.grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x.detach()),
    "func.jvp": lambda f, x: torch.func.jvp(f, (x.detach(),), (x.detach(),)),
    "forward mode": forward_mode,
    "vmap": lambda f, x: torch.vmap(f)(x.detach().expand(2, *x.shape)),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x.detach()),
    "jit.trace": lambda f, x: torch.jit.trace(f, x.detach()),
    "fake tensors": faked,
    "compiled": compiled,
    "retained": lambda f, x: backward_twice(f, x, True),
    "not retained": lambda f, x: backward_twice(f, x, False),
    "create_graph": twice_differentiated,
    "is_grads_batched": batched,
    "negative upstream": negative_upstream,
    "checkpoint": lambda f, x: torch.autograd.grad(checkpoint(lambda x: f(x * 2).sum(), x, use_reentrant=False), x)[0],
}


def described(value: Any) -> Any:
    """Return a value in a form for JSON; of an array, a hash of its bits."""
    if isinstance(value, Tensor):
        facts = [type(value).__name__, str(value.dtype), list(value.shape), str(value.device), value.requires_grad]
        if value.device.type == "meta":
            return facts
        bits = value.detach().resolve_neg().cpu().contiguous().flatten().view(torch.uint8)
        return [*facts, hashlib.sha256(bits.numpy().tobytes()).hexdigest()]
    if isinstance(value, (np.ndarray, np.generic)):
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, (tuple, list)):
        return [described(one) for one in value]
    return value if isinstance(value, (str, int, float, type(None))) else repr(value)


Change = Callable[[Call], None]


def option(**changed: Any) -> Change:
    return lambda call: call.options.update(changed)


def without(name: str) -> Change:
    def change(call: Call) -> None:
        call.options.pop(name, None)
        call.tensors.pop(name, None)

    return change


def tensor(name: str, make: Callable[[Tensor], Any]) -> Change:
    """Replace one tensor; "" is the first, logits or input."""

    def change(call: Call) -> None:
        key = name or call.first
        old = call.tensors[key]
        made = make(old.detach())
        asks = isinstance(made, Tensor) and made.is_floating_point()
        call.tensors[key] = made.requires_grad_(old.requires_grad) if asks else made

    return change


def floats(make: Callable[[Tensor], Tensor]) -> Change:
    """Change all float tensors."""

    def change(call: Call) -> None:
        for name, value in call.tensors.items():
            if value.is_floating_point():
                call.tensors[name] = make(value.detach()).requires_grad_(value.requires_grad)

    return change


def added(name: str, make: Callable[[], Any]) -> Change:
    def change(call: Call) -> None:
        made = make()
        call.options[name] = made.to(call.device) if isinstance(made, Tensor) else made

    return change


def around(context: Callable[[], Any]) -> Change:
    return lambda call: setattr(call, "around", context)


def how(name: str) -> Change:
    return lambda call: setattr(call, "how", name)


def rows(count: int) -> Change:
    def change(call: Call) -> None:
        old = call.tensors[call.first]
        call.tensors[call.first] = old.detach().repeat(count, 1)[:count].requires_grad_(old.requires_grad)
        call.tensors["target"] = torch.arange(count, device=call.device) % CLASSES

    return change


def classes(count: int) -> Change:
    def change(call: Call) -> None:
        for name in ("linear_weight", "linear_bias") if call.linear else ("logits",):
            old = call.tensors[name].detach()
            cut = old[:count] if call.linear else old[:, :count].clone()
            call.tensors[name] = cut.requires_grad_()
        call.tensors["target"] = call.tensors["target"] % count

    return change


def shaped(*leading: int) -> Change:
    def change(call: Call) -> None:
        old = call.tensors[call.first]
        call.tensors[call.first] = old.detach().view(*leading, old.shape[-1]).requires_grad_()
        call.tensors["target"] = call.tensors["target"].view(*leading)

    return change


def asking(*names: str) -> Change:
    def change(call: Call) -> None:
        for name, value in call.tensors.items():
            if value.is_floating_point():
                value.requires_grad_(name in names)

    return change


def on_meta(call: Call) -> None:
    for name, value in call.tensors.items():
        call.tensors[name] = value.detach().to("meta").requires_grad_(value.requires_grad)


def data_replaced(call: Call) -> None:
    """Give the same tensor objects other memory, another shape and another dtype."""
    call.tensors[call.first].data = torch.cat([call.tensors[call.first].data] * 2)[: ROWS - 1].clone()
    call.tensors["target"].data = call.tensors["target"].data[: ROWS - 1].int()


def values_changed(call: Call) -> None:
    call.tensors[call.first].data.mul_(2)


def into_numpy(call: Call) -> None:
    call.tensors = {name: value.detach().cpu().numpy() for name, value in call.tensors.items()}
    call.options["backend"] = "auto"


def both(*changes: Change) -> Change:
    def change(call: Call) -> None:
        for one in changes:
            one(call)

    return change


def autocast(dtype: torch.dtype) -> Callable[[], Any]:
    """Return autocast for the program's device."""
    return lambda: torch.autocast(sys.argv[2].partition(":")[0], dtype)


def strided(value: Tensor) -> Tensor:
    return value.t().contiguous().t()


def shared(value: Tensor) -> Tensor:
    return value[:1].expand(value.shape)


def misaligned(value: Tensor) -> Tensor:
    return torch.cat([value.new_zeros(1), value.flatten()])[1:].view(value.shape)


def sliced(value: Tensor) -> Tensor:
    return torch.cat([value, value], -1)[:, : value.shape[-1]]


def negative(value: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(value), -value).conj().imag


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextlib.contextmanager
def default(setting: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setting(value)
    try:
        yield
    finally:
        setting(before)


def stats_mutated(call: Call) -> None:
    call.options["stats"].append("lse")


def stats_spoilt(call: Call) -> None:
    call.options["stats"][0] = "perplexity"


def target_spoilt(call: Call) -> None:
    call.tensors["target"][1] = CLASSES


def target_ignored(call: Call) -> None:
    call.tensors["target"][1:4] = -100


def nothing(call: Call) -> None:
    pass


PLAIN = nothing
ONES = torch.ones  # called in the call's own process
PAIRS: dict[str, tuple[Change, Change]] = {
    # Shapes.
    "more rows": (PLAIN, rows(ROWS + 1)),
    "fewer rows": (PLAIN, rows(2)),
    "one row": (PLAIN, rows(1)),
    "no rows": (PLAIN, rows(0)),
    "as many rows in two axes": (shaped(2, 3), shaped(3, 2)),
    "another axis": (PLAIN, shaped(2, 3)),
    "fewer classes": (PLAIN, classes(CLASSES - 1)),
    "one class": (PLAIN, classes(1)),
    "target of another shape": (PLAIN, tensor("target", lambda y: y[:-1])),
    "class axis": (
        both(tensor("", lambda x: x[:, :ROWS].clone()), classes(ROWS)),
        both(tensor("", lambda x: x[:, :ROWS].clone()), classes(ROWS), option(axis=0)),
    ),
    # Dtypes and devices.
    "bfloat16": (PLAIN, floats(Tensor.bfloat16)),
    "float16": (PLAIN, floats(Tensor.half)),
    "float64": (PLAIN, floats(Tensor.double)),
    "float16 after bfloat16": (floats(Tensor.bfloat16), floats(Tensor.half)),
    "first alone in bfloat16": (PLAIN, tensor("", Tensor.bfloat16)),
    "integers as logits": (PLAIN, tensor("", lambda x: x.detach().int())),
    "meta": (PLAIN, on_meta),
    "target on meta": (PLAIN, tensor("target", lambda y: y.to("meta"))),
    # Strides.
    "transposed": (PLAIN, tensor("", strided)),
    "sliced": (PLAIN, tensor("", sliced)),
    "expanded": (PLAIN, tensor("", shared)),
    "misaligned": (PLAIN, tensor("", misaligned)),
    "target strided": (PLAIN, tensor("target", lambda y: y.repeat_interleave(2)[::2])),
    "negative bit": (PLAIN, tensor("", negative)),
    # The same objects, changed.
    "values": (PLAIN, values_changed),
    "memory, shape and dtype": (PLAIN, data_replaced),
    "target out of range": (PLAIN, target_spoilt),
    "target ignored": (PLAIN, target_ignored),
    "names appended to stats": (PLAIN, stats_mutated),
    "names spoilt in stats": (PLAIN, stats_spoilt),
    # Types.
    "a Parameter": (PLAIN, tensor("", torch.nn.Parameter)),
    "a subclass": (PLAIN, tensor("", lambda x: x.as_subclass(Subclass))),
    "sparse": (PLAIN, tensor("", Tensor.to_sparse)),
    "a list": (PLAIN, tensor("", Tensor.tolist)),
    "numpy": (PLAIN, into_numpy),
    # Required gradients.
    "no gradient": (PLAIN, asking()),
    "gradient of the first alone": (PLAIN, asking("logits", "input")),
    "gradient of the classifier alone": (PLAIN, asking("logits", "linear_weight")),
    "gradient of the bias alone": (PLAIN, asking("logits", "linear_bias")),
    "gradient of another": (asking("logits", "linear_bias"), asking("logits", "input")),
    "no bias": (PLAIN, without("linear_bias")),
    "no_grad": (PLAIN, around(torch.no_grad)),
    "inference_mode": (PLAIN, around(torch.inference_mode)),
    "inference_mode after no_grad": (around(torch.no_grad), around(torch.inference_mode)),
    # The context of the call.
    "autocast": (PLAIN, around(autocast(torch.bfloat16))),
    "another autocast": (
        around(autocast(torch.bfloat16)),
        around(autocast(torch.float16)),
    ),
    "autocast of other dtypes": (
        both(around(autocast(torch.bfloat16)), tensor("", Tensor.bfloat16)),
        around(contextlib.nullcontext),
    ),
    "dispatch mode": (PLAIN, around(SeesOperations)),
    "function mode": (PLAIN, around(SeesFunctions)),
    "default device": (PLAIN, around(lambda: torch.device("meta"))),
    "default dtype": (PLAIN, around(lambda: default(torch.set_default_dtype, torch.float64, torch.float32))),
    "deterministic": (PLAIN, around(lambda: default(torch.use_deterministic_algorithms, True, False))),
    "saved on the CPU": (PLAIN, around(torch.autograd.graph.save_on_cpu)),
    "anomaly": (PLAIN, around(torch.autograd.detect_anomaly)),
    "XENT_BACKEND": (
        option(backend="auto"),
        both(option(backend="auto"), around(lambda: environment("XENT_BACKEND", "mlx"))),
    ),
    "no such XENT_BACKEND": (
        option(backend="auto"),
        both(option(backend="auto"), around(lambda: environment("XENT_BACKEND", "abacus"))),
    ),
    "XENT_CHECK_TARGETS": (
        target_spoilt,
        both(target_spoilt, around(lambda: environment("XENT_CHECK_TARGETS", "1"))),
    ),
    "backend": (PLAIN, option(backend="auto")),
    "backend of others": (PLAIN, option(backend="numpy")),
    "no such backend": (PLAIN, option(backend="abacus")),
    **{name: (PLAIN, how(name)) for name in TRANSFORMS},
    "compiled after func.grad": (how("func.grad"), how("compiled")),
    "not retained after retained": (how("retained"), how("not retained")),
    # Options.
    "reduction sum": (PLAIN, option(reduction="sum")),
    "reduction none": (PLAIN, option(reduction="none")),
    "reduction none of all that differs": (both(option(reduction="none"), rows(3)), option(reduction="none")),
    "no such reduction": (PLAIN, option(reduction="average")),
    "label_smoothing": (PLAIN, option(label_smoothing=0.1)),
    "another label_smoothing": (option(label_smoothing=0.1), option(label_smoothing=0.2)),
    "label_smoothing too large": (option(label_smoothing=0.1), option(label_smoothing=1.1)),
    "label_smoothing True after 1.0": (option(label_smoothing=1.0), option(label_smoothing=True)),
    "label_smoothing 1 after 1.0": (option(label_smoothing=1.0), option(label_smoothing=1)),
    "label_smoothing nan": (option(label_smoothing=0.1), option(label_smoothing=float("nan"))),
    "label_smoothing of NumPy": (option(label_smoothing=0.1), option(label_smoothing=np.float64(0.1))),
    "label_smoothing of NumPy, float32": (option(label_smoothing=0.1), option(label_smoothing=np.float32(0.1))),
    "label_smoothing a string": (option(label_smoothing=0.1), option(label_smoothing="0.1")),
    "label_smoothing a tensor": (option(label_smoothing=0.5), added("label_smoothing", lambda: torch.tensor(0.5))),
    "z_loss": (PLAIN, option(z_loss=1e-2)),
    "another z_loss": (option(z_loss=1e-2), option(z_loss=1e-3)),
    "z_loss False after 0": (option(z_loss=0), option(z_loss=False)),
    "softcap": (PLAIN, option(softcap=2.0)),
    "another softcap": (option(softcap=2.0), option(softcap=3)),
    "softcap True after 1": (option(softcap=1), option(softcap=True)),
    "softcap 0": (option(softcap=2.0), option(softcap=0.0)),
    "logit_scale": (PLAIN, option(logit_scale=0.5)),
    "logit_scale negative zero": (option(logit_scale=0.0), option(logit_scale=-0.0)),
    "logit_scale a tensor": (option(logit_scale=0.5), added("logit_scale", lambda: torch.tensor(0.5))),
    "logit_scale a number after a tensor": (added("logit_scale", lambda: torch.tensor(0.5)), option(logit_scale=0.5)),
    "logit_scale another tensor": tuple(added("logit_scale", lambda v=v: torch.tensor(v)) for v in (0.5, -0.7)),
    "logit_scale nan in a tensor": tuple(added("logit_scale", lambda v=v: torch.tensor(v)) for v in (0.5, np.nan)),
    "logit_scale a bool tensor": tuple(added("logit_scale", lambda v=v: torch.tensor(v)) for v in (1, True)),
    "logit_scale of one element": tuple(added("logit_scale", lambda v=v: torch.tensor(v)) for v in (0.5, [0.5])),
    "logit_scale trained": (
        added("logit_scale", lambda: torch.tensor(0.5)),
        added("logit_scale", lambda: torch.tensor(0.5, requires_grad=True)),
    ),
    "softcap a tensor": (option(softcap=2.0), added("softcap", lambda: torch.tensor(2.0))),
    "softcap in a tensor, none before": (PLAIN, added("softcap", lambda: torch.tensor(2.0))),
    "softcap trained": (
        added("softcap", lambda: torch.tensor(2.0)),
        added("softcap", lambda: torch.tensor(2.0, requires_grad=True)),
    ),
    "softcap and logit_scale tensors": (
        both(added("softcap", lambda: torch.tensor(2.0)), added("logit_scale", lambda: torch.tensor(0.5))),
        both(added("softcap", lambda: torch.tensor(3.0)), added("logit_scale", lambda: torch.tensor(0.3))),
    ),
    "logit_scale True after 1.0": (option(logit_scale=1.0), option(logit_scale=True)),
    "ignore_index": (PLAIN, option(ignore_index=2)),
    "ignore_index True after 1": (option(ignore_index=1), option(ignore_index=True)),
    "ignore_index 1.0 after 1": (option(ignore_index=1), option(ignore_index=1.0)),
    "ignore_index too large": (option(ignore_index=1), option(ignore_index=2**63)),
    "no stats": (PLAIN, option(stats=())),
    "other stats": (PLAIN, option(stats=("entropy", "accuracy"))),
    "stats in a set": (PLAIN, option(stats={"nll"})),
    "stats in another order": (option(stats=("lse", "nll")), option(stats=["nll", "lse"])),
    "stats as a string": (PLAIN, option(stats="nll")),
    "inplace": (PLAIN, option(inplace=True)),
    "inplace 1 after True": (option(inplace=True), option(inplace=1)),
    "inplace where memory is shared": (option(inplace=True), both(option(inplace=True), tensor("", shared))),
    "axis True after 1": (option(axis=1), option(axis=True)),
    "axis out of range": (option(axis=1), option(axis=2)),
    "shift": (PLAIN, option(shift=1)),
    "shift True after 1": (option(shift=1), option(shift=True)),
    "shift negative": (option(shift=1), option(shift=-1)),
    "workspace": (PLAIN, option(workspace=CLASSES * 4 * 2)),
    "workspace True after 1": (option(workspace=1), option(workspace=True)),
    "workspace 0": (option(workspace=1), option(workspace=0)),
    # Optional arrays.
    "class weight": (PLAIN, added("weight", lambda: torch.arange(1.0, CLASSES + 1))),
    "class weight gone": (added("weight", lambda: torch.arange(1.0, CLASSES + 1)), without("weight")),
    "class weight, float64": (
        added("weight", lambda: torch.arange(1.0, CLASSES + 1)),
        added("weight", lambda: torch.arange(1.0, CLASSES + 1).double()),
    ),
    "class weight that asks": (
        added("weight", lambda: ONES(CLASSES)),
        added("weight", lambda: ONES(CLASSES, requires_grad=True)),
    ),
    "class weight that asks, after no_grad": (
        both(around(torch.no_grad), added("weight", lambda: ONES(CLASSES, requires_grad=True))),
        around(contextlib.nullcontext),
    ),
    "class weight of another shape": (added("weight", lambda: ONES(CLASSES)), added("weight", lambda: ONES(ROWS))),
    "sample_weight": (PLAIN, added("sample_weight", lambda: torch.arange(ROWS).float())),
    "sample_weight a mask": (
        added("sample_weight", lambda: (torch.arange(ROWS) % 2).float()),
        added("sample_weight", lambda: torch.arange(ROWS) % 2 == 0),
    ),
    "sample_weight of another shape": (
        added("sample_weight", lambda: ONES(ROWS)),
        added("sample_weight", lambda: ONES(ROWS + 1)),
    ),
    "normalizer": (PLAIN, option(normalizer=3)),
    "another normalizer": (option(normalizer=3), option(normalizer=4.0)),
    "normalizer True after 1": (option(normalizer=1), option(normalizer=True)),
    "normalizer a tensor": (option(normalizer=3), added("normalizer", lambda: torch.tensor(3))),
    "another normalizer, tensors": (
        added("normalizer", lambda: torch.tensor(3.0)),
        added("normalizer", lambda: torch.tensor(4.0)),
    ),
    "normalizer of one element": (
        added("normalizer", lambda: torch.tensor(3.0)),
        added("normalizer", lambda: torch.tensor([3.0])),
    ),
    "normalizer that asks": (
        added("normalizer", lambda: torch.tensor(3.0)),
        added("normalizer", lambda: torch.tensor(3.0, requires_grad=True)),
    ),
    "normalizer, then a sum": (option(normalizer=3), option(reduction="sum")),
    "a sum, then a normalizer": (option(reduction="sum"), option(normalizer=3)),
    "rows, then a normalizer": (option(reduction="none"), added("normalizer", lambda: torch.tensor(3.0))),
    "normalizer negative": (option(normalizer=3), option(normalizer=-3)),
    "target int32": (PLAIN, tensor("target", Tensor.int)),
    "target uint8": (PLAIN, tensor("target", lambda y: y.to(torch.uint8))),
    "target float": (PLAIN, tensor("target", Tensor.float)),
    "target of probabilities": (
        PLAIN,
        tensor("target", lambda y: torch.nn.functional.one_hot(y, CLASSES).float() / 2),
    ),
}


SAMPLE = dict(list(PAIRS.items())[::8])
"""Pairs for accelerators, where every process takes seconds to start."""


def support(*values: int, offsets: Any = None, make: Callable[[Tensor], Any] = Tensor.clone) -> Change:
    """Let each row have two classes, its target and the next, or these."""

    def change(call: Call) -> None:
        ids = torch.tensor(values or [(row + more) % CLASSES for row in range(ROWS) for more in (0, 1)])
        ends = torch.arange(0, 2 * ROWS + 1, 2) if offsets is None else torch.tensor(offsets)
        call.options["support"] = xent.Support(make(ids.to(call.device)), ends.to(call.device))

    return change


def temperatures(make: Callable[[Tensor], Any] = Tensor.clone) -> Change:
    return added("temperature", lambda: make(torch.linspace(0.5, 2, ROWS)))


def temperature_spoilt(call: Call) -> None:
    call.options["temperature"][1] = 0


def as_loss(call: Call) -> None:
    call.function = call.function.replace("log_probs", "cross_entropy")
    call.options = {"backend": call.options["backend"], "stats": ["entropy", "lse"], "reduction": "none"}


def as_log_probs(call: Call) -> None:
    call.function = call.function.replace("cross_entropy", "log_probs")
    call.options = {"backend": call.options["backend"], "stats": ["lse"], "entropy": True}


SAMPLING: dict[str, tuple[Change, Change]] = {
    "temperature": (PLAIN, option(temperature=0.5)),
    "another temperature": (option(temperature=0.5), option(temperature=0.7)),
    "another temperature under a softcap": (
        option(temperature=0.5, softcap=2.0),
        option(temperature=0.7, softcap=2.0),
    ),
    "another softcap at a temperature": (option(temperature=0.5, softcap=2.0), option(temperature=0.5, softcap=3.0)),
    "a scale in a tensor at another temperature": (
        both(option(temperature=0.5), added("logit_scale", lambda: torch.tensor(0.7))),
        both(option(temperature=0.8), added("logit_scale", lambda: torch.tensor(0.7))),
    ),
    "another scale at a temperature": (option(temperature=0.5), option(temperature=0.5, logit_scale=2.0)),
    "temperature True after 1": (option(temperature=1), option(temperature=True)),
    "temperature 1 after 1.0": (option(temperature=1.0), option(temperature=1)),
    "temperature 0": (option(temperature=1.0), option(temperature=0.0)),
    "temperature negative": (option(temperature=1.0), option(temperature=-1.0)),
    "temperature nan": (option(temperature=1.0), option(temperature=float("nan"))),
    "temperature infinite": (option(temperature=1.0), option(temperature=float("inf"))),
    "temperature of NumPy": (option(temperature=0.5), option(temperature=np.float32(0.5))),
    "temperature a string": (option(temperature=0.5), option(temperature="0.5")),
    "temperature None": (option(temperature=0.5), option(temperature=None)),
    "temperature of each row": (PLAIN, temperatures()),
    "temperature of each row, then a number": (temperatures(), option(temperature=0.5)),
    "temperature of each row, then none": (temperatures(), without("temperature")),
    "temperature of each row, other values": (temperatures(), temperatures(lambda t: t.flip(0))),
    "temperature of each row, not all > 0": (temperatures(), temperature_spoilt),
    "temperature of each row under a softcap": (temperatures(), both(temperatures(), option(softcap=2.0))),
    "temperature of each row, float64": (temperatures(), temperatures(Tensor.double)),
    "temperature of each row, integers": (temperatures(), temperatures(lambda t: t.ceil().int())),
    "temperature of each row, another shape": (temperatures(), temperatures(lambda t: t[:, None])),
    "temperature of no row": (temperatures(), temperatures(lambda t: t[0])),
    "temperature of each row, of NumPy": (temperatures(), temperatures(Tensor.numpy)),
    "temperature that asks": (temperatures(), temperatures(lambda t: t.requires_grad_())),
    "temperature that asks, after no_grad": (
        both(around(torch.no_grad), temperatures(lambda t: t.requires_grad_())),
        around(contextlib.nullcontext),
    ),
    "support": (PLAIN, support()),
    "support gone": (support(), without("support")),
    "support of other classes": (support(), support(*range(2 * ROWS))),
    "support of other rows": (support(), support(offsets=[0, 4, 4, 6, 8, 10, 12])),
    "support of each row's temperature": (support(), both(support(), temperatures())),
    "support int32": (support(), support(make=Tensor.int)),
    "support of floats": (support(), support(make=Tensor.float)),
    "support in two axes": (support(), support(make=lambda ids: ids[None])),
    "support on meta": (support(), support(make=lambda ids: ids.to("meta"))),
    "support of NumPy": (support(), support(make=Tensor.numpy)),
    "support for fewer rows": (support(), support(offsets=[0, 12])),
    "support whose offsets fall": (support(), support(offsets=[0, 4, 2, 6, 8, 10, 12])),
    "support whose offsets end early": (support(), support(offsets=[0, 2, 4, 6, 8, 10, 11])),
    "support with a class out of range": (support(), support(*range(1, 2 * ROWS + 1))),
    "support with a class twice": (support(), support(*([3] * 2 * ROWS))),
    "a tuple for a support": (support(), option(support=(1, 2))),
    "entropy": (PLAIN, option(entropy=False)),
    "entropy 1 after True": (PLAIN, option(entropy=1)),
    "entropy among the statistics": (PLAIN, option(stats=("entropy",))),
    "no statistics": (PLAIN, option(stats=())),
    "no statistics and no entropy": (PLAIN, option(stats=(), entropy=False)),
    "accuracy": (PLAIN, option(stats=("accuracy", "predictions", "mean_logit", "log_sum_sq_probs"))),
    "a loss's statistics": (PLAIN, option(stats=("z_loss",))),
    "a loss of rows, then log-probabilities": (as_loss, as_log_probs),
    "log-probabilities, then a loss of rows": (PLAIN, as_loss),
} | {
    name: PAIRS[name]
    for name in (
        "more rows", "no rows", "another axis", "fewer classes", "class axis", "bfloat16", "float64", "meta",
        "transposed", "negative bit", "memory, shape and dtype", "target out of range", "target ignored", "a Parameter",
        "a subclass", "numpy", "no gradient", "gradient of the bias alone", "no bias", "no_grad", "inference_mode",
        "autocast", "autocast of other dtypes", "dispatch mode", "default device", "saved on the CPU", "XENT_BACKEND",
        "XENT_CHECK_TARGETS", "backend", "backend of others", "func.grad", "func.jvp", "vmap", "compiled",
        "create_graph", "retained", "not retained", "negative upstream", "checkpoint", "softcap", "logit_scale",
        "logit_scale a tensor", "logit_scale another tensor", "logit_scale trained", "softcap and logit_scale tensors",
        "logit_scale negative zero", "ignore_index", "stats as a string", "shift", "workspace", "target int32",
        "target float",
    )
}  # fmt: skip


def pairs_of(function: str) -> dict[str, tuple[Change, Change]]:
    """Return the pairs of calls of a function."""
    return SAMPLING if function.endswith("log_probs") else PAIRS


def outcomes(pair: tuple[Change, Change], make: Callable[[], Call], order: str) -> Any:
    """Return the results of the last call: alone, after the other one, or in reverse order."""
    before, after = pair
    if order == "alone":
        call = make()
        before(call)
        after(call)
        return call.run()
    if order == "after":
        call = make()
        before(call)
        for _ in range(REPEATED):
            call.run()
        after(call)
        return call.run()
    if order == "back":
        call = make()
        before(call)
        after(call)
        for _ in range(REPEATED):
            call.run()
    call = make()
    before(call)
    return call.run()


def _child(pipe: Connection, work: Callable[[], Any]) -> None:
    try:
        torch.set_num_threads(1)
        pipe.send(work())
    except BaseException:
        pipe.send(["failed", traceback.format_exc()])


def _in_a_fork(work: Callable[[], Any]) -> Any:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(theirs, work))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return ["died"]
    finally:
        process.join()


def main(backend: str, device: str, function: str) -> None:
    """Print {pair: {order: outcome}} of a function."""
    importlib.import_module("tests.torch.loaded")  # calls would otherwise import modules in each process
    on_cpu = device == "cpu"
    for load in TABLE.values() if on_cpu else ():
        load().info()  # not for CUDA: this would initialise it, and a fork cannot do so again
    found: dict[str, dict[str, Any]] = {}
    make = partial(Call, device, backend, function)
    pairs = pairs_of(function)
    plain = _in_a_fork(partial(outcomes, (PLAIN, PLAIN), make, "first"))
    for name, pair in pairs.items():
        if on_cpu or name in SAMPLE:
            orders = ("alone", "after", "back", *(() if pair[0] is PLAIN else ("first",)))
            made = {order: _in_a_fork(partial(outcomes, pair, make, order)) for order in orders}
            found[name] = {"first": plain} | made
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
