"""Short trainings with the Trainer of transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from tests.integrations.models import VOCABULARY, device, make
from tests.integrations.precision import multiply_in_float32
from xent.integrations.transformers import patch

__all__ = ["Rows", "run"]


class Rows(torch.utils.data.Dataset):
    """Rows of tokens with different lengths, some labels masked."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.rows = torch.randint(3, VOCABULARY, (count, 10), generator=generator)
        self.masked = torch.randint(1, 8, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        labels = self.rows[place].clone()
        labels[: self.masked[place]] = -100
        return {"input_ids": self.rows[place], "labels": labels}


def run(
    folder: Path, fuse: bool, name: str = "llama", model: Any = None, rows: Any = None, **settings: Any
) -> tuple[Trainer, list[float]]:
    """Train for three steps of eight rows, evaluate, and return the losses in their order."""
    model = model or make(name)
    if fuse:
        patch(model)
    arguments = {
        "output_dir": str(folder / ("fused" if fuse else "plain")),
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 4,
        "max_steps": 3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "learning_rate": 0.05,
        "optim": "sgd",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
        "seed": 3,
    } | settings
    metrics = arguments.pop("compute_metrics", None)
    chosen = TrainingArguments(**arguments)
    if chosen.n_gpu > 1:
        chosen._n_gpu = 1  # otherwise the Trainer uses DataParallel
    trainer = Trainer(
        model, chosen, train_dataset=rows or Rows(24), eval_dataset=rows or Rows(8), compute_metrics=metrics
    )
    multiply_in_float32()
    trainer.train()
    history = trainer.state.log_history
    return trainer, [entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry]
