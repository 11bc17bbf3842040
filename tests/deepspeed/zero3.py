"""Training with DeepSpeed's ZeRO-3, which gathers a weight only during its module's call, patched and unpatched.

This is a script for torchrun. It prints a line for each way to train.
"""

import os
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import xent
from tests.integrations import trl_training
from tests.integrations.models import batch, make
from xent.integrations import trl
from xent.integrations.transformers import explain, patch
from xent.integrations.transformers.deferred import DeferredLogits, is_open

__all__ = ["TRAINERS", "WAYS"]

WAYS = {
    "untied": ("llama", "loss of the model"),
    "tied": ("llama-tied", "loss of the model"),
    "a soft cap": ("gemma2", "loss of the model"),
    "a bias": ("phi", "loss of the model"),
    "loss outside": ("llama", "loss outside"),
    "tied, loss outside": ("llama-tied", "loss outside"),
    "tied, losses of tokens outside": ("llama-tied", "losses of tokens outside"),
    "logits read": ("llama", "logits read"),
}
"""Name of a way -> (model, how its loss is computed)"""
TRAINERS = ("sft", "dpo")
STEPS, ACCUMULATED = 3, 2
DEVICE = "cpu" if os.environ.get("DS_ACCELERATOR") == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}"

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": ACCUMULATED,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}


def loss_of(engine: Any, inputs: dict[str, torch.Tensor], way: str) -> tuple[torch.Tensor, Any]:
    """Return the loss and the logits of one forward pass."""
    if way == "loss of the model":
        outputs = engine(**inputs)
        return outputs.loss, outputs.logits
    logits = engine(inputs["input_ids"]).logits
    target = inputs["labels"][:, 1:].flatten()
    if way == "logits read":
        return F.nll_loss(logits[:, :-1].log_softmax(-1).flatten(0, 1), target), logits
    if way == "losses of tokens outside":  # the backward pass computes the logits again
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), target, reduction="none")
        return (losses * torch.arange(len(losses), device=losses.device)).sum() / 100, logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target), logits


def train(name: str, way: str, patched: bool) -> tuple[list[float], list[torch.Tensor], str]:
    """Return the losses and the trained weights, and what explain says."""
    model = make(name).train()
    if patched:
        patch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    assert not model.get_output_embeddings().weight.numel(), "the head must be partitioned"
    losses = []
    for step in range(STEPS * ACCUMULATED):
        inputs = {key: value[(step + dist.get_rank()) % 4, None].to(DEVICE) for key, value in batch(rows=4).items()}
        loss, logits = loss_of(engine, inputs, way)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if patched and way != "logits read":
            assert is_open(logits), explain(model)
            if (step + 1) % ACCUMULATED == 0:
                check_stale(logits)
        del loss, logits
    said = explain(model)
    with torch.no_grad():
        outputs = engine(**inputs)
        assert isinstance(outputs.logits, DeferredLogits) == patched
        losses += [outputs.loss.item(), outputs.logits.float().logsumexp(-1).sum().item()]
    weights = whole(model)
    engine.destroy()
    return losses, weights, said


def whole(model: Any) -> list[torch.Tensor]:
    """Return all weights, gathered."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [value.detach().clone() for value in model.parameters()]


def train_with_trl(
    name: str, model: Any, patched: bool, folder: Path
) -> tuple[list[dict[str, float]], list[torch.Tensor], int]:
    """Return what a trainer of TRL logs, the trained weights, and the number of fused losses or log-probabilities."""
    config = {**CONFIG, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": ACCUMULATED, "deepspeed": config}
    with ExitStack() as stack:
        functions = [
            stack.enter_context(mock.patch.object(xent, each, wraps=getattr(xent, each)))
            for each in ("linear_cross_entropy", "linear_log_probs")
        ]
        if patched:
            stack.enter_context(trl.patch())
            stack.enter_context(patch(model))
        run, trainer = trl_training.train(name, model, folder, **settings)
    weights = whole(trainer.model)
    trainer.deepspeed.destroy()
    return run.logs, weights, sum(function.call_count for function in functions)


def check_stale(logits: torch.Tensor) -> None:
    """Expect an error for logits that are read after the step."""
    with pytest.raises(RuntimeError, match="never computed, and cannot be computed now"):
        logits.sum()


def main() -> None:
    """Compare patched and unpatched models, and print the results."""
    deepspeed.init_distributed("gloo" if DEVICE == "cpu" else "nccl")
    for name, (model, way) in WAYS.items():
        expected, wanted, _ = train(model, way, False)
        losses, weights, said = train(model, way, True)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-5)
        if dist.get_rank() == 0:
            print(f"{name}: {'fused' if 'Training: fused.' in said else 'computed'}", flush=True)
    # After the first trainer transformers creates models in shards.
    models = {name: (trl_training.make_model(), trl_training.make_model()) for name in TRAINERS}
    for name, (plain, patched) in models.items():
        with TemporaryDirectory() as folder:
            expected_logs, wanted, _ = train_with_trl(name, plain, False, Path(folder))
            logs, weights, fused = train_with_trl(name, patched, True, Path(folder))
        assert fused
        for ours, theirs in zip(logs, expected_logs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-5)
        if dist.get_rank() == 0:
            print(f"{name}: fused", flush=True)
    time.sleep(1)  # as in `watched`
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
