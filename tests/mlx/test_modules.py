"""Classifiers of MLX's modules, and parameters and training of xent's."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import xent
from xent.integrations.mlx import CrossEntropyLoss, LinearCrossEntropyLoss, classifier

X, Y = mx.random.normal((2, 5, 64)), mx.array([[0, 3, -100, 10, 2], [1, 1, 4, -100, 9]])


def test_class_weight_is_not_a_parameter() -> None:
    assert tree_flatten(CrossEntropyLoss(mx.ones((11,))).parameters()) == []
    module = LinearCrossEntropyLoss(64, 11, bias=True, weight=mx.ones((11,)))
    assert [name for name, _ in tree_flatten(module.parameters())] == ["linear.weight", "linear.bias"]


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


@pytest.mark.parametrize("module", [nn.Linear(64, 11), nn.Embedding(11, 64)], ids=["linear", "embedding"])
def test_module_instead_of_its_weight(module: nn.Module) -> None:
    with pytest.raises(
        TypeError, match=r"pass linear_weight, linear_bias = xent\.integrations\.mlx\.classifier\(module\)"
    ):
        xent.linear_cross_entropy(X, module, Y)
    weight, bias = classifier(module)
    assert xent.linear_cross_entropy(X, weight, Y, linear_bias=bias).shape == ()
