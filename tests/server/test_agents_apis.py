"""`/v1/messages` and `/v1/responses`: the same conversation is the same prompt and the same answer
as over chats; streams are the whole answers; whatever was answered can be sent back"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infer.errors import RequestError
from infer.server.anthropic.messages_body import BILLING, CountTokensBody, MessagesBody
from infer.server.openai.chat import ChatBody, plain_messages
from infer.server.openai.responses import InputTokensBody, ResponseBody
from infer.server.openai.schema_base import read
from infer.text.grammars.compiler import Compiler, Vocabulary
from infer.text.tools.call import ToolCall
from infer.text.tools.formats import format_named
from infer.types import Request
from tests.server.test_tool_loops import CITY, MISTRAL, saying, script_of, tokenizer_of
from tests.support.checkpoints import END_ID
from tests.support.doubles import core_of, make_hash_llm
from tests.support.serving import CHAT, App, Reply, ask, spelled, with_app
from tests.support.tool_conversations import OWN

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
QWEN = OWN["qwen3"][0]
ASK = "What's the weather?"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
ANSWERS = {
    "text": "It is sunny.",
    "thoughts": "<think>\nLet me see.\n</think>\n\nIt is sunny.",
    "a call": CALL,
    "text and a call": f"I will look.\n{CALL}",
    "thoughts and two calls": f"<think>\nHm.\n</think>\n\n{CALL}\n{CALL}",
    "text behind a call": f"I will look.\n{CALL}\nThat was it.",
    "thoughts behind a call": f"<think>\nHm.\n{CALL}\nWhat else?\n</think>\n\nThat was it.",
    "nothing": "",
}
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
TOOLS: dict[str, list[dict[str, Any]]] = {
    MESSAGES: [{"name": "weather", "input_schema": CITY}],
    RESPONSES: [{"type": "function", "name": "weather", "parameters": CITY, "strict": False}],
}


def events_of(reply: Reply) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event of a stream."""
    found = []
    for text in reply.body.decode("ascii").split("\n\n")[:-1]:
        if text.startswith(":"):
            continue  # a comment
        name, data = text.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert fields["type"] == name.removeprefix("event: ")
        found.append((fields["type"], fields))
    return found


def message_of(events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The message that the events of a stream add up to, as Anthropic's clients do it."""
    message: dict[str, Any] = {}
    texts: list[str] = []
    for name, fields in events:
        if name == "message_start":
            message = fields["message"]
        elif name == "content_block_start":
            assert fields["index"] == len(message["content"])
            message["content"].append(fields["content_block"])
            texts = []
        elif name == "content_block_delta":
            kind = fields["delta"].pop("type")
            ((member, text),) = fields["delta"].items()
            assert fields["index"] == len(message["content"]) - 1
            if kind == "input_json_delta":
                texts.append(text)
            else:
                message["content"][-1][member] += text
        elif name == "content_block_stop" and "input" in message["content"][-1]:
            with contextlib.suppress(ValueError):  # one that was cut has no arguments
                message["content"][-1]["input"] = json.loads("".join(texts) or "{}")
        elif name == "message_delta":
            message |= fields["delta"] | {"usage": fields["usage"]}
    assert events[-1][0] == "message_stop"
    return message


def response_of(events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The response of the last event, which the events before it must add up to."""
    assert [fields["sequence_number"] for _, fields in events] == [*range(len(events))]
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    for name, fields in events:
        if name == "response.output_item.added":
            assert fields["output_index"] == len(items)
        elif name.endswith(".delta"):
            index = fields["output_index"]
            texts[index] = texts.get(index, "") + fields["delta"]
        elif name == "response.output_item.done":
            item = fields["item"]
            content = item["content"][0]["text"] if "content" in item else ""
            said = item.get("arguments") or item.get("input") or content
            assert said in (texts.get(len(items), ""), "{}")
            items.append(item)
    last, fields = events[-1]
    assert last in ("response.completed", "response.incomplete")
    assert fields["response"]["output"] == items
    return dict(fields["response"])


def body_for(path: str, **more: Any) -> dict[str, Any]:
    """A question with a tool, in an API's form."""
    if path == MESSAGES:
        asked = {"messages": [{"role": "user", "content": ASK}]}
    else:
        asked = {"input": [{"type": "message", "role": "user", "content": ASK}]}
    return {**asked, "tools": TOOLS[path], **more}


def without_ids(value: Any) -> Any:
    """What two answers must have in common."""
    if isinstance(value, list):
        return [*map(without_ids, value)]
    if isinstance(value, dict):
        left_out = ("id", "call_id", "created_at", "usage")
        return {name: without_ids(each) for name, each in value.items() if name not in left_out}
    return value


READ: dict[str, Callable[[list[tuple[str, dict[str, Any]]]], dict[str, Any]]] = {
    MESSAGES: message_of,
    RESPONSES: response_of,
}


@pytest.mark.parametrize("path", READ)
def test_a_stream_is_the_whole_answer(path: str) -> None:
    tokenizer = tokenizer_of(QWEN)
    engine = saying([], tokenizer)
    runner: Any = core_of(engine).runner

    async def use(app: App) -> None:
        for name, text in ANSWERS.items():
            runner.script = script_of(tokenizer, text)
            whole = (await app.post(path, body_for(path))).json()
            streamed = READ[path](events_of(await app.post(path, body_for(path, stream=True))))
            assert without_ids(streamed) == without_ids(whole), name
            chat = {"messages": [{"role": "user", "content": ASK}], "tools": CHAT_TOOLS}
            [choice] = (await app.post(CHAT, chat)).json()["choices"]
            said = choice["message"]
            called = [call["function"]["arguments"] for call in said.get("tool_calls", [])]
            assert spoken(path, whole) == (
                said.get("reasoning_content", ""),
                said["content"] or "",
                [*map(json.loads, called)],
            )

    with_app(engine, use)


def spoken(path: str, answer: dict[str, Any]) -> tuple[str, str, list[Any]]:
    """(thoughts, text, arguments of the calls) of an answer"""
    if path == MESSAGES:
        blocks = answer["content"]
        return (
            "\n\n".join(block["thinking"] for block in blocks if "thinking" in block),
            "\n\n".join(block["text"] for block in blocks if "text" in block),
            [block["input"] for block in blocks if block["type"] == "tool_use"],
        )
    texts: dict[str, list[str]] = {"reasoning": [], "message": []}
    for item in answer["output"]:
        if "content" in item:
            texts[item["type"]].append(item["content"][0]["text"])
    calls = [json.loads(item["arguments"]) for item in answer["output"] if "arguments" in item]
    return ("\n\n".join(texts["reasoning"]), "\n\n".join(texts["message"]), calls)


def conversations() -> Iterator[tuple[str, list[Any], dict[str, Any], dict[str, Any]]]:
    """The same conversation as a chat's messages, a message's body and a response's."""
    function = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in (1, 2)]
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": ASK}
    yield "one", [system, user], {"system": "Be brief.", "messages": [user]}, {
        "instructions": "Be brief.",
        "input": ASK,
    }  # fmt: skip
    chat = [
        user,
        {"role": "assistant", "content": "Look:", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
    ]
    used = [
        {"type": "tool_use", "id": f"c{i}", "name": "weather", "input": {"city": "Ulm"}}
        for i in (1, 2)
    ]
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "sun"},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "rain"}]},
    ]
    said = [thought, {"type": "text", "text": "Look:"}, *used]
    messages = [user, {"role": "assistant", "content": said}, {"role": "user", "content": results}]
    called = [{"type": "function_call", "call_id": f"c{i}", **function} for i in (1, 2)]
    got = [
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "rain"}],
        },
    ]
    part = {"type": "output_text", "text": "Look:", "annotations": []}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": ASK}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": None,
        },
        {"type": "message", "id": "m", "role": "assistant", "content": [part]},
        *called,
        *got,
    ]
    yield "calls", chat, {"messages": messages}, {"input": items}


CONVERSATIONS = list(conversations())


@pytest.mark.parametrize("row", CONVERSATIONS, ids=lambda row: row[0])
def test_the_same_conversation_is_the_same_chat(row: Any) -> None:
    _, chat, message, response = row
    wanted = read(ChatBody, {"messages": chat, "tools": CHAT_TOOLS}, [])
    by_message = read(MessagesBody, {**message, "tools": TOOLS[MESSAGES], "max_tokens": 9}, [])
    by_response = read(ResponseBody, {**response, "tools": TOOLS[RESPONSES]}, [])
    for found in (by_message.chat, by_response.chat):
        assert plain_messages(found) == plain_messages(wanted)
        assert found.template_arguments == wanted.template_arguments


@pytest.mark.parametrize("path", READ)
def test_an_answer_cut_anywhere_is_taken_back(path: str) -> None:
    tokenizer = tokenizer_of(QWEN)
    engine = saying([], tokenizer)
    runner: Any = core_of(engine).runner
    limit = "max_tokens" if path == MESSAGES else "max_output_tokens"

    async def use(app: App) -> None:
        text = ANSWERS["thoughts and two calls"]
        runner.script = script_of(tokenizer, text)

        async def take_back(cut: int) -> None:
            answer = (await app.post(path, body_for(path, **{limit: cut}))).json()
            body = body_for(path, **{limit: 1})
            if path == MESSAGES:
                used = [block for block in answer["content"] if block["type"] == "tool_use"]
                results = [
                    {"type": "tool_result", "tool_use_id": block["id"], "content": "sun"}
                    for block in used
                ]
                body["messages"] += [
                    {"role": "assistant", "content": answer["content"]},
                    {"role": "user", "content": results or "Go on."},
                ]
            else:
                body["input"] += answer["output"]
                body["input"] += [
                    {"type": "function_call_output", "call_id": item["call_id"], "output": "sun"}
                    for item in answer["output"]
                    if item["type"] == "function_call"
                ]
                body["input"].append({"role": "user", "content": "Go on."})
            again = await app.post(path, body)
            assert again.status == 200, (cut, answer, again.body)

        await asyncio.gather(*map(take_back, range(1, len(text) + 2, 5)))

    with_app(engine, use)


IN_MARKUP = '[TOOL_CALLS]weather[ARGS]{"city": "Ulm"}'


@pytest.mark.parametrize(
    ("path", "template", "text"),
    [
        (RESPONSES, QWEN, CALL),
        (MESSAGES, MISTRAL, IN_MARKUP),
        pytest.param(RESPONSES, MISTRAL, IN_MARKUP, marks=pytest.mark.slow),
        pytest.param(MESSAGES, QWEN, CALL, marks=pytest.mark.slow),
    ],
)
def test_a_forced_call_cut_anywhere_is_that_of_a_chat(path: str, template: str, text: str) -> None:
    """The script obeys no grammar, so the text is what a grammar gives. A call whose beginning
    is there is a call, with the arguments so far."""
    tokenizer = tokenizer_of(template)
    limit = "max_tokens" if path == MESSAGES else "max_output_tokens"
    forced: Any = {"type": "any"} if path == MESSAGES else "required"
    seen = set[str]()

    async def use(app: App) -> None:
        for size in range(text.index("}") % 2, text.index("}") + 1, 2):
            more = {"tools": CHAT_TOOLS, "tool_choice": "required", "max_tokens": size}
            chat = {"messages": [{"role": "user", "content": ASK}], **more}
            [choice] = (await app.post(CHAT, chat)).json()["choices"]
            [call] = choice["message"]["tool_calls"]
            assert choice["message"]["content"] is None
            body = body_for(path, tool_choice=forced, **{limit: size})
            whole = (await app.post(path, body)).json()
            events = events_of(await app.post(path, {**body, "stream": True}))
            assert called(path, whole, events) == call["function"]
            seen.add(call["function"]["arguments"])

    with_app(saying(spelled(text), tokenizer), use)
    assert {"", '{"ci', '{"city": "Ulm"'} <= seen


def called(
    path: str, whole: dict[str, Any], events: list[tuple[str, dict[str, Any]]]
) -> dict[str, str]:
    """Name and arguments of the only call, after a check that it is all of the answer, and that it
    is known to be cut."""
    if path == RESPONSES:
        [item] = whole["output"]
        assert without_ids(response_of(events)["output"]) == without_ids([item])
        assert (whole["status"], item["status"]) == ("incomplete", "incomplete")
        pieces = [fields["delta"] for name, fields in events if name.endswith("arguments.delta")]
        assert item["arguments"] == ("".join(pieces) or "{}")
        return {"name": item["name"], "arguments": "".join(pieces)}
    [block] = whole["content"]
    [started] = [fields["content_block"] for name, fields in events if name.endswith("k_start")]
    assert without_ids(started) == without_ids({**block, "input": {}})
    assert whole["stop_reason"] == "max_tokens"
    assert block["input"] == {}  # an object that was not closed is none
    deltas = [fields["delta"] for name, fields in events if name == "content_block_delta"]
    arguments = "".join(delta["partial_json"] for delta in deltas)
    return {"name": block["name"], "arguments": arguments}


def prompt_of(body: CountTokensBody | InputTokensBody) -> list[dict[str, Any]]:
    return plain_messages(body.chat)


def test_the_prompt_depends_on_texts_only() -> None:
    """The form of a content, marks for caches and the client's billing line are no part of it."""
    plain = {"system": "S", "messages": [{"role": "user", "content": "U"}]}
    block = {"type": "text", "text": "U", "cache_control": {"type": "ephemeral"}}
    billing = {"type": "text", "text": f"{BILLING} cc_version=1.x; cch=5;"}
    system = [billing, {"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]
    rich = {"system": system, "messages": [{"role": "user", "content": [block]}]}
    first, second = (read(CountTokensBody, body, []) for body in (plain, rich))
    assert prompt_of(first) == prompt_of(second)


def test_a_tool_that_is_loaded_later_stands_where_it_is_mentioned() -> None:
    late = {"name": "late", "input_schema": CITY, "defer_loading": True}
    found = {"type": "tool_reference", "tool_name": "late"}
    messages = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c", "name": "search", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [found]}]},
    ]  # fmt: skip
    tools = TOOLS[MESSAGES]
    before = {"messages": messages[:1], "tools": tools}
    after = {"messages": messages, "tools": [late, *tools]}
    first, second = (read(CountTokensBody, body, []).chat for body in (before, after))
    assert first.template_arguments["tools"] == second.template_arguments["tools"]
    assert [tool["function"]["name"] for tool in second.shown_tools] == ["late", "weather"]
    assert json.dumps(CITY) in plain_messages(second)[-1]["content"]


def test_tools_of_a_namespace_and_custom_tools() -> None:
    tokenizer = tokenizer_of(QWEN)
    engine = saying([], tokenizer)
    runner: Any = core_of(engine).runner
    inner = {"type": "function", "name": "weather", "parameters": CITY}
    tools = [
        {"type": "namespace", "name": "mcp__sky", "tools": [inner]},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "s: x"}},
        {"type": "web_search"},
    ]  # fmt: skip
    text = (
        '<tool_call>\n{"name": "mcp__sky__weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "patch", "arguments": {"input": "a \\"b\\"\\nc"}}\n</tool_call>'
    )

    async def use(app: App) -> None:
        runner.script = script_of(tokenizer, text)
        body = {"input": ASK, "tools": tools}
        for is_stream in (False, True):
            reply = await app.post(RESPONSES, {**body, "stream": is_stream})
            assert "web_search" in reply.headers["x-warning"]
            answer = response_of(events_of(reply)) if is_stream else reply.json()
            first, second = answer["output"]
            assert (first["name"], first["namespace"]) == ("weather", "mcp__sky")
            assert first["arguments"] == '{"city": "Ulm"}'
            assert (second["type"], second["name"]) == ("custom_tool_call", "patch")
            assert second["input"] == 'a "b"\nc'
        result = {"type": "custom_tool_call_output", "call_id": second["call_id"], "output": "ok"}
        back = [*answer["output"], result]
        said = read(ResponseBody, {"input": back, "tools": tools}, []).chat
        calls = plain_messages(said)[0]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["mcp__sky__weather", "patch"]
        assert calls[1]["function"]["arguments"] == {"input": 'a "b"\nc'}

    with_app(engine, use)


def test_what_cannot_be_read_is_replaced_or_named() -> None:
    noted: list[str] = []
    items = [
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
        {"type": "web_search_call", "id": "w"},
        {"type": "compaction", "id": "c", "encrypted_content": "x"},
    ]
    chat = read(ResponseBody, {"input": items, "store": False, "include": []}, noted).chat
    assert "reads text only" in plain_messages(chat)[0]["content"]
    assert noted == ["web_search_call", "compaction"]
    blocks = [{"type": "image", "source": {}}, {"type": "zzz"}, {"type": "text", "text": "U"}]
    noted.clear()
    body = {"messages": [{"role": "user", "content": blocks}], "metadata": {"user_id": "x"}}
    [message] = plain_messages(read(MessagesBody, body, noted).chat)
    assert message["content"].endswith("\n\nU")
    assert noted == ["zzz"]
    with pytest.raises(RequestError, match="zzz"):
        read(MessagesBody, body)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (MESSAGES, {}, "messages is required"),
        (MESSAGES, {"messages": []}, "messages is empty"),
        (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (MESSAGES, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text"),
        (MESSAGES, {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
        (MESSAGES, {"tools": [{"name": 5}]}, "tools[0].name"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "no"}}, "none of the tools"),
        (MESSAGES, {"tool_choice": {"type": "maybe"}}, "tool_choice must be"),
        (MESSAGES, {"thinking": {"type": "maybe"}}, "thinking.type"),
        (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (RESPONSES, {}, "input is required"),
        (RESPONSES, {"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, "input[0]."),
        (RESPONSES, {"input": "x", "background": True}, "background"),
        (RESPONSES, {"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        (RESPONSES, {"input": "x", "tool_choice": "required"}, "none of the tools"),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "xml"}}}, "json_schema"),
    ],
)  # fmt: skip
def test_bad_bodies(path: str, body: dict[str, Any], words: str) -> None:
    if path == MESSAGES and body and "messages" not in body:
        body = {"messages": [{"role": "user", "content": "x"}], **body}
    reply = ask(make_hash_llm(), path, body)
    assert reply.status in (400, 422), reply.body
    error = reply.error()
    assert words in error["message"]
    if path == MESSAGES:
        assert error["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long_says_by_how_much() -> None:
    """In the words by which the clients know that they have to shorten it."""
    said = {"role": "user", "content": "x" * 900}
    reply = ask(make_hash_llm(), MESSAGES, {"messages": [said], "max_tokens": 5})
    assert (reply.status, reply.error()["type"]) == (400, "invalid_request_error")
    assert " tokens > 511 maximum" in reply.error()["message"]
    assert "prompt is too long: " in reply.error()["message"]
    reply = ask(make_hash_llm(), RESPONSES, {"input": "x" * 900})
    assert (reply.status, reply.error()["code"]) == (400, "context_length_exceeded")


def test_a_stop_sequence_is_named() -> None:
    tokenizer = tokenizer_of(QWEN)
    engine = saying(script_of(tokenizer, "one two three"), tokenizer)
    more = {"stop_sequences": ["three", "two"], "stream": False}

    async def use(app: App) -> None:
        for stream in (False, True):
            reply = await app.post(MESSAGES, body_for(MESSAGES, **{**more, "stream": stream}))
            answer = message_of(events_of(reply)) if stream else reply.json()
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")
            assert answer["content"] == [{"type": "text", "text": "one "}]

    with_app(engine, use)


WAITING = [(MESSAGES, "ping"), (RESPONSES, "response.in_progress")]


@pytest.mark.parametrize(("path", "waiting"), WAITING)
def test_a_silent_stream_sends_what_its_clients_count(path: str, waiting: str) -> None:
    async def use(app: App) -> None:
        events = events_of(await app.post(path, {**body_for(path), "stream": True, "tools": []}))
        assert len([name for name, _ in events if name == waiting]) > 1

    with_app(make_hash_llm(step_s=0.2), use, keep_alive_s=0.05)


def test_a_stream_that_breaks_ends_as_its_clients_know_it() -> None:
    async def use(app: App) -> None:
        late = {"stream": True, "timeout": 0.05}
        events = events_of(await app.post(MESSAGES, {**body_for(MESSAGES, **late), "tools": []}))
        name, fields = events[-1]
        assert (name, fields["type"]) == ("error", "error")
        assert "was not done" in fields["error"]["message"]
        events = events_of(await app.post(RESPONSES, {"input": "x", **late}))
        name, fields = events[-1]
        assert (name, fields["response"]["status"]) == ("response.failed", "failed")
        assert fields["response"]["error"]["code"] == "server_error"

    with_app(make_hash_llm(step_s=0.05), use)


def test_many_references_to_a_long_tool_are_one_definition() -> None:
    long = {"name": "late", "description": "x" * 1000, "input_schema": CITY, "defer_loading": True}
    found = {"type": "tool_reference", "tool_name": "late"}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [found] * 50}
    body = {"messages": [{"role": "user", "content": [result, result]}], "tools": [long]}
    messages = plain_messages(read(CountTokensBody, body, []).chat)
    assert "".join(message["content"] for message in messages).count("x" * 1000) == 1


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue"}])
def test_a_conversation_that_the_server_is_to_hold_is_refused_as_its_client_knows(
    thread: dict[str, Any],
) -> None:
    """Anthropic's loops over tools ask for it, and send the whole conversation only when told."""
    reply = ask(make_hash_llm(), MESSAGES, body_for(MESSAGES, max_tokens=4, thread=thread))
    error = reply.json()["error"]
    assert (reply.status, error["type"]) == (400, "invalid_request_error")
    assert error["details"]["error_code"] == "thread_unsupported_request"
    assert error["details"]["unsupported"] == ["thread"]
    body = body_for(MESSAGES, max_tokens=4, thread=None)
    assert ask(make_hash_llm(), MESSAGES, body).status == 200


@pytest.mark.parametrize(
    "field",
    [{"max_tokens": 0}, {"temperature": 9}, {"top_k": -5}, {"stop_sequences": ["x"] * 999}],
    ids=lambda field: next(iter(field)),
)
def test_a_value_out_of_range_is_a_status_that_anthropics_api_has(field: dict[str, Any]) -> None:
    reply = ask(make_hash_llm(), MESSAGES, {**body_for(MESSAGES), "max_tokens": 4, **field})
    assert (reply.status, reply.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("family", "syntax", "is_held"),
    [("qwen3-coder", "lark", True), ("hermes", "lark", False), ("hermes", "regex", True)],
)
def test_the_grammar_of_a_forced_custom_tool_is_held_or_named(
    family: str, syntax: str, is_held: bool
) -> None:
    """Between tags a text can have any grammar; in JSON a regular expression."""
    tokenizer, way = tokenizer_of(QWEN), format_named(family)
    assert tokenizer.tool_use is not None
    tokenizer.tool_use = dataclasses.replace(tokenizer.tool_use, format=way)
    definition = 'start: "add " /[a-z]+/' if syntax == "lark" else "add [a-z]+"
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    tool = {"type": "custom", "name": "patch", "format": form}
    body = {"input": ASK, "tools": [tool], "tool_choice": "required", "max_output_tokens": 400}
    engine = saying([END_ID], tokenizer)
    core, asked = core_of(engine), list[Request]()
    add = core.add

    def noted(request: Request, *sent: Any) -> None:
        asked.append(request)
        add(request, *sent)

    core.add = noted  # type: ignore[assignment, method-assign]
    reply = ask(engine, RESPONSES, body)
    assert reply.status == 200, reply.body
    [grammar] = {request.sampling.grammar for request in asked}
    assert grammar is not None
    start = Compiler(Vocabulary.of(tokenizer, tokenizer.vocab_size)).constraint(grammar)

    def takes(text: str) -> bool:
        written = way.write([ToolCall("patch", json.dumps({"input": text}))])
        ids = tokenizer.encode(written, add_special_tokens=False)
        return start.copy().num_allowed(ids) == len(ids)

    assert takes("add bob")
    assert takes("xdd bob") != is_held
    assert ("tools[0].format" in reply.headers.get("x-warning", "")) != is_held


def test_a_custom_tools_grammar_that_is_none_is_named() -> None:
    tokenizer = tokenizer_of(QWEN)
    assert tokenizer.tool_use is not None
    way = format_named("qwen3-coder")
    tokenizer.tool_use = dataclasses.replace(tokenizer.tool_use, format=way)
    form = {"type": "grammar", "syntax": "lark", "definition": "start: nothing"}
    tool = {"type": "custom", "name": "patch", "format": form}
    body = {"input": ASK, "tools": [tool], "max_output_tokens": 4}
    reply = ask(saying([END_ID], tokenizer), RESPONSES, {**body, "tool_choice": "required"})
    assert reply.status in (400, 422), reply.body
    assert reply.error()["param"] == "tools[0].format"
    assert ask(saying([END_ID], tokenizer), RESPONSES, body).status == 200, "it forces nothing"
