"""Train with Lightning. xent needs only the two lines with `patch`.

    python examples/lightning_module.py
    torchrun --nproc-per-node 2 examples/lightning_module.py

Lightning averages gradients over processes. Each loss is therefore divided by the token count over all processes and
multiplied by the number of processes, as in ddp.py.
"""

import argparse
import os

import lightning
import torch
from common import batches, make_model
from torch.utils.data import DataLoader

from xent.integrations.transformers import patch


class Language(lightning.LightningModule):
    """A small language model and its training step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        patch(self.model)

    def training_step(self, batch, index):
        """Return the loss of this process's rows, and print that of all rows."""
        tokens, labels = (part[self.global_rank :: self.trainer.world_size] for part in batch)
        count = self.trainer.strategy.reduce((labels[:, 1:] != -100).sum(), reduce_op="sum")
        loss = self.model(tokens, labels=labels, num_items_in_batch=count).loss
        total = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="sum")
        self.print(f"step {index}: {total:.6f}", flush=True)
        return loss * self.trainer.world_size

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Train, and print the loss at each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", help="file for the trained weights")
    options = parser.parse_args()

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=1, devices=processes, use_distributed_sampler=False, **quiet)
    module = Language()
    trainer.fit(module, DataLoader(list(batches(options.steps)), batch_size=None))
    if options.save and trainer.is_global_zero:
        torch.save(module.model.state_dict(), options.save)


if __name__ == "__main__":
    main()
