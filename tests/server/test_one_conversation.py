"""The same conversation over three APIs: the same prompt tokens, and the same answer tokens

Conversations are made at random (turns, thoughts, calls, results, system messages, forms of a
content). The model's next token is a function of all tokens before it, so a prompt that differs in
one token has another answer. What reaches the engine is recorded.
"""

from __future__ import annotations

import json
import random
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from infer.schedule.sequence import Plan, Sampled, verified
from infer.text.tokenizer import Tokenizer
from tests.server.test_tool_loops import tokenizer_of
from tests.support.serving import CHAT, App, scripted, spelled, with_app
from tests.support.tool_conversations import OWN

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"n": {"type": "number"}, "text": {"type": "string"}}}
WORDS = ["Hello", "é ü", '"quoted"', "line\nbreak", "<b>&amp;</b>", "日本", " spaces ", "1.0", "{}"]
LETTERS = spelled("abcdefghijklmnopqrstuvwxyz ")
NUM_CONVERSATIONS = 120
SHOWS_ALL = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<{{ m.role }}>"
    "{{ m.reasoning_content or '' }}|{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}<answer>"
)
TEMPLATES = {"qwen3": OWN["qwen3"][0], "llama32": OWN["llama32"][0], "shows all": SHOWS_ALL}


class Recording:
    """A runner whose tokens depend on all tokens before them, and which notes the prompts."""

    def __init__(self) -> None:
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.answers: dict[str, list[int]] = {}

    def execute(self, plan: Plan) -> list[Sampled]:
        results = []
        for chunk in plan:
            for sequence in chunk.samplers() if chunk.samples else ():
                request = sequence.request
                self.prompts[request.request_id] = tuple(request.prompt_token_ids)
                before = ",".join(map(str, sequence.tokens)).encode()
                token = LETTERS[zlib.crc32(before) % len(LETTERS)]
                self.answers.setdefault(request.request_id, []).append(token)
                results.append(Sampled(token, None))
        return verified(plan, results)


@dataclass
class Conversation:
    """One conversation in the forms of the three APIs."""

    chat: list[Any] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)
    system: str = ""
    tools: bool = False

    def bodies(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(path, body) of each API."""
        function = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}
        system = [{"role": "system", "content": self.system}] if self.system else []
        chat: dict[str, Any] = {"messages": system + self.chat, "max_tokens": 12}
        response: dict[str, Any] = {"input": self.items, "max_output_tokens": 12, "store": False}
        message: dict[str, Any] = {"messages": self.messages, "max_tokens": 12}
        if self.system:
            response["instructions"] = message["system"] = self.system
        if self.tools:
            chat["tools"] = [{"type": "function", "function": function}]
            response["tools"] = [{"type": "function", **function}]
            named = {"name": "weather", "description": "Of a city."}
            message["tools"] = [{**named, "input_schema": SCHEMA}]
        yield CHAT, {**chat, "temperature": 0}
        yield RESPONSES, {**response, "temperature": 0}
        yield MESSAGES, {**message, "temperature": 0}


def in_a_form(dice: random.Random, text: str, kind: str) -> Any:
    return dice.choice([text, [{"type": kind, "text": text}]])


def made(seed: int) -> Conversation:
    """A conversation that all three APIs can say."""
    dice = random.Random(seed)
    found = Conversation(tools=dice.random() < 0.7)
    say = lambda: " ".join(dice.choices(WORDS, k=dice.randint(1, 6))).strip() or "x"  # noqa: E731
    found.system = say() if dice.random() < 0.5 else ""
    for turn in range(dice.randint(1, 4)):
        add_user(found, dice, say())
        if turn and dice.random() < 0.3:
            continue
        text, thought = say(), say() if dice.random() < 0.4 else ""
        calls = dice.randint(0, 2) if found.tools else 0
        given = [arguments_of(dice, say()) for _ in range(calls)]
        add_answer(found, dice, (text, thought), given, turn)
    if found.chat[-1]["role"] == "assistant":
        add_user(found, dice, say())
    return found


def arguments_of(dice: random.Random, text: str) -> dict[str, Any]:
    number: Any = dice.choice([0, -3, 2.5, 12345678901234567890, True, None])
    return {"n": number, "text": text, "more": [{"a": text}, []]}


def add_user(found: Conversation, dice: random.Random, text: str) -> None:
    found.chat.append({"role": "user", "content": in_a_form(dice, text, "text")})
    block = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    found.messages.append({"role": "user", "content": dice.choice([text, [block]])})
    found.items.append({"role": "user", "content": in_a_form(dice, text, "input_text")})


def add_answer(
    found: Conversation,
    dice: random.Random,
    said: tuple[str, str],
    given: list[dict[str, Any]],
    turn: int,
) -> None:
    """An answer with thoughts, text and calls, and the results of the calls."""
    text, thought = said
    names = [f"call_{turn}_{i}" for i in range(len(given))]
    texts = [json.dumps(each, ensure_ascii=False) for each in given]
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    blocks: list[Any] = [{"type": "text", "text": text}]
    items: list[Any] = [{"role": "assistant", "content": in_a_form(dice, text, "output_text")}]
    if thought:
        answer["reasoning_content"] = thought
        blocks.insert(0, {"type": "thinking", "thinking": thought, "signature": "s"})
        content = [{"type": "reasoning_text", "text": thought}]
        items.insert(0, {"type": "reasoning", "id": "rs", "summary": [], "content": content})
    if given:
        answer["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": "weather", "arguments": each}}
            for name, each in zip(names, texts, strict=True)
        ]
        for name, each, written in zip(names, given, texts, strict=True):
            blocks.append({"type": "tool_use", "id": name, "name": "weather", "input": each})
            call = {"type": "function_call", "call_id": name, "name": "weather"}
            items.append({**call, "arguments": written})
    found.chat.append(answer)
    found.messages.append({"role": "assistant", "content": blocks})
    found.items += items
    results = [f"result {name}" for name in names]
    used = []
    for name, result in zip(names, results, strict=True):
        found.chat.append({"role": "tool", "tool_call_id": name, "content": result})
        content = in_a_form(dice, result, "text")
        used.append({"type": "tool_result", "tool_use_id": name, "content": content})
        output = in_a_form(dice, result, "input_text")
        found.items.append({"type": "function_call_output", "call_id": name, "output": output})
    if used:
        found.messages.append({"role": "user", "content": used})


@pytest.mark.parametrize("count", [16, pytest.param(NUM_CONVERSATIONS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_same_tokens_go_in_and_come_out(name: str, count: int) -> None:
    runner = Recording()
    tokenizer = tokenizer_of(TEMPLATES[name])
    engine = scripted([], tokenizer=tokenizer, runner=runner, max_seq_len=8192, num_pages=8192)

    async def use(app: App) -> None:
        for seed in range(count):
            prompts, answers, counts = [], [], []
            for path, body in made(seed).bodies():
                stream = {"stream": True} if seed % 2 else {}
                reply = await app.post(path, {**body, **stream})
                assert reply.status == 200, (seed, reply.body)
                request_id = next(reversed(runner.prompts))
                assert reply.headers["x-request-id"] in request_id
                prompts.append(runner.prompts[request_id])
                answers.append(runner.answers[request_id])
            for path, body in made(seed).bodies():
                counts.append(await counted(app, path, body))
            assert prompts == [prompts[0]] * 3, seed
            assert answers == [answers[0]] * 3, seed
            assert counts == [len(prompts[0])] * 3, seed

    with_app(engine, use, sessions="off")


async def counted(app: App, path: str, body: dict[str, Any]) -> int:
    """The tokens of a prompt, as the API counts them."""
    body = {name: each for name, each in body.items() if "max_" not in name}
    if path == CHAT:
        return int((await app.post(f"{CHAT}/render", body)).json()["count"])
    body.pop("temperature", None)
    tail = "count_tokens" if path == MESSAGES else "input_tokens"
    return int((await app.post(f"{path}/{tail}", body)).json()["input_tokens"])


def test_the_conversations_are_of_all_kinds() -> None:
    found = [made(seed) for seed in range(NUM_CONVERSATIONS)]
    turns = [turn for each in found for turn in each.chat]
    assert {turn["role"] for turn in turns} == {"user", "assistant", "tool"}
    assert sum("reasoning_content" in turn for turn in turns) > 20
    assert sum(len(turn.get("tool_calls", ())) == 2 for turn in turns) > 20


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_counting_a_heavy_chat_leaves_the_event_loop(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long because of a schema, though the body is small, is done in a thread."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20)}}
    tool = {"name": "weather", "parameters": schema}
    bodies: dict[str, Any] = {
        CHAT: {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": tool}],
            "tool_choice": "required",
        },
        RESPONSES: {
            "input": "x",
            "tools": [{"type": "function", **tool}],
            "tool_choice": "required",
        },
        MESSAGES: {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"name": "weather", "input_schema": schema}],
            "tool_choice": {"type": "any"},
        },
    }
    threads = list[int]()
    chat_prompt = Tokenizer.chat_prompt

    def noted(*arguments: Any, **more: Any) -> Any:
        threads.append(threading.get_ident())
        prompt = yield from chat_prompt(*arguments, **more)
        threads.append(threading.get_ident())
        return prompt

    monkeypatch.setattr(Tokenizer, "chat_prompt", noted)
    tokenizer = tokenizer_of(OWN["qwen3"][0])

    async def use(app: App) -> None:
        assert await counted(app, path, bodies[path]) > 0

    with_app(scripted([], tokenizer=tokenizer, max_seq_len=4096), use)
    assert threads
    assert threading.get_ident() not in threads
