"""Tests of the choice of an attention backend: the requested one, or the fallback and a warning."""

from __future__ import annotations

import logging

import pytest

from infer import LLM, SamplingParams
from infer.attention.cpu import NativeBackend
from infer.attention.sdpa import SDPABackend
from infer.config import EngineConfig
from infer.engine.build.assemble import assemble
from infer.errors import ConfigError
from infer.kernels import loader

needs_kernel = pytest.mark.skipif(loader.available() is not None, reason=str(loader.available()))


def backend_of(**settings: object) -> object:
    config = EngineConfig(device="cpu", **settings)  # type: ignore[arg-type]
    return assemble(config).core.runner.backend  # type: ignore[attr-defined]


@needs_kernel
def test_the_kernel_is_the_default_and_can_be_declined(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(backend_of(), NativeBackend)
        assert isinstance(backend_of(attention_backend="native"), NativeBackend)
        assert isinstance(backend_of(attention_backend="sdpa"), SDPABackend)
    said = [message for message in caplog.messages if message.startswith("attention:")]
    assert said == [
        *[f"attention: native, {loader.chosen_instruction_set()}"] * 2,
        "attention: torch's SDPA",
    ]
    assert "several times slower" not in caplog.text


def test_without_the_kernel_auto_says_what_is_lost_and_native_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(loader.ISA_VARIABLE, "avx1024")
    if loader.instruction_sets():
        assert "avx1024" in str(loader.available())
    assert isinstance(backend_of(), SDPABackend)
    # On some processors there is a second one, of rows whose bits depend on their number.
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [w for w in warnings if "several times slower" in w and str(loader.available()) in w]
    with pytest.raises(ConfigError, match=r"attention_backend: 'native' is not possible: .*auto"):
        backend_of(attention_backend="native")


@needs_kernel
def test_both_say_the_same_in_float32() -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    texts = []
    for wanted in ("native", "sdpa"):
        with LLM(dtype="float32", device="cpu", attention_backend=wanted) as llm:
            texts.append([o.token_ids for o in llm.generate(["Once", "The fox said"], params)])
    assert texts[0] == texts[1]
