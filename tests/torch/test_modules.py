"""The modules match torch.nn: same constructor, same state, same results."""

import inspect

import pytest
import torch
from torch import nn

from xent.integrations.torch import CrossEntropyLoss, LinearCrossEntropyLoss


def test_constructor_has_the_arguments_of_torch_nn() -> None:
    theirs = inspect.signature(nn.CrossEntropyLoss.__init__).parameters
    ours = inspect.signature(CrossEntropyLoss.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)
    assert isinstance(CrossEntropyLoss(), nn.CrossEntropyLoss)


@pytest.mark.parametrize("shape", [(7,), (4, 7), (4, 7, 3)])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_loss_equals_torch_nn(shape: tuple[int, ...], weighted: bool) -> None:
    torch.manual_seed(0)
    weight = torch.rand(7) if weighted else None
    logits = torch.randn(shape)
    classes = torch.randint(7, shape[:1] + shape[2:] if len(shape) > 1 else ())
    arguments = (weight, None, 3, None, "sum", 0.1)
    torch.testing.assert_close(
        CrossEntropyLoss(*arguments)(logits, classes), nn.CrossEntropyLoss(*arguments)(logits, classes)
    )
    assert CrossEntropyLoss(weight).state_dict().keys() == nn.CrossEntropyLoss(weight).state_dict().keys()


def test_deprecated_options_of_torch_nn() -> None:
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        assert CrossEntropyLoss(size_average=False).reduction == "sum"
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        assert CrossEntropyLoss(reduce=False).reduction == "none"


def test_options_of_the_classifier() -> None:
    module = LinearCrossEntropyLoss(8, 11, dtype=torch.float64, ignore_index=0)
    assert module.linear.weight.dtype == torch.float64
    assert module.ignore_index == 0


def test_logits_in_place() -> None:
    logits, classes = torch.randn(2, 7, requires_grad=True), torch.randint(7, (2,))
    for inplace in (False, True):
        given = logits * 1
        before = given._version
        CrossEntropyLoss(inplace=inplace)(given, classes).backward()
        assert (given._version > before) == inplace


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this PyTorch is older than the module")
def test_linear_loss_loads_a_state_of_torch_nn() -> None:
    theirs = nn.LinearCrossEntropyLoss(8, 11, bias=True, label_smoothing=0.1, weight=torch.rand(11))
    ours = LinearCrossEntropyLoss(8, 11, bias=True, label_smoothing=0.1, weight=torch.ones(11))
    ours.load_state_dict(theirs.state_dict())
    hidden, classes = torch.randn(4, 8), torch.randint(11, (4,))
    torch.testing.assert_close(ours(hidden, classes), theirs(hidden, classes))
    known = set(inspect.signature(LinearCrossEntropyLoss.__init__).parameters)
    assert set(inspect.signature(nn.LinearCrossEntropyLoss.__init__).parameters) - known == {"options"}


def test_wrong_number_of_outputs_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"out_features must be \(\)"):
        LinearCrossEntropyLoss(8, 11, out_features=(2,))


def test_modules_train_under_compile() -> None:
    torch._dynamo.reset()
    module = LinearCrossEntropyLoss(8, 11)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    hidden, classes = torch.randn(4, 8), torch.randint(11, (4,))
    torch.testing.assert_close(compiled(hidden, classes), module(hidden, classes))
