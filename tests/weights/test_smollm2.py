"""SmolLM2-135M-Instruct with what is known of it: the quick part of the lane `weights`.

The ids, tokens and the perplexity are those that llama.cpp gives for the file's numbers in float32
(test_against_llamacpp.py). Tokens of the file's own blocks are compared where the best one leads by
far, so that no rounding and no instruction set decides.
"""

from __future__ import annotations

import json
import math
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer import LLM, SamplingParams
from infer.engine.build.checkpoint import find_checkpoint
from infer.text.tokenizer import Tokenizer
from tests.support.server_process import ENV, served
from tests.weights.published import SMOLLM2, importable, installed, quality

pytestmark = [pytest.mark.weights, pytest.mark.timeout(300)]

IDS = {
    "  two  spaces,\ttabs\n\n\nand lines \r\n":
        [216, 827, 216, 5600, 28, 197, 100, 7366, 1116, 198, 397, 3204, 216, 2738],
    "Grüße aus Köln, naïve café — “quotes” … ½ 10¹²":
        [27302, 7170, 34878, 85, 253, 376, 659, 7466, 34115, 28, 15486, 46494, 37366, 1841, 619,
         385, 2346, 573, 5548, 216, 16738, 216, 33, 32, 43183, 19133],
    "1234567890 12,345.678 ٣٤٥ ४५६":
        [33, 34, 35, 36, 37, 38, 39, 40, 41, 32, 216, 33, 34, 28, 35, 36, 37, 30, 38, 39, 40, 216,
         164, 113, 164, 114, 164, 115, 216, 9310, 120, 9310, 121, 9310, 122],
}  # fmt: skip
SYSTEM = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411,
          407, 19712, 8182, 2, 198]  # fmt: skip
QUESTION = "What is the opposite of hot?"
CHAT = [*SYSTEM, 1, 4093, 198, 1780, 314, 260, 7011, 282, 3380, 47, 2, 198, 1, 520, 9531, 198]
ANSWER = "The opposite of hot is cold."
SURE = {QUESTION: [504, 7011, 282, 3380, 314, 4011, 30],
        "Write the first five letters of the alphabet.":
            [504, 808, 2531, 5073, 282, 260, 12567, 359],
        "What colour is the sky on a clear day?":
            [504, 6376, 335, 253, 2437, 1194, 314]}  # fmt: skip
"""Question → tokens of its answer that lead by 0.7 or more."""
COMPLETIONS = {
    "The capital of France is": [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29,
                                 32, 33],
    "def fibonacci(n):\n    if n < 2:": [448, 1003, 304, 472, 1003, 2822, 24, 38572, 46477, 24, 94,
                                         731, 216, 34, 25, 1232],
    "My favourite season is autumn, because": [357, 506, 260, 655, 282, 260, 713, 645, 260, 3711,
                                               1363, 30, 657, 506, 597, 260],
    "A prime number is a number that": [314, 260, 5222, 282, 354, 15328, 30, 198, 198, 504, 24681,
                                        46477, 5972, 314, 4355, 24149],
}  # fmt: skip
PERPLEXITY = 108.615
"""Of the first 1,000 tokens of the quality program's text, in windows of 250."""


@pytest.fixture(scope="module", autouse=True)
def site() -> Iterator[Path]:
    found = installed(SMOLLM2)
    with importable(found):
        yield found


def test_ids_and_prompt() -> None:
    tokenizer = Tokenizer(find_checkpoint(SMOLLM2.model).text())
    for text, ids in IDS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])[1] == CHAT
    assert tokenizer.eos_token_ids == (2, 0)


def answers(llm: LLM) -> None:
    """Check the answers that lead by far."""
    chats = [[{"role": "user", "content": question}] for question in SURE]
    params = [SamplingParams(temperature=0, max_tokens=len(ids)) for ids in SURE.values()]
    found = llm.chat(chats, params, use_tqdm=False)
    assert [list(each.token_ids) for each in found] == list(SURE.values())


def perplexity(llm: LLM) -> float:
    program = quality()
    windows = program.windows_of(SMOLLM2.model, program.TEXT, 1000, 250)
    return math.exp(-np.concatenate(llm.score(windows)).mean())


def test_float32() -> None:
    with LLM(SMOLLM2.model, dtype="float32", max_seq_len=300) as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        found = llm.generate(list(COMPLETIONS), params, use_tqdm=False)
        assert [list(each.token_ids) for each in found] == list(COMPLETIONS.values())
        answers(llm)
        assert perplexity(llm) == pytest.approx(PERPLEXITY, rel=1e-3)


def test_the_blocks_of_the_file() -> None:
    """With prompts that the prefix cache has, too, and one request after the other."""
    with LLM(SMOLLM2.model, max_seq_len=300) as llm:
        answers(llm)
        answers(llm)
        assert llm.stats()["num_cached_tokens"] > 0
        assert perplexity(llm) == pytest.approx(PERPLEXITY, rel=1e-2)
    with LLM(SMOLLM2.model, max_seq_len=300, batching_mode="sequential") as llm:
        answers(llm)


def test_a_chat_with_a_server(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/api.md has it; the model has the name of its file."""
    monkeypatch.setitem(ENV, "PYTHONPATH", os.pathsep.join((ENV["PYTHONPATH"], str(site))))
    command = ["-m", "infer.cli.main", "serve", SMOLLM2.model, "--port", "0"]
    with served([*command, "--max-seq-len", "300"], tmp_path / "log") as server:
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0,
                "max_tokens": 7, "model": "SmolLM2-135M-Instruct.Q4_1"}  # fmt: skip
        url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
    assert answer["choices"][0]["message"]["content"] == ANSWER
