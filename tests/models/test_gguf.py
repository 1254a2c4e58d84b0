"""Tests of loading GGUF files, which the `gguf` package writes from transformers' models.

The reference is transformers' model with exactly the weights of the file, dequantised by the
package. The logits are compared in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from infer import LLM, SamplingParams
from infer.errors import LoadError
from infer.models.gguf_blocks import readable_types
from infer.models.gguf_file import GGUFFile
from tests.support.checkpoints import END_ID, EOS_ID, make_model, write_tokenizer
from tests.support.gguf_files import dense_logits, write, write_gpt2
from tests.support.model_shapes import LINEAR, LLAMA3, YARN
from tests.support.parity import deviation, reference, tokens_of

TOLERANCE = 2e-4


def assert_same(path: Path, theirs: Any) -> None:
    tokens = tokens_of(150)
    assert deviation(dense_logits(GGUFFile(path), tokens), reference(theirs, tokens)) <= TOLERANCE


GEMMA_LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
GEMMA = {"query_pre_attn_scalar": 24}  # head_dim, which llama.cpp assumes
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, one kv head, odd head_dim": (
        "llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 24},
    ),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear rope": ("llama", {"rope_parameters": LINEAR}),
    "yarn rope": ("llama", {"rope_parameters": {**YARN, "beta_fast": 2.0, "beta_slow": 0.25}}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", GEMMA),
    "gemma3, scaled global rope": ("gemma3", {**GEMMA, "rope_parameters": GEMMA_LINEAR}),
    "gemma3, soft-capped": ("gemma3", {**GEMMA, "final_logit_softcapping": 5.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    arch, shape = CASES[case]
    keys: dict[str, Any] = (
        {"final_logit_softcapping": 5.0} if "final_logit_softcapping" in shape else {}
    )
    theirs = write(tmp_path / "m.gguf", arch, make_model(arch, **shape), **keys)
    assert GGUFFile(tmp_path / "m.gguf").config.dtype == "float32"
    assert_same(tmp_path / "m.gguf", theirs)


def test_mistral3(tmp_path: Path) -> None:
    shape: dict[str, Any] = {
        "head_dim": 24,
        "sliding_window": None,
        "rope_parameters": {**YARN, "beta_fast": 2.0, "beta_slow": 0.25},
    }
    theirs = write(tmp_path / "m.gguf", "mistral3", make_model("mistral", **shape))
    assert GGUFFile(tmp_path / "m.gguf").config.architecture == "MistralForCausalLM"
    assert_same(tmp_path / "m.gguf", theirs)


@pytest.mark.parametrize("with_head", [False, True])
def test_gpt2(with_head: bool, tmp_path: Path) -> None:
    theirs = write_gpt2(tmp_path / "m.gguf", make_model("gpt2"), with_head=with_head)
    assert_same(tmp_path / "m.gguf", theirs)


def test_gpt2_quantised_in_the_whole_engine(tmp_path: Path) -> None:
    theirs = write_gpt2(tmp_path / "m.gguf", make_model("gpt2"), Q.Q8_0)
    with LLM(str(tmp_path / "m.gguf"), dtype="float32") as llm:
        (answer,) = llm.generate(["abc"], SamplingParams(max_tokens=8, temperature=0))
    prompt = [*answer.prompt_token_ids]
    ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False,
                          eos_token_id=EOS_ID)[0].tolist()  # fmt: skip
    assert list(answer.token_ids) == ids[len(prompt) :]


def test_the_types_that_load_are_named() -> None:
    names = readable_types()
    assert len(names) >= 26
    assert {"F32", "F16", "BF16", "Q8_0", "Q2_K", "Q6_K", "IQ4_XS", "MXFP4"} <= set(names)
    assert not {"I32", "F64", "Q8_1"} & set(names)


KINDS = [
    (Q.F16, None, "float16"),
    (Q.BF16, None, "bfloat16"),
    (Q.Q8_0, None, "bfloat16"),
    (Q.Q4_0, None, "bfloat16"),
    (Q.Q4_K, Q.Q6_K, "bfloat16"),
    (Q.Q6_K, Q.F32, "bfloat16"),
    (Q.Q5_0, Q.F16, "bfloat16"),
    (Q.F16, Q.F32, "float16"),
]


@pytest.mark.parametrize(("kind", "head", "dtype"), KINDS)
def test_stored_types(
    kind: Q, head: Q | None, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.models.gguf_file._ROWS_BYTES", 1 << 15)  # many parts
    theirs = write(tmp_path / "m.gguf", "llama", make_model("llama", **WIDE), kind, head)
    assert GGUFFile(tmp_path / "m.gguf").config.dtype == dtype
    assert_same(tmp_path / "m.gguf", theirs)


def test_gemma_quantised(tmp_path: Path) -> None:
    model = make_model("gemma3", **{**WIDE, **GEMMA, "num_hidden_layers": 7})
    assert_same(tmp_path / "m.gguf", write(tmp_path / "m.gguf", "gemma3", model, Q.Q8_0))


def test_gemma_patterns(tmp_path: Path) -> None:
    """Windows of layers from the family's rule, from a number, from a list, or without any key."""

    def windows(**keys: Any) -> list[int | None]:
        path = tmp_path / "m.gguf"
        write(path, "gemma3", make_model("gemma3"), **keys)
        return list(GGUFFile(path).config.windows)

    assert windows() == [40] * 5 + [None, 40]
    assert windows(sliding_window_pattern=3) == [40, 40, None, 40, 40, None, 40]
    assert windows(sliding_window_pattern=[True, False] * 3 + [True]) == [40, None] * 3 + [40]
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_sliding_window", lambda *_: None)
        assert windows() == []


@pytest.mark.parametrize(("layers", "scale"), [(62, 16**-0.5), (61, 24**-0.5)])
def test_gemma_query_scale(layers: int, scale: float, tmp_path: Path) -> None:
    """The 27B model, identified by its layers, divides by hidden / heads; others by head_dim."""
    model = make_model("gemma3", num_hidden_layers=layers, hidden_size=64, intermediate_size=32)
    write(tmp_path / "m.gguf", "gemma3", model)
    assert GGUFFile(tmp_path / "m.gguf").config.attention()["scale"] == pytest.approx(scale)


def test_the_whole_engine(tmp_path: Path) -> None:
    """A chat has the same prompt and the same tokens with a file as with a folder."""
    theirs = write(tmp_path / "my-model.gguf", "llama", make_model("llama"))
    theirs.save_pretrained(write_tokenizer(tmp_path / "folder"))
    chat = [{"role": "user", "content": "Grüße <|end|> 12345 👋"}]
    outputs = []
    for model in (tmp_path / "my-model.gguf", tmp_path / "folder"):
        with LLM(str(model), dtype="float32") as llm:
            params = SamplingParams(temperature=0, max_tokens=12)
            outputs.append((llm.chat([chat], params)[0], llm.tokenizer.eos_token_ids))
    (ours, ends), (same, other_ends) = outputs
    assert ours.prompt_token_ids == same.prompt_token_ids
    assert ours.token_ids == same.token_ids
    assert ends == other_ends == (EOS_ID, END_ID)


def refusal(path: Path) -> str:
    with pytest.raises(LoadError) as error, LLM(str(path)):
        pass
    return str(error.value)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    write(path, "llama", make_model("llama"))
    return path


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.05, 0.5, 0.999])
def test_a_file_cut_short(good: Path, share: float, tmp_path: Path) -> None:
    data = good.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: max(8, int(len(data) * share))])
    assert "cut.gguf is cut short or damaged" in refusal(tmp_path / "cut.gguf")


WRONG_NUMBERS = {  # (name before the number, bytes between the two, number, message)
    "length of a list": (b"tokenizer.ggml.token_type", 8, 1 << 60, "is cut short or damaged"),
    "integers": (b"token_embd.weight", 20, 26, "m.gguf: token_embd.weight is stored as I32, which"
                 " cannot be read (these can: F32, F16, Q4_0"),
    "not UTF-8": (b"tokenizer.ggml.model", 12, 0xFFFFFFFF, "is cut short or damaged: 'utf-8'"),
    "a type to come": (b"token_embd.weight", 20, 99,
                       "is cut short or damaged: token_embd.weight is of the unknown type 99"),
    "a large row": (b"token_embd.weight", 4, 1 << 62,
                    "token_embd.weight (F32, 262 x 4611686018427387904) ends at byte"),
    "no row": (b"token_embd.weight", 12, 0, "x 64) must have 1 to 4 dimensions, none of them 0"),
    "part of a block": (b"token_embd.weight", 20, 12,
                        "token_embd.weight (Q4_K, 262 x 64) must have rows of a multiple of 256"),
    "past the end": (b"token_embd.weight", 24, 1 << 50, "token_embd.weight (F32, 262 x 64) ends"),
}  # fmt: skip


@pytest.mark.timeout(30)
@pytest.mark.parametrize("what", WRONG_NUMBERS)
def test_wrong_numbers(what: str, good: Path, tmp_path: Path) -> None:
    name, distance, number, message = WRONG_NUMBERS[what]
    data = bytearray(good.read_bytes())
    at = data.index(name) + len(name) + distance
    size = 4 if number < 1 << 32 else 8
    data[at : at + size] = number.to_bytes(size, "little")
    data += bytes(-(len(data) - at) % 8)  # the file must not end within a number of a list
    (tmp_path / "m.gguf").write_bytes(data)
    assert message in refusal(tmp_path / "m.gguf")


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello", encoding="utf-8")
    assert "text.gguf is not a GGUF file" in refusal(tmp_path / "text.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    assert "empty.gguf is not a GGUF file" in refusal(tmp_path / "empty.gguf")
    assert "gone.gguf does not exist" in refusal(tmp_path / "gone.gguf")
    assert "one GGUF file in it: empty.gguf, text.gguf" in refusal(tmp_path)
    (tmp_path / "model.bin").write_text("hello", encoding="utf-8")
    assert "give the folder of a checkpoint, a .gguf file, or a hub id" in refusal(
        tmp_path / "model.bin"
    )


def replaced(good: Path, path: Path, old: bytes, new: bytes) -> Path:
    """The file with some bytes, such as a key, replaced by the same number of others."""
    data = good.read_bytes()
    assert len(old) == len(new)
    assert old in data
    path.write_bytes(data.replace(old, new))
    return path


MESSAGES = {
    "architecture": (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba",
                     "'mamba' is not supported (supported: llama, qwen2, qwen2vl, qwen3,"),
    "missing key": (b"llama.block_count", b"llama.block_COUNT", "lacks llama.block_count"),
    "no embedding": (b"token_embd.weight", b"token_EMBD.weight", "lacks token_embd.weight"),
    "missing tensor": (b"blk.1.attn_v.weight", b"blk.1.attn_V.weight",
                       "1 missing: blk.1.attn_v.weight; 1 unexpected: blk.1.attn_V.weight"),
    "no tokens": (b"tokenizer.ggml.tokens", b"tokenizer.ggml.TOKENS",
                  "tokenizer.ggml.tokens is missing"),
}  # fmt: skip


@pytest.mark.parametrize("what", MESSAGES)
def test_what_is_wrong_is_named(what: str, good: Path, tmp_path: Path) -> None:
    old, new, message = MESSAGES[what]
    assert message in refusal(replaced(good, tmp_path / "m.gguf", old, new))


def test_keys_that_change_the_mathematics(tmp_path: Path) -> None:
    def message(arch: str = "llama", kind: Q = Q.F32, **keys: Any) -> str:
        write(tmp_path / "m.gguf", arch, make_model(arch), kind, **keys)
        return refusal(tmp_path / "m.gguf")

    assert "llama.expert_count = 8 is not supported" in message(expert_count=8)
    assert "qwen3.attention.sliding_window = 64" in message("qwen3", sliding_window=64)
    assert "llama.rope.dimension_count = 8 is not" in message(rope_dimension_count=8)
    assert "rope.scaling.yarn_attn_factor = 2.0" in message(rope_scaling_yarn_attn_factor=2.0)
    longrope = gguf.RopeScalingType.LONGROPE
    assert "rope_scaling short_factor must be 8 positive numbers, not None" in message(
        rope_scaling_type=longrope
    )
    assert "one part of 3, and its name is not" in message(uint16=("split.count", 3))
