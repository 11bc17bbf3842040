"""Every check and demonstration of the project, each in an environment of its own.

`nox` alone runs what a contribution must pass; `nox -l` lists the rest. What follows `--` goes to pytest, to the
benchmark or to the demo: `nox -s tests-torch -- -k softcap`.

XENT_TORCH names the torch to install, with index options if need be; without it, the release the project is
tested with.
"""

import os
import shlex
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
TORCH = os.environ.get("XENT_TORCH", "torch==2.13.0")


def install(session: nox.Session, *groups: str, torch: bool = False) -> None:
    """Install torch, if asked for, then the package in editable mode with the dependency groups.

    Torch goes first and by itself: its requirement may carry an index that nothing else may come from, and
    what is installed later is satisfied with the build that is there.
    """
    if torch:
        session.install(*shlex.split(TORCH))
    session.install("--editable", ".[torch]" if torch else ".", *nox.project.dependency_groups(PROJECT, *groups))


def link_source() -> None:
    """Make typings/xent a link to src, where tools that read source without importing it look for xent."""
    link = ROOT / "typings" / "xent"
    link.parent.mkdir(exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(Path("..", "src"), target_is_directory=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting; with `-- --fix`, correct them."""
    session.install(*nox.project.dependency_groups(PROJECT, "lint"))
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check the types of the package with mypy and pyright."""
    install(session, "typecheck", torch=True)
    link_source()
    session.run("mypy")
    session.run("basedpyright", "--pythonpath", str(Path(session.bin, "python")))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; a warning is an error."""
    install(session, "docs", torch=True)
    session.run("sphinx-build", "--fail-on-warning", "--keep-going", "--fresh-env", "docs", "site")


@nox.session(name="tests-torch")
def tests_torch(session: nox.Session) -> None:
    """Run the tests on the reference and on the PyTorch backend."""
    install(session, "test", torch=True)
    session.run("pytest", *session.posargs, env={"XENT_TEST_BACKENDS": "numpy,torch"})


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure time and memory against other implementations."""
    install(session, "bench", torch=True)
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Train a small language model twice, with the plain loss and with xent, and compare."""
    install(session, "demo", torch=True)
    session.run("python", "-m", "demo", *session.posargs)
