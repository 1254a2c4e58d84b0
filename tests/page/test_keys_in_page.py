"""The page on a server with API keys and limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from infer.server.tenancy.keys import KeyLimits, Keys
from tests.support.page_driver import Reader

pytestmark = pytest.mark.browser


@dataclass
class Tokens:
    """Two keys: one without limits, one with two requests a minute."""

    free: str
    limited: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def tokens(folder: Path) -> Tokens:
    keys = Keys(folder / "keys", must_exist=False)
    limited = KeyLimits(requests_per_minute=2)
    return Tokens(keys.create("free", KeyLimits()), keys.create("limited", limited))


@pytest.fixture(scope="module")
def server_options(folder: Path, tokens: Tokens) -> list[str]:
    assert tokens
    return ["--api-keys", str(folder / "keys")]


def enter(reader: Reader, key: str, *, remember: bool = False) -> None:
    reader.write("key-dialog input.key", key)
    if remember:
        reader.use("key-dialog input.remember")
    reader.use("key-dialog footer button.main")


def test_a_wrong_key_is_said_and_a_right_one_opens_the_chat(person: Reader, tokens: Tokens) -> None:
    page, reader = person.page, person
    reader.use(".welcome button")
    enter(reader, "wrong")
    page.wait_for_selector(f"key-dialog .fault-text:has-text('{reader.said('key.wrong')}')")
    enter(reader, tokens.free)
    page.wait_for_selector("key-dialog", state="detached")
    assert reader.ask("What is 2 + 2?")
    assert "infer.key" not in page.evaluate("JSON.stringify({...sessionStorage, ...localStorage})")
    page.reload()
    page.wait_for_selector("header.topbar button.main")  # it was in memory only


def test_a_key_is_remembered_in_the_tab_if_the_reader_says_so(
    reader: Reader, tokens: Tokens
) -> None:
    page = reader.page
    reader.use("header.topbar button.main")
    enter(reader, tokens.free, remember=True)
    page.wait_for_selector("key-dialog", state="detached")
    page.reload()
    page.wait_for_selector(".welcome .examples")
    other = reader.open()
    other.wait_for_selector("header.topbar button.main")  # not in other tabs


def test_a_limit_counts_down_and_gives_the_message_back(reader: Reader, tokens: Tokens) -> None:
    page = reader.page
    reader.use("header.topbar button.main")
    enter(reader, tokens.limited)
    page.wait_for_selector("key-dialog", state="detached")
    for number in range(4):
        reader.send(f"What is {number} + 1?")
        reader.until(
            "document.querySelector('.fault')"
            f" || document.querySelectorAll('.message.assistant .figures').length > {number}"
        )
        if page.locator(".fault").count():
            break
    assert "limit is reached" in page.inner_text(".fault")
    assert "Again in" in page.inner_text(".fault")
    assert page.input_value(".composer textarea") == f"What is {number} + 1?"
    assert page.is_disabled("button.send")


def test_the_page_alone_gives_nothing_away(reader: Reader) -> None:
    assert reader.page.evaluate("fetch('/v1/models').then((r) => r.status)") == 401
