"""The recipes for several processes train what one process trains on the joint batch.

They run as scripts under torchrun: on two GPUs where there are two, or else on the CPU, through gloo.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.packaging.tree import ROOT

STEPS = 10

RECIPES = {
    "ddp": ["ddp.py"],
    "ddp as the Trainer sets it up": ["ddp.py", "--find-unused"],
    "fsdp2": ["fsdp2.py"],
    "fsdp2, head sharded alone, patched last": ["fsdp2.py", "--shard-head", "--patch-last"],
}


def torchrun(processes: int, folder: Path, script: str, *options: str) -> tuple[dict[str, Any], list[float], list[int]]:
    """Return the weights that a script trained, the losses that it printed, and the number of fused ones by process."""
    weights = folder / "weights.pt"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    program = ["-m", "tests.integrations.watched", str(ROOT / "examples" / script), *options, "--save", str(weights)]
    command = [sys.executable, *launcher, *program, "--steps", str(STEPS)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"^step \d+: (.*)$", run.stdout, flags=re.MULTILINE)]
    return torch.load(weights), losses, [int(count) for count in re.findall(r"fused losses: (\d+)", run.stdout)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[float]]:
    weights, losses, fused = torchrun(1, tmp_path_factory.mktemp("one"), "ddp.py", "--plain")
    assert fused == [0]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5
    return weights, losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains_what_one_process_trains(
    recipe: str, tmp_path: Path, one_process: tuple[dict[str, Any], list[float]]
) -> None:
    weights, losses, fused = torchrun(2, tmp_path, *RECIPES[recipe])
    assert fused == [STEPS, STEPS]
    assert losses == pytest.approx(one_process[1], rel=1e-5)
    assert weights.keys() == one_process[0].keys()
    for name, expected in one_process[0].items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-5)
