"""Instructor: typed answers in each of its modes for OpenAI's API."""

from __future__ import annotations

import asyncio
from typing import Literal

import instructor
import openai
from checks import KEY, MODEL, QUESTION, TOOL_MODEL, URL, check, raises, report
from instructor.core import InstructorRetryException
from pydantic import BaseModel, Field, field_validator

DRAWN = {"model": MODEL, "messages": QUESTION, "max_tokens": 400, "seed": 1}
tried: list[int] = []


class Animal(BaseModel, extra="forbid"):
    """An animal in a story."""

    kind: Literal["fox", "owl", "hen"]
    age: int = Field(ge=1, le=9)


class Anything(BaseModel, extra="allow"):
    """Of which a schema says nothing: in this mode it is only told to the model."""


class Odd(BaseModel, extra="forbid"):
    """One whose age a schema does not say everything about."""

    age: int = Field(ge=1, le=9)

    @field_validator("age")
    @classmethod
    def _only_at_the_second_try(cls, age: int) -> int:
        tried.append(age)
        if len(tried) == 1:
            raise ValueError("say it again")
        return age


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=URL, api_key=KEY), mode=mode)


for mode in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA"):
    with check(mode):
        kind = Anything if mode == "JSON" else Animal
        asked = {**DRAWN, "response_model": kind}
        animal, answer = client(instructor.Mode[mode]).chat.completions.create_with_completion(
            **asked
        )
        assert isinstance(animal, kind)
        assert answer.usage.completion_tokens > 3

with check("from_provider"):
    provided = instructor.from_provider(f"openai/{MODEL}", base_url=URL, api_key=KEY)
    asked = {name: value for name, value in DRAWN.items() if name != "model"}
    assert isinstance(provided.chat.completions.create(response_model=Animal, **asked), Animal)

with check("partial stream"):
    pieces = [
        *client(instructor.Mode.TOOLS).chat.completions.create_partial(
            response_model=Animal, **DRAWN
        )
    ]
    assert pieces[-1].age in range(1, 10)

with check("retry with the error told"):
    asked = {**DRAWN, "model": TOOL_MODEL, "response_model": Odd, "max_retries": 2}
    assert isinstance(client(instructor.Mode.TOOLS).chat.completions.create(**asked), Odd)
    assert len(tried) == 2

with check("typed errors"):
    asked = {**DRAWN, "model": "nobody", "response_model": Animal, "max_retries": 0}
    with raises(InstructorRetryException, MODEL):
        client(instructor.Mode.TOOLS).chat.completions.create(**asked)


async def alongside() -> None:
    """The same for asyncio."""
    with check("async"):
        plain = openai.AsyncOpenAI(base_url=URL, api_key=KEY)
        found = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
        animals = await asyncio.gather(
            *[found.chat.completions.create(response_model=Animal, **DRAWN) for _ in range(4)]
        )
        assert len({(animal.kind, animal.age) for animal in animals}) == 1


asyncio.run(alongside())
report("instructor")
