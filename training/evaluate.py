"""Measure a checkpoint: samples, sums, JSON records, questions about stories.

Owns the measurements that the model card reports, made with the transformers library on
the saved folder, so that they also prove that others can load it. Called by train.py, or by
hand: `python training/evaluate.py src/infer/demo_model`. It does not train.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dialogues import Message
from exercises import draw_problem, json_exercise, pose
from stories import Wish, tell

STORY_PROMPTS = (
    "Once upon a time", "One day, a little fox", "Tell me a story.", "Long ago,",
    "Tell me a story about a girl named Mia and a red kite.",
)  # fmt: skip
SAMPLES = 20


@dataclass(frozen=True)
class Sample:
    """One unselected sample: its seed, its prompt and what the model wrote."""

    seed: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Report:
    """Shares of right answers on held-out exercises, and the samples."""

    sums: float
    sums_by_sign: dict[str, tuple[int, int]]
    json: float
    questions: float
    samples: list[Sample]


def _load(folder: Path) -> Any:
    # from_pretrained leaves the model ready for evaluation, without dropout.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class Speaker:
    """A checkpoint that continues texts."""

    def __init__(self, folder: Path) -> None:
        # The library's own types are too loose to check.
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = _load(folder)
        self.stops = self.model.generation_config.eos_token_id

    def _continue(self, ids: list[int], limit: int, **sampling: Any) -> str:
        prompt = torch.tensor([ids])
        with torch.no_grad():
            out = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit,
                pad_token_id=self.stops[0], **sampling,
            )  # fmt: skip
        text: str = self.tokenizer.decode(out[0][len(ids) :], skip_special_tokens=True)
        return text

    def answer(self, messages: list[Message], limit: int = 60) -> str:
        """Return the greedy answer to a chat."""
        return self._continue(self._chat(messages), limit, do_sample=False)

    def _chat(self, messages: list[Message]) -> list[int]:
        chat = [{"role": role, "content": content} for role, content in messages]
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def sample(self, prompt: str, seed: int, temperature: float = 0.7) -> str:
        """Return a sampled continuation: of a chat for a request, else of the raw text."""
        torch.manual_seed(seed)
        chat = prompt.startswith("Tell me")
        ids = self._chat([("user", prompt)]) if chat else self.tokenizer.encode(prompt)
        text = self._continue(ids, 500, do_sample=True, temperature=temperature, top_p=0.95)
        return text if chat else prompt + text


def _sums(speaker: Speaker, count: int) -> dict[str, tuple[int, int]]:
    rng = Random("infer demo model/evaluation/sums")
    right = {"+": (0, 0), "-": (0, 0), "*": (0, 0)}
    for _ in range(count):
        problem = draw_problem(rng, held_out=True)
        question, answer = pose(rng, problem)
        hits, asked = right[problem.sign]
        said = speaker.answer([("user", question)])
        right[problem.sign] = (hits + (said.strip() == answer), asked + 1)
    return right


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _json_share(speaker: Speaker, count: int) -> float:
    rng = Random("infer demo model/evaluation/json")
    requests = [json_exercise(rng)[0] for _ in range(count)]
    return sum(_is_json(speaker.answer([("user", request)], 200)) for request in requests) / count


def _question_share(speaker: Speaker, count: int) -> float:
    right = 0
    for number in range(count):
        rng = Random(f"infer demo model/evaluation/questions/{number}")
        story = tell(rng, Wish())
        question, answer = rng.choice(story.questions)
        said = speaker.answer([("user", "Tell me a story."), ("assistant", story.text),
                               ("user", question)])  # fmt: skip
        right += said.strip() == answer
    return right / count


def evaluate(folder: Path) -> Report:
    """Measure the checkpoint in a folder."""
    speaker = Speaker(folder)
    samples = []
    for seed in range(SAMPLES):
        prompt = STORY_PROMPTS[seed % len(STORY_PROMPTS)]
        samples.append(Sample(seed, prompt, speaker.sample(prompt, seed)))
    sums = _sums(speaker, 200)
    return Report(
        sums=sum(hits for hits, _ in sums.values()) / 200,
        sums_by_sign=sums,
        json=_json_share(speaker, 100),
        questions=_question_share(speaker, 100),
        samples=samples,
    )


def main() -> None:
    """Print the measurements of the folder named on the command line."""
    report = evaluate(Path(sys.argv[1]))
    for sample in report.samples:
        print(f"--- seed {sample.seed}: {sample.prompt}\n{sample.text}\n")
    print(f"sums {report.sums:.3f} {report.sums_by_sign}")
    print(f"json {report.json:.3f} questions {report.questions:.3f}")


if __name__ == "__main__":
    main()
