"""Speculation with a draft model, on the shipped model: tokens and log-probabilities are those of
plain decoding, with a draft model that always agrees and with one that often does not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infer import LLM, EngineConfig, SamplingParams
from infer.cli.main import app
from infer.engine.build.assemble import plan_for
from infer.errors import ConfigError, LoadError
from infer.runner.sampler import sample, sampler_for
from infer.schedule.drafting import Drafter
from infer.schedule.sequence import Sequence
from infer.types import Request, RequestOutput
from infer.types.grammar import Grammar
from tests.support.draft_checkpoints import write_first_layers, write_other_vocabulary
from tests.support.lattice import OPENING, preempt_at_every_third_step

NUM_TOKENS = 32
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, log-probabilities": {"temperature": 0, "logprobs": 3},
    "drawn": {"temperature": 0.9, "top_p": 0.9, "seed": 3, "logprobs": 0},
    "top-k and min-p": {"temperature": 1.2, "top_k": 40, "min_p": 0.02, "seed": 4},
    "penalties": {
        "temperature": 0.8,
        "seed": 5,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logprobs": 1,
    },
    "bias": {"temperature": 0, "logit_bias": {263: 3.0, 376: -5.0}},
    "bad words": {"temperature": 0, "bad_words": ["there was", "fox", "the"]},
    "allowed ids": {"temperature": 0.7, "seed": 1, "allowed_token_ids": list(range(200, 700))},
    "stop string": {"temperature": 0, "stop": ["the", "and"], "min_tokens": 3},
    "ends": {"temperature": 0, "ignore_eos": False, "stop_token_ids": [263, 17], "min_tokens": 6},
    "grammar": {"temperature": 0.8, "seed": 2, "grammar": Grammar("regex", "[a-z ]{5,30}[.]")},
    "prompt log-probabilities": {"temperature": 0, "prompt_logprobs": 1},
}
PROMPTS = [OPENING + "The fox had a red ball.", "Once upon a time", OPENING * 3]
ASKED = [
    (
        PROMPTS[i % len(PROMPTS)],
        SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, **way}),
    )
    for i, way in enumerate(WAYS.values())
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return {
        "same": write_first_layers(root / "same", 6),
        "half": write_first_layers(root / "half", 4),
        "narrow": write_first_layers(root / "narrow", 6, vocab_size=1500),
        "wide": write_first_layers(root / "wide", 6, vocab_size=2100),
        "other": write_other_vocabulary(root / "other"),
    }


def config_of(folder: Path, **changes: Any) -> str:
    return json.dumps(
        {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4, **changes}
    )


def run(llm: LLM) -> list[RequestOutput]:
    prompts, each = zip(*ASKED, strict=True)
    return llm.generate(list(prompts), list(each), use_tqdm=False)


def values(outputs: list[RequestOutput], *, bits: bool) -> list[Any]:
    """What must be equal; `bits`: log-probabilities too."""
    shown = []
    for output in outputs:
        logprobs = (output.logprobs, output.prompt_logprobs) if bits else None
        shown.append((output.token_ids, output.text, output.finish_reason, logprobs))
    return shown


@pytest.fixture(scope="module", params=["auto", "float32"])
def plain(request: pytest.FixtureRequest) -> tuple[str, list[RequestOutput]]:
    with LLM(dtype=request.param, max_seq_len=512) as llm:
        return request.param, run(llm)


@pytest.fixture
def eager() -> Iterator[None]:
    """As many tokens are drafted as are allowed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "infer.schedule.speculation.draft_counts", lambda p, limits, *rest: list(limits)
        )
        patch.setattr("infer.schedule.speculation.TOKENS_TRIED", 0)
        patch.setattr("infer.schedule.speculation.CATCH_UP_SHARE", float("inf"))
        patch.setattr(Drafter, "propose", Drafter._propose)  # errors are not contained
        yield


SETTINGS: dict[str, dict[str, Any]] = {
    "continuous": {},
    "few seats, small pages": {"max_batch_size": 3, "page_size": 3},
    "small steps": {"max_num_batched_tokens": 9},
    "static, contiguous": {"batching_mode": "static", "kv_cache_backend": "contiguous"},
    "sequential, slotted": {"batching_mode": "sequential", "kv_cache_backend": "slotted"},
    "no cache": {"kv_cache_backend": "none"},
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_answers_in_fewer_steps(
    name: str, plain: tuple[str, list[RequestOutput]], folders: dict[str, Path]
) -> None:
    dtype, wanted = plain
    with LLM(
        dtype=dtype,
        max_seq_len=512,
        speculative_config=config_of(folders["half"]),
        **SETTINGS[name],
    ) as llm:
        bits = dtype == "auto" and str(llm.core.runner.caches[0].dtype) == "torch.bfloat16"  # type: ignore[attr-defined]
        assert values(run(llm), bits=bits) == values(wanted, bits=bits)
        stats = llm.stats()
        # Small steps have a part of a prompt most of the time, and then nothing is drafted.
        least = 2 if name == "small steps" else 20
        assert stats["num_accepted_tokens"] > least
        assert stats["num_draft_tokens"] > stats["num_accepted_tokens"] + least
        assert stats["num_free_pages"] == stats["num_pages"]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", ["same", "narrow", "wide"])
def test_a_draft_model_that_agrees(
    kind: str, plain: tuple[str, list[RequestOutput]], folders: dict[str, Path]
) -> None:
    """Also one whose vocabulary is padded to another number of logits."""
    dtype, wanted = plain
    config = config_of(folders[kind])
    with LLM(dtype=dtype, max_seq_len=512, speculative_config=config) as llm:
        assert values(run(llm), bits=False) == values(wanted, bits=False)
        stats = llm.stats()
        # Its drafts know no grammar, and a text ends where a stop string is.
        assert (
            stats["num_accepted_tokens"]
            > (0.9 if kind != "narrow" else 0.7) * stats["num_draft_tokens"]
        )


@pytest.mark.usefixtures("eager")
def test_preempted_at_every_third_step(
    plain: tuple[str, list[RequestOutput]], folders: dict[str, Path]
) -> None:
    dtype, wanted = plain
    with LLM(dtype=dtype, max_seq_len=512, speculative_config=config_of(folders["half"])) as llm:
        preempt_at_every_third_step(llm.core)
        assert values(run(llm), bits=False) == values(wanted, bits=False)
        assert llm.stats()["num_preemptions"] >= 4
        assert llm.stats()["num_accepted_tokens"] > 20


@pytest.mark.usefixtures("eager")
def test_aborted_in_between_and_continued_by_another_engine(
    plain: tuple[str, list[RequestOutput]], folders: dict[str, Path]
) -> None:
    dtype, wanted = plain
    with LLM(dtype=dtype, max_seq_len=512, speculative_config=config_of(folders["half"])) as llm:
        prompt, sampling = ASKED[2]
        request = llm.make_request(prompt, sampling, request_id="r")
        llm.core.add(request)
        got: list[int] = []
        while len(got) < 10:
            got += [output.token_id for output in llm.core.step() if output.token_id is not None]
        llm.core.abort("r")
        llm.core.add(dataclasses.replace(request, output_token_ids=tuple(got[:8]), num_crashes=1))
        rest = [output.token_id for output in llm.core.outputs_until_complete()]
        assert [*got[:8], *rest] == list(wanted[2].token_ids)
        assert got == list(wanted[2].token_ids)[: len(got)]


def test_it_may_be_quantised(folders: dict[str, Path]) -> None:
    with LLM(max_seq_len=256) as llm:
        wanted = run(llm)
    for quantization in ("int8", "int4"):
        config = config_of(folders["same"], quantization=quantization)
        with LLM(max_seq_len=256, speculative_config=config) as llm:
            assert values(run(llm), bits=False) == values(wanted, bits=False)


# Logits of another number.


def test_logits_that_the_draft_model_lacks_are_never_sampled() -> None:
    import torch

    sampling = SamplingParams(temperature=1.0)
    rows = [Sequence.from_request(Request(f"{i}", (1, 2), sampling, i, 9), 0) for i in range(40)]
    logits = torch.randn(40, 70, generator=torch.Generator().manual_seed(1))
    wide = [each.token_id for each in sampler_for(90)(logits.clone(), rows, {})]
    assert wide == [each.token_id for each in sample(logits.clone(), rows)]
    narrow = [each.token_id for each in sampler_for(20)(logits.clone(), rows, {})]
    assert narrow == [each.token_id for each in sample(logits[:, :20].clone(), rows)]
    assert max(narrow) < 20 <= max(wide)


# What is refused, and the plan.


def test_another_vocabulary_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"another vocabulary: id 100 is '.+' here and '.+' there,"
        r" 200 is '.+' here and '.+' there; give a model of the same tokenizer",
    ):
        LLM(speculative_config=config_of(folders["other"]))


def test_a_draft_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="nothing"):
        LLM(speculative_config=config_of(tmp_path / "nothing"))


def test_the_plan_counts_the_draft_model(folders: dict[str, Path]) -> None:
    free = 1 << 30
    without = plan_for(EngineConfig(max_seq_len=512), free=free)
    config = EngineConfig(max_seq_len=512, speculative_config=config_of(folders["half"]))
    plan = plan_for(config, free=free)
    draft = plan.draft
    assert draft is not None
    assert without.draft is None
    assert draft.num_parameters < plan.num_parameters
    assert draft.kv_bytes_per_token * 6 == plan.kv_bytes_per_token * 4
    assert draft.num_pages * draft.page_size == plan.num_cached_tokens
    assert plan.fits
    table = dict(plan.rows())
    assert table["draft model"].startswith("half, ")
    tight = plan_for(config, free=plan.weight_bytes + plan.activation_bytes + (16 << 20))
    assert tight.fits
    used = tight.weight_bytes + tight.activation_bytes + tight.kv_bytes + tight.draft_bytes
    assert used <= tight.free_bytes
    given = EngineConfig(
        max_seq_len=512,
        kv_cache_memory_bytes=8 << 20,
        speculative_config=config_of(folders["half"]),
    )
    least = plan_for(given, free=free)
    need = least.weight_bytes + least.activation_bytes + least.kv_bytes + least.draft_bytes
    assert plan_for(given, free=need).fits
    assert not plan_for(given, free=need - 1).fits


def test_infer_plan_shows_the_draft_model(folders: dict[str, Path]) -> None:
    found = CliRunner().invoke(app, ["plan", "--speculative-config", config_of(folders["half"])])
    assert found.exit_code == 0
    assert "draft model" in found.stdout
