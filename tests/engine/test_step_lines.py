"""`LLM.generate(progress="steps")`: a line for each step."""

from __future__ import annotations

import io
import re

import pytest

from infer import LLM, SamplingParams
from infer.engine.client.step_lines import StepLines
from infer.errors import RequestError
from infer.types import FinishReason
from infer.types.step_events import Admitted, ComputedChunk, Preempted, StepEvents

LINE = re.compile(
    r"step +(\d+) +(\d+) rows +(\d+) prompt \+ +(\d+) decode tokens"
    r"(?:  joined ([\d, ]+))?(?:  left (.+))?"
)


def test_the_lines_say_what_every_step_did(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    each = [SamplingParams(max_tokens=n, ignore_eos=True, seed=0) for n in (3, 1, 2)]
    with LLM(max_seq_len=64, max_batch_size=2) as llm:
        quiet = llm.generate(prompts, each)
        before = llm.stats()["num_steps"]
        assert not any(map(LINE.fullmatch, capsys.readouterr().err.splitlines()))
        shown = llm.generate(prompts, each, progress="steps")
        after = llm.stats()["num_steps"]
    assert [o.token_ids for o in shown] == [o.token_ids for o in quiet]
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("step")]
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), lines
    rows = [match.groups() for match in matches if match]
    assert [int(row[0]) for row in rows] == list(range(int(before) + 1, int(after) + 1))
    assert [row[1:] for row in rows] == [
        ("2", "5", "0", "0, 1", "1 (length)"),
        ("2", "4", "1", "2", None),
        ("2", "0", "2", None, "0 (length), 2 (length)"),
    ]


def test_lost_pages_and_other_requests_are_named() -> None:
    out = io.StringIO()
    lines = StepLines(["a", "b"], out)
    events = (
        Preempted("b", 5, needed_by="c"),
        Admitted("c", 0, 7),
        ComputedChunk("c", 0, 7),
    )
    lines.show(StepEvents(12, 0.0, 0.1, 2, events), [("a", FinishReason.EOS)])
    lines.show(StepEvents(12, 0.1, 0.1, 0), [])
    lines.show(None, [])
    assert out.getvalue() == (
        "step   12    2 rows      7 prompt +   1 decode tokens"
        "  preempted 1  joined another  left 0 (eos)\n"
    )


def test_another_word_for_progress_is_refused() -> None:
    refused = pytest.raises(RequestError, match="progress must be 'steps' or None, not 'bar'")
    with LLM(max_seq_len=64) as llm, refused:
        llm.generate("x", progress="bar")  # type: ignore[arg-type]
