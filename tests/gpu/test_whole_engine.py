"""`LLM` as the composition root makes it, with the kernels and with torch's attention.

Without a GPU this is the one test in which the parts of a GPU's engine are put together as they
serve: a warm-up, steps ahead, sampling of every kind, grammars, pages and their prefix index.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infer import LLM, SamplingParams
from infer.runner.device_runner import DeviceRunner
from infer.runner.model_runner import ModelRunner
from infer.types import RequestOutput
from infer.types.grammar import Grammar
from tests.support.checkpoints import write_llama

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "seeded": {"temperature": 1.1, "seed": 3, "top_p": 0.8},
    "biased": {"temperature": 0, "logit_bias": {7: 4.0}, "presence_penalty": 0.5},
    "long enough": {"temperature": 0, "min_tokens": 3, "prompt_logprobs": 1},
    "of a grammar": {"temperature": 0.9, "seed": 5, "grammar": Grammar.regex("[a-d]{2,9}")},
}
PROMPTS = ["one two", "three", "a b c", "one two", "x"]


WAYS: dict[str, dict[str, Any]] = {
    "continuous": {},
    "static": {"batching_mode": "static"},
    "one by one": {"batching_mode": "sequential"},
    "slotted": {"kv_cache_backend": "slotted"},
    "no cache": {"kv_cache_backend": "none", "max_num_batched_tokens": 32},
    "no prefixes": {"enable_prefix_caching": False},
}


def answers(model: str, device: torch.device, **settings: Any) -> tuple[type, list[RequestOutput]]:
    given = {
        "max_seq_len": 32,
        "max_batch_size": 2,
        "max_num_batched_tokens": 8,
        "page_size": 4,
        **settings,
    }
    if given.get("kv_cache_backend", "paged") != "paged":
        del given["page_size"]
    with LLM(model=model, dtype="float32", device=device.type, **given) as llm:
        each = [SamplingParams(max_tokens=3, ignore_eos=True, **each) for each in PARAMS.values()]
        outputs = llm.generate(PROMPTS, each, use_tqdm=False)
        llm.core.scheduler.check()
        return type(llm.core.runner), outputs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, num_hidden_layers=1)
    return str(folder)


@pytest.mark.parametrize(
    "name",
    [name if name == "continuous" else pytest.param(name, marks=pytest.mark.slow) for name in WAYS],
)
def test_answers_are_those_of_the_plain_runner(name: str, model: str, device: torch.device) -> None:
    kind, plain = answers(model, device, attention_backend="sdpa")
    assert kind is ModelRunner
    kind, own = answers(model, device, **WAYS[name])
    assert kind is DeviceRunner
    for request, got, want in zip(PARAMS, own, plain, strict=True):
        assert got.token_ids == want.token_ids, request
        assert got.finish_reason == want.finish_reason, request
        assert (got.logprobs is None) == (want.logprobs is None)
    [scores] = [output.prompt_logprobs for output in own if output.prompt_logprobs]
    assert len(scores) > 0
