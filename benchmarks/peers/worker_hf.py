"""transformers' `generate` with its SDPA attention; VARIANT is a torch dtype."""

from __future__ import annotations

from typing import Any

import torch
from scoring import scores_of
from transformers import AutoModelForCausalLM
from worker import THREADS, Prompts, arguments, serve, timed


def _load():
    torch.set_num_threads(THREADS)
    model_path, dtype = arguments()
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    settings = model.generation_config
    settings.do_sample, settings.temperature, settings.top_p = False, None, None
    settings.eos_token_id, settings.pad_token_id = None, 0

    def complete(prompts: Prompts, output_len: int) -> list[int]:
        ids = torch.tensor(prompts)  # equal lengths: nothing to pad
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=output_len
            )
        return [out.shape[1] - ids.shape[1]] * len(prompts)

    def score(ids: list[int]) -> dict[str, Any]:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        return scores_of(logits.float().numpy(), ids)

    return timed(complete), score


serve(_load)
