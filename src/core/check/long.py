"""Cases with many classes or many chunks, which reach the loops and kernels for long rows."""

from dataclasses import replace

from xent.core.check.cases import LOG_PROB_OPTIONS, LOSSES, OPTIONS, Case

__all__ = ["chunk_cases", "long_cases"]

_ROWS = 5
_MOST_FLOAT16 = 20_000  # classes; with more, many entries of a classifier's gradient would underflow in float16
_ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def long_cases(function: str, dtype: str, vocabularies: dict[str, int]) -> list[Case]:
    """Return cases for each number of classes, named by its reason; for linear functions also with several chunks.

    Losses get the plain loss with reduction "mean" and "none", and all options. Log-probabilities get the entropy, and
    all options. Plain cases run with and without gradients.
    """
    plain = Case(function, (_ROWS,), 1, dtype, "", reduction="mean", hidden=16, ignored=0.0, alone=True)
    cases = []
    for reason, vocabulary in vocabularies.items():
        if (plain.is_linear, dtype) == (True, "float16") and vocabulary > _MOST_FLOAT16:
            continue
        case = replace(plain, vocabulary=vocabulary, name=reason)
        if function not in LOSSES:
            # No support here: with so many classes, some would be in one row's support only, and their gradient would
            # cancel.
            options = LOG_PROB_OPTIONS["softcap, temperature of each row" if case.is_linear else "all"]
            every = replace(case, name=f"{reason}, options", options=options, stats=("lse",))
            cases += [replace(one, reduction="none", entropy=True) for one in (case, every)]
            continue
        cases += [case, replace(case, reduction="none")]
        if not case.is_linear:
            cases.append(replace(case, name=f"{reason}, all", options=OPTIONS["all"], ignored=0.3))
            cases.append(replace(case, name=f"{reason}, probabilities", options=OPTIONS["probabilities, all"]))
    return cases + (chunk_cases(dtype, function) if plain.is_linear else [])


def chunk_cases(dtype: str, function: str = "linear_cross_entropy") -> list[Case]:
    """Return cases of a linear function in one chunk and in four chunks, the last of them smaller."""
    one = Case(function, (96,), 1000, dtype, "one chunk", hidden=64, ignored=0.2, alone=True)
    several = replace(one, name="several chunks", workspace=28 * one.vocabulary * _ITEMSIZE[dtype])
    biased = replace(several, name="several chunks, bias", bias=True)
    every = replace(several, name="several chunks, all", options=OPTIONS["all"])
    if function not in LOSSES:
        every = replace(every, options=LOG_PROB_OPTIONS["all"], stats=("lse",))
        return [replace(case, reduction="none", entropy=True) for case in (one, several, biased, every)]
    made = [replace(case, reduction=reduction) for case in (one, several, biased) for reduction in ("mean", "none")]
    return [*made, every]
