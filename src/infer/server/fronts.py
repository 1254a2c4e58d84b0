"""`SeveralFronts`: a server as one of several in front of the same engines; `FrontQueries`"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from infer.errors import OverloadedError
from infer.server.distant_reader import DistantReader, piece_of, told
from infer.server.http.connections import connections_of
from infer.server.http.context import bare_id
from infer.server.http.error_responses import HttpError
from infer.server.kept_answers import KeptPiece, Reader
from infer.server.observe.metrics import snapshot_of
from infer.server.observe.request_trace import (
    RequestNotFoundError,
    cancel_answer,
    several_run,
    summary,
    view,
)
from infer.server.request_views import OneServer, ServedEngine, metrics_response, visible_to
from infer.server.tenancy.front_limits import FrontLimits

ANSWER_TIMEOUT_S = 1.0
"""Seconds that a front waits for the others."""
MAX_QUESTIONS = 32
"""Different questions of a front that may be under way, beside the first of each key."""
MAX_QUESTIONS_OF_KEY = 4
"""Those of one key."""
WAIT_S = 0.5
"""Seconds that a further question waits for its turn; then it is refused (503)."""
MAX_LISTED_OF_FRONT = 256
"""Requests of each front in a list, the newest."""


class FrontQuestion(msgspec.Struct, array_like=True, frozen=True):
    """What a front asks others."""

    kind: Literal["requests", "request", "cancel", "events", "named", "stats", "metrics"]
    """`named`: the requests that a client's `x-request-id` may mean."""
    tag: str = ""
    """Tag of the front that is asked; empty = all."""
    name: str = ""
    """Id of a request; for `named` that of the client."""
    visible_to: str | None = None
    """Id of the key whose requests the caller may see; None = those of all keys."""
    after: int = 0
    """For `events`: number of the last event that is known."""
    num_passed: int = 0
    """For `events`: see `KeptPiece.num_passed`."""


class FrontAnswer(msgspec.Struct, array_like=True, frozen=True):
    """What a front answers."""

    is_found: bool = False
    """Whether it has the request that was asked for."""
    fields: Any = None
    """The answer as JSON values."""
    text: str = ""
    """For `metrics`."""


OfOne = Literal["request", "cancel", "events"]
_MADE_HERE = re.compile(r"(?:[a-z]+[-_])?[0-9a-f]{32}")
"""Form of the ids that fronts make."""
_encode = msgspec.msgpack.Encoder().encode
_decode_question = msgspec.msgpack.Decoder(FrontQuestion).decode
_decode_answer = msgspec.msgpack.Decoder(FrontAnswer).decode


class Peers(Protocol):
    """The way to the other fronts."""

    async def ask(self, question: bytes, timeout_s: float) -> Mapping[str, bytes | None]:
        """The answers of the other fronts, by their names; None = there was none in time. A front
        that has been silent for some time is not named any more. Raises nothing."""


@dataclass(frozen=True, eq=False)
class SeveralFronts:
    """Each server (front) has the traces and metrics of its own requests only. The id of a request
    begins with the tag of its front, so a question about one request goes to one front; lists and
    metrics are those of all. A front that is asked answers for itself alone and asks nobody. What
    the caller may see was decided by the front that authenticated it, and is part of the question.
    """

    name: str
    """Name of this front, such as `front-0a1b2c3d`, unique to its process."""
    limits: FrontLimits
    """The limits of keys, which all fronts share."""
    peers: Peers

    @property
    def tag(self) -> str:
        """What the ids of this front's requests begin with: the end of its name, hexadecimal."""
        return tag_of(self.name)


def tag_of(name: str) -> str:
    """The tag of the front with this name."""
    return name.rpartition("-")[2]


class FrontEndpoints:
    """Answers the questions of other fronts."""

    def __init__(self, tag: str, served: ServedEngine) -> None:
        self._tag = tag
        self._traces = served.traces
        self._metrics = served.metrics
        self._kept = served.kept

    def __call__(self, question: bytes) -> bytes:
        """The answer of this front, both in msgpack. Runs on its event loop. Raises
        `msgspec.MsgspecError` for what is no question."""
        return _encode(self.answer(_decode_question(question)))

    def answer(self, asked: FrontQuestion) -> FrontAnswer:
        """The answer of this front alone."""
        if asked.tag not in ("", self._tag):
            return FrontAnswer()
        if asked.kind == "stats":
            return FrontAnswer(True, self._metrics.stats())
        if asked.kind == "metrics":
            return FrontAnswer(True, text=snapshot_of([self._metrics])().decode())
        if asked.kind == "requests":
            traces = islice(self._traces.all(asked.visible_to), MAX_LISTED_OF_FRONT)
            return FrontAnswer(True, list(map(summary, traces)))
        named = self._traces.named(asked.name, asked.visible_to)
        if asked.kind == "named":
            return FrontAnswer(True, [summary(trace) for trace in named[:MAX_LISTED_OF_FRONT]])
        if not named or asked.name not in (named[0].id, named[0].context.id):
            return FrontAnswer()
        (trace,) = named
        if asked.kind == "events":
            return FrontAnswer(
                True, told(self._kept, trace.context.id, asked.after, asked.num_passed)
            )
        if asked.kind == "request":
            return FrontAnswer(True, view(trace))
        return FrontAnswer(True, cancel_answer(trace, self._traces.cancel(trace)))


class FrontQueries(OneServer):
    """Answers for all fronts. Raises `OverloadedError` if too many questions wait."""

    def __init__(self, served: ServedEngine, fronts: SeveralFronts) -> None:
        super().__init__(served)
        self._fronts = fronts
        self.own = FrontEndpoints(fronts.tag, served)
        """Answers the questions of the others."""
        self._asking: dict[FrontQuestion, asyncio.Task[Mapping[str, bytes | None]]] = {}
        """By the question, because equal ones have one answer."""
        self._places = asyncio.Semaphore(MAX_QUESTIONS)
        self._places_of: WeakValueDictionary[str | None, asyncio.Semaphore] = WeakValueDictionary()
        """By `visible_to`, while one of its questions waits or is under way."""

    async def _ask(self, asked: FrontQuestion) -> tuple[dict[str, FrontAnswer], list[str]]:
        """The answers by the names of the fronts, and the names of those that do not answer."""
        asking = self._asking.get(asked)
        if asking is None:
            asking = self._asking[asked] = asyncio.ensure_future(self._ask_in_turn(asked))
            asking.add_done_callback(lambda _: self._asking.pop(asked))
        answers = {}
        missing = []
        for name, data in sorted((await asyncio.shield(asking)).items()):
            try:
                answers[name] = _decode_answer(data or b"")
            except msgspec.MsgspecError:  # none in time, or one of another version
                missing.append(name)
        return answers, missing

    async def _ask_in_turn(self, asked: FrontQuestion) -> Mapping[str, bytes | None]:
        is_only_one = asked.visible_to not in self._places_of
        place = self._places_of.setdefault(
            asked.visible_to, asyncio.Semaphore(MAX_QUESTIONS_OF_KEY)
        )
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(WAIT_S):
                    await held.enter_async_context(place)
                    if not is_only_one:
                        await held.enter_async_context(self._places)
            except TimeoutError:
                message = "too many questions to the other fronts are under way"
                raise OverloadedError(message) from None
            return await self._fronts.peers.ask(_encode(asked), ANSWER_TIMEOUT_S)

    async def _ask_all(self, asked: FrontQuestion) -> tuple[dict[str, FrontAnswer], list[str]]:
        """As `_ask`, with the answer of this front."""
        answers, missing = await self._ask(asked)
        answers[self._fronts.name] = self.own.answer(asked)
        return answers, missing

    async def requests(self, http: HttpRequest) -> dict[str, Any]:
        asked = FrontQuestion("requests", visible_to=visible_to(http))
        answers, missing = await self._ask_all(asked)
        data = [request for answer in answers.values() for request in answer.fields]
        data.sort(key=_newest_first)
        return {"object": "list", "data": data, "missing_fronts": missing}

    async def request(self, http: HttpRequest) -> dict[str, Any]:
        fields: dict[str, Any] = await self._of_one("request", http)
        return fields

    async def cancel(self, http: HttpRequest) -> dict[str, Any]:
        fields: dict[str, Any] = await self._of_one("cancel", http)
        return fields

    async def kept_reader(self, http: HttpRequest, after: int) -> Reader:
        seen = visible_to(http)
        name = (await self._of_one("request", http))["id"]
        if bare_id(name).startswith(self._fronts.tag):
            return self._own.kept.read(bare_id(name), after)

        async def more(read: KeptPiece) -> KeptPiece:
            which = {"after": read.last, "num_passed": read.num_passed}
            return piece_of(await self._one("events", name, seen, **which))

        return DistantReader(await more(KeptPiece(b"", after)), more)

    async def _of_one(self, kind: OfOne, http: HttpRequest) -> Any:
        """Raises `HttpError`: 404 if no front has the request, 409 if it is the client's name of
        several that run, 503 if its front does not answer."""
        name, seen = http.path_params["id"], visible_to(http)
        if _MADE_HERE.fullmatch(name):
            with suppress(RequestNotFoundError):  # a client's name may look the same
                return await self._one(kind, name, seen)
        return await self._one(kind, await self._meant(name, seen), seen)

    async def _meant(self, name: str, seen: str | None) -> str:
        """The id of the request that a client's name means; see `the_one`."""
        asked = FrontQuestion("named", name=name, visible_to=seen)
        answers, missing = await self._ask_all(asked)
        requests = [request for answer in answers.values() for request in answer.fields or ()]
        requests.sort(key=_newest_first)
        running = [request["id"] for request in requests if request["total_ms"] is None]
        if len(running) > 1:
            raise several_run(running)
        if requests:
            return str(requests[0]["id"])
        if missing:
            raise _silent(f"{missing[0]}, which may have this request,")
        raise RequestNotFoundError

    async def _one(self, kind: OfOne, name: str, seen: str | None, **which: int) -> Any:
        tag = bare_id(name)[: len(self._fronts.tag)]
        asked = FrontQuestion(kind, tag, name, seen, **which)
        if tag == self._fronts.tag:
            return _found(self.own.answer(asked))
        answers, missing = await self._ask(asked)
        for front in missing:
            if tag_of(front) == tag:
                raise _silent(f"{front}, where this request was made,")
        answers_of_front = (answer for front, answer in answers.items() if tag_of(front) == tag)
        return _found(next(answers_of_front, FrontAnswer()))

    async def stats(self, http: HttpRequest) -> dict[str, Any]:
        """The statistics of this front, and those of each in `fronts`."""
        answers, missing = await self._ask_all(FrontQuestion("stats"))
        fronts = {name: answer.fields for name, answer in sorted(answers.items())}
        return {**fronts[self._fronts.name], "fronts": fronts, "missing_fronts": missing}

    async def metrics(self, http: HttpRequest) -> Response:
        """The metrics of all fronts: each sample has the label `front`."""
        render = snapshot_of([self._own.metrics], connections_of(http.scope))
        text = await asyncio.to_thread(render)
        answers, missing = await self._ask(FrontQuestion("metrics"))
        texts = {name: answer.text for name, answer in answers.items()}
        texts[self._fronts.name] = text.decode()
        name = f"{self._own.metrics.prefix}:front_up"
        up = [f"# HELP {name} whether a front answers", f"# TYPE {name} gauge"]
        up += [f'{name}{{front="{front}"}} 1.0' for front in sorted(texts)]
        up += [f'{name}{{front="{front}"}} 0.0' for front in missing]
        lines = await asyncio.to_thread(lambda: [*_labelled(texts), *up])
        return metrics_response(("\n".join(lines) + "\n").encode())


def _silent(front: str) -> HttpError:
    message = f"{front} does not answer"
    return HttpError(503, message, code="front_unavailable", type="server_error")


def _found(answer: FrontAnswer) -> Any:
    if not answer.is_found:
        raise RequestNotFoundError
    return answer.fields


def _newest_first(fields: Mapping[str, Any]) -> tuple[bool, float]:
    if fields["total_ms"] is None:
        return False, -fields["created"]
    return True, -(fields["created"] + fields["total_ms"] / 1000)


def _labelled(texts: Mapping[str, str]) -> Iterable[str]:
    """The lines of several texts of the prometheus client, each family once, with the label
    `front`."""
    families: dict[str, list[str]] = {}
    for front, text in sorted(texts.items()):
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("# "):
                _, kind, name, _ = line.split(" ", 3)
                if kind == "HELP":
                    lines = families.setdefault(name, [])
                if sum(comment.startswith("# ") for comment in lines[:2]) < 2:
                    lines.append(line)
                continue
            name, brace, rest = line.partition("{")
            if brace:
                lines.append(f'{name}{{front="{front}",{rest}')
            else:
                name, value = line.split(" ", 1)
                lines.append(f'{name}{{front="{front}"}} {value}')
    for lines in families.values():
        yield from lines


AnswerQuestion = Callable[[bytes], bytes]
"""A `FrontEndpoints`, for whoever brings it the questions."""
