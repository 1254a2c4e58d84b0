"""HTTP on plain sockets, for tests whose clients break its rules."""

from __future__ import annotations

import socket
import ssl

from tests.support.serving import COMPLETIONS

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def reach(url: str) -> socket.socket:
    """A connection below TLS: no handshake is begun."""
    scheme, _, where = url.partition(":")
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect(where)
        return sock
    host, port = where.removeprefix("//").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def connect(url: str) -> socket.socket:
    """A connection on which HTTP can be spoken; no certificate is checked."""
    sock = reach(url)
    if not url.startswith("https:"):
        return sock
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        return context.wrap_socket(sock)
    except OSError:
        sock.close()
        raise


def read_answer(sock: socket.socket) -> tuple[int, bytes]:
    """Status and body of an answer with a Content-Length."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = sock.recv(65536)
        assert piece, received
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
    while len(body) < length:
        body += sock.recv(65536)
    return int(head.split()[1]), body


def read_all(sock: socket.socket) -> bytes:
    received = bytearray()
    while piece := sock.recv(65536):
        received += piece
    return bytes(received)
