"""What sets one of several fronts apart from the others: its name, and the seeds that it draws

Requests without a seed get one from their front. Fronts of the same engines have the same
settings, so each derives a seed of its own from its name.
"""

from __future__ import annotations

import hashlib
import secrets


def new_front_name() -> str:
    """A random name, `front-` and 8 hexadecimal digits; the ids of the front's requests begin with
    these digits."""
    return f"front-{secrets.token_hex(4)}"


def seed_of_front(seed: int | None, front: str) -> int:
    """The seed from which a front draws the seeds of its requests, from the engines' (None =
    random) and its name; at least 0, below 2^62."""
    if seed is None:
        return secrets.randbits(62)
    digest = hashlib.blake2b(f"{seed}/{front}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2
