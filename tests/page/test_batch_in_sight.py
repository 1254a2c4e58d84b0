"""The engine's batch where people are: above the field, behind a click, and never empty."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest

from tests.page.test_engine_view import ENDED, OPEN, asked
from tests.support.page_driver import Reader
from tests.support.server_process import Served

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
LONG = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}
PIXELS = """
(() => {
  const canvas = document.querySelector('.strip canvas');
  if (!canvas) return [0, 0];
  const [own, others] = [canvas, canvas.closest('seat-strip')]
    .map((each) => getComputedStyle(each).color.match(/[0-9.]+/g).slice(0, 3).map(Number));
  const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const count = (colour) => { let n = 0; for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] > 100 && colour.every((c, k) => Math.abs(c - data[i + k]) < 3)) n++;
    return n; };
  return [count(own), count(others)];
})()
"""
"""Pixels of the strip in the colour of one's own requests, and in that of others."""


@pytest.fixture(autouse=True)
def idle(server: Served) -> None:
    """Answers outlive their page: those of the test before would be counted in this one."""
    deadline = time.monotonic() + 60
    while True:
        engine = json.loads(server.get("/stats")[1])["engine"]
        if not engine["num_running"] + engine["num_waiting"]:
            return
        assert time.monotonic() < deadline, engine
        time.sleep(0.1)


def test_the_slots_are_above_the_field_while_something_is_answered(
    person: Reader, url: str
) -> None:
    page = person.page
    assert not page.locator(".strip").count()
    person.settings(LONG)
    person.send("Tell me a story.")
    page.wait_for_selector(".strip")
    person.until(f"{PIXELS}[0] > 20 && {PIXELS}[1] === 0")
    person.until("document.querySelector('.strip').innerText.includes('1')")
    with asked(url, 3, 400):
        person.until(f"{PIXELS}[0] > 20 && {PIXELS}[1] > 20")
    person.use(".strip")
    page.wait_for_selector("engine-view canvas.lanes")
    numbers = "document.querySelector('[data-number=step]')?.textContent"
    person.until(f"/[1-9]/.test({numbers} ?? '')")
    assert page.evaluate(f"({OPEN}) + ({ENDED})") == 4


def test_the_strip_goes_when_nothing_is_answered(reader: Reader) -> None:
    reader.ask("What is 2 + 2?")
    reader.page.wait_for_selector(".strip")
    reader.page.wait_for_selector(".strip", state="detached")


def test_the_strip_has_its_words_when_it_appears(reader: Reader) -> None:
    """Also where the stream has begun just now: it had shown a lone 0 for half a second."""
    reader.ask("What is 2 + 2?")
    reader.page.wait_for_selector(".strip")
    said = reader.page.evaluate(
        "import('/ui/engine/live.js').then(({live}) => { const {history} = live;"
        " const strip = document.querySelector('seat-strip'); strip._frames.stop();"
        " Object.assign(strip, {said: '', _worded: 0, _busyAt: performance.now()});"
        " live.history = null; strip._show(); live.history = history; strip._show();"
        " return strip.said; })"
    )
    assert "of" in said, said


def test_the_engine_is_not_empty_after_a_chat(person: Reader) -> None:
    """Also where the stream was interrupted: a further one goes on where it ended."""
    person.ask("What is 2 + 2?")
    person.open_engine()
    person.until(f"{ENDED} === 1")
    restart = "import('/ui/engine/live.js').then(({live}) => live._restart())"
    person.page.evaluate(restart)
    person.use(".views a[href^='#/chat']")
    person.page.wait_for_selector(".message.assistant .figures")
    person.ask("What is 3 + 3?")
    person.open_engine()
    person.until(f"{ENDED} === 2")
    bars = "document.querySelector('engine-view').history.ended"
    first, second = person.page.evaluate(f"{bars}.map((bar) => [bar.number, bar.since, bar.end])")
    assert first[0] != second[0]
    assert first[2] < second[1] <= second[2]


def test_an_answer_from_before_the_stream_is_in_it(reader: Reader) -> None:
    """A short answer is over before the engine's stream has begun: then its trace tells."""
    page = reader.page
    gate = "window.gate = new Promise((open) => { window.open_gate = open; })"
    page.evaluate(f"void ({gate})")
    page.evaluate(
        "(() => { const before = window.fetch; window.fetch = async (path, ...more) => {"
        " if (String(path).startsWith('/v1/engine/events')) await window.gate;"
        " return before(path, ...more); }; })()"
    )
    reader.ask("What is 2 + 2?")
    page.evaluate("window.open_gate()")
    reader.open_engine()
    reader.until(f"{ENDED} === 1")
    bar = "document.querySelector('engine-view').history.ended[0]"
    kinds = page.evaluate(f"{bar}.spans.map((each) => each.kind)")
    assert {"chunk", "decode"} <= set(kinds)
    reader.until("/[1-9]/.test(document.querySelector('[data-number=step]').textContent)")


def test_an_idle_engine_gets_something_to_show(person: Reader) -> None:
    page = person.page
    bodies: list[str] = []
    page.on(
        "request", lambda it: bodies.append(it.post_data or "") if "completions" in it.url else 0
    )
    person.open_engine()
    assert person.said("engine.load-hint") in page.inner_text(".engine")
    person.use("button.load")
    person.until(f"{ENDED} === 20")
    assert {json.loads(body)["priority"] for body in bodies} == {1000}
    page.wait_for_selector("button.load")


def test_pictures_get_a_share_of_the_time(reader: Reader) -> None:
    """Each is measured: what takes 20 ms, and with what follows 30, may come each 300 ms."""
    times = reader.page.evaluate(
        "async () => { const {Frames} = await import('/ui/engine/frames.js'); const times = [];"
        " await new Promise((done) => { const frames = new Frames(() => {"
        "  const at = performance.now(); times.push(at); while (performance.now() < at + 20) ;"
        "  if (times.length === 5) { frames.stop(); done(); } }, 10, 0.1); frames.start(); });"
        " return times; }"
    )
    assert min(later - at for at, later in pairwise(times)) > 280


def test_nothing_is_animated_while_something_is_answered(reader: Reader) -> None:
    """An animation is composed 60 times a second: a caret that blinked cost more than the strip."""
    reader.settings(LONG)
    reader.send("Tell me a story.")
    for selector in (".waiting, .growing", ".strip", ".growing"):
        reader.page.wait_for_selector(selector)
        assert reader.page.evaluate("document.getAnimations().map(String)") == []


def test_what_is_out_of_sight_is_not_drawn(reader: Reader, url: str) -> None:
    page = reader.page
    page.set_viewport_size({"width": 900, "height": 300})
    reader.open_engine()
    with asked(url, 1, 20):
        pass
    reader.until(f"{ENDED} === 1")
    count = (
        "(() => { const view = document.querySelector('engine-view'); view._frames.stop();"
        " const drawn = []; const real = CanvasRenderingContext2D.prototype.clearRect;"
        " CanvasRenderingContext2D.prototype.clearRect = function (...where) {"
        "  drawn.push(this.canvas.className); return real.apply(this, where); };"
        " view._draw(); CanvasRenderingContext2D.prototype.clearRect = real; return drawn; })()"
    )
    page.evaluate("document.querySelector('canvas.lanes').scrollIntoView()")
    assert "lanes" in page.evaluate(count)
    page.evaluate("document.querySelector('#comparison-title').scrollIntoView()")
    assert "lanes" not in page.evaluate(count)


def test_bars_of_a_time_are_found_among_many(reader: Reader) -> None:
    """Ended ones are in the order of their ends, also where a trace tells of an older one later."""
    found = reader.page.evaluate(
        "async () => { const {History} = await import('/ui/engine/history.js');"
        " const history = new History({seats: 4, gap_bounds_ms: []});"
        " const end = (request, at) => { for (const event of ['queued', 'admitted', 'finished'])"
        "  history._event({event, request, name: null, choice: 0, prompt_tokens: 1, max_tokens: 1,"
        "   received: at - 10, cached_tokens: 0, outcome: 'stop', output_tokens: 1, after: 0},"
        "   at); };"
        " for (let i = 0; i < 300; i++) if (i !== 100) end(i, 100 * i); end(100, 10_000);"
        " return [9_900, 10_000, 20_000].map((at) => [...history.bars(at, at + 20)].map("
        "  (bar) => bar.number)); }"
    )
    assert found == [[99], [100], [200]]


@pytest.mark.timeout(300)
def test_a_comparison_is_drawn_while_it_is_computed(person: Reader) -> None:
    page = person.page
    person.open_engine()
    person.use(".engine > .row .plain:not(.load)")
    person.until("document.querySelectorAll('.comparison canvas').length === 1", timeout_s=90)
    person.until("document.querySelector('.comparison progress')?.value > 3", timeout_s=60)
    assert page.evaluate("document.querySelector('comparison-view').isRunning")
    assert page.evaluate("document.querySelector('.comparison progress').max") == 3 * 64
    assert not page.locator(".comparison tbody").count()
    person.use(".comparison .row button")
    person.until("!document.querySelector('comparison-view').isRunning")
    assert not page.locator(".comparison .bad").count()
