"""Tests of grammars and chat templates in a server: who waits for one holds nothing of others."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import InputProcessor
from infer.engine.loop import EngineThread
from infer.errors import RequestError
from infer.server.http.fair_threads import FairThreads
from infer.server.tenancy.keys import Key, KeyLimits
from infer.server.tenancy.limits import FREE_CPU_S, TOKENS_A_CPU_SECOND, Tenant
from infer.server.tenancy.local_limits import LocalLimits
from infer.text.tokenizer import Tokenizer
from infer.text.untrusted.workers import Answer, Job, UntrustedWorkers
from infer.types.grammar import Grammar
from tests.support.hash_engine import limits_of, make_hash_core, small_text_files
from tests.support.serving import CHAT, COMPLETIONS, App, chat_body, completion_body, with_app
from tests.support.stopped import go_on, stop
from tests.support.tenants import make

RENDER = f"{CHAT}/render"
LONG_PROMPT = {"model": "hash-model", "prompt": "x" * 40_000}
HOSTILE = "{% if messages[0].content == 'now' %}{{ 'a' * 10**9 * n }}{% endif %}ok"


def engine_of(source: str | None = None) -> tuple[AsyncLLM, InputProcessor]:
    """An engine whose tokenizer, and so its processes, is nobody else's; `source`: its template."""
    files = small_text_files()
    if source is not None:
        files = replace(files, templates={"default": source})
    core = make_hash_core()
    processor = InputProcessor(Tokenizer(files), limits_of(core))
    return AsyncLLM(EngineThread(core), processor, "hash-model"), processor


def templates_of(processor: InputProcessor) -> UntrustedWorkers:
    template = processor.tokenizer.chat_template
    assert template is not None
    assert template.workers is not None
    return template.workers


def test_a_grammar_that_waits_holds_no_thread() -> None:
    """Of two threads for text; all processes for grammars stand still meanwhile."""
    engine, processor = engine_of()
    workers = processor.grammars.workers

    async def use(app: App) -> None:
        engine.warm_workers()
        while workers.num_warm < workers.num_workers:
            await asyncio.sleep(0.01)
        pids = workers.pids
        for pid in pids:
            stop(pid)
        bodies = [completion_body(guided_choice=[f"x{i}"]) for i in range(6)]
        waiting = [asyncio.create_task(app.post(COMPLETIONS, body)) for body in bodies]
        while workers.num_open("") < len(bodies):
            await asyncio.sleep(0.001)
        assert (await app.post("/tokenize", LONG_PROMPT)).status == 200
        assert (await app.post(CHAT, chat_body())).status == 200
        assert not any(each.done() for each in waiting)
        for pid in pids:
            go_on(pid)
        assert [(await each).status for each in waiting] == [200] * 6

    with_app(engine, use)


def test_a_chat_that_waits_for_its_template_holds_nothing() -> None:
    engine, processor = engine_of()
    workers = templates_of(processor)

    async def use(app: App) -> None:
        assert (await app.post(CHAT, chat_body())).status == 200
        pids = list(workers.pids)
        for pid in pids:
            stop(pid)
        asked = {"messages": chat_body()["messages"]}
        paths = [(CHAT, chat_body()), (RENDER, asked), ("/tokenize", asked)]
        waiting = [asyncio.create_task(app.post(path, body)) for path, body in paths]
        while workers.num_open("") < len(paths):
            await asyncio.sleep(0.001)
        assert (await app.get("/health")).status == 200
        assert (await app.post("/tokenize", LONG_PROMPT)).status == 200
        assert (await app.post(COMPLETIONS, completion_body())).status == 200
        for pid in pids:
            go_on(pid)
        assert [(await each).status for each in waiting] == [200] * 3

    with_app(engine, use)


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "grammar"])
def test_a_process_that_gets_no_time_says_nothing_about_the_request(
    monkeypatch: pytest.MonkeyPatch, is_chat: bool
) -> None:
    """On a machine that is too busy for it; the same request is answered afterwards."""
    engine, processor = engine_of()
    workers = templates_of(processor) if is_chat else processor.grammars.workers
    path = CHAT if is_chat else COMPLETIONS
    body = chat_body() if is_chat else completion_body(guided_choice=["a"])

    async def use(app: App) -> None:
        engine.warm_workers()
        while workers.num_warm < workers.num_workers:
            await asyncio.sleep(0.01)
        with monkeypatch.context() as hurried:
            hurried.setattr(workers, "job", partial(workers.job, deadline_s=0.1))
            for pid in workers.pids:
                stop(pid)
            reply = await app.post(path, body)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert "cannot be checked at the moment" in reply.error()["message"]
        for pid in workers.pids:
            with suppress(ProcessLookupError):
                go_on(pid)
        assert (await app.post(path, body)).status == 200

    with_app(engine, use)


@pytest.mark.parametrize("path", [CHAT, RENDER, "/tokenize"])
def test_a_hostile_template_is_its_callers_error(path: str) -> None:
    engine, processor = engine_of(HOSTILE)

    async def use(app: App) -> None:
        def body(content: str) -> dict[str, Any]:
            body = {"messages": [{"role": "user", "content": content}]}
            return body | {"chat_template_kwargs": {"n": 9}}

        assert (await app.post(path, body("now"))).status == 400
        reply = await app.post(path, body("now"))
        assert reply.error()["param"] == "messages"
        assert reply.error()["message"].endswith("it takes too much memory")
        assert (await app.post(path, body("later"))).status == 200

    with_app(engine, use)
    assert templates_of(processor).pids == []  # the engine was closed


def test_what_a_small_body_makes_large_is_worked_on_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = engine_of("{% for i in range(n or 1) %}{{ 'x' * 1000 }}{% endfor %}")
    threads: list[str] = []
    submit = FairThreads.submit

    def counted(pool: Any, owner: str, work: Any, ended: Any) -> Any:
        threads.append(work.func.__name__)
        return submit(pool, owner, work, ended)

    monkeypatch.setattr(FairThreads, "submit", counted)

    async def use(app: App) -> None:
        body = {"messages": [{"role": "user", "content": "a"}]}
        long = body | {"chat_template_kwargs": {"n": 40}}
        assert (await app.post(RENDER, long)).json()["count"] == 40_000

    with_app(engine, use)
    assert threads[0] == "_advance"


# ---- what it costs


def test_cpu_time_is_charged_beyond_what_is_usual() -> None:
    key = Key(id="a", name="a", sha256="", limits=KeyLimits(tokens_per_minute=60_000))
    tenant = Tenant(key, LocalLimits(lambda: 0.0))
    tenant.charge_cpu(FREE_CPU_S)
    assert tenant.level("tokens") == 60_000
    for seconds in (1, 2, 3):
        tenant.charge_cpu(FREE_CPU_S + seconds)
    assert tenant.level("tokens") == 60_000 - 6 * TOKENS_A_CPU_SECOND
    Tenant(Key(id="b", name="b", sha256="")).charge_cpu(1e9)


def test_a_key_that_has_used_much_cpu_time_must_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new grammar takes 3 s; the second request that has one is refused, and no other key's.
    What a request that nobody waits for takes is charged as well."""
    file = tmp_path / "keys.json"
    a, b = (make(file, name, tokens_per_minute=60) for name in "ab")
    engine, processor = engine_of()
    open_jobs: list[Future[Answer]] = []

    def submit(job: Job, owner: str = "") -> Future[Answer]:
        open_jobs.append(Future())
        open_jobs[-1].set_running_or_notify_cancel()
        return open_jobs[-1]

    monkeypatch.setattr(processor.grammars.workers, "submit", submit)

    async def use(app: App) -> None:
        def ask(text: str, headers: dict[str, str]) -> asyncio.Task[Any]:
            body = completion_body(guided_regex=text, max_tokens=50)
            return asyncio.create_task(app.post(COMPLETIONS, body, headers=headers))

        async def answered(text: str, headers: dict[str, str], *, stays: bool = True) -> int:
            asked = ask(text, headers)
            while not open_jobs and not asked.done():
                await asyncio.sleep(0.001)
            if not stays:
                asked.cancel()
                await asyncio.sleep(0)
            if open_jobs:
                open_jobs.pop().set_result(Answer(b"", "cpu", 3.0))
            if stays:
                return int((await asked).status)
            await asyncio.gather(asked, return_exceptions=True)
            await asyncio.sleep(0.05)
            return 0

        assert [await answered(each, a) for each in "xy"] == [400, 429]
        assert [await answered("x", b, stays=False), await answered("y", b)] == [0, 429]

    with_app(engine, use, api_keys=str(file))


def test_the_blocking_ways_have_the_same_errors() -> None:
    _, processor = engine_of(HOSTILE)
    messages = [{"role": "user", "content": "now"}]
    with pytest.raises(RequestError, match="too much memory"):
        processor.tokenizer.apply_chat_template(messages, n=9)
    assert processor.tokenizer.apply_chat_template([{"role": "user", "content": "a"}])[0] == "ok"
    assert processor.grammars.check(Grammar.choice(["a"])) >= 0
    processor.close()
