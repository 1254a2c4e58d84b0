"""Requests that speculation must answer like plain decoding, and what must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infer import LLM, RequestOutput, SamplingParams
from infer.types.grammar import Grammar

NUM_TOKENS = 32
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, log-probabilities": {"temperature": 0, "logprobs": 3},
    "drawn": {"temperature": 0.9, "top_p": 0.9, "seed": 3, "logprobs": 0},
    "top-k and min-p": {"temperature": 1.2, "top_k": 40, "min_p": 0.02, "seed": 4},
    "penalties": {
        "temperature": 0.8,
        "seed": 5,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logprobs": 1,
    },
    "bias": {"temperature": 0, "logit_bias": {263: 3.0, 376: -5.0}},
    "bad words": {"temperature": 0, "bad_words": ["there was", "fox", "the"]},
    "allowed ids": {"temperature": 0.7, "seed": 1, "allowed_token_ids": list(range(200, 700))},
    "stop string": {"temperature": 0, "stop": ["the", "and"], "min_tokens": 3},
    "few tokens": {"temperature": 0, "max_tokens": 5},
    "ends": {"temperature": 0, "ignore_eos": False, "stop_token_ids": [263, 17], "min_tokens": 6},
    "grammar": {"temperature": 0.8, "seed": 2, "grammar": Grammar("regex", "[a-z ]{5,30}[.]")},
    "prompt log-probabilities": {"temperature": 0, "prompt_logprobs": 1},
}
Asked = list[tuple[str, SamplingParams]]


def requests_of(prompts: Sequence[str], ways: Sequence[dict[str, Any]]) -> Asked:
    """A request for each way of sampling; the prompts take turns."""
    return [
        (
            prompts[i % len(prompts)],
            SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, **way}),
        )
        for i, way in enumerate(ways)
    ]


def answers(llm: LLM, asked: Asked) -> list[RequestOutput]:
    prompts, each = zip(*asked, strict=True)
    return llm.generate(list(prompts), list(each), use_tqdm=False)


def values(outputs: list[RequestOutput], *, bits: bool) -> list[Any]:
    """What must be equal; `bits`: log-probabilities too."""
    shown = []
    for output in outputs:
        logprobs = (output.logprobs, output.prompt_logprobs) if bits else None
        shown.append((output.token_ids, output.text, output.finish_reason, logprobs))
    return shown


SETTINGS: dict[str, dict[str, Any]] = {
    "continuous": {},
    "few seats, small pages": {"max_batch_size": 3, "page_size": 3},
    "small steps": {"max_num_batched_tokens": 9},
    "static, contiguous": {"batching_mode": "static", "kv_cache_backend": "contiguous"},
    "sequential, slotted": {"batching_mode": "sequential", "kv_cache_backend": "slotted"},
    "no cache": {"kv_cache_backend": "none"},
}
