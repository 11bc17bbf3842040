"""Distill a model of mlx-lm into a smaller one, from hidden states, with random weights and no downloads.

    python examples/distill_mlx.py

A tiny teacher learns sequences that count upwards or downwards. A student of half its width then learns to predict what
the teacher predicts, with `xent.linear_divergence`, which stores the logits of neither.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx_lm.models import llama

import xent
from xent.integrations.mlx import classifier
from xent.integrations.mlx_lm import loss as text_loss

VOCABULARY, LENGTH, ROWS = 64, 16, 32


def make_model(width: int, layers: int) -> nn.Module:
    """Return a model with random weights, the same at each call."""
    mx.random.seed(0)
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def draw() -> mx.array:
    """Return sequences that count up or down, (ROWS, LENGTH + 1)."""
    first = mx.random.randint(0, VOCABULARY, (ROWS, 1))
    way = 1 - 2 * mx.random.randint(0, 2, (ROWS, 1))
    return (first + way * mx.arange(LENGTH + 1)) % VOCABULARY


def divergence_of(
    student: nn.Module,
    teacher: nn.Module,
    tokens: mx.array,
    beta: float = 0.0,
) -> mx.array:
    """Return the mean divergence of the student from the teacher."""
    inputs = tokens[:, :-1]
    weight, bias = classifier(student.lm_head)
    head = classifier(teacher.lm_head)
    source = xent.LinearTeacher(teacher.model(inputs), *head)
    hidden = student.model(inputs)
    return xent.linear_divergence(
        hidden,
        weight,
        source,
        linear_bias=bias,
        beta=beta,
    )


def loss_of_text(model: nn.Module, tokens: mx.array) -> mx.array:
    """Return the mean cross entropy of the tokens."""
    return text_loss(model, tokens, mx.array([[1, LENGTH]] * ROWS))[0]


def trainer(
    model: nn.Module, loss_of: Callable[[nn.Module, mx.array], mx.array]
) -> tuple[Callable[[mx.array], mx.array], list[Any]]:
    """Return a compiled training step, which returns the loss, and the state that it changes."""
    optimizer = optim.Adam(3e-3)
    state = [model.state, optimizer.state]

    @functools.partial(mx.compile, inputs=state, outputs=state)
    def train(tokens: mx.array) -> mx.array:
        loss, gradients = nn.value_and_grad(model, loss_of)(model, tokens)
        optimizer.update(model, gradients)
        return loss

    return train, state


def main() -> None:
    """Train both, and print the student's divergence from the teacher and its loss on the text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of the teacher, and of the student")
    parser.add_argument("--beta", type=float, default=0.0, help="0: KL(teacher to student), 1: KL(student to teacher)")
    parser.add_argument("--bits", type=int, default=0, help="quantize the teacher once it is trained; 0: leave it")
    options = parser.parse_args()

    teacher, student = make_model(64, 2), make_model(32, 2)
    mx.random.seed(1)
    held_out = draw()
    train, state = trainer(teacher, loss_of_text)
    for _ in range(options.steps):
        train(draw())
        mx.eval(state)
    if options.bits:
        nn.quantize(teacher, group_size=32, bits=options.bits)
    teacher.freeze()
    print(f"teacher: loss on text {loss_of_text(teacher, held_out).item():.3f}", flush=True)

    def loss_of(model: nn.Module, tokens: mx.array) -> mx.array:
        return divergence_of(model, teacher, tokens, options.beta)

    train, state = trainer(student, loss_of)
    for step in range(options.steps + 1):
        if step % 50 == 0 or step == options.steps:
            apart, text = divergence_of(student, teacher, held_out).item(), loss_of_text(student, held_out).item()
            print(f"step {step}: from the teacher {apart:.3f}, loss on text {text:.3f}", flush=True)
        train(draw())
        mx.eval(state)


if __name__ == "__main__":
    main()
