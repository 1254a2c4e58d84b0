"""`PageAllocator`: who may use which page of the KV cache, and which pages hold what.

Owns page numbers, reference counts, the free list and the prefix index; the tensors behind the
numbers belong to `runner.kv_storage`. Called by the scheduler only. Its rules, checked by
`check()`:

1. `refs[p]` is the number of page tables that contain page p; p is on the free list exactly when
   that is 0. Page 0 is scrap (padding writes there) and never handed out.
2. A page is indexed only when it is full and computed. An indexed page is never written again; a
   page that is not full has one owner. Hence there is no copy-on-write.
3. The index key is (node of the parent page, the tokens in the page), under a root per cache
   scope, compared exactly. A node is a number given to a page when it is indexed and never
   reused, so an entry cannot be reached through a parent that was evicted and replaced. Pages of
   public tokens are under a root of their own; the pages behind them are in a scope again.
4. A page that fills up with a key which is already indexed is dropped for the indexed one. Tables
   are released tail first, so a parent page is never taken from the free list before its child.
5. A match leaves at least one token to compute: its result is what gets sampled. So does `adopt`,
   by which a sequence that has begun takes over what others have computed since.

A free page keeps its index entry until it is taken again. The prefix cache is therefore what the
free list remembers: it has no size and no eviction policy of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Node = int | str | tuple[str, int]
"""A page's number in the prefix tree; at the root the cache scope's name (0 = public); behind the
last public page the scope's name and that page's number."""
Key = tuple[Node, tuple[int, ...]]
"""What a page is found by: its parent's node and its tokens."""


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one sequence, in the order of its tokens."""

    pages: list[int] = field(default_factory=list)
    num_indexed: int = 0
    """how many of `pages`, from the front, are full and in the index"""
    node: Node = ""
    """node of the last indexed page, or the scope's name"""
    scope: str = ""
    num_public: int = 0
    """how many pages, from the front, hold public tokens only"""
    version: int = 0
    """another number whenever `pages` have changed"""


class PageAllocator:
    """See the module's docstring. Not thread-safe: the engine core is single-threaded."""

    def __init__(
        self, num_pages: int, page_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        """`num_pages` counts page 0, which is never handed out; `page_size` is in tokens."""
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is scrap), not {num_pages}")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._refs = [0] * num_pages
        # Ordered: the front is taken first. Pages worth keeping (indexed) join at the back.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages))
        self._index: dict[Key, int] = {}
        self._key_of_page: dict[int, Key] = {}
        self._node_of_page: dict[int, int] = {}
        self._next_node = 1
        self.num_evictions = 0

    @property
    def num_usable(self) -> int:
        """Pages that can be handed out at all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody holds; some of them may still be found by `match`."""
        return len(self._free)

    @property
    def num_indexed(self) -> int:
        """Pages that `match` can find."""
        return len(self._key_of_page)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages that many tokens need."""
        return -(-num_tokens // self.page_size)

    def match(self, tokens: Sequence[int], scope: str = "", num_public: int = 0) -> PageTable:
        """A table that holds the longest indexed beginning of `tokens`, short of the last token.
        The first `num_public` are nobody's secret: whole pages of them are shared by all scopes.

        The pages in it are the caller's until `release`. Costs one dict look-up per page.
        """
        public = num_public // self.page_size
        table = PageTable(node=0 if public else scope, scope=scope, num_public=public)
        self.adopt(table, tokens)
        return table

    def adopt(self, table: PageTable, tokens: Sequence[int]) -> Key | None:
        """Put indexed pages in the place of those the table has yet to fill, while there are any.

        Returns the key that the next page will be found by once somebody has computed it; None if
        nobody's could be used, because the cache is off or no whole page is left to share.
        """
        if not self.enable_prefix_caching:
            return None
        size, index = self.page_size, self._index
        for start in range(table.num_indexed * size, (len(tokens) - 1) // size * size, size):
            key = (table.node, tuple(tokens[start : start + size]))
            page = index.get(key)
            if page is None:
                return key
            self._enter(table, page)
        return None

    def next_key(self, table: PageTable, tokens: Sequence[int]) -> Key | None:
        """The key that the next page to be indexed will be found by; None as with `adopt`."""
        start = table.num_indexed * self.page_size
        if not self.enable_prefix_caching or start + self.page_size >= len(tokens):
            return None
        return (table.node, tuple(tokens[start : start + self.page_size]))

    def grow(self, table: PageTable, num_tokens: int) -> bool:
        """Extend the table to hold `num_tokens`; False, and no change, if pages are short."""
        missing = self.pages_for(num_tokens) - len(table.pages)
        if missing <= 0:
            return True
        if missing > len(self._free):
            return False
        table.version += 1
        for _ in range(missing):
            page, _ = self._free.popitem(last=False)
            self._forget(page)
            self._refs[page] = 1
            table.pages.append(page)
        return True

    def commit(self, table: PageTable, tokens: Sequence[int], num_computed: int) -> None:
        """Index the pages that have become full; `tokens[:num_computed]` are in the cache now.

        May replace a page in the table by an equal one that was indexed before.
        """
        if not self.enable_prefix_caching:
            return
        size = self.page_size
        while (table.num_indexed + 1) * size <= num_computed:
            i = table.num_indexed
            page = table.pages[i]
            key = (table.node, tuple(tokens[i * size : (i + 1) * size]))
            canonical = self._index.get(key)
            if canonical is None:
                self._index[key] = canonical = page
                self._key_of_page[page] = key
                self._node_of_page[page] = self._next_node
                self._next_node += 1
            self._enter(table, canonical)

    def release(self, table: PageTable) -> None:
        """Give all pages of the table back, tail first; the table is empty afterwards."""
        for page in reversed(table.pages):
            self._release_page(page)
        table.pages.clear()
        table.num_indexed = 0
        table.version += 1

    def _enter(self, table: PageTable, page: int) -> None:
        """Make an indexed page the table's next one; what the table had in that place goes back."""
        i, pages = table.num_indexed, table.pages
        own = pages[i] if i < len(pages) else 0
        if page != own:
            table.version += 1
            if self._refs[page] == 0:
                del self._free[page]
            self._refs[page] += 1
            if own:
                pages[i] = page
                self._release_page(own)
            else:
                pages.append(page)
        table.num_indexed = i + 1
        node = self._node_of_page[page]
        table.node = (table.scope, node) if table.num_indexed == table.num_public else node

    def _release_page(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free[page] = None
            if page not in self._key_of_page:  # holds nothing that could be found: take it first
                self._free.move_to_end(page, last=False)

    def _forget(self, page: int) -> None:
        key = self._key_of_page.pop(page, None)
        if key is not None:
            del self._index[key]
            del self._node_of_page[page]
            self.num_evictions += 1

    def check(self, tables: Iterable[PageTable]) -> None:
        """Assert the rules above, given every table that is in use. For tests; O(pages)."""
        counted = [0] * self.num_pages
        for table in tables:
            assert len(set(table.pages)) == len(table.pages), f"a page twice in one {table}"
            assert table.num_indexed <= len(table.pages)
            for i, page in enumerate(table.pages):
                assert page != 0, "page 0 is scrap"
                counted[page] += 1
                if self.enable_prefix_caching and i >= table.num_indexed:
                    assert page not in self._key_of_page, "a page that may be written is indexed"
                    assert self._refs[page] == 1, "a page that may be written is shared"
        assert counted == self._refs, "reference counts differ from the tables"
        free = set(self._free)
        assert free == {p for p in range(1, self.num_pages) if self._refs[p] == 0}
        assert len(self._index) == len(self._key_of_page) == len(self._node_of_page)
        nodes = set(self._node_of_page.values())
        assert len(nodes) == len(self._node_of_page), "two pages have the same node"
        for key, page in self._index.items():
            assert self._key_of_page[page] == key
            assert len(key[1]) == self.page_size, "an indexed page is not full"
            parent = key[0][1] if isinstance(key[0], tuple) else key[0]
            is_root = isinstance(parent, str) or parent == 0
            assert is_root or parent in nodes, "a parent was evicted before a child"
