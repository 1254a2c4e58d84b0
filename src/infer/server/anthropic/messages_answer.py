"""`MessagesAnswer`: an answer as Anthropic's message, whole or as its events; `MessagesApi`

The blocks are those that the answer to a chat has: thoughts, text, calls. A stream has one block
open at a time, and its numbers are complete in its last events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from infer.engine.client.async_llm import AsyncLLM
from infer.server.anthropic.messages_body import CHATS_NAMES, MessagesBody
from infer.server.http.anthropic_errors import OVERLOADED, anthropic_error
from infer.server.http.context import bare_id
from infer.server.openai.answer_parts import TokenUsage, wire_reason
from infer.server.openai.chat import ChatReader, chat_requests, tool_warning
from infer.server.openai.events import dump, event
from infer.server.openai.generating_api import Keeps, OnMessage, Part, StreamFormat
from infer.server.openai.large_json import Deferred
from infer.server.openai.to_engine import in_callers_names
from infer.text.answer_parser import Parts
from infer.text.tools.call import ToolCall
from infer.text.untrusted.workers import Steps
from infer.types import FinishReason, Request, RequestOutput, TextDelta

_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Kind of a block → the type of its deltas, and the member that has what is new."""


def _event(fields: dict[str, Any]) -> bytes:
    return event(dump(fields), fields["type"])


class MessagesAnswer:
    """`AnswerFormat` and `StreamFormat` of messages."""

    merges = True

    def __init__(
        self, engine: AsyncLLM, wire: MessagesBody, requests: Sequence[Request], answer_id: str
    ) -> None:
        self._wire = wire
        self.warning = tool_warning(engine, wire.chat)
        self._reader = ChatReader(engine, wire.chat, requests)
        self._usage: TokenUsage = self._reader.usage
        self._head = {"id": answer_id, "type": "message", "role": "assistant"}
        self._head["model"] = engine.model_name
        self._call_id = f"toolu_{bare_id(answer_id)}"
        self._max_tokens = requests[0].max_tokens
        self._num_calls = 0
        self._num_blocks = 0
        self._open = ""
        """Kind of the block that is open in the stream; "" where none is."""
        self._ended: tuple[str | None, str | None] = (None, None)

    @property
    def num_prompt(self) -> int:
        return self._usage.num_prompt

    def size_of(self, part: Part) -> int:
        return len(part.text)

    # ---- whole

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        self._usage.count(0, output)
        content: list[dict[str, Any]] = []
        for parts in self._reader.push_in_order(output.text, end=True):
            if parts.reasoning:
                content.append({"type": "thinking", "thinking": parts.reasoning, "signature": ""})
            if parts.content:
                content.append({"type": "text", "text": parts.content})
            for call in parts.calls:
                given = _object(call.arguments)
                content.append({"type": "tool_use", **self._named(call), "input": given})
        reason, string = self._reason(output.finish_reason, output.stop_string)
        ends = {"stop_reason": reason, "stop_sequence": string}
        return {**self._head, "content": content, **ends, "usage": Deferred(self._counts)}

    def _named(self, call: ToolCall) -> dict[str, Any]:
        number = self._num_calls
        self._num_calls += 1
        return {"id": f"{self._call_id}_{number}", "name": call.name}

    def _reason(self, reason: FinishReason, string: str | None) -> tuple[str, str | None]:
        """(Anthropic's word for why the answer ended, the stop string that did it)"""
        if wire_reason(reason) == "length":
            wanted = self._wire.max_tokens
            is_cut = wanted is None or self._max_tokens < wanted
            return ("model_context_window_exceeded" if is_cut else "max_tokens"), None
        if self._num_calls:
            return "tool_use", None
        return ("end_turn", None) if string is None else ("stop_sequence", string)

    def _counts(self) -> dict[str, Any]:
        """The usage so far. What was read from the cache is not counted as input."""
        usage = self._usage.fields()
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        num_thought = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": num_thought},
        }

    # ---- in pieces

    def events(self) -> StreamFormat:
        return self

    def opening(self) -> Iterator[bytes]:
        ends = {"stop_reason": None, "stop_sequence": None}
        message: dict[str, Any] = {**self._head, "content": [], **ends, "usage": self._counts()}
        yield _event({"type": "message_start", "message": message})
        yield self.waiting()

    def waiting(self) -> bytes:
        return _event({"type": "ping"})

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        self._usage.count(index, delta)
        has_ended = delta.finish_reason is not None
        for parts in self._reader.push_in_order(delta.text, end=has_ended):
            yield from self._blocks(parts)
        if delta.finish_reason is not None:
            self._ended = self._reason(delta.finish_reason, delta.stop_string)

    def _blocks(self, parts: Parts) -> Iterator[bytes]:
        if parts.more:  # belongs to the call that is open
            yield self._delta("tool_use", parts.more)
        for kind, text in (("thinking", parts.reasoning), ("text", parts.content)):
            if text:
                if self._open != kind:
                    yield from self._start({"type": kind, kind: ""})
                yield self._delta(kind, text)
        for call in parts.calls:
            yield from self._start({"type": "tool_use", **self._named(call), "input": {}})
            if call.arguments not in ("", "{}"):
                yield self._delta("tool_use", call.arguments)

    def _start(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._stop()
        self._open = block["type"]
        if self._open == "thinking":
            block["signature"] = ""
        fields = {"type": "content_block_start", "index": self._num_blocks}
        yield _event({**fields, "content_block": block})

    def _delta(self, kind: str, text: str) -> bytes:
        name, member = _DELTAS[kind]
        fields = {"type": "content_block_delta", "index": self._num_blocks}
        return _event({**fields, "delta": {"type": name, member: text}})

    def _stop(self) -> Iterator[bytes]:
        if not self._open:
            return
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": ""}
            fields = {"type": "content_block_delta", "index": self._num_blocks}
            yield _event({**fields, "delta": delta})
        yield _event({"type": "content_block_stop", "index": self._num_blocks})
        self._num_blocks += 1
        self._open = ""

    def closing(self) -> Iterator[bytes]:
        yield from self._stop()
        reason, string = self._ended
        delta = {"stop_reason": reason, "stop_sequence": string}
        yield _event({"type": "message_delta", "delta": delta, "usage": self._counts()})
        yield _event({"type": "message_stop"})

    def failure(self, error: str) -> Iterator[bytes]:
        _, fields = anthropic_error(500, json.loads(error)["error"])
        yield event(dump(fields), "error")


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; none where they were cut off."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class MessagesApi:
    """Anthropic's messages."""

    path = "/v1/messages"
    body = MessagesBody
    id_prefix = "msg_"
    refuses = (OVERLOADED,)
    keeps: Keeps = "nothing"

    def make_requests(
        self, engine: AsyncLLM, wire: MessagesBody, answer_id: str
    ) -> Steps[list[Request]]:
        with in_callers_names(CHATS_NAMES):
            requests = yield from chat_requests(engine, wire.chat, answer_id)
            return requests

    def make_answer(
        self,
        engine: AsyncLLM,
        wire: MessagesBody,
        requests: Sequence[Request],
        answer_id: str,
        on_message: OnMessage | None = None,
    ) -> MessagesAnswer:
        return MessagesAnswer(engine, wire, requests, answer_id)
