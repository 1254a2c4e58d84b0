"""Fixtures that select the instruction set of a test's layers."""

from collections.abc import Callable

import pytest

from infer.kernels import linear


@pytest.fixture
def ask_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Function that selects the instruction set of layers made later.

    The test is skipped if the CPU does not have it.
    """

    def ask(name: str) -> None:
        monkeypatch.setenv(linear.VARIABLE, name)
        try:
            linear.native_obstacle()
        except ValueError as error:
            pytest.skip(str(error))

    return ask


@pytest.fixture(params=["amx", "avx512"])
def isa(request: pytest.FixtureRequest, ask_for: Callable[[str], None]) -> str:
    """Each instruction set of NativeLinear."""
    name: str = request.param
    ask_for(name)
    return name
