"""The tests of changed files: `python -m tests.quick [FILES]` prints sessions of nox, each with arguments for pytest.

Without files, those that differ from the branch main are taken. A changed test file is run. Of any other file those
tests are run that name it (its module, or the name of a file that is no module), or that are marked `full` to guard it.
Of the package and its documents these are added:

- the tests in `FOLDERS` of the folder that the file is in;
- the tests with the file's name: `src/integrations/trl.py` has `tests/integrations/test_trl*.py`.

`nox -s quick` sets XENT_TEST_SECONDS=120. Tests that begin later are skipped, and counted in the run's last lines.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence

from tests.changes import ROOT, changed_files

__all__ = ["chosen", "main", "tests_of"]

MATRIX = "tests/test_gradients.py"
FOLDERS = {
    "src/core/": ("tests/test_errors.py", "tests/test_targets.py", "tests/test_promises.py"),
    "src/backends/torch/": (
        MATRIX,
        "tests/test_promises.py",
        "tests/torch/test_eager.py",
        "tests/torch/test_autograd.py",
    ),
    "src/backends/torch/shards/": ("tests/distributed/test_shards.py", "tests/distributed/test_promises.py"),
    "src/backends/triton/": ("tests/triton/test_rows.py", "tests/triton/test_tiles.py", "tests/triton/test_ranks.py"),
    "src/backends/mlx/": (MATRIX, "tests/mlx/test_log_probs.py", "tests/mlx/test_statistics.py"),
    "src/backends/metal/": ("tests/metal/test_rows.py", "tests/metal/test_tensors.py"),
    "src/integrations/transformers/": ("tests/integrations/test_deferred.py", "tests/integrations/test_models.py"),
    "src/": ("tests/packaging/test_circles.py", "tests/packaging/test_public_api.py"),
    "docs/": ("tests/packaging/test_examples.py",),
}
"""Folder -> tests of everything in it."""
SESSIONS = {"tests/triton/": "tests-triton", "tests/metal/": "tests-metal"}
"""Folder of tests -> their session, if it is not `tests`."""


def main(files: Sequence[str]) -> None:
    """Print a line for each session: its name, and arguments of pytest."""
    changed = files or changed_files()
    if changed is None:
        sys.exit("git does not tell what differs from the branch main: name the files")
    for session, arguments in chosen(changed).items():
        print(shlex.join([session, *arguments]))


def chosen(changed: Sequence[str]) -> dict[str, list[str]]:
    """Return the test files of changed files, by the session that runs them; changed test files are the first."""
    sessions: dict[str, list[str]] = {}
    for test in dict.fromkeys(test for file in sorted(changed, key=is_test, reverse=True) for test in tests_of(file)):
        if not (ROOT / test).exists():
            continue
        session = next((name for folder, name in SESSIONS.items() if test.startswith(folder)), "tests")
        sessions.setdefault(session, []).append(test)
    return sessions


def is_test(file: str) -> bool:
    """Whether a file holds tests."""
    return file.startswith("tests/") and file.rpartition("/")[2].startswith("test_")


def tests_of(file: str) -> Iterator[str]:
    """Yield the test files of a file."""
    top, name = file.partition("/")[0], file.rpartition("/")[2]
    if is_test(file):
        yield file
        return
    module = file.removesuffix(".py").removesuffix("/__init__").replace("src/", "xent/").replace("/", ".")
    signs = [f"{module} import", f"import {module}"] if file.endswith(".py") else []
    for test in sorted(ROOT.glob("tests/**/test_*.py")):
        text = test.read_text(encoding="utf-8")
        guarded = re.search(rf'mark\.full\([^)]*"{top}/"', text)
        same_name = file.startswith("src/") and test.name.startswith(f"test_{name.removesuffix('.py')}")
        if guarded or same_name or any(sign in text for sign in signs) or f'"{name}' in text:
            yield test.relative_to(ROOT).as_posix()
    for folder, tests in FOLDERS.items():
        if file.startswith(folder):
            yield from tests


if __name__ == "__main__":
    main(sys.argv[1:])
