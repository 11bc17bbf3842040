"""`python -m xent` lists backends and versions; `check` tests gradients; `bench` compares with the unfused loss."""

import argparse
import sys

from xent import __version__
from xent.command.bench import add_arguments, bench
from xent.command.check.run import check
from xent.command.show import environment

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m xent", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command")
    checking = commands.add_parser(
        "check", help="compare loss and gradients of each backend with the float64 reference"
    )
    checking.add_argument("--full", action="store_true", help="check every option and gradient in pairs, too")
    checking.add_argument("backend", nargs="*", help="names of backends; all that are available if none is given")
    add_arguments(commands.add_parser("bench", help="time and memory beside the unfused loss, in a minute"))
    parsed = parser.parse_args(arguments)
    if parsed.command == "check":
        return check(parsed.backend, parsed.full)
    return bench(parsed) if parsed.command == "bench" else environment()


if __name__ == "__main__":
    sys.exit(main())
