"""A PostgreSQL server for a test, on a socket in a folder of its own, and a pool before it."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql

from tests.support.waits import until

PATH = os.pathsep.join([os.environ["PATH"], *sorted(glob.glob("/usr/lib/postgresql/*/bin"))[::-1]])


def _not_as_root() -> Any:
    """How to start PostgreSQL and PgBouncer, which refuse to run as root."""
    return {"user": "nobody"} if os.geteuid() == 0 else {}


@contextmanager
def postgresql() -> Iterator[str]:
    """Run PostgreSQL; yields the URL of a database with %s for its name. `postgres` is there.

    The test is skipped where PostgreSQL or its driver is missing.
    """
    pytest.importorskip("psycopg", reason="needs the extra: pip install -e '.[postgres]'")
    found = [shutil.which(name, path=PATH) for name in ("initdb", "postgres")]
    if None in found:
        pytest.skip("PostgreSQL is not here: no initdb and postgres in PATH or where Debian has it")
    initdb, server = map(str, found)
    how = _not_as_root()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if how:
            shutil.chown(folder, **how)
        quiet = {"stdout": subprocess.DEVNULL, "cwd": folder, **how}
        data = f"{folder}/data"
        subprocess.run(
            [initdb, "-D", data, "-U", "infer", "-A", "trust", "-N"], check=True, **quiet
        )
        command = [server, "-D", data, "-k", folder, "-c", "listen_addresses=", "-F"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, **quiet) as process:
            try:
                until(Path(folder, ".s.PGSQL.5432").exists, 20)
                yield f"postgresql+psycopg://infer@/%s?host={folder}"
            finally:
                process.send_signal(signal.SIGINT)  # SIGTERM would wait for its clients


@contextmanager
def pooled(url: str) -> Iterator[str]:
    """Run PgBouncer before a server, which gives a connection to another client after each
    transaction; yields the URL with its port. The test is skipped where it is missing."""
    program = shutil.which("pgbouncer", path=os.pathsep.join([PATH, "/usr/sbin"]))
    if program is None:
        pytest.skip("PgBouncer is not here")
    folder = Path(url.rpartition("host=")[2])
    settings = folder / "pool.ini"
    settings.write_text(
        f"[databases]\n* = host={folder} port=5432 user=infer\n[pgbouncer]\nlisten_addr =\n"
        f"unix_socket_dir = {folder}\nlisten_port = 6432\nauth_type = any\n"
        "pool_mode = transaction\ndefault_pool_size = 2\n",
        encoding="utf-8",
    )
    settings.chmod(0o644)
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **_not_as_root()}
    with subprocess.Popen([program, "-q", settings], **quiet) as process:
        try:
            until((folder / ".s.PGSQL.6432").exists, 20)
            yield f"{url}&port=6432"
        finally:
            process.kill()


def run_sql(url: str, statement: str) -> None:
    """Execute a statement outside a transaction."""
    engine = sql.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as db:
        db.execute(sql.text(statement))
    engine.dispose()
