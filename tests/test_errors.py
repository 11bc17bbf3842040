"""Bad input raises an error that names the argument, its value and what is allowed. Nothing is computed or changed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import xent
from tests.targets import Target

LOGITS, HIDDEN, CLASSIFIER = np.zeros((2, 3, 5)), np.zeros((2, 3, 4)), np.zeros((5, 4))
CLASSES = np.zeros((2, 3), dtype=np.int64)

Bad = list[tuple[dict[str, Any], type[Exception], str]]
"""(arguments, error type, part of the message)"""

BOTH: Bad = [
    ({"reduction": "average"}, ValueError, r"reduction must be one of 'mean', 'sum', 'none', got 'average'"),
    ({"reduction": None}, TypeError, "reduction must be one of .*, got None$"),
    ({"reduction": np.array([0, 1])}, TypeError, "reduction must be one of .*, got numpy array of shape"),
    ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must be in \[0, 1\], got 1.5"),
    ({"label_smoothing": float("nan")}, ValueError, "label_smoothing must be in"),
    ({"label_smoothing": "0.1"}, TypeError, "label_smoothing must be a number"),
    ({"label_smoothing": True}, TypeError, "label_smoothing must be a number"),
    ({"label_smoothing": np.bool_(True)}, TypeError, "label_smoothing must be a"),
    ({"z_loss": np.float32("nan")}, ValueError, "z_loss must be finite and >= 0, got nan"),
    ({"z_loss": -1e-4}, ValueError, "z_loss must be finite and >= 0, got -0.0001"),
    ({"z_loss": float("inf")}, ValueError, "z_loss must be finite"),
    ({"softcap": 0}, ValueError, "softcap must be finite and > 0, or None, got 0"),
    ({"softcap": float("inf")}, ValueError, "softcap must be finite and > 0, or None, got inf"),
    ({"logit_scale": float("inf")}, ValueError, "logit_scale must be finite, got inf"),
    ({"logit_scale": None}, TypeError, "logit_scale must be a number"),
    ({"normalizer": -1}, ValueError, "normalizer must be finite and >= 0, got -1"),
    ({"normalizer": "many"}, TypeError, "normalizer must be a number"),
    ({"normalizer": np.ones(2)}, ValueError, "normalizer must be a number or a 0-d array"),
    ({"normalizer": np.ones((), dtype=bool)}, TypeError, "normalizer must be a real number or a 0-d array of one"),
    ({"normalizer": 3, "reduction": "sum"}, ValueError, "normalizer would be ignored with reduction='sum': pass red"),
    ({"normalizer": 3.5, "reduction": "none"}, ValueError, "ignored with reduction='none': .* reduction='mean', wh"),
    ({"ignore_index": 2**63}, ValueError, "ignore_index must fit in 64 bits, got 9223372036854775808"),
    ({"ignore_index": -100.0}, TypeError, "ignore_index must be an int, got -100.0"),
    ({"stats": ("lse", "perplexity")}, ValueError, "stats must be names from .*'lse'.*; got 'perplexity'"),
    ({"stats": "lse"}, TypeError, "stats must be a tuple, list or set of names"),
    ({"backend": "cuda"}, xent.BackendError, "unknown backend 'cuda': it must be 'auto' or one of 'triton'"),
    ({"backend": None}, TypeError, "backend must be 'auto' or one of 'triton', .*'numpy', got None"),
    ({"weight": np.ones(4)}, ValueError, r"weight must have shape \(5,\), one per class; got \(4,\)"),
    ({"weight": np.ones(5, dtype=int)}, TypeError, "weight must have one of the dtypes float64"),
    (
        {"weight": SimpleNamespace(requires_grad=True)},
        TypeError,
        "weight must be a torch, MLX or NumPy array, got Simple",
    ),
    (
        {"sample_weight": np.ones((3, 2))},
        ValueError,
        r"sample_weight must have shape \(2, 3\), one per row; got \(3, 2\)",
    ),
    ({"sample_weight": np.ones((2, 3), dtype=complex)}, TypeError, "sample_weight must hold real numbers or booleans"),
    (
        {"target": np.zeros((2, 4), dtype=int)},
        ValueError,
        r"target of class indices must have shape \(2, 3\).*got \(2, 4\)",
    ),
    (
        {"target": np.zeros((2, 3))},
        ValueError,
        r"target of class probabilities .* must have shape \(2, 3, 5\).*\(2, 3\); class",
    ),
    ({"target": np.zeros((2, 3), dtype=bool)}, TypeError, "target must hold class indices .* got dtype bool"),
    ({"target": list(range(1000))}, TypeError, r"got list \[0, 1, 2, 3, 4, 5, ...\]$"),
    ({"target": None}, TypeError, "target must be a torch, MLX or NumPy array, got None$"),
]

LOGITS_ONLY: Bad = [
    (
        {"logits": np.zeros((2, 3, 5), dtype=int)},
        TypeError,
        "logits must have one of the dtypes float64.*got numpy array",
    ),
    ({"logits": np.zeros(())}, ValueError, "logits must have a class axis"),
    ({"logits": np.zeros((2, 3, 0))}, ValueError, "there must be at least one class, got 0"),
    ({"axis": 3}, ValueError, r"axis must be in \[-3, 2\] for logits of shape \(2, 3, 5\), got 3"),
    ({"axis": 1.0}, TypeError, "axis must be an int"),
    ({"axis": 1}, ValueError, r"target of class indices must have shape \(2, 5\)"),
    ({"target": np.zeros((2, 5), int)}, ValueError, r"must have shape \(2, 3\) .*, got \(2, 5\); .* pass axis=1$"),
    ({"logits": None}, TypeError, "logits must be a torch, MLX or NumPy array, got None$"),
    ({"logits": None, "target": None}, TypeError, "logits must be a torch, MLX or NumPy array, got None$"),
    ({"logits": np.ma.masked_array(LOGITS, LOGITS == 0)}, TypeError, "logits must be a plain array, got a MaskedArray"),
    ({"inplace": 1}, TypeError, "inplace must be a bool, got 1"),
    ({"inplace": True}, xent.BackendError, "NumPy arrays get no gradient"),
]

LINEAR_ONLY: Bad = [
    ({"input": np.zeros((2, 3, 6))}, ValueError, r"linear_weight must have shape \(V, D\) with D = 6.*got \(5, 4\)"),
    ({"input": np.zeros(())}, ValueError, r"input must have shape \(..., D\), got a 0-d array"),
    ({"linear_weight": np.zeros((4, 5))}, ValueError, r"linear_weight must have shape \(V, D\) with D = 4"),
    ({"linear_weight": np.zeros(5)}, ValueError, "linear_weight must have shape"),
    ({"linear_bias": np.zeros(4)}, ValueError, r"linear_bias must have shape \(5,\).*got \(4,\)"),
    ({"shift": -1}, ValueError, "shift must be an int >= 0, got -1"),
    ({"shift": True}, TypeError, "shift must be an int >= 0, got True"),
    ({"linear_weight": None}, TypeError, "linear_weight must be a torch, MLX or NumPy array, got None$"),
    ({"shift": 1.0}, TypeError, "shift must be an int >= 0, got 1.0"),
    ({"workspace": 0}, ValueError, "workspace must be None or a positive int, a number of bytes; got 0"),
    ({"workspace": "1GB"}, TypeError, "workspace must be None or a positive int, a number of bytes; got '1GB'"),
    ({"workspace": 1e9}, TypeError, "workspace must be None or a positive int, a number of bytes; got 1000000000.0"),
    ({"input": np.zeros(4), "target": np.array(0), "shift": 1}, ValueError, "shift=1 needs a sequence axis"),
]

SUPPORT = {"ids": np.arange(6) % 5, "offsets": np.arange(7)}
"""One class per row of CLASSES."""


def support(**parts: Any) -> dict[str, xent.Support]:
    return {"support": xent.Support(**(SUPPORT | parts))}


# The bad arguments of the losses that the log-probability functions have too.
LOG_PROBS: Bad = [
    *(bad for bad in BOTH if bad[0].keys() <= {"softcap", "logit_scale", "ignore_index", "backend"}),
    *(bad for bad in BOTH if "target" in bad[0] and "probabilities" not in bad[2]),
    ({"temperature": 0}, ValueError, "temperature must be finite and > 0, or an array of floats, got 0$"),
    ({"temperature": -0.5}, ValueError, "temperature must be finite and > 0, or an array of floats, got -0.5"),
    ({"temperature": float("nan")}, ValueError, "temperature must be finite and > 0.* got nan"),
    ({"temperature": np.float32("inf")}, ValueError, "temperature must be finite and > 0.* got inf"),
    ({"temperature": np.array(0.0)}, ValueError, "temperature must be finite and > 0.* got 0.0"),
    ({"temperature": "0.7"}, TypeError, "temperature must be a number.*, or an array of floats; got str '0.7'"),
    ({"temperature": True}, TypeError, "temperature must be a number, .* got bool True"),
    ({"temperature": None}, TypeError, "temperature must be a number, .* got None"),
    ({"temperature": [0.7] * 6}, TypeError, "temperature must be a number, .* or an array of floats; got list"),
    ({"temperature": np.ones((2, 3), int)}, TypeError, r"temperature must be .* array of floats; got .* dtype int64"),
    (
        {"temperature": np.ones((3, 2))},
        ValueError,
        r"temperature must be a number or have the target's shape \(2, 3\), one for each row; got \(3, 2\)",
    ),
    ({"temperature": np.ones(3)}, ValueError, r"temperature must be .* shape \(2, 3\), .* got \(3,\)"),
    ({"target": np.zeros((2, 3, 5))}, TypeError, r"target must hold class indices \(int64.*, got dtype float"),
    ({"support": np.ones((2, 3, 5), bool)}, TypeError, r"support must be a xent.Support or None, got .* \(2, 3, 5\)"),
    ({"support": (np.arange(6), np.arange(7))}, TypeError, "support must be a xent.Support or None, got tuple"),
    (support(ids=None), TypeError, "support.ids must be a torch, MLX or NumPy array, got None$"),
    (support(offsets=list(range(7))), TypeError, "support.offsets must be a torch, MLX or NumPy array, got list"),
    (support(ids=np.zeros((6, 1), int)), TypeError, r"support.ids must be a 1-d integer array, got .* \(6, 1\)"),
    (support(ids=np.zeros(6)), TypeError, "support.ids must be a 1-d integer array, got .* dtype float"),
    (support(offsets=np.arange(7.0)), TypeError, "support.offsets must be a 1-d integer array, got .* dtype float"),
    (
        support(offsets=np.arange(6)),
        ValueError,
        "support.offsets must have 7 entries, one more than there are rows of target; got 6",
    ),
    ({"entropy": 1}, TypeError, "entropy must be a bool, got 1"),
    ({"entropy": None}, TypeError, "entropy must be a bool, got None"),
    (
        {"stats": "lse"},
        TypeError,
        "stats must be a tuple, list or set of names from 'lse', 'predictions'.*; got 'lse'",
    ),
    ({"stats": ("lse", "nll")}, ValueError, "stats must be names from 'lse', .*'rank'; got 'nll'$"),
    ({"stats": ["entropy"]}, ValueError, "stats must be names from .*; got 'entropy': pass entropy=True"),
    ({"stats": ("z_loss",)}, ValueError, "stats must be names from .*; got 'z_loss'"),
]

LOOKED_AT: Bad = [
    (
        {"temperature": np.array([[1, 1, 1], [1, 0, 1.0]])},
        ValueError,
        r"temperature must be > 0 in every row, got 0.0 at \[1, 1\]",
    ),
    ({"temperature": np.full((2, 3), -2.0)}, ValueError, "temperature must be > 0 in every row, got -2.0"),
    ({"temperature": np.full((2, 3), np.nan)}, ValueError, "temperature must be > 0 in every row, got nan"),
    (
        support(offsets=np.array([0, 1, 3, 2, 4, 5, 6])),
        ValueError,
        "support.offsets must be non-decreasing from 0 to 6, the number of ids; got 0 to 6 and a decrease between",
    ),
    (
        support(offsets=np.arange(7) // 2),
        ValueError,
        "support.offsets must be non-decreasing from 0 to 6, the number of ids; got 0 to 3",
    ),
    (
        support(offsets=np.array([1, 1, 2, 3, 4, 5, 6])),
        ValueError,
        "support.offsets must be non-decreasing from 0 to 6.*got 1 to 6",
    ),
    (support(ids=np.array([0, 1, 5, 3, 4, 0])), IndexError, r"support.ids\[2\] is 5; classes are 0 to 4"),
    (support(ids=np.array([0, 1, 2, -1, 4, 0])), IndexError, r"support.ids\[3\] is -1; classes are 0 to 4"),
    (
        support(offsets=np.array([0, 0, 4, 6, 6, 6, 6]), ids=np.array([2, 4, 0, 2, 2, 0])),
        ValueError,
        r"support.ids must h\w* a class at most once in a row; row 1 has 2",
    ),
]
"""Arguments with invalid values, which only a check of values can find."""

OF_LOGITS = [bad for bad in LOGITS_ONLY if not bad[0].keys() & {"inplace"}]
OF_FUNCTION = {
    "cross_entropy": BOTH + LOGITS_ONLY,
    "linear_cross_entropy": BOTH + LINEAR_ONLY,
    "log_probs": LOG_PROBS + LOOKED_AT + OF_LOGITS,
    "linear_log_probs": LOG_PROBS + LOOKED_AT + LINEAR_ONLY,
}


@pytest.mark.parametrize(
    ("function", "bad", "error", "message"),
    [(function, *one) for function, every in OF_FUNCTION.items() for one in every],
    ids=str,
)
def test_errors(function: str, bad: dict[str, Any], error: type[Exception], message: str) -> None:
    arrays = {"input": HIDDEN, "linear_weight": CLASSIFIER} if "linear" in function else {"logits": LOGITS}
    with pytest.raises(error, match=message):
        getattr(xent, function)(**(arrays | {"target": CLASSES} | bad))


def placed_on(target: Target, bad: dict[str, Any]) -> dict[str, Any]:
    def place(value: Any) -> Any:
        if isinstance(value, xent.Support):
            return xent.Support(place(value.ids), place(value.offsets))
        is_array = isinstance(value, np.ndarray) and (value.ndim > 0 or value.dtype == bool)
        return target.harness.array(value, "float32" if value.dtype.kind == "f" else None) if is_array else value

    return {name: place(value) for name, value in bad.items()}


@pytest.mark.parametrize(
    ("function", "bad", "error", "message"),
    [("cross_entropy", *one) for one in BOTH] + [("log_probs", *one) for one in LOG_PROBS],
    ids=str,
)
def test_errors_are_the_same_in_every_framework(
    target: Target, function: str, bad: dict[str, Any], error: type[Exception], message: str
) -> None:
    logits, classes = target.arrays(LOGITS, CLASSES)
    with pytest.raises(error, match=message.replace("numpy array", f"(numpy|{target.backend.framework}) array")):
        getattr(xent, function)(**({"logits": logits, "target": classes} | placed_on(target, bad)))


@pytest.mark.parametrize(("bad", "error", "message"), LOOKED_AT, ids=str)
@pytest.mark.parametrize("function", ["log_probs", "linear_log_probs"])
def test_values_are_checked_on_the_cpu_and_on_request(
    target: Target, function: str, bad: dict[str, Any], error: type[Exception], message: str, monkeypatch: Any
) -> None:
    if not target.looks_at_targets:
        monkeypatch.setenv("XENT_CHECK_TARGETS", "1")
    logits, hidden, classifier, classes = target.arrays(LOGITS, HIDDEN, CLASSIFIER, CLASSES)
    arrays = {"logits": logits} if function == "log_probs" else {"input": hidden, "linear_weight": classifier}
    with pytest.raises(error, match=message):
        getattr(xent, function)(**arrays, target=classes, **placed_on(target, bad), backend=target.name)


def test_mixed_frameworks_are_an_error(target: Target) -> None:
    framework = target.backend.framework
    (logits,) = target.arrays(LOGITS)
    with pytest.raises(
        TypeError, match=f"must be of one framework: logits is a {framework} array and target a numpy array"
    ):
        xent.cross_entropy(logits, CLASSES)
    (hidden, classes) = target.arrays(HIDDEN, CLASSES)
    with pytest.raises(TypeError, match=f"input is a {framework} array and linear_weight a numpy array"):
        xent.linear_cross_entropy(hidden, CLASSIFIER, CLASSES)
    with pytest.raises(TypeError, match=f"logits is a {framework} array and temperature a numpy array"):
        xent.log_probs(logits, classes, temperature=np.ones((2, 3)))
    with pytest.raises(TypeError, match=f"logits is a {framework} array and support.ids a numpy array"):
        xent.log_probs(logits, classes, support=xent.Support(**SUPPORT))
