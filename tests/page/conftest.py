"""A browser for the session, a server for each module, and a reader for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.page_driver import Hands, Reader, Wire, chromium
from tests.support.server_process import Served, model_server, served


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server_options() -> list[str]:
    """Options of `infer serve` for the module's server."""
    return []


@pytest.fixture(scope="module")
def server(
    browser: Any, server_options: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    sessions = f"sqlite:///{folder / 'sessions.db'}"
    arguments = model_server(
        "--max-seq-len", "2048", "--dtype", "float32", "--sessions", sessions, *server_options
    )
    with served(arguments, folder / "log") as running:
        yield running


@pytest.fixture(scope="module")
def url(server: Served) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.fixture
def wire(server: Served) -> Iterator[Wire]:
    found = Wire(server.port)
    yield found
    found.close()


@pytest.fixture(params=["mouse", "keyboard", "touch"])
def hands(request: pytest.FixtureRequest) -> Hands:
    """How the readers of a journey use the page."""
    found: Hands = request.param
    return found


@pytest.fixture
def far_reader(browser: Any, wire: Wire, hands: Hands) -> Iterator[Reader]:
    """A reader whose connection can be slow, or cut."""
    reader = Reader(browser, f"http://127.0.0.1:{wire.port}", hands)
    yield reader
    reader.close()


@pytest.fixture
def new_reader(browser: Any, url: str) -> Iterator[Callable[..., Reader]]:
    """Makes readers, and closes them: nothing bad may have been reported to any of them."""
    readers: list[Reader] = []

    def make(hands: Hands = "mouse", **context: Any) -> Reader:
        readers.append(Reader(browser, url, hands, **context))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


@pytest.fixture
def reader(new_reader: Callable[..., Reader]) -> Reader:
    """One with a mouse."""
    return new_reader()


@pytest.fixture
def person(new_reader: Callable[..., Reader], hands: Hands) -> Reader:
    """One of a journey, which is made with a mouse, by keyboard alone and on a phone."""
    return new_reader(hands)
