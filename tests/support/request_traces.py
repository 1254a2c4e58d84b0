"""The trace of a request, as `infer explain` gets it."""

from __future__ import annotations

TRACE = {
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
