"""Bad input gets an error that names the argument, what came and what is allowed; nothing is computed or changed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import xent
from tests.targets import Target

LOGITS, HIDDEN, CLASSIFIER = np.zeros((2, 3, 5)), np.zeros((2, 3, 4)), np.zeros((5, 4))
CLASSES = np.zeros((2, 3), dtype=np.int64)

BOTH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reduction": "average"}, ValueError, r"reduction must be one of 'mean', 'sum', 'none', got 'average'"),
    ({"reduction": None}, ValueError, "reduction must be one of"),
    ({"reduction": np.array([0, 1])}, ValueError, "reduction must be one of"),
    ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must be in \[0, 1\], got 1.5"),
    ({"label_smoothing": -0.1}, ValueError, r"label_smoothing must be in \[0, 1\], got -0.1"),
    ({"label_smoothing": float("nan")}, ValueError, "label_smoothing must be in"),
    ({"label_smoothing": "0.1"}, TypeError, "label_smoothing must be a number"),
    ({"label_smoothing": True}, TypeError, "label_smoothing must be a number"),
    ({"z_loss": -1e-4}, ValueError, "z_loss must be finite and >= 0, got -0.0001"),
    ({"z_loss": float("inf")}, ValueError, "z_loss must be finite"),
    ({"softcap": 0}, ValueError, "softcap must be finite and > 0, or None, got 0"),
    ({"softcap": -30.0}, ValueError, "softcap must be finite and > 0, or None, got -30.0"),
    ({"softcap": float("inf")}, ValueError, "softcap must be finite and > 0, or None, got inf"),
    ({"logit_scale": float("inf")}, ValueError, "logit_scale must be finite, got inf"),
    ({"logit_scale": None}, TypeError, "logit_scale must be a number"),
    ({"normalizer": -1}, ValueError, "normalizer must be finite and >= 0, got -1"),
    ({"normalizer": "many"}, TypeError, "normalizer must be a number"),
    ({"normalizer": np.ones(2)}, ValueError, "normalizer must be a number or a 0-d array"),
    ({"normalizer": np.ones((), dtype=bool)}, TypeError, "normalizer must be a real number or a 0-d array of one"),
    ({"normalizer": 3, "reduction": "sum"}, ValueError, "normalizer would be ignored with reduction='sum': pass red"),
    ({"normalizer": 3.5, "reduction": "none"}, ValueError, "ignored with reduction='none': .* reduction='mean', wh"),
    ({"normalizer": np.array(3), "reduction": "sum"}, ValueError, "divide the result, loss / normalizer$"),
    ({"normalizer": np.float32(3), "reduction": "none"}, ValueError, "normalizer would be ignored"),
    ({"ignore_index": 2**63}, ValueError, "ignore_index must fit in 64 bits, got 9223372036854775808"),
    ({"ignore_index": 1.0}, TypeError, "ignore_index must be an int, got 1.0"),
    ({"stats": ("lse", "perplexity")}, ValueError, "stats must be names out of .*'lse'.*, got 'perplexity'"),
    ({"stats": "lse"}, TypeError, "stats must be a tuple, list or set of names"),
    ({"backend": "cuda"}, xent.BackendError, "there is no backend 'cuda'; there are 'auto'"),
    ({"backend": None}, TypeError, "backend must be 'auto' or one of 'triton', .*'numpy', got None"),
    ({"weight": np.ones(4)}, ValueError, r"weight must have shape \(5,\), one per class; got \(4,\)"),
    ({"weight": np.ones(5, dtype=int)}, TypeError, "weight must have a dtype out of float64"),
    (
        {"weight": SimpleNamespace(requires_grad=True)},
        TypeError,
        "weight must be a torch, MLX or NumPy array, got Simple",
    ),
    ({"weight": [1.0] * 5}, TypeError, "weight must be a torch, MLX or NumPy array, got list"),
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
    ({"target": np.zeros((3, 2, 5))}, ValueError, r"target of class probabilities .* must have shape \(2, 3, 5\)"),
    ({"target": np.zeros((2, 3), dtype=bool)}, TypeError, "target must hold class indices .* got dtype bool"),
    ({"target": [[0, 0, 0], [0, 0, 0]]}, TypeError, "target must be a torch, MLX or NumPy array, got list"),
    ({"target": list(range(1000))}, TypeError, r"got list \[0, 1, 2, 3, 4, 5, ...\]$"),
    ({"target": None}, TypeError, "target must be a torch, MLX or NumPy array, got None$"),
]

LOGITS_ONLY: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"logits": np.zeros((2, 3, 5), dtype=int)}, TypeError, "logits must have a dtype out of float64.*got numpy array"),
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

LINEAR_ONLY: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input": np.zeros((2, 3, 6))}, ValueError, r"linear_weight must have shape \(V, D\) with D = 6.*got \(5, 4\)"),
    ({"input": np.zeros(())}, ValueError, r"input must have shape \(..., D\), got a 0-d array"),
    ({"linear_weight": np.zeros((4, 5))}, ValueError, r"linear_weight must have shape \(V, D\) with D = 4"),
    ({"linear_weight": np.zeros(5)}, ValueError, "linear_weight must have shape"),
    ({"linear_bias": np.zeros(4)}, ValueError, r"linear_bias must have shape \(5,\).*got \(4,\)"),
    ({"shift": -1}, ValueError, "shift must be an int >= 0, got -1"),
    ({"shift": True}, ValueError, "shift must be an int >= 0, got True"),
    ({"linear_weight": None}, TypeError, "linear_weight must be a torch, MLX or NumPy array, got None$"),
    ({"workspace": 0}, ValueError, "workspace must be None or a positive int, a number of bytes; got 0"),
    ({"workspace": 1e9}, ValueError, "workspace must be None or a positive int, a number of bytes; got 1000000000.0"),
    ({"input": np.zeros(4), "target": np.array(0), "shift": 1}, ValueError, "shift=1 needs a sequence axis"),
]


@pytest.mark.parametrize(("bad", "error", "message"), BOTH + LOGITS_ONLY, ids=str)
def test_cross_entropy_says_what_is_wrong(bad: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        xent.cross_entropy(**({"logits": LOGITS, "target": CLASSES} | bad))


@pytest.mark.parametrize(("bad", "error", "message"), BOTH + LINEAR_ONLY, ids=str)
def test_linear_cross_entropy_says_what_is_wrong(bad: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        xent.linear_cross_entropy(**({"input": HIDDEN, "linear_weight": CLASSIFIER, "target": CLASSES} | bad))


@pytest.mark.parametrize(("bad", "error", "message"), BOTH, ids=str)
def test_every_framework_says_the_same(
    target: Target, bad: dict[str, Any], error: type[Exception], message: str
) -> None:
    logits, classes = target.arrays(LOGITS, CLASSES)
    if any(isinstance(value, np.ndarray) and value.dtype.kind == "c" for value in bad.values()):
        assert error is TypeError
    placed = {
        name: target.harness.array(value) if isinstance(value, np.ndarray) else value for name, value in bad.items()
    }
    with pytest.raises(error, match=message.replace("numpy array", f"{target.backend.framework} array")):
        xent.cross_entropy(**({"logits": logits, "target": classes} | placed))


def test_frameworks_do_not_mix(target: Target) -> None:
    framework = target.backend.framework
    (logits,) = target.arrays(LOGITS)
    with pytest.raises(TypeError, match=f"arrays of one framework: logits is {framework}'s, target is numpy's"):
        xent.cross_entropy(logits, CLASSES)
    (hidden,) = target.arrays(HIDDEN)
    with pytest.raises(TypeError, match=f"input is {framework}'s, linear_weight is numpy's"):
        xent.linear_cross_entropy(hidden, CLASSIFIER, CLASSES)
