"""`FairShare`: sharing between tenants, by counting the tokens computed for each of them"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from infer.schedule.sequence import Sequence, TenantShare


class FairShare:
    """It has the virtual token counters of "Fairness in Serving Large Language Models" (Sheng et
    al., 2024): every token computed for a tenant is added to its counter, and the tenant with the
    smallest counter goes first. A tenant is present while it has an unfinished request. When it
    becomes present again, its counter is raised to the smallest counter of those present (less
    one), so absence earns no credit; a counter is never lowered, so a debt remains. The counter of
    a waiting tenant stays constant while the counters of those served grow, and the number of
    tenants is bounded by the number of keys; therefore every tenant is served eventually. The
    scheduler uses this only while several tenants are present; for a single tenant it changes and
    costs nothing."""

    def __init__(self) -> None:
        self.shares: dict[str, TenantShare] = {}
        """The share of each tenant that has ever been present, by name."""
        self._num_present = 0

    @property
    def several(self) -> bool:
        """Whether more than one tenant is present."""
        return self._num_present > 1

    def join(self, sequence: Sequence) -> None:
        """Count a request that has arrived, and set its `tenant_share`."""
        tenant_share = self.shares.setdefault(sequence.request.tenant, TenantShare())
        if not tenant_share.num_here:
            present = [a.num_tokens for a in self.shares.values() if a.num_here]
            # One less, so that the newcomer goes before the tenant served in the last step.
            tenant_share.num_tokens = max(tenant_share.num_tokens, min(present, default=1) - 1)
            self._num_present += 1
        tenant_share.num_here += 1
        sequence.tenant_share = tenant_share

    def leave(self, sequence: Sequence) -> None:
        """Stop counting a request that has ended."""
        sequence.tenant_share.num_here -= 1
        self._num_present -= not sequence.tenant_share.num_here

    def next_of(self, waiting: Seq[Sequence]) -> Sequence:
        """The sequence to admit next: the first in rank of the tenant with the smallest counter.

        `waiting` is in order of rank and not empty.
        """
        if not self.several:
            return waiting[0]
        return min(waiting, key=lambda s: s.tenant_share.num_tokens)

    @staticmethod
    def ordered(offered: Iterable[Sequence]) -> list[Sequence]:
        """Decoding sequences first (they need one token each), then prompts; within both, tenants
        with a smaller counter first."""
        return sorted(offered, key=lambda s: (s.num_remaining > 1, s.tenant_share.num_tokens))

    @staticmethod
    def richest(running: Seq[Sequence]) -> tuple[Sequence, Counter[TenantShare]]:
        """The sequence to preempt, and the number of seats of each tenant.

        It is the last in rank of the tenant with most seats. The first in rank of all sequences is
        never chosen, unless it is the only one.
        """
        seats = Counter(s.tenant_share for s in running)
        return max(running, key=lambda s: (seats[s.tenant_share], s.rank)), seats
