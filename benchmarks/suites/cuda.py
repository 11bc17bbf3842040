"""The suites of an NVIDIA GPU: "gpu-bars" holds the goals that the project has set itself on one H100, no more.

"heads" has the classifiers of known models, where each peer is a point in the plane of time and memory and xent a curve
over its workspace; "tokens" and "vocabulary" change one size at a time. Every ratio of time is to a floor, the work
that no implementation can do without, measured in the same run (`benchmarks.contenders.floors`). xent comes right after
it, and the cases that tell most come first, so that a run that ends early has their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from benchmarks.cases import Case, Function, Goal

__all__ = ["QUICK", "SUITES", "WORKSPACES"]

WORKSPACES = (64, 128, 256, 512, 1024, 2048)
"""MiB; each is the contender "xent N MiB" of the linear function."""

_HEADS = (
    ("Llama-2", 4096, 32000),
    ("Llama-3", 4096, 128256),
    ("Gemma-2", 2304, 256000),
    ("Qwen-2.5", 3584, 152064),
    ("DeepSeek-V3", 7168, 129280),
)
_FP32 = "torch fp32 logits"
_COMPILED = "torch.compile fp32 logits"
_BF16 = ("torch", "torch.compile")
_LOGITS_PEERS = (_FP32, _COMPILED, "Liger in place", "quack", "quack in place")
_LOGITS = ("copy", "xent", "xent inplace", *_LOGITS_PEERS)
_LINEAR_PEERS = (_FP32, _COMPILED, "torch chunked", "Liger", "quack 8192", "quack 2048", "CCE")
_CURVE = tuple(f"xent {size} MiB" for size in WORKSPACES)


def _case(
    suite: str, function: Function, sizes: tuple[int, int, int], contenders: tuple[str, ...], **more: Any
) -> Case:
    return Case(suite, function, *sizes, "bfloat16", contenders, device="cuda", **more)


def _logits_bar(tokens: int, vocabulary: int, at_most: float, **more: Any) -> Case:
    goals = (Goal("xent", "time", at_most),)
    return _case("gpu-bars", "logits", (tokens, 0, vocabulary), (*_LOGITS, *_BF16), accuracy=True, goals=goals, **more)


def _linear_bar(sizes: tuple[int, int, int], contenders: tuple[str, ...], *goals: Goal, **more: Any) -> Case:
    return _case("gpu-bars", "linear", sizes, contenders, goals=goals, **more)


_LLAMA_3 = (8192, 4096, 128256)
_GEMMA_2 = (8192, 2304, 256000)
_FUSED_PEERS = ("Liger", "quack 8192", "CCE")

_BARS = (
    _linear_bar(
        _LLAMA_3,
        ("products", "xent", "xent 128 MiB", *_LINEAR_PEERS, *_BF16),
        Goal("xent", "time", 1.06),
        Goal("xent", "peak MiB", 1640),
        Goal("xent", "gradient errors", 1.00),
        Goal("xent 128 MiB", "time", 1.20),
        Goal("xent 128 MiB", "peak MiB", 1200),
        Goal("xent 128 MiB", "gradient errors", 1.00),
        accuracy=True,
    ),
    _logits_bar(8192, 128256, 1.15),
    _logits_bar(8192, 32000, 1.12),
    _linear_bar(
        _LLAMA_3,
        ("products", "xent", _FP32, _COMPILED, "torch chunked", "Liger", "quack 8192", "CCE"),
        Goal("xent", "time", 1.05),
        Goal("xent", "peak MiB", 64),
        backward=False,
    ),
    _case(
        "gpu-bars",
        "logits",
        (8192, 0, 128256),
        ("amax", "xent", _FP32, _COMPILED, "Liger in place", "quack", *_BF16),
        backward=False,
        goals=(Goal("xent", "time", 1.00),),
    ),
    _logits_bar(8192, 128256, 1.55, reduction="none"),
    _linear_bar(
        _GEMMA_2,
        ("products", "xent", *_LINEAR_PEERS, "quack 4096", *_BF16),
        Goal("xent", "time", 1.08),
        Goal("xent", "peak MiB", 2100),
        Goal("xent", "gradient errors", 1.00),
        accuracy=True,
    ),
    _logits_bar(4096, 262144, 1.28),
    _linear_bar(
        _LLAMA_3,
        ("xent, none ignored", "xent", "products", *_FUSED_PEERS),
        Goal("xent", "time", 0.45),
        ignored=0.6,
    ),
    _linear_bar(
        _LLAMA_3,
        ("xent, all trained", "xent", "products", *_FUSED_PEERS),
        Goal("xent", "time", 0.70),
        Goal("xent", "peak MiB", 600),
        trained=("input",),
    ),
)


def _heads(
    heads: Iterable[tuple[str, int, int]], tokens: int, curve: tuple[str, ...], left_out: tuple[str, ...]
) -> tuple[Case, ...]:
    contenders = tuple(name for name in ("products", "xent", *curve, *_LINEAR_PEERS) if name not in left_out)
    return tuple(
        _case(
            "heads",
            "linear",
            (tokens, hidden, vocabulary),
            contenders,
            left_out=left_out,
            accuracy=True,
            model=model,
        )
        for model, hidden, vocabulary in heads
    )


def _tokens(sizes: Iterable[int], hidden: int, vocabulary: int) -> tuple[Case, ...]:
    linear = ("products", "xent", _COMPILED, "Liger", "quack 8192")
    return tuple(
        _case("tokens", "linear", (n, hidden, vocabulary), linear, left_out=(_FP32, "torch chunked", "CCE"))
        for n in sizes
    )


def _vocabulary(sizes: Iterable[int], tokens: int) -> tuple[Case, ...]:
    return tuple(_case("vocabulary", "logits", (tokens, 0, size), _LOGITS) for size in sizes)


SUITES: dict[str, tuple[Case, ...]] = {
    "gpu-bars": _BARS,
    "heads": _heads(_HEADS, 8192, _CURVE, left_out=()),
    "tokens": _tokens((1024, 2048, 4096, 8192, 16384, 32768), hidden=4096, vocabulary=128256),
    # 50257 is GPT-2's and odd: no row of it but the first begins where a vector load may.
    "vocabulary": _vocabulary((32000, 50257, 65536, 102400, 128256, 152064, 201088, 262144), tokens=4096),
}


def _small(case: Case) -> Case:
    """Return the same work in a size that takes no time; what the goals limit holds for the full size alone."""
    return replace(case, tokens=1024, hidden=min(case.hidden, 512), vocabulary=8192, goals=())


QUICK: dict[str, tuple[Case, ...]] = {
    "gpu-bars": tuple(_small(case) for case in (*_BARS[:2], *_BARS[3:6], *_BARS[8:])),
    "heads": _heads((("", 512, 8192),), 1024, ("xent 64 MiB",), left_out=(_COMPILED,)),
    "tokens": _tokens((512, 1024), hidden=512, vocabulary=8192),
    "vocabulary": _vocabulary((4096, 8192), tokens=1024),
}
