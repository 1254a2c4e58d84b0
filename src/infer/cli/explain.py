"""`infer explain`: the trace of a request, fetched from its server and shown as a page of text.

The page begins with how long the request took, and for what. The events follow in their order, the
slowest pauses last. Consecutive parts of a prompt are one line.
"""

from __future__ import annotations

import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from itertools import groupby
from operator import itemgetter
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infer.cli.plain import plain
from infer.errors import InferError, RequestError
from infer.files import parse_json
from infer.server.http.host_rules import is_loopback, name_of

Fields = dict[str, Any]
TIMEOUT_S = 30.0
MAX_TRACE_BYTES = 16 << 20
"""The most bytes of an answer. A trace of 1,000 events has 200 KB."""


@contextmanager
def opened(
    url: str,
    path: str,
    api_key: str | None,
    failure: str,
    body: Fields | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Any]:
    """The answer of the server at `url` to a GET of `path`, or to a POST of `body`, to be read
    within the block. `timeout_s`: seconds for which it may be silent.

    Raises `InferError` with one sentence: the server's own where it refuses, as a `RequestError`
    with its code; else that none answers or, if the answer has begun, `failure`, and why. This is
    so for an `OSError` or `ValueError` of the block, too.
    """
    if not url.startswith(("http://", "https://")):
        raise InferError(f"{url} is not the address of a server, like http://127.0.0.1:8000")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    data = None
    if body is not None:
        data, headers["content-type"] = json.dumps(body).encode(), "application/json"
    problem = f"no infer server answers at {url}"
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}{path}", data, headers)
        with _opener(request.host).open(request, timeout=timeout_s) as reply:
            problem = failure
            yield reply
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            refusal = _refusal_of(error, url)
        raise refusal from None
    except InferError:
        raise
    except (OSError, ValueError, HTTPException) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise InferError(f"{problem}: {one_line(cause)}") from None


def is_here(authority: str) -> bool:
    """Whether a host, which may have a port, is this machine. The proxies of the environment
    (http_proxy, …) are for other hosts: one could not reach a server here, and would get its key.
    """
    name = name_of(authority) or ""
    return name == "localhost" or is_loopback(name)


def _opener(authority: str) -> urllib.request.OpenerDirector:
    proxies = [urllib.request.ProxyHandler({})] if is_here(authority) else []
    return urllib.request.build_opener(*proxies)


def fetch(url: str, request_id: str, api_key: str | None) -> Fields:
    """The trace of a request as the server sends it.

    Raises `InferError` with one sentence, whatever answers at `url`.
    """
    path = f"/v1/requests/{quote(request_id, safe='')}"
    return get_json(url, path, api_key, "its answer is not a trace")


def get_json(url: str, path: str, api_key: str | None, otherwise: str) -> Fields:
    """The JSON object that a server sends. Raises `InferError` with one sentence, whatever answers
    at `url`; `otherwise`: what is wrong with an answer that is no object."""
    return _json_of(url, path, api_key, otherwise)


def post_json(
    url: str, path: str, body: Fields, api_key: str | None, otherwise: str, timeout_s: float
) -> Fields:
    """As `get_json`, for a POST of `body`, which the server has `timeout_s` to answer."""
    return _json_of(url, path, api_key, otherwise, body, timeout_s)


def _json_of(
    url: str,
    path: str,
    api_key: str | None,
    otherwise: str,
    body: Fields | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Fields:
    problem = f"no infer server answers at {url}"
    with opened(url, path, api_key, problem, body, timeout_s) as reply:
        fields = _read_json(reply)
    if not isinstance(fields, dict):
        raise InferError(f"{problem}: {otherwise}")
    return fields


def _read_json(reply: Any) -> Any:
    """The JSON value of an answer. Raises `ValueError`, also where it is too long or too slow."""
    content, ends_s = b"", time.monotonic() + TIMEOUT_S
    while piece := reply.read1(1 << 16):
        content += piece
        if len(content) > MAX_TRACE_BYTES or time.monotonic() > ends_s:
            raise ValueError("its answer does not end")
    return parse_json(content.decode("utf-8"))


def _refusal_of(error: urllib.error.HTTPError, url: str) -> InferError:
    """What a server's refusal says, in one line."""
    try:
        fields = _read_json(error)["error"]
        message, code = fields["message"], fields.get("code")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, HTTPException):
        message = code = None
    if isinstance(message, str):
        return RequestError(one_line(message), code=code if isinstance(code, str) else None)
    return InferError(f"no infer server answers at {url}: the status is {error.code}")


def one_line(problem: object) -> str:
    """The text of an error, in one line of bounded length."""
    return " ".join(str(problem).split())[:500]


def run_explain(url: str, request_id: str, api_key: str | None) -> None:
    """`infer explain`."""
    show(fetch(url, request_id, api_key), Console(highlight=False, markup=False), url)


def show(trace: Fields, console: Console, url: str) -> None:
    """Print a trace from the server at `url`. Raises `InferError`, before anything is shown, for
    what is none."""
    try:
        write(trace, Console(highlight=False, markup=False, file=io.StringIO()))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        raise InferError(f"no infer server answers at {url}: its answer is not a trace") from None
    write(trace, console)


def write(trace: Fields, console: Console) -> None:
    """Print a trace."""
    end = trace["outcome"] or f"still {trace['state']}"
    first = (plain(trace["id"], "bold"), "  ", plain(trace["path"]), "  ", plain(end, "bold"))
    console.print(Text.assemble(*first))
    cached = f", {trace['cached_tokens']} of them cached" if trace["cached_tokens"] else ""
    counts = f"{trace['prompt_tokens']} prompt tokens{cached}; {trace['completion_tokens']}"
    where = f"; at {', '.join(trace['replicas'])}" if "replicas" in trace else ""
    console.print(plain(f"{counts} generated{where}"))
    marks = [0.0, trace["admitted_ms"], trace["first_token_ms"], trace["total_ms"]]
    parts = []
    for name, start, stop in zip(("waiting", "prompt", "answer"), marks, marks[1:], strict=False):
        if start is not None and stop is not None:
            parts.append(Text.assemble(f"{name} ", (_ms(stop - start), "bold")))
    console.print(Text(" + ").join(parts) + (f" = {_ms(marks[-1])}" if marks[-1] else ""))
    for batch in trace.get("batches", ()):
        console.print(plain(_batch(batch)))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(justify="right", style="cyan", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for at_ms, kind, text in _lines(trace["events"]):
        table.add_row(_ms(at_ms), plain(kind), plain(text))
    console.print(table)
    if trace["events_left_out"]:
        console.print(plain(f"… and {trace['events_left_out']} more events", "dim"))
    if trace["slowest_gaps"]:
        console.print(plain("slowest pauses:", "dim"))
    for gap in trace["slowest_gaps"]:
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
    where = f"; at {event['replica']}" if "replica" in event else ""
    match event["event"]:
        case "queued" | "resumed":
            behind = f": {', '.join(event['behind'])}" if event["behind"] else ""
            waits = f"behind {event['waiting_before']} waiting, {event['running']} running{behind}"
            differs = "; this engine computes other bits, so tokens may differ from here on"
            return waits + where + (differs if event.get("tokens_may_differ") else "")
        case "admitted":
            cached = f"{event['cached_tokens']} of {event['of_tokens']} tokens found in the cache"
            return cached + where + (f"; in {event['batch_id']}" if "batch_id" in event else "")
        case "speculated":
            return f"{event['accepted']} of {event['proposed']} proposed tokens were accepted"
        case "preempted":
            needed = f"; its pages went to {event['needed_by'][0]}" if event["needed_by"] else ""
            return f"{event['lost_tokens']} computed tokens lost{needed}"
        case "finished":
            return str(event["outcome"])
    return ""


def _batch(batch: Fields) -> str:
    padding = f"{batch['prompt_padding_tokens']} to {batch['prompt_tokens']} prompt tokens"
    if batch["tokens"] is not None:
        padding += f", {batch['padding_tokens']} to all {batch['tokens']}"
    return (
        f"{batch['batch_id']}: {batch['requests']} requests, formed after a wait of"
        f" {_ms(batch['wait_ms'])}; padding would add {padding}"
    )


def _gap(gap: Fields) -> Text:
    step = gap["slowest_step"]
    doing = f"{step['sequences']} sequence{'s' if step['sequences'] != 1 else ''}"
    if step["prompt_tokens"]:
        doing += f", {step['prompt_tokens']} prompt tokens of {', '.join(step['prompts_of'])}"
    if "replica" in step:
        doing += f", at {step['replica']}"
    several = "" if gap["steps"] == 1 else f" ({gap['steps']} steps)"
    return Text.assemble(
        plain(_ms(gap["gap_ms"]), "yellow"),
        plain(
            f" before token {gap['token']}{several}:"
            f" step {step['step']} took {_ms(step['step_ms'])} with {doing}"
        ),
    )
