"""Fingerprints of engines: equal where they compute the same bits, different where they do not."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from infer import LLM, EngineConfig
from infer.engine.build.assemble import prepare
from infer.engine.build.fingerprints import PROMPT_TOKENS, fingerprint_of
from infer.models.model_config import ModelConfig
from infer.text.checkpoint_text import TextFiles
from infer.types.fingerprint import Fingerprint
from tests.support.cases import slow_but
from tests.support.hash_engine import make_hash_core, small_text_files


def built(**settings: Any) -> Fingerprint:
    blueprint = prepare(EngineConfig(**{"max_seq_len": 128, "device": "cpu", **settings}))
    core, _ = blueprint.build(lambda request_id: None)
    found = blueprint.fingerprint(core)
    assert core.scheduler.allocator.num_free == core.scheduler.allocator.num_usable
    assert not core.scheduler.num_unfinished
    return found


@functools.cache
def usual() -> Fingerprint:
    """That of the shipped model in float32."""
    return built(dtype="float32")


def test_it_depends_on_the_bits_and_not_on_sizes() -> None:
    one = usual()
    assert built(dtype="float32", max_batch_size=3, kv_cache_pages=50, page_size=32) == one
    assert len(one.model) == len(one.numbers) == 64
    other = built(dtype="bfloat16")
    assert (other.model, other.protocol) == (one.model, one.protocol)
    assert other.numbers != one.numbers


@pytest.mark.parametrize("max_seq_len", slow_but({1, 32, 33}, [1, 2, 17, 32, 33]))
def test_an_engine_of_short_sequences_has_one(
    max_seq_len: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its prompt was longer than the sequences that the model computes: a traceback at the start,
    and engines that were equal to no others."""
    one = built(dtype="float32", max_seq_len=max_seq_len)
    assert built(dtype="float32", max_seq_len=max_seq_len) == one
    assert (one == usual()) is (max_seq_len >= PROMPT_TOKENS)
    assert "fingerprint" not in caplog.text


class Changed:
    """A runner that changes the last bit of one logit, if wanted."""

    def __init__(self, runner: Any, changes: bool) -> None:
        self._runner, self._changes = runner, changes

    def execute(self, plan: Any) -> Any:
        results = self._runner.execute(plan)
        for chunk in plan:
            if self._changes and PROMPT_TOKENS - 1 in chunk.sequence.logits:
                bits = chunk.sequence.logits[PROMPT_TOKENS - 1].view("int32")
                bits[5] ^= 1
        return results


@pytest.mark.parametrize("changes", [False, True])
def test_one_bit_of_the_last_step_is_seen(changes: bool) -> None:
    with LLM(dtype="float32", max_seq_len=128) as llm:
        core, found = llm.core, []
        runner = core.runner
        for bit in (False, changes):
            core.runner = Changed(runner, bit)
            found.append(of(core, 500))
        core.runner = runner
    assert (found[0] == found[1]) is not changes


def of(core: Any, vocab_size: int, **changes: Any) -> Fingerprint:
    how: dict[str, Any] = {"model": _Config(), "text": small_text_files(), "formats": ("float32",)}
    return fingerprint_of(core, vocab_size=vocab_size, **{**how, **changes})


@dataclasses.dataclass
class _Config:
    hidden_size: int = 3


def test_an_engine_that_cannot_compute_it_is_equal_to_no_other() -> None:
    core = make_hash_core()  # it has no logits
    assert of(core, 50).numbers != of(core, 50).numbers
    tiny = make_hash_core(num_pages=3)
    assert of(tiny, 50).numbers != of(tiny, 50).numbers
    assert of(tiny, 50).model == of(core, 50).model


def test_a_change_of_config_or_tokenizer_is_another_model() -> None:
    core = make_hash_core()
    text: TextFiles = dataclasses.replace(small_text_files(), eos_token_ids=(1, 2))
    models = {
        of(core, 50).model,
        of(core, 50, model=_Config(4)).model,
        of(core, 50, text=text).model,
    }
    assert len(models) == 3
    assert dataclasses.is_dataclass(ModelConfig)
