"""Train with transformers' Trainer. xent needs only the two lines with `patch`.

    python examples/trainer.py
    torchrun --nproc-per-node 2 examples/trainer.py

On several processes the Trainer itself counts the tokens of all processes.
"""

import argparse
import tempfile

import torch
from common import batches, make_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from xent.integrations.transformers import patch


class Losses(TrainerCallback):
    """Prints the loss at each step."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Print what the Trainer reports."""
        if state.is_world_process_zero and "loss" in (logs or {}):
            print(f"step {state.global_step - 1}: {float(logs['loss']):.6f}", flush=True)


def main() -> None:
    """Train, evaluate, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=8, help="rows of a step in each process")
    parser.add_argument("--save", help="file for the trained weights")
    options = parser.parse_args()

    patch()
    model = make_model()
    rows = [
        {"input_ids": tokens, "labels": labels}
        for batch in batches(options.steps)
        for tokens, labels in zip(*batch, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.rows,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows[:8], callbacks=[Losses()])
        trainer.train()
        print(f"evaluation: {trainer.evaluate()['eval_loss']:.6f}", flush=True)
    if options.save and trainer.is_world_process_zero():
        torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    main()
