"""Reading: what was clicked stays where it is, and the view follows a growing answer only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.page_driver import Reader

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
VIEW = "document.querySelector('.view')"
TO_END = f"({VIEW}.scrollHeight - {VIEW}.scrollTop - {VIEW}.clientHeight)"


def top_of(reader: Reader, selector: str) -> float:
    return float(reader.page.locator(selector).first.evaluate("e => e.getBoundingClientRect().top"))


def long_conversation(tmp_path: Path, count: int) -> Path:
    """An export with one conversation of so many messages."""
    base = {"id": "long", "title": "long", "created": 1, "updated": 1, "pinned": False}
    base |= {"system": "", "tools": "", "schema": "", "toolChoice": "auto"}
    roles = ("user", "assistant")
    messages = [
        {"id": str(i), "conversation": "long", "parent": str(i - 1) if i else None, "created": i}
        | {"role": roles[i % 2], "content": f"Message {i}. " + "words and words " * (1 + i % 7)}
        for i in range(count)
    ]
    path = tmp_path / "long.json"
    listed = [{"conversation": {**base, "sampling": {}, "chosen": {}}, "messages": messages}]
    document = {"format": "infer-conversations", "version": 1, "conversations": listed}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def opened(reader: Reader, path: Path) -> None:
    reader.open_settings()
    reader.page.set_input_files("transfer-panel input[type=file]", str(path))
    reader.page.wait_for_selector("transfer-panel .notice")
    reader.close_dialog()
    reader.use(".conversations button.open")
    reader.page.wait_for_selector(".message.assistant")


@pytest.mark.parametrize("panel", [".figures", ".toggle:not(.figures)"])
def test_a_panel_opens_below_the_line_that_was_clicked(person: Reader, panel: str) -> None:
    page = person.page
    person.settings({"max_tokens": 120, "temperature": 0, "ignore_eos": True})
    for text in ("Tell me a story about a fox.", "Tell me a story about a boat."):
        person.ask(text)
    line = f".message.assistant {panel}"
    page.locator(line).last.evaluate("e => e.scrollIntoView({block: 'center'})")
    page.wait_for_selector(".composer .meter")
    page.wait_for_timeout(1000)  # whatever follows an answer is over
    count = page.locator(line).count()
    where = f"{line} >> nth={count - 1}"
    if person.hands == "keyboard":
        page.locator(where).focus()
        before = top_of(person, where)
        page.keyboard.press("Enter")
    else:
        before = top_of(person, where)
        person.use(where)
    page.wait_for_selector("what-happened .timeline li, token-view .tokens button")
    page.wait_for_timeout(300)
    assert abs(top_of(person, where) - before) < 2
    panel_top = top_of(person, "what-happened, token-view")
    assert panel_top > before


def test_earlier_messages_keep_the_place_and_a_button_leads_to_the_latest(
    person: Reader, tmp_path: Path
) -> None:
    page = person.page
    opened(person, long_conversation(tmp_path, 150))
    person.until(f"{TO_END} < 4")
    assert not page.locator("button.latest").count()
    page.evaluate(f"{VIEW}.scrollTop = 0")
    page.wait_for_selector("button.latest")
    first = "chat-message"
    text = page.locator(first).first.inner_text()
    before = top_of(person, first)
    person.use("button.earlier")
    person.until("document.querySelectorAll('chat-message').length === 120")
    page.wait_for_timeout(200)
    now = page.locator("chat-message", has_text=text.split(".")[0] + ".").first
    assert abs(now.evaluate("e => e.getBoundingClientRect().top") - before) < 3
    if person.hands == "keyboard":  # 360 buttons are between, and each would move the view
        page.focus("button.latest")
        page.keyboard.press("Enter")
    else:
        person.use("button.latest")
    person.until(f"{TO_END} < 4")
    page.wait_for_selector("button.latest", state="detached")


def test_the_place_is_there_after_a_reload(person: Reader, tmp_path: Path) -> None:
    page = person.page
    opened(person, long_conversation(tmp_path, 50))
    person.until(f"{TO_END} < 4")
    page.locator("chat-message >> nth=20").evaluate("e => e.scrollIntoView({block: 'start'})")
    page.wait_for_timeout(500)
    before = top_of(person, "chat-message >> nth=20")
    page.reload()
    page.wait_for_selector("chat-message >> nth=20")
    person.until(f"{TO_END} > 50")
    page.wait_for_timeout(300)
    assert abs(top_of(person, "chat-message >> nth=20") - before) < 4


def test_the_view_follows_an_answer_until_the_reader_scrolls_back(reader: Reader) -> None:
    page = reader.page
    reader.settings({"max_tokens": 1500, "temperature": 0, "ignore_eos": True})
    reader.send("Tell me a story.")
    reader.until(f"{VIEW}.scrollHeight > {VIEW}.clientHeight + 300")
    reader.until(f"{TO_END} < 60")
    page.evaluate(f"{VIEW}.scrollTop -= 250")
    page.wait_for_selector("button.latest")
    at = page.evaluate(f"{VIEW}.scrollTop")
    page.wait_for_timeout(300)
    assert page.evaluate(f"{VIEW}.scrollTop") == at
