"""What the Python drivers share: named checks that go on after a failure, and one JSON document.

A driver is called `python DRIVER.py BASE_URL API_KEY MODEL TOOL_MODEL FOLDER LOOPS`: two models
behind one address, the folder of the first, for clients that need a tokenizer, and the address of
`loops.py`, whose models call a tool three times and then answer. It runs in the client's own
environment, so nothing but the standard library is here.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

URL, KEY, MODEL, TOOL_MODEL, FOLDER, LOOPS = sys.argv[1:]
CITIES, LOOP_ANSWER = ["Ulm", "Bonn", "Jena"], "All three are sunny."
"""Of which a loop's model asks for the weather, and what it answers then."""
STORY = "Once upon a time"
QUESTION = [{"role": "user", "content": "Tell me a story about a fox."}]
TOO_LONG = [{"role": "user", "content": "A fox. " * 3000}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Berlin", "Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""Arguments that a model of any size can fill in, because a grammar leaves it little choice."""

_checks: list[dict[str, object]] = []


@contextmanager
def check(name: str) -> Iterator[None]:
    """One thing that is exercised; what goes wrong in it is a finding, and the next one follows."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = Path(__file__).resolve()
        where = [f for f in frames if Path(f.filename).parent == own.parent][-1]
        what = f"{type(error).__name__}: {error} (line {where.lineno}: {where.line})"
        _checks.append({"name": name, "ok": False, "what": what[:2000]})
    else:
        _checks.append({"name": name, "ok": True, "what": ""})


@contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    """The block must raise this very exception, and its text must say these words."""
    found = None
    try:
        yield
    except kind as error:
        found = error
    assert found is not None, f"no {kind.__name__} was raised"
    missing = [word for word in words if word not in str(found)]
    assert not missing, f"{found} does not say {missing}"


def weather_is_valid(arguments: dict[str, object]) -> bool:
    """Whether these arguments are as `WEATHER` asks."""
    return arguments["city"] in ("Berlin", "Paris", "Rome") and arguments["days"] in range(1, 8)


def wait_until_cancelled() -> None:
    """Whoever closes a stream has ended its request: the server's newest trace must say so."""
    deadline = time.monotonic() + 10
    while (newest := _requests()[0])["outcome"] != "disconnected":
        assert time.monotonic() < deadline, f"it runs on: {newest}"
        time.sleep(0.02)


def _requests() -> list[dict[str, object]]:
    headers = {"authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{URL}/requests?model={MODEL}", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        found: list[dict[str, object]] = json.load(answer)["data"]
    return found


def loops_name(streams: bool = False) -> str:
    """What a check of all loops is called."""
    return f"tool loops, {len(loop_models())} published templates{', streams' if streams else ''}"


LOOP_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How the weather is.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def loop_models() -> list[str]:
    """Their names: one for each published chat template."""
    with urllib.request.urlopen(f"{LOOPS}/models", timeout=10) as answer:
        return [model["id"] for model in json.load(answer)["data"]]


def report(package: str, **more: object) -> None:
    """The last line that the driver writes; some clients write others."""
    print("\n" + json.dumps({"version": version(package), "checks": _checks, **more}))
