"""Tests of the packer: what it keeps between steps must not change the result."""

from __future__ import annotations

import random

import numpy as np
import torch

from infer.runner.pack import PackedStep, Packer
from infer.schedule.sequence import PENDING, Chunk, Plan, Sequence
from infer.types import Request, SamplingParams

CPU = torch.device("cpu")


def make_sequence(rng: random.Random, num_tokens: int, page_size: int) -> Sequence:
    tokens = tuple(rng.randrange(1000) for _ in range(num_tokens))
    sequence = Sequence.from_request(Request("r", tokens, SamplingParams(), 0, 10), 0)
    sequence.table.pages = rng.sample(range(1, 500), -(-num_tokens // page_size))
    return sequence


def contents(step: PackedStep) -> list[object]:
    layout = step.layout
    return [
        step.tokens.tolist(), step.positions.tolist(), layout.slot_mapping.tolist(),
        layout.page_tables.tolist(), layout.query_start_loc, layout.seq_lens,
        step.sampled_rows, step.sampled,
    ]  # fmt: skip


def test_a_step_is_laid_out_as_it_says() -> None:
    rng = random.Random(0)
    first, second = make_sequence(rng, 5, 4), make_sequence(rng, 9, 4)
    first.table.pages, second.table.pages = [7, 3], [2, 9, 4]
    step = Packer(4, CPU).pack((Chunk(first, 4, 1), Chunk(second, 3, 4)))
    assert step.tokens.tolist() == [first.tokens[4], *second.tokens[3:7]]
    assert step.positions.tolist() == [4, 3, 4, 5, 6]
    assert step.layout.slot_mapping.tolist() == [12, 11, 36, 37, 38]
    assert step.layout.page_tables.tolist() == [[7, 3, 0], [2, 9, 4]]
    assert (step.layout.query_start_loc, step.layout.seq_lens) == ([0, 1, 5], [5, 7])
    assert (step.sampled_rows, step.sampled) == ([0], [first])


def test_tokens_that_are_not_known_yet_come_from_the_step_before() -> None:
    rng = random.Random(0)
    first, second, third = (make_sequence(rng, num, 4) for num in (5, 9, 3))
    packer = Packer(4, CPU)
    before = packer.pack((Chunk(second, 8, 1), Chunk(third, 0, 2), Chunk(first, 4, 1)))
    for sequence in (first, second):
        sequence.tokens.append(PENDING)
        sequence.table.pages.append(77)
    plan = (Chunk(first, 5, 1), Chunk(third, 2, 1), Chunk(second, 9, 1))
    step = Packer(4, CPU).pack(plan, before.rows())
    assert step.tokens.tolist() == [0, third.tokens[2], 0]
    step.fill(np.array([40, 41]))
    assert step.tokens.tolist() == [41, third.tokens[2], 40]
    assert step.drawn_at.tolist() == [6, 3, 10]
    # A sequence that is computed again after it has lost its pages, its last token included.
    step = Packer(4, CPU).pack((Chunk(second, 0, 10), Chunk(first, 5, 1)), before.rows())
    step.fill(np.array([40, 41]))
    assert step.tokens.tolist() == [*second.tokens[:9], 40, 41]


def test_what_was_packed_before_changes_nothing() -> None:
    """Page tables grow, shrink and change in the middle; sequences come, go and swap places."""
    rng = random.Random(1)
    for page_size in (1, 16):
        packer, seated = Packer(page_size, CPU), [make_sequence(rng, 3, page_size)]
        for _ in range(300):
            for sequence in seated:
                table = sequence.table.pages
                if rng.random() < 0.3:  # a page was replaced by an older one with equal content
                    table[rng.randrange(len(table))] = rng.randrange(1, 500)
                    sequence.table.version += 1
                if rng.random() < 0.2:
                    sequence.tokens += [1] * page_size
                    table.append(rng.randrange(1, 500))
                    sequence.table.version += 1
            if rng.random() < 0.4:
                seated.append(make_sequence(rng, rng.randint(1, 100), page_size))
            if len(seated) > 1 and rng.random() < 0.4:
                seated.pop(rng.randrange(len(seated)))
            if rng.random() < 0.2:
                rng.shuffle(seated)
            plan: Plan = tuple(
                Chunk(s, start, len(s.tokens) - start)
                for s in rng.sample(seated, rng.randint(1, len(seated)))
                for start in [rng.randrange(len(s.tokens))]
            )
            assert contents(packer.pack(plan)) == contents(Packer(page_size, CPU).pack(plan))
