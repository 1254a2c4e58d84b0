"""`/v1/chat/completions`: the endpoint's body, its requests and its answer.

In a stream the role comes first, the finish reason last and alone. The text goes through one
parser, whole or in pieces, which finds reasoning and tool calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

from pydantic import PrivateAttr, model_validator

from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import CheckedSampling
from infer.errors import RequestError
from infer.server.http.context import bare_id
from infer.server.http.json_body import MAX_NAME_CHARS
from infer.server.openai import grammar_fields, truncation
from infer.server.openai.answer_parts import (
    ChunkWriter,
    TokenDetails,
    TokenUsage,
    head_of,
    wire_reason,
)
from infer.server.openai.events import dump
from infer.server.openai.generating_api import Keeps, OnMessage, Part, StreamFormat
from infer.server.openai.grammar_fields import warning_of
from infer.server.openai.large_json import Deferred
from infer.server.openai.schema import (
    CONVERSATION,
    MAX_LIGHT_CHARS,
    MAX_LIGHT_WORDS,
    RANGES,
    Body,
    Budget,
    Conversation,
    GeneratingBody,
    Generation,
    Limit,
    between,
    limit,
)
from infer.server.openai.schema_base import Int
from infer.server.openai.to_engine import (
    check_stream_format,
    grammar_name,
    in_callers_names,
    requests_of,
    sampling_of,
)
from infer.server.openai.truncation import Dropped
from infer.server.openai.typed_events import TypedEvents
from infer.text import answer_parser
from infer.text.answer_parser import ForcedCalls
from infer.text.reasoning_tokens import ThoughtTokens
from infer.text.tools.forced_markup import TEXT_GRAMMAR
from infer.text.tools.formats import ToolFormat
from infer.text.untrusted.workers import Steps
from infer.types import FinishReason, Request, RequestOutput, SamplingParams, TextDelta
from infer.types.grammar import MAX_GRAMMAR_CHARS, Grammar
from infer.types.sampling import MAX_LOGPROBS

R = TypeVar("R")


class ChatBody(Conversation, Generation):
    """`POST /v1/chat/completions`, and `/render`, which returns its prompt."""

    documented = (
        RANGES
        | CONVERSATION
        | {
            "max_tokens": limit(1),
            "max_completion_tokens": limit(1),
            "thinking_token_budget": limit(0),
            "top_logprobs": {"anyOf": [{"type": "integer", **between(0, MAX_LOGPROBS)}]},
        }
    )
    max_completion_tokens: Limit = None
    session_id: str | None = None
    """Id of a session whose messages go before these; see `server.sessions.routes`."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """Whether the oldest turns are left out of a prompt that does not fit: `truncation.fitted`."""
    logprobs: bool = False
    top_logprobs: Int | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    thinking_token_budget: Budget = None
    """Maximum number of tokens of the reasoning; then it ends, and the answer begins."""
    _dropped: Dropped = PrivateAttr(Dropped())
    _forced: ForcedCalls | None = PrivateAttr(None)
    _is_free: bool = PrivateAttr(False)
    _forms: Mapping[str, dict[str, Any]] = PrivateAttr({})

    @property
    def dropped(self) -> Dropped:
        """What was left out of the prompt, once it is made."""
        return self._dropped

    @property
    def forced_answer(self) -> ForcedCalls | None:
        """What the answer must be where a tool is forced, once it is made."""
        return self._forced

    def force(self, forced: ForcedCalls | None) -> None:
        """Note what the answer must be."""
        self._forced = forced

    def leave_out(self, dropped: Dropped) -> None:
        """Note what was left out of the prompt."""
        self._dropped = dropped

    @property
    def answer_headers(self) -> list[tuple[str, str]]:
        num_messages = self.dropped.num_messages
        return [("x-truncated-messages", str(num_messages))] if num_messages else []

    @property
    def is_heavy(self) -> bool:
        """Truncation may render the chat several times."""
        is_heavy = super().is_heavy
        if is_heavy or self.truncation == "disabled":
            return is_heavy
        num_chars = sum(len(message.content or "") for message in self.messages)
        return num_chars > MAX_LIGHT_CHARS or len(self.messages) > MAX_LIGHT_WORDS

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools one of which the answer must call."""
        return [tool for _, tool in self.forced]

    @property
    def forced(self) -> list[tuple[int, dict[str, Any]]]:
        """The forced tools with their places in `tools`."""
        choice = self.tool_choice
        if isinstance(choice, str):
            return self.functions if choice == "required" else []
        names = [choice["name"]] if "name" in choice else choice["names"]
        if choice.get("mode") == "auto":
            return []
        return [(i, t) for i, t in self.functions if t["function"]["name"] in names]

    @cached_property
    def held(self) -> list[tuple[int, dict[str, Any]]]:
        """The tools whose parameters hold for every call, with their places in `tools`: those that
        are forced, or all that the model may choose, if one of them is strict."""
        if self.forced or self.grammars:
            return self.forced
        is_strict = any(tool["function"].get("strict") is True for _, tool in self.shown)
        return self.shown if is_strict else []

    @property
    def is_free(self) -> bool:
        """Whether the model's own calls are not held to the tools' parameters, though one of the
        tools is strict."""
        return self._is_free

    def set_free(self) -> None:
        """Note that no grammar can hold the model's own calls."""
        self._is_free = True

    @cached_property
    def enforced_tools(self) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
        """(held tools with what is enforced of their parameters, names of what is not)"""
        tools = [
            (i, {**tool, "function": function | self._forms.get(function["name"], {})})
            for i, tool in self.held
            for function in (tool["function"],)
        ]
        return grammar_fields.enforced_tools(tools)

    def set_forms(self, forms: Mapping[str, dict[str, Any]]) -> None:
        """Note members of functions that are enforced and not shown, by the functions' names."""
        self._forms = forms

    def check_strict(self) -> None:
        """Raise `RequestError` for a tool with `strict: true` of which not all can be enforced,
        whether it is forced or the model may choose it. The time is linear in the schemas."""
        held = {i for i, _ in self.held}
        strict = [(i, t) for i, t in self.functions if t["function"].get("strict") is True]
        grammar_fields.enforced_tools((i, tool) for i, tool in strict if i not in held)

    @property
    def num_grammar_chars(self) -> int:
        return super().num_grammar_chars + sum(len(str(tool)) for _, tool in self.held)

    @property
    def sets_limit(self) -> bool:
        return super().sets_limit or "max_completion_tokens" in self.model_fields_set

    @property
    def is_open_ended(self) -> bool:
        return self.max_tokens is None and self.max_completion_tokens is None

    @model_validator(mode="before")
    @classmethod
    def _read_budget(cls, value: Any) -> Any:
        """`thinking` may have the budget, in Anthropic's name for it."""
        thinking = value.get("thinking") if isinstance(value, dict) else None
        if not isinstance(thinking, dict) or thinking.get("type") != "enabled":
            return value
        if (budget := thinking.get("budget_tokens")) is None:
            return value
        return {"thinking_token_budget": budget, **value}

    @model_validator(mode="after")
    def _check_tool_choice(self) -> ChatBody:
        choice = self.tool_choice
        known = {tool["function"]["name"] for _, tool in self.functions}
        names = choice.get("names", ()) if isinstance(choice, dict) else ()
        if unknown := [name for name in names if name not in known]:
            shown = unknown[0][:MAX_NAME_CHARS]
            raise RequestError(
                f"tool_choice allows {shown!r}, which is none of the tools", param="tool_choice"
            )
        is_auto = isinstance(choice, dict) and choice.get("mode") == "auto"
        if choice not in ("none", "auto") and not is_auto and not self.forced_tools:
            raise RequestError("tool_choice names none of the tools", param="tool_choice")
        if self.forced_tools and self.grammars:
            other = next(iter(self.grammars))
            raise RequestError(f"{other} and this tool_choice exclude each other", param=other)
        return self


class AsChat(Body):
    """A body of another API that is a chat in other words: whoever makes one sets `_chat`."""

    _chat: ChatBody = PrivateAttr()

    @property
    def chat(self) -> ChatBody:
        """The same conversation as a chat."""
        return self._chat


class GeneratingAsChat(AsChat, GeneratingBody):
    """One whose answer is generated: what the pipeline asks of it, its chat knows."""

    @property
    def num_grammar_chars(self) -> int:
        return self.chat.num_grammar_chars

    @property
    def is_heavy(self) -> bool:
        return self.chat.is_heavy

    @property
    def answer_headers(self) -> list[tuple[str, str]]:
        return self.chat.answer_headers


# ---- requests


def chat_requests(engine: AsyncLLM, wire: ChatBody, answer_id: str) -> Steps[list[Request]]:
    """The requests of all choices; raises `RequestError`."""
    messages = plain_messages(wire)
    with _chat_sampling(engine, wire) as sampling, _said_if_truncated(wire):
        # First, since rendering takes longer than it takes to refuse a grammar.
        checked = yield from _checked(engine, wire, sampling)
        render = partial(engine.render_chat, **wire.template_arguments)
        ids = yield from _fitted(engine, wire, messages, sampling, render, len)
        reads = sampling.reads_thoughts
        thoughts = engine.tokenizer.thoughts_before(ids) if reads else None
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


def _forced_answer(
    engine: AsyncLLM, wire: ChatBody, tools: Sequence[dict[str, Any]] | None = None
) -> ForcedCalls | None:
    """The answer that must call one of the tools; default: those that the body forces. None: it
    forces none."""
    tokenizer, use = engine.tokenizer, engine.tokenizer.tool_use
    if use is None or not wire.forced_tools:
        return None
    is_one = isinstance(wire.tool_choice, dict) and "name" in wire.tool_choice
    return answer_parser.forced_answer(
        use.format,
        wire.enforced_tools[0] if tools is None else tools,
        parallel=wire.parallel_tool_calls and not is_one,
        special=tokenizer.special_tokens(),
        ends=tokenizer.end_tokens(),
        thinks=tokenizer.thoughts is not None,
    )


def _forced(engine: AsyncLLM, wire: ChatBody) -> ForcedCalls | None:
    """`_forced_answer` of the body's tools, which is made once."""
    if wire.forced_answer is None:
        wire.force(_forced_answer(engine, wire))
    return wire.forced_answer


def _chosen(
    engine: AsyncLLM, wire: ChatBody, tools: Sequence[dict[str, Any]] | None = None
) -> Grammar | None:
    """The grammar of an answer in which the model may call the tools; default: those of the body,
    if one of them is strict. None: the answer is free."""
    tokenizer, use = engine.tokenizer, engine.tokenizer.tool_use
    if use is None or not wire.held or wire.forced or wire.is_free:
        return None
    made = answer_parser.chosen_calls(
        use.format,
        wire.enforced_tools[0] if tools is None else tools,
        parallel=wire.parallel_tool_calls,
        special=tokenizer.special_tokens(),
        ends=tokenizer.end_tokens(),
    )
    if made is None or len(made.text) > MAX_GRAMMAR_CHARS:
        wire.set_free()
        return None
    return made


def _held(
    engine: AsyncLLM, wire: ChatBody, tools: Sequence[dict[str, Any]] | None = None
) -> Grammar | None:
    """The grammar by which tools hold the answer; default: all that do."""
    forced = _forced(engine, wire) if tools is None else _forced_answer(engine, wire, tools)
    return _chosen(engine, wire, tools) if forced is None else forced.grammar


def _checked(engine: AsyncLLM, wire: ChatBody, sampling: SamplingParams) -> Steps[CheckedSampling]:
    """The checked sampling; an error of a tool's schema names the tool. Tools that the model may
    choose, and that are too much for one grammar, leave the answer free."""
    try:
        checked = yield from engine.check_sampling(sampling)
        return checked
    except RequestError as error:
        if error.param != "grammar" or not wire.held:
            raise
        # Each tool alone takes a part of what all have taken, up to the first that is refused.
        is_too_much = "cannot be compiled" in error.message or "too large" in error.message
        if is_too_much and not wire.forced:
            wire.set_free()
            checked = yield from engine.check_sampling(sampling.replace(grammar=None))
            return checked
        tools = [] if is_too_much else wire.enforced_tools[0]
        for (i, _), tool in zip(wire.held, tools, strict=False):
            try:
                yield from engine.check_sampling(
                    sampling.replace(grammar=_held(engine, wire, [tool]))
                )
            except RequestError as own:
                has_text = TEXT_GRAMMAR in tool["function"]
                where = f"tools[{i}].{'format' if has_text else 'function.parameters'}"
                message = own.message.partition(": ")[2] or own.message
                raise type(own)(f"{where}: {message}", param=where, code=own.code) from None
        raise


def rendered_chat(engine: AsyncLLM, wire: ChatBody) -> Steps[tuple[str, list[int]]]:
    """The text and the ids of the prompt that `chat_requests` would make; same refusals, but a
    prompt may be longer than the model serves: by how much is what a caller may want to know."""
    messages = plain_messages(wire)
    with _chat_sampling(engine, wire) as sampling:
        render = partial(engine.tokenizer.chat_prompt, **wire.template_arguments)
        prompt = yield from _fitted(
            engine, wire, messages, sampling, render, lambda prompt: len(prompt[1])
        )
        return prompt


def _fitted(
    engine: AsyncLLM,
    wire: ChatBody,
    messages: list[dict[str, Any]],
    sampling: SamplingParams,
    render: Callable[[list[dict[str, Any]]], Steps[R]],
    count: Callable[[R], int],
) -> Steps[R]:
    """The prompt, without the oldest turns if the body allows it; `wire.dropped` says how many. It
    leaves room for `max_tokens`, of which half of the context is enough, or else for one token."""
    if wire.truncation == "disabled":
        prompt = yield from render(messages)
        return prompt
    wanted = sampling.max_tokens or max(1, sampling.min_tokens)
    room = engine.max_seq_len - min(wanted, engine.max_seq_len // 2)
    fitted = yield from truncation.fitted(messages, render, count, room)
    wire.leave_out(fitted.dropped)
    return fitted.prompt


@contextmanager
def _said_if_truncated(wire: ChatBody) -> Iterator[None]:
    """The error for a prompt that is too long says what truncation has done about it."""
    try:
        yield
    except RequestError as error:
        num_messages = wire.dropped.num_messages
        if error.code != "context_length_exceeded" or not num_messages:
            raise
        words = f"{num_messages} messages were left out, and the others must stay"
        message = f"{error.message}; {words}"
        raise type(error)(message, param=error.param, code=error.code) from None


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
    forced = _forced(engine, wire)
    return use.format if forced is None else forced.format


def tool_warning(engine: AsyncLLM, wire: ChatBody) -> str | None:
    """What the client should know about its tools and schemas; None: nothing."""
    use, warnings = engine.tokenizer.tool_use, list[str | None]()
    if use and wire.shown_tools and not wire.forced_tools:
        warnings.append(use.warning)
    functions = {i for i, _ in wire.functions}
    others = [(i, tool["type"]) for i, tool in enumerate(wire.tools) if i not in functions]
    if others:
        named = ", ".join(f"tools[{i}] {kind[:MAX_NAME_CHARS]!a}" for i, kind in others[:8])
        warnings.append(f"only functions are supported, so the model does not see {named}")
    if wire.is_free:
        warnings.append("strict is not enforced where the model chooses a tool")
    dropped = wire.enforced.dropped + wire.enforced_tools[1]
    warnings.append(warning_of(dropped + _free_texts(engine, wire)))
    return "; ".join(filter(None, warnings)) or None


def _free_texts(engine: AsyncLLM, wire: ChatBody) -> tuple[str, ...]:
    """The grammars of texts that cannot be held in the model's markup."""
    forced = _forced(engine, wire)
    if forced is None or forced.grammar.texts:
        return ()
    tools = zip(wire.held, wire.enforced_tools[0], strict=True)
    return tuple(f"tools[{i}].format" for (i, _), t in tools if TEXT_GRAMMAR in t["function"])


def _parsed_token_ids(engine: AsyncLLM, wire: ChatBody) -> tuple[int, ...]:
    """The special tokens that the parser of the answer must see as text."""
    thoughts, way = engine.tokenizer.thoughts, _tool_format(engine, wire)
    marks = (*(thoughts.marks if thoughts else ()), *(way.all_marks if way else ()))
    return engine.tokenizer.special_ids_of(marks) if wire.skip_special_tokens else ()


def _prompt_end(engine: AsyncLLM, prompt: Sequence[int]) -> str:
    """The last characters of a prompt, by which it shows what it has begun."""
    return engine.tokenizer.decode(prompt[-16:], skip_special_tokens=False)


@contextmanager
def _chat_sampling(engine: AsyncLLM, wire: ChatBody) -> Iterator[SamplingParams]:
    """The sampling of a chat; errors inside of the block get the names of a chat's fields."""
    names = {"logprobs": "top_logprobs", "prompt": "messages", **grammar_name(wire)}
    most, logprobs = wire.max_tokens, wire.top_logprobs
    if wire.max_completion_tokens is not None:
        if most not in (None, wire.max_completion_tokens):
            message = "max_tokens and max_completion_tokens differ; send one of them"
            raise RequestError(message, param="max_tokens")
        most, names["max_tokens"] = wire.max_completion_tokens, "max_completion_tokens"
    if not logprobs:  # 0 beside `logprobs: false` asks for none
        logprobs = 0 if wire.logprobs else None
    with in_callers_names(names):
        check_stream_format(wire, logprobs)
        wire.check_strict()
        sampling = sampling_of(engine, wire, most, logprobs)
        if (held := _held(engine, wire)) is not None:
            sampling = sampling.replace(grammar=held)
        if logprobs is not None and not wire.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        yield sampling


# ---- the answer


class ChatReader:
    """Reads the answers to a chat: counts their tokens, and divides each text into its parts."""

    def __init__(self, engine: AsyncLLM, wire: ChatBody, requests: Sequence[Request]) -> None:
        """`requests`: one for each choice."""
        tokenizer = engine.tokenizer
        marks = tokenizer.thoughts
        prompt_end = _prompt_end(engine, requests[0].prompt_token_ids)
        thoughts: list[ThoughtTokens] = []
        if marks is not None:
            inside = marks.are_opened_by(prompt_end)
            thoughts = [ThoughtTokens(tokenizer, marks, inside=inside) for _ in requests]
        self.usage = TokenUsage(requests, wire.n, thoughts, more=wire.dropped.usage)
        functions = [tool["function"] for tool in wire.forced_tools or wire.shown_tools]
        names = {function["name"]: function.get("parameters") or {} for function in functions}
        tools, forced = _tool_format(engine, wire), _forced(engine, wire)
        self._parsers = [
            answer_parser.parser_for(
                marks,
                tools,
                prompt_end=prompt_end,
                names=names,
                forced=forced is not None,
                heads=forced.heads if forced else None,
            )
            for _ in requests
        ]

    def push(self, index: int, text: str, *, end: bool) -> answer_parser.Parts:
        """What a further piece of choice `index` adds; `end`: the last one."""
        return self._parsers[index].push(text, end=end)

    def push_in_order(self, text: str, *, end: bool) -> list[answer_parser.Parts]:
        """The same of the only choice, in the order in which it was written; not beside `push`."""
        return self._parsers[0].push_in_order(text, end=end)


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
        self._wire = wire
        self._prompt = requests[0].prompt_token_ids
        self._on_message = on_message
        self.warning = tool_warning(engine, wire)
        kind = "chat.completion.chunk" if wire.stream else "chat.completion"
        self._head = head_of(kind, engine.model_name, answer_id)
        self._reader = ChatReader(engine, wire, requests)
        self._usage = self._reader.usage
        self._details = TokenDetails(engine.tokenizer, wire, requests)
        self._chunks = ChunkWriter(self._head, len(requests), wire.stream_options, self._usage)
        self._num_calls = [0] * len(requests)
        self._call_id = f"call_{bare_id(answer_id)}"

    @property
    def num_prompt(self) -> int:
        return self._usage.num_prompt

    def size_of(self, part: Part) -> int:
        return self._details.size_of(part)

    # ---- whole

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Choices are made one by one while they are written, since the log-probabilities of all
        are very many objects."""
        usage = Deferred(self._usage.fields)
        body = {**self._head, "choices": self._choices(outputs), "usage": usage}
        body |= self._prompt_ids()
        if self._wire.prompt_logprobs is not None:
            body["prompt_logprobs"] = Deferred(lambda: self._details.prompt_logprobs(0, outputs[0]))
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
        for index in range(len(self._num_calls)):
            beside = {} if index else self._prompt_ids()
            role = '"delta":{"role":"assistant","content":""}'
            yield self._chunks.chunk(index, role, beside=beside)

    def waiting(self) -> bytes:
        return self._chunks.chunk(0, '"delta":{}')

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

    def failure(self, error: str) -> Iterator[bytes]:
        return self._chunks.failure('"delta":{}', error)

    # ---- of one choice

    def _parsed(self, index: int, text: str, *, end: bool) -> dict[str, Any]:
        """What is new in a choice, as members of its message."""
        reasoning, content, calls, more = self._reader.push(index, text, end=end)
        new: dict[str, Any] = {}
        if reasoning and self._wire.include_reasoning:
            new["reasoning_content"] = reasoning
        if content:
            new["content"] = content
        first = self._num_calls[index]
        pieces: list[dict[str, Any]] = []
        if more:
            pieces.append({"index": first - 1, "function": {"arguments": more}})
        if calls:
            self._num_calls[index] += len(calls)
            pieces += [
                {
                    "index": number,
                    "id": f"{self._call_id}_{index}_{number}",
                    "type": "function",
                    "function": call._asdict(),
                }
                for number, call in enumerate(calls, first)
            ]
        if pieces:
            new["tool_calls"] = pieces
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
    """Calls as a message has them: only pieces of a stream say where they belong."""
    return [{name: call[name] for name in call if name != "index"} for call in calls]


class ChatApi:
    """OpenAI's chat completions; with a session_id, the new messages of a session."""

    path = "/v1/chat/completions"
    body = ChatBody
    id_prefix = "chatcmpl-"
    refuses = (404, 409)
    keeps: Keeps = "sessions"

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
