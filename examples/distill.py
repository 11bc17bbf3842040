"""Distillation: train a small language model to predict what a larger one predicts.

    python -m examples.distill --plot distill.png

A teacher learns the source code of Python's standard library, as in `demo`. Then four students with a third of its
width are trained from the same weights on the same batches: on the text alone; on the teacher's hidden states, with
`xent.linear_divergence` and `xent.LinearTeacher`; on the teacher's K most probable classes of each token, stored once,
with `xent.TopKTeacher`; and on the logits of both sides, with PyTorch's own operations. The table shows each student's
divergence from the teacher on held-out text, and the memory and time of its loss.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import xent
from demo.device import synchronize
from demo.gauge import make_gauge
from demo.model import LanguageModel
from demo.text import load_text, sample_batches, validation_batch

Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(hidden states, classifier, targets, step) -> loss"""


@dataclass
class Student:
    """The results of one way of training."""

    curve: list[tuple[int, float]] = field(default_factory=list)
    """(number of steps, divergence from the teacher on held-out text)"""
    loss: float = 0.0
    agreement: float = 0.0
    mib: float | None = None
    milliseconds: float = 0.0


def main() -> None:
    """Train, print the table, and draw the curves."""
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = load_text(options.vocabulary, seed=0)
    steps, context = options.steps, options.context
    batches = sample_batches(text, steps, options.batch, context, seed=1).to(device)
    held_back = validation_batch(text, 16, context).to(device)
    torch.manual_seed(0)
    teacher = LanguageModel(text.vocabulary, context, width=options.width, layers=4).to(device)
    train(teacher, sample_batches(text, 2 * steps, options.batch, context, seed=2).to(device), from_text)
    teacher.requires_grad_(False)

    with torch.no_grad():
        stored = [top_k(teacher, windows[:, :-1], options.classes) for windows in batches]
    kept = sum(one.nbytes for part in stored for one in part)
    whole = len(stored) * stored[0][0].shape[:-1].numel() * text.vocabulary * 2
    print(f"the teacher's {options.classes} most probable classes of each token: {kept / 2**20:.1f} MiB stored, "
          f"where its bfloat16 logits would take {whole / 2**20:.0f}")  # fmt: skip

    def teacher_states(step: int) -> Tensor:
        with torch.no_grad():
            states: Tensor = teacher(batches[step, :, :-1])
        return states

    def from_states(hidden: Tensor, weight: Tensor, targets: Tensor, step: int) -> Tensor:
        source = xent.LinearTeacher(teacher_states(step), teacher.head.weight)
        loss: Tensor = xent.linear_divergence(hidden, weight, source)
        return loss

    def from_stored(hidden: Tensor, weight: Tensor, targets: Tensor, step: int) -> Tensor:
        ids, log_probs = stored[step]
        loss: Tensor = xent.linear_divergence(hidden, weight, xent.TopKTeacher(ids, log_probs))
        return loss

    def unfused(hidden: Tensor, weight: Tensor, targets: Tensor, step: int) -> Tensor:
        log_p = F.linear(hidden, weight).float().log_softmax(-1)
        log_q = F.linear(teacher_states(step), teacher.head.weight).float().log_softmax(-1)
        return F.kl_div(log_p.flatten(0, -2), log_q.flatten(0, -2), reduction="batchmean", log_target=True)

    first = LanguageModel(text.vocabulary, context, width=options.width // 3 // 4 * 4, layers=2).to(device)
    ways: dict[str, Loss] = {
        "text alone": from_text,
        "hidden states": from_states,
        f"stored top {options.classes}": from_stored,
        "logits, unfused": unfused,
    }
    students = {}
    for name, loss in ways.items():
        student = copy.deepcopy(first)
        found = students[name] = Student()

        def tell(step: int, student: LanguageModel = student, found: Student = found) -> None:
            found.curve.append((step, apart(student, teacher, held_back)))

        train(student, batches, loss, tell)
        judge(student, teacher, held_back, found)
        measure(student, batches, loss, found, device)
    print_table(students, teacher, held_back)
    if options.plot:
        draw(students, options.plot)


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--context", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--width", type=int, default=192, help="of the teacher")
    parser.add_argument("--classes", type=int, default=32, help="K of the stored classes")
    parser.add_argument("--plot", type=Path, help="file for the curves")
    return parser.parse_args()


def from_text(hidden: Tensor, weight: Tensor, targets: Tensor, step: int) -> Tensor:
    """Return the cross entropy of the text."""
    loss: Tensor = xent.linear_cross_entropy(hidden, weight, targets)
    return loss


def train(model: LanguageModel, batches: Tensor, loss: Loss, tell: Callable[[int], None] | None = None) -> None:
    """Train on the batches; call `tell` ten times with the number of steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=len(batches) + 1)
    for step, windows in enumerate(batches):
        loss(model(windows[:, :-1]), model.head.weight, windows[:, 1:], step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if tell is not None and (step + 1) % max(len(batches) // 10, 1) == 0:
            tell(step + 1)


def top_k(teacher: LanguageModel, tokens: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the most probable classes of each token and their log-probabilities, to be stored."""
    log_probs, ids = F.linear(teacher(tokens), teacher.head.weight).float().log_softmax(-1).topk(classes)
    return ids.to(torch.int32), log_probs


@torch.no_grad()
def apart(student: LanguageModel, teacher: LanguageModel, windows: Tensor) -> float:
    """Return the student's divergence from the teacher."""
    source = xent.LinearTeacher(teacher(windows[:, :-1]), teacher.head.weight)
    return float(xent.linear_divergence(student(windows[:, :-1]), student.head.weight, source))


@torch.no_grad()
def judge(student: LanguageModel, teacher: LanguageModel, windows: Tensor, found: Student) -> None:
    """Record the student's loss on the text, and the share of tokens for which it predicts the teacher's class."""
    predictions = []
    for model in (student, teacher):
        loss, stats = xent.linear_cross_entropy(
            model(windows[:, :-1]), model.head.weight, windows[:, 1:], stats=("predictions",)
        )
        predictions.append(stats.predictions)
        if model is student:
            found.loss = float(loss)
    found.agreement = float((predictions[0] == predictions[1]).float().mean())


def measure(student: LanguageModel, batches: Tensor, loss: Loss, found: Student, device: torch.device) -> None:
    """Record peak memory and time of the loss, forward and backward pass, without those of the student's layers."""
    windows, gauge, seconds = batches[0], make_gauge(device), []
    hidden = student(windows[:, :-1]).detach().requires_grad_()
    for repeat in range(4):
        if repeat == 1:
            gauge.start()
        synchronize(device)
        begun = time.perf_counter()
        loss(hidden, student.head.weight, windows[:, 1:], 0).backward()
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
        if repeat == 1:
            peak = gauge.peak()
            found.mib = None if peak is None else peak / 2**20
        hidden.grad = student.head.weight.grad = None
    found.milliseconds = 1000 * min(seconds[2:])


def print_table(students: dict[str, Student], teacher: LanguageModel, windows: Tensor) -> None:
    """Print one row per student."""
    itself = Student()
    judge(teacher, teacher, windows, itself)
    print(f"{'student trained from':22}{'KL from teacher':>16}{'agreement':>11}{'loss':>8}{'MiB':>8}{'ms':>8}")
    print(f"{'(the teacher itself)':22}{0.0:16.3f}{1.0:11.1%}{itself.loss:8.3f}")
    for name, found in students.items():
        memory = "?" if found.mib is None else f"{found.mib:.0f}"
        print(f"{name:22}{found.curve[-1][1]:16.3f}{found.agreement:11.1%}{found.loss:8.3f}{memory:>8}"
              f"{found.milliseconds:8.1f}")  # fmt: skip


def draw(students: dict[str, Student], path: Path) -> None:
    """Draw the divergence from the teacher over the steps, into a file. Only this needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, found), style in zip(students.items(), ("-", "-", "--", ":"), strict=True):
        axes.plot(*zip(*found.curve, strict=True), style, marker="o", markersize=3, label=name)
    axes.set(xlabel="step", ylabel="KL from the teacher, held-back text", title="Students of one teacher")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
