"""Fixtures: tokenizers of each kind, ours and transformers', loaded from the same folder; and a
checker of grammars."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infer.text.grammars.compiler import Vocabulary
from infer.text.untrusted.grammar_checker import GrammarChecker
from tests.support.doubles import small_tokenizer
from tests.support.text_checkpoints import KINDS, TEMPLATES, Pair, load_pair, save


@pytest.fixture(scope="session", params=sorted(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Each kind of tokenizer, with the ChatML template."""
    folder = tmp_path_factory.mktemp(request.param)
    return load_pair(request.param, save(folder, KINDS[request.param](), TEMPLATES["chatml"]))


@pytest.fixture(scope="session")
def chat_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Pair]:
    """Tokenizers by (kind of tokenizer, shape of template)."""
    pairs = {}
    for kind, build in KINDS.items():
        tokenizer = build()
        for shape, template in TEMPLATES.items():
            folder = save(tmp_path_factory.mktemp(f"{kind}-{shape}"), tokenizer, template)
            pairs[kind, shape] = load_pair(kind, folder)
    return pairs


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    """One with the small vocabulary, whose processes have not begun."""
    tokenizer = small_tokenizer()
    checker = GrammarChecker(lambda: Vocabulary.of(tokenizer, tokenizer.vocab_size))
    yield checker
    checker.close()
