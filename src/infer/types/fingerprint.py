"""`Fingerprint`: which model an engine serves, and which bits it computes."""

from __future__ import annotations

import msgspec

PROTOCOL = 1
"""Version of the records that an engine and its clients exchange."""


class Fingerprint(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Two engines with equal fingerprints give equal tokens and log-probabilities for equal
    requests, so a stream can move from one to the other and nobody sees it. Digests are
    hexadecimal; an empty one is of an engine in which nobody has computed it, such as an engine of
    a test."""

    model: str = ""
    """SHA-256 of the checkpoint's config and tokenizer; engines of one fleet share it."""
    numbers: str = ""
    """SHA-256 of the logits of a fixed prompt, with the dtype and the versions of the kernels."""
    protocol: int = PROTOCOL
    """Version of the records that the engine reads and writes."""
