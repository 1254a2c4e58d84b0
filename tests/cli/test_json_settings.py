"""A setting whose text is JSON may also be given as the mapping that the JSON is."""

from __future__ import annotations

import dataclasses
import json
import re
from types import MappingProxyType
from typing import Any

import pytest

from infer.cluster.cluster_settings import AllSettings, ClusterSettings
from infer.config import EngineConfig, settings_of
from infer.errors import ConfigError
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import KeyLimits


@pytest.mark.parametrize(
    "text",
    [
        '{"method": "ngram"}',
        ' {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}',
        '{"method": "draft_model", "model": "m", "quantization": null}',
    ],
)
def test_a_setting_whose_text_is_json_may_be_a_mapping(text: str) -> None:
    found = EngineConfig(speculative_config=text).speculative
    given = json.loads(text)
    assert EngineConfig(speculative_config=given).speculative == found
    from_kwargs = EngineConfig.from_kwargs(speculative_config=MappingProxyType(given))
    assert from_kwargs.speculative == found
    assert EngineConfig(**dataclasses.asdict(from_kwargs)).speculative == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "missing required field `method`"),
        ({"method": "draft"}, r"Invalid enum value 'draft' - at `\$.method`"),
        ({"method": "ngram", "num_speculative_tokens": "8"}, "Expected `int`, got `str`"),
        ({"method": "ngram", "lookup": 5}, "unknown field `lookup`"),
        ({1: 2}, "must be a JSON object, as text or as a mapping, not {1: 2}"),
        (["ngram"], "must be a JSON object, as text or as a mapping, not"),
        (5, "must be a JSON object, as text or as a mapping, not 5"),
    ],
)
def test_a_mapping_that_is_not_possible_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(speculative_config=given)


def test_every_setting_with_json_takes_a_mapping() -> None:
    """A setting whose words promise JSON is of the type that takes both."""
    kinds = (EngineConfig, ServerSettings, ClusterSettings, KeyLimits)
    settings = [setting for kind in kinds for setting in settings_of(kind)]
    said = {each.name for each in settings if re.search(r"JSON (object|such)|: JSON", each.help)}
    assert said == {each.name for each in settings if each.takes_mapping} == {"speculative_config"}
    cluster = AllSettings.of({"insecure": True, "speculative_config": {"method": "ngram"}})
    assert (
        cluster.engine.speculative
        == EngineConfig(speculative_config={"method": "ngram"}).speculative
    )
    assert AllSettings.from_plain(cluster.to_plain()) == cluster
