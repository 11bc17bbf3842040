"""Numbers and batch lengths that change during training cause no recompilation."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import xent

VOCABULARIES = [1000, 43_520, 16_387]  # one block, several blocks, rows off the 16-byte boundaries


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of kernels that Triton has to compile when they are launched."""
    names = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **launch: names.append(launch["fn"].name))
    return names


def step(vocabulary: int = 1000, rows: int = 300, **options: Any) -> None:
    """Run forward and backward of both functions, with "mean" and "none", and the forward pass alone."""
    upstream = options.pop("upstream", 1.0)
    logits = torch.randn(rows, vocabulary, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocabulary, (rows,), device="cuda")
    for reduction in ("mean", "none"):
        named = options | {"reduction": reduction, "backend": "triton"}
        if reduction == "none":
            named.pop("normalizer", None)
        for loss in (
            xent.cross_entropy(logits, target, **named),
            xent.linear_cross_entropy(hidden, weight, target, **named),
            xent.linear_cross_entropy(hidden, weight, target, workspace=128 * vocabulary * 2, **named),
        ):
            (loss.sum() * upstream).backward()
        with torch.no_grad():
            xent.cross_entropy(logits, target, **named)
            xent.linear_cross_entropy(hidden, weight, target, **named)


CHANGES = {
    "z_loss": [1e-4, 2e-4, 1.0, 2.0],
    "label_smoothing": [0.1, 0.05, 1.0],
    "softcap": [30.0, 15.0, 1.0, 2],
    "logit_scale": [0.5, 0.25, -1.0, 2.0, 16],
    "normalizer": [1000.0, 1.0, 16, 0, 7],
    "upstream": [1.0, 0.5, 65536.0],
}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", CHANGES)
def test_numbers(compiled: list[str], name: str, vocabulary: int) -> None:
    first, *rest = CHANGES[name]
    step(vocabulary, **{name: first})
    compiled.clear()
    for number in rest:
        step(vocabulary, **{name: number})
    assert compiled == []


def test_hook_sees_compilations(compiled: list[str]) -> None:
    step()
    compiled.clear()
    logits = torch.randn(4, 77, device="cuda", dtype=torch.float16, requires_grad=True)
    xent.cross_entropy(logits, torch.zeros(4, device="cuda", dtype=torch.int64), softcap=3.0, z_loss=0.1).backward()
    assert any("kernel" in name for name in compiled)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_lengths_of_batches(compiled: list[str], vocabulary: int) -> None:
    for rows in (256, 271):
        step(vocabulary, rows)
    compiled.clear()
    for rows in (384, 512, 328, 333, 301, 4500):
        step(vocabulary, rows)
    assert compiled == []


FIRST_CALL = """
import hashlib, torch, xent
generator = torch.Generator().manual_seed(0)
hidden, weight = (torch.randn(size, 64, generator=generator).cuda().bfloat16().requires_grad_() for size in (300, 5000))
target = torch.arange(300, device="cuda")
log_probs, entropy = xent.linear_log_probs(hidden, weight, target, entropy=True, backend="triton")
log_probs.sum().backward()
results = log_probs, entropy, hidden.grad, weight.grad
print(hashlib.sha256(b"".join(each.detach().float().cpu().numpy().tobytes() for each in results)).hexdigest())
"""


def start(cache: Path) -> "subprocess.Popen[str]":
    """Start a process that makes a first call with an empty cache or a full one."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "XENT_LOG": "1"}
    command = [sys.executable, "-c", FIRST_CALL]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    """Both end, with the same bits; a third process finds all kernels in the cache."""
    processes = [start(tmp_path), start(tmp_path)]
    ended = [(process.communicate(timeout=300), process.returncode) for process in processes]
    assert [status for _, status in ended] == [0, 0], ended
    (first, log), (second, _) = (texts for texts, _ in ended)
    assert first == second
    assert re.search(r"^Compiled finish_kernel in \d+\.\d\d s\.$", log, re.MULTILINE)
    third, log = start(tmp_path).communicate(timeout=300)
    assert third == first
    assert "Compiled" not in log
