"""`ModelRunner`: executes a plan with a model, an attention backend and the sampler.

pack → backend.plan → model.forward → logits of the sampled rows → sample. The engine core's
`Runner` for real models; it keeps no state between steps but the KV storage.
"""

from __future__ import annotations

import torch

from infer.attention.layout import AttentionBackend
from infer.models.model import Model
from infer.runner.pack import pack
from infer.runner.sampler import sample
from infer.schedule.sequence import NOT_FINITE, Plan, Sampled


class ModelRunner:
    """See the module's docstring."""

    def __init__(
        self, model: Model, backend: AttentionBackend, *, page_size: int, device: torch.device
    ) -> None:
        self.model = model
        self.backend = backend
        self.page_size = page_size
        self.device = device

    @torch.inference_mode()
    def execute(self, plan: Plan) -> list[Sampled]:
        """Compute every chunk; one result per chunk that samples, in the plan's order."""
        step = pack(plan, self.page_size, self.device)
        self.backend.plan(step.layout)
        hidden = self.model.forward(step.tokens, step.positions, self.backend.attend)
        if not step.sampled:
            return []
        rows = torch.tensor(step.sampled_rows, device=self.device)
        logits = self.model.logits(hidden.index_select(0, rows))
        finite = logits.amax(dim=-1).isfinite().tolist()  # a NaN anywhere in a row is its maximum
        if all(finite):
            return sample(logits, step.sampled)
        good = [row for row, is_finite in enumerate(finite) if is_finite]
        results = iter(sample(logits[good], [step.sampled[row] for row in good]) if good else ())
        return [next(results) if ok else Sampled(0, error=NOT_FINITE) for ok in finite]
