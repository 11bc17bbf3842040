"""RL and distillation on an NVIDIA GPU: log-probabilities with the entropy, and divergences from a teacher."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import Case, Function, Goal, Quantity

__all__ = ["SUITES"]

_LINEAR_PEERS = ("TRL", "CCE without entropy", "torch checkpointed")


def _case(
    suite: str, function: Function, sizes: tuple[int, int, int], contenders: tuple[str, ...], *goals: Goal, **more: Any
) -> Case:
    return Case(suite, function, *sizes, "bfloat16", contenders, goals=goals, device="cuda", **more)


def _linear(sizes: tuple[int, int, int], time: float, mebibytes: float, **more: Any) -> Case:
    goals = (Goal("xent", "time", time), Goal("xent", "peak MiB", mebibytes), Goal("xent", "loss error", 1e-3))
    return _case(
        "log-probabilities",
        "linear log-probabilities",
        sizes,
        ("products", "xent", *_LINEAR_PEERS),
        *goals,
        accuracy=True,
        **more,
    )


def _logits(sizes: tuple[int, int], time: float, **more: Any) -> Case:
    floor = "copy" if more.get("backward", True) else "amax"
    contenders = (floor, "xent", "TRL", "torch fp32 logits")
    tokens, vocabulary = sizes
    return _case(
        "log-probabilities",
        "log-probabilities",
        (tokens, 0, vocabulary),
        contenders,
        Goal("xent", "time", time),
        accuracy=True,
        **more,
    )


def _divergence(time: float | None = None, mebibytes: float | None = None, **more: Any) -> Case:
    limits: tuple[tuple[Quantity, float | None], ...] = (("time", time), ("peak MiB", mebibytes))
    goals = (Goal("xent", quantity, limit) for quantity, limit in limits if limit is not None)
    peers = ("TRL", "Liger") if "top_k" not in dict(more["options"]) else ()
    return _case(
        "divergence",
        "linear divergence",
        (8192, 4096, 151936),
        ("product", "xent", *peers, "torch fp32 logits"),
        *goals,
        Goal("xent", "gradient errors", 1.5),
        accuracy=True,
        **{"teacher": 4096, **more},
    )


_QWEN_3, _QWEN_3_5 = (8192, 4096, 151936), (16384, 2048, 248320)
_LOG_PROBS = (
    _linear(_QWEN_3, 1.40, 1900),
    _linear(_QWEN_3, 1.06, 64, backward=False),
    _logits((8192, 151936), 1.55),
    _logits((8192, 151936), 1.15, backward=False),
    _linear(_QWEN_3_5, 1.43, 2650),
    _linear(_QWEN_3_5, 1.06, 64, backward=False),
    _logits((8192, 50257), 2.0),
    _logits((8192, 50257), 1.6, backward=False),
)
_DIVERGENCE = (
    _divergence(4.5, 2600, options=(("beta", 0.0),)),
    _divergence(4.7, 2600, options=(("beta", 0.5),)),
    _divergence(4.5, 2600, options=(("beta", 1.0),)),
    _divergence(3.3, 1900, options=(("top_k", 64),)),
    _divergence(options=(("beta", 0.5),), teacher=8192),
)

SUITES: dict[str, tuple[Case, ...]] = {"log-probabilities": _LOG_PROBS, "divergence": _DIVERGENCE}
