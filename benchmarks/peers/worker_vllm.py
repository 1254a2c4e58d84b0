"""vLLM's CPU backend, offline in one process; VARIANT is its `dtype`.

Its manual asks for Intel's OpenMP and tcmalloc to be preloaded. OpenMP comes with its environment,
tcmalloc from the system if it is installed.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
from pathlib import Path
from typing import Any

from worker import THREADS, Prompts, arguments, serve, timed

os.environ.update(
    VLLM_CPU_OMP_THREADS_BIND=f"0-{THREADS - 1}",
    VLLM_CPU_KVCACHE_SPACE="2",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)


def _load():
    from vllm import LLM, SamplingParams

    model, dtype = arguments()
    llm = LLM(
        str(model),
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=32,
        enable_prefix_caching=False,
    )

    def complete(prompts: Prompts, output_len: int) -> list[int]:
        params = SamplingParams(
            temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(given, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def score(ids: list[int]) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        each = output.prompt_logprobs[1:]
        best = [next(token for token, one in found.items() if one.rank == 1) for found in each]
        found = [found[token].logprob for found, token in zip(each, ids[1:], strict=True)]
        return {"logprobs": found, "best": best}

    return timed(complete), score


def _preload() -> None:
    """Start this program again with the libraries preloaded."""
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    found = [str(openmp)] if openmp.is_file() else []
    if allocator := ctypes.util.find_library("tcmalloc_minimal"):
        found.append(allocator)
    if found and "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = ":".join(found)
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    _preload()
    serve(_load)
