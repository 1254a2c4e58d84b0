"""What a running server reads again at HUP, or when a certificate has changed; and what stays."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import ssl
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from infer.errors import ConfigError
from infer.server.certificate import Certificate, valid_until
from infer.server.serve import Server
from infer.server.settings import ServerSettings
from tests.support.doubles import make_hash_llm
from tests.support.raw_http import HEALTH, connect, read_answer
from tests.support.running_server import running, settings_with
from tests.support.transports import make_certificate
from tests.support.waits import until


def hang_up(server: Server) -> None:
    """As `kill -HUP` does."""
    server.handle_exit(signal.SIGHUP, None)


def shown_at(url: str) -> str:
    """SHA-256 of the certificate that a new connection is shown."""
    with connect(url) as sock:
        assert isinstance(sock, ssl.SSLSocket)
        sock.sendall(HEALTH)
        assert read_answer(sock)[0] == 200
        return hashlib.sha256(sock.getpeercert(binary_form=True) or b"").hexdigest()


def test_live_settings_are_taken_and_others_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infer.server")
    answers = iter(
        [
            lambda now: (replace(now, keep_alive_s=3.0, log_level="debug"), ["hang_s"]),
            lambda now: (_ for _ in ()).throw(ConfigError("port", "must be an integer (f:1)")),
            lambda now: (replace(now, max_sessions=7), []),
        ]
    )
    with running(make_hash_llm(), settings_with(), lambda now: next(answers)(now)) as (
        server,
        url,
        _,
    ):
        hang_up(server)
        until(lambda: "only a restart changes hang_s" in caplog.text)
        assert server.settings.keep_alive_s == 3.0
        assert logging.getLogger("infer").level == logging.DEBUG
        hang_up(server)
        until(lambda: "the settings stay as they were: port: must be an integer" in caplog.text)
        assert server.settings.keep_alive_s == 3.0
        hang_up(server)
        until(lambda: server.settings.max_sessions == 7)
        with connect(url) as sock:
            sock.sendall(HEALTH)
            assert read_answer(sock)[0] == 200
    logging.getLogger("infer").setLevel(logging.NOTSET)


def test_a_certificate_is_replaced_and_a_bad_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = make_certificate(tmp_path, "server")
    new = make_certificate(tmp_path, "new")
    settings = settings_with(ssl_certfile=certificate, ssl_keyfile=key)
    with running(make_hash_llm(), settings) as (server, url, _):
        first = shown_at(url)
        with connect(url) as kept:
            Path(certificate).write_text("no certificate", encoding="utf-8")
            hang_up(server)
            until(lambda: "cannot be used: " in caplog.text)
            assert "; the certificate before stays" in caplog.text
            assert shown_at(url) == first
            for target, source in zip((certificate, key), new, strict=True):
                os.replace(source, target)
            hang_up(server)
            until(lambda: shown_at(url) != first)
            kept.sendall(HEALTH)  # an open connection goes on
            assert read_answer(kept)[0] == 200


def test_changed_files_are_noticed_without_a_signal(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "server")
    settings = ServerSettings(ssl_certfile=certificate, ssl_keyfile=key)
    held = Certificate(settings)
    first = held.context
    held.refresh()
    assert held.context is first
    for target, source in zip((certificate, key), make_certificate(tmp_path, "new"), strict=True):
        os.replace(source, target)
    held.refresh()
    second = held.context
    assert second is not first
    Path(key).unlink()
    held.refresh()
    assert held.context is second


def test_the_end_of_a_certificate_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificate, key = make_certificate(tmp_path, "server")  # of two days
    shown = subprocess.run(
        ["openssl", "x509", "-enddate", "-noout", "-in", certificate],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    ).stdout
    ends_at = valid_until(Path(certificate).read_text(encoding="utf-8"))
    assert ends_at is not None
    assert ends_at.timestamp() == ssl.cert_time_to_seconds(shown.strip().partition("=")[2])
    assert 0 < ends_at.timestamp() - time.time() < 3 * 24 * 3600
    held = Certificate(ServerSettings(ssl_certfile=certificate, ssl_keyfile=key))
    held.refresh()
    said = [record for record in caplog.records if "the certificate ends on" in record.message]
    assert len(said) == 1  # not at every look
    for text in ("", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----"):
        assert valid_until(text) is None


def test_a_private_key_that_others_can_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = make_certificate(tmp_path, "server")
    settings = ServerSettings(ssl_certfile=certificate, ssl_keyfile=key)
    Path(key).chmod(0o600)
    Certificate(settings)
    assert "by others" not in caplog.text
    Path(key).chmod(0o640)
    Certificate(settings)
    assert f"{key} can be read or written by others than its owner (mode 0640)" in caplog.text


def test_limits_of_sessions_are_those_of_the_new_settings(tmp_path: Path) -> None:
    settings = settings_with(sessions=f"sqlite:///{tmp_path / 'x.db'}")

    def create(url: str) -> int:
        body = json.dumps({"title": "a"}).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        with connect(url) as sock:
            sock.sendall(
                b"POST /v1/sessions HTTP/1.1\r\nhost: localhost\r\n" + head.encode() + body
            )
            return read_answer(sock)[0]

    def read_again(now: ServerSettings) -> tuple[ServerSettings, list[str]]:
        return replace(now, max_sessions=1), []

    with running(make_hash_llm(), settings, read_again) as (server, url, _):
        assert create(url) == 200
        hang_up(server)
        until(lambda: server.settings.max_sessions == 1)
        until(lambda: create(url) == 429)
