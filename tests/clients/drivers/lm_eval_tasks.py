"""EleutherAI's lm-evaluation-harness: `local-completions` on two local tasks.

What it found goes along with the checks; the test compares it with transformers. The tokens come
from the server too (`/tokenizer_info`, `/tokenize`), so the client needs no tokenizer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import KEY, MODEL, URL, check, report

TASKS = Path(__file__).resolve().parents[1] / "tasks"
found: dict[str, object] = {}


def evaluate(
    task: str, batch_size: int = 1, **settings: object
) -> tuple[float, list[dict[str, object]]]:
    """`lm-eval run`: the task's score, and its samples in the order of the file."""
    arguments = {"model": MODEL, "base_url": f"{URL}/completions", "auth_token": KEY, **settings}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("lm-eval")), "run"]
        command += ["--model", "local-completions", "--tasks", task, "--include_path", str(TASKS)]
        command += ["--batch_size", str(batch_size)]
        command += ["--model_args", ",".join(f"{name}={arguments[name]}" for name in arguments)]
        command += ["--log_samples", "--output_path", folder]
        environment = {
            **os.environ,
            "OPENAI_API_KEY": KEY,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": folder,
        }
        done = subprocess.run(
            command,
            cwd=TASKS,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            encoding="utf-8",
        )
        assert done.returncode == 0, done.stderr[-1500:]
        (results,) = Path(folder).rglob("results_*.json")
        (samples,) = Path(folder).rglob("samples_*.jsonl")
        scores = json.loads(results.read_text(encoding="utf-8"))["results"][task]
        lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    score = next(scores[name] for name in ("acc,none", "exact_match,none") if name in scores)
    return score, sorted(lines, key=lambda line: line["doc_id"])


with check("loglikelihood"):
    accuracy, samples = evaluate("endings", tokenizer_backend="remote")
    likelihoods = [[float(one[0][0]) for one in sample["resps"]] for sample in samples]
    found["endings"] = {"accuracy": accuracy, "likelihoods": likelihoods}

with check("loglikelihood, batches of 8, 4 at once"):
    again, samples = evaluate("endings", batch_size=8, num_concurrent=4)
    batched = [[float(one[0][0]) for one in sample["resps"]] for sample in samples]
    assert (again, batched) == (accuracy, likelihoods)

with check("generate"):
    accuracy, samples = evaluate("stories", num_concurrent=4)
    texts = [sample["resps"][0][0] for sample in samples]
    found["stories"] = {"accuracy": accuracy, "texts": texts}

report("lm_eval", found=found)
