"""Tests of GGUF files whose weights stay in their own blocks.

The reference is transformers' model with exactly the weights of the file, dequantised by the
package, in float32.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from infer import LLM, SamplingParams
from infer.config import EngineConfig
from infer.engine.build.planner import plan_for
from infer.errors import LoadError
from infer.kernels.blocks import NUMBERS
from infer.kernels.invariance import linears
from infer.kernels.linear.native_linear import NativeLinear, PackedEmbedding
from infer.kernels.native import native_obstacle
from infer.models.gguf_blocks import as_held, held_kind, numbers
from infer.models.gguf_file import GGUFFile
from infer.models.gguf_reader import KINDS, TENSOR_KINDS
from infer.models.hub import locate
from tests.support.checkpoints import make_model
from tests.support.gguf_files import FACTORS, blocks, dense_logits, write, write_gpt2
from tests.support.parity import deviation, reference, tokens_of

pytestmark = pytest.mark.skipif(native_obstacle() is not None, reason=str(native_obstacle()))

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
NARROW = {"hidden_size": 160, "intermediate_size": 224, "head_dim": 32}
CASES: dict[str, tuple[str, Q, Q | None, dict[str, Any]]] = {
    "Q8_0": ("llama", Q.Q8_0, None, {}),
    "Q4_0": ("llama", Q.Q4_0, Q.Q6_K, {}),
    "Q4_K, as Q4_K_M": ("llama", Q.Q4_K, Q.Q6_K, {}),
    "Q5_K, tied": ("llama", Q.Q5_K, None, {"tie_word_embeddings": True}),
    "Q6_K": ("qwen3", Q.Q6_K, Q.F16, {"head_dim": 64}),
    "Q5_0": ("qwen2", Q.Q5_0, Q.Q5_0, {}),
    "Q4_1 and Q5_1": ("llama", Q.Q4_1, Q.Q5_1, {}),
    "Q2_K and Q3_K": ("llama", Q.Q2_K, Q.Q3_K, {}),
    "IQ4_XS, as IQ4_XS": ("llama", Q.IQ4_XS, Q.Q6_K, {}),
    "IQ4_NL, tied, rows of 32": ("llama", Q.IQ4_NL, None, {**NARROW, "tie_word_embeddings": True}),
    "MXFP4, rows of 32": ("llama", Q.MXFP4, Q.Q8_0, NARROW),
    "gemma3, tied": ("gemma3", Q.Q8_0, None, {"query_pre_attn_scalar": 24}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    """They differ from float32's little more than those of the same weights in bfloat16 do."""
    arch, kind, head, shape = CASES[case]
    theirs = write(tmp_path / "m.gguf", arch, make_model(arch, **{**WIDE, **shape}), kind, head)
    file, tokens = GGUFFile(tmp_path / "m.gguf"), tokens_of(150)
    exact = reference(theirs, tokens)
    own = distance(dense_logits(file, tokens, torch.bfloat16, in_blocks=True), exact)
    rounded = distance(dense_logits(file, tokens, torch.bfloat16), exact)
    assert own <= 3 * rounded, (own, rounded)


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The root mean square of the differences, relative to that of the logits."""
    return float((ours - theirs).norm() / theirs.norm())


def test_gpt2(tmp_path: Path) -> None:
    theirs = write_gpt2(tmp_path / "m.gguf", make_model("gpt2"), Q.Q8_0)
    tokens = tokens_of(60)
    ours = dense_logits(GGUFFile(tmp_path / "m.gguf"), tokens, torch.bfloat16, in_blocks=True)
    assert deviation(ours, reference(theirs, tokens)) <= 0.03


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "mixed.gguf"
    write(path, "llama", make_model("llama", **WIDE), Q.Q4_K, Q.Q6_K, chat=False)
    return path


def test_blocks_are_kept_by_default(mixed: Path) -> None:
    with LLM(str(mixed), max_seq_len=128) as llm:
        runner: Any = llm.core.runner
        model: Any = runner.model
        assert isinstance(model.embedding, PackedEmbedding)
        assert {type(layer) for layer in linears(model)} == {NativeLinear}
        assert model.stack is not None
        (answer,) = llm.generate(["abc"], SamplingParams(max_tokens=8, temperature=0))
        assert len(answer.token_ids) == 8
        del runner
        gc.collect()
        if (maps := Path("/proc/self/maps")).exists():
            assert str(mixed) not in maps.read_text(encoding="utf-8"), (
                "the file's pages count as the process's"
            )
    layers: list[Any] = [*linears(model), model.embedding]
    held = sum(layer.packed.nbytes for layer in layers)
    assert held <= 1.1 * mixed.stat().st_size
    plan = plan_for(EngineConfig(model=str(mixed), device="cpu"))
    assert held <= plan.weight_bytes <= held + 20_000
    assert "in the file's own Q4_K, Q6_K" in plan.products


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_a_dtype_overrides_them(dtype: Any, mixed: Path) -> None:
    plan = plan_for(EngineConfig(model=str(mixed), device="cpu", dtype=dtype))
    assert "own" not in plan.products
    assert plan.weight_bytes > 1.3 * mixed.stat().st_size
    with LLM(str(mixed), max_seq_len=64, dtype=dtype) as llm:
        runner: Any = llm.core.runner
        assert isinstance(runner.model.embedding, torch.Tensor)


INT4: dict[str, tuple[Q, Q | None, dict[str, Any], bool]] = {
    "as small": (Q.Q4_0, Q.Q6_K, {}, True),
    "a mixture of 4 bits": (Q.Q4_K, Q.Q6_K, {}, True),
    "11 % larger": (Q.Q4_1, None, {}, True),
    "22 % larger": (Q.Q5_K, None, {}, False),
    "5 bits, where int4 takes 5, too": (Q.Q5_0, None, NARROW, True),
    "smaller": (Q.Q2_K, None, {}, True),
    "8 bits": (Q.Q8_0, None, {}, False),
    "6 bits": (Q.Q6_K, None, {}, False),
    "not quantised": (Q.F16, None, {}, False),
}
"""Types of the layers and of the head; whether int4 keeps them."""


@pytest.mark.parametrize("case", INT4)
def test_int4_keeps_what_is_about_as_small(case: str, tmp_path: Path) -> None:
    """Its answers are then those of the file's own blocks."""
    kind, head, shape, is_kept = INT4[case]
    path = tmp_path / "m.gguf"
    write(path, "llama", make_model("llama", **{**WIDE, **shape}), kind, head, chat=False)
    plans = {
        dtype: plan_for(EngineConfig(model=str(path), device="cpu", dtype=dtype))
        for dtype in ("auto", "int4")
    }
    assert ("int4 would hardly be smaller" in plans["int4"].products) == is_kept
    assert ("exactness" in dict(plans["int4"].rows())) == (not is_kept)
    if is_kept:
        assert plans["int4"].weight_bytes == plans["auto"].weight_bytes
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=1, ignore_eos=True)
    found = {}
    for dtype in plans:
        with LLM(str(path), max_seq_len=64, dtype=dtype, kv_cache_dtype="model") as llm:
            (answer,) = llm.generate(["abc"], params)
        assert answer.logprobs is not None
        found[dtype] = [each.logprob for each in answer.logprobs]
    assert (found["int4"] == found["auto"]) == is_kept


MUTATE = """
import random, sys, warnings
from pathlib import Path
import torch
from infer.errors import LoadError
from infer.files import reading
from infer.models.gguf_file import GGUFFile
from infer.models.gguf_reader import KINDS, TENSOR_KINDS
from infer.models.model import build_model

warnings.simplefilter("ignore")
torch.set_num_threads(1)
good, bad, seed, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
content = good.read_bytes()
first = content.index(b"general.architecture")
last = content.rindex(b"output_norm.weight") + 64
vocabulary = content.index(b"tokenizer.ggml.tokens"), content.index(b"tokenizer.ggml.bos_token_id")
numbers = [0, 1, 2, 3, 31, 32, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
made = random.Random(seed)
refused = 0
for i in range(count):
    data = bytearray(content)
    for _ in range(made.randint(1, 3)):
        at = made.randrange(0, last)
        if vocabulary[0] < at < vocabulary[1]:
            at = made.randrange(vocabulary[1], last)
        how = made.randrange(4)
        width = made.choice([4, 8])
        if how == 0:
            data[at] ^= 1 << made.randrange(8)
        elif how == 1:
            data[at:at + width] = (made.choice(numbers) % 256**width).to_bytes(width, "little")
        elif how == 2:
            data[at] = made.randrange(256)
        else:
            del data[at:at + made.choice([1, 4, 8, 1000])]
    bad.write_bytes(data)
    print(i, flush=True)
    try:
        with reading(str(bad)):
            file = GGUFFile(bad)
            source = file.source(torch.bfloat16, torch.device("cpu"))
            source = source.with_layers(None, blocks=file.block_reader())
            build_model(file.config, source, 16)
    except LoadError as error:
        assert len(str(error)) < 4000
        refused += 1
print("refused", refused)
"""


def mutate(path: Path, folder: Path, seed: int, count: int) -> None:
    command = [sys.executable, "-c", MUTATE, str(path), str(folder / "bad.gguf"), str(seed)]
    done = subprocess.run(
        [*command, str(count)], capture_output=True, text=True, timeout=1200, encoding="utf-8"
    )
    reached = done.stdout.splitlines()[-1:] or ["nothing"]
    assert done.returncode == 0, f"mutation {reached[0]} of seed {seed}: {done.stderr[-2000:]}"
    assert reached[0].startswith("refused")
    assert int(reached[0].split()[1]) > count // 3


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    write(path, "llama", make_model("llama", **shape), Q.Q4_K, Q.Q6_K)
    return path


def test_changed_headers_are_refused_or_load(small: Path, tmp_path: Path) -> None:
    mutate(small, tmp_path, seed=1, count=100)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_many_changed_headers_are_refused_or_load(small: Path, tmp_path: Path) -> None:
    mutate(small, tmp_path, seed=2, count=10_000)


def split(path: Path, folder: Path, count: int = 3) -> list[Path]:
    """Write a file as several parts, as llama.cpp's llama-gguf-split does."""
    reader = gguf.GGUFReader(path)
    tensors = list(reader.tensors)
    paths = []
    for i in range(count):
        paths.append(folder / f"m-{i + 1:05}-of-{count:05}.gguf")
        writer = gguf.GGUFWriter(paths[-1], "llama")
        for field in reader.fields.values() if i == 0 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                kind, *inner = field.types
                value = field.contents()
                writer.add_key_value(field.name, value, kind, inner[0] if inner else None)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in tensors[i::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_a_file_in_parts(mixed: Path, tmp_path: Path) -> None:
    paths, tokens = split(mixed, tmp_path), tokens_of(20)
    expected = dense_logits(GGUFFile(mixed), tokens, torch.bfloat16, in_blocks=True)
    for path in (paths[0], paths[2]):
        file = GGUFFile(path)
        assert torch.equal(dense_logits(file, tokens, torch.bfloat16, in_blocks=True), expected)
    assert locate(str(paths[1])) == (paths[1], "m")


def test_parts_that_do_not_fit_are_refused(mixed: Path, tmp_path: Path) -> None:
    paths = split(mixed, tmp_path)
    paths[1].rename(tmp_path / "away.gguf")
    with pytest.raises(LoadError, match=r"is one part of 3; these are missing: m-00002-of-00003"):
        GGUFFile(paths[0])
    with pytest.raises(LoadError, match=r"its name is not that of a part"):
        GGUFFile(tmp_path / "away.gguf")
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(LoadError, match=r"says that it is part 0 of 3, counted from 0, not 1 of 3"):
        GGUFFile(paths[0])


EXACT = (Q.Q4_0, Q.Q5_0, Q.IQ4_NL)
ROUNDED = [kind for kind in FACTORS if kind not in (*EXACT, Q.Q8_0)]


def test_types_with_kernels_are_held_as_they_are() -> None:
    for kind in NUMBERS:
        assert held_kind(KINDS[kind], 256) == kind


@pytest.mark.parametrize("kind", [*EXACT, *ROUNDED], ids=lambda kind: kind.name)
def test_every_type_can_be_converted(kind: Q) -> None:
    """To the same numbers, or to numbers nearer to them than 1/220 of the largest one of 32.

    Half a step of 1/127, and the rounding of the step to float16, by 3e-8 where it is small.
    """
    rows, stored = blocks((3, 512), kind), KINDS[kind.name]
    before = gguf.quants.dequantize(rows, kind).reshape(-1, 32)
    assert np.array_equal(numbers(rows, stored).numpy().reshape(-1, 32), before)
    after = gguf.quants.dequantize(as_held(rows, stored, "Q8_0"), Q.Q8_0).reshape(-1, 32)
    error, largest = np.abs(before - after).max(axis=1), np.abs(before).max(axis=1)
    assert np.median(largest) > 0
    if kind in EXACT:
        assert np.array_equal(before, after)
    else:
        assert (error <= largest / 220 + 4e-6).all()


@pytest.mark.parametrize("kind", ROUNDED, ids=lambda kind: kind.name)
def test_rounding_bit_for_bit(kind: Q) -> None:
    """A block's scale is a 127th of the largest number, and its codes are rounded to nearest even.

    So a file's weights are the same in every version, and on every machine."""
    rows = blocks((3, 512), kind)
    if kind in (Q.Q4_1, Q.Q5_1):  # any two bytes are a factor: also zero, tiny, infinite and NaN
        random = np.random.default_rng(7)
        rows = random.integers(0, 256, (40, 16 * KINDS[kind.name].block_bytes), dtype=np.uint8)
        rows[0] = 0
    with np.errstate(all="ignore"):
        numbers = gguf.quants.dequantize(rows, kind).reshape(-1, 32)
        scales = np.abs(numbers).max(axis=1, keepdims=True) / np.float32(127)
        inverse = np.where(scales == 0, 0, np.float32(1) / scales).astype(np.float32)
        codes = np.nan_to_num(np.rint(numbers * inverse), posinf=0.0, neginf=0.0).astype(np.int8)
        halves = scales.astype(np.float16)
    found = as_held(rows, KINDS[kind.name], "Q8_0").reshape(-1, 34)
    found_halves = found[:, :2].copy().view(np.float16)
    assert np.array_equal(found_halves, halves, equal_nan=True)
    is_finite = np.isfinite(scales[:, 0])
    assert is_finite.sum() > 40
    assert np.array_equal(found[is_finite, 2:].view(np.int8), codes[is_finite])
    assert not found[~is_finite, 2:].any()


def test_types_with_kernels_are_converted_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large files have billions of numbers, so nothing is done for a part of them in Python."""
    calls = []
    monkeypatch.setattr("infer.models.gguf_blocks.convert", lambda *call: calls.append(call[1]))
    for kind in NUMBERS:
        stored = KINDS[kind]
        rows = np.zeros((4096, 1024 // stored.block * stored.block_bytes), dtype=np.uint8)
        as_held(rows, stored, "Q8_0")
        numbers(rows, stored)
    assert calls == [kind for kind in NUMBERS for _ in range(1 if kind == "Q8_0" else 2)]


def test_what_is_not_quantised_is_not_held_in_blocks() -> None:
    for kind in (Q.F32, Q.F16, Q.BF16, Q.I32):
        assert held_kind(KINDS[kind.name], 256) is None


def test_the_types_have_the_sizes_of_the_format() -> None:
    ours = {number: (kind.name, kind.block, kind.block_bytes)
            for number, kind in TENSOR_KINDS.items()}  # fmt: skip
    theirs = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert ours == theirs


def test_parts_of_a_conversion_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of several parts has the numbers that it has as one."""
    for kind in (Q.IQ2_XS, Q.IQ3_S):
        rows, stored = blocks((3, 1024), kind), KINDS[kind.name]
        whole, numbers_of_whole = as_held(rows, stored, "Q8_0"), numbers(rows, stored)
        with monkeypatch.context() as patch:
            patch.setattr("infer.models.gguf_blocks._PART_NUMBERS", 256)
            assert np.array_equal(as_held(rows, stored, "Q8_0"), whole)
            assert torch.equal(numbers(rows, stored), numbers_of_whole)
