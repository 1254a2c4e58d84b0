"""One step ahead on CPUs: every request has the tokens that it has without, in every mode."""

from __future__ import annotations

from typing import Any

import pytest

from infer import LLM, RequestOutput, SamplingParams
from infer.kernels.loader import available
from infer.types.grammar import Grammar
from tests.support.ahead import AlwaysAhead, FailsInFlight, work_ahead
from tests.support.cases import slow_but
from tests.support.lattice import NUM_TOKENS, PROMPTS, params, preempt_at_every_third_step

pytestmark = pytest.mark.usefixtures("kept_verdicts")

NATIVE = pytest.mark.skipif(available() is not None, reason=str(available()))
"""Without the kernels a row's bits in bfloat16 may depend on the others."""
DTYPES = ["float32", pytest.param("bfloat16", marks=NATIVE)]
"""In the first layers are computed one by one, in the second by one call."""


def engine(**settings: Any) -> LLM:
    return LLM(**{"max_seq_len": 512, "max_batch_size": 4, **settings})


def some_params(i: int) -> SamplingParams:
    """Also some with top-k, which torch draws."""
    return params(i).replace(top_k=7) if i % 4 == 2 else params(i)


def special_params(i: int) -> SamplingParams:
    """Rows that are waited for, between others."""
    match i % 4:
        case 0:
            return params(i).replace(logprobs=2)
        case 1:
            return params(i).replace(repetition_penalty=1.2)
        case 2:
            return params(i).replace(min_tokens=3, ignore_eos=False)
        case _:
            return params(i).replace(grammar=Grammar("regex", "[a-z ]{5,9}"))


def run(llm: LLM, params_of: Any = some_params) -> list[RequestOutput]:
    each = [params_of(i) for i in range(len(PROMPTS))]
    return llm.generate(PROMPTS, each, use_tqdm=False)


def facts(outputs: list[RequestOutput]) -> list[Any]:
    return [(each.token_ids, each.finish_reason, each.logprobs) for each in outputs]


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def wanted(dtype: str) -> dict[Any, Any]:
    found = {}
    for params_of in (some_params, special_params):
        with engine(dtype=dtype) as llm:
            found[params_of] = facts(run(llm, params_of))
    return found


VARIANTS: dict[str, dict[str, Any]] = {
    "continuous": {},
    "static": {"batching_mode": "static"},
    "sequential": {"batching_mode": "sequential"},
    "chunks of 1": {"max_num_batched_tokens": 1},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "page size 5": {"page_size": 5},
    "slotted": {"kv_cache_backend": "slotted"},
    "no prefix cache": {"enable_prefix_caching": False, "max_batch_size": 8},
    "short of pages": {"max_seq_len": 104, "page_size": 4, "max_batch_size": 8},
}


@pytest.mark.parametrize(
    "name", slow_but(("continuous", "static", "chunks of 1", "short of pages"), VARIANTS)
)
def test_the_same_tokens(
    name: str, dtype: str, wanted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = VARIANTS[name]
    if name == "short of pages":
        settings = {
            **settings,
            "kv_cache_memory_bytes": (6144 if dtype == "float32" else 3072) * 116,
        }
    with engine(dtype=dtype, **settings) as llm:
        runner = work_ahead(llm)
        assert facts(run(llm)) == wanted[some_params]
        assert runner.num_ahead > NUM_TOKENS // 2
        if name == "short of pages":
            assert llm.stats()["num_preemptions"] > 0
        assert llm.stats()["num_free_pages"] == llm.stats()["num_pages"]
    assert "it is repeated" not in caplog.text  # a step that fails would hide behind its repetition


def test_steps_of_kernels_alone(dtype: str) -> None:
    with engine(dtype=dtype) as llm:
        wanted = facts(run(llm, params))
        runner = work_ahead(llm)
        assert facts(run(llm, params)) == wanted
        assert (runner.num_called > NUM_TOKENS // 2) == (dtype == "bfloat16")


def test_preempted_at_every_third_step(dtype: str, wanted: Any) -> None:
    with engine(dtype=dtype, page_size=4) as llm:
        runner = work_ahead(llm)
        preempt_at_every_third_step(llm.core)
        assert facts(run(llm)) == wanted[some_params]
        assert runner.num_ahead > NUM_TOKENS // 2
        assert llm.stats()["num_preemptions"] > 8


def test_rows_that_cannot_be_ahead_are_waited_for(dtype: str, wanted: Any) -> None:
    with engine(dtype=dtype) as llm:
        work_ahead(llm)
        assert facts(run(llm, special_params)) == wanted[special_params]

        class Stubborn(AlwaysAhead):
            def goes_ahead(self, running: Any) -> bool:
                return True

        runner = work_ahead(llm, Stubborn)
        assert facts(run(llm, special_params)) == wanted[special_params]
        assert runner.num_launched > NUM_TOKENS


def test_a_step_that_fails_in_flight_is_repeated(dtype: str, wanted: Any) -> None:
    with engine(dtype=dtype) as llm:
        runner = work_ahead(llm, FailsInFlight)
        assert isinstance(runner, FailsInFlight)
        assert facts(run(llm)) == wanted[some_params]
        assert runner.num_failed > 5
        llm.core.scheduler.check()
        assert llm.stats()["num_free_pages"] == llm.stats()["num_pages"]


def test_a_request_that_always_fails_fails_alone(dtype: str, wanted: Any) -> None:
    """Its step is halved until it is alone; the others get their tokens."""

    class Poisoned(AlwaysAhead):
        def _compute(self, step: Any) -> Any:
            if any(chunk.sequence.request.seed == 77 for chunk in step.plan):
                raise RuntimeError("on purpose")
            return super()._compute(step)

        def _calls(self, step: Any) -> None:
            return None

    with engine(dtype=dtype, max_batch_size=5) as llm:
        work_ahead(llm, Poisoned)
        poison = llm.make_request("The end", SamplingParams(seed=77), request_id="poison")
        others = [llm.make_request(PROMPTS[i], some_params(i)) for i in range(4)]
        for request in (others[0], others[1], poison, *others[2:]):
            llm.core.add(request)
        outputs = llm.core.outputs_until_complete()
        (failed,) = [each for each in outputs if each.request_id == "poison"]
        assert failed.error is not None
        for request, (tokens, *_) in zip(others, wanted[some_params], strict=False):
            got = [each.token_id for each in outputs if each.request_id == request.request_id]
            assert tuple(got) == tokens
        llm.core.scheduler.check()


def test_aborted_in_flight(dtype: str, wanted: Any) -> None:
    with engine(dtype=dtype) as llm:
        work_ahead(llm)
        requests = [llm.make_request(PROMPTS[i], some_params(i)) for i in range(len(PROMPTS))]
        for request in requests:
            llm.core.add(request)
        outputs, count = [], 0
        while llm.core.has_work:
            outputs += llm.core.step()
            llm.core.scheduler.check()
            count += 1
            if count % 7 == 0 and (running := llm.core.scheduler.running):
                llm.core.abort(running[-1].request_id)
        for request, (tokens, *_) in zip(requests, wanted[some_params], strict=True):
            got = [each.token_id for each in outputs if each.request_id == request.request_id]
            assert tuple(got) == tokens[: len(got)]
        assert llm.stats()["num_finished_abort"] > 1
