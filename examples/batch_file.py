"""Complete the prompts of a file in one batch: `python batch_file.py prompts.jsonl answers.jsonl`.

Each line of the input is an object with a `prompt` and optionally `max_tokens`. Each line of the
output is the same object with `text` and `finish_reason` added, in the order of the input.
"""

import json
import sys
from pathlib import Path

from infer import LLM, SamplingParams


def main(source: str, target: str) -> None:
    """Read the prompts from `source`, generate, and write the answers to `target`."""
    rows = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    sampling_params = [
        SamplingParams(temperature=0, max_tokens=row.get("max_tokens", 32)) for row in rows
    ]
    with LLM(max_batch_size=8) as llm:
        outputs = llm.generate([row["prompt"] for row in rows], sampling_params)
    for row, output in zip(rows, outputs, strict=True):
        row |= {"text": output.text, "finish_reason": output.finish_reason}
    Path(target).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} answers are in {target}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
