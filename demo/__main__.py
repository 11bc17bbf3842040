"""`python -m demo`: load the text, train both models, measure memory, print the report and draw the plot."""

import sys
import time

import torch
from rich.console import Console

import xent
from demo.backend import picked_backend, print_backends
from demo.device import describe
from demo.losses import LOSSES, XENT
from demo.memory import peak_bytes
from demo.options import Options, parse
from demo.plot import draw
from demo.progress import training_bar
from demo.report import print_report
from demo.results import Results
from demo.text import Text, load_text, sample_batches, validation_batch
from demo.train import Trainer, make_trainers, take_turns
from demo.truth import Errors, errors

VALIDATION_BATCHES = 4
MEMORY_AT = (1, 4)
"""Memory is measured for the tokens of one step times these: the demo's own step, and a larger one to show growth."""


def main() -> int:
    """Run the demo; the exit status is 1 if the two runs disagree or the models did not learn."""
    started = time.perf_counter()
    options = parse()
    torch.set_num_threads(options.threads)
    console = Console(highlight=False)
    try:
        backend = picked_backend(options.device)
    except xent.BackendError as error:
        console.print(f"[bold red]{error}[/]")
        return 2
    console.print(f"Training on: {describe(options.device)}. There, xent picks its backend [bold]{backend}[/] out of:")
    print_backends(backend, console)

    console.print("\n[bold]1. Text.[/] Reading the source of Python's standard library, learning a vocabulary on it.")
    text = load_text(options.vocabulary, options.seed)
    console.print(
        f"{text.files} files with {text.characters:,} characters; byte-pair vocabulary of {text.vocabulary:,}; "
        f"{len(text.training):,} tokens to train on, {len(text.validation):,} held back."
    )
    trainers = _train(options, text, console)
    exactness = _compare_with_float64(options, text, trainers, console)
    memory = _measure_memory(options, text, trainers, console)

    results = Results(
        runs={name: trainer.run for name, trainer in trainers.items()},
        errors=exactness,
        memory=memory,
        tokens_per_step=options.batch * options.context,
        vocabulary=text.vocabulary,
        backend=backend,
        device=describe(options.device),
    )
    console.print()
    print_report(results, console)
    picture = options.out.resolve() / "demo.png"
    draw(results, picture)
    console.print(f"Picture: {picture}", soft_wrap=True)
    console.print(f"All of it took {time.perf_counter() - started:.0f} seconds.")
    for complaint in results.complaints:
        console.print(f"[bold red]{complaint}[/]")
    return 1 if results.complaints else 0


def _train(options: Options, text: Text, console: Console) -> dict[str, Trainer]:
    trainers = make_trainers(LOSSES, text.vocabulary, options.context, options.steps, options.seed, options.device)
    parameters = sum(parameter.numel() for parameter in trainers[XENT].model.parameters())
    console.print(
        f"\n[bold]2. Training.[/] Two copies of a transformer with {parameters / 1e6:.1f} million parameters take "
        f"turns for {options.steps} steps of {options.batch} x {options.context} tokens. "
        "Same start, same batches; only the loss differs."
    )
    batches = sample_batches(text, options.steps, options.batch, options.context, options.seed).to(options.device)
    with training_bar(options.steps, console) as bar:
        take_turns(
            trainers.values(),
            batches,
            options.seconds,
            after_step=lambda: bar.advance({name: trainer.run.losses[-1] for name, trainer in trainers.items()}),
        )
    taken = len(trainers[XENT].run.losses)
    if taken < options.steps:
        console.print(f"Ended after {taken} steps: the training has {options.seconds:.0f} seconds (--seconds).")
    unseen = validation_batch(text, VALIDATION_BATCHES * options.batch, options.context).to(options.device)
    for trainer in trainers.values():
        trainer.validate(unseen, options.batch)
    return trainers


def _compare_with_float64(
    options: Options, text: Text, trainers: dict[str, Trainer], console: Console
) -> dict[str, Errors]:
    console.print("\n[bold]3. Exactness.[/] Holding one batch of the trained model against float64.")
    windows = validation_batch(text, options.batch, options.context).to(options.device)
    model = trainers[XENT].model
    with torch.no_grad():
        hidden = model(windows[:, :-1])
    return errors(LOSSES, hidden, model.head.weight, windows[:, 1:])


def _measure_memory(
    options: Options, text: Text, trainers: dict[str, Trainer], console: Console
) -> dict[int, dict[str, int | None]]:
    console.print("\n[bold]4. Memory.[/] Running each loss, forward and backward, in a process of its own.")
    width = trainers[XENT].model.head.in_features
    return {
        tokens: {name: peak_bytes(name, tokens, width, text.vocabulary, options.device) for name in LOSSES}
        for tokens in (options.batch * options.context * times for times in MEMORY_AT)
    }


if __name__ == "__main__":
    sys.exit(main())
