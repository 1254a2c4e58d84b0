"""Runs the real clients and writes docs/clients.md: `python tests/clients/table.py`.

The tests do the work (`pytest -m clients`); the page is made of what they note. Exit code 1 if a
client is missing or a check has failed.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.clients.harness import CLIENTS  # noqa: E402

PAGE = ROOT / "docs" / "clients.md"


def run() -> dict[str, dict[str, Any]]:
    """What each client's test has noted, by name."""
    with tempfile.TemporaryDirectory() as folder:
        findings = Path(folder) / "findings"
        source = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(source),
            "INFER_CLIENTS_FINDINGS": str(findings),
        }
        command = [sys.executable, "-m", "pytest", "-m", "clients", "tests/clients"]
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        lines = findings.read_text(encoding="utf-8").splitlines() if findings.exists() else []
    return {each["name"]: each for each in map(json.loads, lines)}


def page(found: dict[str, dict[str, Any]]) -> str:
    """The whole of docs/clients.md."""
    parts = [
        "# Clients\n",
        "Written by `python tests/clients/table.py`; do not edit. Unmodified clients, each in its"
        " own environment as `pip install` or `npm install` makes it, against one"
        " `infer serve --api-keys` with the model that ships (and the same model with a chat"
        " template that shows it tools). Tool loops are three calls, one behind the other, and an"
        " answer: with each published chat template of the families that are loaded, a model that"
        " says what it is told, and the server's own templating and parsing"
        " (`tests/clients/loops.py`). What a script has to say is in `tests/clients/drivers`.\n",
        f"{datetime.date.today().isoformat()}, Python {platform.python_version()},"
        f" {platform.system()}.\n",
        "| client | version | checks | verdict |\n|---|---|---|---|",
    ]
    for client in CLIENTS:
        told = found.get(client.name)
        if told is None:
            parts.append(f"| {client.name} | — | — | did not run |")
            continue
        good = sum(check["ok"] for check in told["checks"])
        verdict = "pass" if good == len(told["checks"]) else "FAIL"
        parts.append(
            f"| {client.name} | {told['version']} | {good} of {len(told['checks'])} | {verdict} |"
        )
    for client in CLIENTS:
        parts.append(f"\n## {client.name}\n\n{client.settings}.\n")
        checks = found.get(client.name, {}).get("checks", [])
        parts.append("Exercised: " + "; ".join(check["name"] for check in checks) + ".")
        parts += [f"\nFAILED {each['name']}: {each['what']}" for each in checks if not each["ok"]]
    return "\n".join(parts) + "\n"


def main() -> int:
    found = run()
    PAGE.write_text(page(found), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    checks = [check["ok"] for each in found.values() for check in each["checks"]]
    return int(len(found) < len(CLIENTS) or not all(checks))


if __name__ == "__main__":
    sys.exit(main())
