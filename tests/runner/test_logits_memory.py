"""Large logits are written into memory that the next step uses again; nobody keeps a part of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer import LLM, SamplingParams
from infer.kernels.loader import page_aligned
from infer.kernels.native import native_obstacle
from infer.types import RequestOutput
from tests.support.checkpoints import write_llama
from tests.support.parity import tokens_of

VOCAB, SEATS = 262_144, 36
"""36 rows of logits have more than 32 MiB, 8 have less."""
KINDS = (
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=3, top_p=0.8, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, ignore_eos=True),
)


def answers(folder: Path, max_batch_size: int) -> list[RequestOutput]:
    settings = {"dtype": "bfloat16", "device": "cpu", "max_seq_len": 64}
    with LLM(str(folder), max_batch_size=max_batch_size, **settings) as llm:
        prompts = [tokens_of(2 + i % 5, seed=i) for i in range(SEATS)]
        params = [KINDS[i % len(KINDS)] for i in range(SEATS)]
        return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.skipif(native_obstacle() is not None, reason=str(native_obstacle()))
def test_answers_are_those_of_small_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path, vocab_size=VOCAB, num_hidden_layers=1, tie_word_embeddings=True)
    made: list[int] = []

    def counted(num_bytes: int) -> torch.Tensor:
        made.append(num_bytes)
        return page_aligned(num_bytes)

    monkeypatch.setattr("infer.runner.model_runner.page_aligned", counted)
    wanted = answers(tmp_path, 8)
    assert not made
    found = answers(tmp_path, SEATS)
    assert made
    assert len(made) <= 2, "it is used again"
    for got, want in zip(found, wanted, strict=True):
        assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)
        assert got.prompt_logprobs == want.prompt_logprobs
