"""Tests of the chat templates of Llama 3.2, Qwen2.5, Qwen3 and Gemma 3 against transformers.

Text and ids must be the same. The templates in `templates/` are written from the documented prompt
formats of these models. They use each construct that the originals use: namespaces, loop controls,
macros, negative slices, tojson with indent, strftime_now, tests for types, raise_exception.
"""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from infer.errors import RequestError
from tests.support.text_checkpoints import Pair, load_pair
from tests.support.tokenizer_families import save_family

Messages = list[dict[str, Any]]
Chats = dict[str, tuple[Messages, dict[str, Any]]]
NAMES = ("llama32", "qwen25", "qwen3", "gemma3")
WITH_TOOLS = NAMES[:3]
DATE: dict[str, Any] = {"date_string": "01 Jan 2030"}


def function(name: str, **properties: str) -> dict[str, Any]:
    described = {key: {"type": kind, "description": f"it's <{key}> & é"} for key, kind in
                 properties.items()}  # fmt: skip
    parameters = {"type": "object", "properties": described, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": f"The {name}.", "parameters": parameters},
    }


TOOLS = [function("weather", city="string", days="integer"), function("time", zone="string")]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def tool(content: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content}


def calls(*names: str, content: str | None = None, **fields: Any) -> dict[str, Any]:
    made = [
        {"type": "function", "function": {"name": name, "arguments": {"city": "Köln", "n": [i]}}}
        for i, name in enumerate(names)
    ]
    return assistant(content, tool_calls=made, **fields)


SYSTEM = {"role": "system", "content": " You are été.\n"}
TURNS = [user("  Hello world \n"), assistant(" quick 数字 🙂\n\n"), user("Thanks")]
THOUGHT = "<think>\nhm, <b>\n</think>\n\nThe fox"
STEPS = [
    user("Weather?"),
    calls("weather", content="Looking."),
    tool('{"t": 20}'),
    calls("time"),
    tool("noon <é>"),
]

CHATS: Chats = {
    "single": ([user("Hello world")], {}),
    "turns": (TURNS, {}),
    "system": ([SYSTEM, user("Hi")], {}),
    "system and turns": ([SYSTEM, *TURNS], {}),
    "no generation prompt": (TURNS, {"add_generation_prompt": False}),
    "empty": ([user("")], {}),
    "continued": (
        [user("Tell"), assistant("Sure, the")],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    "continued behind spaces": (
        [SYSTEM, *TURNS, assistant("Well \n ")],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    "continued user": (
        [user("Once upon")],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    "thinking": (TURNS, {"enable_thinking": True}),
    "no thinking": (TURNS, {"enable_thinking": False}),
    "thoughts of an earlier turn": ([user("a"), assistant(THOUGHT), user("b")], {}),
    "entries that are null": (
        [user("a"), assistant("b", tool_calls=None, reasoning_content=None), user("c")],
        {},
    ),
    "typed control tokens": (
        [user("x<|eot_id|><|im_end|>y<end_of_turn>"), assistant("<|im_start|>"), user("<bos>")],
        {},
    ),
}
TOOL_CHATS: Chats = {
    "tools": ([user("Weather?")], {"tools": TOOLS}),
    "tools and system": ([SYSTEM, user("Weather?")], {"tools": TOOLS}),
    "no tools": ([user("Weather?")], {"tools": []}),
    "call": (STEPS[:2], {"tools": TOOLS, "add_generation_prompt": False}),
    "response": (STEPS[:3], {"tools": TOOLS}),
    "steps": ([SYSTEM, *STEPS], {"tools": TOOLS}),
    "steps and turns": ([*STEPS, assistant("20 at noon"), user("Thanks")], {"tools": TOOLS}),
    "calls without definitions": (STEPS, {}),
    "continued behind a response": (
        [*STEPS, assistant("It is")],
        {"tools": TOOLS, "add_generation_prompt": False, "continue_final_message": True},
    ),
}
TWO_CALLS = [user("Both?"), calls("weather", "time"), tool("20"), tool("noon")]
OWN_CHATS: dict[str, Chats] = {
    "llama32": {
        "tools in the system turn": (
            [SYSTEM, *STEPS],
            {"tools": TOOLS, "tools_in_user_message": False},
        ),
        "custom tools": ([user("Weather?")], {"custom_tools": TOOLS}),
        "a response that is an object": ([*STEPS[:2], tool({"t": [20, "é<"]})], {"tools": TOOLS}),
        "a response that is a list": ([*STEPS[:2], tool(["a", {"b": None}])], {"tools": TOOLS}),
        "the role ipython": ([*STEPS[:2], {"role": "ipython", "content": "20"}], {}),
    },
    "qwen25": {"two calls": (TWO_CALLS, {"tools": TOOLS})},
    "qwen3": {
        "two calls": (TWO_CALLS, {"tools": TOOLS}),
        "two calls, no thinking": (TWO_CALLS, {"tools": TOOLS, "enable_thinking": False}),
        "thoughts between steps": (
            [
                user("a"),
                assistant("b", reasoning_content="earlier"),
                user("c"),
                calls("time", content="d", reasoning_content="now\n"),
                tool("noon"),
                assistant("e", reasoning_content="\nlast"),
            ],
            {"add_generation_prompt": False},
        ),
        "thoughts in the content between steps": (
            [user("a"), calls("time", content=THOUGHT), tool("noon"), assistant(THOUGHT)],
            {"add_generation_prompt": False},
        ),
        "a response in a user turn": (
            [*STEPS[:2], user("<tool_response>\n20\n</tool_response>")],
            {"tools": TOOLS},
        ),
        "thoughts in a continued turn": (
            [user("a"), assistant("It is", reasoning_content="why")],
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
    },
    "gemma3": {
        "parts": ([user([{"type": "text", "text": " a "}, {"type": "text", "text": "b"}])], {}),
        "system in parts": (
            [{"role": "system", "content": [{"type": "text", "text": "Be."}]}, user("Hi")],
            {},
        ),
        "continued parts": (
            [user("a"), assistant([{"type": "text", "text": "So"}])],
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
    },
}
ROWS = [
    *((name, chat, CHATS[chat]) for name in NAMES for chat in CHATS),
    *((name, chat, TOOL_CHATS[chat]) for name in WITH_TOOLS for chat in TOOL_CHATS),
    *((name, chat, OWN_CHATS[name][chat]) for name in NAMES for chat in OWN_CHATS[name]),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {
        name: load_pair(name, save_family(tmp_path_factory.mktemp(name), name)) for name in NAMES
    }


@pytest.mark.parametrize(
    ("name", "chat"), [(row[0], row[2]) for row in ROWS], ids=[f"{r[0]}-{r[1]}" for r in ROWS]
)
def test_same_prompt_as_transformers(
    pairs: dict[str, Pair], name: str, chat: tuple[Messages, dict[str, Any]]
) -> None:
    messages, options = chat
    options = {"add_generation_prompt": True, **DATE, **options}
    text, ids = pairs[name].ours.apply_chat_template(messages, **options)
    # In OpenAI's API an empty list means no tools; transformers passes the list to the template.
    theirs = {**options, "tools": options.get("tools") or None}
    assert text == pairs[name].theirs.apply_chat_template(messages, tokenize=False, **theirs)
    if "control" in text or any("<|im_start|>" in str(m["content"]) for m in messages):
        assert pairs[name].ours.decode(ids, skip_special_tokens=False) == text
        assert ids != pairs[name].theirs.apply_chat_template(messages, return_dict=False, **theirs)
    else:
        assert ids == pairs[name].theirs.apply_chat_template(messages, return_dict=False, **theirs)
        assert ids


EXPECTED = {
    "llama32": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 01 Jan 2030\n\nBe.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "qwen25": "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n",
    "qwen3": "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "gemma3": "<bos><start_of_turn>user\nBe.\n\nHi<end_of_turn>\n<start_of_turn>model\n",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_formats_as_they_are_documented(pairs: dict[str, Pair], name: str) -> None:
    """The prompts are written out, so that the templates here stay like the models' own."""
    messages = [{"role": "system", "content": "Be."}, user("Hi")]
    options: dict[str, Any] = {**DATE, "enable_thinking": False}
    text, ids = pairs[name].ours.apply_chat_template(messages, **options)
    assert text == EXPECTED[name]
    assert pairs[name].ours.decode(ids, skip_special_tokens=False) == text


def test_the_date_is_today(pairs: dict[str, Pair]) -> None:
    text, _ = pairs["llama32"].ours.apply_chat_template([user("Hi")])
    days = [datetime.date.today() - datetime.timedelta(days=n) for n in (0, 1)]  # at midnight
    assert any(f"Today Date: {day:%d %b %Y}\n" in text for day in days)


def test_thoughts_are_shown_behind_the_last_question_only(pairs: dict[str, Pair]) -> None:
    messages, options = OWN_CHATS["qwen3"]["thoughts between steps"]
    text, _ = pairs["qwen3"].ours.apply_chat_template(messages, **options)
    assert "earlier" not in text
    assert text.count("<think>") == 2
    assert "<think>\nnow\n</think>\n\nd\n<tool_call>" in text


@pytest.mark.parametrize(
    ("name", "messages", "options"),
    [
        ("gemma3", [assistant("I first")], {}),
        ("gemma3", [SYSTEM, assistant("I first")], {}),
        ("llama32", [SYSTEM], {"tools": TOOLS}),
    ],
)
def test_a_beginning_that_a_template_refuses_is_rendered(
    pairs: dict[str, Pair], name: str, messages: Messages, options: dict[str, Any]
) -> None:
    """As it renders the chat with an empty question."""
    pair = pairs[name]
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        pair.theirs.apply_chat_template(messages, **DATE, **options)
    assert type(theirs.value).__name__ == "TemplateError"
    place = messages.index(SYSTEM) + 1 if SYSTEM in messages else 0
    whole = [*messages[:place], user(""), *messages[place:]]
    text, _ = pair.ours.apply_chat_template(messages, **DATE, **options)
    wanted = pair.theirs.apply_chat_template(whole, tokenize=False, **DATE, **options)
    assert text.startswith(wanted)


@pytest.mark.parametrize(("name", "messages", "options"), [("gemma3", [user(5)], {})])
def test_what_a_template_refuses(
    pairs: dict[str, Pair], name: str, messages: Messages, options: dict[str, Any]
) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        pairs[name].theirs.apply_chat_template(messages, **DATE, **options)
    with pytest.raises(RequestError) as ours:
        pairs[name].ours.apply_chat_template(messages, **DATE, **options)
    assert ours.value.param == "messages"
    if type(theirs.value).__name__ == "TemplateError":
        assert ours.value.message == str(theirs.value)
