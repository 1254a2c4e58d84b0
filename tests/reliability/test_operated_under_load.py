"""Two servers are operated under load, behind HAProxy and nginx: each request ends in one way

Clients of OpenAI's library and of requests ask two models of small random checkpoints all the time,
with streams and whole answers. Meanwhile servers are restarted in turn, and in the midst of it, at
moments drawn from a seed, an engine is killed, the servers' certificate is replaced by a good and
by a bad one, a key is revoked, and models are unloaded and loaded. At the end what the clients have
counted is compared with the servers' metrics, log lines and files of usage.
`INFER_OPERATED_SEED` sets the seed.

`pytest -m slow tests/reliability/test_operated_under_load.py`; skipped where a proxy is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from infer.server.tenancy.keys import KeyLimits, Keys
from tests.reliability.test_rolls import Backend, haproxy, nginx
from tests.support.checkpoints import write_llama
from tests.support.raw_http import HEALTH, connect, read_answer
from tests.support.server_process import Findings, Served
from tests.support.transports import make_certificate
from tests.support.waits import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROLLS = 10
SEED = int(os.environ.get("INFER_OPERATED_SEED", "1"))
PROMPTS = ("Once upon a time", "A dog", "The quick brown fox", "1, 2, 3", "It was")
MODELS = ("a", "b")
KEYS = ("steady", "other", "victim")
"""The last one is revoked."""
MAX_TOKENS = {True: 48, False: 8}
"""Of streams, of whole answers."""
PAUSE_S = 0.15
"""Seconds between two requests of a client; the servers that start need the cores too."""
LONG = 900
"""Tokens of the streams of the key that is revoked, so that one is running then."""


Ask = Callable[[str, str, int], Any]
"""Of model, prompt and tokens: text, reason of the end and usage."""


@dataclass
class Ends:
    """What a client has sent, and how each of its requests has ended."""

    key: str
    is_stream: bool
    num_sent: int = 0
    num_pieces: int = 0
    """Of the stream that is read now."""
    ends: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    """Of whole answers, by the names that a file of usage has."""


class Client(threading.Thread):
    """Asks for one completion after the other until it is stopped."""

    def __init__(self, ends: Ends, ask: Ask, right: Any) -> None:
        """`right`: the texts by model, prompt and tokens."""
        super().__init__()
        self.ends, self._ask, self._right = ends, ask, right
        self._dice = random.Random(f"{SEED}/{ends.key}/{ends.is_stream}")
        self.is_stopped = threading.Event()

    def run(self) -> None:
        pause_s = PAUSE_S
        while not self.is_stopped.wait(pause_s):
            which = (
                self._dice.choice(MODELS),
                self._dice.choice(PROMPTS),
                max_tokens_of(self.ends),
            )
            self.ends.num_sent += 1
            self.ends.num_pieces = 0
            try:
                text, reason, usage = self._ask(*which)
            except openai.APIStatusError as error:
                end = f"refused: {error.status_code} {_code(error.body)}"
            except requests.HTTPError as error:
                end = f"refused: {_refusal(error.response)}"
            except (openai.APIConnectionError, requests.RequestException) as error:
                end = f"lost: {type(error).__name__}: {error}"
            except openai.APIError as error:  # an event of a stream
                end = f"ended: {_code(error.body)}"
            except Exception as error:  # a stream that is cut off
                end = f"lost: {type(error).__name__}: {error}"
            else:
                end = "whole" if (text, reason) == (self._right[which], "length") else "different"
                self.ends.tokens["prompt_tokens"] += usage["prompt_tokens"]
                self.ends.tokens["generation_tokens"] += usage["completion_tokens"]
            self.ends.ends[end] += 1
            pause_s = PAUSE_S if end == "whole" else 1.0


def max_tokens_of(ends: Ends) -> int:
    return LONG if ends.is_stream and ends.key == KEYS[-1] else MAX_TOKENS[ends.is_stream]


def _refusal(answer: requests.Response | None) -> str:
    """Status and code."""
    assert answer is not None
    try:
        body = answer.json().get("error")
    except ValueError:
        body = None
    return f"{answer.status_code} {_code(body)}"


def _code(body: Any) -> str:
    """The code of an error, or that it is the proxy's."""
    return str(body.get("code") or body.get("type")) if isinstance(body, dict) else "by the proxy"


def sdk(held: ExitStack, url: str, key: str, certificate: str, ends: Ends) -> Ask:
    """Streams with OpenAI's library, without its retries."""
    context = ssl.create_default_context(cafile=certificate)
    http = held.enter_context(openai.DefaultHttpxClient(verify=context))
    client = openai.OpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120, http_client=http
    )

    def ask(model: str, prompt: str, max_tokens: int) -> Any:
        text, reasons, usage = "", [], None
        for chunk in client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ):
            usage = chunk.usage or usage
            ends.num_pieces += 1
            for choice in chunk.choices:
                text += choice.text
                reasons += [choice.finish_reason] if choice.finish_reason else []
        assert usage is not None, "no end"
        (reason,) = reasons
        return text, reason, usage.model_dump()

    return ask


def plain(held: ExitStack, url: str, key: str, certificate: str, _: Ends | None = None) -> Ask:
    """Whole answers with requests, over connections that are kept."""
    session = held.enter_context(requests.Session())

    def ask(model: str, prompt: str, max_tokens: int) -> Any:
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_tokens}
        answer = session.post(
            f"{url}/v1/completions",
            json={**body, "temperature": 0, "ignore_eos": True},
            headers={"authorization": f"Bearer {key}"},
            verify=certificate,
            timeout=120,
        )
        answer.raise_for_status()
        found = answer.json()
        (choice,) = found["choices"]
        return choice["text"], choice["finish_reason"], found["usage"]

    return ask


class Operator:
    """Two servers, and what their operator does to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = folder / "keys.json"
        keys = Keys(self.keys, must_exist=False)
        self.tokens = {name: keys.create(name, KeyLimits()) for name in KEYS}
        self.tokens["operator"] = keys.create("operator", KeyLimits(admin=True))
        for number, name in enumerate(MODELS):
            write_llama(folder / name, seed=number)
        self.certificate, self.key = make_certificate(folder, "server")
        self.known = folder / "known.pem"
        self.known.write_bytes(Path(self.certificate).read_bytes())
        self.new = make_certificate(folder, "new")
        with self.known.open("ab") as file:
            file.write(Path(self.new[0]).read_bytes())
        self.backends = [self._start(number) for number in range(2)]
        self._dice = random.Random(SEED)
        self.revoked = Ends(KEYS[-1], True)
        """The streams of the key that is revoked."""
        self.said: Counter[str] = Counter()
        """What was done, and how it was answered."""

    def _start(self, number: int) -> Backend:
        options = [f"--model={name}={self.folder / name}" for name in MODELS]
        options += ["--api-keys", str(self.keys), "--log-format", "json"]
        options += ["--ssl-certfile", self.certificate, "--ssl-keyfile", self.key]
        return Backend(self.folder, *options, "--dtype", "float32", scheme="https")

    def hang_up(self) -> None:
        for backend in self.backends:
            backend.process.send_signal(signal.SIGHUP)

    def kill(self, at: Backend) -> None:
        """`kill -9` of an engine."""
        pids = Served(at.process, at.url).engine_pids()  # type: ignore[arg-type]
        os.kill(pids[0], signal.SIGKILL)
        self.said["engine killed"] += 1

    def new_certificate(self, at: Backend) -> None:
        before = shown_by(at)
        for target, source in zip((self.certificate, self.key), self.new, strict=True):
            copy = Path(f"{source}.copy")
            shutil.copy(source, copy)
            copy.replace(target)
        self.hang_up()
        until(lambda: shown_by(at) != before, 60)
        self.said["new certificate"] += 1

    def bad_certificate(self, at: Backend) -> None:
        """One that is none is said and not used; then the good one is put back."""
        before, file = shown_by(at), Path(self.certificate)
        good, num_said = file.read_bytes(), at.log().count(b"the certificate before stays")
        file.write_text("no certificate", encoding="utf-8")
        self.hang_up()
        until(lambda: at.log().count(b"the certificate before stays") > num_said, 60)
        assert shown_by(at) == before
        file.write_bytes(good)
        self.hang_up()
        self.said["bad certificate"] += 1

    def revoke(self, _: Backend) -> None:
        """While one of its streams is running."""
        until(lambda: 0 < self.revoked.num_pieces < LONG / 2, 60)
        Keys(self.keys).revoke(KEYS[-1])
        self.hang_up()
        self.said["key revoked"] += 1

    def switch(self, at: Backend) -> None:
        """Unload the models, in use or not, and load one of them; the other is by who asks for
        it."""
        first, second = self._dice.sample(MODELS, 2)
        for path, body in (
            ("unload", {"model": first}),
            ("unload", {"model": first, "force": True}),
            ("unload", {"model": second, "force": True}),
            ("load", {"model": first}),
        ):
            how = " by force" if "force" in body else ""
            self.said[f"{path}{how}: {self._manage(at, path, body)}"] += 1

    def _manage(self, at: Backend, path: str, body: dict[str, Any]) -> int:
        answer = requests.post(
            f"{at.url}/v1/models/{path}",
            json=body,
            headers={"x-api-key": self.tokens["operator"]},
            verify=str(self.known),
            timeout=120,
        )
        return answer.status_code

    def successes(self, at: Backend) -> int:
        """`request_success` of a server, of all models and reasons."""
        headers = {"x-api-key": self.tokens["operator"]}
        text = requests.get(f"{at.url}/metrics", headers=headers, verify=str(self.known)).text
        found = re.findall(r"^infer:request_success_total\{.*\} (\S+)$", text, re.MULTILINE)
        return int(sum(map(float, found)))

    @contextmanager
    def behind(self, proxy: Any) -> Iterator[str]:
        """The proxy, which speaks TLS to the servers as docs/proxies.md says."""
        ports = [each.port for each in self.backends]
        with proxy(self.folder, ports, tls=self.known) as url:
            until(lambda: _is_up(url), 60)
            yield url

    def end(self) -> None:
        for backend in self.backends:
            backend.process.send_signal(signal.SIGTERM)
        for backend in self.backends:
            assert backend.process.wait(90) == 0, backend.log()[-3000:]

    def kill_all(self) -> None:
        for backend in self.backends:
            backend.process.kill()
            backend.process.wait()


def shown_by(backend: Backend) -> str:
    """SHA-256 of the certificate that a new connection is shown."""
    with connect(backend.url) as sock:
        assert isinstance(sock, ssl.SSLSocket)
        return hashlib.sha256(sock.getpeercert(binary_form=True) or b"").hexdigest()


def _is_up(url: str) -> bool:
    try:
        with connect(url) as sock:
            sock.sendall(HEALTH)
            return read_answer(sock)[0] == 200
    except (OSError, AssertionError, ValueError):
        return False


def drawn(operator: Operator) -> list[list[tuple[str, Any]]]:
    """What is done in each roll: when (`amid` it, at the other server, or `after` it), and what."""
    dice = random.Random(SEED)
    plan: list[list[tuple[str, Any]]] = [[] for _ in range(ROLLS)]
    # A server does not start with a bad certificate, so that is for when none does.
    chosen = dice.sample(range(ROLLS - 1), 4)
    plan[chosen[0]].append(("amid", operator.kill))
    plan[chosen[1]].append((dice.choice(["amid", "after"]), operator.new_certificate))
    plan[chosen[2]].append(("after", operator.bad_certificate))
    plan[chosen[3]].append((dice.choice(["amid", "after"]), operator.revoke))
    for when in ("amid", "after"):
        plan[dice.randrange(ROLLS - 1)].append((when, operator.switch))
    return plan


def requests_logged(log: bytes) -> list[dict[str, Any]]:
    """The lines of a JSON log about completions."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith(b"{")]
    return [each for each in lines if each.get("path") == "/v1/completions"]


@pytest.mark.parametrize("proxy", [haproxy, nginx], ids=["haproxy", "nginx"])
def test_operated_under_load(proxy: Any, tmp_path: Path) -> None:
    operator = Operator(tmp_path)
    clients: list[Client] = []
    try:
        for backend in operator.backends:
            until(backend.is_ready, 180)
        with ExitStack() as held:
            token, known = operator.tokens["operator"], str(operator.known)
            direct = plain(held, operator.backends[0].url, token, known)
            right = {
                (model, prompt, count): direct(model, prompt, count)[0]
                for model in MODELS
                for prompt in PROMPTS
                for count in (LONG, *MAX_TOKENS.values())
            }
            url = held.enter_context(operator.behind(proxy))
            trusted = str(tmp_path / "proxy.pem" if "https" in url else operator.known)
            for name in KEYS:
                for how, ends in ((sdk, Ends(name, True)), (plain, Ends(name, False))):
                    ask = how(held, url, operator.tokens[name], trusted, ends)
                    clients.append(Client(ends, ask, right))
            operator.revoked = clients[-2].ends
            for client in clients:
                client.start()
            try:
                began = operate(operator, tmp_path)
            finally:
                for client in clients:
                    client.is_stopped.set()
                for client in clients:
                    client.join(150)
        successes = [operator.successes(each) for each in operator.backends]
        operator.end()
    finally:
        operator.kill_all()
    print(dict(operator.said), [(each.ends.key, each.ends) for each in clients], successes)
    check(operator, [each.ends for each in clients], began, successes)
    proxied = {haproxy: ("O1", "HAProxy"), nginx: ("O2", "nginx")}
    number, name = proxied[proxy]
    note(number, name, operator, [each.ends for each in clients])


def operate(operator: Operator, folder: Path) -> list[int]:
    """All rolls and what is drawn for each; returns where the log of each server's last run
    begins."""
    began = [0, 0]
    for turn, doings in enumerate(drawn(operator)):
        leaving, other = operator.backends[turn % 2], operator.backends[1 - turn % 2]

        def amid(doings: Any = doings, other: Backend = other) -> None:
            for when, do in doings:
                if when == "amid":
                    do(other)

        def starting(at: Backend = leaving, turn: int = turn) -> None:
            began[turn % 2] = len(at.log())

        leaving.roll(amid, starting)
        for when, do in doings:
            if when == "after":
                do(other)
        time.sleep(1.0)
    return began


def check(operator: Operator, all_ends: list[Ends], began: list[int], successes: list[int]) -> None:
    """Compare the counts of clients, logs, metrics and usage."""
    for each in all_ends:
        assert each.num_sent == each.ends.total(), each
        good = {"whole"}
        if each.key == KEYS[-1]:
            good |= {"refused: 401 invalid_api_key", "ended: invalid_api_key"}
        assert set(each.ends) <= good, each
        assert each.ends["whole"], each
    assert operator.revoked.ends["ended: invalid_api_key"] == 1
    logs = [each.log() for each in operator.backends]
    logged = Counter((it["key"], it["status"]) for log in logs for it in requests_logged(log))
    usage = json.loads(operator.keys.with_name("keys.json.usage").read_text(encoding="utf-8"))
    for name in KEYS:
        of_key = [each for each in all_ends if each.key == name]
        num_admitted = sum(
            each.ends["whole"] + each.ends["ended: invalid_api_key"] for each in of_key
        )
        assert logged[name, 200] == num_admitted
        assert num_admitted == sum(usage[model][name]["requests"] for model in MODELS)
        for what in ("prompt_tokens", "generation_tokens"):
            heard = sum(each.tokens[what] for each in of_key)
            counted = sum(usage[model][name][what] for model in MODELS)
            # What was computed of a stream that was ended has been heard in part.
            assert heard <= counted if name == KEYS[-1] else heard == counted, (name, what)
    for log, start, found in zip(logs, began, successes, strict=True):
        assert found == sum(it["status"] == 200 for it in requests_logged(log[start:]))


def note(number: str, proxy: str, operator: Operator, all_ends: list[Ends]) -> None:
    """Write the counts for the scorecard."""
    ended = Counter[str]()
    for each in all_ends:
        kind = "streams" if each.is_stream else "whole answers"
        ended.update({f"{kind}, {end}": count for end, count in each.ends.items()})
    Findings().note(
        number,
        f"operated under load, {proxy}",
        f"two servers of two random models behind {proxy}, {ROLLS} restarts, seed {SEED}",
        sent=sum(each.num_sent for each in all_ends),
        **dict(sorted(ended.items())),
        done=dict(operator.said),
        lost=sum(n for each in all_ends for end, n in each.ends.items() if "lost" in end),
    )
