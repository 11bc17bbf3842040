"""`python -m xent bench`: measure time and memory of the loss on this machine, unfused and with xent, in a minute."""

import argparse
import json
import subprocess
import sys

from xent.command.heads import HEADS, Shape, parse
from xent.command.measure import available, measure
from xent.command.show import progress, table
from xent.core.dispatch import backends

__all__ = ["add_arguments", "bench"]

_CONTENDERS = ("unfused", "xent")
_ROWS = 1024
_PATIENCE = 120  # seconds
_MODEL = "GPT-2"
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to the parser."""
    heads = ", ".join(f"{name} ({width}x{vocabulary})" for name, (width, vocabulary) in HEADS.items())
    parser.add_argument("shape", nargs="?", default=_MODEL, help=f"tokens x width x vocabulary, as NxDxV; or {heads}")
    parser.add_argument(
        "--tokens", type=int, default=_ROWS, help="rows, where a model names the rest (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=_ITEMSIZE, default="bfloat16")
    parser.add_argument(
        "--framework", choices=("torch", "mlx"), help="whose arrays; the first that is installed if not given"
    )
    parser.add_argument("--measure", choices=_CONTENDERS, help=argparse.SUPPRESS)


def bench(arguments: argparse.Namespace) -> int:
    """Compare the unfused loss and xent; print a table and a sentence; return the exit status."""
    try:
        shape = parse(arguments.shape, arguments.tokens)
        framework = _framework(arguments.framework)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.measure:
        return measure(framework, arguments.measure, shape, arguments.dtype)
    memory, itemsize = available(framework), _ITEMSIZE[arguments.dtype]
    results: dict[str, dict[str, float]] = {}
    notes = []
    with progress(len(_CONTENDERS)) as tell:
        for contender in _CONTENDERS:
            tell(contender)
            needed = shape.needed(itemsize, contender == "xent")
            if memory is not None and needed > memory:
                sizes = f"about {needed / 2**30:.1f} GiB, and this machine has {memory / 2**30:.1f}"
                notes.append(f"{contender} was not run at {shape} {arguments.dtype}: it would take {sizes}.")
                continue
            outcome = _run(contender, shape, arguments.dtype, framework)
            if isinstance(outcome, str):
                notes.append(f"{contender} failed at {shape} {arguments.dtype}: {outcome}")
            else:
                results[contender] = outcome
    rows = [(name, f"{found['milliseconds']:.1f}", f"{found['mebibytes']:.0f}") for name, found in results.items()]
    if rows:
        print(f"Forward and backward pass, {shape} {arguments.dtype}, {framework} arrays:")
        print(table([("loss", "ms", "peak MiB beyond the inputs"), *rows]))
    print("\n".join([*notes, *_sentence(results)]))
    return 0 if "xent" in results else 1


def _framework(asked: str | None) -> str:
    """Return the requested framework, or that of the first available backend."""
    for info in backends():
        if info.available and info.framework != "numpy" and asked in (None, info.framework):
            return info.framework
    if asked is not None:
        raise ValueError(f"--framework must name an installed framework, and {asked} is not installed")
    raise ValueError("python -m xent bench needs PyTorch or MLX, and neither is installed")


def _run(contender: str, shape: Shape, dtype: str, framework: str) -> dict[str, float] | str:
    """Return the measurements of an implementation, or the last line of its error."""
    command = [sys.executable, "-m", "xent", "bench", str(shape), "--dtype", dtype, "--framework", framework]
    command += ["--measure", contender]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return f"it took more than {_PATIENCE} s; fewer tokens take less"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"])[-1]
    return _parsed(done.stdout)


def _parsed(printed: str) -> dict[str, float]:
    found: dict[str, float] = json.loads(printed.strip().splitlines()[-1])
    return found


def _sentence(results: dict[str, dict[str, float]]) -> list[str]:
    if len(results) < len(_CONTENDERS):
        return []
    unfused, ours = results["unfused"], results["xent"]
    time = ours["milliseconds"] / unfused["milliseconds"]
    memory = ours["mebibytes"] / max(unfused["mebibytes"], 1)
    return [f"xent takes {time:.2f} of the unfused loss's time and {memory:.2f} of its memory."]
