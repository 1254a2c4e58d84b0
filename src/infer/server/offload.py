"""`Offload`: reads bodies, and does long work on them beside the event loop, in threads.

The event loop carries everybody's streams. So work whose time grows with a body, a session's
history, the choices of a request or the size of its answer is done in threads, of which each key
has a fair part. The work that may wait for them is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from infer.errors import OverloadedError
from infer.server.http.body_budget import BodyBudget
from infer.server.http.connections import note_refusal
from infer.server.http.error_responses import ClientGone, HttpError
from infer.server.http.fair_threads import FairThreads
from infer.server.http.json_body import check_media_type, parse_object, read_body
from infer.server.openai.large_json import LARGE_ANSWER_BYTES
from infer.server.tenancy.key_places import KeyPlaces
from infer.server.tenancy.limits import Tenant, tenant_of
from infer.text.untrusted.workers import Answer, Job, Steps
from infer.types.server_limits import SERVER_LIMITS, ServerLimits

T = TypeVar("T")

PARSED = "infer.body"
"""Key in a scope: the body's object, where somebody has read it before."""
NUM_BYTES = "infer.num_bytes"
"""Key in a scope: bytes of the body, and of what was added to it since (a session's messages)."""


class Offload:
    """Threads for what is done with long bodies, and a bounded queue before them.

    One thread parses, since the parser does not let go of the interpreter: the event loop would
    wait for two of them in turn.
    """

    def __init__(self, limits: ServerLimits = SERVER_LIMITS) -> None:
        self._limits = limits
        self._parser = FairThreads(1, "infer-json")
        self._threads = FairThreads(2, "infer-text")
        self._places = KeyPlaces(
            "long bodies worked on", limits.max_long_bodies_of_key, limits.max_long_bodies
        )
        """Of long bodies that are worked on or wait."""
        self._jobs = KeyPlaces(
            "chats and grammars worked on", limits.max_jobs_of_key, limits.max_jobs
        )
        """Of jobs of untrusted text that are worked on or wait."""
        self._budget = BodyBudget()

    async def read_object(self, request: Request) -> dict[str, Any]:
        """The JSON object that the body is. Raises 400, 408, 413, 415, or as `run`."""
        if PARSED in request.scope:
            parsed: dict[str, Any] = request.scope[PARSED]
            return parsed
        check_media_type(request.headers)
        with self._budget.body(tenant_of(request.scope).key.id) as grow_to:
            try:
                async with asyncio.timeout(self._limits.body_timeout_s):
                    body = await read_body(request, grow_to)
            except TimeoutError:
                note_refusal(request.scope, "body_timeout")
                message = f"the body was not complete after {self._limits.body_timeout_s:g} s"
                raise HttpError(408, message, code="request_timeout") from None
            except OverloadedError:
                note_refusal(request.scope, "body_budget")
                raise
            except ClientDisconnect:
                raise ClientGone from None
            request.scope[NUM_BYTES] = len(body)
            return await self._run_in(self._parser, request, parse_object, body)

    async def run(
        self, request: Request, work: Callable[..., T], *arguments: Any, heavy: bool = False
    ) -> T:
        """`work(*arguments)`; in a thread if the work is heavy or the body of `request` long, so
        that others do not notice. Raises 429 or 503 if too many wait for the threads."""
        return await self._run_in(self._threads, request, work, *arguments, heavy=heavy)

    async def run_steps(
        self, request: Request, begin: Callable[..., Steps[T]], *arguments: Any, heavy: bool = False
    ) -> T:
        """Run the steps `begin(*arguments)` to their end, like `run`; their jobs are worked on by
        other processes, and meanwhile no thread is held. The CPU time of jobs is charged to the
        key. Raises what `run` raises, and `OverloadedError` where a job cannot be worked on."""
        tenant, steps = tenant_of(request.scope), begin(*arguments)
        owner, answer = tenant.key.id, None
        result: Any
        job, result = await self._run_in(self._threads, request, _advance, steps, None, heavy=heavy)
        while job is not None:
            if heavy:
                self._places.acquire(owner)
            try:
                answer = await self._answer_to(job, tenant)
            finally:
                if heavy:
                    self._places.release(owner)
            # What a template has written may be long, though the body is short.
            heavy = heavy or len(answer.body) > self._limits.long_body_bytes
            job, result = await self._run_in(
                self._threads, request, _advance, steps, answer, heavy=heavy, is_begun=True
            )
        done: T = result
        return done

    async def render(
        self, request: Request, num_bytes: int, work: Callable[..., T], *arguments: Any
    ) -> T:
        """`work(*arguments)`, which writes about `num_bytes` of an answer; in a thread if that is
        much. Never refused: only answers of requests that are open come here."""
        if num_bytes <= LARGE_ANSWER_BYTES:
            return work(*arguments)
        owner, work = tenant_of(request.scope).key.id, partial(work, *arguments)
        result: T = await self._threads.submit(owner, work, lambda: None)
        return result

    async def _run_in(
        self,
        threads: FairThreads,
        request: Request,
        work: Callable[..., T],
        *arguments: Any,
        heavy: bool = False,
        is_begun: bool = False,
    ) -> T:
        if not heavy and request.scope.get(NUM_BYTES, 0) <= self._limits.long_body_bytes:
            return work(*arguments)
        tenant = tenant_of(request.scope)
        owner = tenant.key.id
        if not is_begun:
            self._check_room(tenant)
        self._places.acquire(owner)
        result: T = await threads.submit(
            owner, partial(work, *arguments), partial(self._places.release, owner)
        )
        return result

    def _check_room(self, tenant: Tenant) -> None:
        if not self._places.has_room(tenant.key.id, tenant.key.limits.max_concurrent):
            raise OverloadedError("too many long bodies are being read")

    async def _answer_to(self, job: Job, tenant: Tenant) -> Answer:
        """The answer to a job, which is charged to the key even if nobody waits for it any more."""
        loop, owner = asyncio.get_running_loop(), tenant.key.id
        if not self._jobs.has_room(owner):
            raise OverloadedError("too many chats and grammars are being worked on")

        def end(done: Future[Answer]) -> None:
            self._jobs.release(owner)
            if not done.cancelled() and done.exception() is None:
                tenant.charge_cpu(done.result().cpu_s)

        def end_soon(done: Future[Answer]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, done)

        working = job.workers.submit(job, owner)
        self._jobs.acquire(owner)
        working.add_done_callback(end_soon)
        return await asyncio.wrap_future(working)

    def close(self) -> None:
        """End the threads, without waiting for them."""
        for threads in (self._parser, self._threads):
            threads.close()


def _advance(steps: Steps[T], answer: Answer | None) -> tuple[Job | None, T | None]:
    """(the next job, None), or (None, the result) after the last step."""
    try:
        return (next(steps) if answer is None else steps.send(answer)), None
    except StopIteration as end:
        return None, end.value
