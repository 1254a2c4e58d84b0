"""`StepWriter`: writes a plan into a step's buffer on the host."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from infer.attention.layout import DeviceBackend, Items
from infer.runner.buffers import StepLayout, TableRows
from infer.runner.sampler import SamplerRow
from infer.schedule.sequence import PENDING, Chunk, Plan, Sequence

_MASK64 = (1 << 64) - 1
_SIGN64 = 1 << 63
Host = dict[str, np.ndarray]
"""Columns of a host buffer by name; see `StepLayout`."""


class StepWriter:
    """Writes plans into host buffers.

    Only this module reads `Sequence`s to make the model's inputs on a GPU. The most frequent step,
    in which the same sequences decode one more token, costs the host little. The columns that
    depend on the requests are kept, positions grow by one, tokens are the results of the previous
    step, and cells come from a host copy of the page tables. Any other step is written chunk by
    chunk.
    """

    def __init__(
        self, backend: DeviceBackend, rows: TableRows, page_size: int, vocab_size: int
    ) -> None:
        """`rows`: the page tables on the device; `page_size`: number of cells of a page."""
        self._backend, self._rows = backend, rows
        self._page_size, self._vocab_size = page_size, vocab_size
        self._sampled_row: dict[int, int] = {}
        """Row of each sequence among the sampled rows of the last step, by `id(sequence)`."""
        self._decoding: list[Sequence] = []
        """Sequences of the last step, in order, if each had one token; otherwise empty."""
        self._table_rows = np.empty(0, np.int32)
        """Row of each of these sequences in the page tables, [B] int32."""
        self._versions: list[int] = []
        """Version of each of these sequences' page tables when it was written."""
        self._sampling: Host = {}
        """Columns that depend on these sequences' sampling parameters."""

    def write(
        self, plan: Plan, sampling: list[Sequence], layout: StepLayout, host: Host
    ) -> Seq[Items]:
        """Write a step of any chunks; returns its attention items, for each window.

        `sampling`: the sequences that sample, in the plan's order. `host`: the columns to fill.
        """
        self._rows.begin_step()
        tokens: list[int] = []
        table_rows, sampled_rows = [], []
        updates: tuple[list[int], list[int]] = ([], [])
        for chunk in plan:
            sequence = chunk.sequence
            table_rows.append(row := self._rows.row(sequence))
            self._update(row, sequence.table.pages, updates)
            self._add_tokens(chunk, tokens)
            if chunk.samples:
                sampled_rows.append(len(tokens) - 1)
        count = len(tokens)
        rows = np.array(table_rows, np.int32)
        counts = np.array([chunk.num_tokens for chunk in plan], np.int32)
        firsts = np.array([chunk.start for chunk in plan], np.int32)
        starts = np.zeros(len(plan) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        positions = np.arange(count, dtype=np.int32) + np.repeat(firsts - starts[:-1], counts)
        pages = self._rows.mirror[np.repeat(rows, counts), positions // self._page_size]
        host["tokens"][:count] = tokens
        host["positions"][:count] = positions
        host["slots"][:count] = pages * self._page_size + positions % self._page_size
        host["sampled_rows"][: len(sampled_rows)] = sampled_rows
        host["sampled_rows"][len(sampled_rows) :] = 0
        _pad_tokens(host, count)
        self._write_updates(updates, layout, host)
        _copy(sampling_columns(sampling, self._vocab_size), host, len(sampling))
        host["draw_positions"][: len(sampling)] = [len(s.tokens) for s in sampling]
        self._decoding = []
        self._remember(sampling)
        return self._write_items(starts, firsts + counts, rows, host)

    def write_decode(self, plan: Plan, layout: StepLayout, host: Host) -> Seq[Items]:
        """Write a step in which every sequence has one token and samples the next one.

        Returns the attention items, for each window.
        """
        sequences = [chunk.sequence for chunk in plan]
        count = len(sequences)
        positions = np.array([chunk.start for chunk in plan], np.int32)
        if sequences == self._decoding:
            # Each token is the result of the same row in the last step, which the host may not
            # know yet.
            host["tokens"][:count] = -1 - np.arange(count, dtype=np.int32)
        else:
            self._rows.begin_step()
            host["tokens"][:count] = [self._token(chunk) for chunk in plan]
            self._table_rows = np.array([self._rows.row(s) for s in sequences], np.int32)
            self._versions = [-1] * count
            self._sampling = sampling_columns(sequences, self._vocab_size)
            self._decoding = sequences
            self._remember(sequences)
        updates: tuple[list[int], list[int]] = ([], [])
        versions = [sequence.table.version for sequence in sequences]
        if versions != self._versions:
            for i, version in enumerate(versions):
                if version != self._versions[i]:
                    self._update(int(self._table_rows[i]), sequences[i].table.pages, updates)
            self._versions = versions
        self._write_updates(updates, layout, host)
        size = self._page_size
        pages = self._rows.mirror[self._table_rows, positions // size]
        host["positions"][:count] = positions
        host["slots"][:count] = pages * size + positions % size
        _pad_tokens(host, count)
        _copy(self._sampling, host, count)
        host["draw_positions"][:count] = positions + 1
        starts = np.arange(count + 1, dtype=np.int32)
        return self._write_items(starts, positions + 1, self._table_rows, host)

    def forget(self) -> None:
        """Assume nothing of the last step's results; its tokens are known to the host."""
        self._decoding = []

    def _remember(self, sampling: list[Sequence]) -> None:
        self._sampled_row = {id(sequence): row for row, sequence in enumerate(sampling)}

    def _token(self, chunk: Chunk) -> int:
        """The token of a chunk of one token; -1 - r if the last step samples it in its row r."""
        token = chunk.sequence.tokens[chunk.start]
        return -1 - self._sampled_row[id(chunk.sequence)] if token == PENDING else token

    def _add_tokens(self, chunk: Chunk, tokens: list[int]) -> None:
        sequence, start = chunk.sequence, chunk.start
        if chunk.num_tokens == 1:
            tokens.append(self._token(chunk))
            return
        part = sequence.tokens[start : start + chunk.num_tokens]
        if part[-1] == PENDING:
            part[-1] = -1 - self._sampled_row[id(sequence)]
        tokens += part

    def _update(self, row: int, pages: list[int], updates: tuple[list[int], list[int]]) -> None:
        indices, values = self._rows.changes(row, pages)
        updates[0].extend(indices)
        updates[1].extend(values)

    def _write_updates(
        self, updates: tuple[list[int], list[int]], layout: StepLayout, host: Host
    ) -> None:
        indices, pages = updates
        if len(indices) > layout.num_updates:
            # Many long prompts at once have more updates than the buffer has room for. A separate
            # copy writes them; the device executes it before the step.
            tables = self._rows.tables
            at = torch.tensor(indices, dtype=torch.int64).to(tables.device)
            values = torch.tensor(pages, dtype=torch.int32).to(tables.device)
            tables.view(-1).index_copy_(0, at, values)
            indices, pages = [], []
        host["num_updates"][0] = len(indices)
        host["places"][: len(indices)] = indices
        host["pages"][: len(pages)] = pages

    def _write_items(
        self,
        starts: Seq[int] | np.ndarray,
        lengths: Seq[int] | np.ndarray,
        rows: np.ndarray,
        host: Host,
    ) -> Seq[Items]:
        made = self._backend.items(starts, lengths, rows)
        for window, items in enumerate(made):
            for name, array in (("short", items.short), ("long", items.long)):
                host[f"num_{name}_{window}"][0] = len(array)
                host[f"{name}_{window}"][: len(array)] = array
        return made


def _pad_tokens(host: Host, count: int) -> None:
    host["tokens"][count:] = 0
    host["positions"][count:] = 0
    host["slots"][count:] = -1


def _copy(columns: Host, host: Host, count: int) -> None:
    """Fill the columns of the first `count` sampled rows; the padding rows become greedy."""
    for name, values in columns.items():
        host[name][:count] = values
    host["temperatures"][count:] = 0
    host["narrowed"][count:] = 0


def sampling_columns(sampling: Seq[SamplerRow], vocab_size: int) -> Host:
    """The indices that depend on the sequences' sampling parameters, as `kernels.cuda.draw` takes
    them."""
    params = [sequence.request.sampling for sequence in sampling]
    seeds = [sequence.request.seed & _MASK64 for sequence in sampling]
    narrowed = [p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params]
    return {
        "seeds": np.array([seed - 2 * (seed & _SIGN64) for seed in seeds], np.int64),
        "temperatures": np.array([p.temperature for p in params], np.float32),
        "top_ps": np.array([p.top_p for p in params], np.float32),
        "min_ps": np.array([p.min_p for p in params], np.float32),
        "top_ks": np.array([max(0, min(p.top_k, vocab_size)) for p in params], np.int32),
        "narrowed": np.array(narrowed, np.int32),
    }
