"""`LLM.logits` and `LLM.score`: numbers of the model without sampling, beside transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infer import LLM, SamplingParams
from infer.errors import RequestError
from tests.support.checkpoints import write_checkpoint
from tests.support.model_shapes import SHAPES
from tests.support.parity import reference, tokens_of

pytestmark = pytest.mark.usefixtures("kept_templates")

TOKENS = tokens_of(90, seed=5)
TEXT = "Once upon a time there was a little girl named Lily."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", max_seq_len=256) as llm:
        yield llm


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    shape: dict[str, Any] = next(iter(SHAPES[family].values()))
    theirs = reference(write_checkpoint(tmp_path, family, **shape), TOKENS)
    scale = float(theirs.abs().max())
    wanted = torch.log_softmax(theirs[:-1].double(), -1).numpy()
    wanted = wanted[np.arange(len(TOKENS) - 1), TOKENS[1:]]
    for settings in ({}, {"max_num_batched_tokens": 7}, {"kv_cache_backend": "none"}):
        kwargs: dict[str, Any] = {"dtype": "float32", "max_seq_len": 128, **settings}
        with LLM(str(tmp_path), **kwargs) as llm:
            ours = llm.logits(TOKENS)
            assert ours.dtype == np.float32
            assert ours.shape == tuple(theirs.shape)
            assert np.abs(ours - theirs.numpy()).max() < 2e-5 * scale
            some = llm.logits(TOKENS, [80, 3, -1, 3])
            assert np.array_equal(some, ours[[80, 3, 89, 3]])
            (scores,) = llm.score(TOKENS)
            assert scores.dtype == np.float32
            assert scores.shape == (89,)
            assert scores == pytest.approx(wanted, abs=1e-4)


def test_a_cached_prefix_and_other_requests_change_nothing(llm: LLM) -> None:
    alone = llm.logits(TEXT)
    llm.generate(TEXT, SamplingParams(max_tokens=4))
    stream = llm.stream(TEXT, SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
    next(stream)
    assert np.array_equal(llm.logits(TEXT), alone)
    assert next(stream).token_ids  # it goes on
    stream.close()
    assert llm.core.scheduler.num_unfinished == 0


def test_a_preempted_request_keeps_its_logits(llm: LLM) -> None:
    alone = llm.logits(TEXT)
    with LLM(dtype="float32", max_seq_len=256, max_num_batched_tokens=5) as small:
        core, step = small.core, small.core.step
        steps = 0

        def stepping(*, flush: bool = False) -> Any:
            nonlocal steps
            steps += 1
            if steps == 3:
                core.scheduler.preempt(core.scheduler.running[0])
            return step(flush=flush)

        core.step = stepping  # type: ignore[method-assign]
        assert np.array_equal(small.logits(TEXT), alone)
        assert small.stats()["num_preemptions"] == 1


def test_the_greedy_token_is_the_largest_logit(llm: LLM) -> None:
    [output] = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=1, logprobs=0))
    last = llm.logits(TEXT, [-1])[0]
    assert int(last.argmax()) == output.token_ids[0]
    assert output.logprobs is not None
    longer = [*output.prompt_token_ids, *output.token_ids]
    assert llm.score([longer])[0][-1] == pytest.approx(output.logprobs[0].logprob, abs=1e-4)


def test_several_prompts_are_scored_in_their_order(llm: LLM) -> None:
    prompts: list[Any] = [TEXT, "One day", [5]]
    one, two, single = llm.score(prompts)
    assert np.array_equal(two, llm.score("One day")[0])
    assert len(one) == len(llm.tokenizer.encode(TEXT)) - 1
    assert single.shape == (0,)


@pytest.mark.parametrize(
    ("prompt", "positions", "message"),
    [
        ([1, 2, 3], [3], "position 3 is outside the prompt, which has 3 tokens (-3 to 2)"),
        ([1, 2, 3], [0, -4], "position -4 is outside the prompt"),
        ([1, 2, 3], [], "positions must not be empty"),
        ([1, 2, 3], [1.0], "positions must be integers, not float"),
        ([1, 2, 3], [True], "positions must be integers, not bool"),
        ([], None, "the prompt is empty"),
        ([10**9], None, "outside the vocabulary"),
        ([1] * 256, None, "256 tokens > 255 maximum"),
    ],
    ids=str,
)
def test_what_has_no_logits_is_refused(
    llm: LLM, prompt: list[int], positions: Any, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.logits(prompt, positions)
    assert message in str(caught.value)
    assert llm.core.scheduler.num_unfinished == 0
