"""`IndexChanges`: a reader of the changes knows the pages of the index, whatever happens.

Hypothesis calls a real `PageAllocator` in any order. Changes are taken in small parts, some are
lost on their way, and readers ask for the whole index again.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    precondition,
    rule,
)

from infer.replicas.routing import PageView
from infer.schedule.index_changes import chain
from infer.schedule.page_allocator import PageAllocator, PageTable

few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=14)
scopes = st.sampled_from(["", "a", "b"])


class FollowedIndex(RuleBasedStateMachine):
    """An allocator, and somebody who reads what it reports."""

    tables = Bundle("tables")

    @initialize(
        num_pages=st.integers(3, 12),
        page_size=st.integers(1, 4),
        max_pages=st.integers(1, 4),
        max_pending=st.integers(1, 6),
    )
    def start(self, num_pages: int, page_size: int, max_pages: int, max_pending: int) -> None:
        self.allocator = PageAllocator(num_pages, page_size)
        self.limits = {"max_pages": max_pages, "max_pending": max_pending}
        self.view = PageView()
        self.num_open = 0
        self.seen: list[tuple[list[int], str, int]] = []

    @rule(target=tables, tokens=few_tokens, scope=scopes, num_public=st.integers(0, 6))
    def begin(self, tokens: list[int], scope: str, num_public: int):  # type: ignore[no-untyped-def]
        table = self.allocator.match(tokens, scope, num_public)
        if not self.allocator.grow(table, len(tokens)):
            self.allocator.release(table)
            return multiple()
        self.seen.append((tokens, scope, num_public))
        self.num_open += 1
        return (table, tokens)

    @rule(entry=tables, share=st.floats(0, 1))
    def commit(self, entry: tuple[PageTable, list[int]], share: float) -> None:
        table, tokens = entry
        if table.pages:
            self.allocator.commit(table, tokens, int(len(tokens) * share))

    @rule(entry=consumes(tables))
    def end(self, entry: tuple[PageTable, list[int]]) -> None:
        self.allocator.release(entry[0])
        self.num_open -= 1

    @rule(is_lost=st.booleans())
    def report(self, is_lost: bool) -> None:
        """A report, which may get lost on its way."""
        changes = self.allocator.take_changes(even_empty=True)
        if changes is None or is_lost:
            return
        self.view.apply(changes)
        if changes.is_complete and not self.view.is_stale:
            self.judge()

    @rule()
    def ask(self) -> None:
        """Whoever has lost something asks; so does another reader, whenever it likes."""
        self.allocator.follow(**self.limits)

    @precondition(lambda self: not self.num_open)
    @rule()
    def die(self) -> None:
        """Another engine, which has nothing and is not asked yet; the reader does not notice."""
        self.allocator = PageAllocator(self.allocator.num_pages, self.allocator.page_size)

    def teardown(self) -> None:
        """One who asks when something is missing has all pages soon."""
        if not hasattr(self, "allocator"):
            return
        self.ask()
        for _ in range(2):
            for _ in range(3 * self.allocator.num_pages):
                self.report(is_lost=False)
            if not self.view.is_stale:
                break
            self.ask()
        assert not self.view.is_stale
        self.judge()

    def judge(self) -> None:
        assert len(self.view.pages) == self.allocator.num_indexed
        for tokens, scope, num_public in self.seen:
            table = self.allocator.match(tokens, scope, num_public)
            pages = chain(tokens, self.allocator.page_size, scope, num_public)
            known = [page in self.view.pages for page in pages]
            assert known == [True] * len(table.pages) + [False] * (len(known) - len(table.pages))
            self.allocator.release(table)


TestFollowedIndex = FollowedIndex.TestCase
TestFollowedIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
