"""The main loop of a measuring process: requests on stdin and replies on stdout, one JSON object per line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.protocol import Request, decode

__all__ = ["serve"]


def serve(answer: Callable[[Request], dict[str, Any]]) -> None:
    """Answer requests until stdin ends. Output of libraries to stdout is redirected to stderr."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for line in sys.stdin:
            replies.write(json.dumps(answer(decode(line))) + "\n")
