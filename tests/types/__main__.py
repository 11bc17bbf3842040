"""Run mypy and basedpyright on calls of the public functions: `python -m tests.types`, in an environment with both.

Each must report exactly the lines that are marked with "# error", with the frameworks installed and without.
"""

import json
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
TYPINGS = HERE.parents[1] / "typings"  # holds a link xent -> src
SCRIPTS = Path(sys.executable).parent


def mypy(path: Path, python: str, folder: Path) -> set[int]:
    """Return the lines with an error."""
    config = folder / "mypy.ini"
    config.write_text(f"[mypy]\nmypy_path = {TYPINGS}\nfollow_imports = silent\n")
    command = [str(SCRIPTS / "mypy"), "--config-file", str(config), "--python-executable", python, "--no-incremental"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode > 1:
        raise SystemExit(done.stdout + done.stderr)
    return {int(line) for line in re.findall(rf"{path.name}:(\d+): error", done.stdout)}


def pyright(path: Path, python: str, folder: Path) -> set[int]:
    """Return the lines with an error."""
    settings = {"include": [str(path)], "extraPaths": [str(TYPINGS)], "typeCheckingMode": "standard"}
    config = folder / "pyrightconfig.json"
    config.write_text(json.dumps(settings))
    command = [str(SCRIPTS / "basedpyright"), "-p", str(config), "--pythonpath", python, "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"}


def main() -> int:
    """Return 1 if a checker reports other lines than those that are marked."""
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "bare", symlinks=True)
        bare = str(folder / "bare" / "bin" / "python")
        for path, python in (("any_array", bare), ("any_array", sys.executable), ("frameworks", sys.executable)):
            file = HERE / f"{path}.py"
            lines = file.read_text(encoding="utf-8").splitlines()
            marked = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
            for checker in (mypy, pyright):
                wrong = checker(file, python, folder) ^ marked
                where = "without frameworks" if python == bare else "with frameworks"
                print(f"{checker.__name__} on {file.name}, {where}: {len(marked)} lines refused", flush=True)
                for number in sorted(wrong):
                    print(f"  {file.name}:{number} {'is not refused' if number in marked else 'is refused'}")
                failed += len(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
