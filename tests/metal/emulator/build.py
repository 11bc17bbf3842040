"""Translate a kernel's Metal source to C++ and compile it to a shared library, cached by content."""

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.metal.emulator.capture import Source

__all__ = ["Workshop", "translate"]

_HERE = Path(__file__).parent
_FLAGS = [
    "-std=c++20",
    "-Og",
    "-fPIC",
    "-fno-semantic-interposition",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-w",
]
_CHECKED = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]  # a misaligned access is a SIGILL
_LINKED = ["-shared"] if sys.platform == "darwin" else ["-shared", "-nostdlib"]  # the libraries are loaded already
_DECLARATION = re.compile(r"(?m)^(\s*)threadgroup\s+([\w:]+)\s+(\w+)\s*\[([^\]]+)\]\s*;")
_POINTER = re.compile(r"\bthreadgroup\s+([\w:]+)\s*\*")
_INSTANTIATION = re.compile(r"(?m)^template \[\[host_name.*;$")


class Workshop:
    """Compiles kernels into a folder that several processes may share. Equal sources are compiled once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._compiler = folder, os.environ.get("CXX", "g++")
        if shutil.which(self._compiler) is None:
            raise RuntimeError(
                f"the emulator of Metal compiles kernels with {self._compiler!r}, which is not on the PATH: install a "
                "C++20 compiler, or name one in CXX"
            )
        version = subprocess.run([self._compiler, "--version"], check=True, capture_output=True).stdout
        ours = [path for path in sorted(_HERE.rglob("*")) if path.suffix in (".h", ".cpp", ".py") or not path.suffix]
        texts = [path.read_bytes() for path in ours if path.is_file()]
        self._salt = hashlib.sha256(b"".join([version, *texts])).hexdigest()[:16]

    @cache  # noqa: B019  a session has one workshop
    def runtime(self) -> ctypes.CDLL:
        """Return the emulator itself."""
        return ctypes.CDLL(str(self._runtime()), mode=ctypes.RTLD_GLOBAL)

    @cache  # noqa: B019
    def kernel(self, source: Source) -> ctypes.c_void_p:
        """Return the address of the function that runs one thread of a kernel."""
        self.runtime()
        text = translate(source)
        header = self._header()
        made = self._make("kernel", text, ["-include", str(header), *_CHECKED, *_LINKED])
        return ctypes.cast(ctypes.CDLL(str(made)).emulator_entry, ctypes.c_void_p)

    def _runtime(self) -> Path:
        text = (_HERE / "runtime.cpp").read_text(encoding="utf-8")
        return self._make("runtime", text, ["-O2", f"-I{_HERE}", "-shared"])

    @cache  # noqa: B019
    def _header(self) -> Path:
        """Return the precompiled header of Metal's standard library."""
        text = '#include "emulator/mlx.h"\n'
        made = self._make("header", text, ["-x", "c++-header"], suffix=".h.gch")
        plain = made.with_suffix("")
        if not plain.exists():
            plain.write_text(text, encoding="utf-8")
        return plain

    def _make(self, kind: str, text: str, flags: list[str], suffix: str = ".so") -> Path:
        key = hashlib.sha256((self._salt + kind + text).encode()).hexdigest()[:24]
        made = self.folder / f"{kind}-{key}{suffix}"
        if made.exists():
            return made
        with self._alone(made):
            if not made.exists():
                source, fresh = made.with_suffix(".cpp"), made.with_suffix(".new")
                source.write_text(text, encoding="utf-8")
                command = [self._compiler, *_FLAGS, f"-I{_HERE / 'include'}", *flags, str(source), "-o", str(fresh)]
                run = subprocess.run(command, check=False, capture_output=True, text=True)
                if run.returncode:
                    raise RuntimeError(f"{source} does not compile:\n{run.stderr}")
                fresh.replace(made)
        return made

    @contextmanager
    def _alone(self, made: Path) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with made.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def translate(source: Source) -> str:
    """Return a kernel as C++, with checked threadgroup memory, and an entry point that runs one thread."""
    numbers = []

    def declare(match: re.Match[str]) -> str:
        indent, kind, name, count = match.groups()
        numbers.append(name)
        return f"{indent}auto {name} = emulator::claim<{kind}, ({count})>({len(numbers) - 1});"

    text = _INSTANTIATION.sub("", source.text)
    text = _DECLARATION.sub(declare, text)
    text = _POINTER.sub(r"emulator::Shared<\1>", text)
    arguments = []
    for index, parameter in enumerate(source.parameters):
        kind = parameter.type.strip()
        if not parameter.attribute.startswith("buffer"):
            arguments.append(f"{kind}(thread_.{parameter.attribute})")
        elif kind.endswith("&"):
            arguments.append(f"*static_cast<{kind[:-1]}*>(buffers[{index}])")
        else:
            arguments.append(f"emulator::Pointer{{buffers[{index}]}}")
    joined = ",\n    ".join(arguments)
    entry = f"""
extern "C" void emulator_entry(void* const* buffers, const emulator::Thread& thread_) {{
  {source.instance}(
    {joined});
}}
"""
    return f'#line 1 "{source.name}"\n{text}\n{entry}'
