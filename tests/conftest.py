"""The backends of a test run: those that XENT_TEST_BACKENDS names, or all that this machine can run.

If a named backend is not available, the whole run fails. No test is skipped because a backend is missing.

A test that is marked `full` guards paths that a change seldom touches. It runs if they differ from the branch main, if
its file is named on the command line, and with XENT_TEST_FULL=1, which `nox -s full` sets. XENT_TEST_FULL=0 skips it.
XENT_TEST_SECONDS skips the tests that would begin later.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.changes import ROOT, changed_files
from tests.interpreter import prepare
from tests.targets import Target, backend_of, targets
from xent.backends import TABLE
from xent.backends.proof import Proof

FRAMEWORK_OF = {"torch": "torch", "distributed": "torch", "mlx": "mlx"}
BEGIN = time.monotonic()
SECONDS = os.environ.get("XENT_TEST_SECONDS", "inf")


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
    """Parametrize tests with a `target` argument by the module's TARGETS, or the backends and devices of this run.

    In the folders tests/torch and tests/mlx, and in tests/distributed, these are the backends of one framework.
    """
    if "target" in metafunc.fixturenames:
        folder = metafunc.definition.path.parent.name
        frameworks = [FRAMEWORK_OF[folder]] if folder in FRAMEWORK_OF else ["torch", "mlx"]
        driven = [target for name in asked_for() if name != "numpy" for target in targets(name)]
        driven = [target for target in driven if target.backend.framework in frameworks]
        metafunc.parametrize("target", getattr(metafunc.module, "TARGETS", driven), ids=str, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that are marked `full`, if nothing that they guard has changed."""
    wish = os.environ.get("XENT_TEST_FULL")
    touched = [] if wish == "0" else changed_files()
    if wish == "1" or touched is None:
        return
    named = set() if wish == "0" else {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    for item in items:
        marker = item.get_closest_marker("full")
        if marker is None or item.path in named:
            continue
        guarded = (*marker.args, item.path.relative_to(ROOT).as_posix())
        if not any(file.startswith(guarded) for file in touched):
            reason = f"guards {', '.join(marker.args)}, which has not changed since main: nox -s full runs it"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup() -> None:
    """Skip a test that would begin too late."""
    if time.monotonic() - BEGIN > float(SECONDS):
        pytest.skip(f"the {SECONDS} s of this run were over")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the reasons of skipped tests."""
    reasons = Counter(report.longrepr[-1] for report in terminalreporter.stats.get("skipped", ()))
    if reasons:
        terminalreporter.section("skipped tests, by reason")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5} {reason.removeprefix('Skipped: ')}")


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
