"""`python -m xent` lists backends and versions; `check` tests gradients; `bench` compares with the unfused loss."""

import argparse
import importlib.metadata
import os
import platform
import sys

from xent import __version__, backends
from xent.command.bench import add_arguments, bench
from xent.command.check.run import check

__all__ = ["VARIABLES", "environment", "main"]

VARIABLES = {
    "XENT_BACKEND": 'replaces backend="auto"',
    "XENT_CHECK_TARGETS": "1: look at targets on accelerators too, which synchronises",
    "XENT_LOG": "1: log the Triton kernels that are compiled to stderr",
    "XENT_PORTABLE": "1: turn the Hopper kernels off",
    "TRITON_INTERPRET": "1: Triton interprets its kernels on the CPU",
}
_LIBRARIES = ("numpy", "torch", "triton", "mlx", "mlx-lm", "transformers", "trl", "liger-kernel", "cut-cross-entropy")


def environment() -> int:
    """Print versions, backends, fast paths and environment variables; return the exit status."""
    print(f"xent {__version__}, Python {platform.python_version()}, {platform.platform()}")
    installed = []
    for name in _LIBRARIES:
        try:
            installed.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    print(", ".join(installed) + "\n")
    for info in backends():
        state = "; ".join([info.reason or "available", *info.notes])
        print(f"{info.name:7} {info.framework:6} {', '.join(info.devices) or '-':8} {state}")
    print()
    for name, meaning in VARIABLES.items():
        print(f"{name:19} {os.environ.get(name, 'not set'):8} {meaning}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m xent", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command")
    checking = commands.add_parser(
        "check", help="compare loss and gradients of each backend with the float64 reference"
    )
    checking.add_argument("--full", action="store_true", help="check every option and gradient in pairs, too")
    checking.add_argument("--case", help="check only the case of this name, of all cases")
    checking.add_argument("backend", nargs="*", help="names of backends; all that are available if none is given")
    add_arguments(commands.add_parser("bench", help="time and memory beside the unfused loss, in a minute"))
    parsed = parser.parse_args(arguments)
    if parsed.command == "check":
        return check(parsed.backend, parsed.full, parsed.case)
    return bench(parsed) if parsed.command == "bench" else environment()


if __name__ == "__main__":
    sys.exit(main())
