"""The recipes for several processes train the same model as one process with the joint batch.

They run as scripts, one of them under torchrun, on two GPUs if there are two, else on the CPU with gloo.
"""

import re
import shutil
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.processes import GPUS, launch, torchrun
from tests.integrations.sharded import WAYS
from tests.integrations.tensor_parallel import LAYOUTS, MESHES
from tests.packaging.tree import ROOT

STEPS = 10
EXAMPLES = ROOT / "examples"

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


def train(
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


OneProcess = Callable[[bool], tuple[dict[str, Any], list[float]]]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> OneProcess:
    """Return a function that trains in one process, on a GPU or on the CPU."""

    @cache
    def plain(gpus: bool) -> tuple[dict[str, Any], list[float]]:
        folder = tmp_path_factory.mktemp("one")
        weights, losses, fused = train(1, folder, EXAMPLES / "ddp.py", "--plain", gpus=gpus)
        assert fused == [0]
        assert len(losses) == STEPS
        assert losses[-1] < losses[0] - 0.5
        return weights, losses

    return plain


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains_like_one_process(recipe: str, tmp_path: Path, one_process: OneProcess) -> None:
    processes, (script, *options) = RECIPES[recipe]
    if recipe == "Lightning":
        pytest.importorskip("lightning")
    gpus = processes <= GPUS
    expected, expected_losses = one_process(gpus)
    weights, losses, fused = train(processes, tmp_path, EXAMPLES / script, *options, gpus=gpus)
    assert fused == [STEPS * (2 if "two micro-batches" in recipe else 1)] * processes
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-5)


def test_all_descriptions_of_shards_have_the_same_loss() -> None:
    printed = torchrun(2, "tests.integrations.watched", str(EXAMPLES / "vocab_parallel.py"))
    losses = dict(re.findall(r"^([a-zA-Z ]+): (\d+\.\d+)$", printed, flags=re.MULTILINE))
    assert list(losses) == ["process group", "DTensor", "tokens in shards", "padding", "logits in shards"]
    assert len({losses[way] for way in ("process group", "DTensor", "tokens in shards")}) == 1


@pytest.mark.parametrize(
    ("processes", "module", "ways"),
    [(2, "sharded", WAYS), (2, "tensor_parallel", LAYOUTS), (4, "tensor_parallel", MESHES)],
)
def test_gradients_of_sharded_models(processes: int, module: str, ways: Collection[str]) -> None:
    """Inside and outside of the model, with FSDP, tensor parallelism, and both."""
    printed = launch(processes, f"tests.integrations.{module}", gpus=processes <= GPUS)
    assert sorted(re.findall(r"^compared: (.*)$", printed, flags=re.MULTILINE)) == sorted([*ways] * processes)


def test_script_with_the_trainer_needs_only_two_lines(tmp_path: Path) -> None:
    """Without the two lines it trains the same model, on one process and on two, without a fused loss."""
    lines = (EXAMPLES / "trainer.py").read_text(encoding="utf-8").splitlines(keepends=True)
    start = next(place for place, line in enumerate(lines) if line.startswith("import "))
    ours = [line for line in lines[start:] if "xent" in line or "patch(" in line]
    assert len(ours) == 2
    (tmp_path / "trainer.py").write_text("".join(line for line in lines if line not in ours), encoding="utf-8")
    shutil.copy(EXAMPLES / "common.py", tmp_path)
    expected, losses, fused = train(1, tmp_path, tmp_path / "trainer.py")
    assert fused == [0]
    found, found_losses, fused = train(2, tmp_path, EXAMPLES / "trainer.py", "--rows", "4")
    assert fused == [STEPS + 1] * 2  # one more for the evaluation
    assert found_losses == pytest.approx(losses, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
