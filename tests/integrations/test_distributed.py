"""The recipes for several processes train what one process trains on the joint batch.

They run as scripts under torchrun: on two GPUs where there are two, or else on the CPU, through gloo.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.sharded import WAYS
from tests.integrations.tensor_parallel import WAYS as TENSOR_PARALLEL_WAYS
from tests.packaging.tree import ROOT

STEPS = 10
EXAMPLES = ROOT / "examples"

RECIPES = {
    "ddp": ["ddp.py"],
    "ddp as the Trainer sets it up": ["ddp.py", "--find-unused"],
    "fsdp2": ["fsdp2.py"],
    "fsdp2, head sharded alone, patched last": ["fsdp2.py", "--shard-head", "--patch-last"],
}


def torchrun(processes: int, folder: Path, script: Path, *options: str) -> tuple[Any, list[float], list[int]]:
    """Return the weights that a script trained, the losses that it printed, and the number of fused ones by process."""
    weights = folder / "weights.pt"
    arguments = [str(script), *options, "--save", str(weights), "--steps", str(STEPS)]
    printed = launch(processes, "tests.integrations.watched", *arguments)
    losses = [float(loss) for loss in re.findall(r"^step \d+: (.*)$", printed, flags=re.MULTILINE)]
    return (
        torch.load(weights, map_location="cpu"),
        losses,
        [int(count) for count in re.findall(r"fused losses: (\d+)", printed)],
    )


def launch(processes: int, module: str, *arguments: str) -> str:
    """Return what a module that several processes run has printed.

    Fewer than two GPUs are hidden from it, and from what it is compared with.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launcher, "-m", module, *arguments]
    hidden = {} if torch.cuda.device_count() > 1 else {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | hidden, capture_output=True, text=True, timeout=180, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[float]]:
    weights, losses, fused = torchrun(1, tmp_path_factory.mktemp("one"), EXAMPLES / "ddp.py", "--plain")
    assert fused == [0]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5
    return weights, losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains_what_one_process_trains(
    recipe: str, tmp_path: Path, one_process: tuple[dict[str, Any], list[float]]
) -> None:
    script, *options = RECIPES[recipe]
    weights, losses, fused = torchrun(2, tmp_path, EXAMPLES / script, *options)
    assert fused == [STEPS, STEPS]
    assert losses == pytest.approx(one_process[1], rel=1e-5)
    assert weights.keys() == one_process[0].keys()
    for name, expected in one_process[0].items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-5)


def test_losses_inside_and_outside_of_sharded_models() -> None:
    printed = launch(2, "tests.integrations.sharded")
    assert re.findall(r"^(FSDP.*): loss (\w+), (\w+)$", printed, flags=re.MULTILINE) == [
        (way, where, made) for way, made in WAYS.items() for where in ("inside", "outside")
    ]


def test_losses_of_tensor_parallel_models() -> None:
    printed = launch(2, "tests.integrations.tensor_parallel")
    assert re.findall(r"^([^:]+): (fused|computed)$", printed, flags=re.MULTILINE) == [
        (way, "computed" if why else "fused") for way, (_, _, why) in TENSOR_PARALLEL_WAYS.items()
    ]


def test_two_lines_are_all_that_a_script_with_the_trainer_needs(tmp_path: Path) -> None:
    """Without them it trains the same, on one process and on two, and fuses nothing."""
    lines = (EXAMPLES / "trainer.py").read_text(encoding="utf-8").splitlines(keepends=True)
    start = next(place for place, line in enumerate(lines) if line.startswith("import "))
    ours = [line for line in lines[start:] if "xent" in line or "patch(" in line]
    assert len(ours) == 2
    (tmp_path / "trainer.py").write_text("".join(line for line in lines if line not in ours), encoding="utf-8")
    shutil.copy(EXAMPLES / "common.py", tmp_path)
    expected, losses, fused = torchrun(1, tmp_path, tmp_path / "trainer.py")
    assert fused == [0]
    found, found_losses, fused = torchrun(2, tmp_path, EXAMPLES / "trainer.py", "--rows", "4")
    assert fused == [STEPS + 1] * 2  # and one evaluation
    assert found_losses == pytest.approx(losses, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
