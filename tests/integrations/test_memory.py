"""No step of training or evaluation stores a tensor of the size of the logits, whatever is between model and loss.

Tensors inside of `xent.linear_cross_entropy` are not visible here; it has its own tests.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.integrations.models import SMALL, device
from tests.integrations.training import run
from xent.integrations.transformers import calls, explain, patch, unpatch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(transformers|accelerate).*"),
]

ROWS, LENGTH, VOCABULARY = 4, 64, 2048
LOGITS = ROWS * LENGTH * VOCABULARY


class Largest(TorchDispatchMode):
    """Records the largest number of elements in the memory of any result."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and not result.is_meta:  # a meta tensor has a size and no memory
                self.elements = max(self.elements, result.untyped_storage().nbytes() // result.itemsize)
        return results


@pytest.fixture
def largest() -> Iterator[Largest]:
    with Largest() as watched:
        yield watched


def train(folder: Path, fuse: bool, settings: dict[str, Any]) -> None:
    """Train for a step, and evaluate."""
    config = transformers.Gemma2Config(**{**SMALL, "vocab_size": VOCABULARY, "head_dim": 8})
    tokens = [torch.arange(LENGTH) + row for row in range(ROWS)]
    rows = [{"input_ids": each, "labels": each} for each in tokens]
    run(folder, fuse, model=transformers.Gemma2ForCausalLM(config), rows=rows, max_steps=1, eval_steps=1, **settings)


SETTINGS = {
    "float32": {},
    "autocast": {"bf16": True},
    "smoothing": {"label_smoothing_factor": 0.1},
    "smoothing under autocast": {"label_smoothing_factor": 0.1, "bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_are_never_stored(name: str, tmp_path: Path, largest: Largest) -> None:
    train(tmp_path, True, SETTINGS[name])
    assert 0 < largest.elements < LOGITS // 4  # the classifier has an eighth


def test_stored_logits_are_detected(tmp_path: Path, largest: Largest) -> None:
    train(tmp_path, False, {})
    assert largest.elements >= LOGITS


def entropy(logits: Tensor) -> Tensor:
    """Compute the entropy of each row from parts of the rows, as TRL and verl do."""
    parts = [torch.log_softmax(part, -1) for part in logits.reshape(-1, VOCABULARY).split(16)]
    return torch.cat([-(part.exp() * part).sum(-1) for part in parts])


def step(model: Any, tokens: Tensor, logs: bool) -> list[Any]:
    """Make a step of TRL's supervised fine-tuning, which may log accuracy and entropy of the step."""
    outputs = model(input_ids=tokens, labels=tokens)
    logged: list[Any] = []
    if logs:
        with torch.no_grad():
            shifted = outputs.logits[..., :-1, :].contiguous()
            logged = [(shifted.argmax(dim=-1) == tokens[:, 1:]).float().mean(), entropy(outputs.logits)]
    outputs.loss.backward()
    return logged


def test_metrics_of_a_training_step(largest: Largest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that logs accuracy and entropy stores no logits, and warns of nothing."""
    monkeypatch.setattr(calls, "rows_per_chunk", lambda rows, *args: min(rows, 64))
    config = transformers.Gemma2Config(**{**SMALL, "vocab_size": VOCABULARY, "head_dim": 8})
    model, tokens = transformers.Gemma2ForCausalLM(config).to(device), torch.arange(4 * LENGTH, device=device)
    tokens = tokens.view(ROWS, LENGTH) % VOCABULARY
    patch(model)
    most = []
    for logs in (False, True):
        largest.elements = 0
        ours = step(model, tokens, logs)
        most.append(largest.elements)
    assert most[1] == most[0] < LOGITS // 4 + 1
    assert "computed besides" not in explain(model)
    unpatch(model)
    torch.testing.assert_close(ours, step(model, tokens, True), rtol=1e-5, atol=1e-5)
