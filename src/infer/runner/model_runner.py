"""`ModelRunner`: executes a plan with a model, an attention backend and the sampler.

The steps are: pack → backend.plan → model.forward → logits of the sampled rows → sample. The engine
core uses it on CPUs, and on GPUs where the Triton kernels cannot run. It keeps no state between
steps except the KV storage and the packer's page tables, which are compared with each plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from infer.attention.layout import AttentionBackend
from infer.kernels.cuda import current
from infer.models.model import Model
from infer.runner.device_errors import translated
from infer.runner.grammar_masks import Restrictions
from infer.runner.pack import Packer
from infer.runner.prompt_scores import score_prompts
from infer.runner.sampler import NOTHING, Sampler, sample
from infer.schedule.sequence import Plan, Sampled, verified


class ModelRunner:
    """The runner for any device. See the module's docstring."""

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        restrictions: Restrictions | None,
        caches: Sequence[Tensor],
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

    def execute(self, plan: Plan) -> list[Sampled]:
        """Compute every chunk; one result per chunk that samples, in the plan's order.

        Raises `MemoryError` if the step does not fit into memory.
        """
        try:
            with current(self.device), self._threads:
                return self._execute(plan)
        except RuntimeError as error:
            raise translated(error) from error

    @torch.inference_mode()
    def _execute(self, plan: Plan) -> list[Sampled]:
        restrictions = self._restrictions
        restricting = None if restrictions is None else restrictions.begin(plan)
        step = self._packer.pack(plan)
        self.backend.plan(step.layout)
        hidden = self.model.forward(step.tokens, step.positions, self.backend)
        score_prompts(plan, hidden, self.model.logits)
        if not step.sampled:
            return []
        if len(step.sampled) < len(hidden):
            rows = torch.tensor(step.sampled_rows, device=self.device)
            hidden = hidden.index_select(0, rows)
        logits = self.model.logits(hidden)
        if restrictions is None or restricting is None:
            return verified(plan, self._sample(logits, step.sampled, NOTHING))
        forbidden, late = restricting.in_time()
        results = verified(plan, self._sample(logits, step.sampled, forbidden))
        sequences = [chunk.sequence for chunk in plan if chunk.samples]
        return restrictions.mark_complete(sequences, results, forbidden, late)
