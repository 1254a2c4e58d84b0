"""Unmodified clients against a running server: every check of every driver; lm-eval's numbers
beside those of transformers. `table.py` runs these and makes docs/clients.md of what they note."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.harness import CLIENTS, DEMO, Address, Client, drive, serving

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
TASKS = Path(__file__).with_name("tasks")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with serving(tmp_path_factory.mktemp("clients")) as address:
        yield address


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.driver)
def test_a_client(client: Client, address: Address) -> None:
    told = drive(client, address)
    if "endings" in told.get("found", {}):
        told["checks"] += beside_transformers(told["found"])
    path = os.environ.get("INFER_CLIENTS_FINDINGS")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": client.name, **told}) + "\n")
    assert told["checks"]
    assert [check for check in told["checks"] if not check["ok"]] == []


def beside_transformers(found: dict[str, Any]) -> list[dict[str, Any]]:
    """lm-eval's results, compared with those of the same checkpoint in this process."""
    checks = []
    for name, compare in (("endings", compare_endings), ("stories", compare_stories)):
        what = compare(found[name])
        name = f"{name} equal to transformers'"
        checks.append({"name": name, "ok": not what, "what": what})
    return checks


def compare_endings(found: dict[str, Any]) -> str:
    """What differs in accuracy and log-likelihoods; "" = nothing does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    hits, worst = 0, 0.0
    lines = (TASKS / "endings.jsonl").read_text(encoding="utf-8").splitlines()
    for line, theirs in zip(map(json.loads, lines), found["likelihoods"], strict=True):
        context = tokenizer.encode("<|begin_of_text|>" + line["context"], add_special_tokens=False)
        ours = []
        for ending in line["endings"]:
            text = "<|begin_of_text|>" + line["context"] + ending
            ids = tokenizer.encode(text, add_special_tokens=False)
            with torch.inference_mode():
                scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            places = range(len(context), len(ids))
            ours.append(sum(scores[i - 1, ids[i]].item() for i in places))
        worst = max(worst, *(abs(a - b) for a, b in zip(ours, theirs, strict=True)))
        hits += ours.index(max(ours)) == line["label"]
    accuracy = hits / len(lines)
    if worst < 1e-3 and found["accuracy"] == pytest.approx(accuracy):
        return ""
    return f"log-likelihoods differ by {worst}, accuracies are {found['accuracy']} and {accuracy}"


def compare_stories(found: dict[str, Any]) -> str:
    """What differs in accuracy and texts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    hits, texts = 0, []
    lines = (TASKS / "stories.jsonl").read_text(encoding="utf-8").splitlines()
    for line in map(json.loads, lines):
        prompt = "<|begin_of_text|>" + line["prompt"]
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
        made = model.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :]
        texts.append(str(tokenizer.decode(made, skip_special_tokens=True)).partition(".")[0])
        hits += texts[-1] == line["next"]
    accuracy = hits / len(lines)
    if texts == found["texts"] and found["accuracy"] == pytest.approx(accuracy):
        return ""
    return f"{found['texts']} and {texts}, accuracies are {found['accuracy']} and {accuracy}"
