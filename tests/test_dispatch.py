"""The choice of the backend by name, array and XENT_BACKEND; the reasons of refusals; `python -m xent`."""

import linecache
import sys
from typing import Any

import numpy as np
import pytest

import xent
from tests.targets import Target
from xent.__main__ import main
from xent.backends import TABLE
from xent.command.check import run as report

dispatch = sys.modules[xent.backends.__module__]
"""The module that selects a backend."""


class Fake:
    """A backend for NumPy arrays that is preferred to the reference."""

    name, framework, native_to = "fake", "numpy", ("numpy",)
    missing: str | None = None
    refusal: str | None = None

    def refuse(self, call: Any) -> str | None:
        return self.refusal

    def info(self) -> xent.BackendInfo:
        reason = self.missing
        return xent.BackendInfo("fake", "numpy", reason is None, reason, {}, () if reason else ("cpu",))

    def run(self, call: Any) -> tuple[Any, xent.Stats]:
        return np.float64(-7.0), xent.Stats()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    backend = Fake()
    monkeypatch.setattr(dispatch, "TABLE", {("fake", "numpy"): lambda: backend} | TABLE)
    monkeypatch.setattr(dispatch, "_warned", set())
    return backend


def loss(**options: Any) -> float:
    return float(xent.cross_entropy(np.zeros((2, 4)), np.array([0, 1]), **options))


def test_auto_selects_the_first_backend_that_can_serve(fake: Fake) -> None:
    assert loss() == -7.0


@pytest.mark.parametrize("how", ["missing", "refusal"])
def test_auto_passes_over_the_native_backend_with_one_warning(fake: Fake, how: str) -> None:
    setattr(fake, how, "the moon is full")
    with pytest.warns(RuntimeWarning, match="does not use its fake backend.*the moon is full") as caught:
        found = xent.cross_entropy(np.zeros((2, 4)), np.array([0, 1]))
    assert float(found) == pytest.approx(np.log(4))
    line = linecache.getline(caught[0].filename, caught[0].lineno)
    assert line.strip().startswith("found = xent.cross_entropy")
    loss()
    assert len(caught) == 1


@pytest.mark.parametrize("how", ["missing", "refusal"])
def test_named_backend_that_cannot_serve_raises_with_the_reason(fake: Fake, how: str) -> None:
    setattr(fake, how, "the moon is full")
    with pytest.raises(xent.BackendError, match="'fake' cannot serve this call: the moon is full"):
        loss(backend="fake")


def test_environment_overrides_auto_but_not_a_name(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XENT_BACKEND", "numpy")
    assert loss() == pytest.approx(np.log(4))
    assert loss(backend="fake") == -7.0
    monkeypatch.setenv("XENT_BACKEND", "")
    assert loss() == -7.0
    monkeypatch.setenv("XENT_BACKEND", "nonsense")
    with pytest.raises(
        xent.BackendError, match=r"unknown backend 'nonsense' \(from the environment variable XENT_BACKEND\)"
    ):
        loss()


def test_error_names_backends_of_the_framework(target: Target) -> None:
    framework = target.backend.framework
    frameworks = " and ".join(takes for name, takes in TABLE if name == target.name)
    with pytest.raises(xent.BackendError, match=f"takes {frameworks} arrays and got numpy arrays: use backend 'numpy'"):
        loss(backend=target.name)
    logits, classes = target.arrays(np.zeros((2, 4)), np.array([0, 1]))
    with pytest.raises(
        xent.BackendError, match=f"takes numpy arrays and got {framework} arrays: use backend .*'{target.name}'"
    ):
        xent.cross_entropy(logits, classes, backend="numpy")


def test_backends_lists_the_table() -> None:
    listed = xent.backends()
    assert [(info.name, info.framework) for info in listed] == list(TABLE)
    for info in listed:
        assert info.available == (info.reason is None)
        assert not info.available or (info.versions and info.devices)


def test_command_lists_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    for info in xent.backends():
        assert info.name in printed


def test_check_skips_missing_and_unnamed_backends(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "TABLE", {("fake", "numpy"): lambda: fake})
    assert report.planned(["torch"]) == []
    fake.missing = "the moon is full"
    assert report.planned() == []
