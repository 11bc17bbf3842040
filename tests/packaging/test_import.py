"""Importing xent, and calling it with NumPy arrays, loads no framework: each is imported where it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.tree import ROOT

PROBE = """
import sys
before = set(sys.modules)
{code}
roots = {{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names)
print(*(root for root in roots if "cython" not in root))
"""

CALLS = {
    "import": "import xent",
    "cross_entropy": "import numpy, xent; xent.cross_entropy(numpy.zeros((2, 3)), numpy.zeros(2, dtype=int))",
    "linear_cross_entropy": (
        "import numpy, xent;"
        "xent.linear_cross_entropy(numpy.zeros((2, 4)), numpy.zeros((3, 4)), numpy.zeros(2, dtype=int))"
    ),
}


@pytest.mark.parametrize("code", CALLS.values(), ids=CALLS)
def test_loads_nothing_but_numpy(code: str) -> None:
    program = [sys.executable, "-W", "error", "-c", PROBE.format(code=code)]
    run = subprocess.run(program, check=True, capture_output=True, text=True)
    assert set(run.stdout.split()) - {"numpy"} == {"xent"}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_import_matplotlib_only_to_plot(path: Path) -> None:
    named = [
        ast.unparse(one) for one in ast.parse(path.read_text(encoding="utf-8")).body if "import" in ast.unparse(one)
    ]
    assert not [line for line in named if line.startswith(("import matplotlib", "from matplotlib"))]
