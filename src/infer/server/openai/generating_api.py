"""`GeneratingApi`: what an endpoint that generates is: its path, body, requests and answer.

The pipeline of `server.generation` serves any of them. `AnswerFormat` is one answer as the client
sees it, for all choices of one HTTP request; `StreamFormat` is its half that writes a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeVar

from infer.engine.client.async_llm import AsyncLLM
from infer.server.openai.schema import GeneratingBody
from infer.text.untrusted.workers import Steps
from infer.types import Request, RequestOutput, TextDelta

B = TypeVar("B", bound=GeneratingBody)

Part = RequestOutput | TextDelta
"""Output of one choice, all of it or what is new."""
OnMessage = Callable[[dict[str, Any]], None]
"""Receives what is new in the members of a chat's message; of a response, all of it at its end."""


Keeps = Literal["nothing", "sessions", "responses"]


class StreamFormat(Protocol):
    """Writes an answer as server-sent events."""

    @property
    def merges(self) -> bool:
        """Whether pieces of a choice that have gathered may come as one."""

    def opening(self) -> Iterator[bytes]:
        """Events before the first token."""

    def waiting(self) -> bytes:
        """What says that there is nothing new yet, in the way that the API's clients count."""

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        """Events of what is new in choice `index`."""

    def size_of(self, part: Part) -> int:
        """Bytes that `piece` makes of `part`, about."""

    def closing(self) -> Iterator[bytes]:
        """Events after the last choice has ended."""

    def failure(self, error: str) -> Iterator[bytes]:
        """The last events of a stream that broke; `error`: the error body, one line of JSON."""


class AnswerFormat(Protocol):
    """One answer: whole, or as the stream that the body asks for."""

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts; a prompt counts once, however many choices it has."""

    @property
    def warning(self) -> str | None:
        """Sent as the `x-warning` header."""

    def size_of(self, part: RequestOutput) -> int:
        """Bytes that `body` makes of one choice, about."""

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer, for `large_json.json_response`; called once."""

    def events(self) -> StreamFormat:
        """The answer as a stream; called once, and not beside `body`."""


class GeneratingApi(Protocol[B]):
    """One endpoint. The first line of the class's docstring is its summary in `/openapi.json`."""

    @property
    def path(self) -> str:
        """Path of the route, which takes POST."""

    @property
    def body(self) -> type[B]:
        """Wire model of the request."""

    @property
    def id_prefix(self) -> str:
        """Beginning of the answers' ids, with what separates it from the rest."""

    @property
    def refuses(self) -> Sequence[int]:
        """Statuses of errors that only this endpoint has, for `/openapi.json`."""

    @property
    def keeps(self) -> Keeps:
        """What may be kept of its conversations: the turns of a session, if a body with `messages`
        has a `session_id`; or responses, from which a body may go on."""

    def make_requests(self, engine: AsyncLLM, wire: B, answer_id: str) -> Steps[list[Request]]:
        """The engine's requests, one for each of `wire.num_choices`; raises `RequestError`.
        Grammars and chat templates are jobs for other processes: see `Steps`."""

    def make_answer(
        self,
        engine: AsyncLLM,
        wire: B,
        requests: Sequence[Request],
        answer_id: str,
        on_message: OnMessage | None,
    ) -> AnswerFormat:
        """The answer to `requests`. `on_message`: where the endpoint has sessions and the body
        continues one, what is to be kept of the answer."""
