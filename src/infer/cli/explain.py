"""`infer explain`: the story of a request, asked of the server that had it, as a page of text.

What a reader wants is on top (how long it took, and what for), the events in their order below, the
slowest pauses last. Parts of a prompt that follow each other are one line.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from infer.errors import InferError

Fields = dict[str, Any]


def fetch(url: str, request_id: str, api_key: str | None) -> Fields:
    """The story as the server tells it."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    address = f"{url.rstrip('/')}/v1/requests/{quote(request_id, safe='')}"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as reply:
            story: Fields = json.load(reply)
            return story
    except urllib.error.HTTPError as error:
        raise InferError(json.load(error)["error"]["message"]) from None
    except (OSError, ValueError) as error:
        raise InferError(f"no server of ours answers at {url}: {error}") from None


def run_explain(url: str, request_id: str, api_key: str | None) -> None:
    """`infer explain`."""
    write(fetch(url, request_id, api_key), Console(highlight=False))


def write(story: Fields, console: Console) -> None:
    """Print a story."""
    end = story["outcome"] or f"still {story['state']}"
    console.print(f"[bold]{story['id']}[/]  {story['path']}  [bold]{end}[/]")
    cached = f", {story['cached_tokens']} of them cached" if story["cached_tokens"] else ""
    console.print(
        f"{story['prompt_tokens']} prompt tokens{cached}; {story['completion_tokens']} generated"
    )
    marks = [0.0, story["admitted_ms"], story["first_token_ms"], story["total_ms"]]
    parts = []
    for name, start, stop in zip(("waiting", "prompt", "answer"), marks, marks[1:], strict=False):
        if start is not None and stop is not None:
            parts.append(f"{name} [bold]{_ms(stop - start)}[/]")
    console.print(" + ".join(parts) + (f" = {_ms(marks[-1])}" if marks[-1] else ""))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(justify="right", style="cyan", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for at_ms, kind, text in _lines(story["events"]):
        table.add_row(_ms(at_ms), kind, text)
    console.print(table)
    if story["events_left_out"]:
        console.print(f"[dim]… and {story['events_left_out']} more events[/]")
    if story["slowest_gaps"]:
        console.print("[dim]the slowest pauses:[/]")
    for gap in story["slowest_gaps"]:
        console.print(_gap(gap))


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def _lines(events: list[Fields]) -> Iterator[tuple[float, str, str]]:
    for kind, group in groupby(events, itemgetter("event")):
        run = list(group)
        lines = [(event, kind.replace("_", " "), _text(event)) for event in run]
        if kind == "chunk":
            tokens = sum(chunk["tokens"] for chunk in run)
            last = f" until {_ms(run[-1]['at_ms'])}" if len(run) > 1 else ""
            steps = "one step" if len(run) == 1 else f"{len(run)} steps"
            text = f"{tokens} tokens from {run[0]['from_token']} on, in {steps}{last}"
            lines = [(run[0], "prompt", text)]
        for event, name, text in lines:
            choice = f"choice {event['choice']}: " if "choice" in event else ""
            yield event["at_ms"], name, choice + text


def _text(event: Fields) -> str:
    match event["event"]:
        case "queued" | "resumed":
            behind = f": {', '.join(event['behind'])}" if event["behind"] else ""
            return f"behind {event['waiting_before']} waiting, {event['running']} running{behind}"
        case "admitted":
            return f"{event['cached_tokens']} of {event['of_tokens']} tokens found in the cache"
        case "preempted":
            needed = f"; its pages went to {event['needed_by'][0]}" if event["needed_by"] else ""
            return f"{event['lost_tokens']} computed tokens lost{needed}"
        case "finished":
            return str(event["outcome"])
    return ""


def _gap(gap: Fields) -> str:
    step = gap["slowest_step"]
    doing = f"{step['sequences']} sequence{'s' if step['sequences'] != 1 else ''}"
    if step["prompt_tokens"]:
        doing += f", {step['prompt_tokens']} prompt tokens of {', '.join(step['prompts_of'])}"
    several = "" if gap["steps"] == 1 else f" ({gap['steps']} steps)"
    return (
        f"[yellow]{_ms(gap['gap_ms'])}[/] before token {gap['token']}{several}:"
        f" step {step['step']} took {_ms(step['step_ms'])} with {doing}"
    )
