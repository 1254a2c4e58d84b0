"""Example servers of the official MCP SDK: with sessions, without, and with JSON for events"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.doubles import make_hash_llm
from tests.support.serving import App, serving

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

DRIVER = Path(__file__).parent / "drivers" / "mcp_server.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the SDK."""
    folder = tmp_path_factory.mktemp("mcp")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    found = folder / "bin" / "python"
    subprocess.run([str(found), "-m", "pip", "install", "-q", "mcp>=2,<3"], check=True)
    return found


@pytest.fixture(params=["sessions", "stateless", "json"])
def url(python: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    command = [str(python), str(DRIVER), request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def test_an_example_server(url: str) -> None:
    async def call(app: App, tool: str, **arguments: Any) -> Any:
        body = {"server": "docs", "tool": tool, "arguments": arguments}
        reply = await app.post("/v1/mcp/call", body)
        assert reply.status == 200, reply.body
        return reply.json()

    async def main() -> None:
        async with serving(make_hash_llm(), mcp_server=f"docs={url}") as app:
            [found] = (await app.get("/v1/mcp/servers")).json()["data"]
            assert found["error"] is None
            assert found["left_out"] == []
            tools = {each["name"]: each for each in found["tools"]}
            assert set(tools) == {"add", "slow", "picture", "fail"}
            assert tools["add"]["description"] == "Adds two numbers."
            assert tools["add"]["parameters"]["required"] == ["a", "b"]
            assert (await call(app, "add", a=2, b=3))["content"] == "5"
            assert (await call(app, "slow"))["content"] == "done"
            shown = (await call(app, "picture"))["content"]
            assert shown == "[image image/png, 30 bytes: not shown]"
            failed = await call(app, "fail")
            assert failed["is_error"] is True
            assert "fail" in failed["content"]
            wrong = await call(app, "add", a="x")
            assert wrong["is_error"] is True

    asyncio.run(main())
