"""Our engine in this process, through `infer.LLM`; VARIANT is its `dtype`.

`q4_k_m.gguf`, for example, runs the GGUF file that llama.cpp's worker has made beside the
checkpoint.
"""

from __future__ import annotations

from worker import THREADS, Prompts, arguments, serve, timed

from infer import LLM, SamplingParams


def _load():
    model, dtype = arguments()
    if dtype.endswith(".gguf"):
        model, dtype = model.with_name(f"{model.name}-{dtype}"), "auto"
    llm = LLM(
        str(model),
        dtype=dtype,
        device="cpu",
        max_seq_len=2048,
        max_batch_size=32,
        num_threads=THREADS,
        kv_cache_memory_bytes=2 << 30,
    )

    def complete(prompts: Prompts, output_len: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output.token_ids) for output in outputs]

    return timed(complete)


serve(_load)
