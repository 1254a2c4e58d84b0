"""Tests of the template environment: what templates may do, and which messages callers get."""

from __future__ import annotations

import datetime
import enum
import gc
import weakref
from typing import Any

import pytest

from infer.errors import LoadError, RequestError
from infer.text import chat_template
from infer.text.chat_template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_blocks_are_trimmed_and_the_special_tokens_are_there() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\nend\n"
    assert render(source) == "<s>\nhi\nend"


def test_tojson_neither_escapes_html_nor_unicode() -> None:
    assert render("{{ x | tojson }}", x={"b": "<é'&>", "a": 1}) == '{"b": "<é\'&>", "a": 1}'
    assert render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"


def test_loop_controls_and_the_generation_tag() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    )
    assert render(source, [*USER, {"role": "assistant", "content": "ho"}, *USER]) == "[hi]"


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_documents_tools_and_absent_entries() -> None:
    source = "{{ tools is none }} {{ documents is none }} {{ messages[0].content is defined }}"
    assert render(source, [{"role": "user", "content": None}], tools=[]) == "True True False"


def test_reasoning_of_earlier_turns_under_both_names() -> None:
    source = "{{ messages[-1].reasoning_content }}|{{ messages[-1].thinking }}"
    assert render(source, [{"role": "assistant", "reasoning": "why"}]) == "why|why"


def test_text_parts_are_joined_for_templates_that_take_strings() -> None:
    template = ChatTemplate("{{ messages[0]['content'] | trim }}", {})
    assert not template.abilities.takes_parts
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"
    with pytest.raises(RequestError, match=r"messages\[0\].content has a part of type 'image_url'"):
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(LoadError, match="does not compile: line 2"):
        ChatTemplate("ok\n{% for %}", {})
    with pytest.raises(LoadError, match="does not compile"):
        ChatTemplate("{{ x | nosuchfilter }}", {})


def test_raise_exception_is_shown_as_it_is() -> None:
    with pytest.raises(RequestError) as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert (caught.value.message, caught.value.param) == ("roles must alternate", "messages")
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ messages[0].nothing.deeper }}", "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "_x"),
        ("{{ {} | dictsort | first }}{{ messages.append(1) }}", "cannot render"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% include 'other.jinja' %}", "cannot render"),
        ("{{ lipsum() }}", "lipsum"),
    ],
)
def test_what_fails_while_rendering_is_the_callers_error(source: str, told: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert told in caught.value.message
    assert caught.value.param == "messages"
    assert "/" not in caught.value.message.replace("//", "")  # no paths


LOOPS = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"
"""Without end in the interpreter."""
POWER = "{% set n = 10 ** 10 %}{{ 10 ** n }}"
"""Without end within one operation."""
LARGE = [
    ("{{ 'a' * 10**9 }}", "too much memory"),
    ("{{ [1] * 10**9 }}", "too much memory"),
    ("{% for i in range(9000) %}{{ 'a' * 9000 }}{% endfor %}", "longer than"),
]


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_COMPILE_S", 1)
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 1)


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize(
    ("source", "told"),
    [(LOOPS, "1 s"), pytest.param(POWER, "1 s of CPU time", marks=pytest.mark.slow), *LARGE],
)
def test_work_without_end_is_refused_at_load(source: str, told: str) -> None:
    with pytest.raises(LoadError, match=told):
        ChatTemplate(source, {})


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize(
    ("source", "told"),
    [pytest.param(LOOPS, "1 s", marks=pytest.mark.slow), (POWER, "1 s of CPU time"), *LARGE],
)
def test_work_without_end_is_refused_in_a_request(source: str, told: str) -> None:
    later = ChatTemplate("{% if messages[0].content == 'go' %}" + source + "{% endif %}", {})
    assert later.render([{"role": "user", "content": "hi"}]) == ""
    with pytest.raises(RequestError, match=told) as caught:
        later.render([{"role": "user", "content": "go"}])
    assert caught.value.param == "messages"


def test_a_long_chat_is_within_the_budget() -> None:
    loop = "{% for m in messages %}{% set c = m.content | trim %}"
    loop += "{{ '<|' ~ m.role ~ '|>' ~ c.split('</think>')[-1].lstrip() + '\\n' }}{% endfor %}"
    words = "word " * 20_000
    text = render(loop, [{"role": "user", "content": words}] * 40)
    assert len(text) > 3_900_000
    text = render(loop, [{"role": "user", "content": "a"}] * 20_000)
    assert len(text) == 20_000 * len("<|user|>a\n")


def test_the_limit_of_the_output_counts_while_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 10)
    assert render("{{ '0123456789' }}") == "0123456789"
    with pytest.raises(RequestError, match="longer than 10 characters"):
        render("{% for i in [1, 2] %}{{ '012345' }}{% endfor %}")


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "hi"}], r"messages\[0\] has no `role`"),
        ([{"role": "user", "content": object()}], "contains a object; only JSON"),
    ],
)
def test_messages_of_the_wrong_shape(messages: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        render("x", messages)


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        render("x", [{"role": "user", "content": "a", "data": deep}])


def test_templates_see_plain_strings() -> None:
    class Role(enum.StrEnum):
        USER = "user"

    assert render("{{ messages[0].role.name is defined }}{{ messages[0].role }}", [
        {"role": Role.USER, "content": ""}
    ]) == "Falseuser"  # fmt: skip


@pytest.mark.parametrize("name", ["_private", "raise_exception", "range"])
def test_variables_that_cannot_be_set(name: str) -> None:
    with pytest.raises(RequestError, match="cannot be set") as caught:
        render("x", **{name: 1})
    assert caught.value.param == "chat_template_kwargs"


def test_continue_and_generation_prompt_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="use one of them"):
        render("x", add_generation_prompt=True, continue_final_message=True)


def test_continue_needs_text_that_the_template_writes() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(RequestError, match="leaves out the last message"):
        render("nothing", **options)
    with pytest.raises(RequestError, match="with text to continue"):
        render("x", [{"role": "user"}], **options)


@pytest.mark.parametrize(
    "source", ["{{ 'a' + none }}", "{{ raise_exception('no') }}", "{{ x.y.z }}"]
)
def test_a_rendering_that_fails_holds_nothing_of_its_callers(source: str) -> None:
    """Not even until the next garbage collection: callers may have an engine."""

    class Held:
        pass

    def caller() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(RequestError):
            render(source)
        return weakref.ref(held)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()
