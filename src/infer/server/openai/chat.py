"""`/v1/chat/completions`: the endpoint's body, its requests and its answer.

In a stream the role comes first, the finish reason last and alone. The text goes through one
parser, whole or in pieces, which finds reasoning and tool calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import AfterValidator, model_validator

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import RequestError, UnprocessableError
from infer.server.openai.answer_parts import (
    ChunkWriter,
    TokenDetails,
    TokenUsage,
    head_of,
    wire_reason,
)
from infer.server.openai.events import dump, event
from infer.server.openai.generating_api import OnMessage, Part, StreamFormat
from infer.server.openai.large_json import Later
from infer.server.openai.schema import (
    CONVERSATION,
    COUNT,
    RANGES,
    Conversation,
    Generation,
    Stop,
    between,
    string_list,
)
from infer.server.openai.to_engine import (
    check_stream_format,
    grammar_name,
    in_callers_names,
    requests_of,
    sampling_of,
)
from infer.server.openai.typed_events import TypedEvents
from infer.text import answer_parser
from infer.text.reasoning_tokens import ThoughtTokens
from infer.text.tools.formats import ToolFormat, thoughts_in
from infer.text.untrusted.workers import Steps
from infer.types import FinishReason, Request, RequestOutput, SamplingParams, TextDelta
from infer.types.sampling import MAX_LOGPROBS

MAX_STOP_STRINGS = 4
"""OpenAI's limit for chats"""


def _few_stops(strings: tuple[str, ...]) -> tuple[str, ...]:
    if len(strings) > MAX_STOP_STRINGS:
        raise UnprocessableError(
            f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are supported"
        )
    return strings


class ChatBody(Conversation, Generation):
    """`POST /v1/chat/completions`, and `/render`, which returns its prompt."""

    documented = (
        RANGES
        | CONVERSATION
        | {
            "max_tokens": {"anyOf": [{"type": "integer", **between(1, COUNT["maximum"])}]},
            "max_completion_tokens": {
                "anyOf": [{"type": "integer", **between(1, COUNT["maximum"])}]
            },
            "top_logprobs": {"anyOf": [{"type": "integer", **between(0, MAX_LOGPROBS)}]},
            "stop": string_list(MAX_STOP_STRINGS),
        }
    )
    max_completion_tokens: int | None = None
    session_id: str | None = None
    """id of a session whose messages go before these; see `server.sessions.routes`"""
    stop: Annotated[Stop, AfterValidator(_few_stops)] = ()
    logprobs: bool = False
    top_logprobs: int | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools one of which the answer must call."""
        if isinstance(self.tool_choice, str):
            return self.tools if self.tool_choice == "required" else []
        return [t for t in self.tools if t["function"]["name"] == self.tool_choice["name"]]

    @property
    def num_grammar_chars(self) -> int:
        return super().num_grammar_chars + sum(len(str(tool)) for tool in self.forced_tools)

    @property
    def is_open_ended(self) -> bool:
        return self.max_tokens is None and self.max_completion_tokens is None

    @model_validator(mode="after")
    def _check_tool_choice(self) -> ChatBody:
        if self.tool_choice not in ("none", "auto") and not self.forced_tools:
            raise RequestError("tool_choice names none of the tools", param="tool_choice")
        if self.forced_tools and self.grammars:
            other = next(iter(self.grammars))
            raise RequestError(f"{other} and this tool_choice exclude each other", param=other)
        return self


# ---- requests


def chat_requests(engine: AsyncLLM, wire: ChatBody, answer_id: str) -> Steps[list[Request]]:
    """The requests of all choices; raises `RequestError`."""
    messages = plain_messages(wire)
    with _chat_sampling(engine, wire) as sampling:
        # First, since rendering takes longer than it takes to refuse a grammar.
        checked = yield from engine.check_sampling(sampling)
        ids = yield from engine.render_chat(messages, **wire.template_arguments)
        thoughts = None if sampling.grammar is None else engine.tokenizer.thoughts_before(ids)
        requests = requests_of(
            engine,
            [tuple(ids)],
            checked,
            answer_id,
            n=wire.n,
            priority=wire.priority,
            shown_token_ids=_parsed_token_ids(engine, wire),
            thoughts=thoughts,
            reuse_prefix=wire.reuse_prefix,
        )
        return list(requests)


def rendered_chat(engine: AsyncLLM, wire: ChatBody) -> Steps[tuple[str, list[int]]]:
    """The text and the ids of the prompt that `chat_requests` would make; same refusals, but a
    prompt may be longer than the model serves: by how much is what a caller may want to know."""
    messages = plain_messages(wire)
    with _chat_sampling(engine, wire):
        prompt = yield from engine.tokenizer.chat_prompt(messages, **wire.template_arguments)
        return prompt


def plain_messages(wire: Conversation) -> list[dict[str, Any]]:
    """The messages for the template, without the fields that were not sent."""
    if not wire.messages:
        raise RequestError("messages is empty: it needs at least one message", param="messages")
    return [{name: given for name, given in m if given not in (None, [])} for m in wire.messages]


def _tool_format(engine: AsyncLLM, wire: ChatBody) -> ToolFormat | None:
    """How the answer writes its calls; None where it is not to make any."""
    use = engine.tokenizer.tool_use
    if use is None or not wire.shown_tools:
        return None
    return answer_parser.forced_format(use.format) if wire.forced_tools else use.format


def _tool_warning(engine: AsyncLLM, wire: ChatBody) -> str | None:
    """What the client should know about its tools; None: nothing."""
    use = engine.tokenizer.tool_use
    return use.warning if use and wire.shown_tools and not wire.forced_tools else None


def _parsed_token_ids(engine: AsyncLLM, wire: ChatBody) -> tuple[int, ...]:
    """The special tokens that the parser of the answer must see as text."""
    template, way = engine.tokenizer.tool_template, _tool_format(engine, wire)
    thoughts = thoughts_in(template.source) if template else None
    marks = (*(thoughts or ()), *(way.all_marks if way else ()))
    return engine.tokenizer.special_ids_of(marks) if wire.skip_special_tokens else ()


def _prompt_end(engine: AsyncLLM, prompt: Sequence[int]) -> str:
    """The last characters of a prompt, by which it shows what it has begun."""
    return engine.tokenizer.decode(prompt[-16:], skip_special_tokens=False)


@contextmanager
def _chat_sampling(engine: AsyncLLM, wire: ChatBody) -> Iterator[SamplingParams]:
    """The sampling of a chat; errors inside of the block get the names of a chat's fields."""
    names = {"logprobs": "top_logprobs", "prompt": "messages", **grammar_name(wire)}
    limit, logprobs = wire.max_tokens, wire.top_logprobs
    if wire.max_completion_tokens is not None:
        if limit not in (None, wire.max_completion_tokens):
            message = "max_tokens and max_completion_tokens differ; send one of them"
            raise RequestError(message, param="max_tokens")
        limit, names["max_tokens"] = wire.max_completion_tokens, "max_completion_tokens"
    if logprobs is None and wire.logprobs:
        logprobs = 0
    with in_callers_names(names):
        check_stream_format(wire, logprobs)
        sampling = sampling_of(wire, limit, logprobs)
        way = _tool_format(engine, wire)
        if way is not None and wire.forced_tools:
            parallel = wire.parallel_tool_calls and isinstance(wire.tool_choice, str)
            grammar = answer_parser.forced_calls(way, wire.forced_tools, parallel=parallel)
            sampling = sampling.replace(grammar=grammar)
        if logprobs is not None and not wire.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        yield sampling


# ---- the answer


class ChatAnswer:
    """`AnswerFormat` and `StreamFormat` of chats. What is said about the prompt stands beside the
    choices."""

    merges = True

    def __init__(
        self,
        engine: AsyncLLM,
        wire: ChatBody,
        requests: Sequence[Request],
        answer_id: str,
        on_message: OnMessage | None = None,
    ) -> None:
        """`on_message` receives what is new in the message, whole or in pieces."""
        prompt = requests[0].prompt_token_ids
        template, prompt_end = engine.tokenizer.tool_template, _prompt_end(engine, prompt)
        source = template.source if template else ""
        self._wire = wire
        self._prompt = prompt
        self._on_message = on_message
        self.warning = _tool_warning(engine, wire)
        kind = "chat.completion.chunk" if wire.stream else "chat.completion"
        self._head = head_of(kind, engine.model_name, answer_id)
        thoughts: list[ThoughtTokens] = []
        if marks := thoughts_in(source):
            inside = prompt_end.rstrip().endswith(marks.opening)
            thoughts = [ThoughtTokens(engine.tokenizer, marks, inside=inside) for _ in requests]
        self._usage = TokenUsage(requests, wire.n, thoughts)
        self._details = TokenDetails(engine.tokenizer, wire, requests)
        self._chunks = ChunkWriter(self._head, wire.stream_options, self._usage)
        names = [tool["function"]["name"] for tool in wire.forced_tools or wire.shown_tools]
        tools, forced = _tool_format(engine, wire), bool(wire.forced_tools)
        self._parsers = [
            answer_parser.parser_for(
                source, tools, prompt_end=prompt_end, names=names, forced=forced
            )
            for _ in requests
        ]
        self._num_calls = [0] * len(requests)
        self._call_id = f"call_{answer_id.rpartition('-')[2]}"

    @property
    def num_prompt(self) -> int:
        return self._usage.num_prompt

    def size_of(self, part: Part) -> int:
        return self._details.size_of(part)

    # ---- whole

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Choices are made one by one while they are written, since the log-probabilities of all
        are very many objects."""
        usage = Later(self._usage.fields)
        body = {**self._head, "choices": self._choices(outputs), "usage": usage}
        body |= self._prompt_ids()
        if self._wire.prompt_logprobs is not None:
            body["prompt_logprobs"] = Later(lambda: self._details.prompt_logprobs(0, outputs[0]))
        return body

    def _choices(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        for index, output in enumerate(outputs):
            self._usage.count(index, output)
            yield {
                "index": index,
                "message": self._message(index, output.text),
                "logprobs": self._logprobs(index, output) if self._details.writers else None,
                "finish_reason": self._reason(index, output.finish_reason),
                **self._ids(output),
            }

    def _message(self, index: int, text: str) -> dict[str, Any]:
        new = self._parsed(index, text, end=True)
        empty = None if new else ""
        message = {"role": "assistant", "content": empty, "refusal": None, **new}
        if "tool_calls" in new:
            message["tool_calls"] = unnumbered(new["tool_calls"])
        return message

    # ---- in pieces

    def events(self) -> StreamFormat:
        """The answer itself, or the typed events in its place."""
        if self._wire.stream_format == "events":
            return TypedEvents(self._usage, self._on_message)
        return self

    def opening(self) -> Iterator[bytes]:
        for index in range(len(self._parsers)):
            beside = {} if index else self._prompt_ids()
            role = '"delta":{"role":"assistant","content":""}'
            yield self._chunks.chunk(index, role, beside=beside)

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        self._usage.count(index, delta)
        logprobs, extra, ended = "null", "", delta.finish_reason
        if self._wire.return_token_ids:
            extra = "," + dump(self._ids(delta))[1:-1]
        if self._details.writers and delta.token_ids:
            logprobs = dump(self._logprobs(index, delta))
        new = self._parsed(index, delta.text, end=ended is not None)
        if logprobs != "null" or extra:
            new.setdefault("content", "")
        if new:
            yield self._chunks.chunk(index, f'"delta":{dump(new)}', logprobs, extra=extra)
        if ended is not None:
            reason = dump(self._reason(index, ended))
            yield self._chunks.chunk(index, '"delta":{}', reason=reason)

    def closing(self) -> Iterator[bytes]:
        return self._chunks.closing()

    def failure(self, error: str) -> bytes:
        return event(error)

    # ---- of one choice

    def _parsed(self, index: int, text: str, *, end: bool) -> dict[str, Any]:
        """What is new in a choice, as members of its message."""
        reasoning, content, calls = self._parsers[index].push(text, end=end)
        new: dict[str, Any] = {}
        if reasoning and self._wire.include_reasoning:
            new["reasoning_content"] = reasoning
        if content:
            new["content"] = content
        if calls:
            first = self._num_calls[index]
            self._num_calls[index] += len(calls)
            new["tool_calls"] = [
                {
                    "index": number,
                    "id": f"{self._call_id}_{index}_{number}",
                    "type": "function",
                    "function": call._asdict(),
                }
                for number, call in enumerate(calls, first)
            ]
        if self._on_message is not None:
            self._on_message(new)
        return new

    def _prompt_ids(self) -> dict[str, Any]:
        """What `return_token_ids` adds beside the choices."""
        return {"prompt_token_ids": self._prompt} if self._wire.return_token_ids else {}

    def _ids(self, part: Part) -> dict[str, Any]:
        """What `return_token_ids` adds to a choice."""
        return {"token_ids": part.token_ids} if self._wire.return_token_ids else {}

    def _reason(self, index: int, reason: FinishReason) -> str:
        word = wire_reason(reason)
        return "tool_calls" if word == "stop" and self._num_calls[index] else word

    def _logprobs(self, index: int, part: Part) -> dict[str, Any]:
        return self._details.writers[index].chat(part.token_ids, part.logprobs or ())


def unnumbered(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls as a message has them: only pieces of a list say where they belong."""
    return [{name: each[name] for name in each if name != "index"} for each in calls]


class ChatApi:
    """OpenAI's chat completions; with a session_id, the new messages of a session."""

    path = "/v1/chat/completions"
    body = ChatBody
    id_prefix = "chatcmpl"
    refuses = (404, 409)
    has_sessions = True

    def make_requests(
        self, engine: AsyncLLM, wire: ChatBody, answer_id: str
    ) -> Steps[list[Request]]:
        return chat_requests(engine, wire, answer_id)

    def make_answer(
        self,
        engine: AsyncLLM,
        wire: ChatBody,
        requests: Sequence[Request],
        answer_id: str,
        on_message: OnMessage | None = None,
    ) -> ChatAnswer:
        return ChatAnswer(engine, wire, requests, answer_id, on_message)
