"""`infer explain` prints what the server tells, and says what is wrong where it cannot."""

from __future__ import annotations

import io

from rich.console import Console
from typer.testing import CliRunner

from infer.cli.explain import write
from infer.cli.main import app
from infer.errors import InferError
from tests.support.doubles import make_hash_llm
from tests.support.serving import live

STORY = {
    **{"id": "cmpl-1", "path": "/v1/completions", "state": "finished", "outcome": "length"},
    **{"prompt_tokens": 300, "cached_tokens": 44, "completion_tokens": 9, "events_left_out": 2},
    **{"admitted_ms": 20.0, "first_token_ms": 120.0, "total_ms": 1500.0},
    "events": [
        {"at_ms": 0.0, "event": "received"},
        {"at_ms": 1.0, "event": "queued", "waiting_before": 2, "running": 4, "behind": ["a", "b"]},
        {"at_ms": 20.0, "event": "admitted", "cached_tokens": 44, "of_tokens": 300},
        {"at_ms": 60.0, "event": "chunk", "from_token": 44, "tokens": 200},
        {"at_ms": 120.0, "event": "chunk", "from_token": 244, "tokens": 56},
        {"at_ms": 200.0, "event": "preempted", "lost_tokens": 304, "needed_by": ["c"]},
        {"at_ms": 1500.0, "event": "finished", "outcome": "length"},
    ],
    "slowest_gaps": [
        {
            **{"gap_ms": 900.0, "at_ms": 1200.0, "token": 5, "steps": 3},
            "slowest_step": {
                **{"step": 77, "step_ms": 500.0, "sequences": 6},
                **{"prompt_tokens": 512, "prompts_of": ["d"]},
            },
        }
    ],
}
PAGE = """\
cmpl-1  /v1/completions  length
300 prompt tokens, 44 of them cached; 9 generated
waiting 20.0 ms + prompt 100.0 ms + answer 1.38 s = 1.50 s
  0.0 ms  received
  1.0 ms  queued     behind 2 waiting, 4 running: a, b
 20.0 ms  admitted   44 of 300 tokens found in the cache
 60.0 ms  prompt     256 tokens from 44 on, in 2 steps until 120.0 ms
200.0 ms  preempted  304 computed tokens lost; its pages went to c
  1.50 s  finished   length
… and 2 more events
slowest pauses:
900.0 ms before token 5 (3 steps): step 77 took 500.0 ms with 6 sequences, 512 prompt tokens of d
"""


def test_the_page() -> None:
    out = io.StringIO()
    write(STORY, Console(file=out, width=120))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == PAGE.splitlines()


def test_what_cannot_be_told() -> None:
    with live(make_hash_llm()) as url:
        result = CliRunner().invoke(app, ["explain", "no-such", "--url", url])
    assert isinstance(result.exception, InferError)
    assert "no such request" in str(result.exception)
    result = CliRunner().invoke(app, ["explain", "x", "--url", "http://127.0.0.1:9"])
    assert isinstance(result.exception, InferError)
    assert "no infer server answers" in str(result.exception)
