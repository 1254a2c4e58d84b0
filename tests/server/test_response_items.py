"""`/v1/responses`: items and fields that OpenAI's API documents, each with what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infer.server.openai.chat import plain_messages
from infer.server.openai.responses import MAX_ITEMS, ResponseBody
from infer.server.openai.schema_base import read
from tests.server.test_agents_apis import ASK, QWEN, RESPONSES, events_of, response_of
from tests.server.test_tool_loops import CITY, saying, script_of, tokenizer_of
from tests.support.doubles import make_hash_llm
from tests.support.serving import App, ask, check_refused, with_app

USER = {"role": "user", "content": "Hi"}
LATE = {"type": "function", "name": "late", "description": "Later.", "parameters": CITY}
LEFT_OUT = [
    {"type": "file_search_call", "id": "x", "queries": [], "status": "completed"},
    {"type": "computer_call", "id": "x", "call_id": "c", "action": {}, "status": "completed"},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
    {"type": "web_search_call", "id": "x", "status": "completed", "action": {}},
    {"type": "tool_search_call", "call_id": "c", "arguments": {}},
    {"type": "configuration_update"},
    {"type": "compaction", "id": "x", "encrypted_content": "x"},
    {"type": "image_generation_call", "id": "x", "result": None, "status": "completed"},
    {"type": "code_interpreter_call", "id": "x", "code": "", "container_id": "x", "outputs": []},
    {"type": "local_shell_call", "id": "x", "call_id": "c", "action": {}, "status": "completed"},
    {"type": "local_shell_call_output", "id": "x", "output": "x"},
    {"type": "shell_call", "call_id": "c", "action": {"commands": []}},
    {"type": "shell_call_output", "call_id": "c", "output": []},
    {"type": "apply_patch_call", "call_id": "c", "operation": {}, "status": "completed"},
    {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"},
    {"type": "mcp_list_tools", "id": "x", "server_label": "x", "tools": []},
    {"type": "mcp_approval_request", "id": "x", "arguments": "", "name": "x", "server_label": "x"},
    {"type": "mcp_approval_response", "approval_request_id": "x", "approve": True},
    {"type": "mcp_call", "id": "x", "arguments": "", "name": "x", "server_label": "x"},
    {"type": "compaction_trigger"},
    {"type": "item_reference", "id": "x"},
    {"type": "program", "id": "x", "call_id": "c", "code": "x", "fingerprint": "x"},
    {"type": "program_output", "id": "x", "call_id": "c", "result": "x", "status": "completed"},
]
"""Items of kinds that only OpenAI can serve."""


def chat_of(*items: Any, **more: Any) -> list[dict[str, Any]]:
    return plain_messages(read(ResponseBody, {"input": [*items], **more}, []).chat)


@pytest.mark.parametrize("item", LEFT_OUT, ids=lambda item: str(item["type"]))
def test_an_item_of_another_kind_is_left_out_and_named(item: dict[str, Any]) -> None:
    noted: list[str] = []
    chat = read(ResponseBody, {"input": [USER, item]}, noted).chat
    assert plain_messages(chat) == [USER]
    assert noted == [item["type"]]


@pytest.mark.parametrize("kind", [{}, {"type": None}])
def test_a_reference_needs_no_type(kind: dict[str, Any]) -> None:
    noted: list[str] = []
    chat = read(ResponseBody, {"input": [USER, {**kind, "id": "msg_1"}]}, noted).chat
    assert (plain_messages(chat), noted) == ([USER], ["item_reference"])


@pytest.mark.parametrize(
    ("said", "result"),
    [
        ({"call_id": "c"}, {"tool_call_id": "c"}),
        ({"call_id": None, "name": "weather"}, {"name": "weather"}),
        ({"name": "weather", "namespace": "sky"}, {"name": "sky__weather"}),
        ({}, {}),
    ],
    ids=str,
)
def test_a_result_says_of_which_call_it_is(said: Any, result: dict[str, Any]) -> None:
    item = {"type": "function_call_output", "output": "sun", **said}
    assert chat_of(USER, item)[1] == {"role": "tool", "content": "sun", **result}


@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
def test_tools_that_come_later_are_shown_where_they_come(kind: str) -> None:
    """What stands before them stays as it was; calls are read, and names come back apart."""
    inner = {"type": "namespace", "name": "sky", "tools": [LATE]}
    patch = {"type": "custom", "name": "patch"}
    item = {"type": kind, "role": "developer", "tools": [inner, patch, {"type": "web_search"}]}
    tools = [{"type": "function", "name": "weather", "parameters": CITY}]
    tokenizer = tokenizer_of(QWEN)
    call = '<tool_call>\n{"name": "sky__late", "arguments": {"city": "Ulm"}}\n</tool_call>'
    call += '<tool_call>\n{"name": "patch", "arguments": {"input": "x"}}\n</tool_call>'
    engine = saying(script_of(tokenizer, call), tokenizer)
    before = read(ResponseBody, {"input": [USER], "tools": tools}, []).chat
    after = read(ResponseBody, {"input": [USER, item, item], "tools": tools}, []).chat
    assert before.template_arguments["tools"] == after.template_arguments["tools"]
    [first, shown] = plain_messages(after)
    assert (first, shown["role"]) == (USER, "system")
    assert shown["content"].count('"name": "sky__late"') == 1

    async def use(app: App) -> None:
        for stream in (False, True):
            body = {"input": [USER, item], "tools": tools, "stream": stream}
            reply = await app.post(RESPONSES, body)
            assert reply.headers["x-ignored-params"] == "web_search"
            answer = response_of(events_of(reply)) if stream else reply.json()
            function, custom = answer["output"]
            assert (function["name"], function["namespace"]) == ("late", "sky")
            assert (custom["type"], custom["input"]) == ("custom_tool_call", "x")
            forced = {"type": "function", "name": "late"}
            made = read(ResponseBody, {**body, "tool_choice": forced}, []).chat.forced_tools
            assert [tool["function"]["name"] for tool in made] == ["sky__late"]

    with_app(engine, use)


def test_what_refers_to_stored_items_is_what_was_stored(tmp_path: Path) -> None:
    """Of an answer and of a question; another key's are none, and what is unknown is named."""
    items: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]

    async def use(app: App) -> None:
        made = (await app.post(RESPONSES, {"input": items, "max_output_tokens": 8})).json()
        at = f"{RESPONSES}/{made['id']}/input_items"
        [asked] = (await app.get(at)).json()["data"]
        names = [asked["id"], *(item["id"] for item in made["output"])]
        referred: list[dict[str, Any]] = [{"type": "item_reference", "id": name} for name in names]
        more = {"role": "user", "content": "More"}
        for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
            whole = await app.post(path, {"input": [*items, *made["output"], more]})
            short = await app.post(path, {"input": [*referred, more]})
            assert "x-ignored-params" not in short.headers
            counts = [reply.json().get("usage", reply.json()) for reply in (whole, short)]
            assert counts[0]["input_tokens"] == counts[1]["input_tokens"]
            unknown = await app.post(path, {"input": [{"id": names[0] + "0"}, more]})
            assert (unknown.status, unknown.headers["x-ignored-params"]) == (200, "item_reference")
        again = (await app.post(RESPONSES, {"input": [*referred, more]})).json()
        listed = (await app.get(f"{RESPONSES}/{again['id']}/input_items?order=asc")).json()["data"]
        assert [item["type"] for item in listed] == ["message"] * 3

    with_app(make_hash_llm(), use, sessions=f"sqlite:///{tmp_path}/s.db")


@pytest.mark.parametrize("field", [{"conversation": "c"}, {"prompt": {"id": "p"}}], ids=str)
def test_what_would_change_the_answer_is_refused(field: dict[str, Any]) -> None:
    [name] = field
    reply = ask(make_hash_llm(), RESPONSES, {"input": "x", **field})
    check_refused(reply, 400, name, "unsupported_parameter", "not supported")


def test_a_response_repeats_what_was_said() -> None:
    custom = {"type": "custom", "name": "patch"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [custom]}
    tokenizer = tokenizer_of(QWEN)

    async def use(app: App) -> None:
        for choice in (custom, allowed, "auto", {"type": "function", "name": "late"}):
            body = {"input": ASK, "tools": [custom, LATE], "tool_choice": choice}
            body |= {"metadata": {"a": "b"}}
            made = (await app.post(RESPONSES, body)).json()
            assert (made["tool_choice"], made["metadata"]) == (choice, {"a": "b"})
        reply = await app.post(RESPONSES, {"input": ASK, "metadata": {"a": 1}})
        check_refused(reply, 400, "metadata", None, "strings")
        include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
        reply = await app.post(RESPONSES, {"input": ASK, "include": include})
        assert reply.headers["x-ignored-params"] == f"include.{include[0]}"
        reply = await app.get(f"{RESPONSES}/{made['id']}?stream=true")
        check_refused(reply, 400, "stream", None, "whole")
        reply = await app.post(RESPONSES, {"input": ASK, "reasoning": {"effort": "ultra"}})
        assert reply.error()["param"] == "reasoning.effort"

    with_app(saying(script_of(tokenizer, "Hi"), tokenizer), use)


def test_many_items_and_tools_are_taken() -> None:
    steps = [
        [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{i}", "output": "x"},
        ]
        for i in range(1500)
    ]
    tools = [{**LATE, "name": f"f{i}"} for i in range(300)]
    chat = chat_of(*(item for step in steps for item in step), tools=tools)
    assert len(chat) == 3000
    reply = ask(make_hash_llm(), RESPONSES, {"input": [USER] * (MAX_ITEMS + 1)})
    check_refused(reply, 422, "input", None, str(MAX_ITEMS))
