"""Tools of MCP servers in the page: switched on, asked for before they run, their results sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mcp_servers import TOOL, Asked, Said, ScriptedMcp, result, scripted_mcp, text
from tests.support.page_driver import Reader

pytestmark = pytest.mark.browser

TEMPLATE = Path(__file__).parents[1] / "support" / "templates" / "qwen25.jinja"
HOSTILE = "<img src=x onerror=alert(1)>"
DELETE = {
    "name": "delete",
    "description": HOSTILE,
    "inputSchema": {"properties": {"all": {"enum": [True]}}, "additionalProperties": False},
}
FIND = {
    **TOOL,
    "inputSchema": {
        "type": "object",
        "properties": {"q": {"enum": ["Paris", "Oslo"]}},
        "required": ["q"],
        "additionalProperties": False,
    },
}


ROUNDS = """async (count) => {
  const { chats } = await import("/ui/lib/chats.js");
  const { tree } = chats;
  let [parent, n] = [null, 0];
  const add = (role, more) => {
    const id = crypto.randomUUID();
    const conversation = tree.conversation.id;
    const message = { id, conversation, parent, role, content: "", created: 1000 + ++n, ...more };
    tree.add(message);
    tree.choose(message);
    parent = id;
  };
  add("user", { content: "Where is it?" });
  for (let i = 1; i <= count; i++) {
    const made = { name: "docs__find", arguments: "{}" };
    const call = { id: `call-${i}`, type: "function", function: made };
    add("assistant", { toolCalls: [call], finish: "tool_calls" });
    if (i < count) add("tool", { content: "1", toolCallId: call.id });
  }
  chats.dispatchEvent(new Event("change"));
}"""
"""Shows a conversation with so many rounds of calls, which the shipped model's 2,048 tokens hold.
"""


@pytest.fixture(scope="module")
def mcp() -> Iterator[ScriptedMcp]:
    """A scripted server in a thread."""
    found: list[ScriptedMcp] = []
    loop, end, is_there = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def main() -> None:
        async with scripted_mcp() as server:
            server.tools = [FIND, DELETE, {"name": "no schema"}]
            found.append(server)
            is_there.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert is_there.wait(30)
    yield found[0]
    loop.call_soon_threadsafe(end.set)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def server_options(mcp: ScriptedMcp) -> list[str]:
    servers = ["--mcp-server", f"docs={mcp.url}", "--mcp-server", "gone=http://127.0.0.1:1/"]
    return [*servers, "--chat-template", str(TEMPLATE)]


@pytest.fixture(autouse=True)
def good(mcp: ScriptedMcp) -> None:
    mcp.says.clear()
    mcp.asked.clear()


def calls(mcp: ScriptedMcp) -> list[Asked]:
    return [each for each in mcp.asked if each.message.get("method") == "tools/call"]


def let_it_call(person: Reader) -> None:
    """Answers are calls of the tool, one each."""
    page = person.page
    person.settings({"max_tokens": 120})
    person.open_settings()
    person.use("mcp-tools label:has-text('find') input")
    label = f"label:has-text('{person.said('settings.tool-choice')}') select"
    page.wait_for_selector(label)
    person.choose(label, "docs__find")
    person.close_dialog()
    person.send("Where is it?")
    page.wait_for_selector("mcp-call button.main")


def test_a_call_is_asked_for_and_its_result_goes_back(person: Reader, mcp: ScriptedMcp) -> None:
    page = person.page
    let_it_call(person)
    assert person.said("mcp.ask", server="docs", tool="find") in page.inner_text("mcp-call")
    assert calls(mcp) == []
    mcp.says["tools/call"] = lambda asked: result(text(HOSTILE))
    person.use("mcp-call button.main")
    page.wait_for_selector(".message.tool")
    assert page.inner_text(".message.tool .own-text") == HOSTILE
    [call] = calls(mcp)
    assert call.message["params"]["name"] == "find"
    assert call.arguments["q"] in ("Paris", "Oslo")
    person.until("document.querySelectorAll('.message.assistant .figures').length == 2")
    assert len(calls(mcp)) == 1  # each call is asked for


def test_a_call_that_is_not_allowed_does_not_run(person: Reader, mcp: ScriptedMcp) -> None:
    page = person.page
    let_it_call(person)
    person.use("mcp-call button:not(.main)")
    page.wait_for_selector(".message.tool")
    assert page.inner_text(".message.tool .own-text") == person.said("mcp.declined")
    assert calls(mcp) == []


def test_a_server_that_fails_is_one_sentence_and_can_be_asked_again(
    reader: Reader, mcp: ScriptedMcp
) -> None:
    page = reader.page
    let_it_call(reader)
    mcp.says["tools/call"] = lambda asked: Said(b"<html>", "text/html")
    reader.use("mcp-call button.main")
    page.wait_for_selector("mcp-call .fault-text")
    assert "neither JSON nor events" in page.inner_text("mcp-call .fault-text")
    assert page.locator(".message.tool").count() == 0
    del mcp.says["tools/call"]
    reader.problems.clear()  # the browser's console names the 502
    reader.use("mcp-call button.main")
    page.wait_for_selector(".message.tool")
    assert page.inner_text(".message.tool .own-text") == "done"


@pytest.mark.parametrize("num_rounds", [20, 21])
def test_results_go_back_by_themselves_for_twenty_rounds(
    reader: Reader, mcp: ScriptedMcp, num_rounds: int
) -> None:
    """The last of these rounds has no result yet."""
    page = reader.page
    page.wait_for_selector(".composer textarea")
    page.evaluate(ROUNDS, num_rounds)
    page.wait_for_selector("mcp-call button.main")
    assert page.locator("mcp-call").count() == 1
    note = reader.said("mcp.rounds", n=20)
    assert (note in page.inner_text("mcp-call")) is (num_rounds > 20)
    reader.use("mcp-call button.main")
    if num_rounds > 20:
        reader.until("document.querySelector('tool-calls textarea')?.value === 'done'")
    reader.until("document.querySelectorAll('.message.tool').length == 20")
    assert len(calls(mcp)) == 1


def test_what_servers_have_is_shown_as_text(person: Reader) -> None:
    page = person.page
    person.open_settings()
    page.wait_for_selector("mcp-tools .fault-text")
    assert "'gone' cannot be used" in page.inner_text("mcp-tools .fault-text")
    shown = page.inner_text("mcp-tools")
    assert HOSTILE in shown
    assert "no schema" in shown
    person.use("mcp-tools label:has-text('delete') input")
    person.until("document.querySelectorAll('mcp-tools input:checked').length == 1")
    person.use("mcp-tools label:has-text('delete') input")
    person.until("document.querySelectorAll('mcp-tools input:checked').length == 0")
