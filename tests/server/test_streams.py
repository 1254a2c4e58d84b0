"""Streams: exact events, equality with the plain answer at every split, and how load generators
read them."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import MutableMapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.schedule.sequence import Plan, Sampled
from tests.support.cases import slow_but
from tests.support.doubles import make_hash_llm, small_tokenizer
from tests.support.serving import (
    BODIES,
    CHAT,
    COMPLETIONS,
    App,
    Reply,
    ScriptRunner,
    ask,
    chat_body,
    completion_body,
    scripted,
    spelled,
    with_app,
)

WITH_USAGE = {"include_usage": True}


def content(path: str, choice: dict[str, Any]) -> str:
    return str(choice["text"] if path == COMPLETIONS else choice["delta"].get("content", ""))


def read(path: str, reply: Reply) -> tuple[dict[int, str], dict[int, str]]:
    """Text and finish reason by choice; checks that each choice ends once and nothing follows."""
    assert reply.status == 200, reply.body
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in reply.events():
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in reasons, "something after the end"
            texts[index] = texts.get(index, "") + content(path, choice)
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
    assert texts.keys() == reasons.keys()
    return texts, reasons


class OneByOne(ScriptRunner):
    """A runner that computes a token once the text of the one before it has been written."""

    def __init__(self, script: Sequence[int]) -> None:
        super().__init__(script)
        self._may_compute = threading.Semaphore(1)

    def execute(self, plan: Plan) -> list[Sampled]:
        assert self._may_compute.acquire(timeout=60)
        return super().execute(plan)

    def hear(self, written: bytes) -> None:
        if re.search(rb'"(text|content)": ?"[^"]', written):
            self._may_compute.release()


def one_by_one(script: Sequence[int], path: str, body: dict[str, Any]) -> Reply:
    """The answer to a stream, in which tokens are not merged, however late they are written."""
    runner = OneByOne(script)
    return ask(scripted(script, runner=runner), path, body, on_write=runner.hear)


def test_the_events_of_a_completion() -> None:
    body = completion_body(stream=True, max_tokens=2, stream_options=WITH_USAGE)
    reply = one_by_one(spelled("Hi"), COMPLETIONS, body)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache, no-transform"
    first, second, last = reply.events()
    head = {key: first[key] for key in ("id", "object", "created", "model")}
    assert head["object"] == "text_completion"
    assert head["id"].startswith("cmpl-")
    choice = {"index": 0, "logprobs": None, "finish_reason": None}
    assert first == {**head, "choices": [{**choice, "text": "H"}], "usage": None}
    assert second == {
        **head,
        "choices": [{**choice, "text": "i", "finish_reason": "length"}],
        "usage": None,
    }
    assert last["choices"] == []
    assert last == {**head, "choices": [], "usage": last["usage"]}
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (6, 2)


def test_the_events_of_a_chat() -> None:
    body = chat_body(stream=True, max_tokens=2, stream_options=WITH_USAGE)
    role, first, second, end, last = one_by_one(spelled("Hi"), CHAT, body).events()
    head = {key: first[key] for key in ("id", "object", "created", "model")}
    assert head["object"] == "chat.completion.chunk"
    assert head["id"].startswith("chatcmpl-")
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
    deltas: list[dict[str, str]] = [
        {"role": "assistant", "content": ""},
        {"content": "H"},
        {"content": "i"},
    ]
    for chunk, delta in zip((role, first, second), deltas, strict=True):
        assert chunk == {**head, "choices": [{**choice, "delta": delta}], "usage": None}
    choice["finish_reason"] = "length"
    assert end == {**head, "choices": [{**choice, "delta": {}}], "usage": None}
    assert last == {**head, "choices": [], "usage": last["usage"]}
    assert last["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", BODIES)
def test_no_usage_unless_asked(path: str) -> None:
    given: list[dict[str, Any]] = [{}, {"include_usage": False}]
    for options in ({}, *({"stream_options": each} for each in given)):
        reply = ask(make_hash_llm(), path, BODIES[path](stream=True, **options))
        assert all("usage" not in chunk for chunk in reply.events())


@pytest.mark.parametrize("path", BODIES)
def test_usage_in_every_chunk(path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = ask(
        scripted(spelled("Hi you"), step_s=0.02),
        path,
        BODIES[path](stream=True, stream_options=options, max_tokens=6),
    )
    num_chars = 0  # a token is a character here; late pieces are merged with those after them
    for chunk in reply.events():
        for choice in chunk["choices"]:
            num_chars += len(choice.get("text", choice.get("delta", {}).get("content")) or "")
        assert chunk["usage"]["completion_tokens"] == num_chars
    assert num_chars == 6


@pytest.mark.parametrize("path", BODIES)
def test_the_bytes(path: str) -> None:
    """One event per write: exactly `data: `, one line of ASCII, an empty line."""
    text = 'a\u2028\u0085\x1c\n\r\\"é😀\x00'
    engine = scripted(spelled(text), step_s=0.002)
    num = len(spelled(text))
    reply = ask(engine, path, BODIES[path](stream=True, max_tokens=num))
    assert reply.writes[-1] == b"data: [DONE]\n\n"
    for write in reply.writes:
        line = write.removeprefix(b"data: ").removesuffix(b"\n\n")
        assert write == b"data: " + line + b"\n\n"
        assert line.isascii()
        assert all(byte >= 0x20 for byte in line)
    assert read(path, reply)[0] == {0: text}


SAMPLE = "naïve 😀👩‍👧 日本 ab aab."


@pytest.mark.parametrize("path", slow_but(list(BODIES)[:1], BODIES))
def test_stop_strings_at_every_split(path: str) -> None:
    """Every part of a text with characters of 1 to 4 tokens is used as stop string, streamed and
    plain."""
    script = spelled(SAMPLE)
    ways: list[dict[str, Any]] = [{}, {"stream": True}]
    if path == COMPLETIONS:
        ways.append({"stream": True, "stream_format": "events"})

    async def use(app: App) -> None:
        for length in (1, 2, 3, 7):
            for start in range(0, len(SAMPLE) - length + 1):
                stop = SAMPLE[start : start + length]
                cut = SAMPLE[: SAMPLE.find(stop)]
                for keep in (False, True):
                    body = BODIES[path](
                        max_tokens=len(script),
                        stop=[stop, "zzz"],
                        include_stop_str_in_output=keep,
                    )
                    expected = cut + stop if keep else cut
                    replies = await asyncio.gather(
                        *(app.post(path, {**body, **way}) for way in ways)
                    )
                    plain = replies[0].json()["choices"][0]
                    text = plain["text"] if path == COMPLETIONS else plain["message"]["content"]
                    assert (text, plain["finish_reason"]) == (expected, "stop")
                    assert read(path, replies[1]) == ({0: expected}, {0: "stop"})
                    if path == COMPLETIONS:
                        assert read_typed(replies[2])[0] == expected

    with_app(scripted(script), use)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    script=st.lists(st.integers(0, 261), min_size=1, max_size=24),
    stop=st.lists(st.text("ab\ufffd!é", min_size=1, max_size=3), max_size=3),
    num=st.integers(1, 24),
    special=st.booleans(),
    choices=st.integers(1, 3),
)
def test_a_stream_equals_the_plain_answer(
    script: list[int], stop: list[str], num: int, special: bool, choices: int
) -> None:
    """For any bytes that a model may generate, with incomplete characters and special tokens."""
    changes = {"stop": stop, "max_tokens": num, "skip_special_tokens": special, "n": choices}

    async def use(app: App) -> None:
        for path in BODIES:
            body = BODIES[path](**changes)
            plain = (await app.post(path, body)).json()
            streamed = await app.post(path, {**body, "stream": True, "stream_options": WITH_USAGE})
            texts, reasons = read(path, streamed)
            for choice in plain["choices"]:
                text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
                assert texts[choice["index"]] == text
                assert reasons[choice["index"]] == choice["finish_reason"]
            usage = streamed.events()[-1]["usage"]
            for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert usage[count] == plain["usage"][count]
            if choices == 1:
                typed = {**body, "stream": True, "stream_format": "events"}
                text, _, done = read_typed(await app.post(path, typed))
                assert text == texts[0]
                assert done["usage"]["completion_tokens"] == usage["completion_tokens"]

    with_app(scripted(script), use)


def test_several_prompts_and_choices() -> None:
    async def use(app: App) -> None:
        body = completion_body(prompt=["one", "two"], n=3, max_tokens=12, ignore_eos=True)
        plain = (await app.post(COMPLETIONS, body)).json()["choices"]
        texts, reasons = read(COMPLETIONS, await app.post(COMPLETIONS, {**body, "stream": True}))
        assert texts == {choice["index"]: choice["text"] for choice in plain}
        assert reasons == dict.fromkeys(range(6), "length")
        chat = await app.post(CHAT, chat_body(n=2, stream=True))
        roles = [chunk["choices"][0] for chunk in chat.events() if "role" in str(chunk)]
        assert [choice["index"] for choice in roles] == [0, 1]

    with_app(make_hash_llm(step_s=0.001), use)


async def read_slowly(app: App, body: dict[str, Any]) -> Reply:
    bodies = [json.dumps(body).encode()]
    reply = Reply(200, {"content-type": "text/event-stream"})

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop()}
        return await asyncio.Future()

    async def send(message: MutableMapping[str, Any]) -> None:
        await asyncio.sleep(0.01)
        if message.get("body"):
            reply.writes.append(message["body"])

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers}
    await app.app(scope, receive, send)
    return reply


def test_a_slow_reader_gets_everything_in_fewer_pieces() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 4

    async def main(app: App) -> None:
        reply = await read_slowly(app, completion_body(max_tokens=len(text), stream=True))
        assert read(COMPLETIONS, reply) == ({0: text}, {0: "length"})
        assert len(reply.events()) < len(text) / 3

    with_app(scripted(spelled(text)), main)


def test_a_slow_reader_of_typed_events_gets_each_token_with_its_own_text() -> None:
    text = "Tokens that have gathered."

    async def main(app: App) -> None:
        body = completion_body(max_tokens=len(text), stream=True, stream_format="events")
        reply = await read_slowly(app, body)
        tokens = [json.loads(write.split(b"data: ")[1])["token"] for write in reply.writes[:-1]]
        assert tokens == list(text)

    with_app(scripted(spelled(text)), main)


# ------------------------------------------------------------------------------ typed events


def read_typed(reply: Reply) -> tuple[str, list[int], dict[str, Any]]:
    """Text, token ids and the `done` event of a stream of typed events."""
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    text, ids, done = "", [], None
    for write in reply.writes:
        assert done is None
        name, data, *rest = write.decode("ascii").split("\n")
        assert rest == ["", ""]
        value = json.loads(data.removeprefix("data: "))
        if name == "event: token":
            assert list(value) == ["token", "token_id"]
            text += value["token"]
            ids.append(value["token_id"])
        else:
            assert name == "event: done"
            assert list(value) == ["finish_reason", "usage"]
            done = value
    assert done is not None
    return text, ids, done


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("script", "changes", "text", "num", "reason"),
    [
        ([*spelled("a😀b"), 257], {}, "a😀b", 7, "eos"),
        (spelled("a😀b"), {"max_tokens": 6}, "a😀b", 6, "length"),
        (spelled("a😀b"), {"max_tokens": 3}, "a\ufffd", 3, "length"),
        (spelled("a stop"), {"stop": "op"}, "a st", 6, "stop"),
        (spelled("a stop"), {"stop_token_ids": spelled("p")}, "a sto", 6, "stop"),
    ],
)
def test_typed_events(
    path: str, script: list[int], changes: dict[str, Any], text: str, num: int, reason: str
) -> None:
    body = BODIES[path](stream=True, stream_format="events", **changes)
    for step_s in (0.0, 0.003):
        reply = ask(scripted(script, step_s=step_s), path, body)
        seen, ids, done = read_typed(reply)
        assert (seen, ids) == (text, script[:num])
        assert done["finish_reason"] == reason
        assert done["usage"]["completion_tokens"] == num


@pytest.mark.parametrize("step_s", [0.0, 0.003])
def test_the_text_of_a_token_is_what_becomes_visible_with_it(step_s: float) -> None:
    script = spelled("a😀xyz.")
    body = completion_body(stream=True, stream_format="events", stop="xyzz", max_tokens=len(script))
    reply = ask(scripted(script, step_s=step_s), COMPLETIONS, body)
    tokens = [json.loads(write.split(b"data: ")[1])["token"] for write in reply.writes[:-1]]
    assert tokens == ["a", "", "", "", "😀", "", "", "", "xyz."]


def test_the_default_format_has_a_name() -> None:
    body = completion_body(stream=True, stream_format="openai")
    assert read(COMPLETIONS, ask(make_hash_llm(), COMPLETIONS, body))[1]
    plain = ask(make_hash_llm(), COMPLETIONS, completion_body(stream_format="openai"))
    assert plain.json()["object"] == "text_completion"


# -------------------------------------------------------- how load generators read a stream


def vllm_bench(raw: list[bytes]) -> tuple[str, int, int]:
    """Read as `vllm bench serve` does: blank lines separate events, the prefix is cut by length."""
    text, usage, num_first = "", 0, 0
    buffer = ""
    for data in raw:
        buffer += data.decode("utf-8")
        while "\n\n" in buffer:
            message, buffer = buffer.split("\n\n", 1)
            message = message.strip()
            if not message or message.startswith(":"):
                continue
            chunk = message.removeprefix("data: ")
            if chunk == "[DONE]":
                continue
            value = json.loads(chunk)
            if choices := value.get("choices"):
                part = choices[0].get("text")
                if part is None:
                    part = choices[0]["delta"].get("content")
                num_first += 1
                text += part or ""
            elif found := value.get("usage"):
                usage = found["completion_tokens"]
    assert not buffer
    return text, usage, num_first


def sglang_bench(raw: list[bytes]) -> tuple[str, int]:
    """Read as `sglang.bench_serving` does: every line that is not empty is an event."""
    text, usage = "", 0
    for line in b"".join(raw).split(b"\n"):
        line = line.strip()
        if not line:
            continue
        chunk = line.decode("utf-8").removeprefix("data: ")
        if chunk == "[DONE]":
            continue
        value = json.loads(chunk)
        usage = (value.get("usage") or {}).get("completion_tokens", usage)
        if value["choices"]:
            choice = value["choices"][0]
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text, usage


VLLM = {"repetition_penalty": 1.0, "logprobs": None, "temperature": 0.0}
SGLANG = {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("path", BODIES)
def test_load_generators_understand_it(path: str) -> None:
    text = "日本 😀\u2028 a\n\nb data: c"
    num = len(spelled(text))
    extra: dict[str, Any] = {"best_of": 1} if path == COMPLETIONS else {}
    for fields in (VLLM, {**SGLANG, **extra}):
        body = BODIES[path](stream=True, stream_options=WITH_USAGE, max_tokens=num, **fields)
        if path == CHAT:
            body["max_completion_tokens"] = body.pop("max_tokens")
        writes = ask(scripted(spelled(text), step_s=0.001), path, body).writes
        assert vllm_bench(writes)[:2] == (text, num)
        assert sglang_bench(writes) == (text, num)
        torn = [bytes([byte]) for byte in b"".join(writes)]
        assert vllm_bench(torn)[:2] == (text, num)


def vllm_first_tokens(raw: list[bytes]) -> list[int]:
    """Indices of the chunks that `vllm bench serve` counts as tokens: of completions every chunk
    with choices; of chats those with text, or with empty text and no role."""
    ticks = []
    for number, data in enumerate(raw):
        value = json.loads(data[6:]) if b"[DONE]" not in data else {}
        for choice in value.get("choices", ()):
            delta = choice.get("delta")
            if (
                delta is None
                or delta.get("content")
                or ("content" in delta and "role" not in delta)
            ):
                ticks.append(number)
    return ticks


@pytest.mark.parametrize("path", BODIES)
def test_a_load_generators_clock_ticks_once_a_token(path: str) -> None:
    """Neither the opening chunk of a chat nor its end nor the usage count as tokens."""
    body = BODIES[path](stream=True, stream_options=WITH_USAGE, max_tokens=5)
    writes = one_by_one(spelled("abcde"), path, body).writes
    first = 1 if path == CHAT else 0
    assert vllm_first_tokens(writes) == list(range(first, first + 5))


def test_a_stream_that_breaks_has_no_text_that_load_generators_count() -> None:
    """The error of a stream that fails after some tokens is not counted as text."""
    body = completion_body(stream=True, max_tokens=400, ignore_eos=True, timeout=0.05)
    writes = ask(make_hash_llm(step_s=0.005), COMPLETIONS, body).writes
    assert "error" in json.loads(writes[-1].removeprefix(b"data: "))
    text, usage, _ = vllm_bench(writes)
    assert text == "".join(json.loads(w[6:])["choices"][0]["text"] for w in writes[:-1])
    assert usage == 0


def test_what_guidellm_sends() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat_body(stream=True, stream_options=options, stop=None, ignore_eos=True)
    reply = ask(scripted([*spelled("ab"), 257]), CHAT, body)
    assert read(CHAT, reply) == ({0: "ababab"}, {0: "length"})
    assert small_tokenizer().encode("ab")
