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


def let_it_call(person: Reader, max_tokens: int) -> None:
    """Answers are calls of the tool, one each: else the model may begin a second one."""
    page = person.page
    person.settings({"max_tokens": max_tokens})
    person.open_settings()
    person.write("dialog textarea.mono >> nth=1", json.dumps(TOOLS))
    if person.hands == "keyboard":
        page.keyboard.press("Tab")  # the list of choices is there once the field is left
    else:
        page.locator("dialog textarea.mono >> nth=1").blur()
    label = f"label:has-text('{person.said('settings.tool-choice')}') select"
    page.wait_for_selector(label)
    person.choose(label, "weather")
    person.close_dialog()


def test_a_call_is_shown_and_its_result_goes_back(person: Reader) -> None:
    page = person.page
    let_it_call(person, 120)
    person.send("What is the weather in Paris?")
    page.wait_for_selector(".call textarea")
    assert person.said("tool.call", name="weather") in page.inner_text(".call")
    assert json.loads(page.inner_text(".call pre"))["city"] in ("Paris", "Oslo")
    person.write(".call textarea", "Rain, 12 degrees")
    person.use("tool-calls button.main")
    page.wait_for_selector(".message.tool")
    person.until("document.querySelectorAll('.message.assistant .figures').length == 2")
    assert page.inner_text(".message.tool .own-text") == "Rain, 12 degrees"
    person.open_settings()  # a call that was forced is not forced again
    label = f"label:has-text('{person.said('settings.tool-choice')}') select"
    assert page.input_value(label) == "auto"


def test_a_call_that_was_cut_has_no_result_and_the_conversation_goes_on(reader: Reader) -> None:
    page = reader.page
    let_it_call(reader, 30)
    reader.send("What is the weather in Paris?")
    page.wait_for_selector(".message.assistant .figures")
    page.wait_for_selector(".call")  # its module is loaded for the first call
    assert page.locator(".call").count() == 1
    assert page.locator(".call textarea").count() == 0
    reader.ask("Hello")
    assert page.locator(".composer .fault").count() == 0


def test_wrong_tools_are_named_and_not_sent(reader: Reader) -> None:
    page = reader.page
    reader.settings({"max_tokens": 20})
    reader.open_settings()
    page.fill("dialog textarea.mono >> nth=1", "[{")
    page.keyboard.press("Tab")
    page.wait_for_selector("dialog .fault-text:has-text('not valid JSON')")
    page.click("dialog footer button.main")
    assert reader.ask("Hello") is not None


def test_the_reader_chooses_a_model(person: Reader) -> None:
    page = person.page
    person.settings({"max_tokens": 10})
    person.choose("header.topbar select", "two")
    person.ask("Hello")
    person.open_happened()
    label = person.said("happened.model")
    assert page.locator(f"what-happened dt:has-text('{label}') + dd").inner_text() == "two"
    page.reload()
    page.wait_for_selector("header.topbar select")
    assert page.input_value("header.topbar select") == "two"


def test_the_model_belongs_to_the_conversation_and_another_one_answers_again(
    person: Reader,
) -> None:
    page = person.page
    person.settings({"max_tokens": 10})
    person.choose("header.topbar select", "two")
    person.ask("Hello")
    assert page.inner_text(".message.assistant .by") == "two"
    person.use("button.again-with")
    person.use(".again-models button:has-text('one')")
    person.until(
        "document.querySelector('.message.assistant .siblings')?.innerText.includes('2/2')"
    )
    page.wait_for_selector(".message.assistant .again:enabled")
    assert page.inner_text(".message.assistant .by") == "one"
    assert page.input_value("header.topbar select") == "two"
    if person.hands == "keyboard":
        page.keyboard.press("Control+Shift+O")
    else:
        person.use(f".sidebar button[title='{person.said('chat.new')}']")
    page.wait_for_selector(".welcome")
    person.choose("header.topbar select", "one")
    person.ask("Hello again")
    person.use(".conversations button.open:has-text('Hello'):not(:has-text('again'))")
    person.until("document.querySelector('header.topbar select').value === 'two'")


def test_a_model_that_failed_is_shown_with_its_reason(reader: Reader) -> None:
    page = reader.page
    reader.settings({"max_tokens": 10})
    reader.ask("Hello")
    reason = "<img src=x onerror=window.attacked=1> is no model"
    page.evaluate(
        "(reason) => import('/ui/lib/api.js').then(({server}) => { server.models = ["
        "...server.models, {id: 'three', max_model_len: null, status: 'failed', reason}];"
        " server.dispatchEvent(new Event('change')); })",
        reason,
    )
    page.click("button.again-with")
    label = ".again-models button:has-text('three')"
    page.wait_for_selector(label)
    assert reason[:30] in page.inner_text(label)
    assert page.get_attribute(label, "disabled") is not None
    page.select_option("header.topbar select", "three")
    page.wait_for_selector(".notice.bad")
    assert reason in page.inner_text(".notice.bad")
    assert not page.evaluate("window.attacked")
