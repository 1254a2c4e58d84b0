"""`SharedFronts`: the actor of Ray that the fronts of an application share, as each calls it"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import ActorDiedError

from infer.server.front_exchange import FrontExchange
from infer.server.front_relay import RelayError
from infer.server.tenancy.front_limits import AuthorityError

NAMESPACE = "infer"
"""Of the actors that have names."""


class FrontsActor(FrontExchange):
    """What all fronts share, as an actor of Ray."""


class SharedFronts:
    """The `FrontsActor` of an application, as its fronts call it: a `Relay`, a transport of limits.

    The first front that needs it makes it, and it dies with that front; then another one does.
    """

    def __init__(self, application: str, num_fronts: int) -> None:
        self._name = f"infer-fronts-{application}"
        self._num_fronts = num_fronts
        self._actor: Any = None
        self._finding: asyncio.Task[Any] | None = None

    def _find(self) -> Any:
        actor = ray.remote(FrontsActor).options(
            name=self._name,
            namespace=NAMESPACE,
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=1000,
        )
        return actor.remote(self._num_fronts)

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Raises `RayError`, and whatever Ray raises while its head is away."""
        if self._actor is None:
            if self._finding is None or self._finding.done():
                # It may take as long as Ray's head is away.
                self._finding = asyncio.create_task(asyncio.to_thread(self._find))
            self._actor = await asyncio.shield(self._finding)
        actor = self._actor
        try:
            return await getattr(actor, method).remote(*arguments)
        except ActorDiedError:
            if self._actor is actor:
                self._actor = self._finding = None
            raise

    async def sync(self, said: bytes) -> bytes:
        """A transport of `FrontLimits`."""
        try:
            answer: bytes = await self._call("sync", said)
        except Exception as error:
            raise AuthorityError(type(error).__name__) from error
        return answer

    async def next_question(self, front: str) -> tuple[int, bytes] | None:
        """See `Relay`."""
        question: tuple[int, bytes] | None = await self._relayed("next_question", front)
        return question

    async def answer(self, front: str, number: int, data: bytes) -> None:
        """See `Relay`."""
        await self._relayed("answer", front, number, data)

    async def ask(self, front: str, question: bytes, timeout_s: float) -> dict[str, bytes | None]:
        """See `Relay`."""
        answers: dict[str, bytes | None] = await self._relayed("ask", front, question, timeout_s)
        return answers

    async def _relayed(self, method: str, *arguments: Any) -> Any:
        try:
            return await self._call(method, *arguments)
        except Exception as error:
            raise RelayError(type(error).__name__) from error
