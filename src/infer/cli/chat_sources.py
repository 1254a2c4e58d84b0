"""Who answers in `infer chat`: an engine in this process, or a running server"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from infer.cli.connect import find_target
from infer.cli.explain import fetch, opened, show
from infer.cli.plain import note, visible
from infer.config import EngineConfig
from infer.errors import InferError, RequestError
from infer.files import parse_json
from infer.types import SamplingParams

if TYPE_CHECKING:
    from infer.engine.llm import LLM

Message = dict[str, Any]
FULL = "context_length_exceeded"
"""Code of the error of a conversation that does not fit into the model's context."""


@dataclass
class Taken:
    """What an answer took; its fields are filled while it is written."""

    num_tokens: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    finish_reason: str = ""
    num_dropped: int = 0
    """Oldest messages that were left out of the prompt."""
    request_id: str = ""
    began_s: float = field(default_factory=time.perf_counter)

    def add(self, num_tokens: int) -> None:
        """Some tokens have come."""
        self.total_s = time.perf_counter() - self.began_s
        if not self.num_tokens and num_tokens:
            self.first_token_s = self.total_s
        self.num_tokens += num_tokens

    def __str__(self) -> str:
        if not self.num_tokens:
            return "no tokens"
        text = f"{self.num_tokens} tokens, first after {self.first_token_s * 1000:.0f} ms"
        rest_s = self.total_s - self.first_token_s
        if self.num_tokens > 1 and rest_s > 0:
            text += f", then {(self.num_tokens - 1) / rest_s:.1f} tok/s"
        return text


class ChatSource(Protocol):
    """It gives an answer in pieces and says afterwards what it took (`Taken`). The caller keeps the
    messages and the sampling, so a conversation goes on with another model or another server."""

    @property
    def model(self) -> str:
        """Name of the model that answers."""

    @property
    def max_tokens(self) -> int:
        """The model's context in tokens."""

    def answer(
        self, messages: list[Message], sampling: Mapping[str, Any], taken: Taken, *, cut: bool
    ) -> Iterator[str]:
        """The pieces of an answer. `cut`: oldest messages may be left out where all of them do not
        fit. Raises `RequestError` with the code `FULL` where they do not, and `InferError`."""

    def why(self, taken: Taken, notes: Console) -> None:
        """Print what happened to an answer."""

    def use(self, model: str) -> None:
        """Answer with another model from now on; the old one stays if that fails."""

    def close(self) -> None:
        """Give back what it holds."""


class EngineSource:
    """An engine in this process."""

    def __init__(self, config: EngineConfig, notes: Console) -> None:
        """Load the model; `notes`: where to say so."""
        self._notes = notes
        self._llm = loaded(config, notes)

    @property
    def model(self) -> str:
        """See `ChatSource`."""
        return self._llm.model_name

    @property
    def max_tokens(self) -> int:
        """See `ChatSource`."""
        return self._llm.core.scheduler.config.max_seq_len

    def answer(
        self, messages: list[Message], sampling: Mapping[str, Any], taken: Taken, *, cut: bool
    ) -> Iterator[str]:
        """See `ChatSource`."""
        params = limited(self._llm, SamplingParams(**sampling), None)
        shown = list(messages)
        while True:
            try:
                pieces = self._llm.stream(shown, params)
                break
            except RequestError as error:
                shorter = without_oldest_turn(shown)
                if not cut or error.code != FULL or shorter is None:
                    raise
                shown = shorter
        taken.num_dropped = len(messages) - len(shown)
        taken.num_prompt = len(self._llm.tokenizer.apply_chat_template(shown)[1])
        with contextlib.closing(pieces):
            for piece in pieces:
                taken.add(len(piece.token_ids))
                taken.num_cached = piece.num_cached
                taken.finish_reason = piece.finish_reason.value if piece.finish_reason else ""
                yield piece.text

    def why(self, taken: Taken, notes: Console) -> None:
        """See `ChatSource`."""
        note(notes, taken)
        note(notes, "nobody else was in the batch: the first token waited for the prompt only")

    def use(self, model: str) -> None:
        """See `ChatSource`."""
        before = self._llm
        self._llm = loaded(EngineConfig.from_kwargs(model=model), self._notes)
        before.close()

    def close(self) -> None:
        """See `ChatSource`."""
        self._llm.close()


def loaded(config: EngineConfig, notes: Console) -> LLM:
    """A model in this process; `notes`: where to say what it does by itself."""
    with notes.status("loading the model …"):
        from infer.engine.llm import LLM  # this imports torch

        llm = LLM.from_config(config)
    if llm.sampling_defaults.values:
        note(notes, f"what is not chosen: {llm.sampling_defaults}")
    return llm


def limited(llm: LLM, sampling: SamplingParams, max_tokens: int | None) -> SamplingParams:
    """`sampling` with a limit, if neither it nor the model has one."""
    if "max_tokens" in sampling.given or llm.sampling_defaults.max_tokens is not None:
        return sampling
    return sampling.replace(max_tokens=max_tokens)


def without_oldest_turn(messages: list[Message]) -> list[Message] | None:
    """The messages without the oldest of the user's and what answers it; system messages stay. None
    if there is one turn only."""
    users = [at for at, message in enumerate(messages) if message["role"] == "user"]
    if len(users) < 2:
        return None
    return [
        message
        for at, message in enumerate(messages)
        if message["role"] == "system" or at >= users[1]
    ]


class ServerSource:
    """A running server."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        """Raises `InferError` if no server answers at `url`, or has no such model."""
        self._api_key = api_key
        self._target = find_target(url, model, api_key)

    @property
    def model(self) -> str:
        """See `ChatSource`."""
        return self._target.model

    @property
    def max_tokens(self) -> int:
        """See `ChatSource`."""
        return self._target.window

    def answer(
        self, messages: list[Message], sampling: Mapping[str, Any], taken: Taken, *, cut: bool
    ) -> Iterator[str]:
        """See `ChatSource`."""
        body = {"model": self.model, "messages": messages, "stream": True, **sampling}
        body["stream_options"] = {"include_usage": True}
        if cut:
            body["truncation"] = "auto"
        path, failure = "/v1/chat/completions", "the answer was broken off"
        with opened(self._target.url, path, self._api_key, failure, body) as reply:
            for event in events_of(reply):
                try:
                    text = self._piece(event, taken)
                except (LookupError, TypeError, ValueError, AttributeError):
                    raise HTTPException("an event is no part of a chat") from None
                yield text

    def _piece(self, event: dict[str, Any], taken: Taken) -> str:
        if "error" in event:
            raise InferError(f"the answer was broken off: {visible(str(event['error']))[:500]}")
        taken.request_id = str(event.get("id") or taken.request_id)
        if usage := event.get("usage"):
            taken.num_tokens = int(usage["completion_tokens"])
            taken.num_prompt = int(usage["prompt_tokens"])
            taken.num_cached = int((usage.get("prompt_tokens_details") or {})["cached_tokens"])
            taken.num_dropped = int(usage.get("truncated_messages") or 0)
        text = ""
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            text += delta.get("reasoning_content") or ""
            text += delta.get("content") or ""
            taken.finish_reason = choice.get("finish_reason") or taken.finish_reason
        if text:
            taken.add(1)
        return text

    def why(self, taken: Taken, notes: Console) -> None:
        """See `ChatSource`."""
        note(notes, taken)
        show(fetch(self._target.url, taken.request_id, self._api_key), notes, self._target.url)

    def use(self, model: str) -> None:
        """See `ChatSource`."""
        self._target = find_target(self._target.url, model, self._api_key)

    def close(self) -> None:
        """See `ChatSource`."""


def events_of(reply: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of events. Raises `ValueError` for what is none."""
    for line in iter(lambda: reply.readline(1 << 20), b""):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = parse_json(data.decode("utf-8"))
        if not isinstance(event, dict):
            raise ValueError("an event is no object")
        yield event
    raise HTTPException("the stream ended without its end")
