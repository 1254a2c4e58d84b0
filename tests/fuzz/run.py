"""Real servers and the loader under input that is made up: `python tests/fuzz/run.py --minutes 60`.

Starts `infer serve` with the model that ships, once alone and once under two names, sends what the
modules of this folder generate, each kind in its turn, and checks for each call: the answer ends
within a deadline; it is no 5xx, but for a 503 that says when to come back and a 504 where the
call's own time is over; the server's process and the engines' are those of the start. Damaged
checkpoints are loaded in processes of their own with limits of time and memory. What breaks one of
these is made small and told, what has ended is started again, and the run goes on; it ends with a
line of JSON, and with 1 if anything broke.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import importlib
import json
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import FlakyFailure
from hypothesis.strategies import SearchStrategy

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from infer.server.comparisons import MAX_S
from infer.server.http.paths import canonical_path
from infer.server.route_table import COMPARISONS_PATH
from tests.fuzz.call import MODEL, Call, CallSequence, RawRequest, id_of
from tests.support.commits import commit_of
from tests.support.server_process import Served, served, stack_limit

MODULES = {
    "grammars": "tests.fuzz.grammars",
    "chats": "tests.fuzz.chats",
    "endpoints": "tests.fuzz.endpoints",
    "texts": "tests.fuzz.texts",
    "sessions": "tests.fuzz.session_calls",
    "raw requests": "tests.fuzz.raw_requests",
    "several models": "tests.fuzz.several_models",
    "files": "tests.fuzz.checkpoint_files",
}
"""Kind → module that generates it."""
KINDS = tuple(MODULES)
SEVERAL, FILES = "several models", "files"
OPTIONS = ["--port", "0", "--max-seq-len", "512", "--max-batch-size", "8"]
DEADLINE_S = 60.0
DEADLINES_S = {COMPARISONS_PATH: MAX_S + 30}
"""Path → deadline of its answers, where the server itself allows more."""
LOAD_PATH, UNLOAD_PATH = "/v1/models/load", "/v1/models/unload"
ROUND = 100
"""Examples of one kind before it is another's turn."""
ROUND_OF_FILES = 25
TOLD_EVERY_S = 300.0
QUIET_S = 0.1
"""Without a byte, before a connection is taken to have nothing more to say."""
Sent = Call | CallSequence | RawRequest


def route_of(path: str) -> str:
    """The route that the server finds, however the path is written."""
    return canonical_path(unquote(path.partition("?")[0], errors="replace"))


def deadline_of(path: str) -> float:
    """Seconds that the server has for an answer."""
    return DEADLINES_S.get(route_of(path), DEADLINE_S)


def strategy_of(kind: str) -> SearchStrategy[Any]:
    """Generates the examples of a kind, other than files."""
    strategy: SearchStrategy[Any] = importlib.import_module(MODULES[kind]).calls()
    return strategy


@dataclass
class Counts:
    """What was sent, what came back, and what broke."""

    examples: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """For each kind: status or end → how often."""
    num_exits: int = 0
    """Of a server's process."""
    num_restarts: int = 0
    """Of an engine."""
    num_5xx: int = 0
    """But for a 503 with `Retry-After`, and a 504 where the deadline of the call is over."""
    slowest_s: float = 0.0
    slowest_call: str = ""
    """What was answered so slowly, cut short."""
    findings: list[dict[str, object]] = field(default_factory=list)
    kind: str = ""
    """Whose turn it is."""

    def add(self, outcome: str) -> None:
        """One more of the kind whose turn it is."""
        self.outcomes.setdefault(self.kind, Counter())[outcome] += 1

    def took(self, duration_s: float, sent: Call | RawRequest) -> None:
        """An answer took so long."""
        if duration_s > self.slowest_s:
            self.slowest_s, self.slowest_call = duration_s, f"{self.kind}: {sent!r:.1000}"

    def report(self) -> dict[str, object]:
        """As the run's last line says it."""
        outcomes = {kind: dict(sorted(it.items())) for kind, it in self.outcomes.items()}
        return {
            "examples": dict(self.examples),
            "outcomes": outcomes,
            "exits": self.num_exits,
            "restarts": self.num_restarts,
            "5xx": self.num_5xx,
            "slowest answer, s": round(self.slowest_s, 2),
            "slowest call": self.slowest_call,
            "findings": self.findings,
        }


def is_promised(status: int, retry: str | None, body: bytes) -> bool:
    """Whether a 5xx is one that a client is told to expect: try again later, or its own deadline
    is over."""
    return (status == 503 and retry is not None) or (status == 504 and b"deadline_exceeded" in body)


class Watched:
    """A server, and what it was like before; it is started again when it has ended."""

    def __init__(
        self, models: list[str], counts: Counts, folder: Path, stack_bytes: int | None = None
    ) -> None:
        """`stack_bytes`: default stack size of the server's threads; None for the system's."""
        self.counts = counts
        self._stack_bytes = stack_bytes
        self._folder = folder
        self._models = models
        self._stack = ExitStack()
        self._begin()

    def _begin(self) -> None:
        sessions = f"sqlite:///{self._folder / 'sessions.db'}"
        arguments = ["-m", "infer.server", *OPTIONS, "--sessions", sessions, *self._models]
        log = self._folder / "log"
        with stack_limit(self._stack_bytes):
            self.server: Served = self._stack.enter_context(served(arguments, log))
        self._engines = self.server.engine_pids()
        assert self._engines, log.read_text(encoding="utf-8")

    def check(self, sent: Sent) -> None:
        """Send something; `AssertionError` if that breaks something, after its repair."""
        try:
            ids: list[str] = []
            calls = sent.calls if isinstance(sent, CallSequence) else (sent,)
            for call in calls:
                self._check_one(call, ids)
            for name in ids:  # or the quota would be full soon
                self._answered("DELETE", f"/v1/sessions/{name}")
        except AssertionError:
            self._repair()
            raise

    def _check_one(self, call: Call | RawRequest, ids: list[str]) -> None:
        started_s = time.monotonic()
        if isinstance(call, RawRequest):
            statuses = self._send_raw(call)
        else:
            status, retry, body = self._send(call, ids)
            # A stream has its status before it begins; errors of the engine come as an event.
            broken = b'"server_error"' in body
            statuses = [(status, retry, body)] + [(500, None, body[-500:])] * broken
            if status == 200 and route_of(call.path) == UNLOAD_PATH:
                self._load_again(json.loads(call.content)["model"])
        self.counts.took(time.monotonic() - started_s, call)
        for status, _, _ in statuses or [(0, None, b"")]:
            self.counts.add(str(status) if status else "no answer")
        failed = [it for it in statuses if it[0] >= 500 and not is_promised(*it)]
        self.counts.num_5xx += len(failed)
        assert self.server.process.poll() is None, "the server's process has ended"
        assert self.server.engine_pids() == self._engines, "an engine's process is another one"
        assert not failed, (failed[0][0], failed[0][2][:500])

    def _load_again(self, model: str) -> None:
        """Load what a call has unloaded: its engine has ended as it was told."""
        status, _, answer = self._send(Call("POST", LOAD_PATH, {"model": model}), [])
        assert status == 200, answer
        self._engines = self.server.engine_pids()

    def _send(self, call: Call, ids: list[str]) -> tuple[int, str | None, bytes]:
        path, content = call.path, call.content
        for i in range(3):
            name = ids[i % len(ids)] if ids else "sess-none"
            path = path.replace(id_of(i), name)
            content = content.replace(id_of(i).encode(), name.encode())
        found = self._answered(call.method, path, content, dict(call.sent_headers))
        if call.method == "POST" and path.startswith("/v1/sessions") and found[0] == 200:
            ids.append(json.loads(found[2])["id"])
        return found

    def _answered(
        self, method: str, path: str, content: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, str | None, bytes]:
        deadline_s = deadline_of(path)
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=deadline_s)
        try:
            connection.request(method, path, content, headers or {})
            response = connection.getresponse()
            return response.status, response.getheader("retry-after"), response.read()
        except TimeoutError:
            raise AssertionError(f"no answer within {deadline_s:g} s") from None
        except (http.client.HTTPException, OSError, UnicodeError, ValueError) as error:
            # A call that no client can send, or that the server has ended without an answer.
            return 0, None, repr(error).encode()
        finally:
            connection.close()

    def _send_raw(self, request: RawRequest) -> list[tuple[int, str | None, bytes]]:
        """Every status of a connection."""
        heard = b""
        with (
            suppress(OSError),
            socket.create_connection(
                ("127.0.0.1", self.server.port), timeout=DEADLINE_S
            ) as connection,
        ):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(BrokenPipeError, ConnectionResetError):
                for piece in request.pieces:
                    connection.sendall(piece)
                connection.settimeout(QUIET_S)  # a client that closes its side gets no answer
                with suppress(TimeoutError):
                    while new := connection.recv(1 << 16):
                        heard += new
                connection.settimeout(DEADLINE_S)
                connection.shutdown(socket.SHUT_WR)
            try:
                while new := connection.recv(1 << 16):
                    heard += new
            except TimeoutError:
                raise AssertionError(f"no end within {DEADLINE_S:g} s") from None
        heads = re.findall(rb"^HTTP/1\.1 (\d+)(.*?)\r\n\r\n", heard, re.MULTILINE | re.DOTALL)
        retries = ["retry-after" if b"retry-after" in head.lower() else None for _, head in heads]
        return [(int(it), retry, heard) for (it, _), retry in zip(heads, retries, strict=True)]

    def _repair(self) -> None:
        """What has ended is started again, and counted."""
        ends_s = time.monotonic() + DEADLINE_S
        while self.server.process.poll() is None and time.monotonic() < ends_s:
            with suppress(OSError, http.client.HTTPException):
                if self.server.is_ready():
                    self._count_restarts()
                    return
            time.sleep(0.2)
        self.counts.num_exits += 1
        self.close()
        self._begin()

    def _count_restarts(self) -> None:
        engines = self.server.engine_pids()
        self.counts.num_restarts += len({*engines} - {*self._engines})
        self._engines = engines

    def close(self) -> None:
        """End the server; it may have ended before."""
        stack, self._stack = self._stack, ExitStack()
        if self.server.process.poll() is None:
            stack.close()
        else:
            with suppress(AssertionError, OSError):
                stack.close()


def try_examples(
    check: Callable[[Any], None], strategy: SearchStrategy[Any], count: int, number: int
) -> None:
    """So many examples of one kind; what breaks is made smaller before it is raised, if it breaks
    each time."""
    limits = settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[*HealthCheck],
        print_blob=False,
    )

    def one(example: Any) -> None:
        check(example)

    try:
        seed(number)(limits(given(strategy)(one)))()
    except FlakyFailure as flaky:
        error = AssertionError(f"once, and not again: {flaky.exceptions[0]}")
        error.add_note(str(flaky))
        raise error from None


@contextmanager
def checks(
    kinds: list[str], counts: Counts, stack_bytes: int | None = None
) -> Iterator[dict[str, tuple[Any, Any]]]:
    """For each kind its check and its strategy; the servers that they need run meanwhile."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)

        def watched(label: str, models: list[str]) -> Watched:
            (folder / label).mkdir()
            server = Watched(models, counts, folder / label, stack_bytes)
            stack.callback(server.close)
            return server

        found: dict[str, tuple[Any, Any]] = {}
        if {*kinds} - {SEVERAL, FILES}:
            one = watched("one", ["--served-model-name", MODEL])
            found |= {k: (one.check, strategy_of(k)) for k in kinds if k not in (SEVERAL, FILES)}
        if SEVERAL in kinds:
            models = importlib.import_module(MODULES[SEVERAL]).models(folder)
            names = [f"--model={name}={path}" for name, path in models.items()]
            found[SEVERAL] = watched("several", names).check, strategy_of(SEVERAL)
        if FILES in kinds:
            from tests.fuzz.checkpoint_files import WatchedLoader, damages

            (folder / "files").mkdir()
            loader = WatchedLoader(folder / "files", counts.add)
            stack.callback(loader.close)
            found[FILES] = loader.check, damages(loader.bases)
        yield {kind: found[kind] for kind in kinds}


def run(
    kinds: list[str],
    minutes: float,
    number: int,
    *,
    max_calls: int | None = None,
    stack_bytes: int | None = None,
) -> dict[str, object]:
    """What was tried and came of it; `findings` has the smallest example of all that broke.

    `stack_bytes`: default stack size of the servers' threads; None for the system's."""
    counts = Counts()
    ends_s = time.monotonic() + 60 * minutes
    told_s = time.monotonic()
    first = number + 1
    with checks(kinds, counts, stack_bytes) as tried:
        is_over = False
        while not is_over:
            for kind, (check, strategy) in tried.items():
                most = ROUND_OF_FILES if kind == FILES else ROUND
                size = most if max_calls is None else min(most, max_calls)
                number += 1
                counts.kind = kind
                try:
                    try_examples(check, strategy, size, number)
                except AssertionError as error:
                    notes = "\n".join(getattr(error, "__notes__", ()))
                    finding = {"kind": kind, "seed": number, "what": str(error)[:2000]}
                    counts.findings.append({**finding, "example": notes[:4000]})
                    print("broken:", json.dumps(counts.findings[-1]), file=sys.stderr, flush=True)
                counts.examples[kind] += size
                if is_over := time.monotonic() > ends_s:
                    break
            if time.monotonic() > told_s + TOLD_EVERY_S:
                told_s = time.monotonic()
                print(json.dumps(counts.report()), file=sys.stderr, flush=True)
            if max_calls is not None and min(counts.examples.values()) >= max_calls:
                is_over = True
    return {"seeds": [first, number], **counts.report()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kinds", default=",".join(KINDS), help="with commas between")
    parser.add_argument("--record", type=Path, help="a JSON file for the result, for the scorecard")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    if unknown := {*kinds} - {*KINDS}:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(KINDS)}")
    started_s = time.monotonic()
    found = run(kinds, arguments.minutes, arguments.seed)
    minutes = round((time.monotonic() - started_s) / 60, 1)
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "minutes": minutes,
        "commit": commit_of(root := Path(__file__).parents[2], root / "tests/fuzz/recorded.json"),
        **found,
    }
    print(json.dumps(result))
    if arguments.record:
        for finding in result["findings"]:
            finding["what"] = finding["what"][:200]
            del finding["example"]
        arguments.record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if found["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
