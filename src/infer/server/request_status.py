"""`status_of`: what a request waits for now, in a word, in numbers and in a sentence"""

from __future__ import annotations

from typing import Any, NamedTuple

from infer.engine.client.async_llm import AsyncLLM
from infer.server.observe.request_trace import ChoiceTrace, RequestTrace
from infer.server.openai.events import dump, event

EVENT = "infer.status"
"""Name of the event that tells a status."""
_RANKS = ("running", "preempted", "waiting")
"""Statuses of a choice, that which is furthest first."""


class RequestStatus(NamedTuple):
    """A stream that is silent says why (`server.openai.streaming`); docs/events.md has the form of
    the event. All of it is known from the request's trace and its engine; nothing is asked."""

    state: str
    """Queued, reading, answering, preempted or restarting."""
    text: str
    """The same in words."""
    queued_behind: int
    prompt_tokens_done: int
    prompt_tokens: int

    def as_comment(self) -> bytes:
        """The sentence, for clients that did not ask for events."""
        return f": {self.text}\n\n".encode("ascii")

    def as_event(self, answer_id: str) -> bytes:
        """The event. It is a chunk without choices for clients that take every event for one."""
        head: dict[str, Any] = {"object": EVENT, "id": answer_id, "choices": []}
        return event(dump({**head, **self._asdict()}), EVENT)


def status_of(trace: RequestTrace, engine: AsyncLLM) -> RequestStatus | None:
    """The status of the choice that is furthest; None where all have ended."""
    open_choices = [
        open_choice
        for open_choice in trace.choices.values()
        if open_choice.state.status != "finished"
    ]
    if not open_choices or trace.ended_s is not None:
        return None
    choice = min(open_choices, key=lambda open_choice: _RANKS.index(open_choice.state.status))
    state, total = choice.state, choice.state.num_tokens
    done = min(state.num_computed, total)
    if _has_lost_its_engine(choice, engine):
        words = "another engine is starting, this answer goes on"
        return RequestStatus("restarting", words, 0, 0, total)
    if state.status == "waiting":
        behind = _waiting_before(trace, choice, engine)
        if behind is None:
            return RequestStatus("queued", "queued", 0, 0, total)
        words = f"queued behind {behind}" if behind else "next in the queue"
        return RequestStatus("queued", words, behind, 0, total)
    if state.status == "preempted":
        words = "others have its memory, this answer goes on when there is room"
        return RequestStatus("preempted", words, 0, 0, total)
    if done < total:
        words = f"reading the prompt {done} of {total}"
        return RequestStatus("reading", words, 0, done, total)
    return RequestStatus("answering", "the next token is computed", 0, total, total)


def _has_lost_its_engine(choice: ChoiceTrace, engine: AsyncLLM) -> bool:
    if not engine.engine_client.is_ready:
        return True
    ready, member = engine.ready_replicas(), choice.state.replica
    return bool(ready and member) and member not in ready


def _waiting_before(trace: RequestTrace, choice: ChoiceTrace, engine: AsyncLLM) -> int | None:
    """Requests that wait before a choice: those of which the engine told when it was queued, as far
    as so many still wait. None: it has told nothing yet."""
    told = (
        int(event["waiting_before"])
        for event in reversed(trace.events)
        if "waiting_before" in event and event.get("choice", 0) == choice.index
    )
    behind = next(told, None)
    return None if behind is None else min(behind, max(0, engine.num_waiting - 1))
