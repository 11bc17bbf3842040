"""Detection of Triton and the GPU: for everything that can be missing, the message names what was found and needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from xent.backends.proof import Proof
from xent.backends.triton import BACKEND, machine
from xent.backends.triton.hopper import products
from xent.command.check.harnesses import harness_of


def found() -> tuple[str | None, tuple[str, ...]]:
    missing, _, devices = machine.find()
    return missing, devices


def have_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """Simulate GPUs with these compute capabilities, for which Triton compiles."""
    monkeypatch.setattr(machine, "_is_interpreting", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capabilities[index])


def test_missing_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    reason, versions, devices = machine.find()
    assert reason is not None
    assert "triton" in reason.partition(";")[0]
    assert reason.endswith("; pip install triton for an NVIDIA GPU, or use backend 'torch'")
    assert (versions, devices) == ({"torch": torch.__version__}, ())


OLD = "it needs Triton 3.4 or later and found {}"
OLD_GPU = "it needs GPUs of compute capability 7.5 or later and found one of 7.0"
FINDS: list[tuple[str, tuple[tuple[int, int], ...], str | None]] = [
    *((version, ((9, 0),), OLD.format(version)) for version in ("2.1.0", "3.1.0+git1234", "3.0.0rc1")),
    *((version, ((9, 0),), None) for version in ("3.4.0", "3.10.1", "4.0.0+git1234")),
    *(("3.9.0", gpus, OLD_GPU) for gpus in (((7, 0),), ((9, 0), (7, 0)))),
    *(("3.9.0", gpus, None) for gpus in (((7, 5),), ((8, 6), (12, 0)))),
]


@pytest.mark.parametrize(("version", "gpus", "reason"), FINDS, ids=str)
def test_versions_and_gpus(
    version: str, gpus: tuple[tuple[int, int], ...], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, *gpus)
    monkeypatch.setattr(triton, "__version__", version)
    assert found() == (reason, () if reason else ("cuda",))


def test_amd_is_not_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's gfx90a has the compute capability (9, 0)."""
    have_gpus(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    assert products._is_hopper.__wrapped__(device)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not products._is_hopper.__wrapped__(device)


@pytest.mark.parametrize(("hip", "capabilities"), [("6.4", ((9, 0),)), (None, ((9, 0), (7, 5)))])
def test_gpus_that_kernels_were_only_compiled_for_need_the_check(
    hip: str | None, capabilities: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, *capabilities)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: f"GPU {index}")
    name = machine._untried()
    assert name == f"GPU {len(capabilities) - 1}"
    assert found() == (None, ("cuda",))
    proof = Proof("triton", name)
    monkeypatch.setattr(machine, "UNTRIED", name)
    monkeypatch.setattr(machine, "PROOF", proof)
    reason = BACKEND.unproven()
    assert reason is not None
    assert f"its kernels are compiled for {name}, but never ran on a GPU of its kind: run python -m xent" in reason
    harness_of(BACKEND, "cpu").passed()
    assert BACKEND.unproven() is None
    assert Proof("triton", name).passed
    assert not Proof("triton", "another GPU").passed


def test_ampere_needs_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, (8, 0), (12, 0))
    assert machine._untried() is None


@pytest.mark.parametrize(("cuda", "what"), [(None, "is built without CUDA"), ("13.0", "finds no GPU or driver")])
def test_no_gpu(cuda: str | None, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert found() == (f"PyTorch {torch.__version__} {what}", ())


@pytest.mark.parametrize(("gpu", "devices"), [(False, ("cpu",)), (True, ("cuda", "cpu"))])
def test_interpreter_needs_no_gpu(gpu: bool, devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, *[(7, 5)] * gpu)
    monkeypatch.setattr(machine, "_is_interpreting", lambda: True)
    assert found() == (None, devices)


PROGRAM = """
import torch, xent
(reason,) = [info.reason for info in xent.backends() if info.name == "triton"]
print(reason)
logits, target = torch.zeros(2, 4), torch.tensor([0, 1])
assert abs(float(xent.cross_entropy(logits, target)) - 1.3862944) < 1e-6
try:
    xent.cross_entropy(logits, target, backend="triton")
except xent.BackendError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('libtriton.so: no such file')", "libtriton.so: no such file; pip install triton"),
        ("__version__ = '2.1.0'", "it needs Triton 3.4 or later and found 2.1.0"),
    ],
)
def test_in_a_fresh_process(source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without patches: another triton comes first on the path."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    program = [sys.executable, "-W", "error::RuntimeWarning", "-c", PROGRAM]
    printed = subprocess.run(program, check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed[0].startswith(reason)
    assert printed[1] == f"backend 'triton' cannot serve this call: {printed[0]}"


def test_kernels_chain_no_three_boolean_operators() -> None:
    """The oldest supported release of Triton supports only two operands."""
    files = sorted(Path(machine.__file__).parent.rglob("*.py"))
    functions = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if is_kernel(node)]
    assert len(functions) > 35
    for function in functions:
        for node in ast.walk(function):
            assert not isinstance(node, ast.BoolOp) or len(node.values) == 2, ast.unparse(node)


def is_kernel(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef):
        return False
    return any(ast.unparse(one) in ("triton.jit", "kernel") for one in node.decorator_list)
