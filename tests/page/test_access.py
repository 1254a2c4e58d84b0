"""Whether everybody can use the page: axe-core in the page's states, light and dark, and the sizes.

axe-core comes from `ui/node_modules` (`npm ci` in `ui/`); the tests are skipped without it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.page_driver import PHONE, Reader

pytestmark = pytest.mark.browser

AXE = Path(__file__).parents[2] / "ui" / "node_modules" / "axe-core" / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa"]
MARKDOWN = (
    "# A title\n\nText with `code`, **bold** and [a link](https://example.org).\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    "```python\ndef f(x):  # a comment\n    return 'x' + 1\n```\n\n"
    "> quoted\n\n$$\\frac{a}{b}$$\n"
)


def violations(page: Any) -> list[str]:
    """What axe-core finds, each with its elements."""
    page.evaluate(
        AXE.read_text(encoding="utf-8") + ";0"
    )  # not a script element, which the policy forbids
    page.wait_for_timeout(100)
    found = page.evaluate(
        "async (tags) => (await axe.run(document, {runOnly: {type: 'tag', values: tags}}))"
        ".violations.map((v) => `${v.id}: ` + v.nodes.map((n) => n.html.slice(0, 150)"
        " + ' ' + (n.any[0]?.message ?? '')).join(' | '))",
        RULES,
    )
    return list(found)


def welcome(_: Reader) -> None:
    pass


def answered(reader: Reader) -> None:
    reader.ask("What is 2 + 2?")


def branched(reader: Reader) -> None:
    answered(reader)
    reader.page.click(".message.assistant .again")
    reader.page.wait_for_selector(".message.assistant .siblings")
    reader.page.wait_for_selector(".message.assistant .again:enabled")


def editing(reader: Reader) -> None:
    answered(reader)
    reader.page.click(".message.user .edit")


def happened(reader: Reader) -> None:
    answered(reader)
    reader.open_happened()


def tokens(reader: Reader) -> None:
    answered(reader)
    reader.open_tokens(0)


def settings(reader: Reader) -> None:
    reader.open_settings()
    reader.page.fill("#setting-temperature", "7")
    reader.page.keyboard.press("Tab")
    reader.page.wait_for_selector(".fault-text")


def help_page(reader: Reader) -> None:
    reader.page.focus("header.topbar button:last-child")
    reader.page.keyboard.press("?")
    reader.page.wait_for_selector("help-dialog dialog[open]")


def refused(reader: Reader) -> None:
    reader.context.set_offline(True)
    reader.send("Hello")
    reader.page.wait_for_selector(".fault")
    reader.context.set_offline(False)


def deleting(reader: Reader) -> None:
    answered(reader)
    reader.page.focus(".conversations button.open")
    reader.page.keyboard.press("Delete")
    reader.page.wait_for_selector("button.undo")


def raw_text(reader: Reader) -> None:
    reader.page.goto(f"{reader.url}/#/text")
    reader.page.fill("raw-view textarea", "Once upon a time")
    reader.page.click("raw-view button.plain >> nth=0")
    reader.page.wait_for_selector("token-view .tokens button")


def rich(reader: Reader) -> None:
    """An answer with everything that Markdown has, as a text of the reader's own."""
    answered(reader)
    reader.page.click(".message.assistant .edit")
    reader.page.fill("textarea.editor", MARKDOWN)
    reader.page.click(".message.assistant .main")
    reader.page.wait_for_selector("math")
    reader.page.wait_for_selector(".hljs-keyword")


def engine(reader: Reader) -> None:
    reader.open_engine()
    reader.page.check(".engine-controls input[type=checkbox]")
    reader.page.wait_for_selector("engine-table table")


def streaming(reader: Reader) -> None:
    """An answer under way, with the strip above the field."""
    reader.settings({"max_tokens": 1900, "ignore_eos": True})
    reader.send("Tell me a story.")
    reader.page.wait_for_selector(".strip")


def several(reader: Reader) -> None:
    """Four answers side by side."""
    reader.settings({"max_tokens": 30})
    reader.page.select_option("select.answers", "4")
    reader.send("Tell me a story.")
    reader.page.wait_for_selector(".together button.choose >> nth=3")


def full(reader: Reader) -> None:
    """A full context, and a draft that is too long for it."""
    reader.settings({"ignore_eos": True, "temperature": 0, "max_tokens": 5000})
    reader.send("the fox went to the river and " * 240)
    reader.until("document.querySelector('.ending.full')", timeout_s=90)
    reader.page.fill(".composer textarea", "the fox went to the river and " * 80)
    reader.page.wait_for_selector(".composer .full")


STATES: list[Callable[[Reader], None]] = [
    welcome,
    answered,
    branched,
    editing,
    happened,
    tokens,
    settings,
    help_page,
    refused,
    deleting,
    raw_text,
    rich,
    engine,
    streaming,
    several,
    full,
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_axe_finds_nothing(
    new_reader: Callable[..., Reader], state: Callable[[Reader], None], scheme: str
) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not here: run `npm ci` in ui/")
    reader = new_reader(color_scheme=scheme, reduced_motion="reduce")
    state(reader)
    assert violations(reader.page) == []


def test_axe_would_find_something(reader: Reader) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not here: run `npm ci` in ui/")
    reader.page.evaluate(
        "document.querySelector('main').append(document.createElement('input'),"
        " Object.assign(document.createElement('p'), {textContent: 'x', className: 'faint'}))"
    )
    assert any(each.startswith("label:") for each in violations(reader.page))


@pytest.mark.parametrize("language", ["en-GB", "zh-CN"])
@pytest.mark.parametrize(
    "state", [answered, tokens, settings, happened, rich, raw_text, engine, several, full]
)
def test_nothing_is_wider_than_a_phone(
    new_reader: Callable[..., Reader], state: Callable[[Reader], None], language: str
) -> None:
    reader = new_reader(viewport=PHONE, locale=language)
    state(reader)
    page = reader.page
    width = page.evaluate(
        "Math.max(...[document.documentElement,"
        " ...document.querySelectorAll('main, dialog .content')]"
        ".map((each) => each.scrollWidth - each.clientWidth))"
    )
    assert width <= 1


def test_the_live_region_says_when_it_answers_and_when_it_is_done(reader: Reader) -> None:
    page = reader.page
    page.evaluate(
        "window.said = []; new MutationObserver(() => said.push("
        "document.querySelector('[role=status].unseen').textContent)).observe("
        "document.querySelector('[role=status].unseen'),"
        " {childList: true, characterData: true, subtree: true})"
    )
    reader.ask("Tell me a story.")
    reader.until("window.said.at(-1) === 'Done'")
    assert [text for text in page.evaluate("window.said") if text] == ["Answering", "Done"]


def test_targets_are_large_enough(reader: Reader) -> None:
    """WCAG 2.5.8: 24 by 24 pixels, but for links in a text."""
    happened(reader)
    small = reader.page.evaluate(
        "[...document.querySelectorAll('button, input, select, summary')].filter((each) => {"
        " const box = each.getBoundingClientRect();"
        " return box.width && (box.width < 24 || box.height < 18)"
        " && !each.classList.contains('scrim')"
        " && each.type !== 'checkbox'; }).map((each) => each.outerHTML.slice(0, 120))"
    )
    assert small == []
