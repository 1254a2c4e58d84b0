"""`PageChanges`: which pages enter and leave the prefix index of an engine, for those who route.

A page is named by a hash of its tokens and all before them (see `schedule.index_changes`), so that
whoever has the tokens of a prompt knows which pages would be found, and nobody else learns any.
"""

from __future__ import annotations

import msgspec

HASH_BYTES = 16
"""Bytes of the hash of a page."""


class PageChanges(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The changes since the report before, or a part of them if there are many."""

    digest: bytes
    """Exclusive or of the hashes of all indexed pages; `HASH_BYTES`."""
    entered: bytes = b""
    """Hashes of pages that have been indexed, one after the other."""
    left: bytes = b""
    """Hashes of pages that can no longer be found."""
    is_reset: bool = False
    """Whether the reader begins with an empty index, to which these and later changes apply."""
    is_complete: bool = True
    """Whether no change is left out, so that `digest` is that of the reader's index, too."""
