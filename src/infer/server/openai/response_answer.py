"""`ResponseAnswer`: an answer as OpenAI's response, whole or as its events

An answer is a list of items: thoughts, a message, calls. In a stream each item is announced, grows
by deltas and is repeated when it is done; the last event has the whole response. Clients act on the
items that are done, so an item is the same in the stream and in the whole answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from infer.engine.client.async_llm import AsyncLLM
from infer.server.http.context import bare_id
from infer.server.openai.answer_parts import wire_reason
from infer.server.openai.chat import ChatBody, ChatReader, tool_warning
from infer.server.openai.events import dump, event
from infer.server.openai.generating_api import OnMessage, Part, StreamFormat
from infer.server.openai.response_items import Tool, Tools
from infer.text.answer_parser import Parts
from infer.text.tools.call import ToolCall
from infer.types import FinishReason, Request, RequestOutput, TextDelta

Fields = dict[str, Any]

_BEGUN: Fields = {
    "status": "in_progress",
    "error": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}
_MESSAGE: Fields = {"type": "message", "role": "assistant", "content": []}
_ERROR_CODES = ("context_length_exceeded", "rate_limit_exceeded")
"""Codes of errors that a response may have beside `server_error`."""


class ResponseAnswer:
    """`AnswerFormat` and `StreamFormat` of responses."""

    merges = True

    def __init__(
        self,
        engine: AsyncLLM,
        chat: ChatBody,
        tools: Tools,
        told: Fields,
        requests: Sequence[Request],
        answer_id: str,
        on_message: OnMessage | None = None,
    ) -> None:
        """`tools`: by which the client's names are found. `told`: the members of the response that
        repeat the request's. `on_message`: gets the whole response before its end is written, and
        may change whether it is stored; None: it is not."""
        self.warning = tool_warning(engine, chat)
        self._reader = ChatReader(engine, chat, requests)
        self._tools = tools
        self._hex = bare_id(answer_id)
        self._response: Fields = {
            "id": answer_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": engine.model_name,
            "store": on_message is not None,
        }
        self._told = told
        self._on_message = on_message
        self._whole: Fields = {}
        """The response at its end."""
        # What the client has sent may be long: it is written here, beside the event loop.
        self._told_text = dump(told)
        self._short_text = dump(told | {"tools": [], "instructions": None})
        self._num_calls = 0
        self._items: list[Fields] = []
        """Items of the answer, the last of which may be growing."""
        self._pieces: list[str] = []
        """The text of the item that grows."""
        self._is_open = False
        self._reason = FinishReason.EOS
        self._number = 0

    @property
    def num_prompt(self) -> int:
        return self._reader.usage.num_prompt

    def size_of(self, part: Part) -> int:
        is_whole = isinstance(part, RequestOutput)
        return len(part.text) + (len(self._told_text) if is_whole else 0)

    # ---- whole

    def body(self, outputs: Sequence[RequestOutput]) -> Fields:
        [output] = outputs
        self._reader.usage.count(0, output)
        for parts in self._reader.push_in_order(output.text, end=True):
            for _ in self._grow(parts):
                pass
        self._reason = output.finish_reason
        for _ in self._complete():
            pass
        return self._whole

    def _complete(self) -> Iterator[bytes]:
        """Complete the last item, and with it the response. An answer without a word is an empty
        message: without an item it would be missing from the history that is sent back."""
        if not self._items:
            yield from self._begin(_MESSAGE, "msg")
        yield from self._done()
        self._whole = {**self._response, **self._told, **self._ends()}
        if self._on_message is not None:
            self._on_message(self._whole)

    def _ends(self) -> Fields:
        """What is known at the end: the status of the answer, and all its items."""
        is_cut = wire_reason(self._reason) == "length"
        return {
            "status": "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": self._usage(),
        }

    def _usage(self) -> Fields:
        usage = self._reader.usage.fields()
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        num_thought = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_thought},
            "total_tokens": usage["total_tokens"],
        }

    # ---- in pieces

    def events(self) -> StreamFormat:
        return self

    def opening(self) -> Iterator[bytes]:
        yield self._state("created", self._told_text, _BEGUN)
        yield self.waiting()

    def waiting(self) -> bytes:
        return self._state("in_progress", self._short_text, _BEGUN)

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        self._reader.usage.count(index, delta)
        has_ended = delta.finish_reason is not None
        for parts in self._reader.push_in_order(delta.text, end=has_ended):
            yield from self._grow(parts)
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            yield from self._complete()

    def closing(self) -> Iterator[bytes]:
        self._response["store"] = self._whole["store"]
        ends = {name: self._whole[name] for name in _BEGUN}
        yield self._state(ends["status"], self._told_text, ends)

    def failure(self, error: str) -> Iterator[bytes]:
        """A client takes only this for the end of a stream that broke; others it asks again."""
        told = json.loads(error)["error"]
        code = told["code"] if told["code"] in _ERROR_CODES else "server_error"
        cause = {"code": code, "message": told["message"]}
        ends = {**_BEGUN, "status": "failed", "error": cause, "output": self._items}
        yield self._state("failed", self._short_text, ends)

    def _state(self, kind: str, told: str, ends: Fields) -> bytes:
        """An event with the whole response. `told`: what repeats the request, as JSON."""
        name, fields = f"response.{kind}", dump({**self._response, **ends})
        head = dump({"type": name, "sequence_number": self._next()})
        return event(f'{head[:-1]},"response":{fields[:-1]},{told[1:]}}}', name)

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        return event(dump({"type": name, "sequence_number": self._next(), **fields}), name)

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    # ---- items, each of which yields its events

    def _grow(self, parts: Parts) -> Iterator[bytes]:
        if parts.more:  # belongs to the call that is open
            yield from self._add(parts.more)
        if parts.reasoning:
            if not self._grows("reasoning"):
                yield from self._begin({"type": "reasoning", "summary": [], "content": []}, "rs")
            yield from self._add(parts.reasoning)
        if parts.content:
            if not self._grows("message"):
                yield from self._begin(_MESSAGE, "msg")
            yield from self._add(parts.content)
        for call in parts.calls:
            yield from self._begin_call(call)

    def _grows(self, kind: str) -> bool:
        return self._is_open and self._items[-1]["type"] == kind

    def _begin_call(self, call: ToolCall) -> Iterator[bytes]:
        tool = self._tools.known.get(call.name, Tool(call.name))
        item: Fields = {"call_id": f"call_{self._hex}_{self._num_calls}", "name": tool.name}
        self._num_calls += 1
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        if tool.is_custom:
            yield from self._begin({"type": "custom_tool_call", **item, "input": ""}, "ctc")
        else:
            yield from self._begin({"type": "function_call", **item, "arguments": ""}, "fc")
        if call.arguments:
            yield from self._add(call.arguments)

    def _begin(self, item: Fields, prefix: str) -> Iterator[bytes]:
        yield from self._done()
        index = len(self._items)
        item = {"id": f"{prefix}_{self._hex}_{index}", "status": "in_progress", **item}
        self._items.append(item)
        self._pieces, self._is_open = [], True
        yield self._event("output_item.added", output_index=index, item=item)
        if "content" in item:
            yield self._event("content_part.added", **self._place(), part=_part(item, ""))

    def _place(self) -> Fields:
        """Where the item that grows is."""
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place | ({"content_index": 0} if "content" in item else {})

    def _add(self, text: str) -> Iterator[bytes]:
        self._pieces.append(text)
        kind = self._items[-1]["type"]
        if kind == "custom_tool_call":
            return  # its text is a JSON string until it is whole
        more: Fields = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"{_GROWS[kind]}.delta", **self._place(), delta=text, **more)

    def _done(self) -> Iterator[bytes]:
        """Complete the item that grows, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        item, text, place = self._items[-1], "".join(self._pieces), self._place()
        kind = item["type"]
        if kind == "function_call":
            item["arguments"] = text or "{}"
            ends: Fields = {"name": item["name"], "arguments": item["arguments"]}
        elif kind == "custom_tool_call":
            item["input"] = ends_text = _input_of(text)
            yield self._event(f"{_GROWS[kind]}.delta", **place, delta=ends_text)
            ends = {"input": ends_text}
        else:
            item["content"] = [_part(item, text)]
            ends = {"text": text} | ({"logprobs": []} if kind == "message" else {})
        item["status"] = "completed"
        if self._reason is FinishReason.LENGTH:
            item["status"] = "incomplete"
        yield self._event(f"{_GROWS[kind]}.done", **place, **ends)
        if "content" in item:
            yield self._event("content_part.done", **place, part=item["content"][0])
        yield self._event("output_item.done", output_index=place["output_index"], item=item)


def cancelled_response(response_id: str, model: str) -> Fields:
    """What is said of a response that was cancelled while it was answered."""
    head = {"id": response_id, "object": "response", "created_at": int(time.time())}
    told: Fields = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return {**head, "model": model, **_BEGUN, "status": "cancelled", **told, "store": False}


_GROWS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
"""Type of an item → the beginning of the names of the events by which it grows."""


def _part(item: Fields, text: str) -> Fields:
    """The only content part of an item."""
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _input_of(arguments: str) -> str:
    """The text that a custom tool gets. Arguments that were cut off are given as they are."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    given = value.get("input") if isinstance(value, dict) else None
    return given if isinstance(given, str) else arguments
