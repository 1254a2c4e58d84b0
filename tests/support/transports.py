"""The ways to a server: plain TCP, TLS, and a Unix socket"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

Transport = Literal["plain", "tls", "unix"]
TRANSPORTS: tuple[Transport, ...] = ("plain", "tls", "unix")


def make_certificate(folder: Path, name: str, host: str = "127.0.0.1") -> tuple[str, str]:
    """A self-signed certificate for this host, and its key."""
    kind = "IP" if host.replace(".", "").isdecimal() else "DNS"
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    openssl = shutil.which("openssl")
    assert openssl, "the openssl program is needed to make a certificate"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", f"/CN={host}", "-addext",
         f"subjectAltName={kind}:{host}", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
        timeout=60,
    )  # fmt: skip
    return str(certificate), str(key)


def settings_of(transport: Transport, folder: Path) -> dict[str, Any]:
    """The `ServerSettings` with which a server is reached so."""
    if transport == "unix":
        return {"uds": str(folder / "s")}
    if transport == "tls":
        certificate, key = make_certificate(folder, "server")
        return {"ssl_certfile": certificate, "ssl_keyfile": key}
    return {}


def options_of(transport: Transport, folder: Path) -> list[str]:
    """The same as options of `infer serve`."""
    found = settings_of(transport, folder)
    return [
        part for name, value in found.items() for part in (f"--{name.replace('_', '-')}", value)
    ]
