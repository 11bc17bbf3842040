"""Fill the tables of README.md and docs/ from the files of results, or check them: `python -m benchmarks.documents`.

`<!-- measured: SUITE FILE; QUANTITY ... -->` and `<!-- end -->` enclose tables of a suite from
`benchmarks/results/FILE.jsonl`, gpu-SUITE if it is not given, and all quantities of `benchmarks.tables` if none is.
`<!-- picked: NAME -->` encloses rows of several files, `<!-- steps: FILE -->` training steps; see `picked.toml`.
`<!-- commit: C -->` anywhere in a document says of which commit all of its tables are. `--check` changes nothing, and
fails if a table differs from what would be written, or if a file of results is of another commit.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import tomllib
from benchmarks.records import Record, load_records
from benchmarks.tables import Table, make_tables

__all__ = ["find_problems", "main"]

_ROOT = Path(__file__).resolve().parent.parent
_DOCUMENTS = ("README.md", *(f"docs/{path.name}" for path in sorted((_ROOT / "docs").glob("*.md"))))
_RESULTS = Path(__file__).with_name("results")
_OPENING = r"(<!-- (?P<kind>measured|picked|steps): (?P<what>[\w-]+)(?: (?P<file>[\w-]+))?(?P<only>;[\w ]+)? -->\n)"
_END = "<!-- end -->"
_BLOCK = re.compile(f"{_OPENING}.*?{_END}", re.DOTALL)
_COMMIT = re.compile(r"<!-- commit: ([0-9a-f]{7,40}) -->")
_MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the documents, or with `--check` print the differences; 1 if a file is of another commit, or differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.documents", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("documents", nargs="*", type=Path, default=[_ROOT / name for name in _DOCUMENTS])
    options = parser.parse_args(arguments)
    problems = [each for path in options.documents for each in find_problems(path, _RESULTS, fill=not options.check)]
    print("\n".join(problems), file=sys.stderr, end="\n" * bool(problems))
    return int(bool(problems))


def find_problems(document: Path, results: Path, *, fill: bool) -> Iterator[str]:
    """Yield what is wrong with the tables of a document, one line each; `fill` writes them anew."""
    text = document.read_text(encoding="utf-8")
    wanted = _COMMIT.search(text)

    def block(match: re.Match[str]) -> str:
        made, files = _make(match, results)
        for name in files if wanted else ():
            with (results / f"{name}.jsonl").open(encoding="utf-8") as lines:
                commit = str(json.loads(next(lines)).get("machine", {}).get("commit"))
            if not (commit.startswith(wanted[1]) or wanted[1].startswith(commit)):
                found.append(f"{document.name}: {name}.jsonl is of commit {commit}, and the tables of {wanted[1]}")
        whole = f"{match[1]}{made}{_END}"
        if not fill and whole != match[0]:
            found.append(f"{document.name}: the table {match['what']!r} differs; run python -m benchmarks.documents")
        return whole

    found: list[str] = []
    filled = _BLOCK.sub(block, text)
    if fill and filled != text:
        document.write_text(filled, encoding="utf-8")
    yield from found


def _make(match: re.Match[str], results: Path) -> tuple[str, list[str]]:
    """Return the tables of a block and the names of their files."""
    described = tomllib.loads(Path(__file__).with_name("picked.toml").read_text(encoding="utf-8"))
    if match["kind"] == "picked":
        blocks = described[match["what"]]
        return _picked(blocks, results).markdown(), [block["file"] for block in blocks]
    if match["kind"] == "steps":
        records = load_records(results / f"{match['what']}.jsonl")
        return _steps(described["steps"], records).markdown(), [match["what"]]
    file = match["file"] or f"gpu-{match['what']}"
    records = [record for record in load_records(results / f"{file}.jsonl") if record.case.suite == match["what"]]
    only = (match["only"] or ";")[1:].split()
    return "\n" + "\n".join(table.markdown() for table in make_tables(records, only)) + "\n", [file]


def _picked(blocks: Sequence[dict[str, Any]], results: Path) -> Table:
    """Return a table of contenders, a block per case. A ratio is the quotient of the milliseconds of two rows."""
    rows: list[list[str]] = []
    for block in blocks:
        records = {
            record.contender: record
            for record in load_records(results / f"{block['file']}.jsonl")
            if record.case.title == block["title"]
        }
        (base, label), *names = block["rows"].items()
        unit = records[base].seen or 1.0
        lines = []
        for name, implementation in names:
            record = records[name]
            peak, beyond = (
                (record.peak_bytes or 0) / _MIB,
                max(0, (record.peak_bytes or 0) - record.gradient_bytes) / _MIB,
            )
            seconds = record.seen or 0.0
            lines.append(["", implementation, _short(seconds), f"{seconds / unit:.2f}", f"{peak:.0f}", f"{beyond:.0f}"])
        lines[0][0] = f"{block['case']}; {label}: {_short(unit)} ms"
        _mark(lines, range(2, 6), min)
        rows += lines
    headings = ("case, tokens x width x vocabulary", "implementation", "ms", "ratio", "MiB", "beyond gradients")
    return Table("", headings, tuple(map(tuple, rows)))


def _steps(described: dict[str, Any], records: Sequence[Record]) -> Table:
    """Return a table of training steps: a row per implementation, three columns per model."""
    rows: list[list[str]] = []
    for checkpointing, what in ((True, "with gradient checkpointing"), (False, "without")):
        lines = []
        for name, implementation in described["variants"].items():
            line = [implementation if lines else f"*{what}:* {implementation}"]
            for model in described["models"]:
                cells = ["-", "-", "-"]
                for record in records:
                    if (record.case.model, record.case.checkpointing, record.contender) == (model, checkpointing, name):
                        longest = f"{'≥ ' * record.at_least}{record.longest or '-'}"
                        speed = f"{record.case.tokens / (record.seen or 1):.0f}"
                        cells = [speed, f"{(record.peak_bytes or 0) / 2**30:.1f}", longest]
                line += cells
            lines.append(line)
        for first, best in ((1, max), (2, min), (3, max)):
            _mark(lines, range(first, len(lines[0]), 3), best)
        rows += lines
    headings = [
        heading for model in described["models"].values() for heading in (f"{model}, tokens/s", "GiB", "max tokens")
    ]
    return Table("", ("", *headings), tuple(map(tuple, rows)))


def _mark(lines: Sequence[list[str]], columns: Iterable[int], best: Callable[[Iterable[float]], float]) -> None:
    """Put the best numbers of columns in bold, where all are known."""
    for column in columns:
        cells = [line[column] for line in lines]
        if all(cell.replace(".", "").isdigit() for cell in cells):
            for line in lines:
                if float(line[column]) == best(map(float, cells)):
                    line[column] = f"**{line[column]}**"


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.4g}"


if __name__ == "__main__":
    sys.exit(main())
