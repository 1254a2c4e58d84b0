"""Tests of each family against transformers' model of the same small random checkpoint.

Logits are compared in float32: of a prefill, of single decodes, of chunks, of a mixed batch and
after a prefix hit. Greedy tokens of the whole engine are compared too. The shapes are unusual on
purpose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import LLM, SamplingParams
from tests.support.cases import slow_but
from tests.support.checkpoints import BOS_ID, write_checkpoint
from tests.support.model_shapes import FIRST, SHAPES, crossed
from tests.support.parity import WAYS, Bench, reference, tokens_of

TOLERANCE = 2e-4
"""Maximum difference of logits in float32, relative to their scale."""
BF16_TOLERANCE = 0.04
"""The same in bfloat16, which has 8 bits of mantissa; there are some hundred roundings."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """(family, shape) → (folder, transformers' model, a bench to be emptied), made once."""

    @functools.cache
    def pair(family: str, name: str) -> Any:
        folder = tmp_path_factory.mktemp("model")
        theirs = write_checkpoint(folder, family, chat=False, **SHAPES[family][name])
        return folder, theirs, Bench(folder)

    return pair


@pytest.fixture
def pair(request: pytest.FixtureRequest, pairs: Callable[[str, str], Any]) -> Any:
    return pairs(*request.param)


LAST = [(family, list(SHAPES[family])[-1]) for family in FIRST]
EACH = [(family, name) for family in SHAPES for name in SHAPES[family]]
CASES = [
    case
    if case.values[0] in LAST
    else pytest.param(*case.values, marks=pytest.mark.slow, id=case.id)
    for case in crossed(WAYS, usual=WAYS, least="mixed batch")
]
"""The other shapes are tried by `test_serving_parity`, which has their checkpoints anyway."""


@pytest.mark.parametrize(("pair", "way"), CASES, indirect=["pair"])
def test_logits(pair: Any, way: str) -> None:
    _, theirs, bench = pair
    assert WAYS[way](bench.emptied("sdpa"), theirs) <= TOLERANCE


@pytest.mark.parametrize("pair", slow_but(LAST, EACH), indirect=True, ids=str)
def test_greedy_tokens(pair: Any) -> None:
    folder, theirs, _ = pair
    prompts = [tokens_of(n, seed=n) for n in (3, 17, 130)]
    with LLM(str(folder), dtype="float32", max_num_batched_tokens=50, max_batch_size=2) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        outputs = llm.generate(prompts, greedy)
    for tokens, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            wanted = theirs.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=16,
                eos_token_id=None,
                pad_token_id=BOS_ID,
            )[0, len(tokens) :].tolist()
        assert list(output.token_ids) == wanted


def test_shards_are_shards(tmp_path: Path) -> None:
    """The sharded shapes above must have three files, or they would test nothing."""
    for family, shapes in SHAPES.items():
        for name, shape in shapes.items():
            if "shard_bytes" in shape:
                folder = tmp_path / family / name.replace(",", "")
                write_checkpoint(folder, family, **shape)
                assert len(list(folder.glob("*.safetensors"))) >= 3


@pytest.mark.parametrize("family", slow_but(FIRST, SHAPES))
def test_bfloat16_is_close(family: str, tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, family)
    bench, tokens = Bench(tmp_path, dtype=torch.bfloat16), tokens_of(60)
    (ours,) = bench.step((bench.sequence(tokens), 60))
    wanted = reference(theirs, tokens)
    scale = wanted.abs().max()
    assert ((ours - wanted).pow(2).mean().sqrt() / scale).item() <= BF16_TOLERANCE


def test_the_storage_keeps_page_zero(tmp_path: Path) -> None:
    """Only padding may have written to page 0."""
    write_checkpoint(tmp_path, num_hidden_layers=1)
    bench = Bench(tmp_path)
    bench.step((bench.sequence(tokens_of(20)), 20))
    for cache in (*bench.storage.keys, *bench.storage.values):
        assert not cache[0].any()
