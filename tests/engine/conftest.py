"""What the engines of one file may share, for files whose tests are not about it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ready_grammars import verdicts_kept
from tests.support.ready_templates import templates_kept


@pytest.fixture(scope="module")
def kept_templates() -> Iterator[None]:
    """Each engine would start a process for its chat template."""
    with templates_kept():
        yield


@pytest.fixture(scope="module")
def kept_verdicts() -> Iterator[None]:
    """All engines of the file have one vocabulary."""
    with verdicts_kept():
        yield
