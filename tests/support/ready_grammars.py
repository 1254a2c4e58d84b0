"""Verdicts on grammars that outlast an engine.

Each engine has a grammar tried out in a process of its own, which takes longer than most answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from infer.text.grammars.compiler import Vocabulary
from infer.text.untrusted.grammar_checker import GrammarChecker
from infer.text.untrusted.grammar_verdicts import Verdict
from infer.types.grammar import Grammar


@contextmanager
def verdicts_kept() -> Iterator[None]:
    """Meanwhile all engines of this process remember the same verdicts. For engines of one
    vocabulary, as the size of a compiled grammar depends on it."""
    known: OrderedDict[Grammar, Verdict] = OrderedDict()
    begin = GrammarChecker.__init__

    def begun(self: GrammarChecker, vocabulary: Callable[[], Vocabulary]) -> None:
        begin(self, vocabulary)
        self._verdicts = known

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarChecker, "__init__", begun)
        yield
