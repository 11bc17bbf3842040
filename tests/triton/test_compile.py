"""A signature of every kernel compiles for GPUs that are not there; `tests.triton.compile` has the rest."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_kernels_compile_without_their_gpu() -> None:
    """For an NVIDIA GPU and an AMD one, in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.triton.compile", "--each", "1", "--targets", "sm_80", "gfx942"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Compiled, not run." in done.stdout
