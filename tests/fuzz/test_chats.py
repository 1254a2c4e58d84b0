"""A few examples of each kind that `chats` makes; hours of them: `python tests/fuzz/chats.py`."""

from __future__ import annotations

import asyncio

import pytest

from tests.fuzz.chats import checks, try_examples
from tests.support.serving import scripted, serving, spelled

NUM_EXAMPLES = {
    "answers": 15,
    "written calls": 15,
    "conversations": 10,
    "any template": 15,
    "bodies": 5,
}


@pytest.mark.parametrize("factor", [1, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NUM_EXAMPLES)
def test_nothing_breaks(name: str, factor: int) -> None:
    with asyncio.Runner() as runner:
        opened = serving(scripted(spelled("<tool_call>{}"), max_seq_len=4096, num_pages=4096))
        app = runner.run(opened.__aenter__())
        try:
            count = factor * NUM_EXAMPLES[name]
            try_examples(checks(runner.get_loop(), app)[name], count, None)
        finally:
            runner.run(opened.__aexit__(None, None, None))
