"""The loop of a measuring process: requests in on stdin, one JSON object a line, a reply to each on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.protocol import Request, decode

__all__ = ["serve"]


def serve(answer: Callable[[Request], dict[str, Any]]) -> None:
    """Answer requests until stdin ends. What libraries print to stdout goes to stderr, so that it stays JSON."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for line in sys.stdin:
            replies.write(json.dumps(answer(decode(line))) + "\n")
