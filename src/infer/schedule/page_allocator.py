"""`PageAllocator`: which sequence uses which page of the KV cache, and the index of prefixes"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from infer.schedule.index_changes import MAX_PAGES, MAX_PENDING, IndexChanges
from infer.types.page_changes import PageChanges

Node = int | str | tuple[str, int]
"""A node of the prefix tree: the number of an indexed page; at a root, the name of the cache scope
(0 = public); after the last public page, the scope's name and the number of that page."""
Key = tuple[Node, tuple[int, ...]]
"""Key of a page in the prefix index: its parent's node and its `page_size` tokens."""
Run = tuple[int, int]
"""Pages with consecutive numbers: the first one, and how many."""


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one sequence, in the order of its tokens."""

    pages: list[int] = field(default_factory=list)
    """Page numbers."""
    num_indexed: int = 0
    """Number of leading pages that are full and in the index."""
    node: Node = ""
    """Node of the last indexed page; the root if none is indexed."""
    scope: str = ""
    """Cache scope of the request: only requests of one scope share pages, public ones apart."""
    num_public: int = 0
    """Number of leading pages that hold public tokens only."""
    version: int = 0
    """Counter of the changes of `pages`."""


class AllocatorState(NamedTuple):
    """What an allocator holds at one time."""

    indexed: dict[Key, int]
    """Page of each key of the prefix cache."""
    free: tuple[int, ...]
    """Free pages: blank ones, cached ones, then untouched ones, each in the order in which they are
    handed out."""


class PageAllocator:
    """It owns page numbers, reference counts, the free list and the prefix index. The tensors
    behind the numbers belong to `runner.kv_storage`. Called by the scheduler only. Not thread-safe:
    the engine core is single-threaded. `check()` verifies these rules:

    1. `refs[p]` is the number of page tables that contain page p; p is on the free list exactly
       when `refs[p]` is 0. Page 0 takes the writes of padding and is never handed out.
    2. A page is indexed only when it is full and computed. An indexed page is never written again;
       a page that is not full has one owner. Hence there is no copy-on-write.
    3. The index key is (node of the parent page, the tokens in the page), under one root per cache
       scope, compared exactly. A node is a number that a page gets when it is indexed and that is
       never reused, so an entry cannot be reached through a parent that was evicted and replaced.
       Pages of public tokens have a root of their own; the pages after them belong to a scope
       again.
    4. When a page fills up and its key is already indexed, the table takes the indexed page and
       gives its own back. Tables are released from the last page to the first, so a parent page is
       never taken from the free list before its child.
    5. `match` and `adopt` leave at least one token to compute, because the next token is sampled
       from its result. `adopt` lets a running sequence use pages that others have computed since it
       began.
    6. A free page is blank (written before, nothing to find in it), cached (indexed) or untouched:
       it takes no memory, because it was never handed out or its memory was given back.

    A cached page keeps its index entry until it is handed out again. The prefix cache is therefore
    the set of cached pages.

    `take_back` chooses the pages whose memory the caller gives back to the system. `_take` says
    which page is handed out.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        enable_prefix_caching: bool = True,
        keeps_computed: bool = True,
        low_water: int | None = None,
    ) -> None:
        """`num_pages` counts page 0, which is never handed out; `page_size` is in tokens.
        `low_water`: number of touched pages, see `_take`; None: all.

        `keeps_computed`: whether keys and values are kept after a token has been sampled. If not,
        every token is sampled from a chunk of the whole sequence, so a step must have room for the
        longest one."""
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is scrap), not {num_pages}")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.keeps_computed = keeps_computed
        self.limit = num_pages - 1
        """Number of pages that may be touched; the caller may change it."""
        self._low_water = self._mark = self.num_usable if low_water is None else low_water
        self._refs = [0] * num_pages
        self._blank: dict[int, None] = {}
        """The last one is handed out first."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """The first one has been free longest."""
        self._next_untouched = 1
        """First page that was never handed out."""
        self._given_back: list[int] = []
        """Heap of the other untouched pages."""
        self._freed_at = [0] * num_pages
        """Period in which each page became free."""
        self._period = 0
        self._missed: OrderedDict[int, int] = OrderedDict()
        """Hash of the key of each cached page that was handed out again, the oldest first → its
        node."""
        self._index: dict[Key, int] = {}
        self._key_of_page: dict[int, Key] = {}
        self._node_of_page: dict[int, int] = {}
        self._next_node = 1
        self._changes: IndexChanges | None = None
        """What others are told about the index; None while nobody asks."""
        self.num_evictions = 0

    @property
    def num_usable(self) -> int:
        """Number of pages that can be handed out: all but page 0."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Number of pages in no table; `match` may still find some of them."""
        return len(self._blank) + len(self._cached) + self._num_untouched

    @property
    def num_touched(self) -> int:
        """Number of pages that take memory."""
        return self.num_usable - self._num_untouched

    @property
    def num_used(self) -> int:
        """Number of pages in tables."""
        return self.num_usable - self.num_free

    @property
    def num_available(self) -> int:
        """Number of pages that can be handed out now: those that are free, within `limit`."""
        return max(0, min(self.num_free, self.limit - self.num_used))

    @property
    def top(self) -> int:
        """The highest number of a page that was ever handed out; 0: none was."""
        return self._next_untouched - 1

    @property
    def _num_untouched(self) -> int:
        return self.num_pages - self._next_untouched + len(self._given_back)

    @property
    def num_indexed(self) -> int:
        """Number of pages that `match` can find."""
        return len(self._key_of_page)

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def match(self, tokens: Sequence[int], scope: str = "", num_public: int = 0) -> PageTable:
        """A table of the longest indexed prefix of `tokens` that leaves the last token out.

        The first `num_public` tokens are public: pages that hold only such tokens are shared by all
        scopes. The caller owns the table's pages until `release`. Costs one dict look-up per page.
        """
        public = num_public // self.page_size
        table = PageTable(node=0 if public else scope, scope=scope, num_public=public)
        missing = self.adopt(table, tokens)
        if missing is not None and self._mark < self.num_usable:
            self._raise_mark(table, tokens, missing)
        return table

    def adopt(self, table: PageTable, tokens: Sequence[int]) -> Key | None:
        """Replace pages that the table has yet to fill by indexed ones, as far as there are any.

        Returns the key under which the next page will be indexed when it has been computed; None if
        no other page can be shared, because the cache is off or less than a page is left.
        """
        if not self.enable_prefix_caching:
            return None
        size, index = self.page_size, self._index
        for start in range(table.num_indexed * size, (len(tokens) - 1) // size * size, size):
            key = (table.node, tuple(tokens[start : start + size]))
            page = index.get(key)
            if page is None:
                return key
            self._set_indexed_page(table, page)
        return None

    def next_key(self, table: PageTable, tokens: Sequence[int]) -> Key | None:
        """Key under which the table's next page will be indexed; None as with `adopt`."""
        start = table.num_indexed * self.page_size
        if not self.enable_prefix_caching or start + self.page_size >= len(tokens):
            return None
        return (table.node, tuple(tokens[start : start + self.page_size]))

    def grow(self, table: PageTable, num_tokens: int) -> bool:
        """Extend the table to `num_tokens` tokens; returns False and changes nothing if too few
        pages are free."""
        missing = self.pages_for(num_tokens) - len(table.pages)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        table.version += 1
        for _ in range(missing):
            page = self._take()
            self._refs[page] = 1
            table.pages.append(page)
        return True

    def _take(self) -> int:
        """A page to hand out.

        Blank ones first. Up to a low-water mark of touched pages, untouched ones come next, then
        the cached page that has been free longest. Above the mark a cached page goes first, so one
        user at a time does not touch the whole pool. The mark rises by what was missed: where
        `match` does not find a prefix because its pages were handed out again, it rises by those
        pages, and so there is memory for them the next time. Nobody may touch more than `limit`
        pages.
        """
        if self._blank:
            return self._blank.popitem()[0]
        num_touched = self.num_touched
        may_touch = self._num_untouched > 0 and num_touched < self.limit
        if self._cached and not (may_touch and num_touched < self._mark):
            page, _ = self._cached.popitem(last=False)
            self._miss(page)
            self._forget(page)
            return page
        if self._given_back:
            return heappop(self._given_back)
        self._next_untouched += 1
        return self._next_untouched - 1

    def _miss(self, page: int) -> None:
        """Remember a cached page that is handed out again."""
        if self._mark < self.num_usable:
            self._missed[hash(self._key_of_page[page])] = self._node_of_page[page]
            if len(self._missed) > self.num_usable:
                self._missed.popitem(last=False)

    def _raise_mark(self, table: PageTable, tokens: Sequence[int], key: Key) -> None:
        """Raise the mark by the pages that `table` lacks because they were handed out again."""
        size, start = self.page_size, table.num_indexed
        for i in range(start, (len(tokens) - 1) // size):
            node = self._missed.pop(hash(key), None)
            if node is None:
                return
            self._mark = min(self._mark + 1, self.num_usable)
            following = tuple(tokens[(i + 1) * size : (i + 2) * size])
            key = ((table.scope, node) if i + 1 == table.num_public else node, following)

    def commit(self, table: PageTable, tokens: Sequence[int], num_computed: int) -> None:
        """Index the pages that have become full; `tokens[:num_computed]` are in the cache.

        A page whose key is already indexed is replaced in the table by the indexed one.
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
                self._node_of_page[page] = node = self._next_node
                self._next_node += 1
                if self._changes is not None:
                    self._changes.enter(node, *key)
            self._set_indexed_page(table, canonical)

    def release(self, table: PageTable) -> None:
        """Give all pages of the table back, the last one first; the table is empty afterwards."""
        for page in reversed(table.pages):
            self._release_page(page)
        table.pages.clear()
        table.num_indexed = 0
        table.version += 1

    def shrink(self, table: PageTable, num_tokens: int) -> None:
        """Give back the pages behind those of `num_tokens` tokens, the last one first."""
        while len(table.pages) > max(self.pages_for(num_tokens), table.num_indexed):
            self._release_page(table.pages.pop())
            table.version += 1

    def _set_indexed_page(self, table: PageTable, page: int) -> None:
        """Put an indexed page at the table's first position that is not indexed; the page that was
        there is given back."""
        i, pages = table.num_indexed, table.pages
        replaced = pages[i] if i < len(pages) else 0
        if page != replaced:
            table.version += 1
            if self._refs[page] == 0:
                del self._cached[page]
            self._refs[page] += 1
            if replaced:
                pages[i] = page
                self._release_page(replaced)
            else:
                pages.append(page)
        table.num_indexed = i + 1
        node = self._node_of_page[page]
        table.node = (table.scope, node) if table.num_indexed == table.num_public else node

    def _release_page(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page] == 0:
            (self._cached if page in self._key_of_page else self._blank)[page] = None
            self._freed_at[page] = self._period

    def _forget(self, page: int) -> None:
        key = self._key_of_page.pop(page, None)
        if key is not None:
            del self._index[key]
            node = self._node_of_page.pop(page)
            self.num_evictions += 1
            if self._changes is not None:
                self._changes.leave(node)

    def begin_period(self) -> int:
        """Begin another period of time, whose length the caller chooses; returns its number."""
        self._period += 1
        return self._period

    def take_back(
        self, *, before: int | None = None, at_least: int = 0, shortest: int = 1
    ) -> list[Run]:
        """Make pages untouched; the caller gives their memory back.

        Chosen are pages that became free before the period `before`, and of the others those that
        were free longest, until there are `at_least`. Those that were cached leave the index. Runs
        of less than `shortest` pages stay, as blank ones. O(free pages).
        """
        freed_at, old = self._freed_at, list[int]()
        if before is not None:
            while self._cached and freed_at[next(iter(self._cached))] < before:
                self._make_blank()
            old = [page for page in self._blank if freed_at[page] < before]
        while len(self._blank) < at_least and self._cached:
            self._make_blank()
        chosen = old if len(old) >= at_least else list(self._blank)
        runs = [run for run in _runs(sorted(chosen)) if run[1] >= shortest]
        for first, count in runs:
            for page in range(first, first + count):
                del self._blank[page]
                heappush(self._given_back, page)
        self._mark = max(self._low_water, min(self._mark, self.num_touched))
        return runs

    def _make_blank(self) -> None:
        """Drop the cached page that has been free longest from the index."""
        page, _ = self._cached.popitem(last=False)
        self._forget(page)
        self._blank[page] = None

    def follow(self, *, max_pages: int = MAX_PAGES, max_pending: int = MAX_PENDING) -> None:
        """Collect from now on which pages enter and leave the index, for `take_changes`: first all
        that are indexed. A further call begins again."""
        if self._changes is not None:
            self._changes.restart()
            return
        nodes = self._node_of_page
        # A page is indexed after its parent, so its node is the higher number.
        pages = sorted(self._key_of_page, key=nodes.__getitem__)
        indexed = ((nodes[page], *self._key_of_page[page]) for page in pages)
        self._changes = IndexChanges(
            self.page_size, indexed, max_pages=max_pages, max_pending=max_pending
        )

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` would return more than a digest."""
        return self._changes is not None and not self._changes.is_empty

    def take_changes(self, *, even_empty: bool = False) -> PageChanges | None:
        """The next changes of the index; None if nobody follows it, or nothing has changed and
        `even_empty` is not set."""
        if self._changes is None or (self._changes.is_empty and not even_empty):
            return None
        return self._changes.take()

    def snapshot(self) -> AllocatorState:
        """A copy of what is indexed and of what is free."""
        untouched = (*sorted(self._given_back), *range(self._next_untouched, self.num_pages))
        free = (*reversed(self._blank), *self._cached, *untouched)
        return AllocatorState(dict(self._index), free)

    def check(self, tables: Iterable[PageTable]) -> None:
        """Assert the module's rules, given every table in use. For tests; O(pages)."""
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
        free = self.snapshot().free
        assert len(free) == len(set(free)) == self.num_free, "a page is free twice"
        assert set(free) == {p for p in range(1, self.num_pages) if self._refs[p] == 0}
        assert all(page in self._key_of_page for page in self._cached)
        assert not any(page in self._key_of_page for page in self._blank), "a blank page is indexed"
        assert not any(page in self._key_of_page for page in self._given_back)
        assert self.num_used <= self.num_touched <= self.num_usable
        assert self._low_water <= self._mark <= max(self._low_water, self.num_usable)
        assert len(self._index) == len(self._key_of_page) == len(self._node_of_page)
        nodes = set(self._node_of_page.values())
        assert len(nodes) == len(self._node_of_page), "two pages have the same node"
        for key, page in self._index.items():
            assert self._key_of_page[page] == key
            assert len(key[1]) == self.page_size, "an indexed page is not full"
            parent = key[0][1] if isinstance(key[0], tuple) else key[0]
            is_root = isinstance(parent, str) or parent == 0
            assert is_root or parent in nodes, "a parent was evicted before a child"


def _runs(pages: Sequence[int]) -> list[Run]:
    """The runs of consecutive numbers in an ascending sequence."""
    runs: list[Run] = []
    for page in pages:
        first, count = runs[-1] if runs else (0, 0)
        if runs and first + count == page:
            runs[-1] = (first, count + 1)
        else:
            runs.append((page, 1))
    return runs
