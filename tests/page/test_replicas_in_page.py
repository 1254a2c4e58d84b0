"""The engine view of a server with two engines: lanes, steps and pages of each, and a death."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from infer.engine.build.processors import read_processors
from tests.page.test_access import AXE, violations
from tests.page.test_engine_view import ENDED, OPEN, asked, opened
from tests.support.page_driver import PHONE, Reader
from tests.support.server_process import Served

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        read_processors().num_threads(numa="all") < 2, reason="each engine needs a core"
    ),
]
NAMES = ["replica-1", "replica-2"]
HISTORY = "document.querySelector('engine-view').history"
STEP = "document.querySelector('.engine-step').textContent"


@pytest.fixture(scope="module")
def server_options() -> list[str]:
    return ["--replicas", "2", "--routing", "least"]


def seats_taken(page: Any) -> list[str]:
    """Replica and lane of each request that has a seat."""
    bars = f"[...{HISTORY}.open.values()].filter((bar) => bar.last.lane >= 0)"
    found = page.evaluate(f"{bars}.map((bar) => `${{bar.replica}} ${{bar.last.lane}}`)")
    return sorted(map(str, found))


def numbers_of(page: Any, replica: str) -> tuple[list[int], list[float]]:
    """Numbers and starts of the steps of a replica."""
    steps = f"{HISTORY}.replica('{replica}').steps"
    numbers = page.evaluate(f"{steps}.values.map((step) => step.number)")
    return numbers, page.evaluate(f"{steps}.at")


def test_each_replica_has_lanes_steps_and_pages(reader: Reader, url: str, tmp_path: Path) -> None:
    page = opened(reader)
    rows = page.locator("engine-replicas tbody tr")
    reader.until("document.querySelectorAll('engine-replicas tbody tr').length === 3")
    assert [row.split("\t")[0] for row in rows.all_inner_texts()] == [*NAMES, "all"]
    page.check(".engine-controls input[type=checkbox]")
    with asked(url, 4, 400):
        reader.until(f"{OPEN} === 4")
        reader.until("document.querySelectorAll('engine-table tbody tr').length === 4")
        reader.until(f"[...{HISTORY}.open.values()].every((bar) => bar.last.lane >= 0)")
        assert seats_taken(page) == ["replica-1 0", "replica-1 1", "replica-2 0", "replica-2 1"]
        reader.until("document.querySelector('engine-table tbody').innerText.includes('replica-1')")
        assert "replica-2" in page.inner_text("engine-table tbody")
    reader.until(f"{ENDED} === 4")
    for name in NAMES:
        numbers, starts = numbers_of(page, name)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert len(numbers) >= 400
        assert starts == sorted(starts)
    check_keys(reader)
    with page.expect_download() as download:
        page.click(".engine-controls button >> nth=1")
    file = tmp_path / "steps.json"
    download.value.save_as(file)
    page.set_input_files(".engine-controls input[type=file]", file)
    reader.until("document.querySelector('engine-view').isLive === false")
    assert page.evaluate(f"[...{HISTORY}.replicas.keys()]") == NAMES
    assert page.evaluate(ENDED) == 4


def check_keys(reader: Reader) -> None:
    """Left and right stay in one replica; up and down change it."""
    page = reader.page
    page.focus(".engine-picture")
    page.keyboard.press("ArrowLeft")
    reader.until(f"{STEP}.startsWith('replica-1, step ')")
    first = page.inner_text(".engine-step")
    page.keyboard.press("ArrowLeft")
    reader.until(f"{STEP} !== {json.dumps(first)} && {STEP}.startsWith('replica-1, step ')")
    page.keyboard.press("ArrowDown")
    reader.until(f"{STEP}.startsWith('replica-2, step ')")
    page.keyboard.press("ArrowUp")
    reader.until(f"{STEP}.startsWith('replica-1, step ')")


def test_a_replica_that_dies_and_comes_back(reader: Reader, url: str, server: Served) -> None:
    page = opened(reader)
    reader.until("document.querySelectorAll('engine-replicas tbody tr').length === 3")
    with asked(url, 4, 1500):
        reader.until(f"[...{HISTORY}.open.values()].filter((bar) => bar.output > 20).length === 4")
        assert len(set(seats_taken(page))) == 4
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        dead = f"[...{HISTORY}.replicas.values()].filter((each) => each.absences.length > 0)"
        reader.until(f"{dead}.length === 1", timeout_s=30)
        reader.until(f"{dead}[0].absences[0].to !== null", timeout_s=60)
    reader.until(f"{ENDED} === 4")
    assert page.evaluate(f"{dead}.map((each) => each.restarts)") == [1]
    [name] = page.evaluate(
        f"[...{HISTORY}.replicas].filter(([, each]) => each.restarts).map(([name]) => name)"
    )
    ended = f"{HISTORY}.ended.map((bar) => [...new Set(bar.spans.map((span) => span.replica))])"
    [other] = [each for each in NAMES if each != name]
    assert sorted(page.evaluate(ended)) == sorted([[other]] * 2 + [[name, other]] * 2)
    assert page.evaluate(f"{HISTORY}.ended.map((bar) => bar.output)") == [1500] * 4
    assert page.evaluate(f"{HISTORY}.restarts.length") == 0, "no engine stands for all"
    row = f"[...document.querySelectorAll('engine-replicas tbody tr')][{NAMES.index(name)}]"
    reader.until(f"{row}.innerText.endsWith('1') && !{row}.classList.contains('bad')")


@pytest.mark.parametrize("locale", ["en-GB", "zh-CN"])
def test_on_a_narrow_screen(new_reader: Any, url: str, locale: str) -> None:
    reader = new_reader(viewport=PHONE, locale=locale)
    page = opened(reader)
    reader.until("document.querySelectorAll('engine-replicas tbody tr').length === 3")
    page.check(".engine-controls input[type=checkbox]")
    with asked(url, 2, 400):
        reader.until("document.querySelectorAll('engine-table tbody tr').length > 0")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    if AXE.is_file():
        assert violations(page) == []
    heads = page.inner_text("engine-replicas thead")
    assert ("Replica" in heads) is (locale == "en-GB")
