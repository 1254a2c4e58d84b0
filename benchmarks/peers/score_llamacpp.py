"""llama.cpp answers about one GGUF file: `python score_llamacpp.py FILE [CONTEXT]`.

It runs in an environment with `llama-cpp-python`, reads a job in JSON from each line of stdin and
writes its answer as a line. The keys of a job say what it is:

    tokenize, special    the ids of a text; whether its control tokens are taken as such
    chat                 the prompt of a list of messages, as a text
    score                of a list of ids: log-probabilities of all but the first, the best token
                         there, and how far the two best logits are apart
    greedy, count        so many greedy tokens after a list of ids, and the same distances

Keys and values are float16, or float32 if the file's matrices are. Only `benchmarks/quality.py` and
the tests of the lane `weights` use it.
"""

from __future__ import annotations

import json
import os
import sys

import llama_cpp
import numpy as np
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from scoring import scores_of

THREADS = 2
FLOAT16, FLOAT32 = 1, 0
BATCH = 512


class Scorer:
    """The model of a file."""

    def __init__(self, file: str, context: int) -> None:
        options = {"n_ctx": context, "n_batch": BATCH, "n_threads": THREADS, "verbose": False}
        options |= {"n_threads_batch": THREADS, "logits_all": True}
        self.llama = llama_cpp.Llama(file, **options)
        if self.llama.metadata.get("general.file_type") == "0":
            self.llama.close()
            options |= {"type_k": FLOAT32, "type_v": FLOAT32}
            self.llama = llama_cpp.Llama(file, **options)

    def tokenize(self, job: dict) -> list[int]:
        return self.llama.tokenize(job["tokenize"].encode(), add_bos=False, special=job["special"])

    def chat(self, job: dict) -> str:
        llama = self.llama
        text = Jinja2ChatFormatter(
            template=llama.metadata["tokenizer.chat_template"],
            eos_token=llama._model.token_get_text(llama.token_eos()),
            bos_token=llama._model.token_get_text(max(llama.token_bos(), 0)),
        )
        return text(messages=job["chat"]).prompt

    def _logits(self, ids: list[int]) -> np.ndarray:
        self.llama.reset()
        self.llama.eval(ids)
        return self.llama.scores[: len(ids)]

    def score(self, job: dict) -> dict:
        ids = job["score"]
        logits = self._logits(ids)[:-1]
        return scores_of(logits, ids) | {"gaps": [_best_of(row)[1] for row in logits]}

    def greedy(self, job: dict) -> dict:
        ids = list(job["greedy"])
        row = self._logits(ids)[-1]
        tokens, gaps = [], []
        while True:
            token, gap = _best_of(row)
            tokens.append(token)
            gaps.append(gap)
            if len(tokens) == job["count"]:
                return {"tokens": tokens, "gaps": gaps}
            self.llama.eval([token])
            row = self.llama.scores[len(ids) + len(tokens) - 1]


def _best_of(row: np.ndarray) -> tuple[int, float]:
    """The best token, and how far its logit is above the second one's."""
    second, first = np.argpartition(row, -2)[-2:]
    if row[second] > row[first]:
        first, second = second, first
    return int(first), float(row[first] - row[second])


def main() -> None:
    """Answer until stdin ends."""
    protocol = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    scorer = Scorer(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else BATCH)
    ways = {"tokenize": scorer.tokenize, "chat": scorer.chat, "score": scorer.score,
            "greedy": scorer.greedy}  # fmt: skip
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(ways[next(iter(job))](job)), file=protocol, flush=True)


if __name__ == "__main__":
    main()
