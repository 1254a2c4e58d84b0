"""`DeviceRunner`: executes plans on a GPU, one step ahead of the host."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infer.attention.layout import DeviceBackend
from infer.kernels.cuda import current
from infer.kernels.cuda.draw import DrawBuffers, draw
from infer.kernels.cuda.launch import compiled_together
from infer.kernels.cuda.step import begin
from infer.models.model import Model
from infer.runner.buffers import StepBuffers, StepLayout, TableRows
from infer.runner.device_errors import translated
from infer.runner.grammar_masks import Masks, Restrictions
from infer.runner.graphs import (
    MIXED_ROWS,
    Graphs,
    padded,
    row_sizes,
    step_sizes,
    token_sizes,
)
from infer.runner.prompt_scores import score_prompts, wants_prompt_rows
from infer.runner.sampler import SamplerRow, is_plain, sample
from infer.runner.step_writer import StepWriter, sampling_columns
from infer.schedule.sequence import NOT_FINITE, Chunk, Plan, Sampled, Sequence
from infer.types import Request, SamplingParams


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class DeviceFlight:
    """A step that has been launched."""

    def __init__(
        self,
        pinned_output: np.ndarray,
        num_rows: int,
        special: dict[int, Sampled],
        events: tuple[torch.cuda.Event, torch.cuda.Event] | None,
    ) -> None:
        """`pinned_output` [2, ≥ num_rows]: host buffer of tokens and flags, valid after the second
        event.

        `special`: the results, by row, that are known already.
        """
        self._pinned_output = pinned_output
        self._num_rows = num_rows
        self._special = special
        self.events = events
        """Device events before the step and after the copy of its results; None on a CPU."""

    def results(self) -> list[Sampled]:
        """Wait for the step; one result per chunk that samples, in the plan's order."""
        if self.events is not None:
            try:
                self.events[1].synchronize()
            except RuntimeError as error:
                raise translated(error) from error
        tokens, flags = self._pinned_output[:, : self._num_rows].tolist()
        results = [Sampled(token) for token in tokens]
        for row in compress(range(self._num_rows), flags):
            results[row] = Sampled(0, error=NOT_FINITE)
        for row, result in self._special.items():
            results[row] = result
        return results

    def elapsed_ms(self) -> float | None:
        """The step's time on the device in milliseconds, known after `results`; None on a CPU."""
        return None if self.events is None else self.events[0].elapsed_time(self.events[1])


@dataclass(frozen=True, slots=True)
class _SentStep:
    """A step whose numbers are being copied to the device."""

    layout: StepLayout
    tensors: dict[str, Tensor]
    """Columns of the device's buffer by name; see `StepLayout`."""
    decode: bool
    """Whether every sequence has one token, for which attention has a kernel of its own."""
    has_long: bool
    """Whether attention has tiles of many queries."""


class DeviceRunner:
    """The runner for GPUs.

    `launch` writes a step into buffers at fixed addresses, sends them with one copy and starts the
    computation: by replaying a CUDA graph if the step's size has been captured, otherwise kernel by
    kernel. The host waits once per step, for the copy of the sampled tokens, and only when the
    results are requested.

    The device reads tokens that the host does not know yet from the results of the previous step.
    Rows that need more than temperature, top-k, top-p and min-p (log-probabilities, biases,
    penalties, grammars) go through `runner.sampler`, which changes their logits and has the same
    kernels draw from these. A step with such rows is waited for when it is launched.
    """

    def __init__(
        self,
        model: Model,
        backend: DeviceBackend,
        restrictions: Restrictions,
        caches: Seq[Tensor],
        device: torch.device,
        *,
        max_tokens: int,
        max_sequences: int,
        max_seq_len: int,
        graphs: Graphs,
        sizes: Iterable[int] | None = None,
    ) -> None:
        """`caches`: the backend's keys and values, each [pages, page_size, G, D].

        A step has at most `max_tokens` tokens of at most `max_sequences` sequences. `graphs` holds
        the captured steps. `sizes`: the numbers of rows to which steps are padded; None: those of
        `step_sizes`. `ValueError` if no size has room for the largest step.
        """
        self.model, self.backend, self.device, self.caches = model, backend, device, caches
        self._restrictions = restrictions
        self._page_size = caches[0].shape[1]
        self._max_sequences = max_sequences
        allowed = set(step_sizes(max_tokens, max_sequences) if sizes is None else sizes)
        rows, tokens = row_sizes(max_sequences), token_sizes(max_tokens)
        self._row_sizes = tuple(sorted(allowed.intersection(rows)))
        self._token_sizes = tuple(sorted(allowed.intersection(tokens)))
        if not self._row_sizes or self._row_sizes[-1] < max_sequences:
            raise ValueError(f"no size has room for {max_sequences} rows")
        if not self._token_sizes or self._token_sizes[-1] < max_tokens:
            raise ValueError(f"no size has room for {max_tokens} tokens")
        self._mixed_rows = tuple(
            sorted({padded(rows, self._row_sizes) or 0 for rows in (*MIXED_ROWS, max_sequences)})
        )
        max_sequences, max_tokens = self._row_sizes[-1], self._token_sizes[-1]
        pages = -(-max_seq_len // self._page_size) + 1
        self._rows = TableRows(3 * max_sequences, pages, device)
        self._layouts: dict[tuple[int, int], StepLayout] = {}
        largest = self._layout(max_tokens, max_sequences)
        self.buffers = StepBuffers(largest.num_words, max_sequences, device)
        self._ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        vocab = model.config.vocab_size
        self._draws = DrawBuffers(max_sequences, vocab, device)
        self._logits = torch.empty((max_sequences, vocab), dtype=torch.float32, device=device)
        """Logits of the last step with rows for which the first draw is not enough."""
        self.graphs = graphs
        self._writer = StepWriter(backend, self._rows, self._page_size, vocab)
        self._plain: list[Sequence] = []
        """Sequences of the last step if each had one token and the kernels could sample all."""

    def compile(self, steps: Iterable[tuple[int, int]]) -> None:
        """Compile the kernels of steps, all at the same time.

        `steps`: the arguments of `rehearse` for each. Torch's operations are executed.
        """
        with torch.inference_mode(), current(self.device), compiled_together():
            for num_sequences, num_tokens in steps:
                plan = self._rehearsal(num_sequences, num_tokens)
                sent = self._send(plan, [chunk.sequence for chunk in plan])
                self._sample(self._forward(sent), sent)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()  # the host's buffer may be written again
        self._rows.forget()  # no kernel has written the page tables

    def rehearse(self, num_sequences: int, num_tokens: int) -> None:
        """Execute a step of `num_sequences` made-up sequences of `num_tokens` tokens each.

        The first step of a size compiles kernels, captures a graph and allocates memory; a
        rehearsal does this before the first request. It overwrites the first pages of the cache.
        """
        self.execute(self._rehearsal(num_sequences, num_tokens))

    def _rehearsal(self, num_sequences: int, num_tokens: int) -> Plan:
        table = list(range(1, 1 + -(-num_tokens // self._page_size)))
        assert len(table) < self.caches[0].shape[0], "the cache is too small to rehearse"
        plan = []
        for i in range(num_sequences):
            request = Request(f"rehearsal-{i}", (0,) * num_tokens, SamplingParams(), i, 1)
            sequence = Sequence.from_request(request, i)
            sequence.table.pages = table
            plan.append(Chunk(sequence, 0, num_tokens))
        return tuple(plan)

    def execute(self, plan: Plan) -> list[Sampled]:
        """Compute every chunk and wait; one result per chunk that samples, in the plan's order."""
        return self.launch(plan).results()

    def launch(self, plan: Plan) -> DeviceFlight:
        """Start computing every chunk.

        Raises `MemoryError` if the step does not fit into memory, and `DeviceLostError` if the
        device has failed.
        """
        try:
            with torch.inference_mode(), current(self.device):
                return self._launch(plan)
        except BaseException as error:
            # Neither what the device has sampled last nor its page tables are known any more.
            self._plain = []
            self._writer.forget()
            self._rows.forget()
            if isinstance(error, RuntimeError):
                raise translated(error) from error
            raise

    def _launch(self, plan: Plan) -> DeviceFlight:
        # As `Chunk.samples` says, without a call for each of hundreds of chunks.
        sampling = [
            chunk.sequence
            for chunk in plan
            if chunk.start + chunk.num_tokens == len(chunk.sequence.tokens)
        ]
        events = (_event(), _event()) if self.device.type == "cuda" else None
        sent = self._send(plan, sampling, begun=events and events[0])
        # Rows that were plain remain so, and no token of a prompt follows.
        was_plain = sent.decode and sampling == self._plain
        is_special = not was_plain and not all(map(is_plain, sampling))
        wants_scores = not was_plain and any(map(wants_prompt_rows, plan))
        self._plain = sampling if sent.decode and not is_special else []
        restricting = self._restrictions.begin(plan) if is_special or not sent.decode else None

        def compute() -> None:
            hidden = self._forward(sent)
            if wants_scores:
                score_prompts(plan, hidden, self._padded_logits)
            logits = self._sample(hidden, sent)
            if is_special:
                # The memory of a captured step's own logits is also that of other steps.
                self._logits[: logits.shape[0]].copy_(logits)

        layout = sent.layout
        if wants_scores:
            compute()
        else:
            key = (layout.num_tokens, layout.num_rows, sent.decode, sent.has_long, is_special)
            self.graphs.run(key, compute)
        special: dict[int, Sampled] = {}
        if is_special:
            special = self._sample_special(sampling, restricting)
        pinned_output = self.buffers.fetch(layout.num_rows)
        if events is not None:
            events[1].record()
        return DeviceFlight(pinned_output, len(sampling), special, events)

    def _send(
        self, plan: Plan, sampling: list[Sequence], begun: torch.cuda.Event | None = None
    ) -> _SentStep:
        """Write a step, record the event `begun`, and start copying the step to the device."""
        num_tokens = sum(chunk.num_tokens for chunk in plan)
        decode = num_tokens == len(plan) == len(sampling) and self.backend.decodes
        layout = self._choose(num_tokens, len(sampling), decode)
        host = self.buffers.next_half(layout)
        if decode:
            items = self._writer.write_decode(plan, layout, host)
        else:
            items = self._writer.write(plan, sampling, layout, host)
        if begun is not None:
            begun.record()
        self.buffers.send(layout.used_words([(len(i.short), len(i.long)) for i in items]))
        has_long = any(len(i.long) for i in items)
        return _SentStep(layout, self.buffers.on_device(layout), decode, has_long)

    def _layout(self, num_tokens: int, num_rows: int) -> StepLayout:
        layout = self._layouts.get((num_tokens, num_rows))
        if layout is None:
            items = self.backend.capacity(num_tokens, min(num_tokens, self._max_sequences))
            layout = StepLayout(
                num_tokens,
                num_rows,
                num_updates=2 * num_rows + self._rows.width,
                items=[items] * len(self.backend.windows),
                num_fields=self.backend.num_fields,
            )
            self._layouts[num_tokens, num_rows] = layout
        return layout

    def _choose(self, num_tokens: int, num_sampled: int, decode: bool) -> StepLayout:
        """The buffer layout to which a step is padded."""
        if decode:
            rows = padded(num_tokens, self._row_sizes)
            assert rows is not None, "more sequences than seats"
            return self._layout(rows, rows)
        tokens = padded(num_tokens, self._token_sizes)
        assert tokens is not None, "more tokens than a step may have"
        # Each pair (tokens, rows) is a graph of its own, so there are few numbers of rows.
        rows = padded(num_sampled, self._mixed_rows)
        assert rows is not None, "more sequences than seats"
        return self._layout(tokens, rows)

    def _forward(self, sent: _SentStep) -> Tensor:
        """Compute the model's hidden states [T, E] of a step."""
        tensors = sent.tensors
        tokens = tensors["tokens"]
        ids = self._ids[: tokens.shape[0]]
        updates = (tensors["places"], tensors["pages"], tensors["num_updates"])
        begin(tokens, self.buffers.results, ids, self._rows.tables, updates)
        lists = []
        for window in range(len(self.backend.windows)):
            long = tensors[f"long_{window}"]
            lists.append(
                (
                    tensors[f"short_{window}"],
                    tensors[f"num_short_{window}"],
                    long if sent.has_long else long[:0],
                    tensors[f"num_long_{window}"],
                )
            )
        self.backend.use(tensors["slots"], self._rows.tables, lists, decode=sent.decode)
        return self.model.forward(ids, tensors["positions"], self.backend)

    def _sample(self, hidden: Tensor, sent: _SentStep) -> Tensor:
        """Sample every row; returns the rows' logits [R, V]."""
        tensors = sent.tensors
        if not sent.decode:
            hidden = hidden.index_select(0, tensors["sampled_rows"])
        logits = self.model.logits(hidden)
        rows = logits.shape[0]
        draw(
            logits,
            self._draws,
            temperatures=tensors["temperatures"],
            narrowed=tensors["narrowed"],
            top_ks=tensors["top_ks"],
            top_ps=tensors["top_ps"],
            min_ps=tensors["min_ps"],
            seeds=tensors["seeds"],
            positions=tensors["draw_positions"],
            tokens=self.buffers.results[:rows],
            flags=self.buffers.results[rows : 2 * rows],
        )
        return logits

    def _sample_special(
        self, sampling: list[Sequence], restricting: Masks | None
    ) -> dict[int, Sampled]:
        """The results, by row, of sequences for which the first draw is not enough; waits for the
        step. `self._logits` has the rows of the sequences `sampling`."""
        rows = [row for row, sequence in enumerate(sampling) if not is_plain(sequence)]
        members = torch.tensor(rows, device=self.device)
        sequences = [sampling[row] for row in rows]
        forbidden, late = ({}, set()) if restricting is None else restricting.in_time()
        logits = self._logits.index_select(0, members)
        results = sample(logits, sequences, forbidden, draw=self._draw)
        if restricting is not None:
            results = self._restrictions.mark_complete(sequences, results, forbidden, late)
        tokens = torch.tensor([result.token_id for result in results], dtype=torch.int32)
        self.buffers.results.index_copy_(0, members, tokens.to(self.device))
        return dict(zip(rows, results, strict=True))

    def _draw(self, rows: Tensor, sequences: Seq[SamplerRow]) -> list[int]:
        """A token for each row of logits [R, V], by the kernels that draw for all other rows."""
        columns = sampling_columns(sequences, rows.shape[1])
        columns["positions"] = np.array([len(s.tokens) for s in sequences], np.int32)
        drawn = torch.empty((2, len(sequences)), dtype=torch.int32, device=self.device)
        sent = {name: torch.from_numpy(made).to(self.device) for name, made in columns.items()}
        draw(rows, self._draws, **sent, tokens=drawn[0], flags=drawn[1])
        tokens: list[int] = drawn[0].tolist()
        return tokens

    def _padded_logits(self, hidden: Tensor) -> Tensor:
        """The logits [n, V] of hidden states [n, E], in a product of one of the steps' sizes."""
        count = hidden.shape[0]
        size = padded(count, self._token_sizes)
        assert size is not None, "more rows than a step may have"
        return self.model.logits(F.pad(hidden, (0, 0, 0, size - count)))[:count]
