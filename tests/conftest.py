"""The backends of a test run: those that XENT_TEST_BACKENDS names, or all that this machine can run.

If a named backend is not available, the whole run fails. No test is skipped because a backend is missing.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interpreter import prepare
from tests.targets import Target, backend_of, targets
from xent.backends import TABLE
from xent.backends.proof import Proof


def pytest_configure(config: pytest.Config) -> None:
    """Exit with an error if a named backend is not available."""
    os.environ.setdefault("MLX_ENABLE_TF32", "0")  # MLX reads it once, at its first product
    if os.environ.get("TRITON_INTERPRET") == "1":
        prepare()
    if "metal" in asked_for() and backend_of("metal").missing:
        _emulate_metal(config)
    for name in asked_for():
        names = [one for one, _ in TABLE]
        if name not in names:
            raise pytest.UsageError(f"XENT_TEST_BACKENDS names {name!r}; there are {', '.join(names)}")
        reason = backend_of(name).missing
        if reason is not None:
            raise pytest.UsageError(f"XENT_TEST_BACKENDS names {name!r}, which cannot run here: {reason}")


def _emulate_metal(config: pytest.Config) -> None:
    """Install the emulator in place of an Apple GPU, if MLX is installed."""
    try:
        import mlx.core  # noqa: F401
    except ImportError:
        return
    from tests.metal.emulator.install import folder_of, install

    try:
        install(folder_of(config))
    except RuntimeError as error:
        raise pytest.UsageError(str(error)) from error


def asked_for() -> list[str]:
    """Return the names in XENT_TEST_BACKENDS, or all that are not missing."""
    named = os.environ.get("XENT_TEST_BACKENDS", "")
    if named:
        return [name.strip() for name in named.split(",")]
    return list(dict.fromkeys(name for (name, _), load in TABLE.items() if load().missing is None))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests with a `target` argument by the module's TARGETS, or the backends and devices of this run."""
    if "target" in metafunc.fixturenames:
        driven = [target for name in asked_for() if name != "numpy" for target in targets(name)]
        metafunc.parametrize("target", getattr(metafunc.module, "TARGETS", driven), ids=str, scope="session")


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill uninitialised memory with NaN, so that reading it is noticed."""
    target = request.node.callspec.params.get("target") if hasattr(request.node, "callspec") else None
    if not isinstance(target, Target):
        yield
        return
    with target.poisoned():
        yield


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove xent's environment variables for the tests."""
    monkeypatch.delenv("XENT_BACKEND", raising=False)
    monkeypatch.delenv("XENT_CHECK_TARGETS", raising=False)


@pytest.fixture(autouse=True)
def unproven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not write passed checks of kernels to the user's cache, where they would affect "auto"."""
    monkeypatch.setattr(Proof, "file", lambda proof: tmp_path / "cache" / "passed.txt")
    if "metal" in asked_for():
        from xent.backends.metal import torch_machine

        monkeypatch.setattr(torch_machine.PROOF, "passed", False)
