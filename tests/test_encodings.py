"""Text has an encoding wherever it is read or written, and the command runs in any locale."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

import pytest

from infer.models.hub import SHIPPED_FOLDER
from infer.readable_text import readable
from tests.support.cases import one_of

ROOT = Path(__file__).parents[1]
PLACES = ("src", "tests", "benchmarks", "examples", "training", "setup.py")
MODES = {"open": 1, ".open": 0, "os.fdopen": 1, "tempfile.NamedTemporaryFile": 0}
"""What opens a file, with the place of the mode among its arguments."""
OTHERS = ("os.open", "batches.open", "person.open", "reader.open", "self.open")
"""What is called so and is something else."""
MAY_BE_TEXT = re.compile(
    r"open\(|NamedTemporaryFile\(|(read|write)_text\(|text=|universal_newlines="
)
"""What a file has in it that reads or writes text; most have nothing and need not be parsed."""
RUNS = ("run", "Popen", "check_output", "check_call", "call")
ASCII = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

ALL_MODULES = """
import importlib, pkgutil, warnings
warnings.filterwarnings("error", category=EncodingWarning, module=r"infer(\\.|$)")
import infer
for found in pkgutil.walk_packages(infer.__path__, "infer."):
    if found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except ImportError:
        continue  # a library that only some machines have; the kernels, which are no module
"""

COMMANDS = """
import itertools, sys
from infer.cli.main import main
commands = itertools.groupby(sys.argv[1:], lambda each: each == ";")
for arguments in [list(each) for is_end, each in commands if not is_end]:
    code = 0
    try:
        main(arguments)
    except SystemExit as end:
        code = end.code or 0
    sys.stdout.flush()
    print("ended with", code, file=sys.stderr, flush=True)
"""
"""Runs several commands, with a ";" behind each."""


def _of_the_locale(call: ast.Call) -> bool:
    """Whether a call reads or writes text and does not name its encoding."""
    function, keywords = ast.unparse(call.func), {k.arg: k.value for k in call.keywords}
    name = function.rpartition(".")[2]
    if "encoding" in keywords or function.endswith(OTHERS):
        return False
    if name in RUNS and function != "call":  # a helper of the tests is called so
        return "text" in keywords or "universal_newlines" in keywords
    if function.endswith((".read_text", ".write_text")):
        return len(call.args) <= (name == "write_text")
    key = function if function in MODES else f".{name}" if "." in function else None
    if key not in MODES:
        return False
    mode = keywords.get("mode", (*call.args, None, None)[MODES[key]])
    return mode is None or (isinstance(mode, ast.Constant) and "b" not in str(mode.value))


def _sources() -> list[Path]:
    places = [ROOT / place for place in PLACES]
    return [file for each in places for file in ([each] if each.is_file() else each.rglob("*.py"))]


def test_text_is_read_and_written_in_an_encoding() -> None:
    calls = [
        f"{file.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)[:80]}"
        for file in _sources()
        if MAY_BE_TEXT.search(source := file.read_text(encoding="utf-8"))
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and _of_the_locale(call)
    ]
    assert not calls, "\n".join(calls)


@pytest.mark.parametrize(
    ("source", "is_bad"),
    [
        ("open('a')", True),
        ("open('a', 'rb')", False),
        ("path.open('w')", True),
        ("path.open()", True),
        ("path.open('xb')", False),
        ("(a / b).read_text()", True),
        ("(a / b).read_text('utf-8')", False),
        ("path.write_text(text)", True),
        ("os.fdopen(os.open(a, b), 'w')", True),
        ("os.fdopen(1, 'rb')", False),
        ("os.open(path, os.O_RDONLY)", False),
        ("subprocess.run(a, text=True)", True),
        ("subprocess.run(a)", False),
        ("read_text(path, 5)", False),
    ],
)
def test_the_rule_finds_what_it_is_to_find(source: str, is_bad: bool) -> None:
    [call] = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Call)][:1]
    assert _of_the_locale(call) is is_bad


def run_commands(
    interpreter: list[str],
    commands: Sequence[tuple[list[str | bytes], int]],
    environment: dict[str, str] | None = None,
) -> bytes:
    """Run commands in one process, which takes a second to start; each has its exit code. Returns
    what they write to stderr."""
    given = [each for arguments, _ in commands for each in (*arguments, ";")]
    done = subprocess.run([*interpreter, *given], env=environment, capture_output=True, timeout=280)
    codes = re.findall(rb"^ended with (\w+)$", done.stderr, re.MULTILINE)
    assert [int(code) for code in codes] == [code for _, code in commands], done.stderr
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_nothing_that_runs_uses_the_locales_encoding() -> None:
    """All modules, and four commands; the interpreter itself says where an encoding is missing."""
    commands: list[list[str | bytes]] = [
        ["doctor"],
        ["plan"],
        ["models"],
        ["generate", "Once", "--max-tokens", "2"],
    ]
    interpreter = [sys.executable, "-X", "warn_default_encoding", "-c", ALL_MODULES + COMMANDS]
    run_commands(interpreter, [(each, 0) for each in commands])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("m\udcc3\udcb6del", "mödel"),
        ("mödel", "mödel"),
        ("m\udcf6del", "m\ufffddel"),
        ("\ud83d\ude00", "😀"),
        ("a\ud83d", "a\ufffd"),
    ],
)
def test_readable_text_is_valid(text: str, found: str) -> None:
    assert readable(text) == found
    assert readable(found) == found


def _gbk(folder: Path) -> dict[str, str]:
    """The environment of a GBK locale that is made here."""
    if shutil.which("localedef") is None or not Path("/usr/share/i18n/charmaps/GBK.gz").exists():
        pytest.skip("localedef or its map of GBK is not installed: no GBK locale can be made")
    target = folder / "zh_CN.GBK"
    done = subprocess.run(["localedef", "-i", "zh_CN", "-f", "GBK", target], capture_output=True)
    if not target.exists():
        pytest.skip(f"localedef cannot make a GBK locale: {done.stderr.decode(errors='replace')}")
    return {"LOCPATH": str(folder), "LC_ALL": "zh_CN.GBK", "PYTHONUTF8": "0"}


def _model(folder: Path, name: bytes) -> bytes:
    """The path of the demo model under another name."""
    path = os.fsencode(folder) + b"/" + name
    os.mkdir(path)
    for file in SHIPPED_FOLDER.iterdir():
        os.symlink(os.fsencode(file), path + b"/" + os.fsencode(file.name))
    return path


def _served(arguments: list[bytes], locale: dict[str, str], log: Path) -> tuple[bytes, int]:
    """The first line of `infer serve` in a locale, and the exit code after SIGTERM."""
    environment = {k: v for k, v in os.environ.items() if k not in ("LANG", "PYTHONUTF8")}
    command: list[str | bytes] = [sys.executable, "-m", "infer", "serve", "--port", "0"]
    command += ["--no-standby", *arguments]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, env={**environment, **locale}, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if port := re.search(rb":(\d+) ", line):
                with urlopen(f"http://127.0.0.1:{int(port[1])}/v1/models") as answer:
                    line += answer.read()
                process.send_signal(signal.SIGTERM)
            return line, process.wait(60)
        finally:
            process.kill()


NAMES = ("mödel".encode(), b"m\xf6del")


@pytest.mark.parametrize(
    ("locale", "name"), one_of(3, [(place, name) for place in ("ASCII", "GBK") for name in NAMES])
)
def test_it_serves_in_any_locale(tmp_path: Path, locale: str, name: bytes) -> None:
    environment = ASCII if locale == "ASCII" else _gbk(tmp_path)
    log = tmp_path / "log"
    line, code = _served([_model(tmp_path, name)], environment, log)
    assert b"Traceback" not in log.read_bytes(), log.read_bytes()
    if name == b"m\xf6del":  # which the library of the weights refuses
        assert (line, code, b"rename the folder" in log.read_bytes()) == (b"", 2, True)
        return
    assert (b"infer serves" in line, code) == (True, 0), (line, log.read_bytes())
    if locale == "ASCII":
        assert '"mödel"' in line.decode()


@pytest.mark.parametrize("locale", one_of(2, ["GBK", "ASCII"]))
def test_every_text_is_printed_in_any_locale(tmp_path: Path, locale: str) -> None:
    environment = {**os.environ, **(ASCII if locale == "ASCII" else _gbk(tmp_path))}
    missing = os.fsencode(tmp_path) + "/nö→😀.gguf".encode()
    keys = os.fsencode(tmp_path) + "/schlüssel.json".encode()
    commands: list[tuple[list[str | bytes], int]] = [
        (["--help"], 0),
        (["serve", "--help"], 0),
        (["models"], 0),
        (["plan"], 0),
        (["doctor"], 0),
        (["plan", missing], 2),
        (["generate", "é→😀".encode(), "--max-tokens", "3"], 0),
        (["keys", "create", "Jürgen".encode(), "--file", keys], 0),
        (["keys", "list", "--file", keys], 0),
    ]
    said = run_commands([sys.executable, "-c", COMMANDS], commands, environment)
    assert b"Traceback" not in said, said
