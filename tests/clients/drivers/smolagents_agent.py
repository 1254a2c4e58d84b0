"""smolagents: models, agents that call tools, and loops."""

from __future__ import annotations

from checks import (
    CITIES,
    KEY,
    LOOP_ANSWER,
    LOOPS,
    MODEL,
    URL,
    check,
    loop_models,
    loops_name,
    raises,
    report,
)
from openai import AuthenticationError, BadRequestError
from smolagents import OpenAIModel, Tool, ToolCallingAgent
from smolagents.monitoring import LogLevel

ASKED = [{"role": "user", "content": [{"type": "text", "text": "Tell me a story about a fox."}]}]


def model(name: str = MODEL, url: str = URL, key: str = KEY, **settings: object) -> OpenAIModel:
    """With an answer of 16 greedy tokens, if nothing else is said."""
    settings = {"temperature": 0, "max_tokens": 16, **settings}
    return OpenAIModel(name, api_base=url, api_key=key, **settings)


class Weather(Tool):
    """Its calls are kept."""

    name = "weather"
    description = "How the weather is."
    inputs = {"city": {"type": "string", "description": "A city."}}  # noqa: RUF012
    output_type = "string"

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def forward(self, city: str) -> str:
        self.asked.append(city)
        return f"{city} is sunny"


def main() -> None:
    with check("chat"):
        first = model().generate(ASKED)
        assert first.role == "assistant"
        assert first.content
        assert first.token_usage.output_tokens == 16

    with check("chat stream"):
        pieces = list(model().generate_stream(ASKED))
        assert "".join(piece.content or "" for piece in pieces) == first.content

    with check("stop"):
        word = first.content.split()[2]
        cut = model().generate(ASKED, stop_sequences=[word]).content
        assert word not in cut

    with check("forced call"):
        made = model(max_tokens=80).generate(ASKED, tools_to_call_from=[Weather()])
        [call] = made.tool_calls
        assert call.function.name == "weather"

    with check("structured output"):
        schema = {"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"]}
        named = {"name": "animal", "schema": {**schema, "additionalProperties": False}}
        form = {"type": "json_schema", "json_schema": named}
        found = model(max_tokens=60).generate(ASKED, response_format=form)
        assert found.content.startswith("{")

    for streams in (False, True):
        with check(loops_name(streams)):
            for name in loop_models():
                tool = Weather()
                # Forced calls are the grammar's; here the model calls in its own format.
                own = model(name, LOOPS, "none", tool_choice="auto", max_tokens=400)
                agent = ToolCallingAgent(
                    [tool], own, stream_outputs=streams, verbosity_level=LogLevel.OFF, max_steps=6
                )
                answer = agent.run("Weather?")
                assert (tool.asked, answer) == (CITIES, LOOP_ANSWER), (name, tool.asked, answer)

    with check("typed errors"):
        with raises(BadRequestError, "maximum context length"):
            model().generate([{"role": "user", "content": "A fox. " * 3000}])
        with raises(AuthenticationError):
            model(key="wrong").generate(ASKED)
    report("smolagents")


main()
