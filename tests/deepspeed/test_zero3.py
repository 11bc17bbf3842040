"""Models that DeepSpeed's ZeRO-3 partitions train as without xent, with a fused loss."""

import importlib.util
import os
import re

import pytest

if importlib.util.find_spec("deepspeed") is None and os.environ.get("XENT_TEST_DEEPSPEED") != "1":
    pytest.skip("needs deepspeed: nox -s tests-deepspeed", allow_module_level=True)

from tests.deepspeed.zero3 import TRAINERS, WAYS
from tests.integrations.processes import GPUS, torchrun


def test_training_with_zero3(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two processes, on two GPUs if there are two: losses, trained weights, and whether the loss is fused."""
    if GPUS < 2:
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    printed = torchrun(2, "tests.deepspeed.zero3", patience=600)
    assert re.findall(r"^([^:]+): (fused|computed)$", printed, flags=re.MULTILINE) == [
        *[(way, "computed" if way == "logits read" else "fused") for way in WAYS],
        *[(name, "fused") for name in TRAINERS],
    ]
