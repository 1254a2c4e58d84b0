"""NVIDIA's aiperf: short runs of its command, and what its report says of them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import FOLDER, KEY, MODEL, TOOL_MODEL, URL, check, raises, report

NUM_REQUESTS, NUM_TOKENS = 12, 20


def profile(kind: str, *options: str, model: str = MODEL) -> dict[str, object]:
    """`aiperf profile`; its report."""
    with tempfile.TemporaryDirectory() as out:
        command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", model]
        command += ["--url", URL.removesuffix("/v1"), "--api-key", KEY, "--endpoint-type", kind]
        command += ["--tokenizer", FOLDER, "--use-server-token-count", "--concurrency", "3"]
        command += ["--request-count", str(NUM_REQUESTS), "--isl", "40", "--osl", str(NUM_TOKENS)]
        command += ["--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", out]
        done = subprocess.run(
            [*command, *options],
            cwd=out,
            capture_output=True,
            text=True,
            timeout=200,
            encoding="utf-8",
        )
        file = Path(out, "profile_export_aiperf.json")
        assert file.exists(), (done.stdout + done.stderr)[-3000:]
        found: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
    return found


def is_whole(found: dict[str, object]) -> bool:
    """Every request was answered, with as many tokens as were asked for."""
    assert found["error_summary"] == [], found["error_summary"]
    assert found["request_count"]["avg"] == NUM_REQUESTS
    lengths = found["output_sequence_length"]
    return lengths["min"] == lengths["max"] == NUM_TOKENS


with check("chat stream"):
    found = profile("chat", "--streaming")
    assert is_whole(found)
    assert 0 < found["time_to_first_token"]["avg"] <= found["request_latency"]["avg"]
    assert found["inter_token_latency"]["avg"] > 0

with check("completions stream"):
    assert is_whole(profile("completions", "--streaming", model=TOOL_MODEL))

with check("chat"):
    assert is_whole(profile("chat"))

with (
    check("errors counted"),
    raises(AssertionError, f"All {NUM_REQUESTS} inference request(s) failed"),
):
    profile("chat", "--streaming", "--extra-inputs", "temperature:9")

report("aiperf")
