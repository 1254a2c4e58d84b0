"""The programs of `examples/cells`, run in this process, and the picture of docs/cells.md."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from infer import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "cells"


@pytest.fixture(scope="module")
def shown() -> dict[str, list[str]]:
    """The lines that each program prints."""
    lines = {}
    for path in sorted(EXAMPLES.glob("*.py")):
        printed: list[str] = []
        program = runpy.run_path(str(path))
        program["main"].__globals__["print"] = printed.append
        program["main"]()
        lines[path.stem] = printed
    return lines


def greedy(prompts: list[str], num_tokens: int) -> list[str]:
    """What the engine says to the same prompts, prompt included."""
    with LLM() as llm:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return [
            llm.tokenizer.decode([*llm.tokenizer.encode(prompt), *output.token_ids])
            for prompt, output in zip(prompts, llm.generate(prompts, sampling), strict=True)
        ]


def constants(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_every_program_is_listed(shown: dict[str, list[str]]) -> None:
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert {f"{name}.py" for name in shown} == set(re.findall(r"\[cells/(\w+\.py)\]", readme))


def test_greedy_is_the_engine_s_loop(shown: dict[str, list[str]]) -> None:
    program = constants("greedy")
    assert shown["greedy"] == list(map(repr, greedy(program["PROMPTS"], program["NUM_TOKENS"])))
    code = (EXAMPLES / "greedy.py").read_text(encoding="utf-8")
    assert len(code[code.index("from infer") :].splitlines()) <= 34  # 30 and the call of main


def test_parallel_completions_share_the_prompt(shown: dict[str, list[str]]) -> None:
    *texts, cells = shown["parallel"]
    assert len(set(texts)) == 4
    used, tokens, shared = map(int, re.findall(r"\d+", cells))
    assert used == tokens - 3 * shared
    assert shared > 10


def test_beams_are_better_than_greedy(shown: dict[str, list[str]]) -> None:
    *beams, cells = shown["beam_search"]
    scores = [float(line.split()[0]) for line in beams]
    assert scores == sorted(scores, reverse=True)
    assert len({line.split(maxsplit=1)[1] for line in beams}) == 4
    program = constants("beam_search")
    with LLM() as llm:
        sampling = SamplingParams(
            temperature=0, max_tokens=program["NUM_TOKENS"], ignore_eos=True, logprobs=1
        )
        (output,) = llm.generate([program["PROMPT"]], sampling)
        assert output.logprobs is not None
        assert scores[0] >= sum(each.logprob for each in output.logprobs) - 0.1
    assert int(cells.split()[0]) < 4 * (program["NUM_TOKENS"] + 10)


def test_a_tree_gives_the_greedy_tokens_in_fewer_passes(shown: dict[str, list[str]]) -> None:
    program = constants("token_tree")
    text, passes = shown["token_tree"]
    assert [text] == list(map(repr, greedy([program["PROMPT"]], program["NUM_TOKENS"])))
    num_tokens, num_passes = map(int, re.findall(r"\d+", passes))
    assert num_passes < num_tokens


def test_a_conversation_slides(shown: dict[str, list[str]]) -> None:
    _, counts = shown["sliding_conversation"]
    num_tokens, num_cells, num_slides = map(int, re.findall(r"\d+", counts))
    assert num_tokens > 2 * num_cells
    assert num_slides >= 4


@pytest.mark.parametrize("name", ["cells.md", "zh.md"])
def test_the_picture_of_the_page(name: str) -> None:
    """The pages on cells show what their own programs print."""
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    printed: list[str] = []
    names = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    exec("".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), names)
    pictures = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert "\n".join(printed) + "\n" == "".join(pictures)
