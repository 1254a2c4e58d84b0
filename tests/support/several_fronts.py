"""Several fronts in one process, without Ray: each an app with an engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from infer.engine.client.async_llm import AsyncLLM
from infer.server.front_exchange import FrontExchange
from infer.server.front_identity import new_front_name
from infer.server.front_relay import RelayedPeers, RelayError
from infer.server.fronts import SeveralFronts
from infer.server.tenancy.front_limits import AuthorityError, FrontLimits
from tests.support.serving import App, serving


class SharedByFronts:
    """The `FrontExchange` of fronts in one process, which may go."""

    def __init__(self, num_fronts: int) -> None:
        self._num_fronts = num_fronts
        self.renew()

    def renew(self) -> None:
        """Be another one, after the death of the first."""
        self._exchange = FrontExchange(self._num_fronts)
        self.has_gone = False

    async def sync(self, said: bytes) -> bytes:
        if self.has_gone:
            raise AuthorityError("its process has gone")
        return await self._exchange.sync(said)

    async def next_question(self, front: str) -> tuple[int, bytes] | None:
        self._check()
        return await self._exchange.next_question(front)

    async def answer(self, front: str, number: int, data: bytes) -> None:
        self._check()
        await self._exchange.answer(front, number, data)

    async def ask(self, front: str, question: bytes, timeout_s: float) -> dict[str, bytes | None]:
        self._check()
        return await self._exchange.ask(front, question, timeout_s)

    def _check(self) -> None:
        if self.has_gone:
            raise RelayError("its process has gone")


class FrontOfSeveral:
    """A front: an app, and what it takes part in."""

    def __init__(
        self, shared: SharedByFronts, engine: AsyncLLM, num_fronts: int, settings: dict[str, Any]
    ) -> None:
        self.name = new_front_name()
        self.tag = self.name.removeprefix("front-")
        self.limits = FrontLimits(self.name, num_fronts, shared.sync)
        self._peers = RelayedPeers(self.name, shared)
        fronts = SeveralFronts(self.name, self.limits, self._peers)
        self._app = serving(engine, fronts=fronts, **settings)
        self._answering: asyncio.Task[None] | None = None

    async def start(self) -> App:
        app = await self._app.__aenter__()
        self._answering = asyncio.ensure_future(self._peers.serve(app.app.state.views.own))
        return app

    def freeze(self) -> None:
        """It answers no other front any more."""
        assert self._answering is not None
        self._answering.cancel()

    async def stop(self) -> None:
        self.freeze()
        await self._app.__aexit__(None, None, None)


@contextlib.asynccontextmanager
async def several_fronts(
    make_engine: Callable[[], AsyncLLM], num_fronts: int, **settings: Any
) -> AsyncIterator[tuple[SharedByFronts, list[FrontOfSeveral], list[App]]]:
    """Fronts that have found each other and, where there are keys, their authority."""
    shared = SharedByFronts(num_fronts)
    fronts = [
        FrontOfSeveral(shared, make_engine(), num_fronts, settings) for _ in range(num_fronts)
    ]
    try:
        apps = [await front.start() for front in fronts]
        while settings.get("api_keys") and not all(f.limits.is_connected for f in fronts):
            await asyncio.sleep(0.01)
        yield shared, fronts, apps
    finally:
        for front in fronts:
            await front.stop()


def with_several_fronts(use: Callable[..., Awaitable[None]], *arguments: Any, **how: Any) -> None:
    """Run `use(shared, fronts, apps)` in an event loop."""

    async def main() -> None:
        async with several_fronts(*arguments, **how) as found:
            await use(*found)

    asyncio.run(main())
