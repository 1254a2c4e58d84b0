"""`LLM`: the blocking façade, for programs and notebooks

It steps an `EngineCore` in the caller's thread, with no other thread and no event loop. One thread
may interleave any number of `stream` and `generate` calls; for several threads use `AsyncLLM`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from infer.config import EngineConfig
from infer.engine.build.assemble import assemble
from infer.engine.client.output import OutputProcessor, collected, error_of
from infer.engine.client.step_lines import StepLines
from infer.engine.core import EngineCore
from infer.errors import EngineDeadError, RequestError
from infer.text.grammars.schema_relaxing import relaxed
from infer.types import FinishReason, Request, RequestOutput, Sampling, SamplingParams, TextDelta
from infer.types.grammar import MAX_GRAMMAR_CHARS, Grammar
from infer.types.stats_summary import summary_of

log = logging.getLogger(__name__)
_MAX_LOGGED = 8

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text; token ids; or a dict with either `prompt` (text) or `prompt_token_ids`."""
Message = Mapping[str, Any]
"""One message of a conversation in OpenAI's format, with `role` and `content`."""


class LLM:
    """A loaded model that generates; a context manager.

    `LLM(model="path-or-hub-id", max_batch_size=8)` takes every field of `EngineConfig` by keyword.
    Without `model` it loads the small model that ships with the package. Raises `LoadError` if the
    model cannot be loaded, `ConfigError` for a setting that is wrong.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.config = EngineConfig.from_kwargs(model=model, **settings)
        parts = assemble(self.config)
        self.tokenizer = parts.input_processor.tokenizer
        self.model_name = parts.model_name
        self.sampling_defaults = parts.input_processor.defaults
        """What requests get where their `SamplingParams` leave out fields."""
        self._open_core: EngineCore | None = parts.core
        self._input_processor = parts.input_processor
        self._processors: dict[str, OutputProcessor] = {}
        self._pieces: dict[str, deque[TextDelta]] = {}

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """Like the constructor, from a configuration object."""
        return cls(**dataclasses.asdict(config))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        progress: Literal["steps"] | None = None,
    ) -> list[RequestOutput]:
        """Complete one or many prompts, in one batch.

        `sampling_params` is one for all prompts, or a list with one per prompt; fields that it
        leaves out are those of `sampling_defaults`, which the checkpoint names. `use_tqdm` shows a
        progress bar over the prompts on stderr; by default it is shown if there are several prompts
        and stderr is a terminal. `progress="steps"` writes a line to stderr for each step instead:
        its rows and tokens, and which prompts got a seat or ended, by their numbers. Returns one
        output per prompt, in their order. Raises `RequestError` before anything is computed if a
        prompt or its parameters are invalid, and `EngineError` if a request fails.
        """
        if progress not in (None, "steps"):
            message = f"progress must be 'steps' or None, not {progress!r}"
            raise RequestError(message, param="progress")
        many = _as_prompts(prompts)
        params_of_prompts = _per_prompt(sampling_params, len(many))
        requests = [
            self.make_request(prompt, params)
            for prompt, params in zip(many, params_of_prompts, strict=True)
        ]
        return self._run(requests, use_tqdm, progress == "steps")

    def _chat_request(self, prompt: Sequence[int], sampling_params: SamplingParams) -> Request:
        """For a prompt that a chat template has made: a grammar begins behind the thoughts."""
        sampling_params, thoughts = _enforceable(sampling_params), None
        if sampling_params.reads_thoughts:
            thoughts = self.tokenizer.thoughts_before(prompt)
        return self._input_processor.make_request(prompt, sampling_params, thoughts=thoughts)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or a list of conversations.

        `tools` are definitions in OpenAI's format, which the chat template shows to the model.
        `chat_template_kwargs` are further variables of the template, such as `enable_thinking`.
        A grammar holds for the answer: where the template has marks for thoughts, the text may have
        thoughts before the answer. Everything else is as in `generate`.
        """
        conversations: list[Any] = (
            [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        )
        if not conversations:
            raise RequestError("messages must not be empty", param="messages")
        rendered = [
            self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )[1]
            for messages in conversations
        ]
        params_of_prompts = _per_prompt(sampling_params, len(rendered))
        return self._run(list(map(self._chat_request, rendered, params_of_prompts)), use_tqdm)

    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the tokens of one or many prompts, each given the tokens before it.

        Returns one array [n - 1] per prompt of n tokens; there is none for the first token.
        Nothing is sampled. Raises `RequestError` if a prompt is invalid or has `max_seq_len` tokens
        or more, and `EngineError` if a request fails.
        """
        params = Sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        requests = [self.make_request(prompt, params) for prompt in _as_prompts(prompts)]
        return [
            np.array([token.logprob for token in output.prompt_logprobs or ()], np.float32)
            for output in self._run(requests, use_tqdm=False)
        ]

    def logits(self, prompt: Prompt, positions: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Logits [P, V] of the token that follows each of P positions of a prompt, V tokens in the
        vocabulary.

        `positions` count from 0, or from -1 at the end of the prompt; by default they are all, in
        order. Nothing is taken from the prefix cache. Raises `RequestError` if the prompt is
        invalid, has `max_seq_len` tokens or more, or lacks one of the positions; `OverloadedError`
        if the queue is full; `EngineError` if the request fails.
        """
        request = self.make_request(prompt, Sampling(temperature=0.0, max_tokens=1))
        wanted = _as_positions(positions, len(request.prompt_token_ids))
        # Cached pages give no logits, so the request has a cache scope of its own.
        request = dataclasses.replace(
            request, logits_at=tuple(sorted(set(wanted))), cache_scope=request.request_id
        )
        self._add(request)
        try:
            sequence = self.core.scheduler.find(request.request_id)
            pieces = self._pieces[request.request_id]
            while not (pieces and pieces[-1].finish_reason):
                self._step()
            if pieces[-1].finish_reason is FinishReason.ERROR:
                raise error_of(pieces[-1])
        finally:
            self._drop(request.request_id)
        return np.stack([sequence.logits[position] for position in wanted])

    def make_request(
        self,
        prompt: Prompt,
        sampling_params: Sampling | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Make a request for `core.add`; raises `RequestError` if it is invalid.

        `request_id` must be unique among unfinished requests and is random by default. A smaller
        `priority` goes first.
        """
        if isinstance(prompt, Mapping):
            prompt = _given_prompt(prompt)
        if sampling_params is not None:
            sampling_params = _enforceable(sampling_params)
        return self._input_processor.make_request(
            prompt, sampling_params, request_id=request_id, priority=priority
        )

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[TextDelta, None, None]:
        """Yield the pieces of one completion as they are generated; of one answer, if `prompt` is
        a list of messages.

        Raises `RequestError` if the request is invalid. Leaving the loop early aborts the request.
        """
        if not isinstance(prompt, (str, Mapping)) and prompt and isinstance(prompt[0], Mapping):
            _, ids = self.tokenizer.apply_chat_template(prompt)  # type: ignore[arg-type]
            return self._stream(self._chat_request(ids, sampling_params or SamplingParams()))
        request = self.make_request(prompt, sampling_params)  # type: ignore[arg-type]
        return self._stream(request)

    def _stream(self, request: Request) -> Generator[TextDelta, None, None]:
        # Added here and not in `stream`, so that an iterator that is never started holds no seat.
        self._add(request)
        pieces = self._pieces[request.request_id]
        try:
            while True:
                while not pieces:
                    self._step()
                piece = pieces.popleft()
                if piece.finish_reason is FinishReason.ERROR:
                    raise error_of(piece)
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self._drop(request.request_id)

    def _run(
        self, requests: list[Request], use_tqdm: bool | None, show_steps: bool = False
    ) -> list[RequestOutput]:
        """Add requests as the queue has room, so that their number is not limited by it."""
        lines = StepLines([r.request_id for r in requests], sys.stderr) if show_steps else None
        unfinished = {request.request_id: request for request in requests}
        to_add = deque(requests)
        outputs: dict[str, RequestOutput] = {}
        try:
            with _progress_bar(len(requests), False if show_steps else use_tqdm) as advance:
                while unfinished:
                    while to_add and self._fits_queue(to_add[0]):
                        self._add(to_add.popleft())
                    ended = self._step()
                    if lines:
                        lines.show(self.core.step_events, ended)
                    for request_id, pieces in list(self._pieces.items()):
                        if request_id in unfinished and pieces and pieces[-1].finish_reason:
                            outputs[request_id] = collected(unfinished[request_id], pieces)
                            del unfinished[request_id]
                            self._drop(request_id)
                            advance()
        finally:
            for request_id in unfinished:
                self._drop(request_id)
        return [outputs[request.request_id] for request in requests]

    @property
    def core(self) -> EngineCore:
        """The `EngineCore` that this object steps; see docs/core.md. Raises `EngineDeadError` after
        `close`."""
        if self._open_core is None:
            raise EngineDeadError("this LLM has been closed")
        return self._open_core

    def _fits_queue(self, request: Request) -> bool:
        scheduler = self.core.scheduler
        has_place = scheduler.num_unfinished < self._input_processor.limits.max_unfinished
        return has_place and scheduler.may_wait(len(request.prompt_token_ids))

    def _add(self, request: Request) -> None:
        self.core.add(request)
        self._processors[request.request_id] = OutputProcessor(request, self.tokenizer)
        self._pieces[request.request_id] = deque()

    def _step(self) -> list[tuple[str, FinishReason]]:
        """Compute one step of all requests; each request's pieces go to its own queue.

        Returns the requests that ended, with the reasons."""
        ended = []
        for output in self.core.step(flush=True):
            processor = self._processors.get(output.request_id)
            if processor is None:
                continue
            piece = processor.push(output)
            if piece is not None:
                self._pieces[output.request_id].append(piece)
                if piece.finish_reason is not None:
                    ended.append((output.request_id, piece.finish_reason))
            if processor.take_abort():
                self.core.abort(output.request_id, FinishReason.STOP)
        return ended

    def _drop(self, request_id: str) -> None:
        if self._open_core is not None:
            self._open_core.abort(request_id)
        self._processors.pop(request_id, None)
        self._pieces.pop(request_id, None)

    def stats(self) -> dict[str, Any]:
        """Statistics of the engine by name: those of `types.stats_summary`, then all gauges and
        counters."""
        stats, limits = self.core.stats(), self._input_processor.limits
        return {**summary_of(stats, limits), **stats.by_name(limits.batching_mode)}

    def close(self) -> None:
        """Abort all requests and release the model."""
        for request_id in list(self._processors):
            self._drop(request_id)
        self._open_core = None
        self._input_processor.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


_S = TypeVar("_S", bound=Sampling)


def _enforceable(sampling: _S) -> _S:
    """The sampling without what cannot be enforced of its JSON schema, which the log names, as the
    server names it in a header."""
    grammar = sampling.grammar
    if grammar is None or grammar.kind != "json" or len(grammar.text) > MAX_GRAMMAR_CHARS:
        return sampling
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError):  # refused later
        return sampling
    kept = relaxed(schema)
    if kept.schema is schema:
        return sampling
    for path, keyword in kept.dropped[:_MAX_LOGGED]:
        log.warning("not enforced: %s%s", path.removeprefix(".") and f"{path[1:]}: ", keyword)
    if isinstance(sampling, SamplingParams):
        return sampling.replace(grammar=Grammar.json(kept.schema))  # type: ignore[return-value]
    return dataclasses.replace(sampling, grammar=Grammar.json(kept.schema))


def _given_prompt(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    """The text or token ids of a prompt given as a dict; raises `RequestError` for other keys."""
    names = {"prompt", "prompt_token_ids"} & prompt.keys()
    if len(names) != 1 or len(prompt) != 1:
        message = "a prompt that is a dict must have one key, either prompt or prompt_token_ids"
        raise RequestError(message, param="prompt")
    given: str | Sequence[int] = prompt[names.pop()]
    return given


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise RequestError(f"a prompt must be text or a list of token ids, not {kind}")
    many: list[Any] = list(prompts)
    if many and all(isinstance(item, int) for item in many):
        return [many]
    return many


def _as_positions(positions: Sequence[int] | None, length: int) -> list[int]:
    """Positions of a prompt of `length` tokens, counted from 0; `RequestError` for others."""
    if positions is None:
        return list(range(length))
    if not len(positions):
        raise RequestError("positions must not be empty", param="positions")
    positions_from_start = []
    for position in positions:
        if isinstance(position, bool) or not isinstance(position, (int, np.integer)):
            raise RequestError(
                f"positions must be integers, not {type(position).__name__}", param="positions"
            )
        if not -length <= position < length:
            raise RequestError(
                f"position {position} is outside the prompt, which has {length} tokens"
                f" ({-length} to {length - 1})",
                param="positions",
            )
        positions_from_start.append(int(position) % length)
    return positions_from_start


def _per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    is_list = isinstance(sampling_params, Iterable) and not isinstance(sampling_params, Mapping)
    given: list[Any] = list(sampling_params) if is_list else [sampling_params]
    for params in given:
        if not isinstance(params, SamplingParams):
            kind = type(params).__name__
            raise RequestError(f"sampling parameters must be SamplingParams(…), not {kind}")
    if len(given) != count:
        raise RequestError(
            f"there are {count} prompts but {len(given)} sampling parameters; give one for all"
            " prompts or one per prompt"
        )
    return given


@contextmanager
def _progress_bar(total: int, show: bool | None) -> Iterator[Callable[[], None]]:
    """Show a progress bar over the prompts on stderr; yields a function that advances it by one."""
    if not ((total > 1 and sys.stderr.isatty()) if show is None else show):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("prompts", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)
