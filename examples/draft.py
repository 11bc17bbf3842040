"""A draft head for speculative decoding, with a reduced vocabulary, trained by KL and by total variation.

    python -m examples.draft --plot draft.png

A small target model learns the source code of Python's standard library, as in `demo`. A draft head then learns to
predict what the target predicts next, from the target's last hidden state but one and the last token: before the target
has run. It has the most frequent tokens only, so its teacher is `xent.Subset` of the target.

Speculative decoding accepts a drafted token with probability sum_c min(p_c, q_c), with the draft's p and the target's q
over the whole vocabulary. Total variation is 1 minus that, of distributions over the same classes. The table shows the
rate on held-out text before and after training.
"""

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import xent
from demo.model import LanguageModel
from demo.text import load_text, sample_batches, validation_batch

Curve = list[tuple[int, float]]
"""(number of steps, acceptance rate on held-out text)"""


class Draft(nn.Module):
    """From the target's hidden state at t - 1 and token t to a hidden state for t + 1. The head has V' classes."""

    def __init__(self, target: LanguageModel, width: int, classes: int) -> None:
        super().__init__()
        both = 2 * target.head.weight.shape[1]
        layers = nn.Linear(both, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width)
        self.mix = nn.Sequential(*layers)
        self.head = nn.Linear(width, classes, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, states: Tensor, tokens: Tensor, embedding: Tensor) -> Tensor:
        """Return hidden states (..., T - 1, width) from the target's (..., T, D) and tokens (..., T)."""
        hidden: Tensor = self.mix(torch.cat((states[..., :-1, :], embedding[tokens[..., 1:]]), -1))
        return hidden


Loss = Callable[[Tensor, Tensor, xent.Subset, float], Tensor]
"""(hidden states, head, teacher, share of the training that is done) -> loss"""


def by_kl(hidden: Tensor, head: Tensor, teacher: xent.Subset, done: float) -> Tensor:
    """Return KL(target to draft)."""
    loss: Tensor = xent.linear_divergence(hidden, head, teacher)
    return loss


def by_variation(hidden: Tensor, head: Tensor, teacher: xent.Subset, done: float) -> Tensor:
    """Return the total variation."""
    loss: Tensor = xent.linear_divergence(hidden, head, teacher, kind="tv")
    return loss


def by_both(hidden: Tensor, head: Tensor, teacher: xent.Subset, done: float) -> Tensor:
    """Return KL in the first half, and total variation in the second: its gradient is small for improbable classes."""
    return (by_kl if done < 0.5 else by_variation)(hidden, head, teacher, done)


WAYS: dict[str, Loss] = {"KL": by_kl, "total variation": by_variation, "KL, then total variation": by_both}


def main() -> None:
    """Train, print the table, and draw the curves."""
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text, context = load_text(options.vocabulary, seed=0), options.context
    windows = sample_batches(text, options.steps, options.batch, context, seed=1).to(device)
    held_out = validation_batch(text, 16, context).to(device)
    torch.manual_seed(0)
    target = LanguageModel(text.vocabulary, context + 1, width=options.width, layers=2).to(device)
    teach(target, sample_batches(text, options.steps, options.batch, context, seed=2).to(device))
    target.requires_grad_(False)

    ids = windows.flatten().bincount(minlength=text.vocabulary).argsort(descending=True)[: options.classes]
    first = Draft(target, options.draft_width, len(ids)).to(device)
    before = accepted(first, target, ids, held_out)
    covered = float(torch.isin(held_out[:, 2:], ids).float().mean())
    print(f"target: {text.vocabulary} classes; draft: {len(ids)} classes, {covered:.1%} of the tokens of held-out text")
    print(f"{'draft trained by':28}{'accepted before':>16}{'after':>9}{'seconds':>9}")
    curves = {}
    for name, loss in WAYS.items():
        draft, begun = copy.deepcopy(first), time.perf_counter()
        curves[name] = [(0, before), *train(draft, target, ids, windows, held_out, loss)]
        print(f"{name:28}{before:16.1%}{curves[name][-1][1]:9.1%}{time.perf_counter() - begun:9.1f}")
    if options.plot:
        draw(curves, options.plot)


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="of the target, and of each draft")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--context", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--vocabulary", type=int, default=8_000, help="of the target")
    parser.add_argument("--classes", type=int, default=2_000, help="of the draft, the most frequent ones")
    parser.add_argument("--width", type=int, default=128, help="of the target")
    parser.add_argument("--draft-width", type=int, default=64)
    parser.add_argument("--plot", type=Path, help="file for the curves")
    return parser.parse_args()


def teach(target: LanguageModel, batches: Tensor) -> None:
    """Train the target on text."""
    optimizer = torch.optim.AdamW(target.parameters(), lr=2e-3)
    for windows in batches:
        xent.linear_cross_entropy(target(windows), target.head.weight, windows, shift=1).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(draft: Draft, target: LanguageModel, ids: Tensor, batches: Tensor, held_out: Tensor, loss: Loss) -> Curve:
    """Train a draft; return the acceptance rate ten times."""
    optimizer = torch.optim.AdamW(draft.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=len(batches) + 1)
    curve: Curve = []
    for step, tokens in enumerate(batches):
        with torch.no_grad():
            states = target(tokens)
        hidden = draft(states, tokens, target.token.weight)
        teacher = xent.Subset(xent.LinearTeacher(states[:, 1:], target.head.weight), ids)
        loss(hidden, draft.head.weight, teacher, step / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % max(len(batches) // 10, 1) == 0:
            curve.append((step + 1, accepted(draft, target, ids, held_out)))
    return curve


@torch.no_grad()
def accepted(draft: Draft, target: LanguageModel, ids: Tensor, tokens: Tensor) -> float:
    """Return the mean over positions of sum_c min(p_c, q_c), with q over the target's whole vocabulary."""
    states = target(tokens)
    p = draft.head(draft(states, tokens, target.token.weight)).softmax(-1)
    q = F.linear(states[:, 1:], target.head.weight).softmax(-1)[..., ids]
    return float(torch.minimum(p, q).sum(-1).mean())


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Draw the acceptance rate over the steps, into a file. Only this needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, curve), style in zip(curves.items(), ("-", "--", "-."), strict=True):
        axes.plot(*zip(*curve, strict=True), style, marker="o", markersize=3, label=name)
    axes.set(xlabel="step", ylabel="tokens accepted, held-out text", title="Draft heads of one target model")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
