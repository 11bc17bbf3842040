"""`python -m xent` and `python -m xent bench`: their output, and their messages if they cannot run."""

import json
import re

import pytest

from xent.__main__ import main
from xent.command import bench
from xent.command.bench import HEADS, Shape, parse
from xent.command.show import VARIABLES


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
    assert parse(name.lower(), 64) == Shape(64, *HEADS[name])


def test_shapes_are_parsed() -> None:
    assert parse("4x8x16", 64) == Shape(4, 8, 16)


@pytest.mark.parametrize("text", ["4x8", "4x0x8", "Llama", "axbxc", "-1x2x3"])
def test_invalid_shapes_are_errors(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"{text}" if not text.startswith("-") else f"0{text}"]) == 2
    assert "shape must be NxDxV, three numbers > 0, or one of Llama-3-8B" in capsys.readouterr().err


def test_bench_measures_both(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(contender: str, *others: object) -> dict[str, float]:
        asked.append((contender, *others))
        return {"milliseconds": 4.0 if contender == "unfused" else 3.0, "mebibytes": 64.0}

    monkeypatch.setattr(bench, "_run", run)
    monkeypatch.setattr(bench, "_framework", lambda asked: "torch")
    monkeypatch.setattr(bench, "available", lambda framework: None)
    assert main(["bench", "4x8x16", "--dtype", "float32"]) == 0
    assert asked == [(contender, Shape(4, 8, 16), "float32", "torch") for contender in ("unfused", "xent")]
    assert "xent takes 0.75 of the unfused loss's time and 1.00 of its memory." in capsys.readouterr().out


def test_bench_without_the_framework(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "backends", list)
    assert main(["bench", "--framework", "mlx"]) == 2
    assert "--framework must name an installed framework, and mlx is not installed" in capsys.readouterr().err


def test_bench_names_the_missing_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "available", lambda framework: 2**30)
    monkeypatch.setattr(bench, "_run", lambda *_: pytest.fail("it was run"))
    monkeypatch.setattr(bench, "_framework", lambda asked: "torch")
    assert main(["bench", "Gemma-2-9B", "--tokens", "65536"]) == 1
    printed = capsys.readouterr().out
    assert "unfused was not run at 65536x3584x256000 bfloat16: it would take about 191.8 GiB" in printed
    assert "this machine has 1.0" in printed


def test_a_contender_in_its_own_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from xent.backends import TABLE

    frameworks = [name for name in ("torch", "mlx") if TABLE[name]().missing() is None]
    monkeypatch.setattr(bench, "_MOST", 2)
    for framework in frameworks:
        for contender in ("unfused", "xent"):
            arguments = ["bench", "64x32x2048", "--dtype", "float32", "--framework", framework]
            assert main([*arguments, "--measure", contender]) == 0
            found = json.loads(capsys.readouterr().out.splitlines()[-1])
            assert found["milliseconds"] > 0
            assert found["mebibytes"] >= 0


def test_failures_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "_framework", lambda asked: "nonsense")
    monkeypatch.setattr(bench, "available", lambda framework: None)
    assert main(["bench", "2x3x4"]) == 1
    assert "xent failed at 2x3x4 bfloat16: " in capsys.readouterr().out
