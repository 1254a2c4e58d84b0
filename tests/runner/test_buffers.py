"""Tests of a step's buffers, of page tables on a device and of captured work, on the CPU."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from infer.runner.buffers import StepBuffers, StepLayout, TableRows
from infer.runner.graphs import Graphs, Work, padded, row_sizes, step_sizes, token_sizes
from infer.schedule.sequence import Sequence, Status
from infer.types import Request, SamplingParams

CPU = torch.device("cpu")


def sequence(name: str) -> Sequence:
    made = Sequence.from_request(Request(name, (1, 2), SamplingParams(), 0, 1), 0)
    made.status = Status.RUNNING
    return made


def test_columns_do_not_overlap_and_are_the_same_on_both_sides() -> None:
    layout = StepLayout(7, 3, num_updates=5, items=[(4, 2), (1, 0)], num_fields=10)
    buffers = StepBuffers(layout.num_words, 3, CPU)
    host = buffers.next_half(layout)
    for number, column in enumerate(host.values()):
        column[...] = number
    for number, (name, column) in enumerate(host.items()):
        assert (column == number).all(), name
    buffers.send(layout.num_words)
    for name, tensor in buffers.on_device(layout).items():
        assert np.array_equal(tensor.numpy(), host[name]), name
        assert tensor.dtype == getattr(torch, str(host[name].dtype))


def test_a_half_is_not_written_while_the_other_may_be_on_its_way() -> None:
    layout = StepLayout(4, 2, num_updates=1, items=[(1, 1)], num_fields=10)
    buffers = StepBuffers(layout.num_words, 2, CPU)
    first, second, third = (buffers.next_half(layout)["tokens"] for _ in range(3))
    first[...], second[...] = 1, 2
    assert third is first
    assert (first == 1).all()
    buffers.results[:] = torch.tensor([7, 8, 0, 1])
    landed = buffers.fetch(2)
    buffers.next_half(layout)
    buffers.results[:] = 9
    buffers.fetch(2)
    assert landed.tolist() == [[7, 8], [0, 1]], "the next step's results lie on these"


def test_no_more_is_sent_than_a_step_uses() -> None:
    layout = StepLayout(4, 2, num_updates=1, items=[(6, 2), (6, 2)], num_fields=10)
    begin = layout.columns["short_0"].begin
    assert layout.used_words([(0, 0), (0, 0)]) == begin
    assert layout.used_words([(3, 0), (0, 0)]) == begin + 30
    column = layout.columns["long_1"]
    assert layout.used_words([(3, 0), (0, 1)]) == column.begin + 10
    assert layout.used_words([(6, 2), (6, 2)]) <= layout.num_words


def test_a_sequence_keeps_its_row_and_only_changes_are_written() -> None:
    rows = TableRows(3, 5, CPU)
    one, two = sequence("one"), sequence("two")
    assert rows.row(one) == rows.row(one) != rows.row(two)
    row = rows.row(one)
    at = row * rows.width
    assert rows.changes(row, [4, 5]) == ([at, at + 1], [4, 5])
    assert rows.changes(row, [4, 5]) == ([], [])
    assert rows.changes(row, [4, 5, 6]) == ([at + 2], [6])
    assert rows.changes(row, [4, 9, 6]) == ([at + 1], [9])
    assert rows.mirror[row, :3].tolist() == [4, 9, 6]


def test_rows_of_those_who_left_are_used_again() -> None:
    rows = TableRows(2, 4, CPU)
    one, two = sequence("one"), sequence("two")
    row = rows.row(one)
    rows.changes(row, [1, 2, 3])
    kept = rows.row(two)
    one.status = Status.FINISHED
    three = sequence("three")
    assert rows.row(three) == row
    assert rows.row(two) == kept
    at = row * rows.width
    assert rows.changes(row, [1, 7]) == ([at + 1], [7]), "what is written there is known"


def test_who_has_ended_is_forgotten_between_steps() -> None:
    rows = TableRows(16, 4, CPU)
    ended = [give_row_to_one_that_ends(rows, f"{i}") for i in range(6)]
    stays = sequence("stays")
    row = rows.row(stays)
    assert all(ref() is not None for ref in ended), "rows may be in use until the next step"
    rows.begin_step()
    assert all(ref() is None for ref in ended)
    assert rows.row(stays) == row


class Memory:
    """What a sequence holds."""


def give_row_to_one_that_ends(rows: TableRows, name: str) -> weakref.ref[Memory]:
    ends = sequence(name)
    ends.constraint = memory = Memory()
    rows.row(ends)
    ends.status = Status.FINISHED
    return weakref.ref(memory)


def test_sizes() -> None:
    assert row_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert row_sizes(1) == (1,)
    assert token_sizes(300) == (16, 32, 64, 128, 256, 512)
    assert padded(17, (16, 32)) == 32
    assert padded(16, (16, 32)) == 16
    assert padded(33, (16, 32)) is None
    assert step_sizes(300, 20) == [1, 2, 4, 8, 16, 20, 32, 64, 128, 256, 512]


def test_work_is_captured_once_for_each_key_and_replayed_on_the_same_memory() -> None:
    memory, captured = [0, 0], []

    def capture(compute: Work) -> Work:
        captured.append(compute)
        return compute

    def work() -> None:
        memory[1] = memory[0] * 10

    def other() -> None:
        raise AssertionError("the work of the launch that was captured is done, not this")

    def broken() -> None:
        raise ZeroDivisionError

    graphs = Graphs(capture)
    for key, given, compute in (("a", 1, work), ("a", 2, other), ("b", 3, work)):
        memory[0] = given
        graphs.run(key, compute)
        assert memory[1] == given * 10
    assert len(graphs) == len(captured) == 2
    with pytest.raises(ZeroDivisionError):
        graphs.run("c", broken)
    assert len(graphs) == 2, "what has failed is not captured"


def test_what_cannot_be_captured_is_done_each_time(caplog: pytest.LogCaptureFixture) -> None:
    attempts, done = [], []

    def capture(compute: Work) -> Work:
        attempts.append(compute)
        raise RuntimeError("CUDA out of memory")

    graphs = Graphs(capture)
    for _ in range(3):
        graphs.run("a", lambda: done.append(1))
    assert (len(done), len(attempts)) == (3, 1)
    assert "out of memory" in caplog.text
