"""`infer explain` prints what the server tells, and says what is wrong where it cannot."""

from __future__ import annotations

import io

from rich.console import Console

from infer.cli.explain import write
from infer.cli.main import app
from infer.errors import InferError
from tests.support.command_line import CliRunner
from tests.support.doubles import make_hash_llm
from tests.support.request_traces import (
    TRACE,
)
from tests.support.serving import live

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
    write(TRACE, Console(file=out, width=120))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == PAGE.splitlines()


def test_what_cannot_be_explained() -> None:
    with live(make_hash_llm()) as url:
        result = CliRunner().invoke(app, ["explain", "no-such", "--url", url])
    assert isinstance(result.exception, InferError)
    assert "no such request" in str(result.exception)
    result = CliRunner().invoke(app, ["explain", "x", "--url", "http://127.0.0.1:9"])
    assert isinstance(result.exception, InferError)
    assert "no infer server answers" in str(result.exception)
