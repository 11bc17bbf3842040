"""The modules match torch.nn: same constructor, same state, same results. They also have xent's options."""

import inspect

import pytest
import torch
from torch import nn

import xent
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


def test_options_reach_the_loss() -> None:
    logits, classes = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    module = CrossEntropyLoss(z_loss=0.1, softcap=3.0, logit_scale=0.5, axis=-1, stats=["lse"], label_smoothing=0.2)
    options = {"z_loss": 0.1, "softcap": 3.0, "logit_scale": 0.5, "stats": ["lse"], "label_smoothing": 0.2}
    sample = torch.rand(2, 5)
    found = module(logits, classes, sample_weight=sample, normalizer=4)
    expected = xent.cross_entropy(logits, classes, sample_weight=sample, normalizer=4, **options)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(found[1].lse, expected[1].lse, rtol=0, atol=0)
    with pytest.raises(ValueError, match="normalizer would be ignored with reduction='sum'"):
        CrossEntropyLoss(reduction="sum", axis=-1)(logits, classes, normalizer=4)
    assert "z_loss=0.1" in repr(module)
    assert "weight" not in repr(module)


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


def test_arguments_reach_the_linear_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr("xent.integrations.torch.linear_cross_entropy", lambda *args, **kwargs: given.append(kwargs))
    module, sample = LinearCrossEntropyLoss(8, 11, workspace=2**20, backend="torch"), torch.rand(2)
    module(torch.randn(2, 8), torch.randint(11, (2,)), sample_weight=sample, normalizer=3)
    assert (given[0]["workspace"], given[0]["backend"], given[0]["normalizer"]) == (2**20, "torch", 3)
    assert given[0]["sample_weight"] is sample


def test_linear_loss_owns_its_classifier() -> None:
    torch.manual_seed(0)
    module = LinearCrossEntropyLoss(8, 11, bias=True, shift=1, weight=torch.rand(11), ignore_index=2)
    assert list(module.state_dict()) == ["weight", "linear.weight", "linear.bias"]
    hidden, labels = torch.randn(2, 5, 8), torch.randint(11, (2, 5))
    labels[:, 3] = 2
    loss = module(hidden, labels)
    logits = module.linear(hidden)[:, :-1].flatten(0, 1)
    plain = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), weight=module.weight, ignore_index=2)
    torch.testing.assert_close(loss, plain)
    loss.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert "shift=1" in repr(module)
    heads = LinearCrossEntropyLoss(8, 11, shift=[1, 2], head_weight=[1, 0.5])
    hidden, classes = torch.randn(2, 3, 8), torch.randint(11, (3,))
    expected = xent.linear_cross_entropy(hidden, heads.linear.weight, classes, shift=(1, 2), head_weight=(1, 0.5))
    torch.testing.assert_close(heads(hidden, classes), expected, rtol=0, atol=0)
    assert "shift=[1, 2], head_weight=[1, 0.5]" in repr(heads)
    with pytest.raises(ValueError, match="head_weight must have 2 entries"):
        LinearCrossEntropyLoss(8, 11, shift=(1, 2), head_weight=(1,))


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this PyTorch is older than the module")
def test_linear_loss_loads_a_state_of_torch_nn() -> None:
    theirs = nn.LinearCrossEntropyLoss(8, 11, bias=True, label_smoothing=0.1, weight=torch.rand(11))
    ours = LinearCrossEntropyLoss(8, 11, bias=True, label_smoothing=0.1, weight=torch.ones(11))
    ours.load_state_dict(theirs.state_dict())
    hidden, classes = torch.randn(4, 8), torch.randint(11, (4,))
    torch.testing.assert_close(ours(hidden, classes), theirs(hidden, classes))
    known = set(inspect.signature(LinearCrossEntropyLoss.__init__).parameters)
    assert set(inspect.signature(nn.LinearCrossEntropyLoss.__init__).parameters) - known == {"options"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduction": "average"}, "reduction must be one of"),
        ({"label_smoothing": 2.0}, "label_smoothing must be in"),
        ({"softcap": -1.0}, "softcap must be finite"),
        ({"weight": torch.ones(3)}, r"weight must have shape \(11,\)"),
        ({"out_features": (2,)}, r"out_features must be \(\)"),
    ],
)
def test_wrong_option_is_an_error_at_construction(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearCrossEntropyLoss(8, 11, **arguments)
    if "reduction" in arguments or "softcap" in arguments:
        with pytest.raises(ValueError, match=message):
            CrossEntropyLoss(**arguments)


def test_modules_train_under_compile() -> None:
    torch._dynamo.reset()
    module = LinearCrossEntropyLoss(8, 11)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    hidden, classes = torch.randn(4, 8), torch.randint(11, (4,))
    torch.testing.assert_close(compiled(hidden, classes), module(hidden, classes))
