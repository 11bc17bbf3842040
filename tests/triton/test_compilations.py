"""What a person reads while Triton compiles kernels."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from xent.backends.triton import compilations


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compilations, "_seconds", [0.0])
    caplog.set_level(logging.INFO, logger="xent")


def compiled(seconds: float, cache_hit: bool = False, module: str = "xent.kernels") -> None:
    """Tell the listener of a kernel as Triton's compiler does."""
    source = SimpleNamespace(name="rows_kernel", fn=SimpleNamespace(__module__=module))
    times = SimpleNamespace(total=round(seconds * 1e6))
    compilations.listen(src=source, metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)


def test_each_compilation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    compiled(2.34)
    assert caplog.messages == ["Compiled rows_kernel in 2.34 s."]


@pytest.mark.parametrize("other", [{"cache_hit": True}, {"module": "torch._inductor"}], ids=str)
def test_nothing_else_is_logged(other: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    compiled(60.0, **other)
    assert caplog.messages == []


def test_a_long_wait_is_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(4):
        compiled(2.75)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("xent has compiled Triton kernels for 6 s. This happens once: ")
    assert "XENT_LOG=1" in warnings[0]


def test_a_former_listener_still_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, Any]] = []
    monkeypatch.setattr(compilations, "_former", lambda **facts: heard.append(facts))
    compiled(1.0)
    assert [sorted(facts) for facts in heard] == [["cache_hit", "metadata", "metadata_group", "src", "times"]]
