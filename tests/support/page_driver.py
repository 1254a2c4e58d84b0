"""Driving the page in a real browser: a Chromium of this machine, a real server, the shipped model.

`chromium` finds the browser, or skips the test where there is none. `Reader` is somebody who uses
the page: with a mouse, by keyboard alone, or by touch on a phone that is set to Chinese. It has
what the journeys do over and over, and it collects whatever the browser reports.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 60_000
"""Far more than anything takes here, so that a loaded machine is no failure."""
PHONE = {"width": 320, "height": 640}
DESKTOP = {"width": 1280, "height": 800}
Hands = Literal["mouse", "keyboard", "touch"]
MAX_TABS = 150
"""How often the Tab key may be pressed on the way to an element."""
ON_A_PHONE = {"viewport": PHONE, "locale": "zh-CN", "has_touch": True, "is_mobile": True}
ON_THE_WAY = (
    "(target) => { const now = document.activeElement;"
    " if (target === now) return '';"
    " return now.compareDocumentPosition(target) & Node.DOCUMENT_POSITION_FOLLOWING"
    " ? 'Tab' : 'Shift+Tab'; }"
)
"""The key that leads nearer to an element; "" if it has the focus."""
ANSWERS = (
    "[...document.querySelectorAll('.message.assistant text-view')].map((view) =>"
    " [...view.children].map((block) => block.textContent.trim()).join('\\n\\n'))"
)
"""The texts of the answers; `innerText` has no blocks that are outside of the window."""


def chromium_path() -> str:
    """The browser's program; skips where there is none."""
    path = os.environ.get("INFER_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("there is no Chromium here; INFER_CHROMIUM may name one")
    return path


@contextmanager
def chromium(flags: Sequence[str] = ()) -> Iterator[Any]:
    """A running Chromium, with more `flags`; skips where Playwright or a browser is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")
    path = chromium_path()
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, headless=True, args=[*FLAGS, *flags]
        )
        try:
            yield browser
        finally:
            browser.close()


class Wire:
    """A TCP connection to a server that can be made slow, and cut: `port` leads to it."""

    def __init__(self, to_port: int) -> None:
        self.pause_s = 0.0
        """Seconds after each piece from the server."""
        self._to_port = to_port
        self._open: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._to_port))
                self._open += [near, far]
                for one, other, is_answer in ((near, far, False), (far, near, True)):
                    arguments = (one, other, is_answer)
                    threading.Thread(target=self._carry, args=arguments, daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError), one, other:
            while data := one.recv(512 if self.pause_s else 65536):
                other.sendall(data)
                if is_answer:
                    time.sleep(self.pause_s)

    def cut(self) -> None:
        """Break all connections."""
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        """Break all connections, and take no more."""
        self._listening.close()
        self.cut()


class Reader:
    """A person with a browser of their own (a context) and a page in it."""

    def __init__(self, browser: Any, url: str, hands: Hands = "mouse", **context: Any) -> None:
        """`context`: of Playwright's `new_context`, such as `viewport` and `locale`."""
        self.hands = hands
        if hands == "touch":
            context = {**ON_A_PHONE, **context}
        self.url = url
        self.context = browser.new_context(**{"viewport": DESKTOP, "locale": "en-GB", **context})
        self.context.set_default_timeout(WAIT_MS)
        self.problems: list[str] = []
        """Errors and policy violations that the browser reported."""
        self.foreign: list[str] = []
        """Addresses of other hosts that were asked for."""
        self.page = self.open()

    def open(self, path: str = "/") -> Any:
        """Open a further tab of the same browser; returns its page."""
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("console", self._heard)
        page.on("request", self._asked)
        page.add_init_script(
            "document.addEventListener('securitypolicyviolation',"
            " (e) => console.error('policy: ' + e.violatedDirective + ' ' + e.blockedURI))"
        )
        page.goto(self.url + path)
        page.wait_for_selector(".composer textarea, .page-body")
        return page

    def _heard(self, message: Any) -> None:
        text = message.text
        if message.type == "error" and "Failed to load resource" not in text:
            self.problems.append(text)

    def _asked(self, request: Any) -> None:
        place = urlsplit(request.url)
        if place.scheme not in ("data", "blob") and place.netloc != urlsplit(self.url).netloc:
            self.foreign.append(request.url)

    def close(self) -> None:
        """Close the browser's context; afterwards nothing bad may have been reported."""
        self.context.close()
        assert not self.problems, self.problems
        assert not self.foreign, self.foreign

    # ---- what readers do

    def reach(self, selector: str, page: Any = None) -> None:
        """Move the focus to an element with the Tab key."""
        page = page or self.page
        target = page.locator(selector).first
        target.wait_for()
        for _ in range(MAX_TABS):
            key = target.evaluate(ON_THE_WAY)
            if not key:
                return
            page.keyboard.press(key)
        raise AssertionError(f"{selector} cannot be reached by keyboard")

    def use(self, selector: str, page: Any = None) -> None:
        """Click on an element, tap it, or reach it by keyboard and press Enter; Space for boxes
        that are ticked."""
        page = page or self.page
        if self.hands != "keyboard":
            self._show_list(selector, page)
            self._press(selector, page)
        else:
            self.reach(selector, page)
            is_box = "e => e.matches('input[type=checkbox], input[type=radio]')"
            page.keyboard.press(
                "Space" if page.locator(selector).first.evaluate(is_box) else "Enter"
            )

    def _press(self, selector: str, page: Any) -> None:
        target = page.locator(selector).first
        if self.hands == "touch":
            target.tap()
        else:
            target.click()

    def _show_list(self, selector: str, page: Any) -> None:
        """In a narrow window the list of conversations is behind a button."""
        inside = page.locator(selector).first.evaluate("e => Boolean(e.closest('.sidebar'))")
        if inside and page.is_visible(".menu-button") and not page.locator(".app.drawer").count():
            self._press(".menu-button", page)
            page.wait_for_selector(".app.drawer .sidebar .search")

    def write(self, selector: str, text: str, page: Any = None) -> None:
        """Replace the text of a field."""
        page = page or self.page
        if self.hands == "keyboard":
            self.reach(selector, page)
            page.keyboard.press("Control+A")
            page.keyboard.press("Delete")
            page.keyboard.insert_text(text)
        else:
            self.use(selector, page)
            page.fill(selector, text)

    def choose(self, selector: str, value: str, page: Any = None) -> None:
        """Choose an option of a list by its value."""
        page = page or self.page
        if self.hands != "keyboard":
            page.locator(selector).first.select_option(value)
            return
        self.reach(selector, page)
        options = page.locator(selector).first
        at, to = options.evaluate(
            "(e, value) => [e.selectedIndex, [...e.options].findIndex((o) => o.value === value)]",
            value,
        )
        for _ in range(abs(to - at)):
            page.keyboard.press("ArrowDown" if to > at else "ArrowUp")
        assert options.input_value() == value

    def give_files(self, button: str, paths: Sequence[Path], page: Any = None) -> None:
        """Choose files in the dialog that a button opens."""
        page = page or self.page
        with page.expect_file_chooser() as chooser:
            self.use(button, page)
        chooser.value.set_files([str(path) for path in paths])

    def said(self, key: str, page: Any = None, **values: Any) -> str:
        """A text of the page's catalogue in the language that the page shows."""
        text = "async ([key, values]) => (await import('/ui/lib/i18n.js')).t(key, values)"
        return str((page or self.page).evaluate(text, [key, values]))

    def send(self, text: str, page: Any = None) -> None:
        """Write a message and send it: with Enter, or with the button on a phone."""
        page = page or self.page
        if self.hands == "keyboard":
            self.write(".composer textarea", text, page)
            page.keyboard.press("Enter")
        elif self.hands == "touch":
            page.fill(".composer textarea", text)
            page.locator("button.send").tap()
        else:
            page.fill(".composer textarea", text)
            page.press(".composer textarea", "Enter")

    def ask(self, text: str, page: Any = None) -> str:
        """Send a message and wait for the whole answer; returns its text."""
        page = page or self.page
        before = page.locator(".message.assistant .figures").count()
        self.send(text, page)
        self.until(
            f"document.querySelectorAll('.message.assistant .figures').length > {before}", page
        )
        return self.answers(page)[-1]

    def until(self, condition: str, page: Any = None, timeout_s: float = WAIT_MS / 1000) -> None:
        """Wait until an expression of JavaScript is true. Playwright's own way of waiting needs
        `eval`, which the page's policy forbids."""
        deadline, page = time.monotonic() + timeout_s, page or self.page
        while not page.evaluate(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                said = page.locator(".notice, .fault, .ending, .waiting").all_inner_texts()
                said += [f"{len(self.questions(page))} questions, {self.answers(page)}"[:600]]
                focus = page.evaluate(
                    "((e) => [e?.outerHTML.slice(0, 200), e?.value])(document.activeElement)"
                )
                said += page.locator(".composer").all_inner_texts()
                message = f"not true within {timeout_s} s: {condition}; the page says {said}"
                raise AssertionError(f"{message}, and the focus is on {focus}")
            page.wait_for_timeout(30)

    def answers(self, page: Any = None) -> list[str]:
        """The texts of the answers that are there, in the window or not."""
        return [str(text).strip() for text in (page or self.page).evaluate(ANSWERS)]

    def questions(self, page: Any = None) -> list[str]:
        """The texts of the reader's messages that are shown."""
        return list((page or self.page).locator(".message.user .own-text").all_inner_texts())

    def titles(self, page: Any = None) -> list[str]:
        """The titles in the side bar."""
        rows = (page or self.page).locator(".conversations button.open")
        return list(rows.evaluate_all("(found) => found.map((each) => each.title)"))

    def settings(self, values: Mapping[str, Any], page: Any = None) -> None:
        """Set sampling fields by name; True ticks a box."""
        page = page or self.page
        self.open_settings(page)
        for name, value in values.items():
            field = f"#setting-{name}"
            if value is True:
                self.use(field, page)
            else:
                self.write(field, str(value), page)
        self.close_dialog(page)

    def open_settings(self, page: Any = None) -> None:
        """Open the dialog of settings."""
        self.use("header.topbar button:last-child", page)
        (page or self.page).wait_for_selector("settings-dialog dialog[open]")
        if not (page or self.page).locator("details.more[open]").count():
            self.use("details.more summary", page)
            (page or self.page).wait_for_selector("details.more[open]")

    def open_happened(self) -> None:
        """Open what happened during the last answer, and wait for its timeline."""
        last = self.page.locator(".message.assistant .figures").count() - 1
        self.use(f".message.assistant .figures >> nth={last}")
        self.page.wait_for_selector(".timeline li")

    def open_tokens(self, at: int) -> None:
        """Open the tokens of an answer and the alternatives to one of them."""
        self.use(".message.assistant .toggle:not(.figures)")
        self.page.wait_for_selector(f".tokens button >> nth={at}")
        if self.hands == "keyboard":
            self.reach(".tokens button")
            for _ in range(at):
                self.page.keyboard.press("ArrowRight")
            self.page.keyboard.press("Enter")
        else:
            self.use(f".tokens button >> nth={at}")
        self.page.wait_for_selector(".alternatives")

    def open_engine(self) -> None:
        """Open the engine view."""
        self.use(".views a[href='#/engine']")
        self.page.wait_for_selector("engine-view canvas.lanes")

    def close_dialog(self, page: Any = None) -> None:
        """Close the open dialog."""
        self.use("dialog footer button.main", page)
        (page or self.page).wait_for_selector("dialog", state="detached")

    def picture(self, path: Path, selector: str = "") -> None:
        """Save a screenshot of the window, or of one element."""
        (self.page.locator(selector) if selector else self.page).screenshot(path=str(path))
