"""Published checkpoints beside llama.cpp with the same file: ids, prompts, tokens, perplexity.

In float32 both compute the same mathematics, so tokens are compared on a copy of the file with its
numbers in float32. In the file's own blocks both round their activations, each in its way, so there
the perplexity is compared.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer import LLM, SamplingParams
from infer.engine.build.checkpoint import find_checkpoint
from infer.models.hub import locate
from infer.text.tokenizer import Tokenizer
from tests.support.killing import kill_under_load
from tests.support.server_process import ENV, served
from tests.weights.published import (
    GEMMA3,
    SMOLLM2,
    Llama,
    Published,
    importable,
    installed,
    quality,
    same_until_a_near_tie,
)

pytestmark = [pytest.mark.weights, pytest.mark.timeout(3600)]

NUM_TOKENS = 4000
WINDOW = 500
PERPLEXITY_LIMIT = 0.005
NEAR_TIE = 0.05
"""How far two logits may be apart for either to be the greedy token."""
TEXTS = [
    "Hello, world!",
    "  two  spaces,\ttabs\n\n\nand lines \r\n",
    "Grüße aus Köln, naïve café — “quotes” … ½ 10¹²",
    "def f(x):\n    return {'a': x[1:], \"b\": not x}  # 0x1F + 3.14e-5\n",
    "1234567890 12,345.678 ٣٤٥ ४५६",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 e\u0301 \u200b\u00a0\u2028",
    "العربية עברית ไทย हिन्दी Ελληνικά Русский",
    "<|im_start|>user<|im_end|> <bos> <start_of_turn> <unused7> <|endoftext|>",
    "don't won't I'm they'll we've IT'S",
    "\x00\x01\x7f�𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 4,
]
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a little fox who",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    if n < 2:",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\nx =",
    "Photosynthesis is the process by which",
    "1, 1, 2, 3, 5, 8,",
    "Ingredients:\n- 200 g of flour\n-",
    "The quick brown fox",
    "In 1969, the first human being",
    "Question: What is the largest planet?\nAnswer:",
    "SELECT name FROM users WHERE",
    "To be, or not to be,",
    "My favourite season is autumn, because",
    "Translate into German: good morning =",
    "<html>\n<head>\n<title>",
    "A prime number is a number that",
    "The meeting has been moved from Monday to",
]


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA3], ids=["smollm2", "gemma3"])
def published(request: pytest.FixtureRequest) -> Iterator[Published]:
    with importable(installed(request.param)):
        yield request.param


@pytest.fixture(scope="module")
def llama(published: Published) -> Iterator[Llama]:
    """llama.cpp with the file as it is."""
    found = Llama(locate(published.model)[0], WINDOW + 2)
    yield found
    found.close()


@pytest.fixture(scope="module")
def float32(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    """llama.cpp with the file's numbers, keys and values in float32."""
    program, target = quality(), tmp_path_factory.mktemp("f32") / "m.gguf"
    program.write_as(locate(published.model)[0], "f32", target)
    found = Llama(target, WINDOW + 2)
    yield found
    found.close()
    target.unlink()


@pytest.fixture(scope="module")
def tokenizer(published: Published) -> Tokenizer:
    return Tokenizer(find_checkpoint(published.model).text())


def test_ids(tokenizer: Tokenizer, llama: Llama) -> None:
    """Of text from a caller, whose control tokens are text, and of text that may have them."""
    for text in TEXTS:
        for special in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=special)
            assert ids == llama.ask(tokenize=text, special=special), (text, special)
            if special:
                assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_prompt_of_a_chat(published: Published, tokenizer: Tokenizer, llama: Llama) -> None:
    if not published.has_template:
        assert tokenizer.chat_template is None
        pytest.skip("a base model, which has no chat template")
    question = {"role": "user", "content": "Grüße, what is  2 + 2?\n"}
    turns = [question, {"role": "assistant", "content": "4."}, {"role": "user", "content": "Sure?"}]
    for chat in ([question], turns, [{"role": "system", "content": "Be brief."}, *turns]):
        text, ids = tokenizer.apply_chat_template(chat)
        assert text == llama.ask(chat=chat)
        assert ids == llama.ask(tokenize=text, special=True)


def test_greedy_tokens(published: Published, float32: Llama) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with LLM(published.model, dtype="float32", max_seq_len=256) as llm:
        answers = llm.generate(PROMPTS, params, use_tqdm=False)
    num_same = num_ties = 0
    for answer in answers:
        theirs = float32.ask(greedy=list(answer.prompt_token_ids), count=32)
        same, is_tie = same_until_a_near_tie(
            answer.token_ids, theirs["tokens"], theirs["gaps"], NEAR_TIE
        )
        num_same, num_ties = num_same + same, num_ties + is_tie
    print(f"{published.package}: {num_same} greedy tokens of {32 * len(PROMPTS)} are equal,"
          f" {num_ties} answers end in a near tie")  # fmt: skip
    assert num_ties <= len(PROMPTS) // 4


def test_perplexity(published: Published, llama: Llama, float32: Llama) -> None:
    """In float32 both are equal. In the file's blocks each is near it by its own rounding, and ours
    is not the worse one."""
    program = quality()
    windows = program.windows_of(published.model, program.TEXT, NUM_TOKENS, WINDOW)
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for dtype, other in (("float32", float32), ("auto", llama)):
        with LLM(published.model, dtype=dtype, max_seq_len=WINDOW + 8) as llm:
            ours = np.concatenate(llm.score(windows))
        theirs = np.concatenate([other.ask(score=ids)["logprobs"] for ids in windows])
        assert len(ours) == len(theirs) == NUM_TOKENS
        found[dtype] = ours, theirs
    exact, its = (math.exp(-each.mean()) for each in found["float32"])
    own_blocks, its_blocks = (math.exp(-each.mean()) for each in found["auto"])
    print(f"{published.package}: perplexity in float32 {exact:.3f}, of llama.cpp {its:.3f};"
          f" in the file's blocks {own_blocks:.3f}, {its_blocks:.3f}")  # fmt: skip
    assert abs(exact / its - 1) <= 1e-4
    assert np.abs(found["float32"][0] - found["float32"][1]).max() <= 0.05
    assert abs(own_blocks / exact - 1) <= PERPLEXITY_LIMIT
    assert own_blocks / its_blocks - 1 <= PERPLEXITY_LIMIT


def test_the_same_tokens_in_every_mode(published: Published) -> None:
    """And with prompts that the prefix cache has."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [prompt * 12 for prompt in PROMPTS[:8]]
    modes: list[dict[str, Any]] = [
        {"batching_mode": "sequential", "kv_cache_backend": "none"},
        {"batching_mode": "sequential"},
        {"batching_mode": "static"},
        {"batching_mode": "static", "kv_cache_backend": "contiguous"},
        {"batching_mode": "continuous", "kv_cache_backend": "slotted"},
        {"batching_mode": "continuous", "max_num_batched_tokens": 48},
        {"batching_mode": "continuous"},
    ]
    first = None
    for mode in modes:
        with LLM(published.model, max_seq_len=512, max_batch_size=4, **mode) as llm:
            found = [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
            first = first or found
            assert found == first, mode
            if mode == {"batching_mode": "continuous"}:
                again = llm.generate(prompts, params, use_tqdm=False)
                assert min(out.num_cached for out in again) > 0
                assert [out.token_ids for out in again] == first


@pytest.mark.parametrize("kills", [2])
def test_kills_change_nothing(
    kills: int, published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams go on after their engine was killed with signal 9, with the same tokens."""
    site = os.pathsep.join((ENV["PYTHONPATH"], str(installed(published))))
    monkeypatch.setitem(ENV, "PYTHONPATH", site)
    wanted = [{"prompt": prompt, "max_tokens": 100, "temperature": 0, "stream": True,
               "ignore_eos": True, "logprobs": 1} for prompt in PROMPTS[:6]]  # fmt: skip
    command = ["-m", "infer.server", "--port", "0", "--model", published.model]
    command += ["--max-seq-len", "256", "--max-batch-size", "8"]
    with served(command, tmp_path / "log") as server:
        asyncio.run(kill_under_load(server, wanted, kills, (2.0, 4.0)))
