"""Driving the page in a real browser: a Chromium of this machine, a real server, the shipped model.

`chromium` finds the browser, or skips the test where there is none. `Reader` is somebody who uses
the page: it has what the journeys do over and over, and it collects whatever the browser reports.
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
from typing import Any
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
WAIT_MS = 20_000
PHONE = {"width": 320, "height": 640}
DESKTOP = {"width": 1280, "height": 800}


@contextmanager
def chromium(flags: Sequence[str] = ()) -> Iterator[Any]:
    """A running Chromium, with more `flags`; skips where Playwright or a browser is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install 'infer[browser]'")
    path = os.environ.get("INFER_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("there is no Chromium here; INFER_CHROMIUM may name one")
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
        """seconds after each piece from the server"""
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

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        """`context`: of Playwright's `new_context`, such as `viewport` and `locale`."""
        self.url = url
        self.context = browser.new_context(**{"viewport": DESKTOP, "locale": "en-GB", **context})
        self.context.set_default_timeout(WAIT_MS)
        self.problems: list[str] = []
        """errors and policy violations that the browser reported"""
        self.foreign: list[str] = []
        """addresses of other hosts that were asked for"""
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

    def send(self, text: str, page: Any = None) -> None:
        """Write a message and send it with Enter."""
        page = page or self.page
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
        deadline = time.monotonic() + timeout_s
        while not (page or self.page).evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"not true within {timeout_s} s: {condition}"
            (page or self.page).wait_for_timeout(30)

    def answers(self, page: Any = None) -> list[str]:
        """The texts of the answers that are shown."""
        return [
            text.strip()
            for text in (page or self.page)
            .locator(".message.assistant text-view")
            .all_inner_texts()
        ]

    def questions(self, page: Any = None) -> list[str]:
        """The texts of the reader's messages that are shown."""
        return list((page or self.page).locator(".message.user .own-text").all_inner_texts())

    def titles(self, page: Any = None) -> list[str]:
        """The titles in the side bar."""
        found = (page or self.page).locator(".conversations button.open").all_inner_texts()
        return [text.strip() for text in found]

    def settings(self, values: Mapping[str, Any], page: Any = None) -> None:
        """Set sampling fields by name."""
        page = page or self.page
        page.click("header.topbar button:last-child")
        for name, value in values.items():
            page.fill(f"#setting-{name}", str(value))
        page.keyboard.press("Tab")
        page.click("dialog footer button.main")
        page.wait_for_selector("dialog", state="detached")

    def picture(self, path: Path) -> None:
        """Save a screenshot."""
        self.page.screenshot(path=str(path))
