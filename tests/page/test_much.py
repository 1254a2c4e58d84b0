"""Much of everything: conversations, long answers, damaged records; the page stays usable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.page_driver import Reader

pytestmark = pytest.mark.browser

PARAGRAPH = "One **day** a little fox went to the `old` mill and sang.\n\n- one\n- two\n\n"
LONG = PARAGRAPH * 6000  # 100,000 tokens and more
LINE = "fox " * 250_000


def conversation(name: str, *texts: str) -> dict[str, Any]:
    """A conversation of questions and answers by turns, in the form of an export."""
    own = {"id": name, "title": name, "created": 1, "updated": 1, "pinned": False, "system": ""}
    rest = {"tools": "", "toolChoice": "auto", "schema": "", "sampling": {}, "chosen": {}}
    messages = [
        {
            "id": f"{name}-{i}",
            "conversation": name,
            "parent": f"{name}-{i - 1}" if i else None,
            "role": "assistant" if i % 2 else "user",
            "content": text,
            "created": i,
        }
        for i, text in enumerate(texts)
    ]
    return {"conversation": {**own, **rest}, "messages": messages}


def bring(reader: Reader, path: Path, *conversations: dict[str, Any]) -> None:
    """Import conversations."""
    page = reader.page
    document = {"format": "infer-conversations", "version": 1, "conversations": conversations}
    path.write_text(json.dumps(document), encoding="utf-8")
    reader.open_settings()
    page.set_input_files("transfer-panel input", str(path))
    page.wait_for_selector("transfer-panel .notice")
    page.click("dialog footer button.main")
    page.wait_for_selector("dialog", state="detached")


def test_300_conversations(reader: Reader, tmp_path: Path) -> None:
    page = reader.page
    many = [conversation(f"Number {i}", f"question {i}", f"answer {i}") for i in range(300)]
    bring(reader, tmp_path / "many.json", *many)
    reader.until("document.querySelectorAll('.conversations button.open').length == 300")
    page.fill(".sidebar .search", "number 217")
    reader.until("document.querySelectorAll('.conversations button.open').length == 1")
    page.click(".conversations button.open")
    page.wait_for_selector("text=answer 217")
    page.fill(".sidebar .search", "answer 118")  # in a message, not in a title
    reader.until("document.querySelector('.conversations button.open')?.title == 'Number 118'")
    page.reload()
    reader.until("document.querySelectorAll('.conversations button.open').length == 300")
    page.wait_for_selector("text=answer 217")


@pytest.mark.parametrize(("name", "text"), [("answer", LONG), ("line", LINE)])
def test_a_text_of_a_megabyte(reader: Reader, tmp_path: Path, name: str, text: str) -> None:
    page = reader.page
    bring(reader, tmp_path / "long.json", conversation(name, "question", text), conversation("b"))
    page.click(f".conversations button.open:has-text('{name}')")
    reader.until("document.querySelector('text-view')?.textContent.length > 300000")
    page.fill(".composer textarea", "still here")
    assert page.input_value(".composer textarea") == "still here"
    page.click(".conversations button.open:has-text('b')")
    page.wait_for_selector(".welcome")


def test_a_long_conversation_shows_its_end_first(reader: Reader, tmp_path: Path) -> None:
    page = reader.page
    texts = [f"text {i}" for i in range(400)]
    bring(reader, tmp_path / "deep.json", conversation("deep", *texts))
    page.click(".conversations button.open")
    page.wait_for_selector("text=text 399")
    assert page.locator("chat-message").count() == 60
    page.click("text=Show 340 earlier messages")
    reader.until("document.querySelectorAll('chat-message').length == 120")


def test_damaged_records_are_left_out_and_named(reader: Reader) -> None:
    page = reader.page
    reader.ask("What is 2 + 2?")
    page.evaluate(
        "new Promise((done) => { indexedDB.open('infer').onsuccess = (event) => {"
        " const change = event.target.result.transaction(['conversations', 'messages'],"
        " 'readwrite');"
        " change.objectStore('conversations').put({id: 'broken', title: 7});"
        " change.objectStore('messages').put({id: 'odd', conversation: 5});"
        " change.oncomplete = () => { event.target.result.close(); done(); } } })"
    )
    page.reload()
    page.wait_for_selector(".notice:has-text('broken')")
    page.click(".conversations button.open")
    page.wait_for_selector(".message.assistant")


@pytest.mark.parametrize(
    "text",
    ["", "{", "7", "null", '{"format": "infer-conversations"}', "[]", '{"conversations": 3}'],
)
def test_a_file_that_is_no_export_is_refused(reader: Reader, tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text, encoding="utf-8")
    page = reader.page
    reader.open_settings()
    page.set_input_files("transfer-panel input", str(path))
    page.wait_for_selector("transfer-panel .notice.bad")


def test_trees_that_are_none_are_left_out(reader: Reader, tmp_path: Path) -> None:
    circle = conversation("circle", "a", "b")
    circle["messages"][0]["parent"] = circle["messages"][1]["id"]
    orphan = conversation("orphan", "a", "b")
    orphan["messages"][0]["parent"] = "nobody"
    twice = conversation("twice", "a", "b")
    twice["messages"][1]["id"] = twice["messages"][0]["id"]
    path = tmp_path / "trees.json"
    trees = [circle, orphan, twice, conversation("good", "a", "b")]
    path.write_text(
        json.dumps({"format": "infer-conversations", "version": 1, "conversations": trees}),
        encoding="utf-8",
    )
    page = reader.page
    reader.open_settings()
    page.set_input_files("transfer-panel input", str(path))
    page.wait_for_selector("transfer-panel .notice")
    said = page.inner_text("transfer-panel .notice")
    assert "Left out: circle, orphan, twice" in said
    page.click("dialog footer button.main")
    assert reader.titles() == ["good"]


def test_an_export_of_llama_cpp_is_read(reader: Reader, tmp_path: Path) -> None:
    conv = {"id": "x", "name": "From there", "lastModified": 5, "currNode": "3"}
    messages = [
        {"id": "0", "convId": "x", "type": "root", "role": "system", "parent": None, "content": ""},
        {"id": "1", "type": "text", "role": "user", "parent": "0", "content": "Hi", "timestamp": 1},
        {"id": "2", "role": "assistant", "parent": "1", "content": "Old", "timestamp": 2},
        {"id": "3", "role": "assistant", "parent": "1", "content": "New", "timestamp": 3},
    ]
    path = tmp_path / "llama.json"
    path.write_text(json.dumps({"conv": conv, "messages": messages}), encoding="utf-8")
    page = reader.page
    reader.open_settings()
    page.set_input_files("transfer-panel input", str(path))
    page.wait_for_selector("transfer-panel .notice")
    page.click("dialog footer button.main")
    page.click(".conversations button.open:has-text('From there')")
    page.wait_for_selector(".message.assistant .siblings")
    assert reader.questions() == ["Hi"]
    assert reader.answers() == ["New"]
