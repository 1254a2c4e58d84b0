"""`ModelRunner`: executes a plan with a model, an attention backend and the sampler.

pack → backend.plan → model.forward → logits of the sampled rows → sample. The engine core's
`Runner` for real models; it keeps no state between steps but the KV storage and what `Packer`
compares with the plan before it uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.attention.layout import AttentionBackend
from infer.models.model import Model
from infer.runner.pack import Packer
from infer.runner.sampler import sample
from infer.schedule.sequence import Plan, Sampled


class ModelRunner:
    """See the module's docstring."""

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        caches: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        """`caches`: the backend's keys and values, each [pages, page_size, G, D]."""
        self.model = model
        self.backend = backend
        self.device = device
        self._caches = caches
        self._packer = Packer(caches[0].shape[1], device)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> list[Sampled]:
        """Compute every chunk; one result per chunk that samples, in the plan's order."""
        step = self._packer.pack(plan)
        self.backend.plan(step.layout)
        hidden = self.model.forward(step.tokens, step.positions, self.backend.attend)
        if not step.sampled:
            return []
        if len(step.sampled) < len(hidden):
            rows = torch.tensor(step.sampled_rows, device=self.device)
            hidden = hidden.index_select(0, rows)
        return sample(self.model.logits(hidden), step.sampled)

    def poison(self, pages: list[int]) -> None:
        """Fill pages with NaN; for tests, which then see whether anybody reads what is not his."""
        for cache in self._caches:
            cache[pages] = float("nan")
