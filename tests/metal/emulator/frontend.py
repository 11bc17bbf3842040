"""Check address spaces and implicit conversions, which execution on a CPU cannot, with clang's OpenCL C++ front end.

OpenCL's __global, __constant, __local and __private correspond to Metal's device, constant, threadgroup and thread,
with the same rules, except that OpenCL allows pointers without an address space and Metal does not.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import clang.cindex as clang

from tests.metal.emulator.capture import Source

__all__ = ["FrontendError", "check"]

_INCLUDE = Path(__file__).parent / "frontend_include"
_FLAGS = [
    *("-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-target", "x86_64-linux-gnu"),
    *("-Xclang", "-cl-ext=+cl_khr_fp16", "-ferror-limit=0", f"-I{_INCLUDE}", "-include", "metal_stdlib"),
    *("-Wall", "-Wextra", "-Wconversion", "-Wdouble-promotion", "-Wno-sign-conversion"),
    *("-Wno-unknown-attributes", "-Wno-unused-parameter", "-Wno-unused-variable", "-Wno-unused-function"),
    *("-Wno-pedantic-core-features", "-Wno-unknown-pragmas"),
]
_SPACES = ("__global", "__constant", "__local", "__private")
_DECLARATION = re.compile(r"(?m)^(\s*)threadgroup\s+([\w:]+)\s+(\w+)\s*\[([^\]]+)\]\s*;")
_INSTANTIATION = re.compile(r"(?m)^template \[\[host_name\(.*?\)\]\] \[\[kernel\]\]")


class FrontendError(Exception):
    """A kernel that Metal's compiler would reject or warn about."""


@cache
def check(source: Source) -> None:
    """Raise FrontendError if a kernel mixes address spaces or has an implicit narrowing conversion."""
    text = _DECLARATION.sub(r"\1threadgroup \2* const \3 = threadgroup_memory<\2, (\4)>();", source.text)
    text = _INSTANTIATION.sub("template", text)
    name = f"{source.name}.clcpp"
    unit = clang.Index.create().parse(name, args=_FLAGS, unsaved_files=[(name, text)])
    faults = [str(diagnostic) for diagnostic in unit.diagnostics if diagnostic.severity >= clang.Diagnostic.Warning]
    faults += _unqualified(unit.cursor, name)
    if faults:
        raise FrontendError("\n".join(faults))


def _unqualified(cursor: clang.Cursor, file: str) -> Iterator[str]:
    """Find pointers and references without an address space."""
    for child in cursor.get_children():
        if child.location.file is None or child.location.file.name != file:
            continue
        if child.kind in (clang.CursorKind.PARM_DECL, clang.CursorKind.VAR_DECL):
            pointee = child.type.get_pointee().spelling
            if pointee and child.type.spelling != "auto" and not any(space in pointee for space in _SPACES):
                yield f"{child.location.line}: {child.spelling} has no address space: {child.type.spelling}"
        yield from _unqualified(child, file)
