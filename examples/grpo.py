"""Teach a model to sort by reward alone: GRPO, group-relative policy optimisation, in one short loss.

    python examples/grpo.py --plot grpo.png

The model samples eight completions of each prompt. Completions with a higher reward than the others of their prompt
become more probable, the others less probable. Log-probabilities and entropy at the sampling temperature are computed
from hidden states, with one call of `xent.linear_log_probs`. The probability ratio is clipped as in PPO.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from toy import DEVICE, LENGTH, draw, make_model, make_prompts, sample, share_sorted
from transformers import LlamaForCausalLM

import xent

PROMPTS, GROUP, UPDATES = 32, 8, 2
TEMPERATURE, CLIP, ENTROPY_BONUS = 0.9, 0.2, 0.05


def log_probs_of(model: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token of the completions, and the entropy before it, both (N, LENGTH)."""
    hidden = model.model(tokens).last_hidden_state[:, LENGTH:-1]  # position t predicts token t + 1
    log_probs, entropy = xent.linear_log_probs(
        hidden, model.lm_head.weight, tokens[:, LENGTH + 1 :], temperature=TEMPERATURE, entropy=True
    )
    return log_probs, entropy


def loss_of(log_probs: Tensor, old: Tensor, entropy: Tensor, advantage: Tensor) -> Tensor:
    """Return the loss, the mean over all tokens; `advantage` is (N, 1)."""
    ratio = (log_probs - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -(gain + ENTROPY_BONUS * entropy).mean()


def main() -> None:
    """Train; print the reward, and plot it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plot", type=Path, help="file for the curves, which matplotlib draws")
    options = parser.parse_args()

    model, generator = make_model(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rewards, entropies = [], []
    for step in range(options.steps):
        prompts = make_prompts(PROMPTS, generator).repeat_interleave(GROUP, 0)
        tokens = sample(model, prompts, TEMPERATURE)
        reward = share_sorted(tokens)
        groups = reward.view(PROMPTS, GROUP)
        advantage = ((groups - groups.mean(-1, keepdim=True)) / (groups.std(-1, keepdim=True) + 1e-4)).view(-1, 1)

        with torch.no_grad():
            old, entropy = log_probs_of(model, tokens)
        for _ in range(UPDATES):
            log_probs, entropy = log_probs_of(model, tokens)
            loss_of(log_probs, old, entropy, advantage).backward()
            optimizer.step()
            optimizer.zero_grad()

        rewards.append(reward.mean().item())
        entropies.append(entropy.mean().item())
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step}: reward {rewards[-1]:.3f}, entropy {entropies[-1]:.3f}", flush=True)

    print(f"In {options.steps} steps the reward rose from {rewards[0]:.2f} to {rewards[-1]:.2f}.")
    if options.plot:
        curves = {"reward": rewards, "entropy (nats)": entropies}
        draw(options.plot, f"GRPO on {DEVICE.type}: sort four digits", curves)
        print(f"the plot is in {options.plot}")


if __name__ == "__main__":
    main()
