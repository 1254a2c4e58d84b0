"""Runs the reliability scorecard and writes its counts and verdicts to docs/reliability.md.

`python tests/reliability/scorecard.py [--minutes 60] [--overload-s 120] [--only 9,20]`. A row is
one or more tests, run by pytest, which write their counts with `Findings`. The commit is written
with them. With `--only` the other rows of the page stay unchanged. A row is *stale* if the code
that it guards is another than that of its commit; `--marks` runs nothing, and only writes which
rows are. `--only stale` runs those.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.reliability.rows import FUZZED, ROWS, Row
from tests.support.commits import code_differs, commit_of, files_since, is_guarded

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
SOURCE = "src/infer"
STALE = ", stale"
"""What the page says behind the verdict of a stale row."""
FUZZ = ROOT / "tests" / "fuzz" / "recorded.json"
"""The result of the last long run of the fuzzer: `tests/fuzz/run.py --minutes 60 --record`."""


def run_row(row: Row, environment: dict[str, str]) -> dict[str, Any]:
    """Run a row's tests; returns verdict, time, counts and failures. The verdict is "skipped" where
    no test ran, as they lack something on this machine: what was not run has not passed."""
    with tempfile.TemporaryDirectory() as folder:
        findings = Path(folder) / "findings"
        started_s = time.monotonic()
        marks = "not peer and not gpu" if not row.needs else ""
        command = [sys.executable, "-m", "pytest", "-rs", "-m", marks]
        command += ["-k", row.keywords, *row.tests]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**environment, "INFER_RELIABILITY_FINDINGS": str(findings)},
            capture_output=True,
            text=True,
            encoding="utf-8",
        )
        took_s = time.monotonic() - started_s
        lines = findings.read_text(encoding="utf-8").splitlines() if findings.exists() else []
    failures = re.findall(r"^(?:FAILED|ERROR) .*$", done.stdout, re.MULTILINE)
    counted = [json.loads(line) for line in lines]
    for finding in counted:  # limits of times, which fail the row but no test
        limits = finding["counted"].get("at_most", {}).items()
        failures += [f"{name}: {is_}, over {most}" for name, (is_, most) in limits if is_ > most]
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-2000:])
    verdict = "FAIL" if done.returncode or failures else "pass"
    return {
        "verdict": "skipped" if verdict == "pass" and was_skipped(done.stdout) else verdict,
        "seconds": round(took_s),
        "date": datetime.date.today().isoformat(),
        "commit": commit_of(ROOT, PAGE),
        "findings": counted,
        "failures": failures,
        "skipped": re.findall(r"^SKIPPED .*$", done.stdout, re.MULTILINE),
    }


def was_skipped(output: str) -> bool:
    """Whether the last line of pytest's output counts no test that passed."""
    return " passed" not in output.rstrip().rpartition("\n")[2]


def written(before: str) -> dict[str, tuple[str, str]]:
    """The line in the table and the section of each row of a page, by the row's number."""
    head, *sections = re.split(r"(?m)^(?=## )", before)
    lines = {line.split("|")[1].strip(): line for line in head.splitlines() if line[:2] == "| "}
    found = {section.split()[1]: "\n" + section.rstrip() for section in sections}
    return {number: (lines[number], found[number]) for number in found if number in lines}


def cells_of(text: str) -> dict[str, list[str]]:
    """The cells of the rows of a page's table, by the row's number."""
    lines = {number: line for number, (line, _) in written(text).items()}
    return {n: [cell.strip() for cell in line.split("|")[1:-1]] for n, line in lines.items()}


def stale_rows(text: str, rows: Iterable[Row] = ROWS) -> dict[str, list[str]]:
    """Those of the rows of a page whose guarded code is another than that of their commit, with
    some of the files that differ. Of a commit that is not in this clone the page's mark counts."""
    cells = cells_of(text)
    commits = {number: row[5].removesuffix("+") for number, row in cells.items()}
    since = {commit: files_since(ROOT, commit, SOURCE) for commit in set(commits.values())}
    found = {}
    for row in (row for row in rows if row.number in cells):
        files = since[commits[row.number]]
        if files is None and cells[row.number][2].endswith(STALE):
            found[row.number] = ["its commit is not here"]
        elif changed := _changed(files or {}, row.guards):
            found[row.number] = changed
    return found


def _changed(files: dict[str, str], guards: tuple[str, ...]) -> list[str]:
    """Some of the files, with their blobs, that are guarded and compute something else now."""
    guarded = (path for path in files if is_guarded(path.removeprefix(f"{SOURCE}/"), guards))
    return list(islice((path for path in guarded if code_differs(ROOT, path, files[path])), 4))


def marked(text: str, stale: Container[str]) -> str:
    """A page whose table says of these rows, and of no others, that they are stale."""
    for number, (line, _) in written(text).items():
        cells = line.split(" | ")
        cells[2] = cells[2].removesuffix(STALE) + STALE * (number in stale)
        text = text.replace(line, " | ".join(cells), 1)
    return text


def page(kept: dict[str, Any], before: str = "") -> str:
    """The content of docs/reliability.md; `before` is the old page, whose rows are kept where there
    are no newer ones."""
    older = written(before)
    parts = [
        "# Reliability: the scorecard\n",
        "Written by `python tests/reliability/scorecard.py`; do not edit. *Nothing lost* means:"
        " each admitted request reaches one end that its client sees; no token is lost, repeated or"
        " changed; afterwards pages, files and tasks are back where they were; no other request's"
        " tokens differ from its run alone; admitted = open + finished + cancelled + failed.\n",
        f"Machine: {os.cpu_count()} cores, {platform.system()}, Python"
        f" {platform.python_version()}; clients and server share it.\n",
        "Struck out: 34, whose part about the page is `tests/page/test_hostile_texts.py` (it needs"
        " a browser), and whose part about the supply chain needs a package that is published.\n",
        "The commit is that of the tree that was measured, with a + if it had further changes. A"
        " row is *stale* if code that it guards (`tests/reliability/rows.py`) has changed since;"
        " comments are no code.\n",
        "| # | test | verdict | took | date | commit |\n|---|---|---|---|---|---|",
    ]
    rows = sorted(ROWS, key=_order)
    for row in rows:
        if row.number in kept:
            what = kept[row.number]
            cells = (row.number, row.name, what["verdict"], f"{what['seconds']} s")
            parts.append(f"| {' | '.join((*cells, what['date'], what['commit']))} |")
        elif row.number in older:
            parts.append(older[row.number][0])
    for row in rows:
        if row.number not in kept:
            parts += [older[row.number][1]] if row.number in older else []
            continue
        what = kept[row.number]
        parts.append(f"\n## {row.number} {row.name}: {what['verdict']}\n")
        if row.load:
            parts.append(f"{row.load}.\n")
        for finding in what["findings"]:
            parts.append(f"{finding['load'].capitalize()}:\n")
            parts += [f"- {name}: {_shown(value)}" for name, value in finding["counted"].items()]
            parts.append("")
        parts += [f"- `{line}`" for line in (*what["failures"], *what["skipped"])]
        only = f" (`-k {row.engines}`)" if row.engines != "one_engine" else ""
        parts.append("Tests: " + ", ".join(f"`{test}`" for test in row.tests) + only)
    return "\n".join([*parts, *_fuzzer(json.loads(FUZZ.read_text(encoding="utf-8")))]) + "\n"


def _order(row: Row) -> tuple[str, int]:
    letters = row.number.rstrip("0123456789")
    return letters, int(row.number.removeprefix(letters))


def _fuzzer(run: dict[str, Any]) -> list[str]:
    """The section about the last long run of the fuzzer."""
    files = files_since(ROOT, run["commit"].removesuffix("+"), SOURCE) or {}
    commit = run["commit"] + STALE * bool(_changed(files, FUZZED))
    parts = [
        f"\n## The fuzzer: {run['minutes']:g} minutes on {run['date']}, commit {commit}\n",
        "`python tests/fuzz/run.py --minutes 60 --record tests/fuzz/recorded.json`: real servers"
        " and the loader under input that hypothesis makes up. A 504 is the deadline that the"
        " request itself has set; it is not counted as a 5xx. What was found is mended.\n",
        *(f"- {name}: {_shown(run[name])}" for name in ("exits", "restarts", "5xx")),
        f"- slowest answer [s]: {run['slowest answer, s']}",
        f"- findings: {len(run['findings'])}\n",
        "| kind | examples | outcomes |\n|---|---|---|",
    ]
    for kind, count in run["examples"].items():
        outcomes = _shown(run["outcomes"][kind])
        parts.append(f"| {kind} | {count:,} | {outcomes} |")
    whats = dict.fromkeys(f"{each['kind']}: {each['what']:.120}" for each in run["findings"])
    return [*parts, *([""] if whats else []), *(f"- `{what}`" for what in whats)]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        between = "; " if any(isinstance(each, list) for each in value) else " / "
        return between.join(map(_shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(each)}" for name, each in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def write(found: dict[str, Any]) -> dict[str, list[str]]:
    """Write the page with these rows, and mark the stale ones, which it returns."""
    text = page(found, PAGE.read_text(encoding="utf-8") if PAGE.exists() else "")
    stale = stale_rows(text)
    PAGE.write_text(marked(text, stale), encoding="utf-8")
    return stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="of the soak")
    parser.add_argument("--overload-s", type=float, default=120)
    parser.add_argument("--only", default="", help="numbers of rows, with commas between, or stale")
    parser.add_argument("--marks", action="store_true", help="run nothing, mark what is stale")
    arguments = parser.parse_args()
    if arguments.marks or arguments.only == "stale":
        stale = write({})
        for number, files in stale.items():
            print(f"{number} is stale: {', '.join(files[:3])}{', …' * (len(files) > 3)}")
        if arguments.marks or not stale:
            return 0
        wanted = set(stale)
    else:
        wanted = set(filter(None, arguments.only.split(","))) or {row.number for row in ROWS}
    if unknown := wanted - {row.number for row in ROWS}:
        parser.error(f"no such rows: {', '.join(sorted(unknown))}")
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    environment = {
        **os.environ,
        "PYTHONPATH": source,
        "INFER_SOAK_MINUTES": str(arguments.minutes),
        "INFER_OVERLOAD_S": str(arguments.overload_s),
    }
    found: dict[str, Any] = {}
    for row in (row for row in ROWS if row.number in wanted):
        if row.needs and importlib.util.find_spec(row.needs) is None:
            print(f"{row.number} {row.name}: left out, because there is no {row.needs}")
            continue
        print(f"{row.number} {row.name} …", end=" ", flush=True)
        result = run_row(row, environment)
        print(result["verdict"], f"({result['seconds']} s)", flush=True)
        if result["verdict"] != "skipped":  # the page keeps what was measured elsewhere
            found[row.number] = result
            write(found)
    return sum(result["verdict"] != "pass" for result in found.values())


if __name__ == "__main__":
    sys.exit(main())
