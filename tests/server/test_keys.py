"""The file of keys: no change is lost if several processes write, and its errors are reported."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.cli.main import app as command
from infer.errors import ConfigError
from infer.private_files import locked
from infer.server.observe.metrics import Metrics
from infer.server.observe.request_trace import RequestTraces
from infer.server.sessions.store import SessionStore
from infer.server.tenancy.keys import KeyLimits, Keys
from tests.support.command_line import CliRunner
from tests.support.doubles import make_hash_llm
from tests.support.serving import COMPLETIONS, App, Reply, completion_body, with_app


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def header(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def at_once(*calls: Callable[[], object]) -> None:
    """Run each call in a thread. A lock belongs to an open file, so threads exclude each other as
    processes do."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        start.wait()
        call()

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_twenty_who_create_and_revoke_at_once_lose_nothing(file: Path) -> None:
    made: dict[str, str] = {}
    for i in range(20):
        Keys(file, must_exist=False).create(f"old {i}", KeyLimits())

    def create(i: int) -> None:
        made[f"new {i}"] = Keys(file).create(f"new {i}", KeyLimits())

    creates = [lambda i=i: create(i) for i in range(20)]
    revokes = [lambda i=i: Keys(file).revoke(f"old {i}") for i in range(20)]
    at_once(*creates, *revokes)
    keys = Keys(file)
    assert {key.name for key in keys.all()} == set(made)
    for name, token in made.items():
        found = keys.find(token)
        assert found is not None
        assert found.name == name


def test_a_request_costs_the_same_with_many_keys(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []

    def compare(*both: Any) -> bool:
        compared.append(both)
        return both[0] == both[1]

    monkeypatch.setattr(hmac, "compare_digest", compare)
    tokens = [
        Keys(file, must_exist=False).create(f"key {i}", KeyLimits(max_concurrent=1 + i))
        for i in range(5)
    ]
    keys = Keys(file)
    assert keys.ids == {key.id for key in keys.all()}
    names = [found and found.name for found in map(keys.find, tokens)]
    assert names == [f"key {i}" for i in range(5)]
    assert keys.find("sk-another") is None
    assert not compared, "a secret is compared with one key after the other"


def test_a_lock_that_is_never_given_back_is_waited_for_so_long(file: Path) -> None:
    told = pytest.raises(TimeoutError, match=r"keeps keys\.json locked")
    with locked(file), told, locked(file, max_wait_s=0.05):
        pass
    with locked(file, max_wait_s=0.05):
        pass


def test_a_symbolic_link_stays_one(file: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "k.json"
    real.write_text('{"keys": []}', encoding="utf-8")
    file.symlink_to(real)
    token = Keys(file).create("a", KeyLimits())
    assert file.is_symlink()
    assert Keys(real).find(token) is not None
    assert real.stat().st_mode & 0o77 == 0


def test_a_file_that_others_can_read_is_warned_of(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Keys(file, must_exist=False).create("a", KeyLimits())
    with caplog.at_level(logging.WARNING):
        Keys(file)
        assert "read or written by others" not in caplog.text
        file.chmod(0o644)
        Keys(file)
    assert "read or written by others than its owner (mode 0644): chmod 600 it" in caplog.text


ENTRY = {"id": "key-1", "name": "b", "sha256": "0" * 64}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"keys": 5}',
        '{"keys": [5]}',
        *(
            json.dumps({"keys": [{**ENTRY, **wrong}]})
            for wrong in (
                {"sha256": 5},
                {"sha256": "abc"},
                {"id": 7},
                {"name": None},
                {"created": "now"},
                {"limits": 5},
                {"limits": {"max_concurrent": "x"}},
                {"more": 1},
            )
        ),
    ],
)
def test_a_bad_file_is_a_503_and_at_the_start_an_error(file: Path, content: str) -> None:
    token = Keys(file, must_exist=False).create("a", KeyLimits())

    async def use(app: App) -> None:
        assert (await app.get("/v1/models", **header(token))).status == 200
        good = file.read_text(encoding="utf-8")
        file.unlink()
        assert (await app.get("/v1/models", **header(token))).status == 503
        file.write_text(content, encoding="utf-8")
        for shown in (token, "sk-wrong"):
            reply = await app.get("/v1/models", **header(shown))
            assert reply.status == 503
            assert reply.error()["code"] == "keys_unavailable"
            assert int(reply.headers["retry-after"]) > 0
        assert (await app.get("/health")).status == 200
        file.write_text(good, encoding="utf-8")
        assert (await app.get("/v1/models", **header(token))).status == 200

    with_app(make_hash_llm(), use, api_keys=str(file))
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"keys\.json is not a file of keys"):
        Keys(file)


def test_what_a_revoked_key_runs_ends(file: Path) -> None:
    tokens = {name: Keys(file, must_exist=False).create(name, KeyLimits()) for name in "ab"}

    async def use(app: App) -> None:
        begun, leave = asyncio.Event(), asyncio.Event()

        async def ask(name: str, *, stream: bool = True) -> Reply:
            body = completion_body(stream=stream, max_tokens=4000, ignore_eos=True)
            return await app.send(
                "POST",
                COMPLETIONS,
                json.dumps(body).encode(),
                headers={**header(tokens[name]), "content-type": "application/json"},
                leave=leave,
                on_write=lambda data: begun.set(),
            )

        running = {name: asyncio.create_task(ask(name)) for name in "ab"}
        whole = asyncio.create_task(ask("a", stream=False))
        await asyncio.wait_for(begun.wait(), 10)
        await asyncio.sleep(0.1)
        Keys(file).revoke("a")
        text = b"".join((await asyncio.wait_for(running["a"], 60)).writes).decode()
        assert "the API key of this request was revoked" in text
        assert "invalid_api_key" in text
        answer = await asyncio.wait_for(whole, 60)
        assert (answer.status, answer.error()["code"]) == (401, "invalid_api_key")
        assert not running["b"].done(), "the other key's stream had to go on"
        leave.set()
        await asyncio.gather(running["b"], return_exceptions=True)

    llm = make_hash_llm(num_pages=2000, max_seq_len=8192, step_s=0.01)
    with_app(llm, use, api_keys=str(file))


def test_the_sessions_of_revoked_keys_can_be_purged(file: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    for name in "ab":
        Keys(file, must_exist=False).create(name, KeyLimits())
    ids = {key.name: key.id for key in Keys(file).all()}
    store = SessionStore(url)
    message = [{"role": "user", "content": "hi"}]
    kept = [store.create(ids["a"], "kept", message)["id"], store.create("", "anybody")["id"]]
    for _ in range(2):
        store.create(ids["b"], "gone", message)
    Keys(file).revoke("b")
    done = CliRunner().invoke(command, ["keys", "purge", "--file", str(file), "--sessions", url])
    assert done.stdout == "2 sessions deleted\n"
    assert [each["id"] for owner in (ids["a"], "") for each in store.all(owner)] == kept
    assert store.all(ids["b"]) == []
    store.close()


def test_two_servers_with_one_file_of_usage_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    both = []
    for _ in range(2):
        llm = make_hash_llm()
        both.append(Metrics(llm, RequestTraces(llm), "infer", path))
    counts: dict[str, int] = {"requests": 1, "generation_tokens": 5}
    for turn in range(20):
        for metrics in both:
            metrics.add_usage("a", **counts)
        at_once(*(metrics.save for metrics in (both if turn % 2 else both[::-1])))
    for metrics in both:
        metrics.save()
    saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert saved == {"hash-model": {"a": {"requests": 40, "generation_tokens": 200}}}


def test_names_with_markup_are_shown_as_they_are(file: Path) -> None:
    for name in ("a[/]b", "[bold]c", "[link=x]d"):
        Keys(file, must_exist=False).create(name, KeyLimits(share_cache="[red]x"))
    done = CliRunner().invoke(command, ["keys", "list", "--file", str(file)])
    assert done.exit_code == 0
    for shown in ("a[/]b", "[bold]c", "[link=x]d", "share_cache=[red]x"):
        assert shown in done.stdout.replace("\n", "")
