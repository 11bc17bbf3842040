"""The modules of both frameworks: options reach the loss, and a linear loss owns its classifier."""

import importlib
from typing import Any

import numpy as np
import pytest

import xent
from tests.targets import Target

RNG = np.random.default_rng(0)
HIDDEN, CLASSES, WIDTH = RNG.normal(size=(2, 5, 64)), 11, 64
LABELS = np.array([[0, 3, -100, 10, 2], [1, 1, 4, -100, 9]])
OPTIONS = {"z_loss": 0.1, "softcap": 3.0, "logit_scale": 0.5, "label_smoothing": 0.2, "stats": ["lse"]}


@pytest.fixture
def modules(target: Target) -> Any:
    return importlib.import_module(f"xent.integrations.{target.backend.framework}")


def on_device(target: Target, module: Any) -> Any:
    """Return a module with its weights where the arrays of the tests are. MLX has one default device for all."""
    return module.to(target.device) if target.backend.framework == "torch" else module


def test_options_reach_the_loss(target: Target, modules: Any) -> None:
    drawn = RNG.normal(size=(2, 5, CLASSES)), LABELS, RNG.random((2, 5)), RNG.random(CLASSES)
    logits, labels, sample, weight = target.arrays(*drawn)
    module = modules.CrossEntropyLoss(weight, axis=-1, **OPTIONS)
    found, stats = module(logits, labels, sample_weight=sample, normalizer=4)
    given = OPTIONS | {"weight": weight, "sample_weight": sample, "normalizer": 4}
    expected, truth = xent.cross_entropy(logits, labels, **given)
    target.same(found, expected)
    target.same(stats.lse, truth.lse)
    assert "z_loss=0.1" in repr(module)
    moved = modules.CrossEntropyLoss(axis=1)(logits.swapaxes(1, 2), labels)
    target.close(moved, xent.cross_entropy(logits, labels), rtol=1e-6)
    with pytest.raises(ValueError, match="normalizer would be ignored with reduction='sum'"):
        modules.CrossEntropyLoss(reduction="sum", axis=-1)(logits, labels, normalizer=4)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_loss_owns_its_classifier(target: Target, modules: Any, bias: bool) -> None:
    hidden, labels, weight = target.arrays(HIDDEN, LABELS, RNG.random(CLASSES))
    arguments = {"bias": bias, "shift": 1, "workspace": 200, "weight": weight}
    module = on_device(target, modules.LinearCrossEntropyLoss(WIDTH, CLASSES, **arguments))
    head = {"linear_bias": module.linear.bias} if bias else {}
    expected = xent.linear_cross_entropy(hidden, module.linear.weight, labels, shift=1, weight=weight, **head)
    target.close(module(hidden, labels), expected, rtol=1e-6)
    assert "shift=1" in repr(module)
    heads = on_device(target, modules.LinearCrossEntropyLoss(WIDTH, CLASSES, shift=[1, 2], head_weight=[1, 0.5]))
    given = {"shift": (1, 2), "head_weight": (1, 0.5)}
    target.same(heads(hidden, labels[0]), xent.linear_cross_entropy(hidden, heads.linear.weight, labels[0], **given))
    assert "shift=[1, 2], head_weight=[1, 0.5]" in repr(heads)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"reduction": "average"}, "reduction must be one of"),
    ({"label_smoothing": 2.0}, "label_smoothing must be in"),
    ({"softcap": -1.0}, "softcap must be finite"),
    ({"z_loss": -1.0}, "z_loss must be finite"),
    ({"shift": -1}, "shift must be"),
    ({"workspace": -1}, "workspace must be"),
    ({"shift": (1, 2), "head_weight": (1,)}, "head_weight must have 2 entries"),
    ({"weight": np.ones(3)}, r"weight must have shape \(11,\)"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=str)
def test_wrong_option_is_an_error_at_construction(
    target: Target, modules: Any, arguments: dict[str, Any], message: str
) -> None:
    placed = {
        name: target.arrays(value)[0] if isinstance(value, np.ndarray) else value for name, value in arguments.items()
    }
    with pytest.raises(ValueError, match=message):
        modules.LinearCrossEntropyLoss(WIDTH, CLASSES, **placed)
    if arguments.keys() <= {"reduction", "label_smoothing", "softcap", "z_loss"}:
        with pytest.raises(ValueError, match=message):
            modules.CrossEntropyLoss(**arguments)
