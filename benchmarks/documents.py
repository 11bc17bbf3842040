"""Fill the tables of README.md and docs/ from the files of results, or check them: `python -m benchmarks.documents`.

`<!-- measured: SUITE FILE -->` and `<!-- end -->` enclose the tables of a suite from `benchmarks/results/FILE.jsonl`
(gpu-SUITE, if not given). `<!-- picked: NAME -->` encloses a table of `picked.toml`, rows of several files. `<!--
commit: C -->` anywhere in a document says of which commit all of its tables are. `--check` changes nothing, and fails
if a table differs from what would be written, or if a file of results is of another commit.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import tomllib
from benchmarks.records import Record, load_records
from benchmarks.tables import Table, make_tables

__all__ = ["find_problems", "main"]

_ROOT = Path(__file__).resolve().parent.parent
_DOCUMENTS = ("README.md", *(f"docs/{path.name}" for path in sorted((_ROOT / "docs").glob("*.md"))))
_RESULTS = Path(__file__).with_name("results")
_BLOCK = re.compile(
    r"(<!-- (?P<kind>measured|picked): (?P<what>[\w-]+)(?: (?P<file>[\w-]+))? -->\n).*?(<!-- end -->)", re.S
)
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
        whole = f"{match[1]}\n{made}\n{match[5]}"
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
    if match["kind"] == "picked":
        blocks = tomllib.loads(Path(__file__).with_name("picked.toml").read_text(encoding="utf-8"))[match["what"]]
        return _picked(blocks, results).markdown(), [block["file"] for block in blocks]
    file = match["file"] or f"gpu-{match['what']}"
    path = results / f"{file}.jsonl"
    records = [record for record in load_records(path) if record.case.suite == match["what"]]
    return "\n".join(table.markdown() for table in make_tables(records)), [file]


def _picked(blocks: Sequence[dict[str, Any]], results: Path) -> Table:
    """Return a table of contenders, a block per case; in bold the best of a block, where the base does not count."""
    rows: list[tuple[str, ...]] = []
    for block in blocks:
        records = {
            record.contender: record
            for record in load_records(results / f"{block['file']}.jsonl")
            if record.case.title == block["title"]
        }
        lines = [[label, *_numbers(records[name])] for name, label in block["rows"].items()]
        for column in range(1, 5):
            numbers = [float(line[column]) for line in lines if line[column] and line is not lines[0]]
            for line in lines[1:] if numbers else ():
                if line[column] and float(line[column]) == min(numbers):
                    line[column] = f"**{line[column]}**"
        rows += [(block["case"] if number == 0 else "", *line) for number, line in enumerate(lines)]
    return Table("", ("case", "implementation", "ms", "ratio", "peak MiB", "minus gradients"), tuple(rows))


def _numbers(record: Record) -> tuple[str, str, str, str]:
    ratio = "1" if record.contender == record.base else f"{record.quantity('loop'):.2f}"
    milliseconds = statistics.median(record.loop or record.seconds) * 1e3
    time = f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"
    if record.peak_bytes is None:
        return time, ratio, "", ""
    beyond = max(0, record.peak_bytes - record.gradient_bytes)
    return time, ratio, f"{record.peak_bytes / _MIB:.0f}", f"{beyond / _MIB:.0f}"


if __name__ == "__main__":
    sys.exit(main())
