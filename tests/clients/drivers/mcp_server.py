"""An example server of the official MCP SDK on a free port, whose address is the first line."""

import socket
import sys

import uvicorn
from mcp.server.mcpserver import Context, Image, MCPServer

server = MCPServer("example")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
async def slow(ctx: Context) -> str:
    """Says how far it is, and ends."""
    for step in range(3):
        await ctx.report_progress(step, 3)
    return "done"


@server.tool()
def picture() -> Image:
    """A picture."""
    return Image(data=b"x" * 30, format="png")


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("this tool fails")


kind = sys.argv[1]
app = server.streamable_http_app(json_response=kind == "json", stateless_http=kind == "stateless")
bound = socket.create_server(("127.0.0.1", 0))
print(f"http://127.0.0.1:{bound.getsockname()[1]}/mcp", flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run([bound])
