"""Tests of `Context` on the shipped model: what people who know llama.cpp rely on, and refusals."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from infer import LLM, SamplingParams
from infer.cells import Batch, CellModel, Context, DecodeStatus, RowSampling, load_model, sample
from infer.errors import (
    CancelledError,
    ConfigError,
    EngineError,
    LoadError,
    OverloadedError,
    RequestError,
)
from tests.support.checkpoints import write_checkpoint

TEXTS = ["Once upon a time there was a fox.", "One day, a little bird", "The king said that he"]


@pytest.fixture(scope="module")
def model() -> CellModel:
    return load_model(dtype="float32", max_seq_len=1024)


@pytest.fixture(scope="module")
def prompts(model: CellModel) -> list[list[int]]:
    tokenizer = model.tokenizer()
    return [list(tokenizer.encode(text)) for text in TEXTS]


def context(model: CellModel, num_cells: int = 256, max_seqs: int = 4, **sizes: Any) -> Context:
    return Context(model, num_cells, max_seqs, **sizes)


def joined(prompts: list[list[int]], flag: Callable[[int, int], bool]) -> Batch:
    """All prompts in one batch, interleaved; `flag(sequence, position)`."""
    batch = Batch(sum(map(len, prompts)))
    for position in range(max(map(len, prompts))):
        for seq, tokens in enumerate(prompts):
            if position < len(tokens):
                batch.add(tokens[position], position, seq, flag(seq, position))
    return batch


def all_logits(model: CellModel, tokens: list[int]) -> np.ndarray:
    alone, batch = context(model), Batch.of(tokens)
    batch.logits[:] = True
    assert alone.decode(batch) == 0
    return alone.logits()


# The four behaviours.


def test_batch_decode(model: CellModel, prompts: list[list[int]]) -> None:
    """Several sequences in one batch, in any order, in parts of any size, then token by token."""
    more = [[(7 * step + seq) % 500 for step in range(12)] for seq in range(3)]
    wanted = [all_logits(model, prompts[seq] + more[seq]) for seq in range(3)]
    for n_ubatch in (512, 5, 1):
        mixed = context(model, n_ubatch=n_ubatch)
        assert mixed.decode(joined(prompts, lambda seq, pos: pos + 1 == len(prompts[seq]))) == 0
        for step in range(12):
            ends = [len(prompt) - 1 + step for prompt in prompts]
            rows = mixed.logits()
            order = sorted(range(3), key=lambda s: (ends[s], s)) if step == 0 else range(3)
            for row, seq in zip(rows, order, strict=True):
                np.testing.assert_allclose(row, wanted[seq][ends[seq]], atol=2e-4)
            batch = Batch(3)
            for seq in range(3):
                batch.add(more[seq][step], seq_ids=seq, logits=True)
            assert mixed.decode(batch) is DecodeStatus.DONE


def test_output_rows(model: CellModel, prompts: list[list[int]]) -> None:
    """Rows are exactly those flagged, in the batch's order, and stay until the next decode."""
    here = context(model, n_ubatch=4)
    assert (here.num_outputs, here.output_ids, here.logits().shape) == (0, [], (0, 2048))
    batch = joined(prompts, lambda seq, pos: (seq + pos) % 3 == 0)
    assert here.decode(batch) == 0
    flagged = [i for i in range(batch.num_tokens) if batch.logits[i]]
    assert here.output_ids == flagged
    assert here.num_outputs == len(flagged) == len(here.logits())
    each = [all_logits(model, prompt) for prompt in prompts]
    for row, i in enumerate(flagged):
        wanted = each[batch.seq_id[i][0]][batch.pos[i]]
        np.testing.assert_allclose(here.logits()[row], wanted, atol=2e-4)
        assert (here.logits_ith(i) == here.logits()[row]).all()
        assert (here.logits_ith(i - batch.num_tokens) == here.logits()[row]).all()
    unflagged = next(i for i in range(batch.num_tokens) if not batch.logits[i])
    with pytest.raises(RequestError, match=f"token {unflagged} of the last batch was not flagged"):
        here.logits_ith(unflagged)
    for i in (batch.num_tokens, -batch.num_tokens - 1):
        with pytest.raises(RequestError, match=f"has {batch.num_tokens} tokens"):
            here.logits_ith(i)
    before = here.logits().copy()
    assert here.decode(Batch(3)) is DecodeStatus.INVALID_BATCH
    here.seq_rm(-1)
    here.clear()
    assert (here.logits() == before).all()
    unflagged_only = Batch(2)
    unflagged_only.add(5)
    assert here.decode(unflagged_only) == 0
    assert here.num_outputs == 0


def test_cell_operations(model: CellModel, prompts: list[list[int]]) -> None:
    """Copies share cells, removals free what nobody holds, shifts close the gap they leave."""
    here, prompt = context(model), prompts[0]
    here.decode(Batch.of(prompt))
    here.seq_cp(0, 1)
    here.seq_cp(0, 2, 0, 4)
    status = here.status()
    assert (status.num_used, status.num_shared) == (len(prompt), len(prompt))
    assert {s: n.num_cells for s, n in status.sequences.items()} == {
        0: len(prompt),
        1: len(prompt),
        2: 4,
    }
    assert (here.seq_pos_min(1), here.seq_pos_max(1)) == (0, len(prompt) - 1)
    assert (here.seq_pos_min(3), here.seq_pos_max(3)) == (-1, -1)
    assert here.seq_rm(0) == 0  # the others hold everything
    assert here.seq_tokens(1) == prompt
    assert here.seq_rm(1, 2, 5) == 1  # position 4; sequence 2 holds 2 and 3
    assert here.seq_add(1, 5, -1, -3) == 0
    assert (here.seq_pos_max(1), here.status().num_shifted) == (
        len(prompt) - 4,
        len(prompt) - 5,
    )
    assert here.decode(Batch.of([9], 1)) == 0
    assert (here.status().num_shifted, here.seq_pos_max(1)) == (0, len(prompt) - 3)
    assert here.seq_keep(1) == 2
    assert list(here.status().sequences) == [1]
    here.clear()
    assert here.status().num_free == 256


def test_status_codes(model: CellModel, prompts: list[list[int]]) -> None:
    """0 done, 1 no free cells, 2 aborted, -1 invalid, below -1 fatal; all but 0 change nothing."""
    codes = [(status.name, int(status)) for status in DecodeStatus]
    assert codes[:4] == [("DONE", 0), ("NO_FREE_CELLS", 1), ("ABORTED", 2), ("INVALID_BATCH", -1)]
    assert all(code < -1 for _, code in codes[4:])
    prompt = prompts[0]
    here = context(model, len(prompt) + 2, 2)
    assert here.decode(Batch.of(prompt)) == 0
    assert here.last_error is None
    logits, dump = here.logits().copy(), here.dump()
    assert here.decode(Batch.of([1, 2, 3], 1)) == 1
    assert "3 tokens, and 2 of" in str(here.last_error)
    assert here.decode(Batch.of([1, 2], 1), abort=lambda: True) == 2
    assert here.decode(Batch.of([2048], 1)) == -1
    assert str(here.last_error) == (
        "token 0 of the batch has the id 2048; the model's ids are 0 to 2047"
    )
    assert (here.logits() == logits).all()
    assert here.dump() == dump
    assert here.decode(Batch.of([1, 2], 1)) == 0  # the last cell is usable
    assert here.status().num_free == 0
    assert here.decode(Batch.of([3], 1)) == 1
    assert here.seq_rm(1, 1, 2) == 1
    assert here.decode(Batch.of([3], 1)) == 0


# More of the same.


def test_the_greedy_loop_has_the_engine_s_tokens(prompts: list[list[int]]) -> None:
    """In the model's own dtype, greedy and drawn."""
    model = load_model()
    with LLM() as llm:
        for temperature in (0.0, 0.9):
            sampling = SamplingParams(
                temperature=temperature, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True,
                repetition_penalty=1.2,
            )  # fmt: skip
            for output, prompt in zip(llm.generate(prompts, sampling), prompts, strict=True):
                here, tokens = context(model), list(prompt)
                here.decode(Batch.of(prompt))
                for _ in range(24):
                    row = RowSampling(tokens=tokens, sampling=sampling, num_prompt=len(prompt))
                    tokens.append(sample(here.logits(), [row])[0].token_id)
                    here.decode(Batch.of(tokens[-1:]))
                assert tuple(tokens[len(prompt) :]) == output.token_ids


def test_logits_have_the_same_bits_in_any_company(prompts: list[list[int]]) -> None:
    model = load_model()
    if torch.float32 == model.dtype:
        pytest.skip("this CPU computes in float32, where torch's products depend on the batch")
    mixed = context(model)
    mixed.decode(joined(prompts, lambda seq, pos: True))
    for seq, prompt in enumerate(prompts):
        alone = context(model, n_ubatch=3)
        batch = Batch.of(prompt)
        batch.logits[:] = True
        alone.decode(batch)
        own = [
            i for i, ids in enumerate(joined(prompts, lambda s, p: True).seq_id) if ids == (seq,)
        ]
        assert (mixed.logits()[own] == alone.logits()).all()


def test_a_token_in_two_sequences_is_seen_by_both_and_by_no_third(
    model: CellModel, prompts: list[list[int]]
) -> None:
    here, prompt = context(model), prompts[0]
    batch = Batch(100)
    for token in prompt:
        batch.add(token, seq_ids=(0, 1))
    for token in prompts[1]:
        batch.add(token, seq_ids=2)
    assert here.decode(batch) == 0
    tails = Batch(3)
    for seq in range(3):
        tails.add(11, seq_ids=seq, logits=True)
    assert here.decode(tails) == 0
    for seq, before in enumerate((prompt, prompt, prompts[1])):
        wanted = all_logits(model, [*before, 11])[-1]
        np.testing.assert_allclose(here.logits()[seq], wanted, atol=2e-4)


def test_a_tree_is_verified_in_one_pass(model: CellModel, prompts: list[list[int]]) -> None:
    """Every node sees its own path."""
    here, prompt = context(model, max_seqs=8), prompts[0]
    here.decode(Batch.of(prompt))
    for leaf in (1, 2, 3):
        here.seq_cp(0, leaf)
    tree = Batch(20)
    paths = []
    for token, leaves in ((5, (0, 1, 2, 3)), (6, (0, 1)), (7, (2, 3)), (8, (0,)), (9, (1,))):
        tree.add(token, seq_ids=leaves, logits=True)
        paths.append(leaves)
    assert here.decode(tree) == 0
    for row, path in enumerate([(5,), (5, 6), (5, 7), (5, 6, 8), (5, 6, 9)]):
        wanted = all_logits(model, [*prompt, *path])[-1]
        np.testing.assert_allclose(here.logits()[row], wanted, atol=2e-4)


def test_an_abort_between_layers_or_parts_restores_keys_that_were_rotated(
    model: CellModel, prompts: list[list[int]]
) -> None:
    here, prompt = context(model, n_ubatch=3), prompts[0]
    here.decode(Batch.of(prompt))
    here.seq_rm(0, 2, 4)
    here.seq_add(0, 4, -1, -2)
    keys = [cache.clone() for cache in here._storage.keys]
    used = torch.from_numpy(np.flatnonzero(here.cells.pos >= 0) + 1)
    layers = model.config.num_layers
    for after in (0, 1, layers // 2, layers + 1, 2 * layers + 2):
        calls = iter(range(after))
        batch = Batch.of([1, 2, 3, 4, 5, 6, 7])
        assert here.decode(batch, abort=lambda c=calls: next(c, None) is None) == 2  # type: ignore[misc]
        assert here.status().num_shifted == len(prompt) - 4
        for cache, old in zip(here._storage.keys, keys, strict=True):
            assert torch.equal(cache[used], old[used])
    assert here.decode(Batch.of([1])) == 0


def test_each_token_of_the_last_batch_says_which_cell_it_got(
    model: CellModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Freed cells are taken first; what fails, and what `load` brings, is no batch."""
    here = context(model, 12, 2, n_ubatch=3)
    assert here.batch_cells == []
    here.decode(Batch.of([1, 2, 3, 4, 5, 6]))
    here.save(tmp_path / "cells")
    here.seq_rm(0, 1, 3)
    here.seq_add(0, 3, -1, -2)
    here.decode(Batch.of([7, 8, 9, 10], 1))
    assert here.batch_cells == [1, 2, 6, 7]
    assert [here.cells.token[cell] for cell in here.batch_cells] == [7, 8, 9, 10]
    column = [line[len("cell  pos  ") :][:5].strip() for line in here.dump().splitlines()[1:]]
    assert column == ["", "0", "1", "", "", "", "2", "3"]
    assert here.decode(Batch.of([1] * 9)) == DecodeStatus.NO_FREE_CELLS
    assert here.batch_cells == [1, 2, 6, 7]
    here.seq_rm(1, 1, 2)
    here.cells.check()
    assert here.batch_cells == [1, 2, 6, 7], "what it got, whatever became of it"
    here.load(tmp_path / "cells")
    here.cells.check()
    assert {line[len("cell  pos  ") :][:5].strip() for line in here.dump().splitlines()[1:]} == {""}


def test_an_error_in_the_forward_pass_is_fatal_and_changes_nothing(
    model: CellModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = context(model)
    here.decode(Batch.of(prompts[0]))
    before, logits = here.dump(), here.logits()

    def broken(error: BaseException) -> Callable[..., Any]:
        def attend(*_: Any) -> Any:
            raise error

        return attend

    for error, status in (
        (MemoryError(), DecodeStatus.OUT_OF_MEMORY),
        (RuntimeError("a kernel"), DecodeStatus.FAILED),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(here._attention, "plan", lambda part, e=error: broken(e))
            assert here.decode(Batch.of([1])) is status
        assert isinstance(here.last_error, EngineError)
    with monkeypatch.context() as patch:
        patch.setattr(here._attention, "plan", lambda part: broken(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            here.decode(Batch.of([1]))
    assert (here.dump(), here.logits() is logits) == (before, True)
    assert here.decode(Batch.of([1])) == 0


def test_raise_on_error(model: CellModel) -> None:
    here = context(model, 2, raise_on_error=True)
    with pytest.raises(OverloadedError, match="2 of 2 cells are free"):
        here.decode(Batch.of([1, 2, 3]))
    with pytest.raises(CancelledError):
        here.decode(Batch.of([1]), abort=lambda: True)
    with pytest.raises(RequestError) as caught:
        here.decode(Batch.of([-1]))
    assert caught.value.param == "token"


def edited(**values: Any) -> Batch:
    batch = Batch.of([1, 2, 3])
    for name, value in values.items():
        getattr(batch, name)[1] = value
    return batch


def flagged(number: int) -> Batch:
    batch = Batch.of([1] * number)
    batch.logits[:] = True
    return batch


INVALID: list[tuple[str, Batch, str, str]] = [
    ("empty", Batch(3), "n_tokens", "1 to n_batch=8 tokens, not 0"),
    ("too long", Batch.of([1] * 9), "n_tokens", "not 9"),
    ("token", edited(token=-1), "token", "token 1 of the batch has the id -1; .* 0 to 2047"),
    ("no sequence", edited(seq_id=()), "seq_id", "token 1 .* in no sequence; .* 0 to 3"),
    ("unknown sequence", edited(seq_id=(4,)), "seq_id", "in sequence 4; .* 0 to 3"),
    ("negative sequence", edited(seq_id=(-1,)), "seq_id", "in sequence -1"),
    ("gap", edited(pos=7), "pos", "position 7 of sequence 0, whose next position is 1"),
    ("twice", edited(pos=0), "pos", "position 0 of sequence 0, whose next position is 1"),
    ("negative position", edited(pos=-2), "pos", "position -2"),
    ("sequences that differ", edited(seq_id=(0, 3)), "pos", r"differ \(1 and 5\)"),
    ("outputs", flagged(7), "logits", "7 tokens .* room for max_outputs=6"),
    ("behind the end", Batch.of([1, 2, 3], 2), "pos", "position 1024; .* 0 to 1023"),
]


@pytest.mark.parametrize(
    ("batch", "param", "message"), [i[1:] for i in INVALID], ids=[i[0] for i in INVALID]
)
def test_an_invalid_batch_is_refused(
    model: CellModel, batch: Batch, param: str, message: str
) -> None:
    here = context(model, n_batch=8, max_outputs=6)
    here.decode(Batch.of([1, 2, 3, 4, 5], 3))
    if batch.seq_id[0] == (2,):
        start = Batch(1)
        start.add(1, 1021, 2)
        assert here.decode(start) == 0
    before = here.dump()
    assert here.decode(batch) == -1
    assert isinstance(here.last_error, RequestError)
    assert here.last_error.param == param
    with pytest.raises(RequestError, match=message):
        raise here.last_error
    assert here.dump() == before


def test_a_batch_refuses_what_is_no_integer_and_what_is_too_much() -> None:
    batch = Batch(1)
    for wrong, param in (
        ({"token": 1.5}, "token"),
        ({"token": True}, "token"),
        ({"token": 1 << 70}, "token"),
        ({"token": 1, "pos": -1}, "pos"),
        ({"token": 1, "seq_ids": ["a"]}, "seq_id"),
    ):
        with pytest.raises(RequestError) as caught:
            batch.add(**wrong)
        assert caught.value.param == param
    assert batch.num_tokens == 0
    assert batch.add(1, seq_ids=(3, 1, 3)) == 0
    assert (batch.seq_id[0], batch.n_seq_id.tolist()) == ((1, 3), [2])
    with pytest.raises(RequestError, match="has room for 1 tokens"):
        batch.add(2)
    with pytest.raises(RequestError, match="at least 1, not 0"):
        Batch(0)
    batch.clear()
    assert batch.add(1) == 0


def test_arguments_that_are_not_possible_are_refused(model: CellModel) -> None:
    here = context(model)
    for call in (
        lambda: here.seq_cp(0, 4),
        lambda: here.seq_rm(-2),
        lambda: here.seq_keep(99),
        lambda: here.seq_add(4, 0, 1, 1),
        lambda: here.seq_pos_max(-1),
    ):
        with pytest.raises(RequestError, match="has the sequences 0 to 3"):
            call()
    with pytest.raises(RequestError, match="p0 must be an integer, not float"):
        here.seq_rm(0, 0.5)  # type: ignore[arg-type]
    here.decode(Batch.of([1, 2, 3]))
    with pytest.raises(RequestError, match="moves position 2 of sequence 0 to 1024"):
        here.seq_add(0, -1, -1, 1022)
    with pytest.raises(ConfigError, match="max_seqs: must be an integer of at least 1, not 0"):
        Context(model, 10, 0)
    with pytest.raises(ConfigError, match=r"(?s)num_cells: .*there is room for .*KV cache"):
        Context(model, 1 << 40)


def test_settings_that_are_not_possible_are_refused() -> None:
    for settings, message in (
        ({"page_size": 4}, "page_size: is not a setting of a model"),
        ({"max_seq_len": 1 << 20}, "exceeds the model's own limit"),
        ({"attention_backend": "triton"}, "contexts are on CPUs"),
        ({"dtype": "float8"}, "dtype"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_model(**settings)


def test_sampling_refuses_what_needs_the_engine(model: CellModel) -> None:
    row = RowSampling(tokens=[1])
    logits = np.zeros((1, 2048), np.float32)
    logits[0, 7] = 1.0
    assert sample(logits, [row])[0].token_id == 7
    for bad, message in (
        (RowSampling(tokens=[1], sampling=SamplingParams(bad_words=("x",))), "bad_words needs"),
        (RowSampling(tokens=[]), "num_prompt must be 1 to 0"),
        (RowSampling(tokens=[1], num_prompt=2), "num_prompt must be 1 to 1"),
    ):
        with pytest.raises(RequestError, match=message):
            sample(logits, [bad])
    with pytest.raises(RequestError, match=r"logits must be \[2, vocabulary\]"):
        sample(logits, [row, row])
    logits[0, 7] = np.nan
    assert "no finite numbers" in sample(logits, [row])[0].error


# State.


def grown(model: CellModel, prompts: list[list[int]]) -> Context:
    """A context with shared cells, a gap, and keys that are still to be rotated."""
    here = context(model)
    here.decode(Batch.of(prompts[0]))
    here.seq_cp(0, 1, 0, 5)
    here.decode(Batch.of(prompts[1], 2))
    here.seq_rm(0, 2, 4)
    here.seq_add(0, 5, -1, -1)
    return here


def test_saved_cells_go_on_where_they_were(
    model: CellModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    here, path = grown(model, prompts), tmp_path / "all.safetensors"
    before = here.dump()
    assert here.save(path) == here.status().num_used
    assert here.dump() == before
    other = context(model)
    other.decode(Batch.of([1, 2, 3]))
    assert other.load(path) == here.status().num_used
    other.cells.check()
    assert [r[1:] for r in other.records()] == [r[1:] for r in here.records()]
    assert other.status().num_shifted == here.status().num_shifted > 0
    for seq in (0, 1, 2):
        rows = []
        for each in (here, other):
            assert each.decode(Batch.of([33, 44], seq)) == 0
            rows.append(each.logits())
        assert (rows[0] == rows[1]).all()


def test_a_saved_sequence_goes_on_in_another_one(
    model: CellModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    here, path = grown(model, prompts), tmp_path / "one.safetensors"
    num = here.save_seq(path, 0)
    assert num == here.status().sequences[0].num_cells
    small = context(model, num + 3, 2)
    small.decode(Batch.of([1, 2, 3, 4, 5], 1))
    with pytest.raises(LoadError, match=f"it has {num} cells, and there is room for {num - 2}"):
        small.load_seq(path, 0)
    small.seq_cp(1, 0)
    with pytest.raises(LoadError, match="there is room for"):
        small.load_seq(path, 0)  # what sequence 1 shares is not freed
    small.seq_rm(1)
    assert small.load_seq(path, 0) == num  # in place of the five
    assert small.seq_tokens(0) == here.seq_tokens(0)
    rows = []
    for each in (here, small):
        assert each.decode(Batch.of([33])) == 0
        rows.append(each.logits())
    assert (rows[0] == rows[1]).all()


def test_foreign_and_broken_states_are_refused(
    model: CellModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    here, good = grown(model, prompts), tmp_path / "good.safetensors"
    here.save(good)
    with safe_open(good, framework="pt") as file:
        header = file.metadata()
    tensors, path = load_file(good), tmp_path / "bad.safetensors"
    other = context(model, 64, 2)
    other.decode(Batch.of([1, 2]))
    before = other.dump()

    def refused(message: str, edit: dict[str, Any], fields: dict[str, str]) -> None:
        left = {name: each for name, each in {**tensors, **edit}.items() if each is not None}
        save_file(left, path, metadata={**header, **fields})
        with pytest.raises(LoadError, match=message):
            other.load(path)
        assert other.dump() == before

    refused("its model is .* of the model 'infer-demo'", {}, {"model": "0" * 64})
    refused("its dtype is 'bfloat16'; this context reads 'float32'", {}, {"dtype": "bfloat16"})
    refused("its layout is '1 layers", {}, {"layout": "1 layers"})
    refused("its kind is 'sequence'", {}, {"kind": "sequence"})
    refused("its format is", {}, {"format": "infer.cells 0"})
    refused("'pos' is missing", {"pos": None}, {})
    refused("'keys.1' is missing", {"keys.1": None}, {})
    refused("'pos' is .*should be", {"pos": torch.zeros(3, dtype=torch.int64)}, {})
    refused("'pos' is float32, should be int64", {"pos": tensors["pos"].float()}, {})
    refused("is not possible", {"token": tensors["token"] + 5000}, {})
    refused("is not possible", {"pos": tensors["pos"] - 50}, {})
    refused("a shift is larger", {"shift": tensors["shift"] + 5000}, {})
    refused("it has the sequence 2; this context has 0 to 1", {}, {})
    refused(
        "not whole", {"seq_ends": tensors["seq_ends"] * 0, "seq_ids": tensors["seq_ids"] % 2}, {}
    )
    path.write_bytes(good.read_bytes()[:-100])
    for wrong in (path, tmp_path / "none", tmp_path):
        with pytest.raises(LoadError, match="cannot be read"):
            other.load(wrong)


def test_a_fine_tuned_model_s_cells_are_not_this_model_s(tmp_path: Path) -> None:
    """Two checkpoints of one shape and one name that differ in one matrix."""
    contexts = []
    for seed, folder in enumerate((tmp_path / "a" / "m", tmp_path / "b" / "m")):
        write_checkpoint(folder, seed=0)
        if seed:
            weights = load_file(folder / "model.safetensors")
            weights["model.layers.1.mlp.up_proj.weight"] *= 1.01
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        contexts.append(Context(load_model(str(folder), dtype="float32"), 16))
    contexts[0].decode(Batch.of([1, 2]))
    contexts[0].save(tmp_path / "state")
    with pytest.raises(LoadError, match="its model is"):
        contexts[1].load(tmp_path / "state")


def test_a_full_disk_leaves_the_old_file(
    model: CellModel, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, path = grown(model, prompts), tmp_path / "state"
    here.save(path)
    old = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("infer.cells.state_file.save_file", full)
    with pytest.raises(OSError, match="No space"):
        here.save(path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["state"]


def test_the_package_can_be_imported_alone() -> None:
    code = "import infer.cells, sys; assert 'infer.server' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Faults that the tests above must notice, planted on purpose.


def rows_of(model: CellModel, prompts: list[list[int]]) -> np.ndarray:
    """Logits of a program that uses every part: sets, parts, a removed middle, a shift."""
    here = context(model, n_ubatch=4)
    here.decode(joined(prompts, lambda seq, pos: False))
    here.seq_cp(0, 3)
    here.seq_rm(3, 2, 4)
    here.seq_add(1, 3, -1, 2)
    batch = Batch(8)
    for seq in (0, 2, 3):
        batch.add(8, seq_ids=seq, logits=True)
    batch.add(9, seq_ids=(0, 3), logits=True)
    batch.add(10, seq_ids=1, logits=True)
    here.decode(batch)
    return here.logits()


def ignores_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.cells.cell_attention.rotate", lambda x, cos, sin: x)
    # The check before keys are moved would see it.
    monkeypatch.setattr("infer.cells.decode_context.rotation_problem", lambda *_: None)


def sees_every_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "infer.cells.cell_table.CellTable.seen_by",
        lambda self, seqs: np.argsort(self.pos, kind="stable")[(self.pos < 0).sum() :] + 1,
    )


def writes_the_next_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    from infer.cells.visibility import Visibility

    part = Visibility.part

    def shifted(self: Any, *arguments: Any) -> Any:
        found = part(self, *arguments)
        found.layout.slot_mapping.add_(1)
        return found

    monkeypatch.setattr(Visibility, "part", shifted)


def takes_tokens_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from infer.cells.visibility import Visibility

    part = Visibility.part

    def turned(self: Any, *arguments: Any) -> Any:
        found = part(self, *arguments)
        return dataclasses.replace(found, order=found.order[::-1].copy())

    monkeypatch.setattr(Visibility, "part", turned)


def forgets_the_removed_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.cells.cell_table.CellTable.remove", lambda *_: 0)


FAULTS = [
    ignores_rotation,
    sees_every_sequence,
    writes_the_next_cell,
    takes_tokens_in_another_order,
    forgets_the_removed_range,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_deliberate_fault_changes_the_logits(
    model: CellModel,
    prompts: list[list[int]],
    fault: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = rows_of(model, prompts)
    assert (rows_of(model, prompts) == right).all()
    fault(monkeypatch)
    assert np.abs(rows_of(model, prompts) - right).max() > 0.01
