"""Tests of the process of the first engine, which is started before anything else is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from infer.cli.entry import starts_engine
from infer.config import EngineConfig
from infer.engine.build import assemble
from infer.engine.build.checkpoint import Checkpoint, text_of
from infer.replicas.engine_run import EngineRun
from infer.replicas.messages import Begin, HasBegun
from infer.replicas.process_transport import ProcessTransport
from infer.replicas.spawned import EarlyProcess, Spawned
from infer.text.checkpoint_text import TextFiles

FACTORY = "tests.support.hash_engine:hash_blueprint"


def test_the_first_engine_takes_it() -> None:
    with EarlyProcess(FACTORY) as early:
        spawned = early.take()
        assert spawned is not None
        assert early.take() is None
    assert spawned.popen.poll() is None
    process = ProcessTransport(FACTORY, {}, spawned=spawned)
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


def test_serve_starts_it_before_it_imports_anything(tmp_path: Path) -> None:
    """Else torch would be imported after the server, and not beside it."""
    code = """if True:
        import subprocess, sys
        from infer.cli.entry import main

        started = []

        class Noted(subprocess.Popen):
            def __init__(self, command, *rest, **how):
                others = {"starlette", "uvicorn", "typer", "rich", "msgspec"}
                started.append((command[-1], others & sys.modules.keys()))
                from infer.replicas import launch

                # The engine shall fail without importing torch, which takes long.
                launch.FACTORY = "tests.support.faulty:misconfigured"
                super().__init__([*command[:-1], ""], *rest, **how)

        subprocess.Popen = Noted
        try:
            main(["serve", "--port", "0", "--model", sys.argv[1]])
        except SystemExit as end:
            print(end.code, started)
    """
    command = [sys.executable, "-c", code, str(tmp_path / "nothing")]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert result.stdout == "2 [('infer.engine.build.assemble', set())]\n", result


@pytest.mark.parametrize(
    ("arguments", "is_wanted"),
    [
        (["serve", "--port", "0"], True),
        (["serve", "model", "--model", "b=c"], True),
        (["serve", "--help"], False),
        (["serve", "--engine-thread"], False),
        (["serve", "--model", "a=b", "--load-on-first-use"], False),
        (["plan"], False),
        (["--version"], False),
        ([], False),
    ],
)
def test_which_commands_start_one(arguments: list[str], is_wanted: bool) -> None:
    assert starts_engine(arguments) is is_wanted


def test_a_start_reads_the_text_of_a_checkpoint_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For engine, grammars and fingerprint: of a large vocabulary each takes long."""
    read: list[str] = []

    def counted(checkpoint: Checkpoint, config: EngineConfig) -> TextFiles:
        read.append(checkpoint.name)
        return text_of(checkpoint, config)

    monkeypatch.setattr(assemble, "text_of", counted)
    blueprint = assemble.prepare(EngineConfig(kv_cache_memory_bytes=1 << 22, max_seq_len=64))
    core, _ = blueprint.build(lambda _: None)
    assert blueprint.fingerprint(core).numbers
    assert len(read) == 1
