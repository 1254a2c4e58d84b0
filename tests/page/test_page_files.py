"""The page's files: how they are served, and the rules that its modules and catalogues keep.

`python tests/page/test_page_files.py` writes the list of modules to preload into index.html.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from infer.server.app import create_app
from infer.server.settings import ServerSettings
from infer.server.ui.page import FOLDER, NEEDED, POLICY, Page
from tests.support.doubles import make_hash_llm
from tests.support.serving import App, Reply

OWN = sorted(
    path for path in FOLDER.rglob("*.*") if not {"vendor", "__pycache__"}.intersection(path.parts)
)
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
LANGUAGES = [FOLDER / "lang" / "zh.js"]
"""Catalogues that their readers load beside that of the first modules."""
IMPORT = re.compile(r"^(?:import|export)\b[^;(]*?\"(\.[^\"]+)\";", re.MULTILINE)
PRELOADS = re.compile(r"(?<=compares -->\n).*?(?=    <!-- end of preloads -->)", re.DOTALL)
LINES = re.compile(r"^  (\"[^\"]+\"): (\".*\"),$", re.MULTILINE)
MAX_LINES = 400
MAX_FIRST_BYTES = 100 * 1024
MAX_LIBRARY_BYTES = 35 * 1024
MAX_BYTES = 1024 * 1024
HTML = "text/html,application/xhtml+xml,*/*;q=0.8"


class PageApp(App):
    """An app with the page."""

    def __init__(self, page: Page | None, **settings: Any) -> None:
        super().__init__(make_hash_llm(), **settings)
        self.app = create_app(self.engine, ServerSettings(**settings), page=page)

    def read(self, path: str, method: str = "GET", **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return asyncio.run(self.send(method, path, headers=named))


@pytest.fixture(scope="module")
def page() -> Page:
    return Page()


def test_a_browser_gets_the_page_and_others_the_routes(page: Page) -> None:
    app = PageApp(page)
    reply = app.read("/", accept=HTML)
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "accept" in reply.headers["vary"]
    assert reply.body == (FOLDER / "index.html").read_bytes()
    for accept in ("*/*", "", "application/json", "text/html;q=0, */*", "text/htmlx"):
        assert app.read("/", accept=accept).body.startswith(b"infer serves hash-model."), accept
    assert app.read("/").body.startswith(b"infer serves hash-model.")
    assert app.read("/", "HEAD", accept=HTML).status == 200
    assert app.read("/", "POST", accept=HTML).status == 405


def test_every_answer_has_the_policy(page: Page) -> None:
    app = PageApp(page)
    for path in ("/", "/ui/main.js", "/ui/css/base.css", "/ui/vendor/core.js", "/ui/icon.svg"):
        headers = app.read(path, accept=HTML).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_files_are_compressed_and_known_by_their_tag(page: Page) -> None:
    app = PageApp(page)
    plain = app.read("/ui/vendor/core.js")
    packed = app.read("/ui/vendor/core.js", accept_encoding="br, gzip")
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert len(packed.body) < len(plain.body) / 2
    assert "content-encoding" not in app.read("/ui/main.js", accept_encoding="gzip;q=0").headers
    tag = plain.headers["etag"]
    for header in (tag, f'"x", {tag}', tag.removeprefix("W/"), "*"):
        known = app.read("/ui/vendor/core.js", if_none_match=header)
        assert (known.status, known.body, known.headers["etag"]) == (304, b"", tag)
    assert app.read("/ui/vendor/core.js", if_none_match='"other"').status == 200


@pytest.mark.parametrize(
    "path", ["/ui/", "/ui/nothing.js", "/ui/../page.py", "/ui/page.py", "/ui//etc/passwd"]
)
def test_only_the_files_of_the_page_are_served(page: Page, path: str) -> None:
    reply = PageApp(page).read(path)
    assert reply.status == 404
    assert reply.error()["code"] == "not_found"


def test_files_are_only_read(page: Page) -> None:
    reply = PageApp(page).read("/ui/main.js", "DELETE")
    assert reply.status == 405
    assert reply.headers["allow"] == "GET, HEAD"


def test_the_page_needs_no_key_and_the_api_does(page: Page, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": []}', encoding="utf-8")
    keys.chmod(0o600)
    app = PageApp(page, api_keys=str(keys))
    assert app.read("/", accept=HTML).headers["content-type"].startswith("text/html")
    assert app.read("/ui/main.js").status == 200
    assert app.read("/v1/models", accept=HTML).status == 401


def test_a_foreign_host_gets_no_page(page: Page) -> None:
    app = PageApp(page)
    for path in ("/", "/ui/main.js"):
        reply = app.read(path, accept=HTML, host="evil.example")
        assert reply.status == 403
        assert reply.error()["code"] == "host_not_allowed"
        assert app.read(path, accept=HTML, host="localhost:80").status == 200


def test_without_the_page_browsers_get_the_routes() -> None:
    app = PageApp(None)
    assert app.read("/", accept=HTML).headers["content-type"].startswith("text/plain")
    assert app.read("/ui/main.js").status == 404


def test_a_missing_file_is_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "index.html").write_text("x", encoding="utf-8")
    with caplog.at_level(logging.ERROR, "infer.server"):
        Page(tmp_path)
    assert "main.js, vendor/core.js" in caplog.text
    assert "--no-ui" in caplog.text
    caplog.clear()
    Page()
    assert not caplog.text


# ---- the rules of the files


def imported(path: Path) -> Iterator[Path]:
    """The modules that a module imports when it is loaded."""
    if "vendor" not in path.parts:
        for name in IMPORT.findall(path.read_text(encoding="utf-8")):
            yield (path.parent / name).resolve()


def needed_at_once(start: Path) -> list[str]:
    """Every module that `start` imports, also indirectly, and itself."""
    found, todo = set(), [start]
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += imported(path)
    return sorted(path.relative_to(FOLDER).as_posix() for path in found)


def preloads() -> str:
    lines = (f'    <link rel="modulepreload" href="/ui/{name}">\n' for name in first_modules())
    return "".join(lines)


def first_modules() -> list[str]:
    return needed_at_once(FOLDER / "main.js")


def test_the_first_modules_are_preloaded() -> None:
    """Otherwise each of them waits for the one that imports it."""
    found = PRELOADS.search((FOLDER / "index.html").read_text(encoding="utf-8"))
    assert found
    assert found[0] == preloads(), "run this file as a program"


def test_every_import_is_there() -> None:
    named = re.compile(r"(?:from|import)\s*\(?\"(\.[^\"]+)\"")
    for path in SCRIPTS:
        for name in named.findall(path.read_text(encoding="utf-8")):
            assert (path.parent / name).is_file(), f"{path.name} imports {name}"
    for name in re.findall(
        r'(?:href|src)="/ui/([^"]+)"', (FOLDER / "index.html").read_text(encoding="utf-8")
    ):
        assert (FOLDER / name).is_file(), name
    for name in NEEDED:
        assert (FOLDER / name).is_file(), name


def test_the_page_is_small() -> None:
    def packed(name: str) -> int:
        return len(gzip.compress((FOLDER / name).read_bytes(), 9))

    styles = re.findall(
        r'href="/ui/(css/[^"]+)"', (FOLDER / "index.html").read_text(encoding="utf-8")
    )
    first = {name: packed(name) for name in ("index.html", *styles, *first_modules())}
    other = max(packed(path.relative_to(FOLDER).as_posix()) for path in LANGUAGES)
    assert sum(first.values()) + other <= MAX_FIRST_BYTES, first
    assert first["vendor/core.js"] <= MAX_LIBRARY_BYTES
    files = (path for path in FOLDER.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


def test_no_file_of_ours_is_long() -> None:
    lengths: Mapping[str, int] = {
        path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in OWN
    }
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


# ---- the catalogues


def catalogue(code: str) -> dict[str, str]:
    files = sorted((FOLDER / "lang").glob(f"*{code}.js"))  # and those of views that come later
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return {key.strip('"'): value[1:-1] for key, value in LINES.findall(text)}


def values_of(text: str) -> set[str]:
    return set(re.findall(r"\{(\w+)\}", text))


def test_the_catalogues_have_the_same_keys_and_values() -> None:
    english, chinese = catalogue("en"), catalogue("zh")
    assert len(english) > 200
    assert english.keys() == chinese.keys()
    for key, text in english.items():
        assert text
        assert chinese[key]
        assert values_of(text) == values_of(chinese[key]), key


def test_every_text_is_in_the_catalogue_and_every_entry_is_used() -> None:
    english = catalogue("en")
    stems = {re.sub(r"\.(one|other)$", "", key) for key in english}
    source = "\n".join(
        path.read_text(encoding="utf-8") for path in SCRIPTS if path.parent.name != "lang"
    )
    literal = set(re.findall(r"\bt\(\s*\"([^\"]+)\"", source))
    assert literal <= stems, sorted(literal - stems)
    made = set(re.findall(r"`([\w.-]+\.)\$\{", source))
    for stem in stems:
        is_made = any(stem.startswith(prefix) for prefix in made)
        assert is_made or f'"{stem}"' in source, f"{stem} is never used"


def test_templates_have_no_literal_text() -> None:
    """What a reader sees comes from the catalogues; names of products and signs may stay."""
    allowed = {"infer", "…", "·", "☁", "/", "–", "()", "∅", "×"}
    for path in SCRIPTS:
        for template in templates(path.read_text(encoding="utf-8")):
            bare = re.sub(r"<!--.*?-->", "", template, flags=re.DOTALL)
            bare = re.sub(r"<[^>]*>", "\n", bare)
            words = {word for word in bare.split() if word not in allowed}
            assert not words, f"{path.name}: {words}"
            said = re.findall(r"(?:aria-label|title|placeholder|alt)=\"([^\"]*)\"", template)
            assert not said, f"{path.name}: {said}"


def test_this_file_is_a_program_that_writes_the_modules_to_preload() -> None:
    before = (FOLDER / "index.html").read_text(encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parents[2])}
    subprocess.run([sys.executable, __file__], env=environment, check=True, timeout=120)
    assert (FOLDER / "index.html").read_text(encoding="utf-8") == before


def templates(source: str) -> Iterator[str]:
    """The `html` templates of a module without what stands in `${…}`, the inner ones apart."""
    for found in re.finditer(r"html`", source):
        text, at = "", found.end()
        stack: list[str] = []
        while at < len(source):
            if not stack and source[at] == "`":
                break
            if source.startswith("${", at):
                stack.append("{")
                text += "\0" if len(stack) == 1 else ""
                at += 2
                continue
            char = source[at]
            if stack:
                if stack[-1] == "{" and char in "{`":
                    stack.append(char)
                elif (stack[-1] == "{" and char == "}") or (stack[-1] == "`" and char == "`"):
                    stack.pop()
            else:
                text += char
            at += 1
        yield text.replace("\0", "")


if __name__ == "__main__":
    start = FOLDER / "index.html"
    start.write_text(PRELOADS.sub(preloads(), start.read_text(encoding="utf-8")), encoding="utf-8")
