"""What a reader does while the server still owes an answer: nothing of it is lost or moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.page.test_journeys import keep_on_server
from tests.support.page_driver import Reader

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
FIELD = ".composer textarea"
SESSIONS = "**/v1/sessions"


def hold(page: Any, method: str, pattern: str = SESSIONS) -> Callable[[], int]:
    """Hold requests for sessions back; the function waits for the first, lets them go, and returns
    how many it were. A page that is left may have made one, too."""
    held: list[Any] = []
    is_open = False

    def pass_on(route: Any) -> None:
        if is_open or route.request.method != method:
            route.continue_()
        else:
            held.append(route)

    def let_go() -> int:
        nonlocal is_open
        while not held:
            page.wait_for_timeout(30)
        is_open = True
        for route in held:
            route.continue_()
        return len(held)

    page.route(pattern, pass_on)
    return let_go


@pytest.mark.parametrize("box", ["settings.on-server", "settings.show-server"])
def test_a_list_that_comes_late_leaves_the_conversation_open(reader: Reader, box: str) -> None:
    page = reader.page
    let_go = hold(page, "GET")
    keep_on_server(reader, box)
    reader.send("What is 1 + 1?")
    reader.until("document.querySelectorAll('.message.user').length == 1")
    page.fill(FIELD, "and then")
    let_go()
    page.wait_for_selector(".message.assistant .figures")
    page.wait_for_selector(".conversations button.open")
    assert reader.questions() == ["What is 1 + 1?"]
    assert page.input_value(FIELD) == "and then"


def test_a_session_that_is_made_slowly_is_made_once_and_keeps_what_is_typed(reader: Reader) -> None:
    page = reader.page
    keep_on_server(reader, "settings.on-server")
    let_go = hold(page, "POST")
    reader.send("What is 3 + 4?")
    reader.until("document.querySelectorAll('.message.user').length == 1")
    page.fill(FIELD, "What is 2 + 2?")
    page.press(FIELD, "Enter")
    page.wait_for_timeout(300)
    assert reader.questions() == ["What is 3 + 4?"]
    assert let_go() == 1
    page.wait_for_selector(".message.assistant .figures")
    assert page.input_value(FIELD) == "What is 2 + 2?"
    page.reload()
    page.wait_for_selector(".message.assistant")
    reader.until(f"document.querySelector('{FIELD}').value == 'What is 2 + 2?'")
    page.press(FIELD, "Enter")
    reader.until("document.querySelectorAll('.message.assistant .figures').length == 1")
    assert reader.questions() == ["What is 3 + 4?", "What is 2 + 2?"]
    assert reader.titles().count("What is 3 + 4?") == 1
    page.keyboard.press("Control+Shift+o")
    page.wait_for_selector(".message", state="detached")
    assert page.input_value(FIELD) == ""


def test_a_dialog_that_is_opened_before_the_conversations_gets_its_fields_and_the_focus(
    reader: Reader,
) -> None:
    page = reader.page
    page.evaluate("localStorage.setItem('infer.hasSessions', 'true')")
    let_go = hold(page, "GET")
    page.reload()
    page.wait_for_selector(FIELD)
    reader.use("header.topbar button:last-child")
    page.wait_for_selector("settings-dialog dialog[open]")
    let_go()
    page.wait_for_selector("settings-dialog .content textarea:focus")


def test_the_conversation_that_was_opened_last_is_shown(reader: Reader) -> None:
    page = reader.page
    keep_on_server(reader, "settings.on-server")
    reader.ask("What is 5 + 1?")
    page.keyboard.press("Control+Shift+o")
    page.wait_for_selector(".message", state="detached")
    reader.ask("What is 6 + 1?")
    let_go = hold(page, "GET", "**/v1/sessions/*")
    page.click(".conversations button.open[title='What is 5 + 1?']")
    page.wait_for_timeout(100)
    page.keyboard.press("Control+Shift+o")
    page.wait_for_selector(".message", state="detached")
    page.fill(FIELD, "a new one")
    let_go()
    page.wait_for_timeout(500)
    assert reader.questions() == []
    assert page.input_value(FIELD) == "a new one"
    page.click(".conversations button.open[title='What is 5 + 1?']")
    page.wait_for_selector(".message.assistant")
    assert reader.questions() == ["What is 5 + 1?"]


@pytest.mark.parametrize("method", ["PATCH", "DELETE"])
def test_what_the_server_refuses_has_not_happened_and_is_said(reader: Reader, method: str) -> None:
    page, row = reader.page, ".conversations li:has(button.open[title='What is 7 + 1?'])"
    keep_on_server(reader, "settings.on-server")
    reader.ask("What is 7 + 1?")
    page.route(
        "**/v1/sessions/*",
        lambda route: (
            route.fulfill(status=500, json={"error": {"message": "the disk is full"}})
            if route.request.method == method
            else route.continue_()
        ),
    )
    page.hover(row)
    page.click(f"{row} .acts button >> nth={2 if method == 'DELETE' else 1}")
    if method == "DELETE":
        page.click("button.sure")
    else:
        page.fill("input.rename", "Another title")
        page.press("input.rename", "Enter")
    page.wait_for_selector(".composer .fault:has-text('the disk is full')")
    page.wait_for_selector(row)
    assert reader.questions() == ["What is 7 + 1?"]
    page.unroute("**/v1/sessions/*")
    page.hover(row)
    page.click(f"{row} .acts button >> nth=2")
    page.click("button.sure")
    page.wait_for_selector(row, state="detached")
    page.wait_for_selector(".message", state="detached")
