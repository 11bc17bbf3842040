"""Teach a model a preference: DPO, direct preference optimisation, in one short loss.

    python examples/dpo.py --plot dpo.png

The model first learns to sort digits in either order. Then it is trained on pairs of answers, in which the ascending
one is preferred; the reference is the model before this training. The log-probability of an answer is computed from
hidden states, with one call of `xent.linear_log_probs`.
"""

import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from toy import DEVICE, LENGTH, draw, make_model, make_prompts, sample, share_sorted
from transformers import LlamaForCausalLM

import xent

ROWS, BETA = 64, 0.1


def log_prob_of(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the log-probability of each answer, the sum over its tokens, (N,)."""
    hidden = model.model(tokens).last_hidden_state[:, LENGTH:-1]  # position t predicts token t + 1
    return xent.linear_log_probs(hidden, model.lm_head.weight, tokens[:, LENGTH + 1 :]).sum(-1)


def loss_of(model: LlamaForCausalLM, reference: LlamaForCausalLM, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the mean over pairs of -log sigmoid(beta * (log-ratio of the chosen - of the rejected answer))."""
    pairs = torch.cat([chosen, rejected])
    with torch.no_grad():
        before = log_prob_of(reference, pairs)
    gained, lost = (log_prob_of(model, pairs) - before).chunk(2)
    return -F.logsigmoid(BETA * (gained - lost)).mean()


def answers(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return prompts with ascending answers, and with descending answers, both (ROWS, 2 LENGTH + 1)."""
    prompts = make_prompts(ROWS, generator)
    rising = prompts[:, :LENGTH].sort(-1).values
    return torch.cat([prompts, rising], -1), torch.cat([prompts, rising.flip(-1)], -1)


def main() -> None:
    """Train; print, and plot, which answers the model gives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-steps", type=int, default=300, help="steps of learning to sort either way")
    parser.add_argument("--steps", type=int, default=150, help="steps of learning the preference")
    parser.add_argument("--plot", type=Path, help="file for the curves, which matplotlib draws")
    options = parser.parse_args()

    model, generator = make_model(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(options.first_steps):
        loss = -log_prob_of(model, torch.cat(answers(generator))).mean() / LENGTH
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == options.first_steps - 1:
            print(f"first step {step}: loss {loss:.3f}", flush=True)

    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rising, falling, losses = [], [], []
    for step in range(options.steps):
        chosen, rejected = answers(generator)
        loss = loss_of(model, reference, chosen, rejected)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        given = sample(model, make_prompts(ROWS, generator))
        rising.append(share_sorted(given).mean().item())
        falling.append(share_sorted(given, descending=True).mean().item())
        losses.append(loss.item())
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {losses[-1]:.3f}, rising {rising[-1]:.3f}, falling {falling[-1]:.3f}", flush=True)

    if options.plot:
        curves = {"reward: digits in rising order": rising, "digits in falling order": falling, "loss": losses}
        draw(options.plot, f"DPO on {DEVICE.type}: prefer the order that rises", curves)
        print(f"the plot is in {options.plot}")


if __name__ == "__main__":
    main()
