"""vLLM's CPU backend, offline in one process; VARIANT is its `dtype`."""

from __future__ import annotations

import os

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

    return timed(complete)


if __name__ == "__main__":
    serve(_load)
