"""The recipes for several processes train the same model as one process with the joint batch.

They run as scripts under torchrun, on two GPUs if there are two, else on the CPU with gloo.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.sharded import WAYS
from tests.integrations.tensor_parallel import MESHES
from tests.integrations.tensor_parallel import WAYS as TENSOR_PARALLEL_WAYS
from tests.packaging.tree import ROOT

STEPS = 10
EXAMPLES = ROOT / "examples"
GPUS = torch.cuda.device_count()

RECIPES: dict[str, tuple[int, list[str]]] = {
    "ddp": (2, ["ddp.py"]),
    "ddp as the Trainer sets it up": (2, ["ddp.py", "--find-unused"]),
    "fsdp2": (2, ["fsdp2.py"]),
    "fsdp2, head sharded alone, patched last": (2, ["fsdp2.py", "--shard-head", "--patch-last"]),
    "Lightning": (2, ["lightning_module.py"]),
    "accelerate, two micro-batches": (2, ["accelerate_loop.py"]),
    "tensor parallelism": (2, ["tp.py"]),
    "tensor parallelism with fsdp2": (4, ["tp_fsdp2.py"]),
}
"""Name -> (number of processes, command line)"""


def torchrun(
    processes: int, folder: Path, script: Path, *options: str, gpus: bool = GPUS > 1
) -> tuple[Any, list[float], list[int]]:
    """Run a script. Return its trained weights, its printed losses, and the number of fused losses per process."""
    weights = folder / "weights.pt"
    arguments = [str(script), *options, "--save", str(weights), "--steps", str(STEPS)]
    printed = launch(processes, "tests.integrations.watched", *arguments, gpus=gpus)
    if "FSDP2 adds up" in printed:
        pytest.skip("FSDP2 adds gradients up instead of averaging them here, with every loss (PyTorch 2.8 over gloo)")
    losses = [float(loss) for loss in re.findall(r"^step \d+: (.*)$", printed, flags=re.MULTILINE)]
    return (
        torch.load(weights, map_location="cpu"),
        losses,
        [int(count) for count in re.findall(r"fused losses: (\d+)", printed)],
    )


def launch(processes: int, module: str, *arguments: str, gpus: bool = GPUS > 1, timeout: int = 180) -> str:
    """Run a module in several processes and return its output. GPUs are hidden from it if there are too few."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launcher, "-m", module, *arguments]
    hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | hidden, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


OneProcess = Callable[[bool], tuple[dict[str, Any], list[float]]]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> OneProcess:
    """Return a function that trains in one process, on a GPU or on the CPU."""

    @cache
    def train(gpus: bool) -> tuple[dict[str, Any], list[float]]:
        folder = tmp_path_factory.mktemp("one")
        weights, losses, fused = torchrun(1, folder, EXAMPLES / "ddp.py", "--plain", gpus=gpus)
        assert fused == [0]
        assert len(losses) == STEPS
        assert losses[-1] < losses[0] - 0.5
        return weights, losses

    return train


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains_like_one_process(recipe: str, tmp_path: Path, one_process: OneProcess) -> None:
    processes, (script, *options) = RECIPES[recipe]
    if recipe == "Lightning":
        pytest.importorskip("lightning")
    gpus = processes <= GPUS
    expected, expected_losses = one_process(gpus)
    weights, losses, fused = torchrun(processes, tmp_path, EXAMPLES / script, *options, gpus=gpus)
    assert fused == [STEPS * (2 if "two micro-batches" in recipe else 1)] * processes
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-5)


def test_all_descriptions_of_shards_have_the_same_loss() -> None:
    printed = launch(2, "tests.integrations.watched", str(EXAMPLES / "vocab_parallel.py"))
    losses = dict(re.findall(r"^([a-zA-Z ]+): (\d+\.\d+)$", printed, flags=re.MULTILINE))
    assert list(losses) == ["process group", "DTensor", "tokens in shards", "padding", "logits in shards"]
    assert len({losses[way] for way in ("process group", "DTensor", "tokens in shards")}) == 1


def test_losses_inside_and_outside_of_sharded_models() -> None:
    printed = launch(2, "tests.integrations.sharded")
    assert re.findall(r"^(FSDP.*): loss (\w+), (\w+)$", printed, flags=re.MULTILINE) == [
        (way, where, made) for way, made in WAYS.items() for where in ("inside", "outside")
    ]


@pytest.mark.parametrize("processes", [2, 4])
def test_losses_of_tensor_parallel_models(processes: int) -> None:
    printed = launch(processes, "tests.integrations.tensor_parallel", gpus=processes <= GPUS)
    ways = TENSOR_PARALLEL_WAYS if processes == 2 else MESHES
    assert re.findall(r"^([^:]+): (fused|computed)$", printed, flags=re.MULTILINE) == [
        (way, "computed" if why else "fused") for way, (*_, why) in ways.items()
    ]


def test_script_with_the_trainer_needs_only_two_lines(tmp_path: Path) -> None:
    """Without the two lines it trains the same model, on one process and on two, without a fused loss."""
    lines = (EXAMPLES / "trainer.py").read_text(encoding="utf-8").splitlines(keepends=True)
    start = next(place for place, line in enumerate(lines) if line.startswith("import "))
    ours = [line for line in lines[start:] if "xent" in line or "patch(" in line]
    assert len(ours) == 2
    (tmp_path / "trainer.py").write_text("".join(line for line in lines if line not in ours), encoding="utf-8")
    shutil.copy(EXAMPLES / "common.py", tmp_path)
    expected, losses, fused = torchrun(1, tmp_path, tmp_path / "trainer.py")
    assert fused == [0]
    found, found_losses, fused = torchrun(2, tmp_path, EXAMPLES / "trainer.py", "--rows", "4")
    assert fused == [STEPS + 1] * 2  # one more for the evaluation
    assert found_losses == pytest.approx(losses, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
