"""`OpenGrammars`: the memory of compiled grammars, of which each key may have some"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial

from infer.errors import OverloadedError
from infer.server.tenancy.key_places import KeyPlaces
from infer.types import Request
from infer.types.grammar import Grammar
from infer.types.server_limits import ServerLimits


class OpenGrammars:
    """The engine keeps the grammar of a request until that has ended, and a hostile one may take 96
    MiB. Requests of a key with the same grammar count once, and grammars below 1 MiB, as nearly all
    are, not at all: what they take is bounded by the number of requests. All methods are called on
    the event loop."""

    def __init__(self, limits: ServerLimits) -> None:
        self._mib = KeyPlaces(
            "MiB of compiled grammars in use", limits.max_grammar_mib_of_key, limits.max_grammar_mib
        )
        self._open: Counter[tuple[str, Grammar]] = Counter()
        """Requests by owner and grammar."""

    def enter(self, owner: str, requests: Iterable[Request], cleanup: ExitStack) -> None:
        """Count the grammars of a key's requests until `cleanup` is closed.

        Raises `HttpError` (429) if the key has too much, `OverloadedError` if all together have.
        """
        sizes = {r.sampling.grammar: r.grammar_bytes >> 20 for r in requests}
        for grammar, num_mib in sizes.items():
            if grammar is None or not num_mib:
                continue
            name = (owner, grammar)
            if not self._open[name]:
                if not self._mib.has_room(owner, num_wanted=num_mib):
                    raise OverloadedError("the compiled grammars in use take too much memory")
                self._mib.acquire(owner, num_mib)
            self._open[name] += 1
            cleanup.callback(partial(self._leave, name, num_mib))

    def _leave(self, name: tuple[str, Grammar], num_mib: int) -> None:
        self._open[name] -= 1
        if not self._open[name]:
            del self._open[name]
            self._mib.release(name[0], num_mib)
