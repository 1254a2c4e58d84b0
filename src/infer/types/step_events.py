"""`StepEvents`: what a step did, beside the tokens that it gave.

The scheduler notes what happens to a request (it has to wait behind others, gets a seat, a part of
its prompt is computed, it loses its pages); a step in which everybody decodes notes nothing, so
telling costs nothing where it would cost most. The facts go out with the step's outputs, and the
server makes a request's story and its metrics of them. Plain data, stdlib only.
"""

from __future__ import annotations

from typing import NamedTuple


class StepEvent(NamedTuple):
    """Something that happened to a request: in a step, or since the step before."""

    kind: str
    """queued: `num` wait before it, `total` are running, `others` = the next of those before it ·
    resumed: the same, after an engine had died · admitted: `num` of `total` tokens were found in
    the cache · chunk: `total` tokens from `num` on are computed · preempted: it loses `num`
    computed tokens, because `others` needed the pages"""
    request_id: str
    num: int
    total: int
    others: tuple[str, ...] = ()


class StepEvents(NamedTuple):
    """One step, and what happened since the one before. Times are those of `time.monotonic`, which
    all processes of a machine share."""

    number: int
    """steps of this engine so far"""
    started_s: float
    ended_s: float
    num_sequences: int
    events: tuple[StepEvent, ...] = ()
