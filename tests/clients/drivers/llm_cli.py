"""Simon Willison's `llm`: the command and its Python API, with the models of a YAML file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import (
    KEY,
    MODEL,
    STORY,
    TOOL_MODEL,
    URL,
    WEATHER,
    check,
    raises,
    report,
    wait_until_cancelled,
    weather_is_valid,
)

FOLDER = tempfile.TemporaryDirectory()
os.environ["LLM_USER_PATH"] = FOLDER.name
ENTRY = """\
- model_id: {name}
  model_name: {name}
  api_base: {url}
  api_key_name: infer
  supports_schema: true
  supports_tools: true
"""
TEXT = "  completion: true\n"
entries = [ENTRY.format(name=name, url=URL) for name in (MODEL, TOOL_MODEL)]
entries.append(ENTRY.format(name=MODEL, url=URL).replace("model_id: ", "model_id: text-") + TEXT)
Path(FOLDER.name, "extra-openai-models.yaml").write_text("".join(entries), encoding="utf-8")
Path(FOLDER.name, "keys.json").write_text(json.dumps({"infer": KEY}), encoding="utf-8")
COMMAND = str(Path(sys.executable).with_name("llm"))
NO_END = {"1": -100, "5": -100}
"""A bias against the tokens that end a story."""
GREEDY = ["-o", "temperature", "0", "-o", "max_tokens", "16"]


def run(*arguments: str) -> str:
    """`llm ARGUMENTS`; what it has written."""
    done = subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, timeout=60, encoding="utf-8"
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


import llm  # noqa: E402  (it reads LLM_USER_PATH)

with check("models"):
    listed = run("models")
    assert f": {MODEL}" in listed
    assert f": text-{MODEL}" in listed

with check("chat"):
    text = run("-m", MODEL, STORY, "--no-stream", *GREEDY)
    assert text.strip()

with check("chat stream"):
    assert run("-m", MODEL, STORY, *GREEDY) == text

with check("usage"):
    logged = json.loads(run("logs", "list", "--json", "-n", "2"))
    assert [each["output_tokens"] for each in logged] == [16, 16]
    assert logged[0]["input_tokens"] == logged[1]["input_tokens"] > 0

with check("conversation"):
    again = run("-m", MODEL, "-c", "And then?", *GREEDY)
    assert again.strip()
    (logged,) = json.loads(run("logs", "list", "--json", "-n", "1"))
    assert logged["input_tokens"] > 30

with check("completion"):
    assert run("-m", f"text-{MODEL}", STORY, *GREEDY).strip()

with check("seed and stop"):
    model = llm.get_model(MODEL)
    how = {"max_tokens": 16, "stream": False}
    texts = [model.prompt(STORY, seed=seed, **how).text() for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    word = texts[0].split()[2]
    cut = model.prompt(STORY, seed=5, stop=word, **how).text()
    assert cut == texts[0][: texts[0].index(word)]

with check("structured output"):
    answer = run("-m", MODEL, STORY, "--schema", json.dumps(WEATHER), "-o", "max_tokens", "400")
    assert weather_is_valid(json.loads(answer))

with check("tools"):

    def weather(city: str) -> str:
        """How the weather is."""
        return f"sunny in {city}"

    chain = llm.get_model(TOOL_MODEL).chain(STORY, tools=[weather], options={"max_tokens": 16})
    assert chain.text()

with check("errors"):
    with raises(RuntimeError, "max_tokens must be between 1"):
        run("-m", MODEL, STORY, "-o", "max_tokens", "-3")
    with raises(RuntimeError, "key"):
        run("-m", MODEL, STORY, "--key", "wrong")

with check("cancel"):
    command = [COMMAND, "-m", MODEL, STORY, "-o", "max_tokens", "1500"]
    command += ["-o", "logit_bias", json.dumps(NO_END)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)  # what Ctrl+C does
        process.stdout.close()
    wait_until_cancelled()

report("llm")
