"""What people do with the page, in a real browser on a real server.

Each journey is made by mouse, by keyboard alone, and by touch on a phone that is set to Chinese.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.page_driver import ANSWERS, Hands, Reader, Wire
from tests.support.server_process import Served

pytestmark = pytest.mark.browser

T = TypeVar("T")
NewReader = Callable[..., Reader]
LONG = {"max_tokens": 1800, "temperature": 0, "ignore_eos": True}
"""Settings of an answer that takes a while: it does not end at the end token."""
DONE = ".message.assistant .again:enabled"


def in_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of a coroutine; Playwright runs an event loop in this thread already."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result()


def siblings_are(reader: Reader, shown: str) -> None:
    """Wait until the answer is this one of its versions, and complete."""
    where = "document.querySelector('.message.assistant .siblings')?.innerText"
    reader.until(f"{where}?.includes('{shown}')")
    reader.page.wait_for_selector(DONE)


def is_as_wide_as_its_window(reader: Reader) -> bool:
    """Whether nothing must be scrolled sideways."""
    return bool(reader.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_first_visit_to_first_answer(person: Reader) -> None:
    page = person.page
    page.wait_for_selector(".welcome")
    person.use(".examples button >> nth=0")
    page.wait_for_selector(".message.assistant .figures")
    assert len(person.answers()[0]) > 100
    assert person.titles() == [person.said("example.story")]
    assert re.match(r"\d+ ", page.inner_text(".message.assistant .figures"))
    assert page.title() == f"{person.said('example.story')} · infer"
    assert is_as_wide_as_its_window(person)


@pytest.mark.parametrize("key", [False, True], ids=["button", "Escape"])
def test_stop_frees_the_pages(person: Reader, server: Served, key: bool) -> None:
    if key and person.hands == "touch":
        pytest.skip("a phone has no such key")
    page = person.page
    person.settings(LONG)
    before = in_thread(server.stats)
    person.send("Tell me a story.")
    person.until(f"{ANSWERS}[0]?.length > 20")
    assert not page.locator(".waiting").count()
    if key:
        page.keyboard.press("Escape")
    else:
        person.use("button.stop")
    page.wait_for_selector(".ending")
    in_thread(lambda: server.is_back({**before, "fds": 10**6, "tasks": 10**6}, 5))
    kept = person.answers()[0]
    assert len(kept) > 20
    page.reload()
    page.wait_for_selector(".ending")
    assert person.answers()[0] == kept


def test_a_reload_keeps_the_answer_so_far_and_it_goes_on_without_a_seam(
    far_reader: Reader, wire: Wire
) -> None:
    reader, page = far_reader, far_reader.page
    reader.settings({"max_tokens": 300, "temperature": 0})
    whole = reader.ask("Tell me a story about a fox.")
    wire.pause_s = 0.05  # so that it is stopped before its end
    reader.use(".message.assistant .again")
    reader.until(f"{ANSWERS}[0]?.length > 60")
    reader.use("button.stop")
    page.wait_for_selector(".ending")
    wire.pause_s = 0.0
    begun = reader.answers()[0]
    assert whole.startswith(begun)
    assert len(begun) < len(whole)
    page.reload()
    reader.use(".ending button")
    siblings_are(reader, "3/3")
    assert reader.answers()[0] == whole


def test_two_tabs_see_the_same_conversations(person: Reader) -> None:
    other = person.open()
    person.ask("What is 2 + 3?")
    other.wait_for_selector(".conversations button.open", state="attached")
    person.use(".conversations button.open", other)
    other.wait_for_selector(".message.assistant .figures")
    assert person.answers(other) == person.answers()
    person.ask("What is 4 + 4?", other)
    person.until("document.querySelectorAll('.message.user').length == 2")
    assert person.questions() == ["What is 2 + 3?", "What is 4 + 4?"]


def test_two_conversations_stream_at_once_and_do_not_mix(person: Reader) -> None:
    page = person.page
    person.settings({**LONG, "max_tokens": 900})
    person.send("Tell me a story about a fox.")
    page.wait_for_selector(".busy-dot", state="attached")
    if person.hands == "keyboard":
        page.keyboard.press("Control+Shift+O")
    else:
        person.use(f".sidebar button[title='{person.said('chat.new')}']")
    page.wait_for_selector(".welcome")
    person.send("Tell me a story about a boat.")
    person.until("document.querySelectorAll('.busy-dot').length == 2")
    person.until("!document.querySelector('.busy-dot')", timeout_s=60)
    texts = {}
    for title in ("a fox.", "a boat."):
        person.use(f".conversations button.open:has-text('{title}')")
        person.until(f"document.querySelector('.own-text')?.innerText.includes('{title}')")
        page.wait_for_selector(".message.assistant .figures")
        texts[title] = person.answers()[0]
    assert len(set(texts.values())) == 2


def test_edit_regenerate_and_walk_the_branches(person: Reader) -> None:
    page = person.page
    first = person.ask("What is 5 + 6?")
    if person.hands == "keyboard":
        page.keyboard.press("ArrowUp")  # in the empty field
        page.wait_for_selector("textarea.editor:focus")
    else:
        person.use(".message.user .edit")
    person.write("textarea.editor", "Tell me a story.")
    if person.hands == "keyboard":
        page.keyboard.press("Enter")
    else:
        person.use(".message.user .main")
    page.wait_for_selector(".message.user .siblings")
    page.wait_for_selector(".message.assistant .figures")
    person.use(".message.assistant .again")
    siblings_are(person, "2/2")
    assert "2/2" in page.inner_text(".message.user .siblings")
    person.use(".message.user .siblings button >> nth=0")
    person.until("document.querySelector('.own-text').innerText == 'What is 5 + 6?'")
    assert person.answers() == [first]
    page.reload()
    page.wait_for_selector(".message.assistant .figures")
    assert person.answers() == [first]


def test_go_on_from_a_token(person: Reader) -> None:
    page = person.page
    person.settings({"max_tokens": 60, "temperature": 0})
    whole = person.ask("Tell me a story.")
    person.open_tokens(8)
    kept = "".join(page.locator(".tokens button").all_inner_texts()[:8])
    person.use(".alternatives button >> nth=0")
    siblings_are(person, "2/2")
    branch = person.answers()[0]
    start = "".join(kept.split("·")).strip()
    assert branch != whole
    assert branch[: len(start) - 8] == whole[: len(start) - 8]


def test_what_happened_shows_the_reused_prefix(person: Reader) -> None:
    """The second turn of a conversation of 1,000 tokens takes the first one's from the cache."""
    page = person.page
    person.settings({"max_tokens": 20, "temperature": 0})
    person.ask("Tell me a story about " + "a girl named Mia and her red kite and " * 110)
    person.ask("Who has the kite?")
    person.open_happened()
    panel = page.inner_text("what-happened")
    assert person.said("happened.event.first_token") in panel
    rows = page.locator("what-happened dd").all_inner_texts()
    titles = page.locator("what-happened dt").all_inner_texts()
    shown = dict(zip(titles, rows, strict=True))
    num_cached = int(shown[person.said("happened.cached-label")].replace(",", ""))
    num_prompt = int(shown[person.said("happened.prompt-label")].replace(",", ""))
    assert num_prompt > 1000
    assert num_cached >= 900
    assert f"{num_cached:,}" in page.inner_text(".message.assistant .figures >> nth=1")


def test_files_go_with_a_message_and_others_are_refused_with_a_reason(
    person: Reader, tmp_path: Path
) -> None:
    page = person.page
    good, binary, latin, long = (tmp_path / n for n in ("a.txt", "b.bin", "c.txt", "d.txt"))
    good.write_text("The password is swordfish. ```x```", encoding="utf-8")
    binary.write_bytes(b"ab\0cd")
    latin.write_bytes("é".encode("latin-1"))
    long.write_text("x" * (1024 * 1024 + 1), encoding="utf-8")
    person.give_files(".composer .acts button.icon", [good, binary, latin, long])
    page.wait_for_selector(".fault >> nth=2")
    assert page.locator(".composer .chip").count() == 1
    faults = " ".join(page.locator(".fault").all_inner_texts())
    assert person.said("files.binary", name="b.bin") in faults
    assert person.said("files.encoding", name="c.txt") in faults
    assert "d.txt" in faults
    page.wait_for_selector(".meter")
    person.ask("What is in it?")
    person.use(".message.user .chip summary")
    assert "swordfish" in page.inner_text(".message.user .chip pre")


def test_a_schema_holds_and_the_answer_is_checked(person: Reader) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Mia", "Ben"]}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    person.open_settings()
    person.write("dialog textarea.mono >> nth=0", json.dumps(schema))
    person.close_dialog()
    answer = person.ask("Who are you?")
    assert set(json.loads(answer)) == {"name", "age"}
    person.page.wait_for_selector(".fits")


def test_export_to_a_clean_profile(
    person: Reader, new_reader: NewReader, hands: Hands, tmp_path: Path
) -> None:
    answer = person.ask("What is 7 + 8?")
    person.open_settings()
    with person.page.expect_download() as download:
        person.use("transfer-panel button >> nth=0")
    file = tmp_path / "all.json"
    download.value.save_as(file)
    saved = json.loads(file.read_text(encoding="utf-8"))
    saved["conversations"].append({"conversation": {"title": "broken"}, "messages": []})
    file.write_text(json.dumps(saved), encoding="utf-8")
    other = new_reader(hands)
    other.open_settings()
    other.give_files("transfer-panel button >> nth=2", [file])
    other.page.wait_for_selector("transfer-panel .notice")
    said = other.page.inner_text("transfer-panel .notice")
    assert other.said("transfer.done", n=1) in said
    assert other.said("transfer.left-out", names="broken") in said
    other.close_dialog()
    other.use(".conversations button.open")
    other.page.wait_for_selector(".message.assistant .figures")
    assert other.answers() == [answer]


def keep_on_server(reader: Reader, text: str) -> None:
    """Tick one of the boxes about conversations on the server."""
    reader.open_settings()
    reader.use(f"label:has-text('{reader.said(text)}') input")
    reader.close_dialog()


def test_a_conversation_on_the_server_is_there_in_a_second_browser(
    person: Reader, new_reader: NewReader, hands: Hands
) -> None:
    keep_on_server(person, "settings.on-server")
    answers = [person.ask("What is 9 + 1?"), person.ask("What is 2 + 2?")]
    assert person.answers() == answers
    other = new_reader(hands)
    keep_on_server(other, "settings.show-server")
    other.use(".conversations button.open")
    other.page.wait_for_selector(".message.assistant")
    assert other.questions() == ["What is 9 + 1?", "What is 2 + 2?"]
    assert [text.split()[0] for text in other.answers()] == [a.split()[0] for a in answers]
    remove(other)


def test_an_answer_on_the_server_goes_on(
    person: Reader, new_reader: NewReader, hands: Hands
) -> None:
    """After its token limit and after a stop; the session has it as one message."""
    page = person.page
    keep_on_server(person, "settings.on-server")
    person.settings({"max_tokens": 12, "temperature": 0})
    begun = person.ask("Tell me a story about a fox.")
    person.use(".ending button")
    person.until(f"{ANSWERS}[0]?.length > {len(begun) + 10}")
    page.wait_for_selector(DONE)
    longer = person.answers()[0]
    assert longer.startswith(begun)
    person.settings({**LONG, "max_tokens": 1500})
    person.use(".ending button")
    person.until(f"{ANSWERS}[0]?.length > {len(longer) + 20}")
    person.use("button.stop")
    page.wait_for_selector(".ending")
    stopped = person.answers()[0]
    person.settings({"max_tokens": 15})
    person.use(".ending button")
    page.wait_for_selector(DONE)
    person.until(f"{ANSWERS}[0]?.length > {len(stopped) + 5}")
    page.wait_for_selector(DONE)
    whole = person.answers()[0]
    assert whole.startswith(stopped)
    assert page.locator(".siblings").count() == 0
    person.ask("Who is in it?")
    other = new_reader(hands)
    keep_on_server(other, "settings.show-server")
    other.page.wait_for_selector(".conversations button.open", state="attached")
    assert len(other.titles()) == 1
    other.use(".conversations button.open")
    other.page.wait_for_selector(".message.assistant >> nth=1")
    assert other.questions() == ["Tell me a story about a fox.", "Who is in it?"]
    assert other.answers()[0] == whole
    remove(other)


def test_the_turn_after_a_stopped_answer_has_it_on_the_server(
    reader: Reader, new_reader: NewReader
) -> None:
    """The session has no answer that was stopped, so the next turn brings it."""
    keep_on_server(reader, "settings.on-server")
    reader.ask("What is 1 + 1?")
    reader.settings(LONG)
    reader.send("Tell me a story about a fox.")
    reader.until(f"{ANSWERS}[1]?.length > 20")
    reader.use("button.stop")
    reader.page.wait_for_selector(".ending")
    reader.settings({"max_tokens": 10})
    reader.send("Who is in it?")
    reader.until("document.querySelectorAll('.message.assistant .figures').length == 3")
    other = new_reader()
    keep_on_server(other, "settings.show-server")
    other.use(".conversations button.open")
    other.page.wait_for_selector(".message.assistant >> nth=2")
    assert other.questions() == reader.questions()
    assert other.answers() == reader.answers()
    remove(other)


def remove(reader: Reader) -> None:
    """Delete the open conversation, which is the only one."""
    page, row = reader.page, ".conversations button.open"
    if reader.hands == "keyboard":
        reader.reach(row)
        page.keyboard.press("Delete")
        page.wait_for_selector("button.sure:focus")
        page.keyboard.press("Enter")
    else:
        if reader.hands == "mouse":
            page.hover(".conversations li")
        reader.use(".conversations .acts button >> nth=2")
        reader.use("button.sure")
    page.wait_for_selector(".conversations li", state="detached")


def test_an_engine_that_dies_leaves_no_seam(person: Reader, server: Served) -> None:
    page = person.page
    person.settings({"max_tokens": 400, "temperature": 0})
    whole = person.ask("Tell me a story about a fox.")
    person.use(".message.assistant .again")
    person.until(f"{ANSWERS}[0]?.length > 40")
    engine = server.engine_pid()
    assert engine
    os.kill(engine, signal.SIGKILL)
    page.wait_for_selector(DONE, timeout=60_000)
    assert person.answers()[0] == whole
    survived = person.said("happened.restarts", n=1)
    page.wait_for_selector(f".message.assistant .figures:has-text('{survived}')")
    person.use(".message.assistant .figures")
    page.wait_for_selector(
        f".timeline li:has-text('{person.said('happened.event.resumed', before=0)}')"
    )


def test_offline_and_back(person: Reader) -> None:
    page = person.page
    person.ask("What is 1 + 2?")
    person.context.set_offline(True)
    person.send("What is 3 + 3?")
    page.wait_for_selector(".fault")
    assert person.said("error.offline") in page.inner_text(".fault")
    assert page.input_value(".composer textarea") == "What is 3 + 3?"
    assert person.questions() == ["What is 1 + 2?"]
    person.context.set_offline(False)
    page.wait_for_selector("button.send:enabled")
    person.use("button.send")
    person.until("document.querySelectorAll('.message.assistant .figures').length == 2")
    assert person.questions() == ["What is 1 + 2?", "What is 3 + 3?"]


def test_a_connection_that_is_lost_in_mid_answer(far_reader: Reader, wire: Wire) -> None:
    reader, page = far_reader, far_reader.page
    reader.settings({"max_tokens": 300, "temperature": 0})
    whole = reader.ask("Tell me a story about a fox.")
    wire.pause_s = 0.01
    reader.use(".message.assistant .again")
    reader.until(f"{ANSWERS}[0]?.length > 60")
    wire.cut()
    wire.pause_s = 0.0
    siblings_are(reader, "2/2")
    assert reader.answers()[0] == whole
    assert not page.locator(".ending").count()


def test_raw_text_is_continued(person: Reader) -> None:
    page = person.page
    person.use(".views a[href='#/text']")
    person.write("raw-view textarea", "Once upon a time")
    person.use("raw-view button.main")
    person.until("document.querySelector('raw-view textarea').value.length > 100")
    page.wait_for_selector("raw-view button.plain:enabled")
    assert page.input_value("raw-view textarea").startswith("Once upon a time")
    person.use("raw-view button.plain >> nth=0")
    page.wait_for_selector("token-view .tokens button >> nth=10")


# ---- the keys, and what goes wrong


def test_the_keys_of_the_list(reader: Reader) -> None:
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
    page.wait_for_selector("button.undo:focus")
    page.wait_for_selector(".conversations button.open", state="detached")
    keys.press("Enter")
    reader.until("document.querySelector('.conversations button.open')?.title == 'Sums'")
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


def test_wrong_settings_are_named_and_not_sent(reader: Reader) -> None:
    page = reader.page
    reader.open_settings()
    page.fill("#setting-temperature", "7")
    page.fill("#setting-top_p", "x")
    page.keyboard.press("Tab")
    page.wait_for_selector(".fault-text >> nth=1")
    assert re.search(r"must be 0\D{1,4}2,", page.inner_text("dialog"))
    page.click("dialog footer button.main")
    assert reader.ask("What is 1 + 1?")


def test_no_storage_is_said_and_the_page_works(new_reader: NewReader) -> None:
    reader = new_reader()
    reader.page.add_init_script(
        "Object.defineProperty(window, 'indexedDB', {get() { throw new DOMException('no') }})"
    )
    reader.page.reload()
    reader.page.wait_for_selector(".notice.bad")
    assert "will be forgotten" in reader.page.inner_text(".notice.bad")
    assert reader.ask("What is 2 + 2?")
