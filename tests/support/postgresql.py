"""A PostgreSQL server for a test, on a socket in a folder of its own."""

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
    # It refuses to run as root.
    how: Any = {"user": "nobody"} if os.geteuid() == 0 else {}
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


def run_sql(url: str, statement: str) -> None:
    """Execute a statement outside a transaction."""
    engine = sql.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as db:
        db.execute(sql.text(statement))
    engine.dispose()
