"""Teach a model of mlx-lm a preference: DPO, direct preference optimisation, on a tiny model with random weights.

    python examples/dpo_mlx.py

Each prompt counts upwards or downwards. The preferred answer continues to count, the other has random tokens. The
log-probability of an answer is computed from hidden states, without storing the logits of all tokens.
"""

import argparse
import functools

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx_lm.models import llama

from xent.integrations.mlx_lm import log_probs

VOCABULARY, PROMPT, ANSWER, ROWS, BETA = 64, 4, 8, 32, 0.1


def make_model(bits: int) -> nn.Module:
    """Return a model with random weights, the same at each call; with `bits` its layers are quantized."""
    mx.random.seed(0)
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


def draw() -> tuple[mx.array, mx.array]:
    """Return prompts with the preferred answers, and with the others, both (ROWS, PROMPT + ANSWER)."""
    first = mx.random.randint(0, VOCABULARY, (ROWS, 1))
    way = 1 - 2 * mx.random.randint(0, 2, (ROWS, 1))
    chosen = (first + way * mx.arange(PROMPT + ANSWER)) % VOCABULARY
    other = mx.random.randint(0, VOCABULARY, (ROWS, ANSWER))
    return chosen, mx.concatenate([chosen[:, :PROMPT], other], axis=1)


def log_prob_of(model: nn.Module, tokens: mx.array) -> mx.array:
    """Return the sum of log-probabilities of each answer, (N,)."""
    lengths = mx.array([[PROMPT, PROMPT + ANSWER - 1]] * len(tokens))
    return log_probs(model, tokens, lengths).sum(-1)


def margins_of(
    model: nn.Module,
    reference: nn.Module,
    chosen: mx.array,
    rejected: mx.array,
) -> mx.array:
    """Return the log-ratio of chosen minus rejected answers, (N,)."""
    pairs = mx.concatenate([chosen, rejected])
    log_ratios = log_prob_of(model, pairs) - log_prob_of(reference, pairs)
    gained, lost = log_ratios.split(2)
    return BETA * (gained - lost)


def main() -> None:
    """Train, and print the loss and the share of new pairs with a positive margin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--bits", type=int, default=0, help="train a quantized model's norms alone; 0: train it whole")
    options = parser.parse_args()

    model, reference = make_model(options.bits), make_model(options.bits)
    if options.bits:
        model.freeze()
        model.apply_to_modules(lambda _, module: module.unfreeze() if isinstance(module, nn.RMSNorm) else None)
    mx.random.seed(1)
    held_out = draw()
    optimizer = optim.Adam(2e-3 if options.bits else 3e-4)

    def loss_of(chosen: mx.array, rejected: mx.array) -> mx.array:
        return -nn.log_sigmoid(margins_of(model, reference, chosen, rejected)).mean()

    state = [model.state, optimizer.state]

    @functools.partial(mx.compile, inputs=state, outputs=state)
    def train(chosen: mx.array, rejected: mx.array) -> mx.array:
        loss, gradients = nn.value_and_grad(model, loss_of)(chosen, rejected)
        optimizer.update(model, gradients)
        return loss

    for step in range(options.steps):
        loss = train(*draw())
        mx.eval(state)
        if step % 20 == 0 or step == options.steps - 1:
            learned = (margins_of(model, reference, *held_out) > 0).mean()
            print(f"step {step}: loss {loss.item():.3f}, pairs learned {learned.item():.2f}", flush=True)


if __name__ == "__main__":
    main()
