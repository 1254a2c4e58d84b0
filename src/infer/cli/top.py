"""`infer top`: what an engine does, live in the terminal, from the stream of its steps."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from infer.cli.engine_state import EngineState, Fields, SeenRequest
from infer.cli.explain import one_line, opened
from infer.cli.plain import plain
from infer.cli.pressed_keys import ESCAPE, interrupt_main, pressed_keys
from infer.errors import InferError

MAX_LINE_BYTES = 1 << 20
"""The most bytes of a line; a frame of the server has less than 200 KB."""
REFRESH_S = 0.2
ONCE_S = 1.2
"""The seconds after which `--once` shows what there is: the first frames have come."""
NARROW = 80
"""Columns of a terminal below which requests have short names and no age."""
WIDE = 100
"""Columns of a terminal that is wide enough for all that is known of replicas, and for all gauges
in one line."""
KEYS, PAUSED = "q leaves, p pauses", "paused: p goes on, q leaves"
"""What is said of the keys."""
_BLOCKS = " ▁▂▃▄▅▆▇█"
_END = {
    "shutting_down": "the server shuts down",
    "key_revoked": "the key was revoked",
    "replaced": "another viewer got the place: too many watch this engine",
    "failed": "the server has failed; its log says why",
}


def events_of(lines: Iterator[bytes]) -> Iterator[tuple[str, Fields]]:
    """Kind and data of each server-sent event. Raises `ValueError` for what is none."""
    kind = ""
    for line in lines:
        text = line.decode("utf-8").rstrip("\r\n")
        if text.startswith("event: "):
            kind = text.removeprefix("event: ")
        elif text.startswith("data: "):
            fields = json.loads(text.removeprefix("data: "))
            if not isinstance(fields, dict):
                raise ValueError("an event that is no object")
            yield kind, fields


def _lines(reply: Any) -> Iterator[bytes]:
    while line := reply.readline(MAX_LINE_BYTES):
        if not line.endswith(b"\n"):
            raise ValueError("a line that does not end")
        yield line


class _View:
    """The full screen, and what its keys do: q and Esc leave, p pauses."""

    def __init__(self, console: Console, url: str) -> None:
        self._live = Live(console=console, auto_refresh=False, screen=True)
        self._console, self._url = console, url
        self._shown_s = 0.0
        self._is_paused = self._shows_pause = False

    def press(self, key: str) -> None:
        """A key was pressed."""
        if key in ("q", "Q", ESCAPE):
            interrupt_main()
        elif key in ("p", "P", " "):
            self._is_paused = not self._is_paused

    def show(self, state: EngineState) -> None:
        """Show the state, unless it was shown just now or the view pauses."""
        now_s, is_paused = time.monotonic(), self._is_paused
        changes = is_paused != self._shows_pause
        if not changes and (is_paused or now_s < self._shown_s + REFRESH_S):
            return
        if not self._shown_s:
            self.enter()
        self._shown_s, self._shows_pause = now_s, is_paused
        width, height = self._console.size
        shown = picture(state, self._url, width, height, keys=PAUSED if is_paused else KEYS)
        self._live.update(shown, refresh=True)

    def enter(self) -> None:
        """Begin the full screen."""
        self._live.start()

    def leave(self) -> None:
        """End it, if it has begun."""
        self._live.stop()


def run_top(url: str, model: str | None, api_key: str | None, *, once: bool) -> None:
    """`infer top`; returns when the stream ends, at Ctrl+C, q or Esc, and where stdout is no
    terminal after one picture."""
    console = Console(highlight=False)
    once = once or not console.is_terminal
    state, ends_s = EngineState(), time.monotonic() + ONCE_S
    path = "/v1/engine/events" + (f"?model={quote(model, safe='')}" if model else "")
    view = _View(console, url)
    try:
        with (
            contextlib.nullcontext() if once else pressed_keys(view.press, view.leave, view.enter),
            opened(url, path, api_key, f"the stream of {url} has broken off") as reply,
        ):
            for kind, fields in events_of(_lines(reply)):
                try:
                    state.take(kind, fields)
                except (LookupError, TypeError, AttributeError) as error:
                    raise ValueError(f"no frame of infer ({one_line(error)})") from None
                served = state.hello.get("model")
                if model is not None and served not in (None, model):  # it serves only one
                    raise InferError(f"there is no model {model!r} at {url}, which has {served!r}")
                if not once:
                    view.show(state)
                elif time.monotonic() >= ends_s:
                    break
    except KeyboardInterrupt:
        pass
    finally:
        view.leave()
    if once:
        console.print(picture(state, url, console.width, 0))
    elif state.end is not None:
        console.print(plain(_END.get(state.end, state.end)))


def picture(
    state: EngineState, url: str, width: int, height: int, keys: str = ""
) -> RenderableType:
    """The whole view; `height` in lines limits the table, 0 = all requests. `keys`: what is said of
    the keys."""
    parts: list[RenderableType] = [_head(state, url), _numbers(state, width)]
    parts.append(_latencies(state, width))
    parts += _charts(state, width)
    if state.replicas:
        parts.append(_replicas(state, width))
    rows = sorted(state.requests.values(), key=_place)
    num_above = 12 + bool(keys) + (3 if width < WIDE else 0)
    num_above += 3 + 2 * len(state.replicas) if state.replicas else 0
    most = max(3, height - num_above) if height else len(rows)
    parts.append(_table(state, rows[:most], width))
    if len(rows) > most:
        parts.append(plain(f"… and {len(rows) - most} more requests", "dim"))
    if keys:
        parts.append(plain(keys, "yellow" if keys == PAUSED else "dim"))
    return Group(*parts)


def _place(request: SeenRequest) -> tuple[bool, str, float]:
    if request.seat is not None:
        return False, request.state.replica, request.seat
    return True, "", request.since_ms


def _head(state: EngineState, url: str) -> Text:
    hello, gauges = state.hello, state.gauges
    ready = Text("ready", "green") if gauges.get("ready") else Text("not ready", "bold red")
    restarts = gauges.get("restarts", 0)
    parts = [plain(hello.get("model", "?"), "bold"), plain(f"  {hello.get('mode', '?')} batching")]
    parts += [Text("  "), ready, plain(f"  step {state.number:,}")]
    if restarts:
        parts.append(plain(f"  {restarts} restarts", "yellow"))
    if state.num_left_out:
        parts.append(plain(f"  {state.num_left_out} frames left out", "yellow"))
    return Text.assemble(*parts, plain(f"  {url}", "dim"))


def _numbers(state: EngineState, width: int) -> Text:
    gauges, hello = state.gauges, state.hello
    pages, free = gauges.get("pages", 0), gauges.get("free_pages", 0)
    used = (pages - free) / pages if pages else 0.0
    steps = [(step.ended_ms, step.num_steps) for step in state.steps]
    return Text.assemble(
        ("seats ", "dim"),
        f"{gauges.get('running', 0)}/{hello.get('seats', '?')}",
        ("   waiting ", "dim"),
        f"{gauges.get('waiting', 0)}",
        ("   preempted ", "dim"),
        f"{gauges.get('preempted', 0)}   {state.rate(steps):,.0f}",
        (" steps/s", "dim"),
        "   " if width >= WIDE else "\n",
        ("pages ", "dim"),
        f"{_bar(used, 16)} {used:.0%} of {pages:,}, {gauges.get('cached_pages', 0):,} cached",
    )


def _latencies(state: EngineState, width: int) -> Text:
    first = sorted(ms for _, ms in state.first_token_ms)
    gaps = [state.gap_percentile(share) for share in (0.5, 0.99)]
    shown = ["–" if gap is None else f"≤ {_ms(gap)}" for gap in gaps]
    return Text.assemble(
        ("first token p50 ", "dim"),
        _ms(first[len(first) // 2]) if first else "–",
        (" p99 ", "dim"),
        _ms(first[min(len(first) - 1, len(first) * 99 // 100)]) if first else "–",
        "   " if width >= WIDE else "\n",
        ("between tokens p50 ", "dim"),
        shown[0],
        (" p99 ", "dim"),
        shown[1],
        ("   (the last minute)" if width >= NARROW else "", "dim"),
    )


def _charts(state: EngineState, width: int) -> Iterator[Text]:
    num_columns = max(10, min(60, width - 34))
    prompt = [(step.ended_ms, step.num_prompt_tokens) for step in state.steps]
    for name, pairs, rate in (
        ("output tok/s", list(state.output), state.rate(state.output)),
        ("prompt tok/s", prompt, state.rate(prompt)),
    ):
        yield _chart(name, state.history(pairs, num_columns), rate)
    # The steps of several engines are not one another's: each has a line of its own.
    for replica in state.replicas or [""]:
        name = f"rows {_short(replica)}" if replica else "rows a step"
        steps_of_replica = state.steps_of(replica)
        rows = [(step.ended_ms, step.num_sequences) for step in steps_of_replica]
        steps = [(step.ended_ms, step.num_steps) for step in steps_of_replica]
        columns = state.history(rows, num_columns), state.history(steps, num_columns)
        means = [a / b if b else 0.0 for a, b in zip(*columns, strict=True)]
        yield _chart(name, means, state.rate(rows) / (state.rate(steps) or 1))


def _chart(name: str, columns: list[float], rate: float) -> Text:
    most = max(columns) or 1
    line = "".join(_BLOCKS[round(8 * column / most)] for column in columns)
    return Text.assemble(plain(f"{name:>12} ", "dim"), (line, "cyan"), f" {rate:,.1f}")


def _short(replica: str) -> str:
    """A name of a replica for a narrow column: its end tells it from others."""
    return replica.removeprefix("replica-")[-7:]


def _replicas(state: EngineState, width: int) -> Table:
    """Each of several engines, and all together; the less important columns need `WIDE`."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("replica", no_wrap=True, max_width=24)
    table.add_column("state", no_wrap=True)
    counts = ["running", "waiting", *(["preempted", "cached_pages"] if width >= WIDE else [])]
    for name in (*counts, "pages used", "steps/s", "restarts"):
        table.add_column(name.replace("_pages", ""), justify="right", no_wrap=True)
    for name, gauges in [*state.replicas.items(), ("all", state.gauges)]:
        is_all = gauges is state.gauges
        pages, free = gauges.get("pages", 0), gauges.get("free_pages", 0)
        steps = state.steps if is_all else state.steps_of(name)
        table.add_row(
            plain(name, "dim" if is_all else "bold"),
            Text("ready", "green") if gauges.get("ready") else Text("not ready", "bold red"),
            *(f"{gauges.get(count, 0):,}" for count in counts),
            f"{(pages - free) / pages if pages else 0.0:.0%} of {pages:,}",
            f"{state.rate([(step.ended_ms, step.num_steps) for step in steps]):,.0f}",
            f"{gauges.get('restarts', 0):,}",
        )
    return table


def _table(state: EngineState, rows: list[SeenRequest], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    has_replicas = bool(state.replicas)
    is_narrow = width < (WIDE if has_replicas else NARROW)
    is_tiny = width < NARROW
    if has_replicas:
        table.add_column("replica", no_wrap=True, max_width=12 if is_narrow else 16)
    table.add_column("seat", justify="right")
    table.add_column("request", no_wrap=True, max_width=13 if is_narrow else 24, min_width=8)
    table.add_column("state", no_wrap=True)
    table.add_column("progress" if is_narrow else "cached · prompt · output", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    if not is_tiny:
        table.add_column("age", justify="right", no_wrap=True)
    room = max(8, min(48, width - (90 if has_replicas else 72)))
    for request in rows:
        name = "somebody else's" if request.name is None else request.name
        if is_tiny and request.name is not None:  # its beginning is that of all
            name = name.rpartition("-")[2][:8]
        choice = f" #{request.choice}" if request.choice else ""
        if len(name) + len(choice) > (most := 13 if is_narrow else 24):  # the choice stays
            name = f"{name[: most - 1 - len(choice)]}…"
        state_of_request = request.state
        style = {"running": "green", "preempted": "yellow"}.get(state_of_request.status, "dim")
        doing = (
            "prompt"
            if state_of_request.status == "running" and not state_of_request.num_output
            else state_of_request.status
        )
        table.add_row(
            *([plain(state_of_request.replica)] if has_replicas else []),
            "" if request.seat is None else str(request.seat + 1),
            plain(f"{name}{choice}", "dim" if request.name is None else ""),
            plain(doing, style),
            _progress(request, room),
            f"{state_of_request.num_tokens}+{state_of_request.num_output}/{request.max_tokens}",
            *([] if is_tiny else [f"{(state.now_ms - request.since_ms) / 1000:.1f} s"]),
        )
    return table


def _progress(request: SeenRequest, room: int) -> Text:
    """A bar of the request's tokens: found in the cache, computed of the prompt, generated."""
    state = request.state
    num_prompt, total = state.num_tokens, max(1, state.num_tokens + request.max_tokens)
    cached = min(state.num_cached, num_prompt)
    computed = max(cached, min(state.num_computed, num_prompt))
    marks = [cached, computed, num_prompt, num_prompt + state.num_output, total]
    ends = [round(room * mark / total) for mark in marks]
    pieces = [("▒", "blue"), ("▓", "magenta"), ("·", "dim"), ("█", "green"), ("·", "dim")]
    bar, begin = Text(), 0
    for (character, style), end in zip(pieces, ends, strict=True):
        bar.append(character * (end - begin), style)
        begin = max(begin, end)
    return bar


def _bar(share: float, room: int) -> str:
    filled = round(share * room)
    return "█" * filled + "·" * (room - filled)


def _ms(value: float) -> str:
    if value == float("inf"):
        return "more"
    return f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.2f} s"
