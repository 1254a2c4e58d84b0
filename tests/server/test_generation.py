"""The pipeline of requests that generate: an endpoint is one class and one row, and no `await`
that anybody adds to the pipeline costs a request its place or counts it twice."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from infer.engine.client.async_llm import AsyncLLM
from infer.server import generation
from infer.server.openai.answer_parts import TokenUsage, wire_reason
from infer.server.openai.events import NOTHING_YET, dump, event
from infer.server.openai.generating_api import Keeps, OnMessage, Part
from infer.server.openai.schema import GeneratingBody
from infer.server.openai.to_engine import in_callers_names, requests_of
from infer.server.route_table import GENERATING
from infer.text.untrusted.workers import Steps
from infer.types import Request, RequestOutput, SamplingParams, TextDelta
from tests.support.doubles import make_hash_llm
from tests.support.serving import BODIES, COMPLETIONS, App, Reply, check_refused, with_app

# ---- an endpoint of our own: one class (with its body and its answer) and one row


class AnswersBody(GeneratingBody):
    """`POST /v1/answers`."""

    input: str
    max_output_tokens: int = 8


class AnswersAnswer:
    """An answer in the shape of OpenAI's responses."""

    merges = True
    warning = "experimental"

    def __init__(self, wire: AnswersBody, requests: Sequence[Request], answer_id: str) -> None:
        self._id = answer_id
        self._usage = TokenUsage(requests)
        self._text = ""

    @property
    def num_prompt(self) -> int:
        return self._usage.num_prompt

    def size_of(self, part: Part) -> int:
        return len(part.text)

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        self._usage.count(0, output)
        status = "incomplete" if wire_reason(output.finish_reason) == "length" else "completed"
        text, usage = output.text, self._usage.fields()
        return {"id": self._id, "status": status, "output_text": text, "usage": usage}

    def events(self) -> AnswersAnswer:
        return self

    def opening(self) -> Iterator[bytes]:
        yield event(dump({"id": self._id}), "response.created")

    def waiting(self) -> bytes:
        return NOTHING_YET

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        self._usage.count(index, delta)
        self._text += delta.text
        yield event(dump({"delta": delta.text}), "response.output_text.delta")

    def closing(self) -> Iterator[bytes]:
        done = {"output_text": self._text, "usage": self._usage.fields()}
        yield event(dump(done), "response.completed")

    def failure(self, error: str) -> Iterator[bytes]:
        yield event(error, "error")


class AnswersApi:
    """Answers, as far as this test goes."""

    path = "/v1/answers"
    body = AnswersBody
    id_prefix = "ans-"
    refuses = ()
    keeps: Keeps = "nothing"

    def make_requests(
        self, engine: AsyncLLM, wire: AnswersBody, answer_id: str
    ) -> Steps[list[Request]]:
        with in_callers_names({"max_tokens": "max_output_tokens", "prompt": "input"}):
            sampling = SamplingParams(temperature=0, max_tokens=wire.max_output_tokens)
            checked = yield from engine.check_sampling(sampling)
            return list(requests_of(engine, [wire.input], checked, answer_id))

    def make_answer(
        self,
        engine: AsyncLLM,
        wire: AnswersBody,
        requests: Sequence[Request],
        answer_id: str,
        on_message: OnMessage | None = None,
    ) -> AnswersAnswer:
        return AnswersAnswer(wire, requests, answer_id)


ROWS = (*GENERATING, AnswersApi())


def typed_events(reply: Reply) -> list[tuple[str, Any]]:
    """Name and data of each event of a stream."""
    found = []
    for text in reply.body.decode("ascii").split("\n\n")[:-1]:
        name, data = text.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_an_endpoint_is_one_class_and_one_row() -> None:
    async def use(app: App) -> None:
        path, body = AnswersApi.path, {"input": "Hello", "max_output_tokens": 5}
        whole = await app.post(path, body)
        said = whole.json()
        assert (whole.status, said["status"]) == (200, "incomplete")
        assert (said["usage"]["prompt_tokens"], said["usage"]["completion_tokens"]) == (6, 5)
        assert whole.headers["x-warning"] == "experimental"

        stream = await app.post(path, {**body, "stream": True})
        (first, head), *deltas, (last, done) = typed_events(stream)
        assert (first, last) == ("response.created", "response.completed")
        assert {name for name, _ in deltas} == {"response.output_text.delta"}
        assert "".join(data["delta"] for _, data in deltas) == said["output_text"]
        assert done["output_text"] == said["output_text"]
        for usage in (done["usage"], said["usage"]):
            del usage["prompt_tokens_details"]  # the second one finds the prompt in the cache
        assert done["usage"] == said["usage"]

        # It is refused, traced and described as the others are.
        check_refused(await app.post(path, {}), 400, "input", "missing_required_parameter", "input")
        ignoring = await app.post(path, {**body, "n": 2})
        assert (ignoring.status, ignoring.headers["x-ignored-params"]) == (200, "n")
        wrong = await app.post(path, {**body, "max_output_tokens": -5})
        check_refused(wrong, 422, "max_output_tokens", None, "max_output_tokens must be")
        wrong = await app.post(path, {**body, "model": "other"})
        check_refused(wrong, 404, "model", "model_not_found", "hash-model")
        trace = (await app.get(f"/v1/requests/{head['id']}")).json()
        assert (trace["path"], trace["outcome"]) == (path, "length")
        page = (await app.get("/openapi.json")).json()
        operation = page["paths"][path]["post"]
        assert operation["summary"] == "Answers, as far as this test goes."
        assert {"200", "404", "422", "429", "499", "503", "504"} <= operation["responses"].keys()
        assert path in (await app.get("/")).body.decode()
        assert path in app.app.state.generating_paths

    async def without(app: App) -> None:
        assert (await app.post(AnswersApi.path, {"input": "Hello"})).status == 404

    with_app(make_hash_llm(), use, generating=ROWS)
    with_app(make_hash_llm(), without)


# ---- no await costs a place

SOURCE = inspect.getsource(generation)
STAGES = ("respond", "_admit", "_begin", "_own", "_enter")
"""What runs from the moment when places are held until the streams run."""
AWAIT = ast.Expr(ast.Await(ast.parse("asyncio.sleep(0.001)", mode="eval").body))
NUM_CHOICES = 2

RIGHT = (200, {(NUM_CHOICES,) * 3})
Count = tuple[int, int, int]
"""Choices: with a place in the engine, counted for their key, counted for all keys."""


def with_awaits() -> Iterator[tuple[str, ast.Module]]:
    """The module with an `await` at each place of each stage, one at a time."""
    for stage in STAGES:
        for number in range(1000):
            tree = ast.parse(SOURCE)
            blocks = [
                block
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == stage
                for each in ast.walk(node)
                if isinstance(block := getattr(each, "body", None), list)
            ]
            places = [(block, i) for block in blocks for i in range(len(block) + 1)]
            if number == len(places):
                break
            block, place = places[number]
            block.insert(place, AWAIT)
            yield f"{stage} {number}", ast.fix_missing_locations(tree)


async def counted(app: App, stream: bool) -> tuple[int, set[Count]]:
    """A request's status, and what is counted at each turn of the loop, from the first count of its
    choices until they have run for some turns."""
    engine, traces = app.engine, app.app.state.traces
    await app.post(COMPLETIONS, BODIES[COMPLETIONS](max_tokens=1))
    [trace] = traces.all(None)
    tenant, loop = trace.context.tenant, asyncio.get_running_loop()
    found: set[Count] = set()
    num_turns = 0

    def look() -> None:
        nonlocal num_turns
        count = (
            engine.num_open + engine.num_reserved,
            tenant.num_generating + traces.num_choices,
            engine.num_reserved + traces.num_choices,
        )
        if any(count) or found:
            found.add(count)
        num_turns += engine.num_open == NUM_CHOICES
        if num_turns < 5 and not asking.done():
            loop.call_soon(look)

    body = BODIES[COMPLETIONS](n=NUM_CHOICES, max_tokens=2, stream=stream, ignore_eos=True)
    asking = asyncio.ensure_future(app.post(COMPLETIONS, body))
    loop.call_soon(look)
    return (await asking).status, found


def counts_of(code: Any, stream: bool, patch: pytest.MonkeyPatch) -> tuple[int, set[Count]]:
    """`counted`, with the pipeline that `code` defines."""
    names: dict[str, Any] = {"__name__": generation.__name__}
    exec(code, names)
    patch.setattr(generation, "GenerationCall", names["GenerationCall"])
    engine = make_hash_llm(step_s=0.02, max_batch_size=NUM_CHOICES, max_waiting_requests=0)
    return with_app(engine, lambda app: counted(app, stream))


def test_no_await_costs_a_place_or_counts_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counts_of(compile(SOURCE, "as it is", "exec"), False, monkeypatch) == RIGHT
    num_run = 0
    for name, tree in with_awaits():
        try:
            code = compile(tree, name, "exec")
        except SyntaxError:  # the hand-over is no coroutine
            assert not name.startswith("respond"), name
            continue
        assert name.startswith("respond"), name
        num_run += 1
        assert counts_of(code, num_run % 2 == 0, monkeypatch) == RIGHT, name
    assert num_run > 8


BEGIN = (("def _begin(", "async def _begin("), ("= self._begin(", "= await self._begin("))
NAP = "        await asyncio.sleep(0)\n"
ACQUIRE = "async with self._tenant.acquire("
BREAKS: dict[str, tuple[int, tuple[tuple[str, str], ...]]] = {
    "handed over behind the block": (  # to which a reservation that is over gives no place
        500,
        (
            (" " * 12 + ACQUIRE, " " * 8 + ACQUIRE),
            (" " * 16 + "running = self._begin(", " " * 12 + "running = self._begin("),
        ),
    ),
    "an await before the trace's hand-over ends": (
        200,
        (*BEGIN, ("        places.waiting.close()", f"{NAP}        places.waiting.close()")),
    ),
    "an await between trace and streams": (
        200,
        (*BEGIN, ("        return self._enter(", f"{NAP}        return self._enter(")),
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_hand_over_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, changes = BREAKS[name]
    source = SOURCE
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    status, found = counts_of(compile(source, name, "exec"), False, monkeypatch)
    assert status == expected
    assert (status, found) != RIGHT
