"""`ModelRunner`: executes a plan with a model, attention and the sampler; `AheadRunner`"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from infer.attention.layout import AttentionBackend, makes_calls
from infer.kernels.cuda import current
from infer.kernels.layer_stack import AttendsThrough, LayerStack, attends_through
from infer.kernels.loader import NativeCall, page_aligned
from infer.kernels.rotary import Angles, QKRotation
from infer.kernels.team import ForKernels
from infer.main_memory import RETURNED_FROM
from infer.models.model import CalledModel, Model
from infer.runner.ahead_choice import AheadChoice
from infer.runner.device_errors import translated
from infer.runner.grammar_masks import Masks, Restrictions
from infer.runner.pack import NO_ROWS, PackedStep, Packer, Rows
from infer.runner.plain_rows import LANES, PlainRows, PlainSampling, as_results
from infer.runner.prompt_scores import score_prompts, wants_prompt_rows
from infer.runner.sampler import NOTHING, Sampler, SamplerRow, is_plain, sample
from infer.runner.step_thread import Computed, HostFlight, StepThread
from infer.schedule.sequence import Plan, Sampled, Sequence, verified
from infer.types import Request

FEW_TOKENS = 256
"""Number of tokens with which torch uses no second thread, on a core that the kernels need."""


@dataclass(slots=True, eq=False)
class PreparedStep:
    """A step that can be computed without looking at what the scheduler changes."""

    plan: Plan
    packed: PackedStep
    masks: Masks | None
    """Masks of the step's grammars, which are being made; None: it has none."""
    plain: PlainRows | None
    """The sampled rows, if the kernel finds all their tokens."""
    rows: Seq[SamplerRow]
    """What the sampler reads of their sequences otherwise."""
    attend: AttentionBackend
    """Computes attention once the step is planned."""
    has_scores: bool
    """Whether log-probabilities or logits of prompts are asked for."""
    memory: Tensor | None
    """Where its logits are written, [≥ R, V] float32; None: into memory of their own."""


class ModelRunner:
    """The runner for any device.

    The steps are: pack → backend.plan → model.forward → logits of the sampled rows → sample. The
    engine core uses it on CPUs, and on GPUs where the Triton kernels cannot run. It keeps no state
    between steps except the KV storage, the packer's page tables and the parameters of plain rows,
    which are compared with each plan.
    """

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        restrictions: Restrictions | None,
        caches: Seq[Tensor],
        device: torch.device,
        sampler: Sampler = sample,
        threads: AbstractContextManager[None] | None = None,
    ) -> None:
        """`restrictions`: of grammars; None: no request has one. `caches`: the backend's keys and
        values, each [pages, page_size, G, D].

        `sampler`: the function that samples, in place of `runner.sampler.sample`. `threads`: a
        context for steps, which divides the threads between torch and the kernels.
        """
        self.model = model
        self.backend = backend
        self.device = device
        self._restrictions = restrictions
        self._sample = sampler
        self._threads = nullcontext() if threads is None else threads
        self.caches = caches
        self._packer = Packer(caches[0].shape[1], device)
        self._plain = PlainSampling() if sampler is sample and device.type == "cpu" else None
        self._logits_memory: Tensor | None = None

    def execute(self, plan: Plan) -> list[Sampled]:
        """Compute every chunk; one result per chunk that samples, in the plan's order.

        Raises `MemoryError` if the step does not fit into memory.
        """
        try:
            return self._execute(plan)
        except RuntimeError as error:
            raise translated(error) from error

    def _execute(self, plan: Plan) -> list[Sampled]:
        return self._compute(self._prepare(plan, self._packer))

    def _prepare(self, plan: Plan, packer: Packer, before: Rows = NO_ROWS) -> PreparedStep:
        """What is to be computed for a plan; `before`: see `Packer.pack`."""
        masks = None if self._restrictions is None else self._restrictions.begin(plan)
        packed = packer.pack(plan, before)
        plain = None
        if self._plain is not None:
            plain = self._plain.rows(packed.sampled, packed.drawn_at)
        has_scores = any(map(wants_prompt_rows, plan))
        return PreparedStep(
            *(plan, packed, masks, plain, packed.sampled, self.backend, has_scores),
            self._memory_for(len(packed.sampled)),
        )

    def _compute(self, step: PreparedStep) -> list[Sampled]:
        with current(self.device), self._threads, torch.inference_mode():
            return self._forward_and_sample(step)

    def _forward_and_sample(self, step: PreparedStep) -> list[Sampled]:
        plan, packed = step.plan, step.packed
        self.backend.plan(packed.layout)
        hidden = self.model.forward(packed.tokens, packed.positions, step.attend)
        if step.has_scores:
            score_prompts(plan, hidden, self.model.logits)
        if not packed.sampled:
            return []
        if len(packed.sampled) < len(hidden):
            rows = torch.tensor(packed.sampled_rows, device=self.device)
            hidden = hidden.index_select(0, rows)
        logits = self.model.logits(hidden, step.memory)
        if step.plain is not None and logits.shape[1] % LANES == 0:
            return verified(plan, as_results(step.plain.sample(logits)))
        if self._restrictions is None or step.masks is None:
            return verified(plan, self._sample(logits, step.rows, NOTHING))
        forbidden, late = step.masks.in_time()
        results = verified(plan, self._sample(logits, step.rows, forbidden))
        sequences = [chunk.sequence for chunk in plan if chunk.samples]
        return self._restrictions.mark_complete(sequences, results, forbidden, late)

    def _memory_for(self, rows: int) -> Tensor | None:
        """Memory [≥ R, V] for the logits of a step, which are valid until the next step's.

        Large ones have memory of their own: the C library would give it back to the system after
        each step, and its page faults take a sixth of a step with 262,144 tokens."""
        vocab = self.model.lm_head.out_features
        if self.device.type != "cpu" or 4 * rows * vocab < RETURNED_FROM:
            return None
        memory = self._logits_memory
        if memory is None or len(memory) < rows:
            memory = page_aligned(4 * rows * vocab).view(torch.float32).view(rows, vocab)
            self._logits_memory = memory
        return memory


@dataclass(frozen=True, slots=True)
class LaunchedRow:
    """What the sampler reads of the sequence of a plain row, as it was at the launch."""

    request: Request
    tokens: range
    """As long as the sequence's tokens."""
    num_prompt: int
    end_token_ids: frozenset[int] = frozenset()
    num_proposed: int = 0

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def num_output(self) -> int:
        """Number of output tokens before the one that is sampled."""
        return len(self.tokens) - self.num_prompt


class AheadRunner(ModelRunner):
    """The runner for CPUs that works one step ahead.

    Its `launch` packs a step while the one before is being computed, and gives it to a thread that
    computes steps in order (`StepThread`). The thread looks at no sequence, because the scheduler
    changes them meanwhile: whatever the step depends on is written down when it is packed
    (`PreparedStep`). Tokens that are not known yet are filled in when the step begins.

    As with the runner for GPUs, a step with rows that need more than temperature, top-k, top-p and
    min-p, or with scores of prompts, is waited for when it is launched. The core computes steps
    without going ahead where sequences run whose rows do, where the model's layers are computed one
    by one and need the interpreter between them, and where it has been measured to be slower
    (`goes_ahead`).
    """

    def __init__(self, parts: ModelRunner, choice: Callable[[int], bool] | None = None) -> None:
        """`parts`: the runner whose parts it has. `choice`: whether steps of so many sequences go
        ahead, in place of an `AheadChoice`."""
        super().__init__(
            *(parts.model, parts.backend, parts._restrictions, parts.caches, parts.device),
            *(parts._sample, parts._threads),
        )
        self._choice = AheadChoice() if choice is None else choice
        has_stack = getattr(self.model, "stack", None) is not None
        self._is_possible = has_stack and attends_through(self.backend)
        # The tables of one are written while a step reads those of the other.
        self._packers = [self._packer, Packer(self.caches[0].shape[1], self.device)]
        self._thread = StepThread("infer-step")
        self._last: HostFlight | None = None
        self._last_rows = NO_ROWS

    def goes_ahead(self, running: Seq[Sequence]) -> bool:
        """Whether the next step is launched while the one before is being computed.

        `running`: the sequences that may be in it."""
        if not self._is_possible or any(sequence.is_special for sequence in running):
            return False
        decodes = all(sequence.num_remaining == 1 for sequence in running)
        return self._choice(len(running) if decodes else 0)

    def execute(self, plan: Plan) -> list[Sampled]:
        """Compute every chunk in this thread; see `ModelRunner`."""
        if self._last is not None:
            self._last.wait()
            self._last, self._last_rows = None, NO_ROWS
        return super().execute(plan)

    def launch(self, plan: Plan) -> HostFlight:
        """Start computing every chunk; pending tokens come from the launch before.

        Raises what the step raises if it is waited for."""
        try:
            return self._launch(plan)
        except BaseException as error:
            self._last, self._last_rows = None, NO_ROWS  # the caller waits for those before
            if isinstance(error, RuntimeError):
                raise translated(error) from error
            raise

    def _launch(self, plan: Plan) -> HostFlight:
        packer = self._packers[0]
        self._packers.reverse()
        step = self._prepare(plan, packer, self._last_rows)
        packed = step.packed
        plain = step.plain is not None or all(map(is_plain, packed.sampled))
        if plain and step.plain is None:
            step = replace(step, rows=_launched(packed.sampled))

        # What does not depend on the tokens before is made now, while the kernels are busy.
        calls = self._calls(step)

        def compute(flight: HostFlight, before: np.ndarray) -> Computed:
            packed.fill(before)
            return self._compute_in_flight(flight, step, calls)

        flight = HostFlight(compute, self._last)
        self._thread.give(flight)
        self._last, self._last_rows = flight, packed.rows()
        if not plain or step.has_scores:
            flight.results()
        return flight

    def _calls(self, step: PreparedStep) -> StepCalls | None:
        """The step as calls of kernels; None if it needs more."""
        packed, backend, model = step.packed, self.backend, cast("CalledModel", self.model)
        is_decode = len(packed.sampled) == len(packed.tokens) == len(step.plan) <= FEW_TOKENS
        vocab = model.lm_head.out_features
        if step.plain is None or step.has_scores or not is_decode or vocab % LANES:
            return None
        if not (isinstance(self._threads, ForKernels) and makes_calls(backend)):
            return None
        made = model.calls(packed.tokens, packed.positions, backend, step.memory)
        if made is None:
            return None
        tokens = np.empty(len(packed.sampled), np.int64)
        plan, draw = backend.plan_call(packed.layout), step.plain.call(tokens, made.logits)
        is_native = all(isinstance(call, NativeCall) for call in made.before)
        threads = nullcontext() if is_native else self._threads
        return StepCalls(threads, [*made.before, plan], [*made.behind, draw], tokens)

    def _compute_in_flight(
        self, flight: HostFlight, step: PreparedStep, calls: StepCalls | None
    ) -> Computed:
        try:
            if calls is not None:
                return calls.compute(flight.enter_kernels)
            attend = _Entering(self.backend, flight.enter_kernels)
            return Computed.of(self._compute(replace(step, attend=attend)))
        except RuntimeError as error:
            raise translated(error) from error


@dataclass(frozen=True, slots=True, eq=False)
class StepCalls:
    """A step of decoding as calls of kernels."""

    threads: AbstractContextManager[None]
    """Context of those before, where torch makes some."""
    before: Seq[Callable[[], object]]
    """Small ones: look the tokens up, plan attention."""
    behind: Seq[Callable[[], object]]
    """Compute layers and logits, and draw."""
    tokens: np.ndarray
    """Where the last one writes; see `PlainRows`."""

    def compute(self, enter: Callable[[], None]) -> Computed:
        """Make the calls. `enter` is called before those that take their time."""
        with self.threads:
            for call in self.before:
                call()
        enter()
        for call in self.behind:
            call()
        return Computed(self.tokens, lambda: as_results(self.tokens.tolist()))


class _Entering(AttendsThrough):
    """An attention backend that says when the layers begin, which need no interpreter."""

    def __init__(self, backend: AttentionBackend, enter: Callable[[], None]) -> None:
        """`enter` is called where the layers begin."""
        self.plan, self._backend, self._enter = backend.plan, backend, enter

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation | None = None
    ) -> Tensor:
        """See `AttentionBackend`."""
        return self._backend(layer, q, k, v, rotation)

    def through(
        self,
        stack: LayerStack,
        x: Tensor,
        angles: Seq[Angles | None],
        growth: Tensor | None = None,
    ) -> Tensor:
        """See `AttendsThrough`."""
        self._enter()
        if attends_through(self._backend):
            return self._backend.through(stack, x, angles, growth)
        return stack.one_by_one(self._backend, x, angles, growth)


def _launched(sequences: Seq[Sequence]) -> list[LaunchedRow]:
    return [
        LaunchedRow(sequence.request, range(len(sequence.tokens)), sequence.num_prompt)
        for sequence in sequences
    ]
