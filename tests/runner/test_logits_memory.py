"""Large logits are written into memory that the next step uses again; nobody keeps a part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infer import LLM, SamplingParams
from infer.kernels.loader import page_aligned
from infer.kernels.native import native_obstacle
from infer.runner import model_runner
from infer.types import RequestOutput

PROMPTS = ["Once upon a time", "One day, a little bird", "The fox", "{", "7 + 5 =", "Once"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=3, top_p=0.8, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=7, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=5, min_p=0.02, max_tokens=11, presence_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=3, logit_bias={7: 2.0}),
    SamplingParams(temperature=0.7, top_k=9, seed=1, max_tokens=12, ignore_eos=True),
]


def found() -> tuple[list[RequestOutput], Any]:
    with LLM(dtype="bfloat16", device="cpu", max_seq_len=128, max_batch_size=4) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        return outputs, llm.logits(PROMPTS[1]).copy()


@pytest.mark.skipif(native_obstacle() is not None, reason=str(native_obstacle()))
def test_answers_and_logits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, wanted_logits = found()
    made: list[torch.Tensor] = []

    def counted(num_bytes: int) -> torch.Tensor:
        made.append(page_aligned(num_bytes))
        return made[-1]

    monkeypatch.setattr("infer.runner.model_runner.page_aligned", counted)
    monkeypatch.setattr(model_runner, "RETURNED_FROM", 1)
    outputs, logits = found()
    assert 0 < len(made) <= 4, "it is used again"
    assert (logits == wanted_logits).all()
    for got, want in zip(outputs, wanted, strict=True):
        assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)
        assert got.prompt_logprobs == want.prompt_logprobs
