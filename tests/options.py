"""The named options of the matrix: every option alone, and combinations of options that interact."""

from dataclasses import replace

from xent.command.check.case import LOSSES, Case
from xent.core.spec import DIFFERENTIABLE

__all__ = ["LOG_PROB_OPTIONS", "OPTIONS", "option_cases"]

OPTIONS = {
    "plain": {},
    "weight": {"weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing, all of it": {"label_smoothing": 1.0},
    "z_loss": {"z_loss": 0.02},
    "softcap": {"softcap": 4.0},
    "scale": {"logit_scale": 0.5},
    "scale, negative": {"logit_scale": -0.7},
    "sample_weight": {"sample_weight": True},
    "normalizer": {"normalizer": 13.5},
    "normalizer, array": {"normalizer": "array"},
    "ignore_index, a class": {"ignore_index": 2},
    "weight, smoothing": {"weight": True, "label_smoothing": 0.2},
    "weight, sample_weight": {"weight": True, "sample_weight": True},
    "softcap, scale": {"softcap": 3.0, "logit_scale": 1.5},
    "softcap, z_loss": {"softcap": 3.0, "z_loss": 0.05},
    "smoothing, z_loss": {"label_smoothing": 0.1, "z_loss": 0.05},
    "all": {
        "weight": True,
        "label_smoothing": 0.1,
        "z_loss": 0.02,
        "softcap": 5.0,
        "logit_scale": 0.8,
        "sample_weight": True,
        "normalizer": 21.0,
    },
    "probabilities": {"probabilities": True},
    "probabilities, smoothing": {"probabilities": True, "label_smoothing": 0.1},
    "probabilities, all": {
        "probabilities": True,
        "weight": True,
        "label_smoothing": 0.1,
        "z_loss": 0.02,
        "softcap": 5.0,
        "logit_scale": 0.8,
        "sample_weight": True,
    },
}

LOG_PROB_OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "temperature of each row": {"temperature": "rows"},
    "softcap, temperature of each row": {"softcap": 3.0, "temperature": "rows"},
    "scale, negative, temperature": {"logit_scale": -0.7, "temperature": 1.6},
    "softcap, scale": {"softcap": 3.0, "logit_scale": 1.5},
    "ignore_index, a class": {"ignore_index": 2},
    "support": {"support": True},
    "all": {"temperature": "rows", "softcap": 5.0, "logit_scale": 0.8, "support": True},
}


def option_cases(function: str, dtype: str) -> list[Case]:
    """Return a case for every option, for losses with every reduction, with one medium-sized shape."""
    base = Case(function, (4, 12), 67, dtype, "")
    if function not in LOSSES:
        return _log_prob_cases(replace(base, reduction="none"))
    named = [replace(base, name=name, options=options) for name, options in OPTIONS.items()]
    if function == "linear_cross_entropy":
        named += [
            replace(case, name=f"{case.name}, bias", bias=True) for case in named if case.name in ("plain", "all")
        ]
        shifted = ("plain", "all", "probabilities, all")
        named += [replace(case, name=f"{case.name}, shift", shift=2) for case in named if case.name in shifted]
    reduced = [
        replace(case, reduction=reduction)
        for case in named
        for reduction in ("mean", "sum", "none")
        if reduction == "mean" or case.options.keys() != {"normalizer"}
    ]
    reported = [
        replace(case, name=f"{case.name}, statistics", reduction="none", stats=DIFFERENTIABLE)
        for case in named
        if case.name in ("all", "probabilities, all")
    ]
    trained = [
        replace(case, name=f"{case.name}, trained", trained=True)
        for case in reduced + reported
        if case.name.startswith("probabilities")
    ]
    return reduced + reported + trained


def _log_prob_cases(base: Case) -> list[Case]:
    both = replace(base, entropy=True)
    named = [replace(both, name=name, options=options) for name, options in LOG_PROB_OPTIONS.items()]
    every = replace(named[-1], stats=("lse",))
    named += [
        replace(base, name="without entropy"),
        replace(every, name="all, lse"),
        replace(every, name="all, of the entropy alone", missing=("log_probs", "lse")),
        replace(every, name="all, of the log-probabilities alone", missing=("entropy", "lse")),
    ]
    if base.is_linear:
        named += [replace(every, name="all, bias, shift", bias=True, shift=2)]
    return named
