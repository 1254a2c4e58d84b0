"""What people do with the page, by mouse and by keyboard, in a real browser on a real server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.page_driver import PHONE, Reader, Wire
from tests.support.server_process import Served

pytestmark = pytest.mark.browser

T = TypeVar("T")
NewReader = Callable[..., Reader]
LONG = {"max_tokens": 1800, "temperature": 0}
"""settings of an answer that takes a while"""


def long_settings(reader: Reader) -> None:
    """Let answers be long: they do not end at the end token."""
    page = reader.page
    reader.settings(LONG)
    page.click("header.topbar button:last-child")
    page.check("#setting-ignore_eos")
    page.click("dialog footer button.main")
    page.wait_for_selector("dialog", state="detached")


def in_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of a coroutine; Playwright runs an event loop in this thread already."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result()


def test_first_visit_to_first_answer(reader: Reader) -> None:
    page = reader.page
    page.wait_for_selector(".welcome")
    page.click(".examples button >> nth=0")
    page.wait_for_selector(".message.assistant .figures")
    assert len(reader.answers()[0]) > 100
    assert reader.titles() == ["Tell me a story."]
    assert "tokens" in page.inner_text(".message.assistant .figures")
    assert page.title() == "Tell me a story. · infer"


def test_by_keyboard_alone(reader: Reader) -> None:
    page, keys = reader.page, reader.page.keyboard
    page.focus(".composer textarea")
    keys.type("What is")
    keys.press("Shift+Enter")
    keys.type("17 + 25?")
    keys.press("Enter")
    page.wait_for_selector(".message.assistant .figures")
    assert reader.questions() == ["What is\n17 + 25?"]
    keys.press("ArrowUp")  # edit one's last message
    page.wait_for_selector("textarea.editor:focus")
    keys.press("Control+A")
    keys.type("What is 3 * 4?")
    keys.press("Enter")
    page.wait_for_selector(".message.user .siblings")
    page.wait_for_selector(".message.assistant .figures")
    assert reader.questions() == ["What is 3 * 4?"]
    keys.press("Escape")
    keys.press("Control+k")
    page.wait_for_selector(".sidebar .search:focus")
    keys.type("nothing")
    reader.until("!document.querySelector('.conversations button.open')")
    keys.press("Control+A")
    keys.type("what")
    page.wait_for_selector(".conversations button.open")
    keys.press("Control+A")
    keys.press("Backspace")
    keys.press("Control+Shift+O")
    page.wait_for_selector(".composer textarea:focus")
    page.wait_for_selector(".welcome")
    page.focus(".conversations button.open")
    keys.press("F2")
    page.wait_for_selector("input.rename:focus")
    keys.press("Control+A")
    keys.type("Sums")
    keys.press("Enter")
    reader.until("document.querySelector('.conversations button.open')?.title == 'Sums'")
    page.focus(".conversations button.open")
    keys.press("Enter")
    page.wait_for_selector(".message.user")
    page.focus(".conversations button.open")
    keys.press("Delete")
    page.wait_for_selector("button.sure:focus")
    keys.press("Enter")
    page.wait_for_selector(".conversations button.open", state="detached")
    page.focus("header.topbar button:last-child")
    keys.press("?")
    page.wait_for_selector("help-dialog dialog[open]")
    keys.press("Escape")
    page.wait_for_selector("help-dialog", state="detached")


def test_enter_inside_a_composition_does_not_send(reader: Reader) -> None:
    page = reader.page
    page.fill(".composer textarea", "ni")
    page.evaluate(
        "document.querySelector('.composer textarea').dispatchEvent(new KeyboardEvent("
        "'keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true}))"
    )
    page.wait_for_timeout(200)
    assert reader.questions() == []
    assert page.input_value(".composer textarea") == "ni"


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stop_frees_the_pages(reader: Reader, server: Served, way: str) -> None:
    page = reader.page
    long_settings(reader)
    before = in_thread(server.stats)
    reader.send("Tell me a story.")
    reader.until("document.querySelector('text-view')?.innerText.length > 20")
    assert not page.locator(".waiting").count()
    if way == "button":
        page.click("button.stop")
    else:
        page.keyboard.press("Escape")
    page.wait_for_selector(".ending")
    in_thread(lambda: server.is_back({**before, "fds": 10**6, "tasks": 10**6}, 5))
    kept = reader.answers()[0]
    assert len(kept) > 20
    page.reload()
    page.wait_for_selector(".ending")
    assert reader.answers()[0] == kept


def test_a_reload_keeps_the_answer_so_far_and_it_goes_on_without_a_seam(
    far_reader: Reader, wire: Wire
) -> None:
    reader, page = far_reader, far_reader.page
    reader.settings({"max_tokens": 300, "temperature": 0})
    whole = reader.ask("Tell me a story about a fox.")
    wire.pause_s = 0.01
    page.click(".message.assistant .again")
    reader.until("document.querySelector('text-view')?.innerText.length > 60")
    page.click("button.stop")
    page.wait_for_selector(".ending")
    wire.pause_s = 0.0
    begun = reader.answers()[0]
    assert whole.startswith(begun)
    assert len(begun) < len(whole)
    page.reload()
    page.click(".ending button")
    reader.until("document.querySelector('.siblings')?.innerText.includes('3/3')")
    page.wait_for_selector(".message.assistant .again:enabled")
    assert reader.answers()[0] == whole


def test_two_tabs_see_the_same_conversations(reader: Reader) -> None:
    other = reader.open()
    reader.ask("What is 2 + 3?")
    other.wait_for_selector("text=What is 2 + 3?")
    other.click(".conversations button.open")
    other.wait_for_selector(".message.assistant .figures")
    assert reader.answers(other) == reader.answers()
    reader.ask("What is 4 + 4?", other)
    reader.until("document.querySelectorAll('.message.user').length == 2")
    assert reader.questions() == ["What is 2 + 3?", "What is 4 + 4?"]


def test_two_conversations_stream_at_once_and_do_not_mix(reader: Reader) -> None:
    page = reader.page
    long_settings(reader)
    reader.send("Tell me a story about a fox.")
    page.wait_for_selector(".busy-dot")
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector(".welcome")
    reader.send("Tell me a story about a boat.")
    reader.until("document.querySelectorAll('.busy-dot').length == 2")
    reader.until("!document.querySelector('.busy-dot')")
    texts = {}
    for title in ("a fox.", "a boat."):
        page.click(f".conversations button.open:has-text('{title}')")
        reader.until(f"document.querySelector('.own-text')?.innerText.includes('{title}')")
        page.wait_for_selector(".message.assistant .figures")
        texts[title] = reader.answers()[0]
    assert len(set(texts.values())) == 2


def test_edit_regenerate_and_walk_the_branches(reader: Reader) -> None:
    page = reader.page
    first = reader.ask("What is 5 + 6?")
    page.hover(".message.user")
    page.click(".message.user .edit")
    page.fill("textarea.editor", "Tell me a story.")
    page.click(".message.user .main")
    page.wait_for_selector(".message.assistant .figures")
    page.click(".message.assistant .again")
    reader.until(
        "document.querySelector('.message.assistant .siblings')?.innerText.includes('2/2')"
    )
    page.wait_for_selector(".message.assistant .again:enabled")
    assert "2/2" in page.inner_text(".message.user .siblings")
    page.click(".message.user .siblings button >> nth=0")
    reader.until("document.querySelector('.own-text').innerText == 'What is 5 + 6?'")
    assert reader.answers() == [first]
    page.reload()
    page.wait_for_selector(".message.assistant .figures")
    assert reader.answers() == [first]


def test_go_on_from_a_token(reader: Reader) -> None:
    page = reader.page
    reader.settings({"max_tokens": 60, "temperature": 0})
    whole = reader.ask("Tell me a story.")
    page.click(".message.assistant .toggle:not(.figures)")
    page.wait_for_selector(".tokens button >> nth=8")
    page.click(".tokens button >> nth=8")
    page.wait_for_selector(".alternatives")
    kept = "".join(page.locator(".tokens button").all_inner_texts()[:8])
    page.click(".alternatives button >> nth=0")
    reader.until(
        "document.querySelector('.message.assistant .siblings')?.innerText.includes('2/2')"
    )
    page.wait_for_selector(".message.assistant .again:enabled")
    branch = reader.answers()[0]
    start = "".join(kept.split("·")).strip()
    assert branch != whole
    assert branch[: len(start) - 8] == whole[: len(start) - 8]


def test_what_happened_shows_the_reused_prefix(reader: Reader) -> None:
    page = reader.page
    reader.ask("Tell me a story about a girl named Mia and a red kite.")
    reader.ask("Who has the kite?")
    page.click(".message.assistant .figures >> nth=1")
    page.wait_for_selector(".timeline li")
    panel = page.inner_text("what-happened")
    assert "prompt tokens (" in panel
    assert "Admitted to the batch" in panel
    assert "First token." in panel
    cached = int(page.locator("what-happened dt:has-text('from the cache') + dd").inner_text())
    assert cached > 100


def test_files_go_with_a_message_and_others_are_refused_with_a_reason(
    reader: Reader, tmp_path: Path
) -> None:
    page = reader.page
    good, binary, latin, long = (tmp_path / n for n in ("a.txt", "b.bin", "c.txt", "d.txt"))
    good.write_text("The password is swordfish. ```x```")
    binary.write_bytes(b"ab\0cd")
    latin.write_bytes("é".encode("latin-1"))
    long.write_text("x" * (1024 * 1024 + 1))
    page.set_input_files(
        ".composer input[type=file]", [str(p) for p in (good, binary, latin, long)]
    )
    page.wait_for_selector(".fault >> nth=2")
    assert page.locator(".composer .chip").count() == 1
    faults = " ".join(page.locator(".fault").all_inner_texts())
    assert "b.bin is a binary file" in faults
    assert "c.txt is not UTF-8" in faults
    assert "d.txt has 1 MiB" in faults
    page.wait_for_selector(".meter")
    reader.ask("What is in it?")
    page.click(".message.user .chip summary")
    assert "swordfish" in page.inner_text(".message.user .chip pre")


def test_a_schema_holds_and_the_answer_is_checked(reader: Reader) -> None:
    page = reader.page
    page.click("header.topbar button:last-child")
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Mia", "Ben"]}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    page.fill("dialog textarea.mono >> nth=0", json.dumps(schema))
    page.keyboard.press("Tab")
    page.click("dialog footer button.main")
    answer = reader.ask("Who are you?")
    assert set(json.loads(answer)) == {"name", "age"}
    page.wait_for_selector(".fits")


def test_wrong_settings_are_named_and_not_sent(reader: Reader) -> None:
    page = reader.page
    page.click("header.topbar button:last-child")
    page.fill("#setting-temperature", "7")
    page.fill("#setting-top_p", "x")
    page.keyboard.press("Tab")
    page.wait_for_selector(".fault-text >> nth=1")
    assert "must be from 0.01 to 2" in page.inner_text("dialog")
    page.click("dialog footer button.main")
    assert reader.ask("What is 1 + 1?")


def test_export_to_a_clean_profile(reader: Reader, new_reader: NewReader, tmp_path: Path) -> None:
    answer = reader.ask("What is 7 + 8?")
    reader.page.click("header.topbar button:last-child")
    with reader.page.expect_download() as download:
        reader.page.click("transfer-panel button >> nth=0")
    file = tmp_path / "all.json"
    download.value.save_as(file)
    saved = json.loads(file.read_text())
    saved["conversations"].append({"conversation": {"title": "broken"}, "messages": []})
    file.write_text(json.dumps(saved))
    other = new_reader()
    other.page.click("header.topbar button:last-child")
    other.page.set_input_files("transfer-panel input", str(file))
    other.page.wait_for_selector("transfer-panel .notice")
    said = other.page.inner_text("transfer-panel .notice")
    assert "1 conversation was imported" in said
    assert "Left out: broken" in said
    other.page.click("dialog footer button.main")
    other.page.click(".conversations button.open")
    other.page.wait_for_selector(".message.assistant .figures")
    assert other.answers() == [answer]


def test_a_conversation_on_the_server_is_there_in_a_second_browser(
    reader: Reader, new_reader: NewReader
) -> None:
    reader.page.click("header.topbar button:last-child")
    reader.page.check("text=Keep new conversations on the server")
    reader.page.click("dialog footer button.main")
    answers = [reader.ask("What is 9 + 1?"), reader.ask("What is 2 + 2?")]
    assert reader.answers() == answers
    other = new_reader()
    other.page.click("header.topbar button:last-child")
    other.page.check("text=Show conversations that are on the server")
    other.page.click("dialog footer button.main")
    other.page.click(".conversations button.open")
    other.page.wait_for_selector(".message.assistant")
    assert other.questions() == ["What is 9 + 1?", "What is 2 + 2?"]
    assert [text.split()[0] for text in other.answers()] == [a.split()[0] for a in answers]
    other.page.hover(".conversations li")
    other.page.click(".conversations .acts button >> nth=2")
    other.page.click("button.sure")
    other.page.wait_for_selector(".conversations li", state="detached")


def test_an_engine_that_dies_leaves_no_seam(reader: Reader, server: Served) -> None:
    page = reader.page
    reader.settings({"max_tokens": 400, "temperature": 0})
    whole = reader.ask("Tell me a story about a fox.")
    page.click(".message.assistant .again")
    reader.until("document.querySelector('text-view')?.innerText.length > 40")
    engine = server.engine_pid()
    assert engine
    os.kill(engine, signal.SIGKILL)
    page.wait_for_selector(".message.assistant .again:enabled", timeout=60_000)
    assert reader.answers()[0] == whole


def test_offline_and_back(reader: Reader) -> None:
    page = reader.page
    reader.ask("What is 1 + 2?")
    reader.context.set_offline(True)
    reader.send("What is 3 + 3?")
    page.wait_for_selector(".fault")
    assert "cannot be reached" in page.inner_text(".fault")
    assert page.input_value(".composer textarea") == "What is 3 + 3?"
    assert reader.questions() == ["What is 1 + 2?"]
    reader.context.set_offline(False)
    page.wait_for_selector("button.send:enabled")
    page.click("button.send")
    reader.until("document.querySelectorAll('.message.assistant .figures').length == 2")
    assert reader.questions() == ["What is 1 + 2?", "What is 3 + 3?"]


def test_a_connection_that_is_lost_in_mid_answer(far_reader: Reader, wire: Wire) -> None:
    reader, page = far_reader, far_reader.page
    reader.settings({"max_tokens": 300, "temperature": 0})
    whole = reader.ask("Tell me a story about a fox.")
    wire.pause_s = 0.01
    page.click(".message.assistant .again")
    reader.until("document.querySelector('text-view')?.innerText.length > 60")
    wire.cut()
    page.wait_for_selector(".ending")
    wire.pause_s = 0.0
    assert "connection was lost" in page.inner_text(".ending")
    begun = reader.answers()[0]
    assert whole.startswith(begun)
    assert len(begun) < len(whole)
    page.click(".ending button")
    reader.until("document.querySelector('.siblings')?.innerText.includes('3/3')")
    page.wait_for_selector(".message.assistant .again:enabled")
    assert reader.answers()[0] == whole


def test_raw_text_is_continued(reader: Reader) -> None:
    page = reader.page
    page.click("text=Text >> nth=0")
    page.fill("raw-view textarea", "Once upon a time")
    page.click("raw-view button.main")
    reader.until("document.querySelector('raw-view textarea').value.length > 100")
    page.wait_for_selector("raw-view button.plain:enabled")
    assert page.input_value("raw-view textarea").startswith("Once upon a time")
    page.click("raw-view button.plain >> nth=0")
    page.wait_for_selector("token-view .tokens button >> nth=10")


def test_on_a_phone_and_in_chinese(new_reader: NewReader) -> None:
    reader = new_reader(locale="zh-CN", viewport=PHONE)
    page = reader.page
    assert page.evaluate("document.documentElement.lang") == "zh"
    page.wait_for_selector("text=与 infer-demo 对话")
    reader.ask("Tell me a story.")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.click(".menu-button")
    page.wait_for_selector(".sidebar .search:visible")
    page.click(".conversations button.open")
    page.wait_for_selector(".app:not(.drawer)")


def test_no_storage_is_said_and_the_page_works(new_reader: NewReader) -> None:
    reader = new_reader()
    reader.page.add_init_script(
        "Object.defineProperty(window, 'indexedDB', {get() { throw new DOMException('no') }})"
    )
    reader.page.reload()
    reader.page.wait_for_selector(".notice.bad")
    assert "will be forgotten" in reader.page.inner_text(".notice.bad")
    assert reader.ask("What is 2 + 2?")
