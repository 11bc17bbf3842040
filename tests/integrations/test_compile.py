"""torch.compile compiles a patched model into one graph, which returns deferred logits."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tests.integrations.models import batch, gradients, make, read, worst_difference
from xent.integrations.transformers import patch
from xent.integrations.transformers.deferred import DeferredLogits, is_open


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["gemma2", "phi"])
def test_step(name: str) -> None:
    model = make(name, num_hidden_layers=0)
    plain, expected = gradients(model, batch())
    with patch(model):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        outputs, _ = gradients(compiled, batch())
        found = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
        assert isinstance(outputs.logits, DeferredLogits)
        assert is_open(outputs.logits)
        torch.testing.assert_close(outputs.loss, plain.loss, rtol=1e-6, atol=0)
        assert worst_difference(found, expected) <= 1e-5
        torch.testing.assert_close(read(outputs.logits), plain.logits)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_inductor_and_steps() -> None:
    """Training continues without recompilation, and reading logits of an earlier step raises."""
    model = make("llama", num_hidden_layers=0)
    expected = _train(make("llama", num_hidden_layers=0))
    with patch(model):
        losses = _train(model, torch.compile(model, fullgraph=True))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert losses == pytest.approx(expected, rel=1e-6)


def _train(model: torch.nn.Module, compiled: torch.nn.Module | None = None) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        outputs = (model if compiled is None else compiled)(**batch())
        if compiled is not None and losses:
            with torch.no_grad():
                plain = model(batch()["input_ids"]).logits
            torch.testing.assert_close(read(outputs.logits), plain + 0)
            outputs = compiled(**batch())
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(outputs.loss.item())
        if compiled is not None:
            with pytest.raises(RuntimeError, match="the weights"):
                outputs.logits.sum()
    return losses


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo reads it for all tensors
@pytest.mark.parametrize("outside", [False, True], ids=["compiled logits", "eager logits"])
def test_deferred_logits_enter_a_graph(outside: bool) -> None:
    """A graph break between head and loss, or a separately compiled loss, still gives a fused loss."""
    model, inputs = make("gemma2", num_hidden_layers=0), batch(masked=False)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    expected = loss(model(inputs["input_ids"]).logits, inputs["labels"])
    with patch(model):
        maker = model if outside else torch.compile(model, backend="aot_eager")
        found = torch.compile(loss, backend="aot_eager")(maker(inputs["input_ids"]).logits, inputs["labels"])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, model.lm_head.weight), torch.autograd.grad(expected, model.lm_head.weight)
    )


def test_evaluation() -> None:
    model = make("llama", num_hidden_layers=0).eval()
    with torch.no_grad():
        plain = model(**batch())
        with patch(model):
            outputs = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch())
        torch.testing.assert_close(outputs.loss, plain.loss)
        torch.testing.assert_close(outputs.logits + 0, plain.logits)
