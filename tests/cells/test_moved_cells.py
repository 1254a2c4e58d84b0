"""Cells of every family and shape that are copied, removed and moved, against the dense reference.

`test_cells_reference` runs random programs on a few shapes. Here one program runs on each shape of
`model_shapes`, in float32 and in bfloat16: a sequence is decoded, copied, cut and moved, and goes
on. Where keys cannot be moved, `seq_add` says so, and the cells are as they were.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.cells import Batch, CellModel, Context, DecodeStatus, load_model
from infer.cells.cell_attention import rotation_problem
from infer.errors import RequestError
from infer.kernels.rotary import QKRotation
from tests.support.checkpoints import write_checkpoint
from tests.support.dense_cells import DenseCells
from tests.support.model_shapes import SHAPES, crossed
from tests.support.parity import tokens_of

TOLERANCE = {"float32": 3e-4, "bfloat16": 0.06}
"""Maximum difference of logits, relative to their scale."""
CASES = crossed(TOLERANCE, usual=TOLERANCE, least="float32")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CellModel]:
    """(family, shape), dtype → the model, which is made once."""

    @functools.cache
    def written(family: str, name: str) -> Path:
        folder: Path = tmp_path_factory.mktemp("model")
        write_checkpoint(folder, family, rounded=True, **SHAPES[family][name])
        return folder

    @functools.cache
    def model(shape: tuple[str, str], dtype: Any) -> CellModel:
        return load_model(str(written(*shape)), dtype=dtype, max_seq_len=256)

    return model


class Program:
    """The same operations on a context and on the reference."""

    def __init__(self, model: CellModel, truth: CellModel) -> None:
        self.context = Context(model, num_cells=160, max_seqs=3, n_batch=64, n_ubatch=24)
        self.reference = DenseCells(truth.model)

    def decode(self, tokens: list[int], seqs: set[int]) -> float:
        """The largest difference of the logits, relative to their scale."""
        first = self.reference.next_pos(min(seqs))
        pos = list(range(first, first + len(tokens)))
        batch = Batch(64)
        for token, place in zip(tokens, pos, strict=True):
            batch.add(token, place, seqs, True)
        assert self.context.decode(batch) is DecodeStatus.DONE, self.context.last_error
        wanted = self.reference.decode(tokens, pos, [seqs] * len(tokens))
        ours = torch.from_numpy(self.context.logits())
        return float((ours - wanted).abs().max() / wanted.abs().max())

    def both(self, name: str, *arguments: int) -> None:
        getattr(self.context, name)(*arguments)
        getattr(self.reference, name)(*arguments)


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_moved_cells(models: Callable[..., CellModel], shape: tuple[str, str], dtype: str) -> None:
    model = models(shape, dtype)
    program, most = Program(model, models(shape, "float32")), TOLERANCE[dtype]
    assert program.decode(tokens_of(50, seed=1), {0}) <= most
    program.both("seq_cp", 0, 1, 0, 30)
    assert program.decode(tokens_of(9, seed=2), {1}) <= most
    program.both("seq_rm", 0, 10, 25)
    if model.has_learned_positions:
        with pytest.raises(RequestError, match="learned positions"):
            program.context.seq_add(0, 25, -1, -15)
        return
    program.both("seq_rm", 1, -1, -1)
    program.both("seq_add", 0, 25, -1, -15)
    assert program.decode(tokens_of(20, seed=3), {0}) <= most
    program.both("seq_add", 0, -1, -1, 90)
    assert program.decode(tokens_of(7, seed=4), {0}) <= most


def test_a_gap_is_refused_where_scores_depend_on_distances(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bloom")
    model = load_model(str(tmp_path), dtype="float32", max_seq_len=256)
    context = Context(model, num_cells=80, max_seqs=2)
    assert context.decode(Batch.of(tokens_of(30, seed=1))) is DecodeStatus.DONE
    context.seq_rm(0, 10, 20)
    before = context.records()
    more = Batch(8)
    more.add(7, 30, {0}, True)
    assert context.decode(more) is DecodeStatus.INVALID_BATCH
    assert "have a gap" in str(context.last_error)
    assert context.records() == before
    context.seq_add(0, 20, -1, -10)
    more = Batch(8)
    more.add(7, 20, {0}, True)
    assert context.decode(more) is DecodeStatus.DONE


# A model whose keys are not what its config says.


def test_keys_with_another_rotation_are_not_moved(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3", pad_token_id=0)  # whose embedding is zero
    for dtype in ("float32", "bfloat16"):
        made = load_model(str(tmp_path), dtype=dtype, max_seq_len=256)
        assert rotation_problem(made.model, 256) is None
        assert rotation_problem(made.model, 1) is None

        def halved(rotation: QKRotation) -> QKRotation:
            """The second half of a head's pairs is not rotated."""
            assert rotation.cos is not None
            assert rotation.sin is not None
            cos, sin = rotation.cos.clone(), rotation.sin.clone()
            cos[:, cos.shape[1] // 2 :], sin[:, sin.shape[1] // 2 :] = 1.0, 0.0
            return QKRotation(cos, sin, rotation.norms)

        changes = {
            "none": lambda rotation: QKRotation(None, None, rotation.norms),
            "another": lambda rotation: QKRotation(rotation.cos, -rotation.sin, rotation.norms),
            "half": halved,
        }
        for name, change in changes.items():
            other: Any = Turned(made.model, change)
            context = Context(dataclasses.replace(made, model=other), num_cells=20, max_seqs=1)
            assert context.decode(Batch.of([1, 2, 3])) is DecodeStatus.DONE
            before = context.records()
            with pytest.raises(RequestError, match="in layer 1 the key of a position"):
                context.seq_add(0, 1, -1, 5)
            assert context.records() == before, name


class Turned:
    """A model whose layer 1 rotates otherwise than its config says."""

    def __init__(self, model: Any, change: Any) -> None:
        self.model, self.change = model, change
        self.config, self.logits = model.config, model.logits

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        def own(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation | None) -> Tensor:
            changed = self.change(rotation) if layer == 1 else rotation
            attended: Tensor = attend(layer, q, k, v, changed)
            return attended

        hidden: Tensor = self.model.forward(tokens, positions, own)
        return hidden
