"""The table of ends: names of each finish reason in answers and metrics, and their counters."""

from __future__ import annotations

import asyncio
import json

import pytest

from infer.server.observe import metrics
from infer.types import FinishReason
from infer.types.ends import DISCONNECTED, NORMAL_OUTCOMES, end_of, outcome_of
from infer.types.engine_stats import RequestCounters
from tests.support.doubles import make_hash_llm
from tests.support.hash_engine import make_hash_core
from tests.support.serving import COMPLETIONS, completion_body, scripted, serving, spelled


@pytest.mark.parametrize("reason", [*FinishReason, None])
def test_every_end_has_its_names(reason: FinishReason | None) -> None:
    end = end_of(reason)
    counts = RequestCounters()
    counts.count_end(end.counter)
    assert getattr(counts, end.counter) == 1
    is_normal = reason in (
        FinishReason.EOS, FinishReason.STOP, FinishReason.COMPLETE, FinishReason.LENGTH
    )  # fmt: skip
    assert (end.word is not None) == is_normal
    assert (end.outcome in NORMAL_OUTCOMES) == is_normal
    assert (end.counter == "num_requests_finished") == is_normal
    assert outcome_of({reason}) == end.outcome


def test_the_outcome_of_several_choices() -> None:
    eos, length, complete = FinishReason.EOS, FinishReason.LENGTH, FinishReason.COMPLETE
    assert outcome_of({eos, complete}) == "stop"
    assert outcome_of({eos, length, complete}) == "length"
    assert outcome_of({eos, None}) == DISCONNECTED
    assert outcome_of({None}, failed=True) == "error"
    assert outcome_of({eos, FinishReason.ERROR, None}) == "error"


def test_a_metric_without_its_counter_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(metrics._COUNTERS, "engine_steps", lambda counters: counters.num_renamed)

    async def main() -> None:
        async with serving(make_hash_llm()) as app:
            reply = await app.get("/metrics")
            assert reply.status == 500

    asyncio.run(main())


def test_who_reached_a_stop_string_has_finished() -> None:
    async def main() -> None:
        # The engine hears of the stop string while the request is far from its last token.
        engine = scripted(spelled("one two three four five six"), step_s=0.005)
        async with serving(engine) as app:
            body = completion_body(stop="three", max_tokens=400)
            reply = await app.post(COMPLETIONS, body)
            assert json.loads(reply.body)["choices"][0]["finish_reason"] == "stop"
            async with asyncio.timeout(20):
                while not engine.stats().get("num_finished_stop"):
                    await asyncio.sleep(0.01)
            stats = engine.stats()
            assert stats["num_requests_finished"] == 1
            assert "num_finished_abort" not in stats

    asyncio.run(main())


def test_refusals_of_the_queue_are_counted_once() -> None:
    stats = make_hash_core().stats().by_name()
    assert "num_requests_refused" in stats
    assert not [name for name in stats if "reject" in name]
