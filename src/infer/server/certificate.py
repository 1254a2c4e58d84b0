"""`Certificate`: the certificate of a server, which may be replaced while it serves"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from infer.errors import ConfigError
from infer.files import MAX_CONFIG_BYTES, read_text
from infer.server.address import check_certificate
from infer.server.settings import ServerSettings

log = logging.getLogger("infer.server")

LOOK_S = 10.0
"""Seconds between two looks at the files."""
SOON_S = 14 * 24 * 3600.0
"""Seconds before its end from which on a certificate is said to end soon."""
_SAY_EVERY_S = 24 * 3600.0
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0x17, 0x18
_FORMS = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}


class Certificate:
    """New connections have the newest one that could be used; open ones keep theirs. Files are
    looked at now and then and at HUP. Where the new ones cannot be used, the certificate before
    stays."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises `ConfigError` if it cannot be used."""
        self._settings = settings
        self._said_s = 0.0
        self._stamp = self._stamp_now()
        self.context = check_certificate(settings)
        """Of new connections; None: the server speaks no TLS."""
        self._say_if_it_ends()

    def refresh(self, *, always: bool = False) -> None:
        """Read the files again if they have changed, or `always`. Takes milliseconds."""
        if self.context is None:
            return
        stamp = self._stamp_now()
        if stamp == self._stamp and not always:
            self._say_if_it_ends()
            return
        self._stamp = stamp
        try:
            self.context = check_certificate(self._settings)
        except ConfigError as error:
            log.error("%s; the certificate before stays", error)
            return
        self._said_s = 0.0
        log.info("the certificate was read again")
        self._say_if_it_ends()

    def _stamp_now(self) -> list[tuple[int, int] | None]:
        return [
            _stamp(name)
            for name in (self._settings.ssl_certfile, self._settings.ssl_keyfile)
            if name is not None
        ]

    def _say_if_it_ends(self) -> None:
        """Log, once a day, that the certificate has ended or ends soon."""
        if self.context is None or self._settings.ssl_certfile is None:
            return
        if self._said_s and time.time() - self._said_s < _SAY_EVERY_S:
            return
        ends_at = None
        with contextlib.suppress(OSError, ValueError):
            path = Path(self._settings.ssl_certfile).expanduser()
            ends_at = valid_until(read_text(path, MAX_CONFIG_BYTES))
        if ends_at is not None and ends_at.timestamp() - time.time() < SOON_S:
            self._said_s = time.time()
            has_ended = ends_at.timestamp() <= self._said_s
            log.warning(
                "the certificate %s on %s: replace %s, it is read again by itself",
                "has ended" if has_ended else "ends",
                ends_at.strftime("%Y-%m-%d at %H:%M UTC"),
                self._settings.ssl_certfile,
            )


def valid_until(pem: str) -> datetime | None:
    """When the first certificate of a text ends; None where that cannot be read."""
    match = _PEM.search(pem)
    if match is None:
        return None
    with contextlib.suppress(ValueError, IndexError, StopIteration):
        # A certificate is a sequence; the first of it is a sequence with, among others, three
        # sequences before all others: algorithm, issuer, validity.
        _, whole = next(_items(ssl.PEM_cert_to_DER_cert(match[0])))
        _, signed = next(_items(whole))
        sequences = [content for tag, content in _items(signed) if tag == _SEQUENCE]
        tag, text = list(_items(sequences[2]))[1]
        return datetime.strptime(text.decode("ascii"), _FORMS[tag]).replace(tzinfo=UTC)
    return None


def _items(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tags and contents of the items that DER data consists of."""
    at = 0
    while at < len(data):
        tag, size = data[at], data[at + 1]
        at += 2
        if size & 0x80:
            num_bytes = size & 0x7F
            size = int.from_bytes(data[at : at + num_bytes], "big")
            at += num_bytes
        yield tag, data[at : at + size]
        at += size


def _stamp(name: str) -> tuple[int, int] | None:
    try:
        status = os.stat(Path(name).expanduser())
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
