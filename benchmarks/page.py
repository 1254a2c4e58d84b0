"""Measures the page in a browser: `python benchmarks/page.py [PART ...]`.

- `visits`: first paint, the time until the page can be used, and layout shift, with a cold cache,
  beside an idle engine.
- `answer`: an answer of 20,000 tokens at 500 a second, as the page's own `fetch` could get it: how
  long tasks of the main thread are, and how much memory is left when the answer has been closed.
- `prefix`: first token of the second turn of a conversation of 1,000 tokens, against the first.
- `comparison`: from the click to the picture of 64 mixed requests on 8 seats.
- `watch`: throughput of 32 streams with `--num` viewers against none, in alternating pairs, and the
  CPU time of the server, the engine and the viewers. Viewers are readers of the engine's stream,
  which draw nothing, or (`--viewers engine`, `strip`, `idle`) tabs of a browser on the same cores,
  with the engine view, with the strip above the field, or with nothing. Nobody debugs this browser:
  a debugger hears of each piece of the stream, which costs as much as the stream.

It needs the extra `browser` and a Chromium. The result is JSON on stdout.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.pictures import server
from tests.support.page_driver import FLAGS, Reader, chromium, chromium_path

NUM_TOKENS = 20_000
TOKENS_A_SECOND = 500
NUM_STREAMS = 32
WORDS = "one day the little fox went to the river and saw a red boat under an old tree"
WINDOW_S = 6.0
"""Seconds of one half of a pair."""
SETTLE_S = 3.0
"""Seconds before it, in which a tab has loaded."""

USABLE = """
new MutationObserver((_, watch) => {
  if (document.querySelector(".welcome .examples")) {
    window.usableAt = performance.now();
    watch.disconnect();
  }
}).observe(document, {subtree: true, childList: true});
"""
VISIT = """
() => new Promise((done) => {
  let shift = 0;
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) shift += entry.value;
  }).observe({type: "layout-shift", buffered: true});
  setTimeout(() => done({
    paint_ms: performance.getEntriesByName("first-contentful-paint")[0].startTime,
    usable_ms: window.usableAt, layout_shift: shift,
    bytes: performance.getEntriesByType("resource").reduce((n, e) => n + e.transferSize, 0),
  }), 300);
})
"""
SCRIPTED = """
const real = window.fetch;
const words = "one day a little **fox** went to the `old` mill and sang, 'la la'. ".split(" ");
const parts = ["\\n\\n## A title\\n\\n", "\\n\\n- one\\n- two\\n\\n",
  "\\n\\n```python\\nx = f(1)\\n```\\n\\n", "\\n\\n| a | b |\\n|---|---|\\n| 1 | 2 |\\n\\n"];
const text = (i) => (i % 80 === 79 ? parts[(i / 80 | 0) % parts.length]
  : words[i % words.length] + " ");
window.scripted = {tokens: 0, rate: 1};
window.fetch = (path, how) => {
  if (path !== "/v1/chat/completions") return real(path, how);
  const {tokens, rate} = window.scripted;
  const coder = new TextEncoder();
  const stream = new ReadableStream({start(out) {
    const write = (value) => out.enqueue(coder.encode("data: " + JSON.stringify(value) + "\\n\\n"));
    const chunk = (i) => write({id: "chatcmpl-1", model: "infer-demo", choices: [{index: 0,
      delta: {content: text(i)}, token_ids: [i % 4096], finish_reason: null}]});
    const began = performance.now();
    let count = 0;
    const timer = setInterval(() => {
      const due = Math.min(tokens, Math.floor(((performance.now() - began) / 1000) * rate));
      for (; count < due; count++) chunk(count);
      if (count < tokens) return;
      clearInterval(timer);
      write({id: "chatcmpl-1", model: "infer-demo", choices: [{index: 0, delta: {},
        finish_reason: "stop"}], usage: {prompt_tokens: 10, completion_tokens: tokens}});
      out.close();
    }, 4);
  }});
  return Promise.resolve(new Response(stream, {headers: {"content-type": "text/event-stream"}}));
};
"""


def visits(browser: Any, url: str) -> dict[str, Any]:
    """Five first visits: nothing is cached."""
    found = [visit(browser, url) for _ in range(5)]
    worst = {name: max(each[name] for each in found) for name in found[0]}
    return {"worst": worst, "visits": found}


def visit(browser: Any, url: str) -> dict[str, Any]:
    """One of them."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.add_init_script(USABLE)
    page.goto(url)
    page.wait_for_selector(".welcome .examples")
    found: dict[str, Any] = page.evaluate(VISIT)
    context.close()
    return found


def answer(browser: Any, url: str) -> dict[str, Any]:
    """A long answer; the browser's trace has every task of the main thread."""
    reader = Reader(browser, url)
    page = reader.page
    page.add_init_script(SCRIPTED)
    page.reload()
    page.wait_for_selector(".welcome")
    devtools = reader.context.new_cdp_session(page)
    devtools.send("Performance.enable")

    def ask(count: int) -> None:
        page.evaluate(
            "([tokens, rate]) => { scripted = {tokens, rate}; }", [count, TOKENS_A_SECOND]
        )
        reader.send("Tell me a story.")
        seconds = count / TOKENS_A_SECOND
        reader.until(
            "document.querySelector('.message.assistant .figures')", timeout_s=20 + 2 * seconds
        )
        page.wait_for_timeout(500)

    def close() -> dict[str, float]:
        page.keyboard.press("Control+Shift+O")
        page.wait_for_selector(".welcome")
        page.wait_for_timeout(500)
        devtools.send("HeapProfiler.collectGarbage")
        metrics = devtools.send("Performance.getMetrics")["metrics"]
        names = {"JSHeapUsedSize": "heap_bytes", "Nodes": "nodes"}
        return {names[each["name"]]: each["value"] for each in metrics if each["name"] in names}

    ask(1000)  # loads the modules that colour code
    before = close()
    browser.start_tracing(page=page, categories=["toplevel", "__metadata"])
    began_s = time.monotonic()
    ask(NUM_TOKENS)
    seconds = time.monotonic() - began_s
    tasks = main_thread_tasks(json.loads(browser.stop_tracing()))
    elements = page.evaluate("document.querySelectorAll('text-view *').length")
    length = page.evaluate("document.querySelector('text-view').textContent.length")
    after = close()
    reader.close()
    return {
        "seconds": seconds,
        "elements": elements,
        "characters": length,
        "tasks": len(tasks),
        "task_p99_ms": tasks[int(0.99 * len(tasks))],
        "task_max_ms": tasks[-1],
        "tasks_over_50_ms": sum(task > 50 for task in tasks),
        "before": before,
        "after": after,
        "heap_ratio": after["heap_bytes"] / before["heap_bytes"],
    }


def main_thread_tasks(trace: dict[str, Any]) -> list[float]:
    """Milliseconds of the tasks of the page's main thread, of at least 0.1 ms, sorted. The browser
    has further threads of that name; the page's is the one that works most."""
    events = trace["traceEvents"]
    names = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and e["args"]["name"] == "CrRendererMain"
    }
    found: dict[tuple[int, int], list[float]] = {where: [] for where in names}
    for event in events:
        where = (event["pid"], event["tid"])
        is_task = event.get("name", "").endswith("RunTask") and event.get("ph") == "X"
        if is_task and where in found and event["dur"] >= 100:
            found[where].append(event["dur"] / 1000)
    return sorted(max(found.values(), key=sum))


def prefix(browser: Any, url: str) -> dict[str, Any]:
    """Five conversations, each with a first message of about 1,000 tokens and a short second."""
    found = []
    words = WORDS.split()
    for start in range(5):
        reader = Reader(browser, url)
        reader.settings({"max_tokens": 16, "temperature": 0})
        text = " ".join(itertools.islice(itertools.cycle(words), start, start + 960))
        reader.ask(f"{start} {text}")
        reader.ask("And then?")
        first, second = reader.page.evaluate(
            "[...document.querySelectorAll('chat-message')].map((each) => each.message.figures)"
            ".filter(Boolean).map(({promptTokens, cachedTokens, firstMs}) =>"
            " ({promptTokens, cachedTokens, firstMs}))"
        )
        found.append({"first": first, "second": second})
        reader.close()
    ratios = [each["second"]["firstMs"] / each["first"]["firstMs"] for each in found]
    return {"median_ratio": statistics.median(ratios), "ratios": ratios, "turns": found}


def comparison(browser: Any, url: str) -> dict[str, Any]:
    """From the click to the picture."""
    reader = Reader(browser, url)
    page = reader.page
    page.goto(f"{url}/#/engine")
    page.wait_for_selector(".compare-run")
    began_s = time.monotonic()
    page.click(".compare-run")
    page.wait_for_selector(".comparison tbody", timeout=120_000)
    seconds = time.monotonic() - began_s
    rows = page.locator(".comparison tbody tr").all_inner_texts()
    reader.close()
    return {"seconds": seconds, "rows": rows}


# ---- the cost of watching


class Load:
    """`NUM_STREAMS` clients, each of which asks for one answer after the other."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url)
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        connection = http.client.HTTPConnection(self._place.hostname or "", self._place.port)
        # Of different lengths: streams that begin again at once would make windows differ.
        body = {
            "prompt": "Once upon a time",
            "max_tokens": 200 + 37 * (number * 7 % NUM_STREAMS),
            "ignore_eos": True,
            "stream": True,
        }
        while not self._is_over:
            data = json.dumps({**body, "seed": number})
            connection.request(
                "POST", "/v1/completions", data, {"content-type": "application/json"}
            )
            response = connection.getresponse()
            while not self._is_over and response.read1(65536):
                pass
        connection.close()

    def close(self) -> None:
        """End it."""
        self._is_over = True
        for thread in self._threads:
            thread.join()


def num_sampled(url: str) -> int:
    """Output tokens of the server until now."""
    with urllib.request.urlopen(f"{url}/stats") as reply:
        return int(json.load(reply)["engine"]["num_sampled_tokens"])


@contextmanager
def readers(url: str, count: int) -> Iterator[None]:
    """So many readers of the stream, which look at nothing."""
    place = urlsplit(url)
    is_over = threading.Event()

    def read() -> None:
        connection = http.client.HTTPConnection(place.hostname or "", place.port)
        connection.request("GET", "/v1/engine/events")
        response = connection.getresponse()
        while not is_over.is_set() and response.read1(65536):
            pass
        connection.close()

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield
    is_over.set()
    for thread in threads:
        thread.join()


ANSWERING = (
    "import('/ui/lib/chats.js').then(({chats}) => {"
    " chats.running.set('', {message: {conversation: ''}}); chats.changed(); })"
)
"""Lets the strip believe that something is answered."""


@contextmanager
def tabs(url: str, count: int, shown: str) -> Iterator[None]:
    """So many tabs with the engine view, with the strip, or with a page that is not used."""
    from playwright.sync_api import sync_playwright  # `--help` does without

    with ExitStack() as stack:
        profile = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        command = [chromium_path(), *FLAGS, "--headless", "--remote-debugging-port=0"]
        command += ["--window-size=1280,860", f"--user-data-dir={profile}", "about:blank"]
        nowhere = subprocess.DEVNULL
        running = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
        process = stack.enter_context(running)
        stack.callback(process.kill)
        told = profile / "DevToolsActivePort"
        until(lambda: told.exists() and told.read_text(encoding="utf-8").count("\n") >= 1)
        port = told.read_text(encoding="utf-8").split()[0]
        with sync_playwright() as playwright:
            browser = playwright.chromium.connect_over_cdp(f"http://127.0.0.1:{port}")
            for _ in range(count):
                page = browser.contexts[0].new_page()
                page.goto(f"{url}/#/engine" if shown == "engine" else url)
                page.wait_for_selector("engine-view canvas.lanes, .welcome")
                if shown == "strip":
                    page.evaluate(ANSWERING)
                    page.wait_for_selector(".strip canvas")
            browser.close()  # the tabs stay
        yield


def until(is_so: Callable[[], bool]) -> None:
    """Wait for something, for 30 s at most."""
    ends_s = time.monotonic() + 30
    while not is_so():
        if time.monotonic() > ends_s:
            raise TimeoutError("the browser has not begun")
        time.sleep(0.02)


def cpu_s(server_pid: int) -> dict[str, float]:
    """CPU time until now, in seconds: of the server, of its processes, of the browser's processes,
    and of this one, which has the clients."""
    found = {"server": 0.0, "engine": 0.0, "browser": 0.0, "clients": 0.0}

    def add(pid: int, kind: str) -> None:
        with suppress(OSError):  # it may end meanwhile
            fields = (
                Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            )
            found[kind] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            for task in Path(f"/proc/{pid}/task").iterdir():
                for child in (task / "children").read_text(encoding="utf-8").split():
                    if kind == "clients":
                        add(int(child), "server" if int(child) == server_pid else "browser")
                    else:
                        add(int(child), "engine" if kind == "server" else kind)

    add(os.getpid(), "clients")
    return found


def watch(server_pid: int, url: str, viewers: Callable[[], Any], num_pairs: int) -> dict[str, Any]:
    """Pairs of windows without and with viewers, each pair in the other order."""
    load = Load(url)
    time.sleep(8)  # until the streams have drifted apart
    spent: dict[bool, dict[str, float]] = {False: {}, True: {}}

    def rate(is_watched: bool) -> float:
        time.sleep(SETTLE_S)
        before, cpu_before, began_s = num_sampled(url), cpu_s(server_pid), time.monotonic()
        time.sleep(WINDOW_S)
        found = (num_sampled(url) - before) / (time.monotonic() - began_s)
        for kind, seconds in cpu_s(server_pid).items():
            share = (seconds - cpu_before[kind]) / (WINDOW_S * num_pairs)
            spent[is_watched][kind] = spent[is_watched].get(kind, 0.0) + share
        return found

    pairs = []
    for number in range(num_pairs):
        found = {}
        for is_watched in (number % 2 == 0, number % 2 == 1):
            with viewers() if is_watched else ExitStack():
                found[is_watched] = rate(is_watched)
        pairs.append((found[False], found[True]))
    load.close()
    costs = [1 - watched / alone for alone, watched in pairs]
    return {
        "median_cost": statistics.median(costs),
        "mean_cost": statistics.mean(costs),
        "standard_error": statistics.stdev(costs) / len(costs) ** 0.5,
        "cores_alone": spent[False],
        "cores_watched": spent[True],
        "tokens_a_second": pairs,
    }


PARTS: dict[str, Callable[[Any, str], dict[str, Any]]] = {
    "visits": visits,
    "answer": answer,
    "prefix": prefix,
    "comparison": comparison,
}


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["visits", "answer", "prefix", "comparison"])
    parser.add_argument(
        "--viewers", choices=["stream", "engine", "strip", "idle"], default="stream"
    )
    parser.add_argument("--num", type=int, default=4, help="how many viewers")
    parser.add_argument("--pairs", type=int, default=12, help="of windows without and with them")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        seats = NUM_STREAMS if "watch" in given.parts else 8
        with server(Path(folder), seats) as running, ExitStack() as stack:
            url = f"http://127.0.0.1:{running.port}"
            browser = None
            if given.parts != ["watch"]:
                browser = stack.enter_context(chromium())
            for part in given.parts:
                if part == "watch":
                    found[part] = watch(
                        running.process.pid,
                        url,
                        lambda: (
                            readers(url, given.num)
                            if given.viewers == "stream"
                            else tabs(url, given.num, given.viewers)
                        ),
                        given.pairs,
                    )
                else:
                    found[part] = PARTS[part](browser, url)
    print(json.dumps({"load": os.getloadavg(), **found}, indent=1))


if __name__ == "__main__":
    main()
