"""What people do every day: focus, keys, several answers, settings, titles, deleting, importing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.page_driver import ANSWERS, Reader

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
LONG = {"max_tokens": 1800, "temperature": 0, "ignore_eos": True}


def test_the_field_has_the_focus_and_escape_stops_whatever_was_pressed(reader: Reader) -> None:
    page, keys = reader.page, reader.page.keyboard
    page.wait_for_selector(".composer textarea:focus")
    page.focus(".sidebar .views a")
    keys.press("/")
    page.wait_for_selector(".composer textarea:focus")
    assert page.input_value(".composer textarea") == ""
    keys.type("1/2")  # in a field it is a character
    assert page.input_value(".composer textarea") == "1/2"
    page.fill(".composer textarea", "")
    reader.settings(LONG)
    reader.send("Tell me a story.")
    reader.until(f"{ANSWERS}[0]?.length > 20")
    keys.press("Control+k")
    page.wait_for_selector(".sidebar .search:focus")
    keys.press("Escape")
    page.wait_for_selector(".ending")


@pytest.mark.parametrize("dialog", ["settings", "help", "key"])
def test_the_first_field_of_a_dialog_has_the_focus(reader: Reader, dialog: str) -> None:
    page = reader.page
    page.evaluate(
        "(name) => document.querySelector('side-bar').dispatchEvent("
        "new CustomEvent('ask', {detail: name, bubbles: true}))",
        dialog,
    )
    page.wait_for_selector(f"{dialog}-dialog dialog[open]")
    page.wait_for_selector(f"{dialog}-dialog .content :is(input, select, textarea):focus")


@pytest.mark.parametrize("count", [2, 4])
def test_several_answers_at_once_and_one_is_chosen(person: Reader, count: int) -> None:
    page = person.page
    bodies: list[dict[str, object]] = []
    page.on(
        "request",
        lambda it: (
            bodies.append(json.loads(it.post_data))
            if it.url.endswith("/chat/completions")
            else None
        ),
    )
    person.settings({"max_tokens": 40, "temperature": 1})
    person.choose("select.answers", str(count))
    person.send("Tell me a story.")
    page.wait_for_selector(f".together button.choose >> nth={count - 1}")
    assert [body.get("n") for body in bodies] == [count]
    answers = person.answers()
    assert len(answers) == count
    assert all(answers)
    person.use(".together button.choose >> nth=1")
    page.wait_for_selector(".together", state="detached")
    assert person.answers() == [answers[1]]
    assert f"2/{count}" in page.inner_text(".message.assistant .siblings")
    page.reload()
    page.wait_for_selector(".message.assistant .siblings")
    assert person.answers() == [answers[1]]


def test_presets_and_the_default_system_prompt(person: Reader) -> None:
    page = person.page
    person.open_settings()
    person.write("dialog textarea >> nth=0", "You are brief.")
    page.keyboard.press("Tab")
    person.use("dialog .content > .row button.plain")
    for name, value in (("one", "0.1"), ("two", "0.2")):
        person.write("#setting-temperature", value)
        person.write(".preset-name", name)
        person.use(f"dialog button:has-text('{person.said('preset.save')}')")
        page.wait_for_selector(f".own-preset:has-text('{name}')")
    label = person.said("preset.remove", name="one")
    person.use(f"button[aria-label='{label}']")
    page.wait_for_selector(".own-preset:has-text('one')", state="detached")
    assert page.locator(".own-preset").all_inner_texts() == ["two"]
    person.write("#setting-temperature", "1.5")
    person.use(".own-preset button.plain")
    assert page.input_value("#setting-temperature") == "0.2"
    person.close_dialog()
    person.ask("What is 1 + 1?")
    if person.hands == "keyboard":
        page.keyboard.press("Control+Shift+O")
    else:
        person.use(f".sidebar button[title='{person.said('chat.new')}']")
    page.wait_for_selector(".welcome")
    person.open_settings()
    assert page.input_value("dialog textarea >> nth=0") == "You are brief."


def test_tools_come_from_a_file(person: Reader, tmp_path: Path) -> None:
    page = person.page
    schema = {"title": "weather", "type": "object", "properties": {"town": {"type": "string"}}}
    file = tmp_path / "weather.json"
    file.write_text(json.dumps(schema), encoding="utf-8")
    person.open_settings()
    button = f"dialog button:has-text('{person.said('settings.tools-file')}')"
    person.give_files(button, [file])
    person.until("document.querySelectorAll('dialog textarea.mono')[1].value.includes('weather')")
    taken = json.loads(page.input_value("dialog textarea.mono >> nth=1"))
    assert taken == [
        {"type": "function", "function": {"name": "weather", "parameters": schema}},
    ]
    for text in ("5", "[]", "{", '{"a": 1}', "[null]", '"<script>"'):
        file.write_text(text, encoding="utf-8")
        person.give_files(button, [file])
        page.wait_for_selector("dialog .fault-text")
    assert json.loads(page.input_value("dialog textarea.mono >> nth=1")) == taken


def test_a_title_follows_an_edit_unless_the_reader_gave_it(person: Reader) -> None:
    page = person.page
    person.settings({"max_tokens": 10})
    person.ask("What is 5 + 6?")

    def edit(text: str) -> None:
        person.use(".message.user .edit")
        person.write("textarea.editor", text)
        person.use(".message.user .main")
        page.wait_for_selector("textarea.editor", state="detached")
        person.until(f"document.querySelector('.own-text')?.innerText === {json.dumps(text)}")
        page.wait_for_selector(".message.assistant .figures")

    edit("What is 7 + 8?")
    assert person.titles() == ["What is 7 + 8?"]
    page.evaluate(
        "import('/ui/lib/chats.js').then(({chats}) => chats.rename(chats.current, 'Sums'))"
    )
    edit("What is 1 + 1?")
    assert person.titles() == ["Sums"]


def test_a_deleted_conversation_comes_back(person: Reader) -> None:
    page = person.page
    answer = person.ask("What is 3 + 4?")
    if person.hands == "keyboard":
        person.reach(".conversations button.open")
        page.keyboard.press("Delete")
    else:
        if person.hands == "mouse":
            page.hover(".conversations li")
        label = person.said("side.remove", title="What is 3 + 4?")
        person.use(f"button[aria-label='{label}']")
    page.wait_for_selector("button.undo", state="attached")
    assert person.titles() == []
    assert person.answers() == []
    person.use("button.undo")
    page.wait_for_selector(".message.assistant .figures")
    assert person.answers() == [answer]
    page.reload()
    page.wait_for_selector(".message.assistant .figures")
    assert person.titles() == ["What is 3 + 4?"]


def test_an_import_of_ones_own_export_does_not_double(person: Reader, tmp_path: Path) -> None:
    person.ask("What is 7 + 8?")
    person.open_settings()
    with person.page.expect_download() as download:
        person.use("transfer-panel button >> nth=0")
    file = tmp_path / "all.json"
    download.value.save_as(file)
    for _ in range(2):
        person.give_files("transfer-panel button >> nth=2", [file])
        person.page.wait_for_selector("transfer-panel .notice")
        assert person.said("transfer.here", n=1) in person.page.inner_text("transfer-panel .notice")
    assert len(person.titles()) == 1


def test_a_pinned_conversation_has_a_mark_and_the_model_is_the_headline(person: Reader) -> None:
    page = person.page
    page.wait_for_selector("header.topbar h1:has-text('infer-demo')")
    person.ask("What is 3 + 4?")
    assert not page.locator(".pinned").count()
    label = person.said("side.pin", title="What is 3 + 4?")
    if person.hands == "keyboard":
        page.focus(".conversations button.open")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
    else:
        if person.hands == "mouse":
            page.hover(".conversations li")
        person.use(f"button[aria-label='{label}']")
    page.wait_for_selector(".pinned", state="attached")
    assert page.get_attribute(".pinned", "aria-label") == person.said("side.pinned")
    assert re.search("infer-demo", page.inner_text("header.topbar"))


def test_copy_and_edit_show_on_hover_and_focus(reader: Reader) -> None:
    page = reader.page
    reader.ask("What is 3 + 4?")
    page.mouse.move(2, 2)
    shown = "getComputedStyle(document.querySelector('.message.user .edit')).opacity"
    reader.until(f"{shown} === '0'")
    page.hover(".message.user .own-text")
    reader.until(f"{shown} === '1'")
    page.mouse.move(2, 2)
    page.focus(".message.user .edit")
    reader.until(f"{shown} === '1'")


def test_the_page_opens_without_its_server(reader: Reader) -> None:
    """The conversations are there, and what the API has answered is not kept."""
    page = reader.page
    answer = reader.ask("What is 3 + 4?")
    page.wait_for_timeout(4500)
    page.evaluate("navigator.serviceWorker.ready.then(() => 0)")
    reader.until("navigator.serviceWorker.controller")
    manifest = page.evaluate("fetch('/ui/manifest.webmanifest').then((it) => it.json())")
    assert manifest["start_url"] == "/"
    reader.context.set_offline(True)
    page.reload()
    page.wait_for_selector(".message.assistant .figures")
    assert reader.answers() == [answer]
    assert reader.said("server.away") in page.inner_text("header.topbar")
    kept = page.evaluate(
        "caches.keys().then((names) => Promise.all(names.map((name) => caches.open(name)"
        ".then((cache) => cache.keys())))).then((all) => all.flat().map((it) => it.url))"
    )
    assert len(kept) > 20
    assert not [url for url in kept if "/v1/" in url or "openapi" in url]
    reader.context.set_offline(False)
