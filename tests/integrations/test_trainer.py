"""The real Trainer with a patched model. A user only adds the import and the call of `patch`."""

from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from tests.integrations.models import batch, make
from tests.integrations.training import Rows, run
from xent.integrations.transformers import patch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(transformers|accelerate).*"),
]


PARTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"name": "gemma2"},
    "mixtral": {"name": "mixtral"},
    "smoothing": {"label_smoothing_factor": 0.1},
    "smoothing and accumulation": {"label_smoothing_factor": 0.1, **PARTS},
    "smoothing and softcap": {"name": "gemma2", "label_smoothing_factor": 0.1},
    "accumulation": PARTS,
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_training_and_evaluation(settings: dict[str, Any], tmp_path: Path, fused: list[tuple[int, ...]]) -> None:
    """Losses and weights with and without patch agree."""
    plain, expected = run(tmp_path, False, **settings)
    assert not fused
    patched, losses = run(tmp_path, True, **settings)
    assert fused
    assert len(losses) == 4
    assert losses == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(patched.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["dict", "tuple"])
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize(("ignored", "count"), [(-100, None), (7, None), (-100, 37), (-100, torch.tensor(37))])
def test_label_smoother(form: str, shift: bool, ignored: int, count: Any, fused: list[tuple[int, ...]]) -> None:
    """For all arguments of its caller. Labels with another shape get real logits."""
    model, inputs = make("gemma2"), batch()
    labels = inputs["labels"].where(inputs["labels"] != -100, ignored)
    smoother = LabelSmoother(epsilon=0.2, ignore_index=ignored)
    given = {"num_items_in_batch": count} if "num_items_in_batch" in signature(smoother).parameters else {}
    losses, gradients = [], []
    for fuse in (False, True):
        with patch(model) if fuse else nullcontext():
            logits = model(inputs["input_ids"]).logits
            outputs = {"logits": logits} if form == "dict" else (logits, None)
            losses.append(smoother(outputs, labels, shift_labels=shift, **given))
        gradients.append(torch.autograd.grad(losses[-1], model.lm_head.weight)[0])
    assert len(fused) == 1
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    with patch(model), pytest.warns(RuntimeWarning, match=r"log_softmax looked at them at .*trainer_pt_utils"):
        spread = smoother({"logits": model(inputs["input_ids"]).logits}, labels[..., None], **given)
    assert len(fused) == 1
    if not shift:
        torch.testing.assert_close(spread, losses[0])


def test_bfloat16(tmp_path: Path, fused: list[tuple[int, ...]]) -> None:
    """Under autocast accelerate converts outputs to float32. They stay deferred, and the losses agree."""
    _, expected = run(tmp_path, False, bf16=True)
    _, losses = run(tmp_path, True, bf16=True)
    assert fused
    assert losses == pytest.approx(expected, rel=2.0**-8)


def test_metrics_get_logits(tmp_path: Path, fused: list[tuple[int, ...]]) -> None:
    def accuracy(prediction: Any) -> dict[str, float]:
        right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {
            "accuracy": float(right[prediction.label_ids[:, 1:] != -100].mean()),
            "sum": prediction.predictions.sum(),
        }

    results = []
    for fuse in (False, True):
        trainer, _ = run(tmp_path, fuse, compute_metrics=accuracy)
        results.append(trainer.evaluate())
    assert fused
    for key in ("eval_loss", "eval_accuracy", "eval_sum"):
        assert results[1][key] == pytest.approx(results[0][key], rel=1e-4)


def test_checkpoint_reloads_unpatched(tmp_path: Path) -> None:
    trainer, losses = run(tmp_path, True, save_strategy="steps", save_steps=3)
    folder = tmp_path / "fused" / "checkpoint-3"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model.lm_head) is nn.Linear
    again = Trainer(model, trainer.args, eval_dataset=Rows(8)).evaluate()
    assert again["eval_loss"] == pytest.approx(losses[-1], rel=1e-6)
    resumed = Trainer(make("llama"), trainer.args, train_dataset=Rows(24), eval_dataset=Rows(8))
    resumed.train(resume_from_checkpoint=str(folder))
    for ours, theirs in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
