"""A few examples of each kind that `chats` makes; hours of them: `python tests/fuzz/chats.py`."""

from __future__ import annotations

import asyncio

import pytest

from tests.fuzz.chats import checks, try_examples
from tests.support.serving import scripted, serving, spelled

NUM_EXAMPLES = {"answers": 150, "written calls": 150, "conversations": 100, "bodies": 40}


@pytest.mark.parametrize("name", ["answers", "written calls", "conversations", "bodies"])
def test_nothing_breaks(name: str) -> None:
    with asyncio.Runner() as runner:
        opened = serving(scripted(spelled("<tool_call>{}"), max_seq_len=4096, num_pages=4096))
        app = runner.run(opened.__aenter__())
        try:
            try_examples(checks(runner.get_loop(), app)[name], NUM_EXAMPLES[name], None)
        finally:
            runner.run(opened.__aexit__(None, None, None))
