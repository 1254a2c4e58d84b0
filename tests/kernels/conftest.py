"""Which instruction set the layers of a test use."""

from collections.abc import Callable

import pytest

from infer.kernels import linear


@pytest.fixture
def ask_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Layers that are made from now on use this one; without it the test is skipped."""

    def ask(name: str) -> None:
        monkeypatch.setenv(linear.VARIABLE, name)
        try:
            linear.native_obstacle()
        except ValueError as error:
            pytest.skip(str(error))

    return ask


@pytest.fixture(params=["amx", "avx512"])
def isa(request: pytest.FixtureRequest, ask_for: Callable[[str], None]) -> str:
    """NativeLinear's, one after the other."""
    name: str = request.param
    ask_for(name)
    return name
