"""A browser for the session, a server for each module, and a reader for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.page_driver import Reader, Wire, chromium
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


@pytest.fixture
def far_reader(browser: Any, wire: Wire) -> Iterator[Reader]:
    """A reader whose connection can be slow, or cut."""
    reader = Reader(browser, f"http://127.0.0.1:{wire.port}")
    yield reader
    reader.close()


@pytest.fixture
def new_reader(browser: Any, url: str) -> Iterator[Callable[..., Reader]]:
    """Makes readers, and closes them: nothing bad may have been reported to any of them."""
    readers: list[Reader] = []

    def make(**context: Any) -> Reader:
        readers.append(Reader(browser, url, **context))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


@pytest.fixture
def reader(new_reader: Callable[..., Reader]) -> Reader:
    return new_reader()
