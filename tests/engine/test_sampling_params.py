"""`SamplingParams`, as a caller gives it, and `Sampling`, the one form in which it is kept."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, asdict, fields, replace
from typing import Any

import msgspec
import pytest

from infer import Grammar, SamplingParams
from infer.errors import RequestError
from infer.types import Sampling
from infer.types.sampling import DEFAULTED, UNSET


def test_each_field_is_an_argument_with_the_same_default_or_left_to_the_checkpoint() -> None:
    arguments = inspect.signature(SamplingParams).parameters
    defaults = {field.name: field.default for field in fields(Sampling)}
    assert MISSING not in defaults.values()
    found = {name: each.default for name, each in arguments.items()}
    assert {name for name, value in found.items() if value is UNSET} == DEFAULTED
    assert {name: defaults[name] if it is UNSET else it for name, it in found.items()} == defaults
    assert SamplingParams().given == frozenset()
    assert asdict(SamplingParams()) == asdict(Sampling())
    assert all(each.kind is each.KEYWORD_ONLY for each in arguments.values())


def test_each_argument_reaches_its_field() -> None:
    given: dict[str, Any] = {}
    for number, field in enumerate(fields(Sampling), 1):
        kind = field.type
        if kind == "bool":
            given[field.name] = not field.default
        elif kind in ("float", "int", "int | None"):
            given[field.name] = number / 100 if kind == "float" else number
    given |= {"logit_bias": ((1, 2.0),), "stop": ("a",), "stop_token_ids": (3,)}
    given |= {"grammar": Grammar.regex("a"), "allowed_token_ids": (4,), "bad_words": ("b",)}
    given |= {"min_tokens": 1, "prediction": "c"}
    assert given.keys() == {field.name for field in fields(Sampling)} - {"given"}
    assert SamplingParams(**given).given == DEFAULTED
    given["given"] = DEFAULTED
    assert asdict(SamplingParams(**given)) == asdict(Sampling(**given))
    assert asdict(Sampling(**given)) == {**given, "grammar": asdict(given["grammar"])}


def test_a_copy_made_by_the_standard_library_has_everything_given() -> None:
    params = replace(SamplingParams(top_k=3), temperature=0.5)
    assert (params.top_k, params.temperature, params.given) == (3, 0.5, DEFAULTED)
    assert SamplingParams(given=frozenset({"top_p"})).given == {"top_p"}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"stop": "end"}, ("end",)),
        ({"stop": (each for each in ("a", "b"))}, ("a", "b")),
        ({"stop_token_ids": iter([3, 1])}, (3, 1)),
        ({"allowed_token_ids": {7}}, (7,)),
        ({"bad_words": ["x"]}, ("x",)),
        ({"logit_bias": {5: 1, 2: -3.5}}, ((2, -3.5), (5, 1.0))),
        ({"logit_bias": [(9, 1), (1, 1)]}, ((1, 1.0), (9, 1.0))),
        ({"grammar": {"kind": "regex", "text": "a"}}, Grammar.regex("a")),
    ],
)
def test_what_is_given_is_kept_in_one_form(given: dict[str, Any], kept: object) -> None:
    (name,) = given
    params = SamplingParams(**given)
    assert getattr(params, name) == kept
    assert getattr(params.replace(temperature=0.5), name) == kept


def test_what_is_kept_crosses_a_boundary_and_is_frozen() -> None:
    params = SamplingParams(stop="a", logit_bias={3: 1.5}, grammar=Grammar.regex("b"))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=Sampling)
    assert asdict(again) == asdict(params)
    for record in (params, again):
        with pytest.raises(AttributeError):
            record.temperature = 0.0  # type: ignore[misc]


@pytest.mark.parametrize("value", [{"temperature": 3}, {"top_k": "1"}, {"ignore_eos": 1}])
def test_both_check_numbers(value: dict[str, Any]) -> None:
    for kind in (Sampling, SamplingParams):
        with pytest.raises(RequestError):
            kind(**value)
