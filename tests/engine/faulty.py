"""Engines that fail in their ways, for `launch_hash_llm("faulty:…")`: factories of blueprints."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NoReturn

from doubles import hash_blueprint
from infer.engine.worker import Blueprint
from infer.errors import ConfigError, LoadError


def talkative(settings: dict[str, Any]) -> Blueprint:
    logging.getLogger("infer.test").info("made %s", "over there")
    return hash_blueprint(settings)


def misconfigured(settings: dict[str, Any]) -> NoReturn:
    raise ConfigError("page_size", "must be odd")


def without_weights(settings: dict[str, Any]) -> Blueprint:
    def build() -> NoReturn:
        raise LoadError("the weights are not there")

    return dataclasses.replace(hash_blueprint(settings), build=build)


def exploding(settings: dict[str, Any]) -> NoReturn:
    raise KeyError("a mistake")


def speechless(settings: dict[str, Any]) -> Blueprint:
    blueprint = hash_blueprint(settings)
    files = dataclasses.replace(blueprint.files, tokenizer_json="{}")
    return dataclasses.replace(blueprint, files=files)
