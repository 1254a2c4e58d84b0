"""Answers, drafts and places outlive the page: reloads, lost connections, other tabs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.page.test_full_context import PASTE
from tests.page.test_hostile_texts import ACTS, SEEDS
from tests.page.test_journeys import siblings_are
from tests.support.page_driver import ANSWERS, Reader, Wire
from tests.support.raw_http import HEAD, connect

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
STORY = "Tell me a story about a fox."


@contextmanager
def full(url: str) -> Iterator[None]:
    """Requests for twice the slots that there are, which are left at the end: whoever comes
    meanwhile waits for as long as it takes."""
    body = json.dumps({"prompt": STORY, "max_tokens": 1900, "ignore_eos": True}).encode()
    with ExitStack() as clients:
        for _ in range(64):
            client = clients.enter_context(connect(url))
            client.sendall(f"{HEAD}content-length: {len(body)}\r\n\r\n".encode() + body)
        yield


def begun(reader: Reader, wire: Wire, max_tokens: int = 300) -> str:
    """The whole of an answer; the same is being made again, slowly, as its sibling."""
    reader.settings({"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True})
    whole = reader.ask(STORY)
    wire.pause_s = 0.01
    reader.use(".message.assistant .again")
    reader.until(f"{ANSWERS}[0]?.length > 60")
    return whole


def test_an_answer_goes_on_after_a_reload(far_reader: Reader, wire: Wire) -> None:
    whole = begun(far_reader, wire)
    wire.pause_s = 0.0
    far_reader.page.reload()
    siblings_are(far_reader, "2/2")
    assert far_reader.answers()[0] == whole
    assert far_reader.said("end.length") in far_reader.page.inner_text(".ending")
    far_reader.page.wait_for_selector(".message.assistant .figures")


@pytest.mark.parametrize("hands", ["mouse"])
def test_cuts_at_random_leave_no_seam(far_reader: Reader, wire: Wire) -> None:
    """Connections that break and pages that are read again, at any time of an answer."""
    dice = random.Random(3)
    whole = begun(far_reader, wire, 250)
    for turn in range(12):
        far_reader.page.wait_for_timeout(dice.randrange(40, 500))
        if turn % 3 == 2:
            far_reader.page.reload()
            far_reader.page.wait_for_selector(".message.assistant")
        else:
            wire.cut()
    wire.pause_s = 0.0
    siblings_are(far_reader, "2/2")
    assert far_reader.answers()[0] == whole


@pytest.mark.parametrize("hands", ["mouse"])
def test_a_lost_connection_is_said_and_stop_ends_the_request(
    far_reader: Reader, wire: Wire, url: str
) -> None:
    page = far_reader.page
    far_reader.settings({"max_tokens": 1900, "temperature": 0, "ignore_eos": True})
    far_reader.send(STORY)
    page.wait_for_selector(".strip")  # all modules are there
    wire.pause_s = 0.02
    page.evaluate("(() => { window.fetch = async () => { throw new TypeError('cut'); }; })()")
    wire.cut()
    page.wait_for_selector(".silence")
    assert far_reader.said("silence.lost") in page.inner_text(".silence")
    far_reader.use("button.stop")
    page.wait_for_selector(".ending")
    assert far_reader.said("end.stopped") in page.inner_text(".ending")


def test_a_silent_stream_says_why(person: Reader) -> None:
    """Each state of the server's status, as a stream that is silent for two seconds shows it."""
    page = person.page
    person.settings({"max_tokens": 1900, "temperature": 0, "ignore_eos": True})
    with full(person.url):
        person.send(STORY)
        page.wait_for_selector(".waiting")
        page.wait_for_selector(".silence")
        assert person.said("silence.queued", n=1)[:3] in page.inner_text(".silence")
        states = {
            "reading": ({"prompt_tokens_done": 40, "prompt_tokens": 90}, {"done": 40, "all": 90}),
            "restarting": ({}, {}),
            "preempted": ({}, {}),
            "lost": ({}, {}),
        }
        for state, (fields, values) in states.items():
            page.evaluate(
                "(status) => import('/ui/lib/chats.js').then(({chats}) => {"
                " const [each] = chats.running.values(); each.status = status;"
                " each.dispatchEvent(new Event('piece')); })",
                {"state": state, "queued_behind": 0, **fields},
            )
            words = json.dumps(person.said(f"silence.{state}", **values))
            person.until(f"document.querySelector('.silence')?.innerText === {words}")
        person.use("button.stop")
        page.wait_for_selector(".ending")


def test_a_caret_stands_at_the_end_of_a_growing_answer(reader: Reader) -> None:
    page = reader.page
    reader.settings({"max_tokens": 1500, "temperature": 0, "ignore_eos": True})
    reader.send(STORY)
    reader.until(f"{ANSWERS}[0]?.length > 40")
    caret = (
        "getComputedStyle(document.querySelector('.message.assistant text-view > .block:last-child"
        " > :last-child'), '::after').width"
    )
    assert page.evaluate(caret) not in ("auto", "0px")
    reader.use("button.stop")
    page.wait_for_selector(".ending")
    assert page.evaluate(caret) in ("auto", "0px")


def test_drafts_and_texts_are_kept(person: Reader, tmp_path: Path) -> None:
    page = person.page
    person.write(".composer textarea", "not sent yet")
    page.evaluate(PASTE, SEEDS[0] + "a long text " * 300)
    page.wait_for_selector(".composer .chip")
    page.wait_for_timeout(400)
    page.reload()
    page.wait_for_selector(".composer .chip")
    assert page.input_value(".composer textarea") == "not sent yet"
    person.use(".composer .chip button")
    person.ask("What is 2 + 2?")
    page.wait_for_timeout(400)
    page.reload()
    page.wait_for_selector(".message.assistant .figures")
    assert page.input_value(".composer textarea") == ""
    person.use(".views a[href='#/text']")
    person.write("raw-view textarea", "Once upon")
    page.wait_for_timeout(400)
    page.reload()
    person.until("document.querySelector('raw-view textarea')?.value === 'Once upon'")


@pytest.mark.parametrize("late", ["**/v1/sessions", "**/v1/models"])
def test_what_is_written_while_the_page_opens_is_not_lost(reader: Reader, late: str) -> None:
    """Conversations and models come after somebody has written, and after they have sent it."""
    page, held = reader.page, []
    page.evaluate("localStorage.setItem('infer.hasSessions', 'true')")
    page.route(late, lambda route: held.append(route))

    def opened(text: str) -> None:
        held.clear()  # those of the page before
        page.reload()
        page.wait_for_selector(".composer textarea")
        page.fill(".composer textarea", text)
        while not held:
            page.wait_for_timeout(30)

    opened("half a sentence")
    held.pop().continue_()
    page.wait_for_selector("button.send:enabled")
    assert page.input_value(".composer textarea") == "half a sentence"
    opened("What is 2 + 2?")
    page.press(".composer textarea", "Enter")
    page.wait_for_timeout(300)
    assert not reader.questions()
    held.pop().continue_()
    page.wait_for_selector(".message.assistant .figures")
    assert reader.questions() == ["What is 2 + 2?"]
    assert page.input_value(".composer textarea") == ""


def test_a_message_shows_in_the_other_tab_while_it_is_answered(person: Reader) -> None:
    other = person.open()
    person.ask("What is 2 + 3?")
    other.wait_for_selector(".conversations button.open", state="attached")
    person.use(".conversations button.open", other)
    other.wait_for_selector(".message.assistant .figures")
    person.settings({"max_tokens": 1900, "temperature": 0, "ignore_eos": True})
    person.send(STORY)
    person.until("document.querySelectorAll('.message.user').length === 2", other)
    assert person.questions(other)[-1] == STORY
    person.until("document.querySelector('button.stop')")  # it still runs here
    person.use("button.stop")
    person.until("document.querySelector('.ending')", other)


def test_an_answer_of_a_closed_tab_is_taken_up_by_the_other(reader: Reader) -> None:
    other = reader.open()
    reader.settings({"max_tokens": 1900, "temperature": 0, "ignore_eos": True})
    reader.send(STORY)
    other.wait_for_selector(".conversations button.open", state="attached")
    reader.use(".conversations button.open", other)
    other.wait_for_selector(".message.assistant")
    reader.page.close()
    reader.until("document.querySelector('.message.assistant .figures')", other, timeout_s=90)
    assert len(reader.answers(other)[0]) > 500
    other.wait_for_selector(".ending")  # the token limit
    reader.page = other


def test_hostile_drafts_and_answers_do_nothing(new_reader: Callable[..., Reader]) -> None:
    """As what was typed, in a file of a draft, and in an answer that is taken up again."""
    reader = new_reader()
    page = reader.page
    short = [seed for seed in SEEDS if len(seed) < 500]
    for seed in short[::6]:
        page.fill(".composer textarea", seed)
        page.evaluate(PASTE, seed * (1 + 3000 // len(seed)))
        page.wait_for_timeout(250)
        page.reload()
        page.wait_for_selector(".composer .chip")
        assert page.input_value(".composer textarea") == seed
        page.click(".composer .chip button")
    records = [
        {"text": 5, "files": []},
        {"text": "x", "files": "y"},
        {"text": "x", "files": [{"name": 1}]},
        {"files": None},
    ]
    for record in records:
        page.evaluate(
            "(record) => import('/ui/lib/storage.js').then(async ({storage}) =>"
            " (await storage._database()).put('drafts', {id: 'new', ...record}))",
            record,
        )
        page.reload()
        page.wait_for_selector(".welcome")
        assert page.input_value(".composer textarea") == ""
    answers = [{"name": "../../etc/passwd", "at": 0, "numGiven": 0}, {"name": "page-x", "at": "0"}]
    for i, resume in enumerate([*answers, {"name": "page-nothing", "at": 3, "numGiven": 0}]):
        page.evaluate(
            "([i, resume, text]) => import('/ui/lib/storage.js').then(async ({storage}) => {"
            " const database = await storage._database(); const id = `h${i}`;"
            " await database.put('conversations', {id, title: text, created: i, updated: i,"
            " pinned: false, system: '', tools: '', toolChoice: 'auto', schema: '', sampling: {},"
            " chosen: {}}); await database.put('messages', {id: 'nothing', conversation: id,"
            " parent: null, role: 'assistant', content: text, created: 1, finish: 'running',"
            " resume}); })",
            [i, resume, f"<img src=x onerror={ACTS}>"],
        )
        page.goto(f"{reader.url}/#/chat/h{i}")
        page.reload()
        page.wait_for_selector(".notice, .ending")
    assert not page.evaluate("window.attacked")
