"""Train with accelerate, each step in two micro-batches. xent needs only the two lines with `patch`.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

accelerate averages gradients over processes and divides each loss by the number of micro-batches. The losses are
therefore divided by the token count over all processes and micro-batches, and multiplied by both numbers.
"""

import argparse

import torch
from accelerate import Accelerator
from common import batches, make_model

from xent.integrations.transformers import patch

PARTS = 2


def main() -> None:
    """Train, and print the loss at each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", help="file for the trained weights")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=PARTS)
    rank, processes = accelerator.process_index, accelerator.num_processes
    model = make_model()
    patch(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    for step, batch in enumerate(batches(options.steps)):
        tokens, labels = (part[rank::processes].to(accelerator.device) for part in batch)
        count = accelerator.reduce((labels[:, 1:] != -100).sum(), reduction="sum")
        total = torch.zeros((), device=accelerator.device)
        for ids, targets in zip(tokens.chunk(PARTS), labels.chunk(PARTS), strict=True):
            with accelerator.accumulate(model):
                loss = model(ids, labels=targets, num_items_in_batch=count).loss
                accelerator.backward(loss * processes * PARTS)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.detach()
        total = accelerator.reduce(total, reduction="sum")
        accelerator.print(f"step {step}: {total:.6f}", flush=True)

    if accelerator.is_main_process and options.save:
        torch.save(accelerator.unwrap_model(model).state_dict(), options.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
