"""The pages: relative links lead somewhere, and the modules and files that are named exist."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from infer.models.gguf_families import ARCHITECTURES as GGUF_ARCHITECTURES
from infer.models.quantized_config import METHODS, REFUSED
from infer.models.registry import ARCHITECTURES, Architecture
from tests.support.cases import over

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "infer"
FOLDERS = ("", "docs", "docs/howto", "docs/performance", "examples", "src/infer/demo_model")
PAGES = {
    str(page.relative_to(ROOT)): page
    for folder in FOLDERS
    for page in sorted((ROOT / folder).glob("*.md"))
}
HISTORY = ("docs/log.md", "CHANGELOG.md")
"""Pages that speak of modules as they were called at the time."""
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PICTURE = re.compile(r'\b(?:src|srcset)="([^"]+)"')
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
ROOMS = {path.stem for path in SOURCE.iterdir() if path.suffix in ("", ".py")} - {"infer"}


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(
        r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return frozenset(heading.replace(" ", "-") for heading in plain)


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links without a target."""
    broken = []
    prose = FENCE.sub("", text)
    for link in LINK.findall(prose) + PICTURE.findall(prose):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        found = target.exists() and target.is_relative_to(ROOT)
        if not found or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


@cache
def names_of(path: Path) -> frozenset[str]:
    """What a module defines or imports at its top."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {ast.unparse(target) for target in targets}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
    return frozenset(found)


def is_known(name: str) -> bool:
    """Whether `schedule.policy` or `schedule.policy.fcfs` is there."""
    at, parts = SOURCE, name.removeprefix("infer.").split(".")
    for index, part in enumerate(parts):
        if (at / part).is_dir():
            at = at / part
        elif (at / f"{part}.py").exists():
            rest = parts[index + 1 :]
            return not rest or rest[0] in names_of(at / f"{part}.py")
        else:
            init = at / "__init__.py"
            return index > 0 and init.exists() and part in names_of(init)
    return True


def unknown_names(text: str) -> list[str]:
    """Modules and files of ours that are named and not there."""
    unknown = []
    for quoted in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        word = quoted.split("(")[0].split(":")[0]
        is_module = re.fullmatch(r"(?:infer\.)?([a-z]\w*)((?:\.\w+)+)", word)
        if is_module and is_module[1] in ROOMS and not re.search(r"\.(?:py|cpp|h|md|json)$", word):
            if not is_known(word):
                unknown.append(word)
        elif re.fullmatch(r"(?:src|tests|benchmarks|docs|examples)/[\w./]+", word) and not (
            (ROOT / word).exists()
        ):
            unknown.append(word)
    return unknown


def unshown_rows(text: str) -> list[str]:
    """Rows of the tables of designs that name no test, or one that is not there."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    wrong = []
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        if cells == ["design", "here", "shown by"]:
            continue
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cells[-1])
        there = [(ROOT / path).exists() and name in names_of(ROOT / path) for path, name in tests]
        if len(cells) != 3 or not tests or not all(there):
            wrong.append(row)
    assert len(rows) > 5
    return wrong


def test_every_row_of_the_designs_is_shown_by_a_test() -> None:
    text = PAGES["docs/designs.md"].read_text(encoding="utf-8")
    assert unshown_rows(text) == []
    assert text.count("\n## ") == 5
    for broken in (
        text.replace("test_scheduler.py::test_sequential_runs", "test_scheduler.py::test_no", 1),
        text.replace("tests/schedule/test_page_allocator.py", "tests/schedule/test_no.py", 1),
        text + "| a | b | no test |\n",
    ):
        assert len(unshown_rows(broken)) == 1


def test_the_way_in_is_short() -> None:
    """README.md stays a front door, and the architecture page something that is read to its end."""
    assert len(PAGES["README.md"].read_text(encoding="utf-8").split()) <= 700
    assert PAGES["docs/architecture.md"].read_text(encoding="utf-8").count("\n") <= 250


@over("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert broken_links(PAGES[page], PAGES[page].read_text(encoding="utf-8")) == []


@over("page", [page for page in PAGES if page not in HISTORY])
def test_names_are_those_of_the_source(page: str) -> None:
    new = set(
        re.findall(
            r"^\| `([\w/.]+)` \(new\)", PAGES[page].read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert set(unknown_names(PAGES[page].read_text(encoding="utf-8"))) - new == set()


MODELS = ROOT / "docs/models.md"
FAMILIES = re.compile(r"^\| family \| architectures.*?\n\n", re.DOTALL | re.MULTILINE)


def families_table() -> str:
    """The table of families, from the registry."""
    names: dict[int, list[str]] = {}
    rows: dict[int, Architecture] = {}
    for name, row in ARCHITECTURES.items():
        names.setdefault(id(row), []).append(f"`{name}`")
        rows[id(row)] = row
    lines = ["| family | architectures in `config.json` | what is honoured |", "|---|---|---|"]
    lines += [
        f"| {row.family} | {', '.join(names[key])} | {row.notes} |" for key, row in rows.items()
    ]
    return "\n".join(lines) + "\n\n"


def test_the_table_of_families_is_that_of_the_registry() -> None:
    """`python tests/test_docs.py` writes it."""
    found = FAMILIES.search(MODELS.read_text(encoding="utf-8"))
    assert found
    assert found[0] == families_table()


WITHOUT_GGUF = re.compile(r"(?<=the families above, except ).*?(?=, of which llama.cpp has no)")
COUNTS = {
    "README.md": re.compile(r"(?<=^\| Architectures \| )\d+", re.MULTILINE),
    "docs/scope.md": re.compile(r"(?<=^\| architectures \| \[)\d+", re.MULTILINE),
}
"""Page → where it says how many architectures there are."""


AS_ANOTHER = {"MinistralForCausalLM", "Ministral3ForCausalLM", "Olmo3ForCausalLM"}
"""Families whose GGUF files bear the name of a relative."""


def families_without_gguf() -> str:
    """The families of which there is no row in `gguf_families`, text parts of others left out."""
    having = {*GGUF_ARCHITECTURES.values(), *AS_ANOTHER}
    names = [
        row.family.partition(" (")[0]
        for name, row in ARCHITECTURES.items()
        if name not in having and "text part" not in row.family
    ]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def test_what_pages_say_of_all_families_is_true() -> None:
    """`python tests/test_docs.py` writes it."""
    found = WITHOUT_GGUF.search(MODELS.read_text(encoding="utf-8"))
    assert found
    assert found[0] == families_without_gguf()
    for page, place in COUNTS.items():
        counted = place.search(PAGES[page].read_text(encoding="utf-8"))
        assert counted, page
        assert int(counted[0]) == len(ARCHITECTURES), page


QUANTISED = re.compile(r"^\| `quant_method` \| what is read.*?\n\n", re.DOTALL | re.MULTILINE)


def quantised_table() -> str:
    """The table of quantised safetensors, from the readers."""
    lines = ["| `quant_method` | what is read | held as |", "|---|---|---|"]
    lines += [f"| `{name}` | {row.formats} | {row.held} |" for name, row in METHODS.items()]
    refused: dict[str, list[str]] = {}
    for name, instead in REFUSED.items():
        refused.setdefault(instead, []).append(f"`{name}`")
    lines += [f"| {', '.join(names)} | refused | {what} |" for what, names in refused.items()]
    return "\n".join(lines) + "\n\n"


def test_the_table_of_quantised_files_is_that_of_their_readers() -> None:
    """`python tests/test_docs.py` writes it."""
    found = QUANTISED.search(MODELS.read_text(encoding="utf-8"))
    assert found
    assert found[0] == quantised_table()


PROGRAM = re.compile(r"\bpython ((?:benchmarks|examples|tests)/[\w/]+\.py)")


def programs() -> set[str]:
    """The files of the repository that pages and docstrings tell people to run."""
    files = [*PAGES.values(), ROOT / "CONTRIBUTING.md"]
    for folder in ("benchmarks", "examples", "tests"):
        files += (ROOT / folder).rglob("*.py")
    return {path for file in files for path in PROGRAM.findall(file.read_text(encoding="utf-8"))}


def lost_imports(source: str) -> list[str]:
    """What a program imports from the repository's root before that is on its path."""
    found = []
    for statement in ast.parse(source).body:
        if "sys.path" in ast.unparse(statement):
            break
        if isinstance(statement, ast.ImportFrom) and statement.module:
            found.append(statement.module)
        elif isinstance(statement, ast.Import):
            found += [alias.name for alias in statement.names]
    return [name for name in found if name.partition(".")[0] in ("tests", "benchmarks")]


def test_a_program_finds_what_it_imports() -> None:
    """A program's own folder is on its path, not the one from which it is called."""
    named = programs()
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in named}
    assert {path: lost for path in named if (lost := lost_imports(sources[path]))} == {}
    assert lost_imports("import os, tests.a\nfrom tests.b import c") == ["tests.a", "tests.b"]
    assert lost_imports("import sys\nsys.path.insert(0, '..')\nimport tests.a") == []


def test_what_is_broken_is_found() -> None:
    page = ROOT / "README.md"
    text = "[a](docs/no.md) [b](docs/gpu.md#nowhere) [c](../x) <img src='no.webp'>"
    assert broken_links(page, text.replace("'", '"')) == [
        "docs/no.md",
        "docs/gpu.md#nowhere",
        "../x",
        "no.webp",
    ]
    assert broken_links(page, "[a](docs/gpu.md) [b](https://x.y) [c](#the-three-modes)") == []
    names = "`schedule.pace` `engine.core.EngineCore` `engine.core.No` `tests/no.py` `os.path`"
    assert unknown_names(names) == ["schedule.pace", "engine.core.No", "tests/no.py"]


if __name__ == "__main__":
    page = MODELS.read_text(encoding="utf-8")
    page = FAMILIES.sub(lambda _: families_table(), page, count=1)
    page = QUANTISED.sub(lambda _: quantised_table(), page, count=1)
    page = WITHOUT_GGUF.sub(lambda _: families_without_gguf(), page, count=1)
    MODELS.write_text(page, encoding="utf-8")
    for name, place in COUNTS.items():
        text = PAGES[name].read_text(encoding="utf-8")
        PAGES[name].write_text(place.sub(str(len(ARCHITECTURES)), text), encoding="utf-8")
