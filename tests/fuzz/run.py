"""A real server under calls that are made up: `python tests/fuzz/run.py --minutes 60`.

Starts `infer serve` with the model that ships, sends what the modules of this folder generate, and
checks for each call: the answer ends within a deadline; it is no 5xx, but for a 503 that says when
to come back; the server's process and the engine's are those of the start. It ends with counts, or
with the smallest call that breaks one of these.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fuzz.call import Call
from tests.support.server_process import Served, served

KINDS = ("grammars", "chats", "endpoints")
SERVER = ["-m", "infer.server", "--port", "0", "--max-seq-len", "512", "--max-batch-size", "8"]
DEADLINE_S = 60.0
ROUND = 100
"""calls of one kind before it is another's turn"""


def strategy_of(kind: str) -> SearchStrategy[Call] | None:
    """What a module generates; None if there is no such module."""
    name = f"tests.fuzz.{kind}"
    if importlib.util.find_spec(name) is None:
        return None
    module = importlib.import_module(name)
    if kind != "chats":
        strategy: SearchStrategy[Call] = module.calls()
        return strategy

    def call(body: dict[str, object]) -> Call:
        body = {"model": "infer-demo", "max_tokens": 8, **body}
        return Call("POST", "/v1/chat/completions", body)

    made: SearchStrategy[Call] = module.chat_bodies().map(call)
    return made


class Watched:
    """A server, and what it was like before."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.statuses: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._engine = server.engine_pid()
        assert self._engine is not None

    def check(self, call: Call) -> None:
        """Send a call; `AssertionError` if something breaks."""
        started_s = time.monotonic()
        status, retry, body = self._send(call)
        self.slowest_s = max(self.slowest_s, time.monotonic() - started_s)
        self.statuses[f"{call.method} {status}"] += 1
        assert self.server.process.poll() is None, "the server's process has ended"
        assert self.server.engine_pid() == self._engine, "the engine's process is another one"
        assert status < 500 or (status == 503 and retry), (status, body[:500])
        # A stream has its status before it begins; errors of the engine come as an event.
        assert b'"server_error"' not in body, body[-500:]

    def _send(self, call: Call) -> tuple[int, str | None, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=DEADLINE_S)
        try:
            connection.request(call.method, call.path, call.content, dict(call.sent_headers))
            response = connection.getresponse()
            return response.status, response.getheader("retry-after"), response.read()
        except TimeoutError:
            raise AssertionError(f"no answer within {DEADLINE_S:g} s") from None
        except (http.client.HTTPException, OSError, UnicodeError, ValueError) as error:
            # A call that no client can send, or that the server has ended without an answer.
            assert self.server.process.poll() is None, "the server's process has ended"
            return 0, None, repr(error).encode()
        finally:
            connection.close()

    def num_restarts(self) -> int:
        """Of the engine, as the metrics say."""
        _, text = self.server.get("/metrics")
        found = re.search(rb"^\w+:engine_restarts_total\{.*\} (\S+)$", text, re.MULTILINE)
        assert found, text[:300]
        return int(float(found[1]))


def try_calls(
    check: Callable[[Call], None], strategy: SearchStrategy[Call], count: int, number: int
) -> None:
    """So many calls of one kind; what breaks is made smaller before it is raised."""
    limits = settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[*HealthCheck],
        print_blob=False,
    )

    def one(call: Call) -> None:
        check(call)

    seed(number)(limits(given(strategy)(one)))()


def run(
    kinds: list[str], minutes: float, number: int, *, max_calls: int | None = None
) -> dict[str, object]:
    """What was sent and came back; `AssertionError` with the smallest call that breaks something,
    in its notes."""
    strategies = {kind: made for kind in kinds if (made := strategy_of(kind)) is not None}
    assert strategies, f"none of {', '.join(kinds)} is there"
    sent: Counter[str] = Counter()
    ends_s = time.monotonic() + 60 * minutes
    size = ROUND if max_calls is None else min(ROUND, max_calls)
    with tempfile.TemporaryDirectory() as folder, served(SERVER, Path(folder) / "log") as server:
        watched = Watched(server)
        while time.monotonic() < ends_s:
            for kind, strategy in strategies.items():
                number += 1
                try_calls(watched.check, strategy, size, number)
                sent[kind] += size
            if max_calls is not None and min(sent.values()) >= max_calls:
                break
        assert watched.num_restarts() == 0
        assert server.is_ready()
        return {
            "calls": dict(sent),
            "statuses": dict(sorted(watched.statuses.items())),
            "slowest answer, s": round(watched.slowest_s, 2),
            "last seed": number,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kinds", default=",".join(KINDS), help="with commas between")
    arguments = parser.parse_args()
    try:
        found = run(arguments.kinds.split(","), arguments.minutes, arguments.seed)
    except AssertionError as error:
        print(f"broken: {error}", *getattr(error, "__notes__", ()), sep="\n")
        return 1
    print("nothing broke:", json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
