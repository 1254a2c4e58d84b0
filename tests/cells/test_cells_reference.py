"""Random programs of decodes and `seq_*` calls, against a dense float32 reference."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.cells import Batch, CellModel, Context, DecodeStatus, load_model
from infer.errors import RequestError
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.dense_cells import DenseCells
from tests.support.model_shapes import FULL, LLAMA3, SLIDING

TOLERANCE = 3e-4
"""Maximum difference of logits in float32, relative to their scale."""
NUM_CELLS, MAX_SEQS = 48, 4
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "num_hidden_layers": 2},
    "mistral": {"sliding_window": 5, "head_dim": 40, "num_hidden_layers": 2},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"num_hidden_layers": 2},
    "gemma3": {
        "num_hidden_layers": 3,
        "sliding_window": 7,
        "final_logit_softcapping": 5.0,
        "layer_types": [SLIDING, FULL, SLIDING],
    },
    "gpt2": {"n_layer": 2},
}
BACKENDS = ("auto", "sdpa")


@pytest.fixture(scope="module", params=SHAPES)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[CellModel]:
    """The same weights with each attention."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder, request.param, **SHAPES[request.param])
    return [
        load_model(str(folder), dtype="float32", attention_backend=each, max_seq_len=512)
        for each in BACKENDS
    ]


def snapshot(context: Context) -> Any:
    """Everything that a caller can see, the keys and values of all cells in use included."""
    cells, storage = context.cells, context._storage
    used = torch.from_numpy(np.flatnonzero(cells.pos >= 0) + 1)
    return (
        [array.tobytes() for array in (cells.pos, cells.token, cells.shift, cells.held)],
        [cache[used].numpy().tobytes() for cache in (*storage.keys, *storage.values)],
        context.status(),
        context.output_ids,
        context.logits().tobytes(),
    )


class Program:
    """Runs operations on a context and on the reference."""

    def __init__(self, model: CellModel, rng: random.Random) -> None:
        self.rng = rng
        parts = rng.choice([3, 7, 24])
        self.context = Context(
            model, NUM_CELLS, MAX_SEQS, n_batch=24, n_ubatch=parts, max_outputs=24
        )
        self.reference = DenseCells(model.model)
        self.num_compared = 0

    def run(self, op: int) -> None:
        rng, seq, other = self.rng, self.rng.randrange(MAX_SEQS), self.rng.randrange(MAX_SEQS)
        p0, p1 = rng.randrange(-1, 8), rng.randrange(-1, 20)
        context, reference = self.context, self.reference
        match op:
            case 0:
                context.seq_cp(seq, other, p0, p1)
                reference.seq_cp(seq, other, p0, p1)
            case 1:
                context.seq_rm(seq, p0, p1)
                reference.seq_rm(seq, p0, p1)
            case 2:
                self.shift(seq, p0, p1, rng.randrange(-4, 6))
            case 3:
                context.seq_keep(seq)
                reference.seq_keep(seq)
            case 4:
                self.fail()
            case _:
                self.decode()
        context.cells.check()
        found = sorted((r.pos, r.seq_ids, r.token) for r in context.records())
        assert found == reference.rows()

    def shift(self, seq: int, p0: int, p1: int, delta: int) -> None:
        if not self.context.model.has_learned_positions:
            self.context.seq_add(seq, p0, p1, delta)
            self.reference.seq_add(seq, p0, p1, delta)
            return
        with pytest.raises(RequestError, match="has learned positions"):
            self.context.seq_add(seq, p0, p1, delta)

    def tokens(self) -> tuple[list[int], list[int], list[set[int]]]:
        """A batch that is possible now: each token in sequences with the same next position."""
        rng = self.rng
        following = [self.reference.next_pos(seq) for seq in range(MAX_SEQS)]
        pos, seqs = [], []
        for _ in range(rng.choice([1, 2, 5, 12, 24])):
            seq = rng.randrange(MAX_SEQS)
            alike = [s for s in range(MAX_SEQS) if following[s] == following[seq]]
            members = {seq, *rng.sample(alike, rng.randrange(len(alike) + 1))}
            pos.append(following[seq])
            seqs.append(members)
            for each in members:
                following[each] += 1
        return [rng.randrange(VOCAB_SIZE) for _ in pos], pos, seqs

    def decode(self) -> None:
        tokens, pos, seqs = self.tokens()
        batch, context = Batch(24), self.context
        gives_pos = self.rng.random() < 0.5
        for token, place, members in zip(tokens, pos, seqs, strict=True):
            batch.add(token, place if gives_pos else None, members, self.rng.random() < 0.6)
        if len(tokens) > context.status().num_free:
            before = snapshot(context)
            assert context.decode(batch) is DecodeStatus.NO_FREE_CELLS
            assert snapshot(context) == before
            return
        assert context.decode(batch) is DecodeStatus.DONE, context.last_error
        wanted = self.reference.decode(tokens, pos, seqs).numpy()
        flagged = np.flatnonzero(batch.logits[: len(tokens)]).tolist()
        assert context.output_ids == flagged
        assert context.logits().shape == (len(flagged), VOCAB_SIZE)
        if flagged:
            difference = np.abs(context.logits() - wanted[flagged]).max()
            assert difference <= TOLERANCE * np.abs(wanted).max()
            self.num_compared += 1

    def fail(self) -> None:
        """A decode that is invalid or aborted changes nothing."""
        tokens, pos, seqs = self.tokens()
        if len(tokens) > self.context.status().num_free:
            return
        batch, before = Batch(24), snapshot(self.context)
        for token, place, members in zip(tokens, pos, seqs, strict=True):
            batch.add(token, place, members, True)
        wrong = self.rng.randrange(len(tokens))
        match self.rng.randrange(6):
            case 0:
                batch.token[wrong] = VOCAB_SIZE
            case 1:
                batch.pos[wrong] += 600
            case 2:
                batch.seq_id[wrong] = ()
            case 3:
                batch.seq_id[wrong] = (MAX_SEQS,)
            case _:
                calls = iter(range(self.rng.randrange(12)))
                status = self.context.decode(batch, abort=lambda: next(calls, None) is None)
                if status is DecodeStatus.DONE:
                    self.reference.decode(tokens, pos, seqs)
                    return
                assert status is DecodeStatus.ABORTED
                assert snapshot(self.context) == before
                return
        assert self.context.decode(batch) is DecodeStatus.INVALID_BATCH
        assert snapshot(self.context) == before


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 30),
    ops=st.lists(st.integers(0, 11), min_size=6, max_size=14),
    backend=st.sampled_from(range(len(BACKENDS))),
)
def test_random_programs(models: list[CellModel], seed: int, ops: list[int], backend: int) -> None:
    program = Program(models[backend], random.Random(seed))
    for op in [11, *ops, 11]:
        program.run(op)
