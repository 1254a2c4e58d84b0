"""The address at which a server listens, and what it needs to be used: the first thing of a start

The standard library only, besides settings, so that a start has it before it imports the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import logging
import os
import socket
import ssl
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from socket import AF_INET, AF_INET6

from infer.config import DEFAULT_HOST, DEFAULT_PORT
from infer.errors import ConfigError
from infer.files import MAX_CONFIG_BYTES, read_text
from infer.private_files import warn_if_shared
from infer.server.settings import ServerSettings
from infer.types.server_limits import SERVER_LIMITS, ServerLimits

log = logging.getLogger("infer.server")

_SO_ATTACH_FILTER = 26
MAX_WAITING_CONNECTIONS = 2048
"""The most connections that the system has opened and the server has not accepted yet."""


class _ListeningSocket(socket.socket):
    """asyncio accepts as many connections in a turn as it lets wait. More of them may wait here."""

    def listen(self, backlog: int = MAX_WAITING_CONNECTIONS) -> None:
        super().listen(max(backlog, MAX_WAITING_CONNECTIONS))


def bind(
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    write_stall_s: float = ServerSettings.write_stall_s,
    limits: ServerLimits = SERVER_LIMITS,
) -> socket.socket:
    """A socket that holds the port and does not listen yet; port 0 = any free port.

    Raises `ConfigError` where the address cannot be used. Where the system can do it, a connection
    is dropped whose reader has not acknowledged what was sent after `write_stall_s` seconds.
    """
    if not 0 <= port <= 65535:
        raise ConfigError("port", f"must be between 0 and 65535, not {port}")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise ConfigError("host", f"{host!r} is not an address or name of this machine") from None
    sock = _ListeningSocket(family, kind, proto)
    try:
        _set_options(sock, write_stall_s, limits)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _no_address(error, host, port) from None
    return sock


def _set_options(sock: socket.socket, write_stall_s: float, limits: ServerLimits) -> None:
    # Accepted connections inherit it. Without it each answer on a kept connection waits 40 ms
    # for the client's acknowledgement of its head, and tokens come in bursts.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.send_buffer_bytes)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        stall_ms = min(int(write_stall_s * 1000), 2**31 - 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)


def join(
    sock: socket.socket,
    write_stall_s: float = ServerSettings.write_stall_s,
    limits: ServerLimits = SERVER_LIMITS,
) -> socket.socket:
    """A further socket at the address of one of `bind`, which holds it for this user: the system
    gives each new connection to one of those that listen. Linux only; raises `ConfigError`."""
    host, port = sock.getsockname()[:2]
    further = _ListeningSocket(sock.family, sock.type, sock.proto)
    try:
        _set_options(further, write_stall_s, limits)
        # Not before `bind`: so a port that another server has is refused to this one.
        for member in (sock, further):
            member.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        further.bind(sock.getsockname())
    except OSError as error:
        further.close()
        raise _no_address(error, host, port) from None
    return further


def of_descriptor(number: int) -> socket.socket:
    """A socket of `bind` that another process has given to this one."""
    return _ListeningSocket(fileno=number)


def _no_address(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        advice = "stop what runs there or choose another --port"
        return ConfigError("port", f"{port} is in use on {host}; {advice}")
    if error.errno == errno.EACCES:
        return ConfigError("port", f"{port} may not be used by this user")
    return ConfigError("host", f"cannot listen on {host!r}: {error.strerror}")


def listen(sock: socket.socket) -> None:
    """Listen at a socket of `bind` or `unix_socket`. Raises `ConfigError`; see `cannot_listen`."""
    try:
        sock.listen()
    except OSError as error:
        raise cannot_listen(sock, error) from None


def take_no_more(sock: socket.socket) -> bool:
    """Have the system drop requests for new connections at a socket that listens, on Linux; whether
    it does. Those that are being opened still are.

    A client asks again after a second and finds the port closed. Closing it at once would cut off
    connections that the system has opened and nobody has accepted.
    """
    if not sys.platform.startswith("linux") or sock.family not in (AF_INET, AF_INET6):
        return False
    # Classic BPF over the TCP header: a byte of flags; SYN set: keep nothing, else everything.
    code = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
    program = b"".join(struct.pack("=HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(program, len(program))
    try:
        whole = struct.pack("HL", len(code), ctypes.addressof(buffer))
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, whole)
    except OSError:
        return False
    return True


def cannot_listen(sock: socket.socket, error: OSError) -> ConfigError:
    """The error where somebody else listens there already: SO_REUSEADDR lets two hold a port, and
    only one listen."""
    if sock.family == getattr(socket, "AF_UNIX", None):
        return ConfigError("uds", f"cannot listen: {error.strerror}")
    host, port = sock.getsockname()[:2]
    return _no_address(error, host, port)


@contextlib.contextmanager
def unix_socket(path: str) -> Iterator[socket.socket]:
    """A Unix socket at `path`, which only this user may use, and which does not listen yet.

    The file that a dead server left is replaced. The file is removed at the end of the block.
    Raises `ConfigError` where a server listens at the path, or another kind of file is there.
    """
    with _ListeningSocket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            _remove_stale(path)
            mask = os.umask(0o177)
            try:
                sock.bind(path)
            finally:
                os.umask(mask)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SERVER_LIMITS.send_buffer_bytes)
            ours = os.stat(path)
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = getattr(error, "strerror", None) or error
            raise ConfigError("uds", f"cannot listen at {path!r}: {reason}") from None
        try:
            yield sock
        finally:
            with contextlib.suppress(OSError):
                now = os.stat(path)
                if (now.st_dev, now.st_ino) == (ours.st_dev, ours.st_ino):
                    os.unlink(path)


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError("uds", f"{path!r} is there and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except TimeoutError:
            pass  # a server listens and does not answer
    raise ConfigError("uds", f"a server listens at {path!r} already")


def check_certificate(settings: ServerSettings) -> ssl.SSLContext | None:
    """What a connection needs for TLS; None where the settings want none. Raises `ConfigError` if
    the certificate or its private key cannot be used."""
    if settings.ssl_certfile is None:
        return None
    for field in ("ssl_certfile", "ssl_keyfile"):
        name = getattr(settings, field)
        try:
            if name is not None and not read_text(Path(name).expanduser(), MAX_CONFIG_BYTES):
                raise ConfigError(field, f"{name!r} is empty")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not PEM"
            raise ConfigError(field, f"{name!r} cannot be read: {reason}") from None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(
            settings.ssl_certfile,
            settings.ssl_keyfile,
            password=lambda: "",  # else OpenSSL asks for one on the terminal
        )
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        key = settings.ssl_keyfile or settings.ssl_certfile
        message = f"{settings.ssl_certfile!r} and the key in {key!r} cannot be used: {reason}"
        if "MISMATCH" in str(reason):
            message += "; the key is another certificate's"
        raise ConfigError("ssl_certfile", message) from None
    warn_if_shared(Path(settings.ssl_keyfile or settings.ssl_certfile).expanduser())
    return context


def url_of(sock: socket.socket, *, is_tls: bool = False) -> str:
    """The address at which a client on this machine finds the server."""
    if sock.family == getattr(socket, "AF_UNIX", None):
        return f"unix:{sock.getsockname()}"
    scheme = "https" if is_tls else "http"
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_reach(host: str, sock: socket.socket, settings: ServerSettings) -> None:
    """Raises `ConfigError` where other machines could use a server without keys.

    Logs a warning where keys travel without encryption.
    """
    address = ipaddress.ip_address(sock.getsockname()[0].partition("%")[0])
    if address.is_loopback:
        return
    if not (settings.api_keys or settings.insecure):
        message = f"{host!r} can be reached from other machines: give --api-keys a file of keys"
        raise ConfigError("host", f"{message}, or allow it with --insecure")
    if settings.api_keys and not settings.ssl_certfile:
        log.warning(
            "keys and texts travel to %s in clear text: give --ssl-certfile and --ssl-keyfile, or"
            " listen on 127.0.0.1 or --uds behind a proxy that speaks TLS",
            host,
        )


def place(
    settings: ServerSettings, host: str, port: int
) -> contextlib.AbstractContextManager[socket.socket]:
    """The socket at which the server will listen."""
    if settings.uds:
        return unix_socket(settings.uds)
    return bind(host, port, settings.write_stall_s, settings.limits)
