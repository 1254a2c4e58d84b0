"""Fixtures of the kernels' tests: threads as before, and the instruction set of a test's layers."""

from collections.abc import Callable, Iterator

import pytest
import torch

from infer.kernels import loader, native
from tests.support import isas


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Tests may set torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ask_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Function that selects the instruction set of layers made later, or onednn.

    The test is skipped if the CPU does not have it, or the library could not be built.
    """

    def ask(name: str) -> None:
        monkeypatch.setenv(native.VARIABLE, name)
        monkeypatch.delenv(loader.ISA_VARIABLE, raising=False)  # it limits what can be asked for
        if name != "onednn" and name not in loader.instruction_sets():
            pytest.skip(f"no {name} here")
        assert (native.native_obstacle() is None) is (name != "onednn")

    return ask


@pytest.fixture(params=isas.each(loader.INSTRUCTION_SETS))
def isa(request: pytest.FixtureRequest, ask_for: Callable[[str], None]) -> str:
    """Each instruction set of NativeLinear."""
    name: str = request.param
    ask_for(name)
    return name
