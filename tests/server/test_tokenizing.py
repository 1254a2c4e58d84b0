"""/tokenize, /detokenize, /tokenizer_info and render: formats, agreement with chat, refusals."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from infer.server.http.fair_threads import FairThreads
from infer.text.tokenizer import Tokenizer
from infer.types.server_limits import ServerLimits
from tests.support.cases import over
from tests.support.checkpoints import (
    BOS,
    BOS_ID,
    CHAT_TEMPLATE,
    END_ID,
    EOS,
    EOS_ID,
    write_tokenizer,
)
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

TOKENIZE, DETOKENIZE, INFO = "/tokenize", "/detokenize", "/tokenizer_info"
RENDER = "/v1/chat/completions/render"
HELLO = [{"role": "user", "content": "Hello"}]
PREFILL = [*HELLO, {"role": "assistant", "content": "Sure, "}]
# A template that writes all of its variables.
TOOL_TEMPLATE = (
    "{{ bos_token }}{{ tools | tojson if tools else 'no tools' }}{{ mood }}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.reasoning_content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}({{ key }}={{ value }}){% endfor %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call(arguments: Any) -> dict[str, Any]:
    made = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [made]}


def render_body(**changes: Any) -> dict[str, Any]:
    return chat_body(**changes)


@pytest.fixture(scope="module")
def tool_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_tokenizer(tmp_path_factory.mktemp("tools"))
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE, encoding="utf-8")
    return Tokenizer.from_folder(folder)


def tokens_of(body: dict[str, Any], tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    reply = ask(make_hash_llm(tokenizer=tokenizer), TOKENIZE, body)
    assert reply.status == 200, reply.body
    assert set(reply.json()) == {"count", "max_model_len", "tokens", "token_strs"}
    assert reply.json()["count"] == len(reply.json()["tokens"])
    return reply.json()


# ---- texts


def test_a_text_in_vllms_format() -> None:
    assert tokens_of({"model": "hash-model", "prompt": "Hi é"}) == {
        "count": 6,
        "max_model_len": 512,
        "tokens": small_tokenizer().encode("Hi é"),
        "token_strs": None,
    }
    shown = tokens_of({"prompt": "Hi é", "return_token_strs": True})
    assert shown["token_strs"] == [BOS, "H", "i", "Ġ", "Ã", "©"]


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, [BOS_ID, *spelled("ab")]),
        ({"add_special_tokens": True}, [BOS_ID, *spelled("ab")]),
        ({"add_special_tokens": False}, spelled("ab")),
        ({"add_special_tokens": None, "model": None}, [BOS_ID, *spelled("ab")]),
        ({"prompt": "", "add_special_tokens": False}, []),
        ({"prompt": ""}, [BOS_ID]),
        # the request of an evaluation harness for the ids of special tokens
        ({"prompt": EOS, "add_special_tokens": False}, [EOS_ID]),
        ({"prompt": f"a{EOS}"}, [BOS_ID, *spelled("a"), EOS_ID]),
        (
            {"prompt": EOS, "add_special_tokens": False, "parse_special_tokens": False},
            spelled(EOS),
        ),
    ],
)
def test_special_tokens(changes: dict[str, Any], ids: list[int]) -> None:
    assert tokens_of({"prompt": "ab", **changes})["tokens"] == ids


def test_it_can_show_what_completions_make_of_a_text() -> None:
    text = f"a {EOS} b<|user|>é"
    ids = tokens_of({"prompt": text, "parse_special_tokens": False})["tokens"]
    usage = ask(make_hash_llm(), COMPLETIONS, completion_body(prompt=text)).json()["usage"]
    assert usage["prompt_tokens"] == len(ids)
    assert ids == small_tokenizer().encode(text)


@pytest.mark.parametrize("text", ["", "Hi é\n", "日本語 🙂", f"a{EOS}<|user|>\n", " a  b "])
def test_there_and_back(text: str) -> None:
    async def use(app: App) -> None:
        body = {"prompt": text, "add_special_tokens": False}
        ids = (await app.post(TOKENIZE, body)).json()["tokens"]
        back = await app.post(DETOKENIZE, {"model": "hash-model", "tokens": ids})
        assert (back.status, back.json()) == (200, {"prompt": text})

    with_app(make_hash_llm(), use)


def test_ids_of_the_padded_vocabulary_have_no_text() -> None:
    engine = make_hash_llm(vocab_size=300)
    ids = [BOS_ID, *spelled("a"), 299, END_ID]
    assert ask(engine, DETOKENIZE, {"tokens": ids}).json() == {"prompt": f"{BOS}a<|end|>"}


# ---- conversations


def test_messages_become_the_ids_of_a_chat() -> None:
    text, ids = small_tokenizer().apply_chat_template(HELLO)
    assert tokens_of({"messages": HELLO})["tokens"] == ids
    rendered = ask(make_hash_llm(), RENDER, render_body()).json()
    assert rendered == {"prompt": text, "token_ids": ids, "count": len(ids), "max_model_len": 512}
    usage = ask(make_hash_llm(), CHAT, chat_body()).json()["usage"]
    assert usage["prompt_tokens"] == len(ids)
    assert ids.count(BOS_ID) == 1  # the template adds one; the post-processor would add another
    assert tokens_of({"messages": HELLO, "return_token_strs": True})["token_strs"][0] == BOS


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({}, "Sure, <|end|>\n<|assistant|>\n"),
    ({"add_generation_prompt": True}, "Sure, <|end|>\n<|assistant|>\n"),
    ({"add_generation_prompt": False}, "Sure, <|end|>\n"),
    ({"continue_final_message": True}, "Sure, "),
    ({"continue_final_message": True, "add_generation_prompt": False}, "Sure, "),
    ({"continue_final_message": False, "add_generation_prompt": None}, "<|assistant|>\n"),
]


@pytest.mark.parametrize(("arguments", "end"), ARGUMENTS)
def test_where_a_prompt_ends(arguments: dict[str, Any], end: str) -> None:
    """All three endpoints give the same ids, and chat runs on those that render returns."""
    reply = ask(make_hash_llm(), RENDER, render_body(messages=PREFILL, **arguments)).json()
    assert reply["prompt"].endswith(end)
    assert tokens_of({"messages": PREFILL, **arguments})["tokens"] == reply["token_ids"]
    engine = scripted(spelled("of course"))
    requests = []
    real = engine.make_request

    def make_request(*arguments: Any, **settings: Any) -> Any:
        requests.append(real(*arguments, **settings))
        return requests[-1]

    engine.make_request = make_request
    answer = ask(engine, CHAT, chat_body(messages=PREFILL, **arguments)).json()
    assert list(requests[0].prompt_token_ids) == reply["token_ids"]
    assert answer["choices"][0]["message"]["content"] == "of cours"


def test_typed_control_tokens_stay_text() -> None:
    messages = [{"role": "user", "content": f"x{EOS}<|end|>"}]
    ids = tokens_of({"messages": messages})["tokens"]
    assert (ids.count(EOS_ID), ids.count(END_ID)) == (0, 1)


@pytest.mark.parametrize("path", [TOKENIZE, RENDER])
def test_tools_reach_the_template(tool_tokenizer: Tokenizer, path: str) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "Q"}]},
        call('{"city": "Köln", "n": [1]}'),
        {"role": "tool", "content": "20", "tool_call_id": "1"},
        {**call({"city": "Ulm"}), "content": "T", "reasoning_content": "why"},
        {"role": "tool", "content": "21", "tool_call_id": "2"},
        call(""),
    ]
    body = {
        "messages": messages,
        "tools": [WEATHER],
        "tool_choice": "auto",
        "chat_template_kwargs": {"mood": "!"},
    }
    reply = ask(make_hash_llm(tokenizer=tool_tokenizer), path, body)
    assert reply.status == 200, reply.body
    ids = reply.json()["tokens" if path == TOKENIZE else "token_ids"]
    assert tool_tokenizer.decode(ids, skip_special_tokens=False) == (
        f"{BOS}{json.dumps([WEATHER])}!<|system|>S<|user|>Q"
        "<|assistant|>weather(city=Köln)(n=[1])<|tool|>20"
        "<|assistant|>Twhyweather(city=Ulm)<|tool|>21<|assistant|>weather<|assistant|>"
    )
    without = ask(make_hash_llm(tokenizer=tool_tokenizer), path, {"messages": HELLO, "tools": []})
    ids = without.json()["tokens" if path == TOKENIZE else "token_ids"]
    assert "no tools" in tool_tokenizer.decode(ids)


def test_variables_of_the_template_in_a_chat(tool_tokenizer: Tokenizer) -> None:
    """Chat accepts the same variables as render."""
    engine = make_hash_llm(tokenizer=tool_tokenizer)
    plain = ask(engine, CHAT, chat_body()).json()["usage"]["prompt_tokens"]
    engine = make_hash_llm(tokenizer=tool_tokenizer)
    body = chat_body(chat_template_kwargs={"mood": "four"})
    assert ask(engine, CHAT, body).json()["usage"]["prompt_tokens"] == plain + 4


def test_a_prompt_longer_than_the_model_serves_is_shown() -> None:
    messages = [{"role": "user", "content": "x" * 600}]
    assert ask(make_hash_llm(), RENDER, render_body(messages=messages)).json()["count"] > 600
    assert tokens_of({"messages": messages})["count"] > 600


# ---- what the checkpoint says


def test_tokenizer_info() -> None:
    reply = with_app(make_hash_llm(), lambda app: app.get(INFO))
    assert (reply.status, reply.json()) == (
        200,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "unk_token": None,
            "pad_token": None,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def test_tokenizer_info_of_another_checkpoint(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat=False)
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": {"content": EOS}, "mask_token": "M"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    engine = make_hash_llm(tokenizer=Tokenizer.from_folder(tmp_path))
    info = with_app(engine, lambda app: app.get(INFO)).json()
    assert info["tokenizer_class"] == "Qwen2Tokenizer"
    assert (info["eos_token"], info["bos_token"], info["mask_token"]) == (EOS, None, "M")
    assert info["chat_template"] is None


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    """All chat endpoints refuse with advice; texts work."""
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path, chat=False))
    for path, body in (
        (CHAT, chat_body()),
        (CHAT, chat_body(stream=True)),
        (RENDER, render_body()),
        (RENDER, render_body(tools=[WEATHER])),
        (TOKENIZE, {"messages": HELLO}),
    ):
        reply = ask(make_hash_llm(tokenizer=tokenizer), path, body)
        check_refused(reply, 400, "messages", None, "/v1/completions")
    assert tokens_of({"prompt": "a"}, tokenizer)["tokens"] == [BOS_ID, *spelled("a")]


# ---- what is refused

Row = tuple[str, dict[str, Any], int, str | None, str | None, str]


def said(message: Any) -> dict[str, Any]:
    return {"messages": [message]}


CONVERSATION_ROWS: list[tuple[dict[str, Any], int, str | None, str | None, str]] = [
    ({"messages": []}, 400, "messages", None, "empty"),
    ({"messages": "x"}, 400, "messages", "invalid_type", "list"),
    (said({"role": "user"}), 400, "messages[0].content", "missing_required_parameter", "required"),
    (said({"role": "robot", "content": "x"}), 422, "messages[0].role", None, "'user'"),
    (said({**HELLO[0], "nme": 1}), 422, "messages[0].nme", "unknown_parameter", "'name'"),
    (said({**HELLO[0], "tool_calls": 5}), 400, "messages[0].tool_calls", None, "list of objects"),
    (said({**HELLO[0], "tool_calls": [{}]}), 400, "messages[0].tool_calls", None, "`function`"),
    (
        said({**call("{}"), "tool_calls": call("{}")["tool_calls"] * 129}),
        *(422, "messages[0].tool_calls", None, "at most 128"),
    ),
    ({"messages": HELLO * 4097}, 422, "messages", None, "4096"),
    ({"tools": {}}, 400, "tools", None, "list of objects"),
    ({"tools": ["weather"]}, 400, "tools", None, "list of objects"),
    ({"tools": [{"type": "function"}]}, 400, "tools", None, "`function`"),
    ({"tools": [{"function": {"name": 5}}]}, 400, "tools", None, "`name`"),
    ({"tools": [WEATHER] * 513}, 422, "tools", None, "at most 512"),
    ({"tool_choice": "must"}, 400, "tool_choice", None, "'required'"),
    ({"chat_template": "x"}, 400, "chat_template", "unsupported_parameter", "null"),
]
NOBODY = {"role": "user", "name": "nobody", "content": "x"}
"""A message that the tests' template refuses."""
TEMPLATE_ROWS: list[tuple[dict[str, Any], int, str | None, str | None, str]] = [
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        *(400, "continue_final_message", None, "use one of them"),
    ),
    (
        {"add_generation_prompt": 1},
        *(400, "add_generation_prompt", "invalid_type", "true or false"),
    ),
    (
        {"continue_final_message": "yes"},
        *(400, "continue_final_message", "invalid_type", "true or false"),
    ),
    ({"chat_template_kwargs": []}, 400, "chat_template_kwargs", None, "object"),
    *(
        ({"chat_template_kwargs": {name: 1}}, 400, "chat_template_kwargs", None, name)
        for name in ("self", "messages", "tools", "add_generation_prompt", "range", "_x")
    ),
    ({"messages": [NOBODY]}, 400, "messages", None, "unknown name"),
    ({"model": "gpt-4"}, 404, "model", "model_not_found", "hash-model"),
    ({"model": 5}, 400, "model", "invalid_type", "string"),
    ({"temprature": 1}, 422, "temprature", "unknown_parameter", "there is no field"),
]
ROWS: list[Row] = [
    *(
        (path, {"messages": HELLO, **row[0]}, *row[1:])
        for path in (TOKENIZE, RENDER)
        for row in CONVERSATION_ROWS
    ),
    *(
        (path, {"messages": HELLO, **row[0]}, *row[1:])
        for path in (TOKENIZE, RENDER, CHAT)
        for row in TEMPLATE_ROWS
    ),
    # render refuses what a chat refuses
    (RENDER, chat_body(temperature=3), 422, "temperature", None, "between"),
    (RENDER, chat_body(top_logprobs=2), 400, "top_logprobs", None, "logprobs: true"),
    (RENDER, chat_body(max_completion_tokens=9), 400, "max_tokens", None, "differ"),
    (RENDER, chat_body(stream_options={}), 400, "stream_options", None, "stream: true"),
    (RENDER, chat_body(prompt="x"), 422, "prompt", "unknown_parameter", "'messages'"),
    # texts
    (TOKENIZE, {}, 400, "prompt", "missing_required_parameter", "required"),
    (TOKENIZE, {"prompt": None}, 400, "prompt", "missing_required_parameter", "required"),
    (TOKENIZE, {"prompt": ["a"]}, 400, "prompt", "invalid_type", "string"),
    (TOKENIZE, {"prompt": "a", "messages": HELLO}, 422, "prompt", "unknown_parameter", "messages"),
    (TOKENIZE, {"prompt": "a", "tools": []}, 422, "tools", "unknown_parameter", "known are"),
    (
        *(TOKENIZE, {"prompt": "a", "add_special_tokens": 1}, 400),
        *("add_special_tokens", "invalid_type", "true or false"),
    ),
    (TOKENIZE, {"prompt": "a", "model": "gpt-4"}, 404, "model", "model_not_found", "hash-model"),
    (
        *(TOKENIZE, {"messages": HELLO, "add_special_tokens": True}, 400),
        *("add_special_tokens", "unsupported_parameter", "false"),
    ),
    (TOKENIZE, {"messages": HELLO, "max_tokens": 5}, 422, "max_tokens", "unknown_parameter", ""),
    (DETOKENIZE, {}, 400, "tokens", "missing_required_parameter", "required"),
    (DETOKENIZE, {"tokens": "a"}, 400, "tokens", "invalid_type", "list"),
    (DETOKENIZE, {"tokens": [1, True]}, 400, "tokens[1]", "invalid_type", "integer"),
    (DETOKENIZE, {"tokens": [1.5]}, 400, "tokens[0]", "invalid_type", "integer"),
    (DETOKENIZE, {"tokens": [-1]}, 422, "tokens", None, "vocabulary"),
    (DETOKENIZE, {"tokens": [262]}, 422, "tokens", None, "0 to 261"),
    (DETOKENIZE, {"tokens": [2**63]}, 422, "tokens", None, "vocabulary"),
    (DETOKENIZE, {"tokens": [1], "model": "gpt-4"}, 404, "model", "model_not_found", "hash-model"),
    (DETOKENIZE, {"token": [1]}, 422, "token", "unknown_parameter", "'tokens'"),
]


@over(("path", "body", "status", "param", "code", "word"), ROWS)
def test_a_body_is_refused(
    path: str, body: dict[str, Any], status: int, param: str, code: str | None, word: str
) -> None:
    engine = make_hash_llm()

    async def use(app: App) -> Reply:
        return await app.post(path, body)

    check_refused(with_app(engine, use, unknown_params="refuse"), status, param, code, word)
    assert engine.stats()["num_submitted"] == 0
    if code == "unknown_parameter":
        reply = ask(make_hash_llm(), path, body)
        ignored = reply.headers["x-ignored-params"]
        assert param is not None
        assert ignored == param.rpartition(".")[2]
        assert reply.status == 200 or reply.error()["code"] == "missing_required_parameter"


@pytest.mark.parametrize("path", [TOKENIZE, DETOKENIZE, RENDER])
def test_bodies_have_the_same_limits(path: str) -> None:
    async def use(app: App) -> None:
        big = b'{"prompt": "' + b"x" * (2 * 1024 * 1024) + b'"}'
        assert (await app.post(path, big)).status == 413
        assert (await app.post(path, b"{}", headers={"content-type": "text/plain"})).status == 415
        check_refused(await app.post(path, b"[]"), 400, None, "invalid_type", "object")
        check_refused(
            await app.post(path, b'{"prompt": "\\ud800"}'), 400, None, "invalid_json", "surrogate"
        )
        wrong = await app.get(path)
        assert (wrong.status, wrong.headers["allow"]) == (405, "POST")

    with_app(make_hash_llm(), use)


def test_long_bodies_are_worked_on_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    real = FairThreads.submit

    def submit(pool: Any, owner: str, work: Any, ended: Any) -> Any:
        name = work.func.__name__
        if name == "_advance":  # the first step, and where there is another, that too
            name = work.args[0].__name__
        if name != "json_response" and threads[-1:] != [name]:
            threads.append(name)
        return real(pool, owner, work, ended)

    monkeypatch.setattr(FairThreads, "submit", submit)
    long, short = "x" * 40_000, "x"

    def bodies(text: str) -> list[tuple[str, dict[str, Any]]]:
        return [
            (TOKENIZE, {"prompt": text}),
            (TOKENIZE, {"messages": [{"role": "user", "content": text}]}),
            (DETOKENIZE, {"tokens": [65] * len(text)}),
            (RENDER, {"messages": [{"role": "user", "content": text}]}),
        ]

    async def use(app: App) -> None:
        for path, body in bodies(short):
            assert (await app.post(path, body)).status == 200
        assert threads == []
        for path, body in bodies(long):
            assert len((await app.post(path, body)).body) > 40_000
        kinds = ["_tokenized", "_tokenized_chat", "_detokenized", "_rendered"]
        assert threads == [name for kind in kinds for name in ("parse_object", "_validated", kind)]

    with_app(make_hash_llm(), use)


def test_more_long_bodies_than_the_pool_takes() -> None:
    async def use(app: App) -> None:
        body = {"prompt": "x" * 400_000}
        replies = await asyncio.gather(*[app.post(TOKENIZE, body) for _ in range(8)])
        assert sorted(reply.status for reply in replies) == [200] * 3 + [503] * 5
        assert (await app.post(TOKENIZE, body)).status == 200  # the places were released

    with_app(make_hash_llm(), use, limits=ServerLimits(max_long_bodies=3))


def test_the_index_names_the_routes() -> None:
    text = with_app(make_hash_llm(), lambda app: app.get("/")).body.decode()
    for path in (TOKENIZE, DETOKENIZE, INFO, RENDER, CHAT, COMPLETIONS):
        assert f" {path} " in text
