"""Makes the pictures of docs/ui.md and README.md: `python benchmarks/pictures.py [NAME ...]`.

It needs the extras `browser` and `bench` (matplotlib brings Pillow), and a Chromium. The model that
ships answers, greedily or with seeds, so the texts are the same each time; the times in them are
not. `front` is the moving picture: what the page shows, at its own speed but for the comparison,
which is played at `FASTER` times the page's.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
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
SMALL = {"width": 1000, "height": 640}
FASTER = 3
PICTURES_A_SECOND = 10
MAX_FILM_BYTES = 1_500_000


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
    reader.page.evaluate("document.querySelector('.timeline').scrollIntoView({block: 'end'})")


def tokens(reader: Reader, running: Served) -> None:
    reader.settings({"temperature": 0.7, "seed": 4})
    reader.ask("Tell me a story about a fox.")
    reader.open_tokens(13)
    reader.page.evaluate("document.querySelector('token-view').scrollIntoView()")


def settings(reader: Reader, running: Served) -> None:
    conversation(reader, running)
    reader.open_settings()


def completions(url: str, seed: int, count: int, is_over: threading.Event | None = None) -> None:
    """Some answers of all lengths, one after the other; the last one may end with the server."""
    dice = random.Random(seed)
    words = ["the", "little", "fox", "went", "to", "a", "red", "boat", "and", "saw"]
    for _ in range(count):
        if is_over and is_over.is_set():
            return
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


def engine(reader: Reader, running: Served) -> None:
    """The engine view, with 10 clients that each send one request after the other."""
    reader.open_engine()
    reader.page.select_option(".engine-controls select", "5")
    clients = [
        threading.Thread(target=completions, args=(reader.url, seed, 1000), daemon=True)
        for seed in range(10)
    ]
    for client in clients:
        client.start()
    reader.page.wait_for_timeout(8000)


def replicas(reader: Reader, running: Served) -> None:
    """The engine view of two engines, one of which dies and comes back."""
    engine(reader, running)
    history = "document.querySelector('engine-view').history"
    os.kill(running.engine_pids()[0], signal.SIGKILL)
    ended = f"[...{history}.replicas.values()].some((each) => each.absences.at(-1)?.to)"
    reader.until(ended, timeout_s=60)
    reader.page.wait_for_timeout(1000)


def comparison(reader: Reader, running: Served) -> None:
    reader.open_engine()
    reader.page.click(".compare-run")
    reader.page.wait_for_selector(".comparison table", timeout=150_000)


class Film:
    """What a page shows from now on: pictures (PNG) and when they were taken, in seconds."""

    def __init__(self, reader: Reader) -> None:
        self._page = reader.page
        self._taken: list[tuple[float, bytes]] = []
        self._shown: list[bytes] = []
        self._devtools = reader.context.new_cdp_session(reader.page)
        self._devtools.on("Page.screencastFrame", self._take)

    def _take(self, event: dict[str, Any]) -> None:
        self._taken.append((time.monotonic(), base64.b64decode(event["data"])))
        self._devtools.send("Page.screencastFrameAck", {"sessionId": event["sessionId"]})

    @contextmanager
    def scene(self, speed: float = 1, still_s: float = 0) -> Iterator[None]:
        """Take what happens inside, and show it `speed` times as fast; its last picture longer."""
        self._taken.clear()
        self._devtools.send("Page.startScreencast", {"format": "png"})
        yield
        ended_s = time.monotonic()
        self._devtools.send("Page.stopScreencast")
        began_s, index = self._taken[0][0], 0
        for number in range(int((ended_s - began_s) / speed * PICTURES_A_SECOND)):
            at_s = began_s + number * speed / PICTURES_A_SECOND
            while index + 1 < len(self._taken) and self._taken[index + 1][0] <= at_s:
                index += 1
            self._shown.append(self._taken[index][1])
        self._shown += [self._taken[-1][1]] * int(still_s * PICTURES_A_SECOND)

    def save(self, path: Path) -> None:
        """Write an animated WebP; raises `ValueError` where it is larger than `MAX_FILM_BYTES`."""
        from PIL import Image

        shown = [self._shown[0]]
        lengths_ms = [0]
        for data in self._shown:
            if data != shown[-1]:
                shown.append(data)
                lengths_ms.append(0)
            lengths_ms[-1] += 1000 // PICTURES_A_SECOND
        pictures = [Image.open(io.BytesIO(data)).convert("RGB") for data in shown]
        how: dict[str, Any] = {"duration": lengths_ms, "loop": 0, "method": 4}
        for quality in (60, 45, 30):
            pictures[0].save(
                path, save_all=True, append_images=pictures[1:], quality=quality, **how
            )
            if path.stat().st_size <= MAX_FILM_BYTES:
                return
        raise ValueError(f"{path} has {path.stat().st_size} bytes, not {MAX_FILM_BYTES}")


def front(reader: Reader, running: Served) -> Film:
    """A story beside other people's requests, the engine that makes it, and the three modes."""
    page, film, is_over = reader.page, Film(reader), threading.Event()
    reader.settings({"temperature": 0.7, "seed": 4})
    clients = [
        threading.Thread(target=completions, args=(reader.url, seed, 1000, is_over), daemon=True)
        for seed in range(12)
    ]
    for client in clients:
        client.start()
    with film.scene(still_s=0.5):
        page.type(".composer textarea", "Tell me a story about a fox.", delay=25)
        page.press(".composer textarea", "Enter")
        reader.until("document.querySelector('.message.assistant .figures')")
        page.wait_for_timeout(1500)
    page.click(".strip")
    page.wait_for_selector("engine-view canvas.lanes")
    page.select_option(".engine-controls select", "5")
    page.evaluate("document.querySelector('.engine-numbers').scrollIntoView()")
    with film.scene():
        page.wait_for_timeout(4000)
    is_over.set()
    for client in clients:
        client.join()
    page.select_option(".comparison select >> nth=1", "4")
    page.click(".compare-run")
    page.wait_for_selector(".comparison table", timeout=150_000)
    page.evaluate("document.querySelector('.comparison').scrollIntoView()")
    play = ".comparison .row button >> nth=1"
    reader.until("!document.querySelector('comparison-view').isPlaying", timeout_s=60)
    with film.scene(FASTER, still_s=1):
        page.click(play)
        reader.until("!document.querySelector('comparison-view').isPlaying", timeout_s=60)
        page.wait_for_timeout(200)
    with film.scene(still_s=2.5):
        page.evaluate("document.querySelector('.comparison table').scrollIntoView()")
        page.wait_for_timeout(300)
    return film


PICTURES: dict[str, tuple[Callable[[Reader, Served], Film | None], dict[str, Any]]] = {
    "front": (front, {"viewport": SMALL, "reduced_motion": "no-preference"}),
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

MANY_CORES = "Object.defineProperty(navigator, 'hardwareConcurrency', {value: 64})"
"""Lets the page draw as often as on a large machine: beside an engine on two cores it is thrifty.
"""

ELEMENTS = {"comparison": ".comparison"}
"""What is pictured, where it is not the whole window."""


def take(browser: Any, name: str, folder: Path) -> Path:
    """Make one picture; returns where it is."""
    prepare, context = PICTURES[name]
    how = (4, "--replicas", "2") if name == "replicas" else ()
    with tempfile.TemporaryDirectory() as data, server(Path(data), *how) as running:
        url = f"http://127.0.0.1:{running.port}"
        context = {"viewport": DESKTOP, "reduced_motion": "reduce", **context}
        reader = Reader(browser, url, **context)
        reader.context.add_init_script(MANY_CORES)
        reader.page.reload()
        film = prepare(reader, running)
        if film:
            path = folder / f"{name}.webp"
            film.save(path)
        else:
            path = folder / f"{name}.png"
            reader.page.mouse.move(0, 0)
            reader.page.wait_for_timeout(300)
            reader.picture(path, ELEMENTS.get(name, ""))
        reader.close()
        return path


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "ui")
    parser.add_argument("names", nargs="*", default=list(PICTURES))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for name in given.names:
            print(take(browser, name, given.out))


if __name__ == "__main__":
    main()
