"""Tests of templates that are made to take for ever, and that pass every probe at the start.

The hostile expressions of a test are branches of one template, chosen by the message: most of them
are the methods of the built-in types, with every combination of large arguments. Each ends with a
text or a `RequestError` within its CPU time, and the next chat is rendered as if nothing had been.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from infer.errors import LoadError, RequestError
from infer.text import chat_template
from infer.text.chat_template import ChatTemplate

VARIABLES: dict[str, Any] = {
    "s": "ab " * 400_000,
    "hex": "f" * 1_500_000,
    "n": 2**40,
    "m": 10**7,
    "f": 1e300,
    "l": list(range(100_000)),
    "d": {str(i): i for i in range(50_000)},
}
BIG = "(0).from_bytes(hex.encode(), 'big')"
"""An integer of 12 million bits."""
TABLE = {
    "an integer by an integer": f"{BIG} // (0).from_bytes(hex[:750000].encode(), 'big')",
    "the remainder": f"{BIG} % (0).from_bytes(hex[:750000].encode(), 'big')",
    "without from_bytes": "hex|int(0, 16) // hex[:750000]|int(0, 16)",
    "title": "(s * 30)|title|length",
    "a power": "n ** m",
    "a product": f"{BIG} * {BIG} * {BIG} * {BIG}",
    "a text of an integer": f"{BIG}|string",
    "lists": "(l * 100)|sort|length",
    "loops": "{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
    "fromkeys": "{}.fromkeys(s * 100)",
    "a text": "s * m",
    "compared": "(l * 1000) == (l * 1000)",
    "unique": "(s * 20)|unique|list|length",
    "replaced": "s.replace('a', s)",
    "joined": "s.join(l|map('string'))",
    "centered": "s.center(n)",
    "translated": "s.translate({97: s})",
    "urlize": "(('http://a' ~ s) * 20)|urlize|length",
    "striptags": "('<' * 10000000)|striptags|length",
    "pprint": "(d|pprint) * 1000",
    "batched": "l|batch(m, s)|list|length",
    "rounded": "f|round(n)",
    "grouped": "(l * 100)|groupby(0)|length",
    "wrapped": "(s * 50)|wordwrap(1, wrapstring=s)",
    "macro": "{% macro g(x) %}{{ g(x) }}{{ g(x) }}{% endmacro %}{{ g(1) }}",
    "printed": "{% for a in l %}{{ s }}{% endfor %}",
    "namespace": "{% set x = namespace(v=[1]) %}"
    "{% for a in l %}{% set x.v = [x.v, x.v] %}{% endfor %}{{ x.v }}",
}
SUBJECTS = {
    str: "s", bytes: "s.encode()", int: "(m ** 400)", float: "f", list: "l", dict: "d",
}  # fmt: skip
ARGUMENTS = ("", "n", "s", "l", "d", "s, s", "n, s", "s, n", "m", "s.encode(), 'big'", "l, n")


def methods() -> list[str]:
    """Every method of the built-in types with every combination of arguments."""
    return [
        f"{subject}.{name}({arguments})"
        for kind, subject in SUBJECTS.items()
        for name in dir(kind)
        if not name.startswith("_")
        for arguments in ARGUMENTS
    ]


def operators() -> list[str]:
    """Every operator between large values of every type, also of the size that they make."""
    values = [*SUBJECTS.values(), "n", BIG]
    signs = ("+", "-", "*", "/", "//", "%", "**", "~", "<", "==", "in")
    pairs = itertools.product(values, signs, values)
    return [f"{left} {sign} {right}" for left, sign, right in pairs]


def filters() -> list[str]:
    """Every filter of the environment on large values, with large arguments."""
    from jinja2.filters import FILTERS

    calls = ("", "(n)", "(s)", "(s, s)")
    return [
        f"{value}|{name}{call}"
        for name in sorted(FILTERS)
        for value in ("s", "l", "d", BIG)
        for call in calls
    ]


def template_of(expressions: Sequence[str]) -> ChatTemplate:
    """A template that has each expression as a branch, which a message asks for by its number."""
    branches = []
    for i, expression in enumerate(expressions):
        shown = expression if "{%" in expression else "{{ " + expression + " }}"
        branches.append(f"{{% if messages[0].content == '{i}' %}}{shown}{{% endif %}}")
    return ChatTemplate("".join(branches) + "end", {})


def chat(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def refusal_of(template: ChatTemplate, content: str) -> RequestError | None:
    try:
        text = template.render(chat(content), **VARIABLES)
    except RequestError as error:
        return error
    assert text.endswith("end")
    return None


def check(expressions: Sequence[str]) -> int:
    """Render all expressions; returns the number of those that were refused."""
    num_refused = 0
    # Few at a time: each is looked for in every rendering.
    for start in range(0, len(expressions), 100):
        template = template_of(some := expressions[start : start + 100])
        assert template.workers is not None
        for i in range(len(some)):
            refusal = refusal_of(template, str(i))
            if refusal is not None:
                assert (refusal.status, refusal.param) == (400, "messages")
                num_refused += 1
            if i % 20 == 0:
                assert template.render(chat("?")) == "end"
        assert template.render(chat("?")) == "end"
        template.rest()
    return num_refused


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 1)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("short_limits")
def test_what_is_known_to_take_for_ever_ends() -> None:
    some = list(TABLE.values())  # all of them: test_all_generated_expressions
    assert check([some[0], some[5]]) == 2


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("short_limits")
def test_some_of_the_generated_expressions() -> None:
    dice = random.Random(2)
    check([*dice.sample(methods(), 4), *dice.sample(operators(), 2), *dice.sample(filters(), 2)])


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_all_generated_expressions() -> None:
    everything = [*TABLE.values(), *methods(), *operators(), *filters()]
    assert len(everything) > 2000
    print(f"{len(everything)} expressions, {check(everything)} refused")


@pytest.mark.timeout(120)
def test_a_template_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many blocks take seconds and much memory to compile, in another process."""
    monkeypatch.delattr(chat_template, "TemplateRenderer")  # nothing is compiled in this one
    source = "".join(f"{{% block b{i} %}}{{{{ x }}}}{{% endblock %}}" for i in range(8_000))
    with contextlib.suppress(LoadError):  # it may take too much memory
        ChatTemplate(source, {})
