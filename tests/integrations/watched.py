"""Run a script in a process of its own, and say how many losses were computed from hidden states: file arguments."""

import runpy
import sys
from pathlib import Path
from typing import Any

import xent

__all__: list[str] = []


def main() -> None:
    """Run the script."""
    function, calls = xent.linear_cross_entropy, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return function(*args, **kwargs)

    xent.linear_cross_entropy = watched
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    print(f"fused losses: {len(calls)}")


if __name__ == "__main__":
    main()
