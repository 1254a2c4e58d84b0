"""Tests of the process of the first engine, which is started before anything else is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from infer.engine.process.engine_run import EngineRun
from infer.engine.process.messages import Begin, HasBegun
from infer.engine.process.spawned import EarlyProcess, Spawned
from infer.engine.process.supervisor import EngineProcess

FACTORY = "tests.support.doubles:hash_blueprint"


def test_the_first_engine_takes_it() -> None:
    with EarlyProcess(FACTORY) as early:
        spawned = early.take()
        assert spawned is not None
        assert early.take() is None
    assert spawned.popen.poll() is None
    process = EngineProcess(FACTORY, {}, spawned=spawned)
    process.launch(lambda text: None)
    try:
        assert process.pid == spawned.popen.pid
    finally:
        process.stop()
    assert spawned.popen.poll() is not None


def test_nobody_takes_it() -> None:
    taken: list[Spawned] = []

    class Kept(EarlyProcess):
        def take(self) -> Spawned | None:
            if (spawned := super().take()) is not None:
                taken.append(spawned)
            return spawned

    with Kept(FACTORY):
        pass
    (spawned,) = taken
    assert spawned.popen.returncode is not None
    assert spawned.end_here.fileno() == -1


def test_it_begins_although_its_module_cannot_be_imported() -> None:
    """The error is told where all errors of a start are."""
    run = EngineRun(Begin(FACTORY, {}, 20), Spawned("no.such.module"))
    try:
        assert isinstance(next(run.events(None)), HasBegun)
    finally:
        run.kill()
        run.reap()


def test_serve_starts_it_before_it_imports_the_server(tmp_path: Path) -> None:
    """Else torch would be imported after the server, and not beside it."""
    code = """if True:
        import subprocess, sys
        from infer.cli.main import main

        started = []

        class Noted(subprocess.Popen):
            def __init__(self, command, *rest, **how):
                started.append((command[-1], {"starlette", "uvicorn"} & sys.modules.keys()))
                super().__init__(command, *rest, **how)

        subprocess.Popen = Noted
        try:
            main(["serve", "--port", "0", "--model", sys.argv[1]])
        except SystemExit as end:
            print(end.code, started)
    """
    command = [sys.executable, "-c", code, str(tmp_path / "nothing")]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert result.stdout == "2 [('infer.engine.build.assemble', set())]\n", result


def test_an_engine_process_imports_no_text_side() -> None:
    """Its start would wait for it: templates, tool calls, façades."""
    code = (
        "import sys, infer.engine.process.child, infer.engine.build.assemble;"
        "names = {'jinja2', 'infer.text.tokenizer', 'infer.engine.client.async_llm', 'starlette'};"
        "assert not names & sys.modules.keys(), names & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
