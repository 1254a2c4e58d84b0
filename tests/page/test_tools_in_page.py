"""Tools and several models in the page: a template that can call, and two models to choose from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.page_driver import Reader

pytestmark = pytest.mark.browser

TEMPLATE = Path(__file__).parents[1] / "support" / "templates" / "qwen25.jinja"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def server_options() -> list[str]:
    demo = Path(__file__).parents[2] / "src" / "infer" / "demo_model"
    models = ["--model", f"one={demo}", "--model", f"two={demo}"]
    return [*models, "--chat-template", str(TEMPLATE)]


def test_a_call_is_shown_and_its_result_goes_back(reader: Reader) -> None:
    page = reader.page
    reader.settings({"max_tokens": 120})
    page.click("header.topbar button:last-child")
    page.fill("dialog textarea.mono >> nth=1", json.dumps(TOOLS))
    page.keyboard.press("Tab")
    page.locator("dialog").get_by_label("Calls").select_option("required")
    page.click("dialog footer button.main")
    reader.send("What is the weather in Paris?")
    page.wait_for_selector(".call textarea")
    assert "The model calls weather" in page.inner_text(".call")
    assert json.loads(page.inner_text(".call pre"))["city"] in ("Paris", "Oslo")
    page.fill(".call textarea", "Rain, 12 degrees")
    page.click("tool-calls button.main")
    page.wait_for_selector(".message.tool")
    reader.until("document.querySelectorAll('.message.assistant .figures').length == 2")
    assert page.inner_text(".message.tool .own-text") == "Rain, 12 degrees"


def test_wrong_tools_are_named_and_not_sent(reader: Reader) -> None:
    page = reader.page
    reader.settings({"max_tokens": 20})
    page.click("header.topbar button:last-child")
    page.fill("dialog textarea.mono >> nth=1", "[{")
    page.keyboard.press("Tab")
    page.wait_for_selector("dialog .fault-text:has-text('not valid JSON')")
    page.click("dialog footer button.main")
    assert reader.ask("Hello") is not None


def test_the_reader_chooses_a_model(reader: Reader) -> None:
    page = reader.page
    reader.settings({"max_tokens": 10})
    page.select_option("header.topbar select", "two")
    reader.ask("Hello")
    page.click(".message.assistant .figures")
    page.wait_for_selector(".timeline li")
    assert page.locator("what-happened dt:has-text('Model') + dd").inner_text() == "two"
    page.reload()
    page.wait_for_selector("header.topbar select")
    assert page.input_value("header.topbar select") == "two"
