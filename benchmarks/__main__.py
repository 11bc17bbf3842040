"""`python -m benchmarks` runs the command line of `benchmarks.cli`."""

from __future__ import annotations

import sys

from benchmarks.cli import main

sys.exit(main())
