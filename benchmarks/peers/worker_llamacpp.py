"""llama.cpp without HTTP: its own llama-batched-bench; VARIANT is bf16, q8_0, q4_0 or q4_k_m.

The tool runs the prompts of the whole batch, then one decode step after the other, without sampling
and text, and so is faster than llama-server. The last position of a prompt gives the first token,
so output_len - 1 steps follow. The tool makes its own prompts, warms up, and does not count
loading. Flash attention is off, because it was slower at 8 and 32 sequences. The GGUF files lie
beside the checkpoint and are made when they are missing. `convert` runs in a process of its own,
because it replaces the converter's check that it knows the tokenizer; it does not know ours. Kept
to AVX2 (INFER_ISA), the tool loads its products from a second build without AVX-512.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

from worker import THREADS, Prompts, arguments, serve

ROOT = Path(sys.prefix)


def convert(model: str, target: str) -> None:
    """Makes the bf16 GGUF file of a checkpoint with any tokenizer."""
    sys.path.insert(0, str(ROOT / "src"))
    from conversion.base import TextModel
    from conversion.phi import Phi3MiniModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
    Phi3MiniModel.set_vocab = TextModel._set_vocab_gpt2
    sys.argv = ["convert", model, "--outtype", "bf16", "--outfile", target]
    runpy.run_path(str(ROOT / "src" / "convert_hf_to_gguf.py"), run_name="__main__")


def _file(model: Path, variant: str) -> Path:
    target = model.with_name(f"{model.name}-{variant}.gguf")
    if not target.is_file():
        part = target.with_suffix(".part")
        if variant == "bf16":
            command = [sys.executable, __file__, "convert", model, part]
        else:
            tool = ROOT / "build/bin/llama-quantize"
            command = [tool, _file(model, "bf16"), part, variant.upper()]
        subprocess.run(command, check=True)
        part.rename(target)
    return target


def _load():
    file = _file(*arguments())

    def run(prompts: Prompts, output_len: int) -> tuple[float, int]:
        num, input_len = len(prompts), len(prompts[0])
        room = -(-(input_len + output_len) // 256) * 256
        options = {"-m": file, "-t": THREADS, "-c": num * room, "-npp": input_len}
        options |= {"-ntg": max(1, output_len - 1), "-npl": num, "--output-format": "jsonl"}
        command = [str(ROOT / "build/bin/llama-batched-bench"), "-fa", "off"]
        for name, value in options.items():
            command += [name, str(value)]
        environment = dict(os.environ)
        if environment.get("INFER_ISA") == "avx2":
            environment["LD_LIBRARY_PATH"] = str(ROOT / "build-avx2/bin")
        done = subprocess.run(
            command, check=True, text=True, capture_output=True, env=environment, encoding="utf-8"
        )
        lines = (done.stdout + done.stderr).splitlines()
        record = json.loads(next(line for line in lines if line.startswith('{"n_kv_max"')))
        if output_len == 1:  # the tool wants a step: not counted
            return record["t_pp"], num
        return record["t"], num * (record["tg"] + 1)

    return run


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(*sys.argv[2:4])
    else:
        serve(_load, needs_warmup=False)
