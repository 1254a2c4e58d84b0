"""1,000 prompts in five ways of sampling, plain and with both methods of speculation: equal.

Proposals are made at every chance, whatever they cost.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from infer import LLM, RequestOutput, SamplingParams
from infer.types.grammar import Grammar
from tests.support.draft_checkpoints import write_first_layers
from tests.support.eager_drafts import draft_eagerly, propose_eagerly
from tests.support.isas import EXACT_DTYPE

NUM_TOKENS = 20
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.95},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "grammar": {"temperature": 0.7, "grammar": Grammar("regex", "[A-Z][a-z]+( [a-z]+){1,5}[.]")},
    "log-probabilities": {"temperature": 0.6, "logprobs": 3},
}


def prompts(count: int) -> list[str]:
    """Beginnings of stories, many of which repeat themselves."""
    r, made = random.Random(5), []
    names = ("Tim", "Lily", "Ben", "Mia", "the fox", "the little bird")
    things = ("a red ball", "a big tree", "a key", "an old box", "some cake")
    for number in range(count):
        name, thing = r.choice(names), r.choice(things)
        sentence = f"One day {name} found {thing} near the river. "
        made.append(sentence * r.randrange(1, 4) + r.choice(["", f"{number} ", "One day", "Then "]))
    return made


def answers(
    count: int, known: dict[str, list[RequestOutput]] | None = None, **settings: Any
) -> tuple[dict[str, list[RequestOutput]], dict[str, Any]]:
    """The answers of each way, and the engine's statistics. `known`: answers, every other of which
    is given as the text that is likely to come."""
    asked = prompts(count)
    with LLM(max_seq_len=256, dtype=EXACT_DTYPE, **settings) as llm:
        found = {}
        for name, way in WAYS.items():
            texts = [output.text for output in (known or {}).get(name, ())] or [""] * count
            params = [
                SamplingParams(
                    **{"max_tokens": NUM_TOKENS, "seed": seed, **way},
                    prediction=texts[seed] if seed % 2 else "",
                )
                for seed in range(count)
            ]
            found[name] = llm.generate(asked, params, use_tqdm=False)
        stats = dict(llm.stats())
        stats["bits"] = str(llm.core.runner.caches[0].dtype) == "torch.bfloat16"  # type: ignore[attr-defined]
        return found, stats


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    propose_eagerly(monkeypatch)
    draft_eagerly(monkeypatch)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_answer_is_that_of_plain_decoding(count: int, tmp_path: Path) -> None:
    wanted, stats = answers(count)
    draft = write_first_layers(tmp_path / "draft", 4)
    methods = {
        "ngram": {"method": "ngram", "num_speculative_tokens": 5},
        "draft_model": {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": 4,
        },
    }
    for method, config in methods.items():
        known = wanted if method == "ngram" else None
        found, stats = answers(count, known, speculative_config=json.dumps(config))
        for way in WAYS:
            for mine, plain in zip(found[way], wanted[way], strict=True):
                assert mine.token_ids == plain.token_ids, (method, way)
                assert (mine.text, mine.finish_reason) == (plain.text, plain.finish_reason)
                if stats["bits"]:
                    assert mine.logprobs == plain.logprobs, (method, way)
        print(method, count, {name: stats[name] for name in stats if "accepted" in name or
              name in ("num_draft_tokens", "num_steps")})  # fmt: skip
        assert stats["num_accepted_tokens"] > count
        assert stats["num_draft_tokens"] > stats["num_accepted_tokens"] + count
