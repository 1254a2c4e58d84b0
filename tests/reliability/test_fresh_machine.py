"""The commands of docs/operate.md: to the letter in a container with systemd, which takes minutes
(it compiles the kernels), and as far as a machine without systemd can run them.

There the files are those of `deploy/`, with the ports of the test: a server with a key, which
reports to a socket as to systemd, HAProxy with TLS in front of it, and Prometheus, which scrapes
it. `pytest -m peer tests/reliability/test_fresh_machine.py`
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.test_rolls import free_port
from tests.support.containers import Machine, machine
from tests.support.raw_http import connect, read_answer
from tests.support.server_process import ENV, ROOT
from tests.support.transports import make_certificate
from tests.support.waits import until

pytestmark = [pytest.mark.peer, pytest.mark.timeout(400)]
DEPLOY = ROOT / "deploy"
INFER = [sys.executable, "-m", "infer"]


STREAM = (
    """curl -sN -H 'Authorization: Bearer KEY' -H 'Content-Type: application/json' -d '"""
    """{"model": "infer-demo", "prompt": "Once", "max_tokens": 1500, "ignore_eos": true,"""
    """ "temperature": 0, "stream": true}' https://models.example.org/v1/completions"""
)


def commands() -> list[str]:
    page = (ROOT / "docs/operate.md").read_text(encoding="utf-8")
    return page.split("```bash\n")[1].split("```")[0].splitlines()


def test_the_commands_are_few_and_their_files_exist() -> None:
    assert 0 < len(commands()) <= 12
    for file in re.findall(r"deploy/\S+", "\n".join(commands())):
        assert (ROOT / file).exists(), file


@pytest.mark.timeout(3000)
def test_the_commands_under_systemd(tmp_path: Path) -> None:
    """Each as it stands on the page; then what a unit is there for."""
    certificate, private = make_certificate(tmp_path, "models", "models.example.org")
    with machine("--add-host=models.example.org:127.0.0.1") as host:
        send_source(host)
        host.run("mkdir -p /etc/haproxy")
        host.put(Path(certificate), "/root/ca.pem")
        host.put(Path(private), "/root/ca.key")
        host.run("cat ca.pem ca.key > /etc/haproxy/infer.pem")
        key = ""
        for command in commands():
            if command.startswith("curl "):
                command = "export CURL_CA_BUNDLE=/root/ca.pem; " + command.replace("KEY", key)
            printed = host.run(command, "/root/infer")
            if " keys create " in command:
                key = printed.strip()
        assert json.loads(printed)["data"][0]["id"] == "infer-demo"
        until(lambda: scraped(host, "up") == "1", 60)
        the_unit_keeps_its_streams(host, key)
        the_unit_comes_back(host, "KILL")
        the_unit_comes_back(host, "STOP")
        refused = (
            "for each in /etc/x /usr/x /root/x; do touch $each && echo wrote $each; done; true"
        )
        inside = f"nsenter -t {host.property('infer', 'MainPID')} -m runuser -u infer --"
        assert host.run(f"{inside} sh -c '{refused}' 2>/dev/null") == ""


def send_source(host: Machine) -> None:
    """The files of this tree that git knows, at /root/infer."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    pack = ["tar", "--null", "--files-from=-", "-cf", "-"]
    packed = subprocess.run(pack, cwd=ROOT, input=files.stdout, capture_output=True, check=True)
    unpack = ["podman", "exec", "-i", host.name, "bash", "-c"]
    into = "mkdir -p /root/infer && tar -C /root/infer -xf -"
    subprocess.run([*unpack, into], input=packed.stdout, check=True)


def scraped(host: Machine, query: str) -> str:
    url = f"http://127.0.0.1:9090/api/v1/query?query={query}"
    found = json.loads(host.run(f"curl -s '{url}' || echo '{{}}'")).get("data", {}).get("result")
    return str(found[0]["value"][1]) if found else ""


def the_unit_keeps_its_streams(host: Machine, key: str) -> None:
    """Through a restart, a reload and the death of the engine."""
    read = f"export CURL_CA_BUNDLE=/root/ca.pem; {STREAM.replace('KEY', key)}"
    whole = host.run(read)
    assert whole.endswith("data: [DONE]\n\n")
    for event in ("systemctl restart infer", "systemctl reload infer", "pkill -9 -x infer-engine"):
        seen = host.run(f"({read} > /root/seen) & sleep 0.4; {event}; wait; cat /root/seen")
        assert text_of(seen) == text_of(whole), event
        until(lambda: host.property("infer", "ActiveState") == "active", 60)


def text_of(stream: str) -> str:
    events = [
        line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data")
    ]
    assert events[-1:] == ["[DONE]"], stream[-500:]
    return "".join(json.loads(each)["choices"][0]["text"] for each in events[:-1])


def the_unit_comes_back(host: Machine, signal_name: str) -> None:
    """After the death of its process, or when that does not answer its watchdog."""
    old = host.property("infer", "MainPID")
    host.run(f"kill -{signal_name} {old}")
    until(lambda: host.property("infer", "MainPID") not in ("0", old), 120)
    until(lambda: host.property("infer", "ActiveState") == "active", 60)
    until(lambda: scraped(host, "up") == "1", 60)


def test_a_served_model_behind_tls_that_is_scraped(tmp_path: Path) -> None:
    programs = {name: shutil.which(name) or "" for name in ("haproxy", "prometheus")}
    if not all(programs.values()):
        pytest.skip(f"not installed: {[name for name, path in programs.items() if not path]}")
    ports = {name: free_port() for name in ("http", "metrics", "tls", "prometheus")}
    keys = tmp_path / "keys.json"
    settings = (DEPLOY / "systemd/infer.toml").read_text(encoding="utf-8")
    settings = settings.replace("8000", str(ports["http"])).replace("9400", str(ports["metrics"]))
    config = tmp_path / "infer.toml"
    config.write_text(settings.replace("/etc/infer/keys.json", str(keys)), encoding="utf-8")
    key = run(*INFER, "keys", "create", "me", "--file", keys).strip()
    assert "/infer.toml:" in run(*INFER, "config", "show", "--config", config)
    certificate, private = make_certificate(tmp_path, "proxy")
    pem = tmp_path / "infer.pem"
    pem.write_bytes(Path(certificate).read_bytes() + Path(private).read_bytes())
    proxy = tmp_path / "haproxy.cfg"
    text = (DEPLOY / "haproxy.cfg").read_text(encoding="utf-8")
    text = text.replace(":443", f"127.0.0.1:{ports['tls']}").replace("8000", str(ports["http"]))
    proxy.write_text(text.replace("/etc/haproxy/infer.pem", str(pem)), encoding="utf-8")
    scraper = tmp_path / "prometheus.yml"
    text = (DEPLOY / "prometheus/local.yaml").read_text(encoding="utf-8")
    text = text.replace("9400", str(ports["metrics"])).replace("15s", "1s")
    scraper.write_text(text, encoding="utf-8")
    shutil.copy(DEPLOY / "prometheus/alerts.yaml", tmp_path)
    storage = tmp_path / "prometheus"
    at = f"127.0.0.1:{ports['prometheus']}"
    options = [f"--storage.tsdb.path={storage}", f"--web.listen-address={at}"]
    env = {**ENV, "INFER_CONFIG": str(config), "NOTIFY_SOCKET": str(tmp_path / "notify")}
    started: list[subprocess.Popen[bytes]] = []
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told,
        (tmp_path / "log").open("wb") as log,
    ):
        told.bind(env["NOTIFY_SOCKET"])
        told.settimeout(180)
        try:
            for command in (
                [*INFER, "serve"],
                [programs["haproxy"], "-db", "-f", str(proxy)],
                [programs["prometheus"], f"--config.file={scraper}", *options],
            ):
                started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            assert told.recv(4096).startswith(b"READY=1")
            url = f"https://127.0.0.1:{ports['tls']}"
            until(lambda: asked(url, key)[0] == 200, 60)
            assert asked(url, "wrong")[0] == 401
            query = f"http://{at}/api/v1/query?query="
            until(lambda: value_of(query + "up") == "1", 60)
            assert value_of(query + "infer:num_requests_running") == "0"
            started[0].send_signal(signal.SIGTERM)
            assert started[0].wait(60) == 0
        finally:
            for process in started:
                process.kill()
                process.wait()


def run(*command: object) -> str:
    done = subprocess.run(
        [str(each) for each in command], env=ENV, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def asked(url: str, key: str) -> tuple[int, bytes]:
    try:
        with connect(url) as sock:
            head = (
                f"GET /v1/models HTTP/1.1\r\nhost: models.example.org\r\nx-api-key: {key}\r\n\r\n"
            )
            sock.sendall(head.encode())
            return read_answer(sock)
    except (OSError, AssertionError, ValueError):
        return 0, b""


def value_of(query: str) -> Any:
    try:
        with urllib.request.urlopen(query, timeout=5) as answer:
            found = json.load(answer)["data"]["result"]
    except OSError:
        return None
    return found[0]["value"][1] if found else None
