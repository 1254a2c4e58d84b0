"""A checkpoint's own sampling settings: what is read, what is named because it cannot be used, and
how defaults and what a caller gives make one sampling."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from infer.errors import LoadError, UnprocessableError
from infer.text.checkpoint_text import read_defaults
from infer.text.generation_config import defaults_of, defaults_of_gguf
from infer.types.sampling import DEFAULTED, Sampling, SamplingParams
from infer.types.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from tests.support.cases import over

FILE = "generation_config.json"


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "transformers_version": "5.0", "_from_model_config": True}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0},
        ),
        (
            {"temperature": 1, "top_k": 50.0, "max_new_tokens": 64.0},
            {"temperature": 1, "top_k": 50, "max_tokens": 64},
        ),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.9}, {"temperature": 0.0}),
        ({"temperature": None, "top_k": None, "do_sample": None}, {}),
        ({"repetition_penalty": 1.05, "presence_penalty": 1.5, "frequency_penalty": 0.1},) * 2,
        ({"min_new_tokens": 4, "stop_strings": ["</s>", ""]}, {"min_tokens": 4, "stop": ("</s>",)}),
        ({"stop_strings": "###"}, {"stop": ("###",)}),
        ({"top_p": 0, "top_k": -1, "max_new_tokens": -1}, {"top_p": 0, "top_k": -1}),
    ],
)
def test_what_is_read(config: dict[str, Any], values: dict[str, Any]) -> None:
    found = defaults_of(config)
    assert found.values == values
    assert found.notes == ()
    assert found.source == (FILE if values else "")
    for name, value in values.items():  # 8 and 8.0 are the same number, but not the same field
        assert type(found.values[name]) is type(value)


@over(
    "name",
    [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "max_new_tokens",
        "min_new_tokens",
    ],
)
@over("value", ["0.7", True, [1], {}, -99, 1e300, 2**70, float("nan"), float("inf"), "x" * 10**6])
def test_a_value_that_cannot_be_used_is_named_and_left_out(name: str, value: Any) -> None:
    found = defaults_of({"top_k": 7, name: value} if name != "top_k" else {name: value})
    assert found.values == ({"top_k": 7} if name != "top_k" else {})
    (note,) = found.notes
    assert note.startswith(f"{FILE}: {name} is not used")
    assert len(note) < 400
    assert "\n" not in note


def test_settings_without_an_implementation_are_named() -> None:
    config = {"typical_p": 0.9, "no_repeat_ngram_size": 3, "top_n_sigma": 1.0, "num_beams": 4}
    (note,) = defaults_of(config).notes
    assert all(name in note for name in config)
    neutral = {"typical_p": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0, "length_penalty": 1.0,
               "bad_words_ids": None, "early_stopping": False, "max_length": 20, "use_cache": True,
               "output_scores": True, "encoder_repetition_penalty": 1.0}  # fmt: skip
    assert defaults_of(neutral).notes == ()
    (note,) = defaults_of({f"x{i}" * 99: [0] * 10**5 for i in range(1000)}).notes
    assert len(note) < 2000
    (note,) = defaults_of({"do_sample": "no"}).notes
    assert "do_sample must be true or false" in note


def test_what_a_gguf_file_says() -> None:
    single = 0.800000011920929  # 0.8 in 32 bits
    keys = {"temp": single, "top_k": 40, "top_p": 0.949999988079071, "min_p": 0.05,
            "penalty_repeat": 1.1, "penalty_last_n": -1, "mirostat": 0}  # fmt: skip
    found = defaults_of_gguf(
        {f"general.sampling.{name}": value for name, value in keys.items()} | {"general.name": "x"}
    )
    values = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert found.values == values | {"repetition_penalty": 1.1}
    assert found.notes == ()
    assert "GGUF" in found.source
    assert defaults_of_gguf({"general.sampling.temp": -1.0}).values == {"temperature": 0.0}
    assert defaults_of_gguf({"general.name": "x"}) == NO_DEFAULTS
    odd = {"xtc_probability": 0.5, "top_k": "many", "penalty_repeat": 1.1, "penalty_last_n": 64}
    found = defaults_of_gguf({f"general.sampling.{name}": it for name, it in odd.items()})
    assert found.values == {"repetition_penalty": 1.1}
    assert ["top_k" in found.notes[0], *(w in found.notes[1] for w in ("xtc_", "last_n"))] == [
        True
    ] * 3
    off = {"general.sampling.penalty_repeat": 1.1, "general.sampling.penalty_last_n": 0}
    assert defaults_of_gguf(off) == NO_DEFAULTS  # a penalty that looks at no tokens


def test_the_file_of_a_folder(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == NO_DEFAULTS
    with pytest.raises(LoadError, match="there is no"):
        read_defaults(tmp_path, must_exist=True)
    (tmp_path / FILE).write_bytes(b"\xef\xbb\xbf" + json.dumps({"top_k": 1}).encode())
    assert read_defaults(tmp_path, "it") == SamplingDefaults(source="it", top_k=1)
    for wrong in (b"{", b"[]", b'"x"', b"\xff", b'{"a":' * 10**5):
        (tmp_path / FILE).write_bytes(wrong)
        with pytest.raises(LoadError) as raised:
            read_defaults(tmp_path)
        assert FILE in str(raised.value)
        assert "\n" not in str(raised.value)


def test_what_is_given_wins_over_each_default() -> None:
    theirs: dict[str, Any] = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 2.0,
        "presence_penalty": 1.0, "frequency_penalty": 1.0, "max_tokens": 50, "min_tokens": 7,
        "stop": ("a",),
    }  # fmt: skip
    assert theirs.keys() == DEFAULTED
    fixed = {name: getattr(SamplingParams(), name) for name in DEFAULTED}
    defaults = SamplingDefaults(source="x", **theirs)
    filled = defaults.fill(SamplingParams(seed=5))
    assert {name: getattr(filled, name) for name in DEFAULTED} == theirs
    assert filled.seed == 5
    for name, value in fixed.items():
        given = SamplingParams(**{name: value})  # even the fixed default, if it is given
        assert given.given == {name}
        found = defaults.fill(given)
        assert getattr(found, name) == value
        others = {other for other in theirs if getattr(found, other) == theirs[other]} | {name}
        assert others == DEFAULTED
    assert defaults.fill(SamplingParams(**fixed)) == SamplingParams(**fixed)


def test_limits_of_the_length_make_room_for_each_other() -> None:
    defaults = SamplingDefaults(max_tokens=30, min_tokens=20)
    assert defaults.fill(SamplingParams(max_tokens=5)).min_tokens == 5
    assert defaults.fill(SamplingParams(min_tokens=40)).max_tokens == 40
    assert defaults.fill(SamplingParams(max_tokens=None)).min_tokens == 20
    assert SamplingDefaults(min_tokens=20).fill(SamplingParams()).max_tokens == 20
    assert SamplingDefaults(max_tokens=5).fill(SamplingParams()).max_tokens == 5
    with pytest.raises(UnprocessableError, match="must not exceed"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_a_default_of_no_mass_is_greedy_whatever_temperature_is_given() -> None:
    greedy = SamplingDefaults(top_p=0.0).fill(SamplingParams(temperature=1.5))
    assert (greedy.temperature, greedy.top_p) == (0.0, 1.0)
    given = SamplingDefaults(temperature=0.7).fill(SamplingParams(top_p=0))
    assert given.temperature == 0.0


def test_what_is_given_is_remembered_by_copies() -> None:
    params = SamplingParams(temperature=0.5, seed=1, stop="x")
    for other in (copy.copy(params), copy.deepcopy(params), params.replace(seed=1)):
        assert other == params
        assert other.given == {"temperature", "stop"}
    assert params.replace(top_k=0).given == {"temperature", "stop", "top_k"}


@pytest.mark.parametrize("wrong", [{"top_p": 0.0}, {"temperature": 0.001}])
def test_what_is_kept_has_one_form_for_greedy(wrong: dict[str, Any]) -> None:
    with pytest.raises(UnprocessableError):
        Sampling(**wrong)
    assert SamplingParams(**wrong) == SamplingParams(temperature=0.0)


def test_a_vocabulary_is_not_read_for_defaults() -> None:
    class Lazy(dict[str, object]):
        """Metadata whose other values are large."""

        def __getitem__(self, key: str) -> object:
            assert key.startswith("general.sampling."), f"{key} is read"
            return super().__getitem__(key)

        def items(self) -> Any:
            return [(key, self[key]) for key in self]

    found = Lazy({"tokenizer.ggml.tokens": ["a"], "general.sampling.temp": 0.5})
    assert defaults_of_gguf(found).values == {"temperature": 0.5}
