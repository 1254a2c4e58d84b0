"""`IndexChanges`: which pages enter and leave a prefix index, as hashes that others can compute"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import Struct

from infer.types.page_changes import HASH_BYTES, PageChanges

MAX_PAGES = 2048
"""Changes that are taken at once; 32 KiB, hashed and written in a few milliseconds."""
MAX_PENDING = 1 << 16
"""Changes that wait to be taken, beyond the number of indexed pages, before the whole index is sent
instead."""

_PUBLIC = blake2b(b"", digest_size=HASH_BYTES, person=b"public").digest()

Parent = int | str | tuple[str, int]
"""The node before a page; see `page_allocator.Node`."""


def _root(scope: str, behind: bytes = b"") -> bytes:
    """Hash before the first page of a scope; `behind`: the last public page before it, if any."""
    name = scope.encode("utf-8", "surrogatepass")
    return blake2b(behind + name, digest_size=HASH_BYTES, person=b"scope").digest()


def _page(parent: bytes, packed: bytes) -> bytes:
    return blake2b(parent + packed, digest_size=HASH_BYTES, person=b"page").digest()


def chain(
    tokens: Sequence[int], page_size: int, scope: str, num_public: int = 0, max_pages: int = 1024
) -> list[bytes]:
    """Hashes of the pages that `PageAllocator.match` may find for `tokens`, from the first on.

    `max_pages`: how many at most; a hash takes a microsecond.
    """
    num_pages = min((len(tokens) - 1) // page_size, max_pages)
    public = num_public // page_size
    pack = Struct(f"<{page_size}I").pack
    before = _PUBLIC if public else _root(scope)
    hashes = []
    for i in range(num_pages):
        before = _page(before, pack(*tokens[i * page_size : (i + 1) * page_size]))
        hashes.append(before)
        if i + 1 == public:
            before = _root(scope, before)
    return hashes


class IndexChanges:
    """A page's hash is made of the hash of the page before it and its tokens, so it stands for all
    tokens up to its end. The first page follows a root: that of the cache scope, or the one of
    public tokens. After the last public page there is a root again, made of the scope and of that
    page. So the hashes of two scopes have nothing in common, as their pages have not
    (`schedule.page_allocator`).

    Changes are collected until they are taken, `MAX_PAGES` at a time. Whoever reads them compares a
    digest of all hashes, and asks for the whole index again where it differs. The page allocator
    calls it; a page is known by its node.
    """

    def __init__(
        self,
        page_size: int,
        indexed: Iterable[tuple[int, Parent, Sequence[int]]],
        *,
        max_pages: int,
        max_pending: int,
    ) -> None:
        """`indexed`: node, parent and tokens of each page that is in the index now, parents before
        their children. `max_pages`, `max_pending`: see the constants."""
        self._max_pages, self._max_pending = max_pages, max_pending
        self._pack = Struct(f"<{page_size}I").pack
        self._hashes: dict[int, bytes] = {}
        """Node → hash of each indexed page."""
        self._digest = 0
        self._pending: dict[bytes, bool] = {}
        """Hash of each page that was indexed or dropped since it was last taken → whether it is
        indexed now."""
        self._is_reset = True
        for node, parent, tokens in indexed:
            self.enter(node, parent, tokens)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._pending and not self._is_reset

    def enter(self, node: int, parent: Parent, tokens: Sequence[int]) -> None:
        """A page is indexed."""
        before = self._hash_before(parent)
        self._hashes[node] = name = _page(before, self._pack(*tokens))
        self._digest ^= int.from_bytes(name)
        self._add(name, True)

    def leave(self, node: int) -> None:
        """A page is no longer indexed."""
        name = self._hashes.pop(node)
        self._digest ^= int.from_bytes(name)
        self._add(name, False)

    def restart(self) -> None:
        """Begin again with the whole index."""
        self._is_reset = True
        self._pending = dict.fromkeys(self._hashes.values(), True)

    def take(self) -> PageChanges:
        """The changes since the last call, at most `max_pages`, the oldest first."""
        pending = self._pending
        if len(pending) <= self._max_pages:
            taken, self._pending = pending, {}
        else:
            taken = {name: pending.pop(name) for name in [*pending][: self._max_pages]}
        is_reset, self._is_reset = self._is_reset, False
        return PageChanges(
            digest=self._digest.to_bytes(HASH_BYTES),
            entered=b"".join([name for name, is_in in taken.items() if is_in]),
            left=b"".join([name for name, is_in in taken.items() if not is_in]),
            is_reset=is_reset,
            is_complete=not self._pending,
        )

    def _hash_before(self, parent: Parent) -> bytes:
        if isinstance(parent, tuple):
            scope, node = parent
            return _root(scope, self._hashes[node])
        if isinstance(parent, str):
            return _root(parent)
        return self._hashes[parent] if parent else _PUBLIC

    def _add(self, name: bytes, is_in: bool) -> None:
        self._pending[name] = is_in
        if len(self._pending) > self._max_pending + len(self._hashes):
            self.restart()
