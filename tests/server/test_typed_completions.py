"""The typed completions API (`--completions-api typed`): its bodies, events, statuses, defaults."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infer.engine.client.async_llm import AsyncLLM
from infer.models.hub import SHIPPED_FOLDER as DEMO
from infer.server import serve
from infer.server.app import create_app, layers
from infer.server.loaded_models import LoadedModels
from infer.server.multi_model import ModelRouter
from infer.server.route_table import unknown_model_statuses
from infer.server.settings import ServerSettings
from tests.server.test_engine_errors import Broken
from tests.support.cases import over
from tests.support.doubles import make_hash_llm, small_tokenizer
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    App,
    Reply,
    ask,
    chat_body,
    check_refused,
    completion_body,
    scripted,
    spelled,
    with_app,
)

BODY = {"model": "hash-model", "prompt": "Hello"}
EVENTS = (
    b'event: token\ndata: {"token":"H","token_id":39}\n\n'
    b'event: token\ndata: {"token":"i","token_id":72}\n\n'
    b'event: done\ndata: {"finish_reason":"length","usage":{"prompt_tokens":6,'
    b'"completion_tokens":2,"total_tokens":8,"prompt_tokens_details":{"cached_tokens":0},'
    b'"completion_tokens_details":{"reasoning_tokens":0}}}\n\n'
)
BROKEN = b'event: error\ndata: {"error":"the engine failed while computing this request"}\n\n'


def asked(body: Any, engine: AsyncLLM | None = None) -> Reply:
    engine = engine or make_hash_llm()
    return with_app(engine, lambda app: app.post(COMPLETIONS, body), completions_api="typed")


@pytest.mark.parametrize("stream", [{}, {"stream": True}, {"stream": False}, {"stream": None}])
def test_the_answer_is_a_stream_of_typed_events_whatever_stream_says(stream: Any) -> None:
    reply = asked({**BODY, "max_tokens": 2, **stream}, scripted(spelled("Hi")))
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.body == EVENTS


def test_the_default_of_max_tokens() -> None:
    *tokens, done = asked({"prompt": "Hello"}, scripted(spelled("a"))).writes
    assert len(tokens) == 128
    assert b'"finish_reason":"length"' in done
    default = ask(scripted(spelled("a")), COMPLETIONS, {"prompt": "Hello"})
    assert default.json()["usage"]["completion_tokens"] == 16


def test_a_prompt_of_token_ids() -> None:
    text = asked({"prompt": "Hello", "max_tokens": 4, "seed": 3}).body
    ids = small_tokenizer().encode("Hello")
    assert asked({"prompt": ids, "max_tokens": 4, "seed": 3}).body == text


@over(
    ("body", "status", "param", "code", "word"),
    [
        # 422: a wrong model, too long, out of range, unknown
        ({**BODY, "model": "huge"}, 422, "model", "model_not_found", "'hash-model'"),
        (
            {**BODY, "max_tokens": 600},
            *(422, "max_tokens", "context_length_exceeded", "prompt (6) + max_tokens (600) is 606"),
        ),
        ({**BODY, "prompt": "x" * 600}, 422, "prompt", "context_length_exceeded", "601 tokens"),
        ({**BODY, "prompt": [1] * 600}, 422, "prompt", "context_length_exceeded", "600 tokens"),
        ({**BODY, "max_tokens": 0}, 422, "max_tokens", None, "between 1 and"),
        ({**BODY, "max_tokens": -3}, 422, "max_tokens", None, "between 1 and"),
        ({**BODY, "temperature": -1}, 422, "temperature", None, "temperature must be"),
        ({**BODY, "temperature": 3}, 422, "temperature", None, "temperature must be"),
        ({**BODY, "top_p": -0.1}, 422, "top_p", None, "top_p must be"),
        ({**BODY, "top_p": 1.5}, 422, "top_p", None, "top_p must be"),
        ({**BODY, "top_k": -2}, 422, "top_k", None, "top_k must be"),
        ({**BODY, "timeout": 0}, 422, "timeout", None, "above 0"),
        ({**BODY, "prompt": [999]}, 422, "prompt", None, "outside the vocabulary"),
        ({**BODY, "zzz": 1}, 422, "zzz", "unknown_parameter", "there is no field 'zzz'"),
        ({**BODY, "n": 1}, 422, "n", "unknown_parameter", "there is no field 'n'"),
        ({**BODY, "best_of": 1}, 422, "best_of", "unknown_parameter", "there is no field"),
        (
            {**BODY, "stream_format": "events"},
            422,
            "stream_format",
            "unknown_parameter",
            "no field",
        ),
        # 400: malformed, of a wrong type, empty
        (b"{", 400, None, "invalid_json", ""),
        (b"[]", 400, None, "invalid_type", "must be a JSON object"),
        ({**BODY, "max_tokens": "5"}, 400, "max_tokens", "invalid_type", "an integer"),
        ({**BODY, "max_tokens": 5.5}, 400, "max_tokens", "invalid_type", "an integer"),
        ({**BODY, "temperature": "1"}, 400, "temperature", "invalid_type", "a number"),
        ({**BODY, "stream": "yes"}, 400, "stream", "invalid_type", "true or false"),
        ({**BODY, "model": 5}, 400, "model", "invalid_type", "a string"),
        ({**BODY, "prompt": 5}, 400, "prompt", None, "a string or a list of token ids"),
        ({**BODY, "prompt": ["a", "b"]}, 400, "prompt", None, "a string or a list of token ids"),
        ({**BODY, "prompt": ""}, 400, "prompt", None, "the prompt is empty"),
        ({**BODY, "prompt": []}, 400, "prompt", None, "the prompt is empty"),
        ({"model": "hash-model"}, 400, "prompt", "missing_required_parameter", "is required"),
    ],
)
def test_what_is_refused(
    body: Any, status: int, param: str | None, code: str | None, word: str
) -> None:
    check_refused(asked(body, make_hash_llm(max_seq_len=512)), status, param, code, word)


def test_a_full_queue() -> None:
    async def use(app: App) -> None:
        body = {**BODY, "max_tokens": 40, "ignore_eos": True}
        running = asyncio.ensure_future(app.post(COMPLETIONS, body))
        await asyncio.sleep(0.05)
        refused = await app.post(COMPLETIONS, body)
        assert (refused.status, refused.error()["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await running).status == 200

    engine = make_hash_llm(max_batch_size=1, max_waiting_requests=0, step_s=0.01)
    with_app(engine, use, completions_api="typed")


def test_an_error_in_the_stream_carries_a_text() -> None:
    reply = asked(BODY, scripted([], runner=Broken(0)))
    assert reply.body == BROKEN


def test_the_default_api_keeps_its_statuses_and_its_events() -> None:
    """In OpenAI's API a wrong model is 404, too long is 400, and typed events are an option."""

    async def use(app: App) -> None:
        wrong = await app.post(COMPLETIONS, completion_body(model="huge"))
        check_refused(wrong, 404, "model", "model_not_found", "there is no such model here")
        long = await app.post(COMPLETIONS, completion_body(prompt="x" * 600))
        check_refused(long, 400, "prompt", "context_length_exceeded", "maximum context length")
        body = completion_body(stream=True, stream_format="events", max_tokens=2)
        assert (await app.post(COMPLETIONS, body)).body == EVENTS

    with_app(scripted(spelled("Hi"), max_seq_len=512), use)


def test_chat_stays_openais() -> None:
    async def use(app: App) -> None:
        assert (await app.post(CHAT, chat_body())).json()["object"] == "chat.completion"
        wrong = await app.post(CHAT, chat_body(model="huge"))
        check_refused(wrong, 404, "model", "model_not_found", "there is no such model here")
        document = (await app.get("/openapi.json")).json()
        answers = document["paths"][COMPLETIONS]["post"]["responses"]["200"]["content"]
        assert list(answers) == ["text/event-stream"]
        fields = document["components"]["schemas"]["TypedCompletionBody"]["properties"]
        assert fields["max_tokens"]["anyOf"][0]["default"] == 128
        assert {"prompt", "model", "stream", "reuse_prefix"} < fields.keys()
        assert not {"n", "echo", "logprobs", "stream_format"} & fields.keys()

    with_app(make_hash_llm(), use, completions_api="typed")


def test_several_models() -> None:
    settings = ServerSettings(completions_api="typed")

    async def main() -> None:
        make_app = partial(create_app, settings=settings, is_inner=True)
        models = ModelRouter(
            LoadedModels({"small": make_hash_llm, "big": make_hash_llm}, make_app),
            unknown_model_statuses=unknown_model_statuses(settings),
        )
        await asyncio.to_thread(models.load_all)
        app = App.__new__(App)
        app.app = models.make_app(layers(settings, (models.seen,)))
        async with app.app.router.lifespan_context(app.app):
            body = {"model": "big", "prompt": "Hello", "max_tokens": 2}
            reply = await app.post(COMPLETIONS, body)
            assert json.loads(reply.writes[-1].split(b"data: ")[1])["finish_reason"] == "length"
            wrong = await app.post(COMPLETIONS, {**body, "model": "huge"})
            check_refused(wrong, 422, "model", "model_not_found", "this server has small, big")
            number = await app.post(COMPLETIONS, {**body, "model": 5})
            check_refused(number, 400, "model", "invalid_type", "model must be a string")
            chat = await app.post(CHAT, chat_body(model="huge"))
            check_refused(chat, 404, "model", "model_not_found", "this server has small, big")

    asyncio.run(main())


def test_the_page_shows_these_events() -> None:
    page = (Path(__file__).parents[2] / "docs" / "typed.md").read_text(encoding="utf-8")
    assert f"```\n{EVENTS.decode()}```\n" in page
    assert f"```\n{BROKEN.decode()}```\n" in page


def test_the_command_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m infer.server`; without its last flag a server refuses to be reached by others."""
    page = (Path(__file__).parents[2] / "docs" / "typed.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python -m infer\.server (.*?)^```", page, re.DOTALL | re.MULTILINE)
    command = command.replace("\\\n", "").replace("PATH-OR-HUB-ID", str(DEMO))
    arguments = shlex.split(command.replace("8000", "0"))
    assert arguments[-1] == "--insecure"
    served: list[tuple[Any, ...]] = []
    monkeypatch.setattr(serve, "run", lambda *how: served.append(how))
    monkeypatch.setattr("infer.replicas.launch.launch", lambda config, **_: config)
    monkeypatch.setattr(sys, "argv", ["infer.server", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("infer.server", run_name="__main__")
    assert ended.value.code in (0, None)
    ((config, _, settings, *_),) = served
    assert (config.model, config.max_batch_size) == (str(DEMO), 8)
    assert (settings.completions_api, settings.insecure) == ("typed", True)
    monkeypatch.setattr(sys, "argv", ["infer.server", *arguments[:-1]])
    with pytest.raises(SystemExit) as refused:
        runpy.run_module("infer.server", run_name="__main__")
    assert refused.value.code not in (0, None)
    assert len(served) == 1
