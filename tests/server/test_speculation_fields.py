"""What a client sees of speculation: usage, the trace, metrics, and text that ends in a run."""

from __future__ import annotations

from typing import Any

import pytest

from infer.config import SpeculativeConfig
from tests.support.serving import BODIES, CHAT, App, chat_body, scripted, spelled, with_app

SETTINGS = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
ANSWER = "def add(a, b):\n    return a + b  # the sum"


def predicted(text: Any) -> dict[str, Any]:
    return {"type": "content", "content": text}


async def ask(app: App, path: str = CHAT, **changes: Any) -> dict[str, Any]:
    body = BODIES[path](max_tokens=len(ANSWER), ignore_eos=True, **changes)
    reply = (await app.post(path, body)).json()
    assert "usage" in reply, reply
    return dict(reply)


def test_a_prediction_is_counted_and_changes_no_text() -> None:
    async def use(app: App) -> None:
        plain = await ask(app)
        assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
        parts = [{"type": "text", "text": ANSWER[:9]}, {"type": "text", "text": ANSWER[9:]}]
        for prediction in (predicted(ANSWER), predicted(parts)):
            right = await ask(app, prediction=prediction)
            assert right["choices"] == plain["choices"]
            details = right["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] > len(ANSWER) / 2
            assert details["rejected_prediction_tokens"] == 0
        wrong = await ask(app, prediction=predicted(ANSWER[:6] + "X" + ANSWER[6:].upper()))
        assert wrong["choices"] == plain["choices"]
        details = wrong["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] >= 3
        assert details["rejected_prediction_tokens"] > 0
        off = await ask(app, prediction=predicted(ANSWER), speculation=False)
        assert off["choices"] == plain["choices"]
        details = off["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == 0

    with_app(scripted(spelled(ANSWER), speculative=SETTINGS, step_s=0.003), use)


def test_a_prediction_without_speculation_is_a_hint_that_nobody_follows() -> None:
    async def use(app: App) -> None:
        answer = await ask(app, prediction=predicted(ANSWER))
        assert answer["choices"][0]["message"]["content"] == ANSWER
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == 0

    with_app(scripted(spelled(ANSWER)), use)


@pytest.mark.parametrize("path", BODIES)
def test_a_stop_string_ends_an_accepted_run(path: str) -> None:
    async def use(app: App) -> None:
        answer = await ask(app, path, prediction=predicted(ANSWER), stop=["b):"], n=2)
        for choice in answer["choices"]:
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert (text, choice["finish_reason"]) == ("def add(a, ", "stop")

    with_app(scripted(spelled(ANSWER), speculative=SETTINGS, step_s=0.003), use)


def test_the_trace_and_the_metrics_say_what_was_accepted() -> None:
    async def use(app: App) -> None:
        body = chat_body(max_tokens=len(ANSWER), prediction=predicted(ANSWER))
        name = (await app.post(CHAT, body)).json()["id"]
        trace = (await app.get(f"/v1/requests/{name}")).json()
        (event,) = (each for each in trace["events"] if each["event"] == "speculated")
        assert event["proposed"] >= event["accepted"] > len(ANSWER) / 2
        metrics = (await app.get("/metrics")).body.decode()
        for metric, value in (
            ("num_draft_tokens", event["proposed"]),
            ("num_accepted_tokens", event["accepted"]),
        ):
            line = f'infer:spec_decode_{metric}_total{{model_name="hash-model"}} {value}.0'
            assert line in metrics
        assert 'per_pos_total{model_name="hash-model",position="0"}' in metrics

    with_app(scripted(spelled(ANSWER), speculative=SETTINGS, step_s=0.003), use)
