"""The modules have the results of the functions, store their options, and train."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import xent
from xent.integrations.mlx import CrossEntropyLoss, LinearCrossEntropyLoss, classifier

X, Y = mx.random.normal((2, 5, 64)), mx.array([[0, 3, -100, 10, 2], [1, 1, 4, -100, 9]])
OPTIONS = {"z_loss": 0.1, "softcap": 3.0, "logit_scale": 0.5, "label_smoothing": 0.2, "reduction": "none"}


def test_options_reach_the_loss() -> None:
    logits, sample, weight = (
        mx.random.normal((2, 5, 11)),
        mx.random.uniform(shape=(2, 5)),
        mx.random.uniform(shape=(11,)),
    )
    loss, stats = CrossEntropyLoss(weight, stats=["lse"], **OPTIONS)(logits, Y, sample_weight=sample)
    expected, expected_stats = xent.cross_entropy(
        logits, Y, weight=weight, sample_weight=sample, stats=["lse"], **OPTIONS
    )
    np.testing.assert_array_equal(loss, expected)
    np.testing.assert_array_equal(stats.lse, expected_stats.lse)
    mean = CrossEntropyLoss(weight)(logits, Y, normalizer=4)
    np.testing.assert_array_equal(mean, xent.cross_entropy(logits, Y, weight=weight, normalizer=4))
    with pytest.raises(ValueError, match="normalizer would be ignored with reduction='none'"):
        CrossEntropyLoss(**OPTIONS)(logits, Y, normalizer=4)
    moved = CrossEntropyLoss(axis=1)(logits.swapaxes(1, 2), Y)
    np.testing.assert_allclose(moved.item(), xent.cross_entropy(logits, Y).item(), rtol=1e-6)


def test_class_weight_is_not_a_parameter() -> None:
    assert tree_flatten(CrossEntropyLoss(mx.ones((11,))).parameters()) == []
    assert "z_loss=0.1" in repr(CrossEntropyLoss(**OPTIONS))


@pytest.mark.parametrize("bias", [False, True])
def test_linear_loss_owns_its_classifier(bias: bool) -> None:
    module = LinearCrossEntropyLoss(64, 11, bias=bias, shift=1, workspace=200, weight=mx.ones((11,)))
    assert [name for name, _ in tree_flatten(module.parameters())] == ["linear.weight", "linear.bias"][: 1 + bias]

    def plain(module: LinearCrossEntropyLoss, x: mx.array) -> mx.array:
        targets = Y[:, 1:]
        rows = nn.losses.cross_entropy(module.linear(x)[:, :-1], mx.maximum(targets, 0))
        return mx.where(targets == -100, 0, rows).sum() / (targets != -100).sum()

    found = nn.value_and_grad(module, lambda module, x: module(x, Y))(module, X)
    expected = nn.value_and_grad(module, plain)(module, X)
    np.testing.assert_allclose(found[0].item(), expected[0].item(), rtol=1e-5)
    for (name, one), (_, other) in zip(tree_flatten(found[1]), tree_flatten(expected[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6, err_msg=name)
    module.freeze()
    frozen, expected_frozen = (mx.grad(call)(X) for call in (lambda x: module(x, Y), lambda x: plain(module, x)))
    np.testing.assert_allclose(frozen, expected_frozen, rtol=1e-4, atol=1e-6)
    assert "shift=1" in repr(module)
    heads = LinearCrossEntropyLoss(64, 11, shift=[1, 2], head_weight=[1, 0.5])
    expected = xent.linear_cross_entropy(X, heads.linear.weight, Y[0], shift=(1, 2), head_weight=(1, 0.5))
    np.testing.assert_array_equal(heads(X, Y[0]), expected)
    assert "shift=[1, 2], head_weight=[1, 0.5]" in repr(heads)
    with pytest.raises(ValueError, match="head_weight must have 2 entries"):
        LinearCrossEntropyLoss(64, 11, shift=(1, 2), head_weight=(1,))


def test_quantized_module() -> None:
    module = LinearCrossEntropyLoss(64, 11, bias=True)
    nn.quantize(module, group_size=32, bits=8)
    assert isinstance(module.linear, nn.QuantizedLinear)
    unpacked = mx.dequantize(module.linear.weight, module.linear.scales, module.linear.biases, group_size=32, bits=8)
    expected = xent.linear_cross_entropy(X, unpacked, Y, linear_bias=module.linear.bias)
    np.testing.assert_allclose(module(X, Y).item(), expected.item(), rtol=1e-5)


def test_unknown_module_as_classifier() -> None:
    with pytest.raises(TypeError, match=r"module must be one of mlx\.nn's Linear, Embedding, .* got Conv1d"):
        classifier(nn.Conv1d(2, 2, 3))


def test_module_in_place_of_its_weight() -> None:
    with pytest.raises(TypeError, match=r"linear_weight must be .*classifier\(module\)"):
        xent.linear_cross_entropy(X, nn.Linear(64, 11), Y)


def test_modules_train() -> None:
    import mlx.optimizers as optim

    module, optimizer = LinearCrossEntropyLoss(64, 11), optim.SGD(0.5)
    step = nn.value_and_grad(module, lambda module: module(X, Y))
    losses = []
    for _ in range(5):
        loss, gradients = step(module)
        optimizer.update(module, gradients)
        mx.eval(module.parameters(), loss)
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduction": "average"}, "reduction must be one of"),
        ({"label_smoothing": 2.0}, "label_smoothing must be in"),
        ({"weight": mx.ones((3,))}, r"weight must have shape \(11,\)"),
    ],
    ids=str,
)
def test_wrong_option_is_an_error_at_construction(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearCrossEntropyLoss(64, 11, **arguments)


@pytest.mark.parametrize("module", [nn.Linear(64, 11), nn.Embedding(11, 64)], ids=["linear", "embedding"])
def test_module_instead_of_its_weight(module: nn.Module) -> None:
    with pytest.raises(
        TypeError, match=r"pass linear_weight, linear_bias = xent\.integrations\.mlx\.classifier\(module\)"
    ):
        xent.linear_cross_entropy(X, module, Y)
    weight, bias = classifier(module)
    assert xent.linear_cross_entropy(X, weight, Y, linear_bias=bias).shape == ()
