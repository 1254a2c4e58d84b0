"""Tool loops over HTTP with models of different templates and formats, and reasoning."""

from __future__ import annotations

import copy
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from infer.config import REASONING_PARSERS, TOOL_PARSERS, EngineConfig
from infer.engine.build.checkpoint import find_checkpoint, text_of
from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import log_tool_use
from infer.errors import ConfigError
from infer.text.answer_parser import parser_for
from infer.text.checkpoint_text import TextFiles
from infer.text.tokenizer import Tokenizer
from infer.text.tools.call import ToolCall
from infer.text.tools.formats import FORMATS, THOUGHTS, UNOPENED_THOUGHTS
from tests.support.cases import one_of
from tests.support.checkpoints import END_ID, write_tokenizer
from tests.support.demo_answers import demo
from tests.support.doubles import LastingTokenizer
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    App,
    Reply,
    ScriptRunner,
    ask,
    asking,
    chat_body,
    completion_body,
    scripted,
    spelled,
    with_app,
)

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
LAST = "{% endfor %}<assistant>"
SHOWN = "{% if tools %}{{ tools | tojson }}{% endif %}"
LISTED = (
    SHOWN + TURNS + "{% if m.tool_calls %}{MARK}[{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}" + LAST
)
MISTRAL = LISTED.replace("{MARK}", "[TOOL_CALLS]") + "{# [THINK][/THINK] #}"
BARE_LIST = LISTED.replace("{MARK}", "")
NO_TOOLS = TURNS + LAST
UNKNOWN = SHOWN + TURNS + "{% for c in m.tool_calls or [] %}%%{{ c.function.name }}%{% endfor %}"
UNKNOWN += LAST
THINKS = (
    SHOWN + TURNS + LAST + "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
    "{% if enable_thinking is defined %}<{{ enable_thinking }}>{% endif %}{# <think></think> #}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "time"}}
SPECIAL = ("[TOOL_CALLS]", "[THINK]", "[/THINK]")


def tokenizer_of(template: str, special: tuple[str, ...] = ()) -> Tokenizer:
    """The tests' byte tokenizer, with a template and further special tokens. What a test sets of it
    is its own; a template is compiled once."""
    return copy.copy(_tokenizer_of(template, special))


@lru_cache(8)
def _tokenizer_of(template: str, special: tuple[str, ...]) -> Tokenizer:
    with tempfile.TemporaryDirectory() as name:
        folder = write_tokenizer(Path(name))
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        config["additional_special_tokens"] = list(special)
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return LastingTokenizer.from_folder(folder)


def saying(ids: list[int], tokenizer: Tokenizer) -> AsyncLLM:
    """An engine that generates `ids`, with room for long prompts."""
    return scripted(ids, tokenizer=tokenizer, max_seq_len=4096, num_pages=4096)


def script_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """The ids of an answer; a piece that is a special token becomes one id."""
    ids = []
    for piece in pieces:
        special = tokenizer.special_ids_of([piece])
        ids += list(special) or spelled(piece)
    return [*ids, END_ID]


class Talk:
    """An app whose model says what the test wants."""

    def __init__(self, tokenizer: Tokenizer, runner: ScriptRunner, post: Callable[..., Reply]):
        self.tokenizer = tokenizer
        self.runner = runner
        self.post = post

    def ask(self, *pieces: str, **fields: Any) -> Reply:
        """The reply to a chat, to which the model says the pieces."""
        self.runner.script = script_of(self.tokenizer, *pieces)
        reply = self.post(CHAT, chat_body(**{"max_tokens": 300, **fields}))
        assert reply.status == 200, reply.body
        return reply

    def answered(self, *pieces: str, **fields: Any) -> tuple[dict[str, Any], Reply]:
        """The choice with tools, and the reply."""
        reply = self.ask(*pieces, **{"tools": [WEATHER], **fields})
        [choice] = reply.json()["choices"]
        return choice, reply


@contextmanager
def talking(tokenizer: Tokenizer) -> Iterator[Talk]:
    """One app for several answers: each app starts processes for templates that are not known."""
    runner = ScriptRunner([])
    settings: dict[str, Any] = {"max_seq_len": 4096, "num_pages": 4096}
    settings["enable_prefix_caching"] = False  # so that an answer says nothing of those before
    with asking(scripted([], tokenizer=tokenizer, runner=runner, **settings)) as post:
        yield Talk(tokenizer, runner, post)


def answered(tokenizer: Tokenizer, *pieces: str, **fields: Any) -> tuple[dict[str, Any], Reply]:
    """One answer of a new app."""
    with talking(tokenizer) as talk:
        return talk.answered(*pieces, **fields)


def test_marks_that_are_special_tokens_are_read_and_not_shown() -> None:
    tokenizer = tokenizer_of(MISTRAL, SPECIAL)
    call = '[{"name": "weather", "arguments": {"city": "Ulm"}}]'
    pieces = ("[THINK]", "Hm", "[/THINK]", "I see.", "[TOOL_CALLS]", call)
    choice, reply = answered(tokenizer, *pieces)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm", "I see.")
    [made] = message["tool_calls"]
    assert made["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
    assert choice["finish_reason"] == "tool_calls"
    assert "x-warning" not in reply.headers
    # Without tools the mark is not parsed, and as a special token not shown; thoughts always are.
    choice, _ = answered(tokenizer, *pieces, tools=None)
    assert choice["message"]["content"] == "I see." + call
    assert choice["message"]["reasoning_content"] == "Hm"


@pytest.mark.parametrize("content", [None, "", "I shall look."])
@pytest.mark.parametrize("template", [MISTRAL, BARE_LIST, NO_TOOLS, UNKNOWN, THINKS])
def test_what_we_answer_we_take_back(template: str, content: str | None) -> None:
    """Three turns, in which a client sends our answers back unchanged."""
    tokenizer = tokenizer_of(template)
    assert tokenizer.tool_use is not None
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
    with talking(tokenizer) as talk:
        for city in ("Ulm", "Bonn", "Jena"):
            call = ToolCall("weather", json.dumps({"city": city}))
            text = tokenizer.tool_use.format.write([call])
            choice, _ = talk.answered(text, messages=messages)
            [made] = choice["message"]["tool_calls"]
            assert (made["function"]["name"], made["function"]["arguments"]) == call
            assert choice["message"]["content"] is None
            messages += [
                {**choice["message"], "content": content},
                {"role": "tool", "tool_call_id": made["id"], "content": f"{city} is sunny"},
            ]
        choice, _ = talk.answered("All sunny.", messages=messages)
        assert choice["message"]["content"] == "All sunny."
        body = chat_body(messages=messages, tools=[WEATHER])
        prompt = talk.post(f"{CHAT}/render", body).json()["prompt"]
    assert prompt.count("is sunny") == 3
    if template != UNKNOWN:  # that template leaves arguments out
        assert all(prompt.index(city) < prompt.index(f"{city} is") for city in ("Ulm", "Jena"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_header_names_what_is_not_known(stream: bool) -> None:
    for template, words in ((NO_TOOLS, "renders no tools"), (UNKNOWN, "--tool-parser")):
        tokenizer = tokenizer_of(template)
        with talking(tokenizer) as talk:
            for fields, warned in (
                ({"tools": [WEATHER]}, True),
                ({"tools": [WEATHER], "tool_choice": "none"}, False),
                ({}, False),
            ):
                reply = talk.ask("Hi", **{"stream": stream, "max_tokens": 8, **fields})
                assert (words in reply.headers.get("x-warning", "")) is warned


def test_the_start_says_which_format_was_found(caplog: pytest.LogCaptureFixture) -> None:
    for template, level, words in (
        (MISTRAL, logging.INFO, "mistral, as the chat template writes them"),
        (NO_TOOLS, logging.INFO, "renders no tools"),
        (UNKNOWN, logging.WARNING, "none of the known formats"),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, "infer"):
            log_tool_use(tokenizer_of(template))
        [record] = [r for r in caplog.records if r.getMessage().startswith("tool calls:")]
        assert record.levelno == level
        assert words in record.message


def test_any_variable_of_a_template_can_be_set() -> None:
    """Also one with the name of a parameter of our own functions."""
    for name in ("tool_format", "way", "extra", "messages_"):
        body = chat_body(chat_template_kwargs={name: "x"})
        assert ask(scripted(spelled("Hi")), CHAT, body).status == 200


def test_json_that_is_no_call_stays_content() -> None:
    tokenizer = tokenizer_of(BARE_LIST)
    with talking(tokenizer) as talk:
        for text in (
            '{"name": "Bob", "age": 3}',
            '{"name": "weather", "age": 3}',
            '{"name": "weather"}',
            '[{"name": "Bob", "arguments": {}}]',
            '{"parameters": {"a": 1}}',
        ):
            choice, _ = talk.answered(text)
            assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
            assert "tool_calls" not in choice["message"]


NAMED = {"type": "function", "function": {"name": "time"}}


@pytest.mark.parametrize(
    ("template", "choice"),
    [
        *one_of(2, product([MISTRAL, BARE_LIST], ["required", NAMED])),
        *one_of(2, product([NO_TOOLS], ["required", NAMED]), first=1),
    ],
)
def test_a_forced_call_that_is_cut_is_a_call(template: str, choice: Any) -> None:
    """`scripted` obeys no grammar, so the text is what a grammar gives, cut at any place."""
    tokenizer = tokenizer_of(template)
    assert tokenizer.tool_use is not None
    head = {
        "hermes": '<tool_call>\n{"name": "time", "arguments": ',
        "json": '{"name": "time", "parameters": ',
        "mistral": "[TOOL_CALLS]time[ARGS]",
    }[tokenizer.tool_use.format.name]
    arguments = '{"zone": "CET"}'

    async def use(app: App) -> None:
        for size in range(len(head), len(head + arguments)):
            fields = {"tools": [WEATHER, TIME], "tool_choice": choice, "max_tokens": size}
            [answer] = (await app.post(CHAT, chat_body(**fields))).json()["choices"]
            [made] = answer["message"]["tool_calls"]
            assert made["function"] == {"name": "time", "arguments": arguments[: size - len(head)]}
            assert (answer["finish_reason"], answer["message"]["content"]) == ("length", None)

    with_app(saying(spelled(head + arguments), tokenizer), use)


def test_how_much_was_thought() -> None:
    for special in ((), ("<think>", "</think>")):
        tokenizer = tokenizer_of(THINKS, special)
        with talking(tokenizer) as talk:
            for thoughts in ("", "Hm", "Hm, é😀 </thin"):
                pieces = ("<think>", thoughts, "</think>", "Yes </think>")
                num_thoughts = len(thoughts.encode())
                for fields in ({}, {"include_reasoning": False}, {"n": 2}):
                    usage = talk.ask(*pieces, **fields).json()["usage"]
                    expected = num_thoughts * fields.get("n", 1)
                    assert usage["completion_tokens_details"] == {"reasoning_tokens": expected}
                    options = {"stream": True, "stream_options": {"include_usage": True}}
                    assert talk.ask(*pieces, **fields, **options).events()[-1]["usage"] == usage
            for text, count in (("No thoughts", 0), ("<think>never ends", len("never ends") + 1)):
                usage = talk.ask(text).json()["usage"]
                assert usage["completion_tokens_details"]["reasoning_tokens"] == count


def test_thoughts_that_the_prompt_has_begun_are_counted() -> None:
    tokenizer = tokenizer_of(TURNS + LAST + "<think>{# </think> #}")
    engine = saying(script_of(tokenizer, "Hm</think>Yes"), tokenizer)
    answer = ask(engine, CHAT, chat_body(max_tokens=300)).json()
    assert answer["choices"][0]["message"]["reasoning_content"] == "Hm"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_reasoning_effort_goes_to_a_template_that_reads_it() -> None:
    tokenizer = tokenizer_of(THINKS)

    with talking(tokenizer) as talk:

        def end_of(**fields: Any) -> str:
            prompt = talk.post(f"{CHAT}/render", chat_body(**fields)).json()["prompt"]
            return str(prompt).rpartition("<assistant>")[2]

        assert end_of() == ""
        assert end_of(reasoning_effort="low") == "[low]<True>"
        assert end_of(reasoning_effort="none") == "[none]<False>"
        own = {"reasoning_effort": "high", "enable_thinking": True}
        assert end_of(reasoning_effort="none", chat_template_kwargs=own) == "[high]<True>"
    other = tokenizer_of(NO_TOOLS)
    for path, make in ((CHAT, chat_body), (COMPLETIONS, completion_body)):
        answers = [
            ask(saying(script_of(other, "Hi"), other), path, make(**fields)).json()
            for fields in ({}, {"reasoning_effort": "low"})
        ]
        assert answers[0]["choices"] == answers[1]["choices"]


def test_thoughts_of_earlier_turns_have_two_names() -> None:
    source = "{% for m in messages %}{{ m.content }}({{ m.reasoning_content }}){% endfor %}"
    tokenizer = tokenizer_of(source)
    for name in ("reasoning", "reasoning_content"):
        messages = [{"role": "assistant", "content": "Yes", name: "Hm"}]
        body = chat_body(messages=messages)
        prompt = ask(saying([], tokenizer), f"{CHAT}/render", body).json()["prompt"]
        assert "Yes(Hm)" in prompt


def test_a_json_object_may_have_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "response_format": {
            "type": "json_object",
            "schema": {**schema, "additionalProperties": False},
        },
        "max_tokens": 60,
    }
    [answer] = demo(CHAT, body)
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 7}


def test_usage_with_every_piece_needs_usage_at_all() -> None:
    for include in (False, True):
        options = {"include_usage": include, "continuous_usage_stats": True}
        for path, make in ((CHAT, chat_body), (COMPLETIONS, completion_body)):
            body = make(stream=True, stream_options=options)
            events = ask(scripted(spelled("Hello")), path, body).events()
            assert all(("usage" in event) is include for event in events)


def test_the_operator_may_name_the_template_and_the_format(tmp_path: Path) -> None:
    checkpoint = find_checkpoint(None)
    file = tmp_path / "own.jinja"
    file.write_text("OWN " + BARE_LIST, encoding="utf-8")
    config = EngineConfig(chat_template=str(file), tool_parser="mistral")
    tokenizer = Tokenizer(text_of(checkpoint, config))
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.source.startswith("OWN")
    assert tokenizer.tool_use is not None
    assert tokenizer.tool_use.format.name == "mistral"
    assert text_of(checkpoint, EngineConfig(generation_config="none")) == checkpoint.text()
    assert checkpoint.text().templates
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    for path, words in ((tmp_path / "no", "there is no file"), (tmp_path / "latin", "not UTF-8"),
                        (tmp_path, "there is no file")):  # fmt: skip
        with pytest.raises(ConfigError, match=words) as refused:
            text_of(checkpoint, EngineConfig(chat_template=str(path)))
        assert str(refused.value).count("chat_template: ") == 1
    assert [each.name for each in FORMATS] == list(TOOL_PARSERS)


@cache
def without_marks() -> tuple[TextFiles, Tokenizer]:
    """A template that shows no marks of reasoning, where the operator names none."""
    files = text_of(find_checkpoint(None), EngineConfig())
    files = replace(files, templates={"default": BARE_LIST}, reasoning_parser=None)
    return files, LastingTokenizer(files)


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_the_operator_may_name_the_marks_of_reasoning(name: str) -> None:
    config = EngineConfig.from_kwargs(reasoning_parser=name)
    files = replace(text_of(find_checkpoint(None), config), templates={"default": BARE_LIST})
    marks = Tokenizer(files).thoughts
    assert (marks.name if marks else "none") == name
    bare, tokenizer = without_marks()
    assert replace(files, reasoning_parser=None) == bare
    assert tokenizer.thoughts is None
    if marks is not None:
        text = f"{'' if marks.begins else marks.opening}Hm{marks.closing}Hi"
        parser = parser_for(marks, None, prompt_end="<|im_start|>assistant\n")
        assert parser.push(text, end=True)[:2] == ("Hm", "Hi")


def test_all_marks_of_reasoning_can_be_named() -> None:
    names = [each.name for each in (*THOUGHTS, UNOPENED_THOUGHTS)]
    assert ["none", *names] == list(REASONING_PARSERS)
    with pytest.raises(ConfigError, match=r"reasoning_parser: .*deepseek-r1"):
        EngineConfig.from_kwargs(reasoning_parser="gpt5")


TAGGED = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "<function={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}\n"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>{% endfor %}\n</function>\n</tool_call>"
    "{% endfor %}{% endfor %}<|assistant|>"
)
COUNTED = {
    "type": "object",
    "properties": {"unit": {"enum": ["cold", "warm"]}, "days": {"type": "integer", "maximum": 99}},
    "required": ["unit", "days"],
}


def test_a_forced_call_is_written_in_the_models_own_markup(tmp_path: Path) -> None:
    file = tmp_path / "tagged.jinja"
    file.write_text(TAGGED, encoding="utf-8")
    tool = {"type": "function", "function": {"name": "forecast", "parameters": COUNTED}}
    asked = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 120,
        "return_token_ids": True,
    }
    answer, events = demo(CHAT, asked, {**asked, "stream": True}, chat_template=str(file))
    [choice] = answer["choices"]
    [call] = choice["message"]["tool_calls"]
    written = Tokenizer(text_of(find_checkpoint(None), EngineConfig())).decode(choice["token_ids"])
    assert written.startswith("<tool_call>\n<function=forecast>\n<parameter=unit>\n")
    assert written.endswith("\n</function>\n</tool_call>")
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["unit"] in ("cold", "warm")
    assert type(arguments["days"]) is int
    assert choice["finish_reason"] == "tool_calls"
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "forecast"
    said = "".join(call["function"]["arguments"] for call in calls)
    assert said == call["function"]["arguments"]
    assert len(calls) > 3
