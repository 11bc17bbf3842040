"""`python -m xent` and `python -m xent bench`: their output, and their messages if they cannot run."""

import functools
import re
from types import SimpleNamespace
from typing import Any

import pytest

from xent.__main__ import VARIABLES, main
from xent.command import bench
from xent.command.bench import HEADS, parse


def test_environment_names_versions_and_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XENT_PORTABLE", "1")
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^xent \d+\.\d+\.\d+, Python 3", printed)
    assert re.search(r"numpy \d", printed)
    assert all(name in printed for name in VARIABLES)
    assert re.search(r"XENT_PORTABLE +1 ", printed)


@pytest.mark.parametrize("name", HEADS)
def test_model_names_select_the_shape_of_their_head(name: str) -> None:
    assert parse(name.lower(), 64) == (64, *HEADS[name])


def test_shapes_are_parsed() -> None:
    assert parse("4x8x16", 64) == (4, 8, 16)


@pytest.mark.parametrize("text", ["4x8", "4x0x8", "Llama", "axbxc", "-1x2x3"])
def test_invalid_shapes_are_errors(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"{text}" if not text.startswith("-") else f"0{text}"]) == 2
    assert "shape must be NxDxV, three numbers > 0, or one of Llama-3-8B" in capsys.readouterr().err


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the losses of PyTorch by ones that are only noted."""
    ran = []

    def made(shape: Any, dtype: str) -> Any:
        named = {name: functools.partial(ran.append, (name, shape, dtype)) for name in ("xent", "unfused")}
        return named, lambda: 2**20 * (48 if ran[-1][0] == "xent" else 64)

    monkeypatch.setattr(bench, "_torch", made)
    monkeypatch.setattr(bench, "_MOST", 1)
    monkeypatch.setattr(bench, "backends", lambda: [SimpleNamespace(framework="torch", available=True)])
    monkeypatch.setattr(bench, "available", lambda framework: None)
    return ran


def test_bench_without_the_framework(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "backends", list)
    assert main(["bench", "--framework", "mlx"]) == 2
    assert "--framework must name an installed framework, and mlx is not installed" in capsys.readouterr().err


def test_bench_names_the_missing_memory(
    steps: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "available", lambda framework: 2**34)
    assert main(["bench", "Gemma-2-9B", "--tokens", "65536"]) == 0
    printed = capsys.readouterr().out
    assert "unfused was not run at 65536x3584x256000 bfloat16: it would take about 191.8 GiB" in printed
    assert "this machine has 16.0" in printed
    assert {name for name, *_ in steps} == {"xent"}
    monkeypatch.setattr(bench, "available", lambda framework: 2**30)
    assert main(["bench", "Gemma-2-9B"]) == 1
    assert "xent was not run at 1024x3584x256000 bfloat16: it would take about 3.4 GiB" in capsys.readouterr().out


@pytest.mark.parametrize("framework", ["torch", "mlx"])
def test_bench_of_a_framework(
    framework: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.targets import backend_of

    if backend_of(framework).missing is not None:
        pytest.skip(f"{framework} is not installed")
    monkeypatch.setattr(bench, "_MOST", 2)
    assert main(["bench", "64x32x2048", "--dtype", "float32", "--framework", framework]) == 0
    printed = capsys.readouterr().out
    for name in ("xent", "unfused"):
        assert re.search(rf"^{name} +\d+\.\d ms +\d+ MiB beyond the inputs$", printed, re.MULTILINE)
    assert re.search(r"of the unfused loss's time and \d+\.\d+ of its memory\.$", printed.strip())


def test_failures_are_reported(
    steps: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_torch", lambda shape, dtype: ({}, None))
    assert main(["bench", "2x3x4"]) == 1
    assert "xent failed at 2x3x4 bfloat16: KeyError: " in capsys.readouterr().out
