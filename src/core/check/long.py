"""Cases with many classes or many chunks: what reaches a device's long loops and its other kernels."""

from dataclasses import replace

from xent.core.check.cases import OPTIONS, Case

__all__ = ["chunk_cases", "long_cases"]

_ROWS = 5
_MOST_FLOAT16 = 20_000  # classes: of more, much of a classifier's gradient is less than the smallest float16
_ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def long_cases(function: str, dtype: str, vocabularies: dict[str, int]) -> list[Case]:
    """Return cases with each number of classes, named with the reason for it; and for the linear loss, of chunks.

    Each with the plain loss, reduced and row by row, and with and without gradients; and with all options.
    """
    plain = Case(function, (_ROWS,), 1, dtype, "", reduction="mean", hidden=16, ignored=0.0, alone=True)
    cases = []
    for reason, vocabulary in vocabularies.items():
        if (function, dtype) == ("linear_cross_entropy", "float16") and vocabulary > _MOST_FLOAT16:
            continue
        case = replace(plain, vocabulary=vocabulary, name=reason)
        cases += [case, replace(case, reduction="none")]
        if function == "cross_entropy":
            cases.append(replace(case, name=f"{reason}, all", options=OPTIONS["all"], ignored=0.3))
            cases.append(replace(case, name=f"{reason}, probabilities", options=OPTIONS["probabilities, all"]))
    return cases + (chunk_cases(dtype) if function == "linear_cross_entropy" else [])


def chunk_cases(dtype: str) -> list[Case]:
    """Return cases of the linear loss in one chunk and in four, the last of them smaller."""
    one = Case("linear_cross_entropy", (96,), 1000, dtype, "one chunk", hidden=64, ignored=0.2, alone=True)
    several = replace(one, name="several chunks", workspace=28 * one.vocabulary * _ITEMSIZE[dtype])
    biased = replace(several, name="several chunks, bias", bias=True)
    made = [replace(case, reduction=reduction) for case in (one, several, biased) for reduction in ("mean", "none")]
    return [*made, replace(several, name="several chunks, all", options=OPTIONS["all"])]
