"""Several system messages at the beginning: each text is in the prompt once, in order.

The templates refuse the second message, or leave one of them out without a word; the others take
them all, and get them as they are.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest

from infer.errors import RequestError
from infer.text.chat_template import ChatTemplate
from infer.text.system_messages import with_one_system
from infer.text.template_probes import find_abilities
from tests.support.tool_conversations import END, LOOP, OWN, QUESTION, TEMPLATES, TOOLS, WEATHER

BEGINNING = (  # Qwen 3.5's
    TOOLS + LOOP + "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }}" + END
)
ALTERNATING = (  # Mistral's: after one system message, users and answers alternate
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}" + END
)
FIRST = (  # gpt-oss's and SmolLM3's: the first one is the head, further ones are left out
    "<head>{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + LOOP
    + "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}"
    + END
)
LAST = (  # DeepSeek R1's: each one replaces the one before
    "{% set ns = namespace(rules='') %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.rules = m.content %}{% endif %}"
    "{% endfor %}{{ ns.rules }}"
    + LOOP
    + "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}"
    + END
)
TWICE = (  # the head repeats what the loop renders again
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + LOOP
    + "{% if not (loop.first and loop.length == 2) %}<{{ m.role }}>{{ m.content }}{% endif %}"
    + END
)
WITH_TOOLS = (  # takes several, but only the first one beside tools
    "{% if tools %}{{ messages[0].content }}{{ tools | tojson }}{% endif %}"
    + LOOP
    + "{% if not tools or m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}"
    + END
)
PARTS = (  # content is a list of parts, of one system message
    LOOP + "{% if m.role != 'system' or loop.first %}<{{ m.role }}>"
    "{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endif %}" + END
)
ONE = {
    "beginning": BEGINNING,
    "alternating": ALTERNATING,
    "first": FIRST,
    "last": LAST,
    "twice": TWICE,
    "with tools": WITH_TOOLS,
    "parts": PARTS,
    "gemma3": (TEMPLATES / "gemma3.jinja").read_text(encoding="utf-8"),
}
"""Templates that do not render all of several system messages."""
RULES = ("Be kind.", "Be short.", "Be clear.", "Be quick.")
FORMS: dict[str, Any] = {
    "text": lambda text: text,
    "a part": lambda text: [{"type": "text", "text": text}],
}


@cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def chats(count: int) -> list[list[dict[str, Any]]]:
    """`count` messages with each of the two roles of rules, and a question; in every form."""
    made = []
    for roles in itertools.product(("system", "developer"), repeat=count):
        for form in FORMS.values():
            rules = zip(roles, RULES, strict=False)
            made.append([{"role": r, "content": form(text)} for r, text in rules] + [QUESTION])
    return made


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("tools", [None, WEATHER], ids=["plain", "tools"])
def test_every_text_is_in_the_prompt_once(name: str, count: int, tools: Any) -> None:
    shown, joined = template(ONE[name]), "\n\n".join(RULES[:count])
    assert not shown.abilities.takes_several_systems
    for messages in chats(count):
        text = shown.render(messages, tools=tools)
        assert text.count(joined) == 1, (messages, text)
        assert all(text.count(rule) == 1 for rule in RULES[:count]), text
        assert text.index(joined) < text.index("Weather?")
        # The message alone, written by hand, gives the same prompt.
        alone = [{"role": "system", "content": joined}, QUESTION]
        assert text == shown.render(alone, tools=tools)


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "plain", "llama32"])
def test_a_template_that_takes_several_gets_them_as_they_are(name: str) -> None:
    shown = template(OWN[name][0])
    assert shown.abilities.takes_several_systems
    for messages in chats(3):
        text = shown.render(messages)
        assert "\n\n".join(RULES[:2]) not in text
        places = [text.index(rule) for rule in RULES[:3]]
        assert places == sorted(places)
        assert text.count("system") == 3


def test_a_template_without_the_role_refuses_as_before() -> None:
    strict = template(OWN["strict"][0])
    assert not strict.abilities.takes_system
    for messages in chats(2):
        with pytest.raises(RequestError, match="alternate!"):
            strict.render(messages)


def test_only_the_beginning_is_joined() -> None:
    """A later system message stays where it is: what a template makes of it is another matter."""
    later = {"role": "system", "content": "Be late."}
    with pytest.raises(RequestError, match="must be at the beginning"):
        template(BEGINNING).render([{"role": "system", "content": "a"}, QUESTION, later])
    messages = [{"role": "system", "content": c, "name": "n"} for c in ("a", "", "b")]
    kept = [QUESTION, later]
    made = with_one_system([*messages, *kept])
    assert made == [{"role": "system", "content": "a\n\nb", "name": "n"}, *kept]
    assert [m["content"] for m in messages] == ["a", "", "b"]
    assert with_one_system(kept) == kept
    assert with_one_system([]) == []
    # Parts are text, without white space that nobody wrote.
    two = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    assert with_one_system([{"role": "system", "content": two}, messages[2]])[0]["content"] == (
        "Be kind.\n\nb"
    )
    # A part that is no text stays one; text around it keeps its blank lines.
    image = {"type": "image", "url": "x"}
    parts = with_one_system([messages[0], {"role": "system", "content": [image]}, QUESTION])[0]
    blank = {"type": "text", "text": "\n\n"}
    assert parts["content"] == [{"type": "text", "text": "a"}, blank, image]


def test_no_text_is_continued_twice() -> None:
    messages = [{"role": "system", "content": rule} for rule in RULES[:2]]
    text = template(BEGINNING).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text == "<system>Be kind.\n\nBe short."


def test_a_probe_that_fails_is_no_ability() -> None:
    def refuses(messages: Any, variables: Any) -> str:
        raise RequestError("no")

    assert not find_abilities(refuses, ()).takes_several_systems
