"""Makes the pictures of docs/ui.md: `python benchmarks/pictures.py [--out docs/ui]`.

It needs the extra `browser` and a Chromium. The model that ships answers, greedily or with seeds,
so the texts are the same each time; the times in them are not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.support.page_driver import Reader, chromium  # noqa: E402
from tests.support.server_process import ENV, Served  # noqa: E402

PHONE = {"width": 390, "height": 780}
DESKTOP = {"width": 1280, "height": 860}
TALL = {"width": 1280, "height": 1400}


@contextmanager
def server(folder: Path, num_seats: int = 8, *options: str) -> Iterator[Served]:
    """A server with the shipped model."""
    command = [sys.executable, "-m", "infer", "serve", "--port", "0"]
    command += [
        "--max-batch-size",
        str(num_seats),
        "--sessions",
        f"sqlite:///{folder / 'sessions.db'}",
        *options,
    ]
    with subprocess.Popen(
        command, env=ENV, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://[0-9.]+:[0-9]+", process.stdout.readline())
            assert found, "the server did not start"
            yield Served(process, found[0])
        finally:
            process.terminate()


def conversation(reader: Reader, running: Served) -> None:
    """Three conversations; the last one has two turns."""
    reader.settings({"temperature": 0.7, "seed": 4})
    reader.ask("What is 17 + 25?")
    reader.page.keyboard.press("Control+Shift+O")
    reader.ask("Tell me a story about a girl named Mia and a red kite.")
    reader.page.keyboard.press("Control+Shift+O")
    reader.ask("Tell me a story about a fox.")
    reader.ask("Who is in the story?")
    reader.page.wait_for_selector(".meter")


def desktop(reader: Reader, running: Served) -> None:
    conversation(reader, running)


def happened(reader: Reader, running: Served) -> None:
    conversation(reader, running)
    reader.open_happened()


def tokens(reader: Reader, running: Served) -> None:
    reader.settings({"temperature": 0.7, "seed": 4})
    reader.ask("Tell me a story about a fox.")
    reader.open_tokens(13)
    reader.page.evaluate("document.querySelector('token-view').scrollIntoView()")


def settings(reader: Reader, running: Served) -> None:
    conversation(reader, running)
    reader.open_settings()


def completions(url: str, seed: int, count: int) -> None:
    """Some answers of all lengths, one after the other; the last one may end with the server."""
    dice = random.Random(seed)
    words = ["the", "little", "fox", "went", "to", "a", "red", "boat", "and", "saw"]
    for _ in range(count):
        length = dice.choice([5, 20, 60, 150, 300])
        body = {
            "model": "infer-demo",
            "prompt": "Once upon a time " + " ".join(dice.choice(words) for _ in range(length)),
            "max_tokens": dice.choice([20, 60, 120, 240]),
            "seed": seed,
        }
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(
            url + "/v1/completions", json.dumps(body).encode(), headers
        )
        try:
            urllib.request.urlopen(request, timeout=120).read()
        except OSError:
            return


def engine(reader: Reader, running: Served, num_answers: int = 12) -> None:
    """The engine view, with 10 clients that each send one request after the other."""
    reader.open_engine()
    reader.page.select_option(".engine-controls select", "5")
    clients = [
        threading.Thread(target=completions, args=(reader.url, seed, num_answers), daemon=True)
        for seed in range(10)
    ]
    for client in clients:
        client.start()
    reader.page.wait_for_timeout(8000)


def replicas(reader: Reader, running: Served) -> None:
    """The engine view of two engines, one of which dies and comes back."""
    engine(reader, running, 200)
    history = "document.querySelector('engine-view').history"
    os.kill(running.engine_pids()[0], signal.SIGKILL)
    ended = f"[...{history}.replicas.values()].some((each) => each.absences.at(-1)?.to)"
    reader.until(ended, timeout_s=60)
    reader.page.wait_for_timeout(1000)


def comparison(reader: Reader, running: Served) -> None:
    reader.open_engine()
    reader.page.click(".compare-run")
    reader.page.wait_for_selector(".comparison table", timeout=150_000)


PICTURES: dict[str, tuple[Callable[[Reader, Served], None], dict[str, Any]]] = {
    "desktop": (desktop, {}),
    "happened": (happened, {}),
    "tokens": (tokens, {}),
    "settings": (settings, {}),
    "dark": (conversation, {"color_scheme": "dark"}),
    "chinese": (conversation, {"locale": "zh-CN"}),
    "phone": (conversation, {"viewport": PHONE}),
    "comparison": (comparison, {"viewport": TALL}),
    "engine": (engine, {}),
    "replicas": (replicas, {"viewport": TALL}),
}

ELEMENTS = {"comparison": ".comparison"}
"""what is pictured, where it is not the whole window"""


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "ui")
    parser.add_argument("names", nargs="*", default=list(PICTURES))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for name in given.names:
            prepare, context = PICTURES[name]
            how = (4, "--replicas", "2") if name == "replicas" else ()
            with tempfile.TemporaryDirectory() as folder, server(Path(folder), *how) as running:
                url = f"http://127.0.0.1:{running.port}"
                reader = Reader(
                    browser, url, **{"viewport": DESKTOP, "reduced_motion": "reduce", **context}
                )
                prepare(reader, running)
                reader.page.mouse.move(0, 0)
                reader.page.wait_for_timeout(300)
                reader.picture(given.out / f"{name}.png", ELEMENTS.get(name, ""))
                reader.close()
                print(given.out / f"{name}.png")


if __name__ == "__main__":
    main()
