"""`FrontExchange`: what all fronts of the same engines share: the limits of keys, and questions"""

from __future__ import annotations

from infer.server.front_relay import FrontRelay
from infer.server.tenancy.limit_authority import LimitAuthority
from infer.server.tenancy.limit_messages import decode_sync, encode


class FrontExchange:
    """It is where all fronts can reach it: in the process that has started them
    (`server.front_keeper`), or in an actor of Ray (`cluster.shared_fronts`). Lives on an event
    loop. A `Relay`."""

    def __init__(self, num_fronts: int) -> None:
        """`num_fronts`: fronts that there are to be."""
        self._authority = LimitAuthority(num_fronts)
        self._relay = FrontRelay()

    def forget(self, front: str) -> None:
        """A front has gone, and the requests that it had."""
        self._authority.forget(front)
        self._relay.forget(front)

    async def sync(self, said: bytes) -> bytes:
        """See `LimitAuthority.sync`; both in msgpack."""
        return encode(self._authority.sync(decode_sync(said)))

    async def next_question(self, front: str) -> tuple[int, bytes] | None:
        """See `Relay`."""
        return await self._relay.next_question(front)

    async def answer(self, front: str, number: int, data: bytes) -> None:
        """See `Relay`."""
        await self._relay.answer(front, number, data)

    async def ask(self, front: str, question: bytes, timeout_s: float) -> dict[str, bytes | None]:
        """See `Relay`."""
        return await self._relay.ask(front, question, timeout_s)
