"""`FairShare`: how many tokens each tenant has been given, so that the next go to who had least.

Virtual token counters: every token computed for a tenant counts. A tenant that has been away comes
back at the counter of the one who has least among those present, so nobody saves up turns, and a
debt is not forgotten. While a tenant waits its counter stands still and the counters of those who
are served grow, and there are only as many tenants as there are keys; so its turn comes. The
scheduler asks only while several tenants are present; a single one costs nothing and is served as
if there were none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from infer.schedule.sequence import Sequence, TenantShare


class FairShare:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, TenantShare] = {}
        self._num_present = 0

    @property
    def several(self) -> bool:
        """Whether there is anything to share."""
        return self._num_present > 1

    def join(self, sequence: Sequence) -> None:
        """A request has come."""
        tenant_share = self._by_tenant.setdefault(sequence.request.tenant, TenantShare())
        if not tenant_share.num_here:
            present = [a.num_tokens for a in self._by_tenant.values() if a.num_here]
            # One less: who comes goes before who was served in the step before.
            tenant_share.num_tokens = max(tenant_share.num_tokens, min(present, default=1) - 1)
            self._num_present += 1
        tenant_share.num_here += 1
        sequence.tenant_share = tenant_share

    def leave(self, sequence: Sequence) -> None:
        """A request has ended."""
        sequence.tenant_share.num_here -= 1
        self._num_present -= not sequence.tenant_share.num_here

    @staticmethod
    def next_of(waiting: Iterable[Sequence]) -> Sequence:
        """Who is seated next: of the tenant that had least, the first in rank."""
        return min(waiting, key=lambda s: s.tenant_share.num_tokens)

    @staticmethod
    def ordered(offered: Iterable[Sequence]) -> list[Sequence]:
        """Streams go on first, each wants one token; then the prompts of who had least."""
        return sorted(offered, key=lambda s: (s.num_remaining > 1, s.tenant_share.num_tokens))

    @staticmethod
    def richest(running: Seq[Sequence]) -> tuple[Sequence, Counter[TenantShare]]:
        """Who must give way: of the tenant with most seats, the last in rank; and all seats. The
        first in rank of all is never chosen, unless it is alone."""
        seats = Counter(s.tenant_share for s in running)
        return max(running, key=lambda s: (seats[s.tenant_share], s.rank)), seats
