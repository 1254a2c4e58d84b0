"""Speculation with a draft model, on the shipped model: tokens and log-probabilities are those of
plain decoding, with a draft model that always agrees and with one that often does not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infer import LLM, EngineConfig, SamplingParams
from infer.cli.main import app
from infer.engine.build.planner import plan_for
from infer.errors import ConfigError, LoadError
from infer.kernels.native import quantization_obstacle
from infer.runner.sampler import sample, sampler_for
from infer.schedule.drafting import Drafter
from infer.schedule.sequence import Sequence
from infer.types import Request, RequestOutput
from tests.support.cases import slow_but
from tests.support.command_line import CliRunner
from tests.support.draft_checkpoints import write_first_layers, write_other_vocabulary
from tests.support.eager_drafts import draft_eagerly
from tests.support.isas import EXACT_DTYPE
from tests.support.lattice import OPENING, preempt_at_every_third_step
from tests.support.speculated import SETTINGS, WAYS, answers, requests_of, values

pytestmark = pytest.mark.usefixtures("kept_verdicts")

PROMPTS = [OPENING + "The fox had a red ball.", "Once upon a time", OPENING * 3]
ASKED = requests_of(PROMPTS, [way for name, way in WAYS.items() if name != "few tokens"])


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
    return answers(llm, ASKED)


@pytest.fixture(
    scope="module", params=slow_but([EXACT_DTYPE], dict.fromkeys((EXACT_DTYPE, "float32")))
)
def plain(request: pytest.FixtureRequest) -> tuple[str, list[RequestOutput]]:
    with LLM(dtype=request.param, max_seq_len=512) as llm:
        return request.param, run(llm)


@pytest.fixture
def eager() -> Iterator[None]:
    """As many tokens are drafted as are allowed."""
    with pytest.MonkeyPatch.context() as patch:
        draft_eagerly(patch)
        patch.setattr(Drafter, "propose", Drafter._propose)  # errors are not contained
        yield


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "name", slow_but(("continuous", "few seats, small pages", "small steps"), SETTINGS)
)
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


def test_it_may_be_quantised(
    plain: tuple[str, list[RequestOutput]], folders: dict[str, Path]
) -> None:
    dtype, wanted = plain
    for quantization in ("int8", "int4"):
        if quantization_obstacle(quantization):
            continue
        config = config_of(folders["same"], quantization=quantization)
        with LLM(dtype=dtype, max_seq_len=256, speculative_config=config) as llm:
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
    model_bytes = plan.weight_bytes + plan.activation_bytes + plan.process_bytes
    tight = plan_for(config, free=model_bytes + (16 << 20))
    assert tight.fits
    assert tight.total_bytes <= tight.free_bytes
    given = EngineConfig(
        max_seq_len=512,
        kv_cache_memory_bytes=8 << 20,
        speculative_config=config_of(folders["half"]),
    )
    need = plan_for(given, free=free).total_bytes
    assert plan_for(given, free=need).fits
    assert not plan_for(given, free=need - 1).fits


def test_infer_plan_shows_the_draft_model(folders: dict[str, Path]) -> None:
    found = CliRunner().invoke(app, ["plan", "--speculative-config", config_of(folders["half"])])
    assert found.exit_code == 0
    assert "draft model" in found.stdout
