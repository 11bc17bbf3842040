"""What FP8 costs: losses while a small model trains, and errors against float64 with what it has learned.

`python -m benchmarks.fp8` trains the model of the demo, a GPT with tied embeddings, on the source of Python's standard
library. Models of a seed have the same initial weights and batches, and differ in the head of their loss. Their losses
are computed again in float32, where the heads no longer differ. Then it takes the first model, and compares loss and
gradients of heads, in bfloat16, with float64 ones of the same bfloat16 factors. It needs the dependency group `demo`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import xent
from benchmarks.devices import default_device
from benchmarks.facts import device_facts, machine_facts, merge
from benchmarks.fp8_report import draw, make_table, read
from demo.model import LanguageModel
from demo.text import Text, load_text, sample_batches, validation_batch

__all__ = ["main"]

Head = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(hidden states (N, D), classifier (V, D), both bfloat16, targets (N,), logit scale) -> mean loss"""


@dataclass(frozen=True)
class _Sizes:
    """Losses are computed in float32 at each `every`-th step, on held-out text at each `held_out_every`-th."""

    steps: int = 500
    every: int = 4
    held_out_every: int = 100
    batch: int = 16
    context: int = 512
    width: int = 512
    layers: int = 6
    heads: int = 8
    vocabulary: int = 16384
    held_out: int = 128


_QUICK = _Sizes(25, 1, 5, batch=2, context=32, width=32, layers=1, heads=2, vocabulary=512, held_out=4)


def _plain(hidden: Tensor, weight: Tensor, target: Tensor, scale: float) -> Tensor:
    """Return the loss of a bfloat16 head of PyTorch."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(scale * (logits.float() if logits.dtype == torch.bfloat16 else logits), target)


def _xent(
    hidden: Tensor, weight: Tensor, target: Tensor, scale: float, *, precision: str | None, backend: str
) -> Tensor:
    loss: Tensor = xent.linear_cross_entropy(
        hidden, weight, target, logit_scale=scale, precision=precision, backend=backend
    )
    return loss


class _Throughout(torch.autograd.Function):
    """A head with every product of 8-bit factors, also at the target: PyTorch's operations, with all logits stored."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, scale: float) -> Tensor:
        rows, classes = _quantized(hidden, torch.float8_e4m3fn), _quantized(weight, torch.float8_e4m3fn)
        logits = scale * (rows[0] @ classes[0].T).float().mul_(rows[1]).mul_(classes[1].T)
        grad = logits.softmax(1)
        grad[torch.arange(len(target), device=target.device), target] -= 1
        grad *= scale / len(target)
        for_hidden = _quantized(grad * classes[1].T, torch.float8_e5m2)
        for_weight = _quantized((grad * rows[1]).T, torch.float8_e4m3fn)
        ctx.save_for_backward(
            (for_hidden[0] @ classes[0]).float().mul_(for_hidden[1]).bfloat16(),
            (for_weight[0] @ rows[0]).float().mul_(for_weight[1]).bfloat16(),
        )
        return F.cross_entropy(logits, target)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        return upstream * hidden, upstream * weight, None, None


def _quantized(matrix: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes, as exact bfloat16 numbers, and scales (R, 1) of the rows of a matrix."""
    scale = (matrix.abs().amax(1, keepdim=True).float() / torch.finfo(kind).max).clamp_(min=2.0**-100)
    return (matrix.float() / scale).to(kind).bfloat16(), scale


def _heads(device: str) -> dict[str, Head]:
    """Return the heads that models are trained with."""
    backend = "torch" if device == "cpu" else "auto"
    return {
        "bfloat16": partial(_xent, precision=None, backend=backend),
        "FP8": partial(_xent, precision="fp8", backend=backend),
        "FP8 throughout": _Throughout.apply,
    }


def _train(text: Text, sizes: _Sizes, head: Head, seed: int, device: str) -> tuple[LanguageModel, dict[str, Any]]:
    """Return a trained model and its losses: [step, float32, as the head computed it], and [step, held out]."""
    torch.manual_seed(seed)
    model = LanguageModel(text.vocabulary, sizes.context, sizes.width, sizes.layers, sizes.heads).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, sizes.steps, pct_start=0.1, cycle_momentum=False)
    training, held_out = [], []
    start = time.monotonic()
    for step, batch in enumerate(sample_batches(text, sizes.steps, sizes.batch, sizes.context, seed), 1):
        windows = batch.to(device, non_blocking=True)
        target = windows[:, 1:].flatten()
        with torch.autocast(device, torch.bfloat16):
            hidden = model(windows[:, :-1]).flatten(0, 1)
        loss = head(hidden.bfloat16(), model.head.weight.bfloat16(), target, 1.0)
        if step % sizes.every == 0:
            training.append((step, _wide_loss(hidden, model.head.weight, target), loss.detach()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % sizes.held_out_every == 0:
            held_out.append((step, _held_out_loss(model, text, sizes, device)))
    curves = {
        name: [[step, *(round(float(loss), 4) for loss in losses)] for step, *losses in points]
        for name, points in (("training", training), ("held out", held_out))
    }
    return model, {**curves, "seconds": round(time.monotonic() - start, 1)}


@torch.no_grad()
def _wide_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden.float(), weight.float()), target)


@torch.no_grad()
def _held_out_loss(model: LanguageModel, text: Text, sizes: _Sizes, device: str) -> Tensor:
    windows = validation_batch(text, sizes.held_out, sizes.context).to(device).split(sizes.batch)
    losses = [
        _wide_loss(model(part[:, :-1]).flatten(0, 1), model.head.weight, part[:, 1:].flatten()) for part in windows
    ]
    return torch.stack(losses).mean()


def _errors(model: LanguageModel, text: Text, sizes: _Sizes, device: str) -> Iterator[dict[str, Any]]:
    """Yield the errors of each head on held-out text: of the loss, and relative ones of gradients.

    Rows are those of the classifier's gradient. The tied embedding's is the sum of the classifier's and that of the
    inputs. An outlier is a channel of the hidden states times 100; the logits are the same if the classifier's is
    divided by 100.
    """
    windows = validation_batch(text, sizes.batch, sizes.context).to(device)
    target = windows[:, 1:].flatten()
    states = model(windows[:, :-1]).flatten(0, 1)
    is_target = torch.zeros(text.vocabulary, dtype=torch.bool, device=device).index_fill_(0, target, 1)

    def gradients(head: Head, leaves: Sequence[Tensor], scale: float) -> tuple[float, dict[str, Tensor]]:
        loss = head(*leaves, target, scale)
        hidden, weight = (gradient.double() for gradient in torch.autograd.grad(loss, leaves))
        (embedded,) = torch.autograd.grad(states, model.token.weight, hidden.to(states), retain_graph=True)
        rows = {"rows of targets": weight[is_target], "other rows": weight[~is_target]}
        return loss.item(), {"hidden states": hidden, "classifier": weight, **rows, "tied embedding": weight + embedded}

    channels = {"trained": (1, 1), "outlier, same logits": (100, 0.01), "outlier": (100, 1)}
    for (data, factors), scale in product(channels.items(), (0.5, 1.0, 2.0)):
        leaves = [matrix.detach().clone() for matrix in (states, model.head.weight)]
        for leaf, factor in zip(leaves, factors, strict=True):
            leaf[:, 0] *= factor
        leaves = [leaf.bfloat16().requires_grad_() for leaf in leaves]
        mean, true = gradients(_plain, [leaf.detach().double().requires_grad_() for leaf in leaves], scale)
        for name, head in {"PyTorch": _plain, **_heads(device)}.items():
            loss, results = gradients(head, leaves, scale)
            errors = {part: float((results[part] - true[part]).norm() / true[part].norm()) for part in true}
            fields = {"data": data, "scale": scale, "head": name, "mean loss": mean, "loss": loss - mean}
            yield fields | {part: float(f"{error:.4g}") for part, error in errors.items()}


def _append(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and compare; write results, a picture, and tables to the terminal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8", description=(__doc__ or "").splitlines()[0])
    add: Any = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default=default_device(), help="default: the GPU, if there is one")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights and batches (default: 0 1 2)")
    add("--quick", action="store_true", help="tiny sizes: does everything still run?")
    add("--resume", action="store_true", help="keep the runs that the files of results have")
    add("--minutes", type=float, default=float("inf"), help="begin no other seed after so many")
    add("--show", action="store_true", help="measure nothing, show the results that are there")
    add(
        "--out", type=Path, default=Path(__file__).with_name("out"), help="folder of the results (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    suffix = "-quick" if options.quick else ""
    curves, errors = (options.out / f"fp8-{name}{suffix}.jsonl" for name in ("training", "errors"))
    if not options.show:
        _measure(options, curves, errors)
    draw(read(curves, "seed"), curves.with_suffix(".png"))
    print(make_table(curves).markdown(), make_table(errors).markdown(), sep="\n")
    return 0


def _measure(options: argparse.Namespace, curves: Path, errors: Path) -> None:
    """Train what is not in the files yet; the errors are of the first model that is trained without a file of them."""
    deadline = time.monotonic() + 60 * options.minutes
    sizes = _QUICK if options.quick else _Sizes()
    text = load_text(sizes.vocabulary, seed=0)
    if not options.resume:
        curves.unlink(missing_ok=True)
        errors.unlink(missing_ok=True)
    machine = {"machine": merge(machine_facts(), device_facts(options.device))}
    facts = {"sizes": {**asdict(sizes), "vocabulary": text.vocabulary}, "characters": text.characters}
    _append(curves, machine, facts)
    present = {(run["seed"], run["head"]) for run in read(curves, "seed")}
    for seed in options.seeds:
        for name, head in _heads(options.device).items() if time.monotonic() < deadline else ():
            if (seed, name) in present:
                continue
            model, run = _train(text, sizes, head, seed, options.device)
            _append(curves, {"seed": seed, "head": name, **run})
            print(
                f"seed {seed}, {name}: {run['training'][-1]}, held out {run['held out'][-1]}, {run['seconds']} s",
                flush=True,
            )
            if not errors.exists():
                _append(errors, machine, facts, *_errors(model, text, sizes, options.device))


if __name__ == "__main__":
    sys.exit(main())
