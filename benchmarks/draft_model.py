"""Tokens a second with and without a draft model whose agreement is set by construction.

`python benchmarks/draft_model.py write FOLDER` writes two checkpoints of Llama 3.2 1B's shape:
`target`, and `draft` with a quarter of the layers. Each token has one successor, which the output
head finds by the embedding of the last token; the layers add little. In the draft's head the
successors of AGREEMENT of all tokens are the same, and those of the others are exchanged. So a
drafted token is right with that probability, whatever came before it.

`python benchmarks/draft_model.py FOLDER [QUANTIZATION]` prints a line of JSON for each number of
streams, from alternating pairs of one engine; the requests of a pair are equal except for
`speculation`. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from infer import LLM, SamplingParams
from infer.models.hub import SHIPPED_FOLDER

AGREEMENT = 0.8
NUM_TOKENS, NUM_PAIRS = 48, 2
WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 2048, 8192, 32, 8, 64, 128256, 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def layer_tensors(number: int) -> dict[str, torch.Tensor]:
    """Random weights of a layer whose output is small."""
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH, 0.02),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH, 0.02),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH, 0.02),
        "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM, 0.001),
        "mlp.gate_proj": (INNER, WIDTH, 0.02),
        "mlp.up_proj": (INNER, WIDTH, 0.02),
        "mlp.down_proj": (WIDTH, INNER, 0.001),
    }
    found = {}
    for name, (out, width, scale) in shapes.items():
        weight = (torch.randn(out, width) * scale).to(torch.bfloat16)
        found[f"model.layers.{number}.{name}.weight"] = weight
    for name in ("input_layernorm", "post_attention_layernorm"):
        found[f"model.layers.{number}.{name}.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    return found


def write(folder: Path) -> None:
    """Write both checkpoints."""
    torch.manual_seed(1)
    embedding = torch.randn(VOCAB, WIDTH).to(torch.bfloat16)
    order = torch.randperm(VOCAB)
    following = torch.empty(VOCAB, dtype=torch.int64)
    following[order] = order.roll(-1)  # one long cycle
    wrong = torch.randperm(VOCAB)[: round((1 - AGREEMENT) * VOCAB)]
    exchanged = following.clone()
    exchanged[wrong] = following[wrong.roll(1)]
    layers = [layer_tensors(number) for number in range(LAYERS)]
    for name, number, successors in (
        ("target", LAYERS, following),
        ("draft", LAYERS // 4, exchanged),
    ):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(SHIPPED_FOLDER / file, place)
        head = torch.empty_like(embedding)
        head[successors] = embedding
        tensors = {
            "model.embed_tokens.weight": embedding,
            "model.norm.weight": torch.ones(WIDTH, dtype=torch.bfloat16),
            "lm_head.weight": head,
        }
        for each in layers[:number]:
            tensors |= each
        save_file(tensors, place / "model.safetensors")
        (place / "config.json").write_text(
            json.dumps({**CONFIG, "num_hidden_layers": number}), encoding="utf-8"
        )


def rate(llm: LLM, num_streams: int, number: int, speculation: bool) -> float:
    """Tokens a second of one round."""
    sampling = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, speculation=speculation
    )
    prompts = [
        {"prompt_token_ids": [(7919 * (100 * number + i) + 31 * j) % VOCAB for j in range(16)]}
        for i in range(num_streams)
    ]
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    took_s = time.perf_counter() - started_s
    return sum(len(output.token_ids) for output in outputs) / took_s


def main() -> None:
    """Write the checkpoints, or measure."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        usage="%(prog)s [-h] write FOLDER\n       %(prog)s [-h] FOLDER [QUANTIZATION]",
    )
    parser.add_argument("first", metavar="write | FOLDER", help="where the checkpoints are")
    parser.add_argument(
        "second", metavar="FOLDER | QUANTIZATION", nargs="?", help="of the draft: int8 or int4"
    )
    options = parser.parse_args()
    if options.first == "write":
        if options.second is None:
            parser.error("write needs the folder to write to")
        write(Path(options.second))
        return
    folder = Path(options.first)
    config = {"method": "draft_model", "model": str(folder / "draft"), "num_speculative_tokens": 6}
    if options.second is not None:
        config["quantization"] = options.second
    with LLM(
        model=str(folder / "target"),
        max_seq_len=512,
        max_batch_size=32,
        kv_cache_pages=1024,
        speculative_config=json.dumps(config),
    ) as llm:
        for num_streams, pairs in ((1, NUM_PAIRS), (32, 1)):
            rates: dict[bool, list[float]] = {True: [], False: []}
            before = llm.stats()
            for number in range(-1 if num_streams == 1 else 0, pairs):
                for speculation in (False, True) if number % 2 else (True, False):
                    found = rate(llm, num_streams, number + 1, speculation)
                    if number >= 0:
                        rates[speculation].append(found)
            ratios = [a / b for a, b in zip(rates[True], rates[False], strict=True)]
            stats = llm.stats()
            drafted, accepted = (
                stats[name] - before[name] for name in ("num_draft_tokens", "num_accepted_tokens")
            )
            print(
                json.dumps(
                    {
                        "streams": num_streams,
                        "plain": round(statistics.median(rates[False]), 2),
                        "draft model": round(statistics.median(rates[True]), 2),
                        "ratio": round(statistics.median(ratios), 3),
                        "drafted": drafted,
                        "accepted": accepted,
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
