"""A full context is not an end: the meter warns, two ways lead on, and nothing too long is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.page_driver import ANSWERS, Reader

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
TO_THE_END = {"temperature": 0, "ignore_eos": True}
FULL = ".ending.full"
PASTE = """
(text) => {
  const data = new DataTransfer();
  data.setData('text/plain', text);
  const field = document.querySelector('.composer textarea');
  const event = new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true});
  const before = performance.now();
  field.dispatchEvent(event);
  return [event.defaultPrevented, performance.now() - before];
}
"""


@pytest.fixture(scope="module")
def server_options() -> list[str]:
    return ["--max-seq-len", "400"]


def filled(person: Reader) -> None:
    """Two short answers, and one that fills the context."""
    person.settings({**TO_THE_END, "max_tokens": 60})
    person.ask("Tell me a story about a fox.")
    person.ask("Tell me a story about a boat.")
    person.settings({"max_tokens": 2000})
    person.ask("Tell me a story about a tree.")
    person.page.wait_for_selector(FULL)


def test_it_goes_on_without_the_oldest_messages(person: Reader) -> None:
    page = person.page
    filled(person)
    said = page.inner_text(FULL)
    assert person.said("end.full", limit=400) in said
    assert not page.locator(".memory").count()
    before = person.answers()[-1]
    person.use(f"{FULL} button >> nth=0")
    person.until(f"{ANSWERS}.at(-1).length > {len(before)} + 40")
    page.wait_for_selector(".memory")
    assert person.answers()[-1].startswith(before)
    order = page.evaluate(
        "[...document.querySelectorAll('.memory, chat-message')].map((e) => e.className)"
    )
    at = order.index("memory")
    assert 0 < at < len(order) - 1
    assert at % 2 == 0  # before a question
    page.reload()
    page.wait_for_selector(".memory")


def test_it_goes_on_with_a_summary(person: Reader) -> None:
    filled(person)
    person.use(f"{FULL} button >> nth=1")
    person.until(
        "document.querySelector('.message.user .siblings')?.innerText.includes('2/2')"
        " && document.querySelectorAll('.message.assistant .figures').length === 1"
    )
    assert person.questions() == [person.said("summary.before")]
    assert person.answers()[0]
    person.settings({"max_tokens": 20})
    person.ask("And then?")
    assert len(person.answers()) == 2
    person.use(".message.user .siblings button >> nth=0")
    person.until("document.querySelectorAll('.message.user').length === 3")


def test_the_meter_warns_and_what_is_too_long_is_not_sent(person: Reader) -> None:
    page = person.page
    bodies: list[str] = []
    page.on(
        "request",
        lambda it: bodies.append(it.url) if it.url.endswith("/chat/completions") else None,
    )
    person.write(".composer textarea", "the fox went to the river and " * 48)
    page.wait_for_selector(".meter.warn")
    assert page.evaluate(PASTE, "the fox went to the river and " * 200)[0]
    page.wait_for_selector(".composer .chip")
    page.wait_for_selector(".meter.bad")
    page.wait_for_selector(".full")
    assert person.said("composer.long", limit=400) in page.inner_text(".full")
    assert page.locator("button.send[disabled]").count() == 1
    page.press(".composer textarea", "Enter")
    # before the meter knows it, too
    person.use(".composer .chip button")
    page.wait_for_selector(".full", state="detached")
    page.evaluate(PASTE, "one day a girl saw a boat " * 300)
    page.press(".composer textarea", "Enter")
    page.wait_for_selector(".full")
    assert not bodies
    assert page.locator(".composer .chip").count() == 1


def test_a_paste_of_a_megabyte_is_a_file_at_once(reader: Reader) -> None:
    page = reader.page
    page.evaluate(
        "window.longest = 0; new PerformanceObserver((list) => { for (const each of"
        " list.getEntries()) window.longest = Math.max(window.longest, each.duration); })"
        ".observe({entryTypes: ['longtask']})"
    )
    taken, _ = page.evaluate(PASTE, "x" * 2400)
    assert not taken  # the field itself takes it
    taken, _ = page.evaluate(PASTE, "words and <b>words</b> " * 45_000)
    assert taken
    page.wait_for_selector(".composer .chip")
    assert page.input_value(".composer textarea") == ""
    page.evaluate(PASTE, "y" * (1024 * 1024 + 1))
    page.wait_for_selector(".composer .fault")
    assert page.locator(".composer .chip").count() == 1


def test_files_are_told_by_their_first_bytes(person: Reader, tmp_path: Path) -> None:
    heads = {
        "picture": [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8 "],
        "pdf": [b"%PDF-1.7\n"],
        "archive": [b"PK\x03\x04\x14", b"\x1f\x8b\x08", b"\xd0\xcf\x11\xe0\xa1"],
        "media": [b"ID3\x04", b"OggS\0", b"\0\0\0\x18ftypmp42"],
        "program": [b"\x7fELF\x02", b"MZ\x90\0\x03"],
    }
    paths, expected = [], []
    for kind, found in heads.items():
        for i, head in enumerate(found):
            path = tmp_path / f"{kind}{i}.txt"  # the name says nothing
            path.write_bytes(head + b"x" * 40)
            paths.append(path)
            expected.append(person.said(f"files.{kind}", name=path.name))
    text = tmp_path / "text.bin"
    text.write_text("MZ and BM and GIF are only letters here.", encoding="utf-8")
    person.give_files(".composer .acts button.icon", [*paths, text])
    person.page.wait_for_selector(".composer .chip")
    faults = [each.strip() for each in person.page.locator(".fault").all_inner_texts()]
    assert faults == expected
