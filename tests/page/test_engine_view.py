"""The engine view in a browser: lanes and numbers of a real load, a table, a recording, modes."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.page_driver import Reader

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]
OPEN = "document.querySelector('engine-view')?.history?.open.size"
ENDED = "document.querySelector('engine-view').history.ended.length"


@contextmanager
def asked(url: str, count: int, max_tokens: int) -> Iterator[None]:
    """So many completions at once; ends when all are answered."""
    body = {"model": "infer-demo", "prompt": "Once upon a time", "max_tokens": max_tokens}
    data = json.dumps({**body, "ignore_eos": True}).encode()

    def ask() -> None:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(url + "/v1/completions", data, headers)
        urllib.request.urlopen(request, timeout=120).read()

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def opened(reader: Reader) -> Any:
    reader.page.goto(f"{reader.url}/#/engine")
    reader.until("document.querySelector('engine-view canvas.lanes')")
    return reader.page


def number_of_colours(page: Any, selector: str) -> int:
    """Different colours in a canvas."""
    found = page.evaluate(
        "(selector) => { const canvas = document.querySelector(selector);"
        " const [w, h] = [canvas.width, canvas.height];"
        " const data = canvas.getContext('2d').getImageData(0, 0, w, h).data;"
        " const seen = new Set(); for (let i = 0; i < data.length; i += 4)"
        " seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]); return seen.size; }",
        selector,
    )
    return int(found)


def test_lanes_numbers_and_table(reader: Reader, url: str) -> None:
    page = opened(reader)
    reader.until("document.querySelector('[data-number=running]').textContent.startsWith('0')")
    empty = number_of_colours(page, "canvas.lanes")
    with asked(url, 3, 300):
        reader.until(f"{OPEN} === 3")
        page.check(".engine-controls input[type=checkbox]")
        reader.until("document.querySelectorAll('.engine-table tbody tr').length >= 3")
        assert "cmpl-" in page.inner_text(".engine-table tbody")
        assert "running" in page.inner_text(".engine-table tbody")
        deadline = time.monotonic() + 60
        while number_of_colours(page, "canvas.lanes") <= empty:
            assert time.monotonic() < deadline, "no bar is drawn"
            time.sleep(0.1)
    reader.until(f"{OPEN} === 0")
    assert page.evaluate(ENDED) == 3
    tokens = "document.querySelector('engine-view').history.ended.map((bar) => bar.output)"
    assert page.evaluate(tokens) == [300, 300, 300]
    lanes = "document.querySelector('engine-view').history.ended.map((bar) => bar.last.lane).sort()"
    assert page.evaluate(lanes) == [0, 1, 2]


def test_steps_are_told_by_keyboard_and_pointer(reader: Reader, url: str) -> None:
    page = opened(reader)
    with asked(url, 1, 40):
        pass
    reader.until(f"{ENDED} === 1")
    # What is shown is a little behind what has been heard of.
    steps = "view.history.replica(view.replica).steps.at"
    reader.until(
        f"(() => {{ const view = document.querySelector('engine-view');"
        f" return view._until > {steps}.at(-1); }})()"
    )
    page.focus(".engine-picture")
    page.keyboard.press("ArrowLeft")
    reader.until("document.querySelector('.engine-step').textContent.includes('Step ')")
    first = page.inner_text(".engine-step")
    page.keyboard.press("ArrowLeft")
    reader.until(f"document.querySelector('.engine-step').textContent !== {json.dumps(first)}")
    assert page.get_attribute(".engine-controls button >> nth=0", "aria-pressed") == "true"


def test_a_recording_is_saved_and_opened(reader: Reader, url: str, tmp_path: Path) -> None:
    page = opened(reader)
    with asked(url, 2, 60):
        pass
    reader.until(f"{ENDED} === 2")
    with page.expect_download() as download:
        page.click(".engine-controls button >> nth=1")
    file = tmp_path / "steps.json"
    download.value.save_as(file)
    recording = json.loads(file.read_text(encoding="utf-8"))
    assert recording["format"] == "infer-recording"
    assert (
        sum(sum(frame["steps"]["count"]) for frame in recording["frames"] if "steps" in frame) > 50
    )
    page.set_input_files(".engine-controls input[type=file]", file)
    reader.until("document.querySelector('engine-view').isLive === false")
    assert page.evaluate(ENDED) == 2
    for text in ("{", "[]", '{"format": "infer-recording", "hello": {}, "frames": []}'):
        file.write_text(text, encoding="utf-8")
        page.set_input_files(".engine-controls input[type=file]", file)
        reader.until("document.querySelector('.notice.bad')?.textContent.includes('damaged')")
        page.evaluate("document.querySelector('engine-view').error = ''")
        reader.until("!document.querySelector('.notice.bad')")


@pytest.mark.timeout(450)
def test_the_modes_beside_one_another(reader: Reader) -> None:
    """A comparison has the lowest priority, so a busy machine may not end it in time."""
    page = opened(reader)
    for _ in range(3):
        page.click(".compare-run")
        reader.until("document.querySelector('.comparison tbody, .comparison .bad')", timeout_s=150)
        if not page.locator(".comparison .bad").count():
            break
    assert page.locator(".comparison canvas").count() == 3
    rows = page.locator(".comparison tbody tr").all_inner_texts()
    steps = [int(row.split("\t")[1].replace(",", "")) for row in rows]
    assert steps == [documented_steps(row) for row in ("cache", "static", "continuous")]
    assert steps[2] < steps[1] < steps[0]


def documented_steps(row: str) -> int:
    """The steps of a row of the table that `benchmarks/modes.py` has printed."""
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {row}[^|]*\| ([0-9,]+) \|", text, re.MULTILINE)
    assert found, row
    return int(found[1].replace(",", ""))
