"""`Recorder`: the steps of an engine in a file, in the format of the server's stream of them.

docs/events.md describes the format: one JSON object with `hello` and the frames. The page opens
it, and `POST /v1/engine/comparisons` answers with three of them, or with their frames one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from infer.engine.client.step_frames import (
    GAP_BOUNDS_MS,
    VERSION,
    FollowedRequest,
    FrameBuilder,
    FrameWriter,
    RequestFacts,
)
from infer.requests.state import FoldedStep, RequestState
from infer.types import FinishReason, Request
from infer.types.step_events import Finished

FORMAT = "infer-recording"
FRAME_S = 0.05
"""Minimum seconds between two frames."""


class Recorder:
    """An `Observer` of an engine that keeps everything; memory grows with the steps."""

    def __init__(self, told: Callable[[dict[str, Any]], None] = lambda frame: None) -> None:
        """`told` gets each frame when it is written."""
        self._told = told
        self._requests: dict[str, FollowedRequest] = {}
        self._builder = FrameBuilder(self._requests.get, is_bounded=False)
        self._zero_s = self._frame_s = time.monotonic()
        self._zero_at = time.time()
        self._writer = FrameWriter(self._zero_s, lambda facts: True)
        self._frames: list[dict[str, Any]] = []

    def entered(self, request: Request, state: RequestState) -> None:
        """See `Observer`."""
        name, num_prompt = request.request_id, len(request.prompt_token_ids)
        facts = RequestFacts(name, 0, "", num_prompt, request.max_tokens, time.monotonic())
        self._requests[name] = FollowedRequest(facts, state)

    def stepped(self, step: FoldedStep) -> None:
        """See `Observer`."""
        self._builder.stepped(step)
        for event, _ in step.events:
            if isinstance(event, Finished):
                self._requests.pop(event.request_id, None)
        if time.monotonic() >= self._frame_s + FRAME_S:
            self._write()

    def left(self, request_id: str, reason: FinishReason | None) -> None:
        """See `Observer`."""
        self._builder.left(request_id, reason)
        self._requests.pop(request_id, None)

    def _write(self) -> None:
        now_s = self._frame_s = time.monotonic()
        for frame in self._builder.take():
            if not frame.is_empty:
                self._frames.append(self._writer.fields(frame, now_s))
                self._told(self._frames[-1])

    def hello(
        self, *, model: str, mode: str, num_seats: int, page_size: int, max_seq_len: int
    ) -> dict[str, Any]:
        """What stands before the frames."""
        return {
            "version": VERSION,
            "model": model,
            "mode": mode,
            "seats": num_seats,
            "page_size": page_size,
            "max_model_len": max_seq_len,
            "gap_bounds_ms": GAP_BOUNDS_MS,
            "time": round(1000 * self._zero_at),
        }

    def document(self, hello: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
        """The recording so far, as JSON values. `summary` stands in it as it is."""
        self._write()
        return {"format": FORMAT, "hello": hello, "frames": self._frames, "summary": summary}
