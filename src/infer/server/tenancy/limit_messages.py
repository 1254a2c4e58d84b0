"""What a front and the authority over the keys' limits say to each other, in msgpack

A front sends one `LimitSync` at a time; the authority answers each with a `LimitAnswer`. A sync
message is repeatable: it has a number, and the number of the last one whose answer the front has
seen, so the authority takes back what it granted in an answer that was lost.
"""

from __future__ import annotations

import msgspec

BucketName = str
"""`requests` or `tokens`; empty = none."""
BucketId = tuple[str, BucketName]
"""Id of a key, and name of its bucket."""


class LimitAsk(msgspec.Struct, array_like=True, frozen=True):
    """What a request wants of its key's limits: all of it, or nothing."""

    key: str
    """Id of the key."""
    bucket: BucketName
    per_minute: int
    """Size of the bucket; 0 without one."""
    amount: float
    """Amount to take from the bucket."""
    num_opened: int = 0
    """Requests to count as open: 0 or 1."""
    max_open: int = 0
    """Requests of the key that may be open at all fronts together."""


class LimitVerdict(msgspec.Struct, array_like=True, frozen=True):
    """What becomes of a `LimitAsk`."""

    is_granted: bool
    is_full: bool = False
    """Whether it was refused because too many requests are open."""
    level: float = 0.0
    """Amount in the bucket, after this."""
    wait_s: float = 0.0
    """Seconds until the bucket has the amount; 0 = now."""


class BucketChange(msgspec.Struct, array_like=True, frozen=True):
    """What was taken from a bucket without asking; below 0 = given back."""

    key: str
    bucket: BucketName
    per_minute: int
    amount: float


class BucketLevel(msgspec.Struct, array_like=True, frozen=True):
    """The level of a bucket at the authority."""

    key: str
    bucket: BucketName
    per_minute: int
    level: float


class LimitSync(msgspec.Struct, array_like=True, frozen=True):
    """From a front to the authority."""

    front: str
    """Name of the front, unique to its process."""
    number: int
    """1, 2, ... of this front."""
    confirmed: int
    """The latest number whose answer the front has seen."""
    generation: str
    """The authority that the front knows; empty = none."""
    version: int
    """The `version` of the latest answer that the front has seen."""
    asks: list[LimitAsk]
    changes: list[BucketChange]
    num_open: dict[str, int]
    """Open requests at this front, by key id."""


class LimitAnswer(msgspec.Struct, array_like=True, frozen=True):
    """From the authority to a front. Another generation than the front's: it did nothing."""

    generation: str
    """Random name of this authority, which knows nothing of those before it."""
    number: int
    """That of the sync message."""
    version: int = 0
    """Number of changes of all buckets so far."""
    is_open: bool = False
    """Whether it decides; if not, there are no verdicts and fronts use their shares."""
    verdicts: list[LimitVerdict] = []
    """One for each ask."""
    levels: list[BucketLevel] = []
    """The buckets that have changed since the `version` of the sync message."""


encode = msgspec.msgpack.Encoder().encode
decode_sync = msgspec.msgpack.Decoder(LimitSync).decode
decode_answer = msgspec.msgpack.Decoder(LimitAnswer).decode
