"""The suites of an NVIDIA GPU. In each, the most informative cases are first.

Ratios are to a floor, the work that every implementation has to do, measured in the same run
(`benchmarks.contenders.floors`). In "host", whose calls are so small that the host time dominates, they are to
PyTorch's own call. Goals are the project's for one H200.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.cases import Case, Function, Goal, Quantity
from benchmarks.suites import post_training

__all__ = ["HOST_ON_CPU", "QUICK", "SUITES"]

_FP32 = "torch fp32 logits"
_COMPILED = "torch.compile fp32 logits"
_OURS = ("xent", "xent portable")


def _case(
    suite: str, function: Function, sizes: tuple[int, int, int], contenders: tuple[str, ...], *goals: Goal, **more: Any
) -> Case:
    return Case(
        suite, function, *sizes, **{"dtype": "bfloat16", "device": "cuda"} | more, contenders=contenders, goals=goals
    )


def _logits(
    suite: str,
    sizes: tuple[int, int],
    peers: tuple[str, ...],
    at_most: float | None = None,
    quantity: Quantity = "time",
    **more: Any,
) -> Case:
    """Return a case whose floor is one copy of the logits, or without a gradient the maximum of each row."""
    tokens, vocabulary = sizes
    floor = "copy" if more.get("backward", True) else "amax"
    goals = () if at_most is None else (Goal("xent", quantity, at_most),)
    return _case(suite, "logits", (tokens, 0, vocabulary), (floor, *_OURS, *peers), *goals, **more)


def _linear(suite: str, sizes: tuple[int, int, int], peers: tuple[str, ...], *goals: Goal, **more: Any) -> Case:
    """Return a case whose floor is the matrix products."""
    return _case(suite, "linear", sizes, ("products", *_OURS, *peers), *goals, **more)


_LOGITS_PEERS = (_COMPILED, "quack", "Liger in place")
_LOGITS = (
    _logits("logits", (8192, 32000), ("xent inplace", *_LOGITS_PEERS), 1.25, "loop", accuracy=True),
    _logits("logits", (4096, 128256), ("xent inplace", "quack in place", *_LOGITS_PEERS), 1.12, accuracy=True),
    _logits("logits", (4096, 32000), _LOGITS_PEERS, 1.12),
    _logits("logits", (4096, 256000), _LOGITS_PEERS, 1.15),
    _logits("logits", (4096, 50257), _LOGITS_PEERS, 1.5),
    _logits("logits", (4096, 32001), _LOGITS_PEERS, 1.5),
    _logits("logits", (4096, 100277), _LOGITS_PEERS, 1.5),
)

_STATS = ("lse", "accuracy")
_LOGITS_OPTIONS = (
    _logits("logits-options", (4096, 32000), _LOGITS_PEERS, 1.12, dtype="float16"),
    _logits("logits-options", (4096, 128256), _LOGITS_PEERS, 1.12, dtype="float16"),
    _logits("logits-options", (4096, 128256), (_COMPILED,), 1.6, options=(("softcap", 30.0),)),
    _logits("logits-options", (4096, 128256), _LOGITS_PEERS, 0.85, ignored=0.5),
    _logits("logits-options", (4096, 128256), (_COMPILED,), 1.6, options=(("stats", _STATS),)),
    _logits("logits-options", (4096, 128256), (_COMPILED,), 1.6, options=(("stats", ("entropy",)),)),
    _logits("logits-options", (4096, 128256), _LOGITS_PEERS, 1.52, reduction="none"),
    _logits("logits-options", (4096, 128256), (_COMPILED, "quack"), batch=8),
    _logits("logits-options", (4096, 50257), (_COMPILED,), batch=32),
    _logits("logits-options", (4096, 32000), _LOGITS_PEERS, dtype="float32"),
    _logits("logits-options", (4096, 128256), _LOGITS_PEERS, dtype="float32"),
    _logits("logits-options", (8192, 128256), _LOGITS_PEERS, 1.0, backward=False),
)

_LLAMA_3 = (8192, 4096, 128256)
_QWEN_3 = (8192, 4096, 151936)
_LINEAR = (
    _linear(
        "linear",
        _LLAMA_3,
        ("xent 128 MiB", _FP32, _COMPILED, "Liger", "quack 8192", "quack 2048", "CCE"),
        Goal("xent", "time", 1.04),
        Goal("xent portable", "time", 1.05),
        Goal("xent", "peak MiB", 1605),
        Goal("xent", "gradient errors", 1.01),
        Goal("xent 128 MiB", "peak MiB", 1200),
        accuracy=True,
    ),
    _linear(
        "linear",
        (8192, 2304, 256000),
        (_FP32, _COMPILED, "Liger", "quack 8192", "quack 4096", "CCE"),
        Goal("xent", "time", 1.05),
        Goal("xent portable", "time", 1.08),
        Goal("xent", "peak MiB", 2000),
        Goal("xent", "gradient errors", 1.01),
        accuracy=True,
    ),
    _linear(
        "linear", (4096, 2048, 32000), (_COMPILED, "Liger", "quack 2048", "quack 4096"), Goal("xent", "loop", 1.12)
    ),
    _linear(
        "linear", (16384, 1024, 32000), (_COMPILED, "Liger", "quack 4096", "quack 8192"), Goal("xent", "loop", 1.15)
    ),
)
_SMALL_PEERS = (_COMPILED, "Liger", "quack 2048")
_LINEAR_SMALL = (
    _linear("linear-small", (1024, 896, 151936), _SMALL_PEERS, Goal("xent", "loop", 1.15)),
    _linear("linear-small", (2048, 768, 50257), (*_SMALL_PEERS, _FP32), Goal("xent", "loop", 1.2)),
    _linear("linear-small", (8192, 768, 50257), (*_SMALL_PEERS, _FP32), Goal("xent", "loop", 1.2)),
    _linear("linear-small", (1024, 2048, 128256), _SMALL_PEERS, Goal("xent", "loop", 1.15)),
)
_FUSED_PEERS = ("Liger", "quack 8192", "CCE")
_LINEAR_OPTIONS = (
    _linear(
        "linear-options",
        _QWEN_3,
        (_COMPILED,),
        Goal("xent", "time", 1.08),
        options=(("stats", ("entropy", "accuracy")),),
    ),
    _linear("linear-options", _LLAMA_3, (_COMPILED,), options=(("label_smoothing", 0.1),)),
    _linear("linear-options", _LLAMA_3, (_COMPILED,), options=(("softcap", 30.0),)),
    _linear("linear-options", _LLAMA_3, _FUSED_PEERS, ignored=0.6),
    _linear("linear-options", _LLAMA_3, _FUSED_PEERS, trained=("input",)),
    _linear("linear-options", _LLAMA_3, ("Liger", "CCE"), reduction="none"),
    _linear(
        "linear-options",
        _LLAMA_3,
        (_COMPILED, *_FUSED_PEERS),
        Goal("xent", "time", 1.0),
        Goal("xent", "peak MiB", 64),
        backward=False,
    ),
)


def _host(function: Function, sizes: tuple[int, int, int], ours: tuple[str, ...], *goals: Goal, **more: Any) -> Case:
    """Return a case whose base is PyTorch's own call."""
    peers = ("torch.compile", "Liger") if function == "linear" else ("torch.compile", "quack", "Liger in place")
    return _case("host", function, sizes, ("torch", *ours, *peers), *goals, **more)


HOST_ON_CPU = (
    _case("host", "logits", (4, 0, 8), ("torch", "xent"), Goal("xent", "loop", 4.0), device="cpu", dtype="float32"),
    _case("host", "linear", (4, 16, 8), ("torch", "xent"), Goal("xent", "loop", 4.0), device="cpu", dtype="float32"),
)
_HOST = (
    _host("logits", (64, 0, 1024), _OURS, Goal("xent", "host us", 110), backward=False),
    _host("logits", (64, 0, 1024), _OURS, Goal("xent", "loop", 1.8)),
    _host("linear", (64, 128, 1024), _OURS, Goal("xent", "loop", 2.0)),
    # Chunks with so few rows that only the host time grows with their number.
    _host(
        "linear", (1024, 128, 1024), (*_OURS, "xent 8 chunks"), Goal("xent 8 chunks", "host us a further chunk", 150)
    ),
    _case("host", "linear log-probabilities", (64, 128, 1024), ("torch", "xent", "TRL"), Goal("xent", "loop", 2.0)),
    *HOST_ON_CPU,
)

SUITES: dict[str, tuple[Case, ...]] = {
    "logits": _LOGITS,
    "logits-options": _LOGITS_OPTIONS,
    "linear": _LINEAR,
    "linear-small": _LINEAR_SMALL,
    "linear-options": _LINEAR_OPTIONS,
    **post_training.SUITES,
    "host": _HOST,
}


def _small(case: Case) -> Case:
    """Return the case with a small size, without goals, which are for the full size."""
    if case.suite == "host":
        return replace(case, goals=())
    vocabulary = 1024 + case.vocabulary // 1000 * 16 + case.vocabulary % 16
    hidden, teacher = min(case.hidden, 128), case.teacher and 128 * case.teacher // case.hidden
    sizes = {"tokens": case.tokens // 32, "hidden": hidden, "vocabulary": vocabulary, "teacher": teacher}
    return replace(case, **sizes, goals=())


QUICK: dict[str, tuple[Case, ...]] = {name: tuple(map(_small, suite)) for name, suite in SUITES.items()}
