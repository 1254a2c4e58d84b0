"""Fixtures that select the instruction set of a test's layers."""

from collections.abc import Callable

import pytest

from infer.kernels import linear, loader
from tests.support import isas


@pytest.fixture
def ask_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Function that selects the instruction set of layers made later, or onednn.

    The test is skipped if the CPU does not have it, or the library could not be built.
    """

    def ask(name: str) -> None:
        monkeypatch.setenv(linear.VARIABLE, name)
        if name != "onednn" and name not in loader.instruction_sets():
            pytest.skip(f"no {name} here")
        assert (linear.native_obstacle() is None) is (name != "onednn")

    return ask


@pytest.fixture(params=isas.each(loader.INSTRUCTION_SETS))
def isa(request: pytest.FixtureRequest, ask_for: Callable[[str], None]) -> str:
    """Each instruction set of NativeLinear."""
    name: str = request.param
    ask_for(name)
    return name
