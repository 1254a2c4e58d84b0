"""OpenVINO GenAI's continuous batching; VARIANT (fp16, int8, int4) is how the weights are exported.

`int8-f32` computes in float32, not in the CPU's default (bfloat16 where it has AMX). With int8
weights that is faster at one request and slower in prefill. The export lies beside the checkpoint
and is made when it is missing. The KV cache is u8, which is the pipeline's default here.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from scoring import scores_of
from worker import THREADS, Prompts, arguments, serve, timed


def _export(model: Path, variant: str) -> Path:
    target = model.with_name(f"{model.name}-openvino-{variant}")
    if not (target / "openvino_model.bin").is_file():
        tool = Path(sys.executable).with_name("optimum-cli")
        command = [tool, "export", "openvino", "--model", model, "--weight-format", variant]
        command += ["--group-size", "64"] if variant == "int4" else []  # 576 inputs are no 128s
        command += ["--task", "text-generation-with-past", target]
        subprocess.run(command, check=True)
    return target


def _load():
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = 32
    scheduler.max_num_batched_tokens = 4096
    scheduler.enable_prefix_caching = False
    model, variant = arguments()
    weights, _, precision = variant.partition("-")
    settings = {"INFERENCE_NUM_THREADS": THREADS}
    if precision:
        settings["INFERENCE_PRECISION_HINT"] = precision
    folder = str(_export(model, weights))
    pipe = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", settings)

    def complete(prompts: Prompts, output_len: int) -> list[int]:
        config = genai.GenerationConfig(max_new_tokens=output_len, ignore_eos=True)
        config.do_sample = False
        given = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        results = pipe.generate(given, [config] * len(given))
        return [len(result.m_generation_ids[0]) for result in results]

    @functools.cache
    def scorer() -> ov.CompiledModel:
        """Compiled when the first text is to be scored: who measures speed has one model only."""
        return ov.Core().compile_model(f"{folder}/openvino_model.xml", "CPU", settings)

    def score(ids: list[int]) -> dict[str, Any]:
        model = scorer()
        request = model.create_infer_request()
        whole = np.array([ids], dtype=np.int64)
        given = {"input_ids": whole, "attention_mask": np.ones_like(whole)}
        given |= {"position_ids": np.arange(len(ids))[None], "beam_idx": np.zeros(1, np.int32)}
        wanted = {name for each in model.inputs for name in each.names}
        request.infer({name: value for name, value in given.items() if name in wanted})
        return scores_of(request.get_tensor("logits").data[0, :-1].astype(np.float32), ids)

    return timed(complete), score


serve(_load)
