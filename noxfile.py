"""Every check and demonstration of the project, each in an environment of its own.

`nox` alone runs what a contribution must pass; `nox -l` lists the rest. What follows `--` goes to pytest, to the
benchmark or to the demo: `nox -s tests -- -k softcap`.

XENT_TORCH names the torch to install, with index options if need be; without it, the release the project is
tested with. XENT_TRITON does so for Triton, where torch does not bring its own.
"""

import functools
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
INSTALLED = ("tests/test_reference.py", "tests/test_errors.py", "tests/test_dispatch.py", "tests/test_gradients.py")
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
TORCH = os.environ.get("XENT_TORCH", "torch==2.13.0")
TRITON = os.environ.get("XENT_TRITON", "triton==3.9.0")  # the newest: the interpreter needs no matching PyTorch
MLX = os.environ.get("XENT_MLX", "")  # a version specifier
OLDEST = (
    "numpy==1.26.*",
    "pyarrow<26",  # of datasets, which TRL needs: 26 cannot be imported with this NumPy
    "torch==2.8.*",
    "triton==3.4.*",
    "transformers==5.0.*",
    "trl==1.16.*; python_version >= '3.11'",
)
EXAMPLES = "tests/packaging/test_examples.py"
GUIDE = "docs/replace.md"
HEADS = "tests/integrations/test_quantized.py", "tests/mlx/test_mlx_vlm.py"
LIBRARIES = {
    "XENT_TEST_INTEGRATIONS": "1",
    "HF_HUB_OFFLINE": "1",  # models and data are made in the tests
}
"""How the tests of the libraries are run."""
HAS_MLX = sys.platform in ("darwin", "linux")
SHOWN = {
    "rl": ("examples/grpo.py", "--steps", "120", "--plot", "demo/out/rl.png"),
    "distillation": ("-m", "examples.distill", "--steps", "60", "--plot", "demo/out/distillation.png"),
}
"""What `nox -s demo` shows if asked, in a minute or two each on two cores."""
SCHEMAS = {
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/[bf]*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "citation-file-format": "CITATION.cff",
}
WITHOUT_BACKENDS = (
    "divergence/test_reference.py",
    "test_chunks.py",
    "test_covering.py",
    "test_planted_faults.py",
    "test_reference.py",
)
"""Tests that call no backend but the reference: `tests` and tests-torch alone run them."""
WITHOUT_KERNELS = (
    *WITHOUT_BACKENDS,
    "convergence/test_convergence.py::test_fault_is_found",
    "distributed",
    "test_errors.py",
    "test_judge.py",
    "torch/test_benchmarks.py",
    "torch/test_compile.py",
    "torch/test_errors_page.py",
    "torch/test_many_classes.py",
    "torch/test_modules.py",
    "torch/test_plans.py",
    "torch/test_private.py",
    "torch/test_quantized.py::test_memory",
    "torch/test_refusals.py",
    "torch/test_scale.py::test_shards_accept_a_scale_without_gradient",
    "torch/test_repeated_calls.py",
    "torch/test_threads.py",
    "torch/test_transforms.py",
    "torch/test_work.py",
)


def timed(run: Callable[[nox.Session], None]) -> Callable[[nox.Session], None]:
    """Return a session that says at its end how many seconds it took, installation included."""

    @functools.wraps(run)
    def timed_run(session: nox.Session) -> None:
        start = time.monotonic()
        run(session)
        session.log(f"{session.name} took {time.monotonic() - start:.0f} s")

    return timed_run


def install(session: nox.Session, *groups: str, extras: str, also: Sequence[str] = ()) -> None:
    """Install the package in editable mode with extras and dependency groups, and before it torch, if it is an extra.

    Torch goes first and by itself: its requirement may carry an index that nothing else may come from, and
    what is installed later is satisfied with the build that is there.
    """
    if "torch" in extras:
        unpack(session, *shlex.split(TORCH))
    unpack(session, "--editable", f".[{extras}]", *also, *nox.project.dependency_groups(PROJECT, *groups))


def unpack(session: nox.Session, *requirements: str) -> None:
    """Install without compiling: Python compiles modules when they are imported, and keeps them.

    To compile all of torch takes longer than to unpack it.
    """
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    session.install("--no-compile", *requirements)


def install_compiler(session: nox.Session) -> None:
    """Install torch, and Triton; a torch for CUDA brings the Triton that it was built with."""
    unpack(session, *shlex.split(TORCH))
    if not ask(session, "any(need.startswith('triton') for need in importlib.metadata.requires('torch'))"):
        unpack(session, *shlex.split(TRITON))


def install_triton(session: nox.Session, *groups: str) -> None:
    """Install torch, Triton, then the package."""
    install_compiler(session)
    install(session, *groups, extras="triton")


def ask(session: nox.Session, question: str, modules: str = "importlib.metadata, torch") -> bool:
    """Return what Python says in the session's environment."""
    answer = session.run("python", "-c", f"import {modules}; print({question})", silent=True)
    return str(answer).split()[-1] == "True"


def has_gpu(session: nox.Session) -> bool:
    """Whether the session's torch can use a GPU; an error if there is one that it cannot use."""
    if ask(session, "torch.cuda.is_available()"):
        return True
    listing = [shutil.which("nvidia-smi") or "false", "-L"]
    if subprocess.run(listing, check=False, capture_output=True).returncode == 0:
        session.error("torch cannot use this machine's GPU: name another with XENT_TORCH, or set TRITON_INTERPRET=1")
    return False


def link_source() -> None:
    """Make typings/xent a link to src, where tools that read source without importing it look for xent."""
    link = ROOT / "typings" / "xent"
    link.parent.mkdir(exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(Path("..", "src"), target_is_directory=True)


def run_pytest(session: nox.Session, *arguments: str, **settings: str) -> None:
    """Run tests in two processes of one thread; one that has nothing left to do takes tests from the other.

    More threads would wait for each other: on two cores that is most of the time of many small operations.
    """
    environment = {"OMP_NUM_THREADS": "1", **settings}
    options = "--numprocesses=2", "--dist=worksteal", "--durations=10"
    session.run("pytest", *options, *arguments, *session.posargs, env=environment)


def leave_out(*names: str) -> list[str]:
    """Return pytest's options that leave out files and folders, and single tests, as "file::test"."""
    return [f"--{'deselect' if '::' in name else 'ignore'}=tests/{name}" for name in names]


@nox.session
@timed
def checks(session: nox.Session) -> None:
    """Check style, formatting, types and the documentation, in one environment."""
    install(session, "lint", "typecheck", "docs", extras="torch,mlx")
    check_style(session)
    check_types(session)
    build_docs(session)


@nox.session(default=False)
def lint(session: nox.Session) -> None:
    """Check style and formatting; with `-- --fix`, correct them."""
    session.install(*nox.project.dependency_groups(PROJECT, "lint"))
    check_style(session)


@nox.session(default=False)
def typecheck(session: nox.Session) -> None:
    """Check the types of the package with mypy and pyright."""
    install(session, "typecheck", extras="torch,mlx")
    check_types(session)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; a warning is an error."""
    install(session, "docs", extras="torch,mlx")
    build_docs(session)


def check_style(session: nox.Session) -> None:
    """Run ruff, a spelling checker, the schemas of files that services read, and a check of tables against results."""
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    session.run("codespell", *(["--write-changes"] if fix else []))
    for schema, paths in SCHEMAS.items():
        session.run("check-jsonschema", f"--builtin-schema=vendor.{schema}", *map(str, sorted(ROOT.glob(paths))))
    session.run("python", "-m", "benchmarks.documents", *([] if fix else ["--check"]))


def check_types(session: nox.Session) -> None:
    """Run mypy and pyright on the package, and on calls of it that they must accept or refuse."""
    link_source()
    session.run("mypy")
    session.run("basedpyright", "--pythonpath", str(Path(session.bin, "python")))
    session.run("python", "-m", "tests.types")


def build_docs(session: nox.Session) -> None:
    """Run Sphinx."""
    session.run("sphinx-build", "--fail-on-warning", "--keep-going", "--fresh-env", "docs", "site")


@nox.session
@timed
def tests(session: nox.Session) -> None:
    """Run the tests on the reference, PyTorch, MLX and Metal, and those of the libraries that people train with.

    They share an environment, and a run of pytest; only Metal has its own run, in which an emulator may take the place
    of an Apple GPU. With arguments for pytest it is left out: tests-metal takes them.
    """
    groups = "test", "metal", "mlx-lm", "integrations", "trl"
    install(session, *groups, extras="torch,mlx", also=[f"mlx{MLX}"] if MLX else [])
    run_pytest(session, XENT_TEST_BACKENDS="numpy,torch,mlx" if HAS_MLX else "numpy,torch", **LIBRARIES)
    if HAS_MLX and not session.posargs:
        test_metal(session)
    if ask(session, f"{GUIDE!r} in (tests.changes.changed_files() or [])", "tests.changes"):
        session.notify("tests-guide")


@nox.session(name="tests-torch", default=False)
def tests_torch(session: nox.Session) -> None:
    """Run the tests on the reference and on the PyTorch backend, in an environment with PyTorch alone."""
    install(session, "test", "parallel", extras="torch")
    run_pytest(session, XENT_TEST_BACKENDS="numpy,torch")


@nox.session(name="tests-triton", default=sys.platform == "linux")
@timed
def tests_triton(session: nox.Session) -> None:
    """Run the tests on the Triton backend: on the GPU, or without one in Triton's interpreter, on the CPU.

    The session's own torch says whether there is a GPU, since it is torch that has to use it. A GPU that nvidia-smi
    lists and torch cannot use is an error, and TRITON_INTERPRET=1 asks for the interpreter all the same.

    In the interpreter two processes share the work, batches have few rows, and tests are left out which launch no
    kernel of this backend or show what the driver does whatever the kernel (`WITHOUT_KERNELS`): `tests` runs them. On
    a GPU everything runs.
    """
    install_triton(session, "test", "parallel")
    if os.environ.get("TRITON_INTERPRET") != "1" and has_gpu(session):
        session.run("pytest", *session.posargs, env={"XENT_TEST_BACKENDS": "triton"})
        return
    test_interpreter(session)


def test_interpreter(session: nox.Session, *without: str) -> None:
    """Run the tests on the Triton backend in Triton's interpreter, `without` some files."""
    session.log("Triton interprets its kernels on the CPU")
    left_out = leave_out(*WITHOUT_KERNELS, "integrations", "packaging/test_examples.py", *without)
    run_pytest(session, *left_out, XENT_TEST_BACKENDS="triton", TRITON_INTERPRET="1")


@nox.session(name="tests-mlx", default=False)
def tests_mlx(session: nox.Session) -> None:
    """Run the tests on the MLX backend, on every device that MLX has here, without those that call no backend."""
    install(session, "test", "parallel", "mlx-lm", extras="mlx", also=[f"mlx{MLX}"] if MLX else [])
    run_pytest(session, *leave_out(*WITHOUT_BACKENDS), XENT_TEST_BACKENDS="mlx")


@nox.session(name="tests-metal", default=False)
def tests_metal(session: nox.Session) -> None:
    """Run the tests on the Metal backend: on an Apple GPU, or without one in an emulator of Metal, on the CPU.

    MLX launches the kernels in most of them, and PyTorch in some. The emulator needs a C++20 compiler, g++ or what CXX
    names. Compiled kernels are kept in .pytest_cache/. Files are left out which launch no kernel or show what the
    driver does whatever the kernel: other sessions run them.
    """
    install(session, "test", "metal", extras="torch,mlx")
    test_metal(session)


def test_metal(session: nox.Session) -> None:
    """Run the tests of tests-metal."""
    run_pytest(session, *leave_out(*WITHOUT_KERNELS, "mlx", "packaging", "integrations"), XENT_TEST_BACKENDS="metal")


@nox.session(name="tests-integrations", default=False)
def tests_integrations(session: nox.Session) -> None:
    """Run the tests of the libraries that people train with."""
    install(session, "test", "parallel", "integrations", "trl", extras="torch")
    run_pytest(session, "tests/integrations", EXAMPLES, XENT_TEST_BACKENDS="torch", **LIBRARIES)


@nox.session(name="tests-heads", default=False)
def tests_heads(session: nox.Session) -> None:
    """Run the tests of quantized heads and of models with images, with bitsandbytes, torchao and mlx-vlm."""
    install(session, "test", "parallel", "mlx-lm", "integrations", "trl", "heads", extras="torch,mlx")
    run_pytest(session, *HEADS, XENT_TEST_BACKENDS="torch,mlx", **LIBRARIES)


@nox.session(name="tests-guide", default=False)
def tests_guide(session: nox.Session) -> None:
    """Run the guide docs/replace.md with the losses that it replaces, in Triton's interpreter if there is no GPU."""
    install_triton(session, "test", "guide", "integrations", "trl")
    settings = {"XENT_TEST_BACKENDS": "torch", **LIBRARIES} | ({} if has_gpu(session) else {"TRITON_INTERPRET": "1"})
    session.run("pytest", EXAMPLES, "-k", Path(GUIDE).name, env=settings)


@nox.session(name="tests-newest", default=False)
def tests_newest(session: nox.Session) -> None:
    """Run the tests with the newest releases, which a new user's `pip install` brings.

    Where pip's configuration holds a release back, PIP_CONSTRAINT=/dev/null lifts it.
    """
    test_releases(session, ["--upgrade", "--upgrade-strategy=eager"])


@nox.session(name="tests-oldest", default=False)
def tests_oldest(session: nox.Session) -> None:
    """Run the tests with the oldest releases that docs/versions.md names, on Python 3.10 to 3.12 (NumPy 1.26)."""
    test_releases(session, OLDEST, "triton/test_compile.py")  # Triton 3.4 links for AMD's GPUs with ROCm's linker


def test_releases(session: nox.Session, requirements: Sequence[str], *without: str) -> None:
    """Run the tests of PyTorch, of the libraries and of the interpreter with the releases that pip then chooses."""
    groups = nox.project.dependency_groups(PROJECT, "test", "parallel", "integrations", "trl")
    unpack(session, *requirements, "--editable", ".[triton]", *groups)
    session.run("python", "-m", "xent")
    run_pytest(session, XENT_TEST_BACKENDS="numpy,torch", **LIBRARIES)
    if sys.platform == "linux":
        test_interpreter(session, *without)


@nox.session(name="tests-deepspeed", default=False)
def tests_deepspeed(session: nox.Session) -> None:
    """Train models that DeepSpeed's ZeRO-3 partitions, in two processes on the CPU. It builds DeepSpeed from source."""
    install(session, "test", "integrations", "trl", extras="torch", also=["setuptools", "wheel", "ninja", "py-cpuinfo"])
    session.install("--no-build-isolation", "deepspeed==0.19.8", env={"DS_BUILD_OPS": "0"})
    settings = {"XENT_TEST_BACKENDS": "torch", "XENT_TEST_DEEPSPEED": "1", "DS_ACCELERATOR": "cpu"}
    session.run("pytest", "tests/deepspeed", *session.posargs, env={**settings, "OMP_NUM_THREADS": "1"})


@nox.session(default=False, venv_backend="none")
def full(session: nox.Session) -> None:
    """Run all tests: those that are marked `full`, and the products of what the matrix covers in pairs and triples."""
    os.environ["XENT_TEST_FULL"] = "1"
    for name in ("tests", "tests-triton", "tests-guide", "tests-heads"):
        session.notify(name)


@nox.session(default=False, venv_backend="none")
def quick(session: nox.Session) -> None:
    """Run for two minutes tests of the files that follow `--`, or of those that differ from main (tests/quick.py)."""
    os.environ["XENT_TEST_SECONDS"] = "120"
    chosen = session.run(sys.executable, "-m", "tests.quick", *session.posargs, silent=True, external=True)
    session.log(chosen or "these files have no tests of their own")
    for line in str(chosen).splitlines():
        name, *arguments = shlex.split(line)
        session.notify(name, arguments)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build the source distribution and the wheel into dist/, and check their metadata and contents."""
    session.install(*nox.project.dependency_groups(PROJECT, "build"))
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", "dist")
    made = [str(path) for path in sorted((ROOT / "dist").iterdir())]
    session.run("twine", "check", "--strict", *made)
    session.run("check-wheel-contents", *[name for name in made if name.endswith(".whl")])
    session.run("python", "-m", "tests.packaging.contents", *made)


@nox.session(default=False)
@nox.parametrize("extra", ["", "torch", "triton", "mlx"], ids=["alone", "torch", "triton", "mlx"])
def installed(session: nox.Session, extra: str) -> None:
    """Install the wheel in dist/ with one extra, in an environment of its own, and test what was installed.

    `nox -s build` makes the wheel. Tests that need no other file of the project run from a copy of tests/.
    """
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        session.error(f"dist/ must hold one wheel, and holds {len(wheels)}: run nox -s build")
    if extra == "triton":
        install_compiler(session)
    elif extra == "torch":
        unpack(session, *shlex.split(TORCH))
    session.install("--force-reinstall", "--no-deps", str(wheels[0]))
    session.install(f"{wheels[0]}[{extra}]" if extra else str(wheels[0]), "pytest>=9", "tomli; python_version < '3.11'")
    copy = Path(session.create_tmp()) / "elsewhere"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "tests", copy / "tests")
    shutil.copy(ROOT / "pyproject.toml", copy)
    session.chdir(copy)
    settings = {"XENT_TEST_BACKENDS": extra or "numpy", "OMP_NUM_THREADS": "1"}
    if extra == "triton" and not has_gpu(session):
        settings["TRITON_INTERPRET"] = "1"
    session.run("python", "-m", "xent")
    session.run("pytest", *INSTALLED, *session.posargs, env=settings)


@nox.session(default=False)
def sanitize(session: nox.Session) -> None:
    """Watch every Triton kernel with NVIDIA's compute-sanitizer, which must be on the PATH, on a GPU.

    memcheck looks for reads and writes out of bounds, racecheck for threads that do not wait for each other.
    """
    install_triton(session)
    session.run("python", "-m", "tests.triton.sanitize", *session.posargs)  # compiles, which takes most of the time
    for tool in ("memcheck", "racecheck"):
        session.run("python", "-m", "tests.triton.watch", tool, *session.posargs)


@nox.session(name="compile", default=False)
def compile_kernels(session: nox.Session) -> None:
    """Compile every Triton kernel for NVIDIA's and AMD's GPUs, which need not be there. Nothing is run.

    `-- --all` compiles every signature, `-- --targets sm_80 gfx942` for some GPUs.
    """
    install_triton(session)
    session.run("python", "-m", "tests.triton.compile", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure time and memory against other implementations."""
    install(session, "bench", extras="torch")
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session(name="bench-mlx", default=False)
def bench_mlx(session: nox.Session) -> None:
    """Measure time, memory and errors on MLX's default device, against MLX's own unfused loss."""
    install(session, "bench", extras="mlx")
    session.run("python", "-m", "benchmarks.mlx", *session.posargs)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Train a small language model twice, with the plain loss and with xent, and compare.

    `-- rl` trains a toy model by its reward instead, and `-- distillation` students of a larger model.
    """
    first, *rest = session.posargs or [""]
    install(session, "demo", *(["integrations"] if first == "rl" else []), extras="torch")
    if first in SHOWN:
        Path("demo", "out").mkdir(exist_ok=True)
        session.run("python", *SHOWN[first], *rest)
    else:
        session.run("python", "-m", "demo", *session.posargs)
