"""Measures the page in a browser: `python benchmarks/page.py [--tokens 20000] [--rate 500]`.

First paint and the time until the page can be used, with a cold cache, beside an idle engine; how
much the layout shifts; and an answer that grows for a while, as text of a given rate: how long the
main thread is busy at a time, and how much memory is left when the answer has been closed. It needs
the extra `browser` and a Chromium. The result is JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.pictures import server
from tests.support.page_driver import Reader, chromium

OPENING = """
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
WATCH = """
new MutationObserver((_, watch) => {
  if (document.querySelector(".welcome .examples")) {
    window.usableAt = performance.now();
    watch.disconnect();
  }
}).observe(document, {subtree: true, childList: true});
"""
GROWING = """
async ([tokens, rate]) => {
  const words = "one day a little **fox** went to the `old` mill and sang, 'la la'. ".split(" ");
  const parts = ["\\n\\n## A title\\n\\n", "\\n\\n- one\\n- two\\n\\n",
    "\\n\\n```python\\nx = f(1)\\n```\\n\\n", "\\n\\n| a | b |\\n|---|---|\\n| 1 | 2 |\\n\\n"];
  await import("/ui/lib/text_view.js");
  await import("/ui/vendor/highlight.js");
  const tasks = [];
  new PerformanceObserver((list) => tasks.push(...list.getEntries().map((e) => e.duration)))
    .observe({type: "longtask"});
  globalThis.gc?.();
  const before = performance.memory.usedJSHeapSize;
  const view = document.createElement("text-view");
  document.querySelector(".messages").append(view);
  let text = "", count = 0, frames = 0;
  const began = performance.now();
  const frame = () => { frames++; if (count < tokens) requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  while (count < tokens) {
    const due = Math.min(tokens, Math.floor(((performance.now() - began) / 1000) * rate));
    for (; count < due; count++) {
      const isLast = count % 80 === 79;
      text += isLast ? parts[(count / 80 | 0) % parts.length] : words[count % words.length] + " ";
    }
    view.value = {text, isOpen: true};
    await new Promise((done) => setTimeout(done, 1000 / rate));
  }
  view.value = {text, isOpen: false};
  const seconds = (performance.now() - began) / 1000;
  await new Promise((done) => setTimeout(done, 500));
  const elements = view.querySelectorAll("*").length;
  view.remove();
  text = "";
  await new Promise((done) => setTimeout(done, 500));
  globalThis.gc?.();
  const after = performance.memory.usedJSHeapSize;
  tasks.sort((a, b) => a - b);
  return {seconds, frames_per_s: frames / seconds, elements, tasks_over_50_ms: tasks.length,
    longest_task_ms: tasks.at(-1) ?? 0, heap_before: before, heap_after: after};
}
"""


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rate", type=int, default=500, help="tokens a second")
    parser.add_argument("--visits", type=int, default=5)
    given = parser.parse_args()
    flags = ["--js-flags=--expose-gc", "--enable-precise-memory-info"]
    with (
        tempfile.TemporaryDirectory() as folder,
        server(Path(folder)) as url,
        chromium(flags) as browser,
    ):
        visits = [visit(browser, url) for _ in range(given.visits)]
        reader = Reader(browser, url)
        growing = reader.page.evaluate(GROWING, [given.tokens, given.rate])
        reader.close()
    print(json.dumps({"visits": visits, "growing": growing}, indent=1))


def visit(browser: Any, url: str) -> dict[str, Any]:
    """A first visit: nothing is cached."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.add_init_script(WATCH)
    page.goto(url)
    page.wait_for_selector(".welcome .examples")
    found: dict[str, Any] = page.evaluate(OPENING)
    context.close()
    return found


if __name__ == "__main__":
    main()
