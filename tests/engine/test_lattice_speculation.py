"""Speculation on the shipped model: tokens and log-probabilities are those of plain decoding.

Proposals are made from the answers of plain decoding: some are right, some wrong, and some right
up to a wrong token. So accepted runs, rejected ones and mixtures happen for every way of sampling.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from infer import LLM, RequestOutput, SamplingParams
from infer.schedule.ngram_index import NgramIndex
from tests.support.cases import slow_but
from tests.support.eager_drafts import propose_eagerly
from tests.support.isas import EXACT_DTYPE
from tests.support.lattice import OPENING, preempt_at_every_third_step
from tests.support.speculated import SETTINGS, WAYS, answers, requests_of, values

pytestmark = pytest.mark.usefixtures("kept_verdicts")

CONFIG = '{"method": "ngram", "num_speculative_tokens": 6}'
PROMPTS = [OPENING + "The fox had a red ball.", "Once upon a time", "One day, a little bird"]
ASKED = requests_of(PROMPTS, list(WAYS.values()))


def run(llm: LLM) -> list[RequestOutput]:
    return answers(llm, ASKED)


@pytest.fixture(scope="module", params=dict.fromkeys((EXACT_DTYPE, "float32")))
def plain(request: pytest.FixtureRequest) -> tuple[str, list[RequestOutput]]:
    with LLM(dtype=request.param, max_seq_len=512) as llm:
        return request.param, run(llm)


@pytest.fixture
def oracle(plain: tuple[str, list[RequestOutput]]) -> Iterator[None]:
    known = [[*output.prompt_token_ids, *output.token_ids] for output in plain[1]]
    r = random.Random(7)

    def propose(index: NgramIndex, tokens: list[int], count: int) -> tuple[int, ...]:
        fitting = [each for each in known if each[: len(tokens)] == tokens]
        right = r.choice(fitting or [tokens])[len(tokens) : len(tokens) + count]
        right += [r.randrange(2000) for _ in range(count - len(right))]
        match r.randrange(3):
            case 0:
                right[r.randrange(count)] = r.randrange(2000)
            case 1:
                right[0] = 5
        return tuple(right)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramIndex, "propose", propose)
        propose_eagerly(patch)
        yield


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize("name", slow_but(list(SETTINGS)[:3], SETTINGS))
def test_the_same_answers_in_fewer_steps(name: str, plain: tuple[str, list[RequestOutput]]) -> None:
    dtype, wanted = plain
    settings = {"max_seq_len": 512, "speculative_config": CONFIG, **SETTINGS[name]}
    with LLM(dtype=dtype, **settings) as llm:
        bits = dtype == "auto" and str(llm.core.runner.caches[0].dtype) == "torch.bfloat16"  # type: ignore[attr-defined]
        assert values(run(llm), bits=bits) == values(wanted, bits=bits)
        stats = llm.stats()
        assert stats["num_accepted_tokens"] > 20
        assert stats["num_draft_tokens"] > stats["num_accepted_tokens"] + 10
        assert stats["num_free_pages"] == stats["num_pages"]


@pytest.mark.usefixtures("oracle")
def test_preempted_at_every_third_step(plain: tuple[str, list[RequestOutput]]) -> None:
    dtype, wanted = plain
    with LLM(dtype=dtype, max_seq_len=512, speculative_config=CONFIG) as llm:
        preempt_at_every_third_step(llm.core)
        assert values(run(llm), bits=False) == values(wanted, bits=False)
        assert llm.stats()["num_preemptions"] >= 4
        assert llm.stats()["num_accepted_tokens"] > 20


def test_a_text_that_repeats_is_computed_in_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an oracle: the n-gram index finds what the model repeats, whatever steps cost."""
    propose_eagerly(monkeypatch)
    prompt = "one two three four five six seven eight " * 6
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    answers, steps = [], []
    for config in (None, CONFIG):
        with LLM(speculative_config=config) as llm:
            answers.append(llm.generate([prompt], greedy)[0].token_ids)
            steps.append(llm.stats()["num_steps"])
    assert answers[0] == answers[1]
    assert steps[1] < steps[0]
