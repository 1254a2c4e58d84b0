"""`kill -9` of a real engine process in the midst of accepted runs: another engine goes on, and
every token and log-probability is that of plain decoding."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from infer import LLM, SamplingParams
from infer.types import Request, RequestOutput
from infer.types.grammar import Grammar
from tests.support.doubles import launch_factory, pid_of
from tests.support.draft_checkpoints import write_first_layers
from tests.support.isas import EXACT_DTYPE

FACTORY = "tests.support.eager_drafts:eager_blueprint"
NUM_TOKENS = 160
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1),
    SamplingParams(
        temperature=0.8, seed=4, max_tokens=NUM_TOKENS, grammar=Grammar("regex", "([a-z]+ ){160}")
    ),
]


@pytest.fixture(scope="module")
def plain() -> tuple[list[RequestOutput], bool]:
    """The answers of plain decoding, and whether their log-probabilities must be equal, too."""
    with LLM(max_seq_len=1024, dtype=EXACT_DTYPE) as llm:
        outputs = llm.generate(["Once upon a time"] * len(SAMPLING), SAMPLING, use_tqdm=False)
        return outputs, str(llm.core.runner.caches[0].dtype) == "torch.bfloat16"  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", [pytest.param("ngram", marks=pytest.mark.slow), "draft_model"])
def test_another_engine_goes_on_with_the_same_tokens(
    method: str, plain: tuple[list[RequestOutput], bool], tmp_path: Path
) -> None:
    answers, bits = plain
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 6}
    if method == "draft_model":
        config["model"] = str(write_first_layers(tmp_path / "draft", 6))

    async def main() -> tuple[list[RequestOutput], dict[str, Any], list[dict[str, Any]]]:
        settings: dict[str, Any] = {"max_seq_len": 1024, "dtype": EXACT_DTYPE}
        settings["speculative_config"] = json.dumps(config)
        settings["kv_cache_memory_bytes"] = 32 << 20  # a larger one takes longer to prepare
        async with launch_factory(FACTORY, settings) as llm:
            requests: list[Request] = []
            for sampling, wanted in zip(SAMPLING, answers, strict=True):
                # The text that is to come, so that nearly every token is an accepted one.
                prediction = wanted.text if method == "ngram" else ""
                requests.append(
                    llm.make_request("Once upon a time", sampling.replace(prediction=prediction))
                )
            tasks = [asyncio.create_task(llm.generate(each)) for each in requests]
            async with asyncio.timeout(60):
                while llm.stats()["num_accepted_tokens"] < 30:
                    await asyncio.sleep(0.002)
            before = dict(llm.stats())
            assert not any(task.done() for task in tasks), "nothing was left to go on with"
            os.kill(pid_of(llm), signal.SIGKILL)
            outputs = list(await asyncio.gather(*tasks))
            return outputs, before, [dict(llm.stats())]

    outputs, before, (after,) = asyncio.run(main())
    assert after["num_restarts"] == 1
    for output, wanted in zip(outputs, answers, strict=True):
        assert output.token_ids == wanted.token_ids
        assert output.finish_reason is wanted.finish_reason
        if bits:
            assert output.logprobs == wanted.logprobs
    if method == "ngram":  # the next engine goes on to propose for the same requests
        assert after["num_accepted_tokens"] > before["num_accepted_tokens"] + 30
