"""One request's failure affects no other: halved steps, rows of NaN, lack of memory."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

import infer
from infer import LLM, SamplingParams
from infer.engine.core import MAX_LOST_STEPS
from infer.errors import ConfigError, EngineError, LoadError
from infer.schedule.sequence import NOT_FINITE, Plan, Sampled
from infer.types import ErrorRecord, FinishReason, Request, StepOutput
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.doubles import launch_hash_llm, pid_of
from tests.support.faults import Faults, FaultyCore, fill_with_nan
from tests.support.hash_engine import HashRunner, make_hash_core, solo

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def request(name: str, *tokens: int, num_tokens: int = 12) -> Request:
    return Request(name, tokens, GREEDY, seed=0, max_tokens=num_tokens)


def tokens_of(outputs: list[StepOutput], name: str) -> list[int | None]:
    return [o.token_id for o in outputs if o.request_id == name]


class Poisoned(HashRunner):
    """A runner that fails in a given way on some requests, and counts the failed steps."""

    num_failed = 0

    def execute(self, plan: Plan) -> Seq[Sampled]:
        for chunk in plan:
            if 13 in chunk.sequence.request.prompt_token_ids and chunk.sequence.num_output == 3:
                self.num_failed += 1
                raise IndexError("broken on purpose")
        return super().execute(plan)


def test_a_step_is_halved_until_the_culprit_is_alone() -> None:
    core = make_hash_core(runner=Poisoned, max_batch_size=32, max_num_batched_tokens=256)
    requests = [request(f"{i}", 20 + i, 3) for i in range(30)] + [request("bad", 13)]
    for each in requests:
        core.add(each)
    outputs = []
    while core.has_work:
        outputs += core.step()
        core.scheduler.check()
    for each in requests[:-1]:
        assert tokens_of(outputs, each.request_id) == solo(each, VOCAB_SIZE)
    (*good, end) = [o for o in outputs if o.request_id == "bad"]
    assert [o.token_id for o in good] == solo(requests[-1], VOCAB_SIZE)[:3]
    assert end.finish_reason is FinishReason.ERROR
    assert end.error is not None
    assert end.error.message == "the engine failed while computing this request"
    assert isinstance(core.runner, Poisoned)
    assert core.runner.num_failed <= 6  # one for the whole step, and one for each halving
    assert core.scheduler.allocator.num_free == core.scheduler.allocator.num_usable


class Small(HashRunner):
    """A runner with memory for a limited number of tokens in a step."""

    room = 3

    def execute(self, plan: Plan) -> Seq[Sampled]:
        if sum(chunk.num_tokens for chunk in plan) > self.room:
            raise MemoryError("20.00 MiB are not there")
        return super().execute(plan)


def test_a_step_that_does_not_fit_into_memory_is_made_smaller() -> None:
    core = make_hash_core(runner=Small)
    requests = [request(f"{i}", *range(20 + i, 40 + i)) for i in range(8)]
    for each in requests:
        core.add(each)
    outputs = core.outputs_until_complete()
    for each in requests:
        assert tokens_of(outputs, each.request_id) == solo(each, VOCAB_SIZE)


def test_an_engine_that_can_do_nothing_any_more_says_so() -> None:
    core = make_hash_core(runner=Small)
    assert isinstance(core.runner, Small)
    core.runner.room = 0
    for i in range(30):
        core.add(request(f"{i}", 20 + i))
    with pytest.raises(RuntimeError, match="nothing could be computed in 3 steps"):
        core.outputs_until_complete()
    assert core.scheduler.stats.num_finished[FinishReason.ERROR] == 8 * MAX_LOST_STEPS


def test_a_row_without_numbers_fails_alone() -> None:
    """On the shipped model, with NaN in one row of the logits and infinity in another."""
    sampling = [GREEDY, GREEDY.replace(temperature=0.8, top_p=0.9, seed=1, logprobs=1)] * 3
    with LLM(dtype="float32", max_seq_len=64) as llm:
        prompts = ["One day", "Once", "The fox", "A bird", "{", "7 + 5 ="]
        wanted = [output.token_ids for output in llm.generate(prompts, sampling, use_tqdm=False)]
        model = llm.core.runner.model  # type: ignore[attr-defined]
        logits, calls = model.logits, 0

        def spoilt(*arguments: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            result: torch.Tensor = logits(*arguments)
            if calls == 5:
                result[1, 7] = float("nan")
                result[4, :] = float("inf")
            return result

        model.logits = spoilt
        requests = [llm.make_request(*pair) for pair in zip(prompts, sampling, strict=True)]
        for each in requests:
            llm.core.add(each)
        outputs = llm.core.outputs_until_complete()
    for i, each in enumerate(requests):
        mine = [o for o in outputs if o.request_id == each.request_id]
        if i in (1, 4):
            assert mine[-1].error is not None
            assert mine[-1].error.message == NOT_FINITE
            assert tuple(o.token_id for o in mine[:-1]) == wanted[i][:4]
        else:
            assert tuple(o.token_id for o in mine) == wanted[i]


# ---- faults on purpose


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("AT", "3:1:sing"), ("AT", "3:1"), ("AT", "3:nan"), ("SEEDS", "1:2:nan")),
        *(("PREEMPT_EVERY", "x"), ("SLOW_STEP_MS", ""), ("X", "1")),
    ],
)
def test_a_fault_that_is_not_known(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"INFER_FAULT_{name}: "):
        Faults.from_environment({f"INFER_FAULT_{name}": value})


def test_faults_of_the_environment(caplog: pytest.LogCaptureFixture) -> None:
    assert Faults.from_environment({"INFER": "1"}) == Faults()
    assert "faults on purpose" not in caplog.text
    values = {"PREEMPT_EVERY": "3", "AT": "4:1:nan", "SLOW_STEP_MS": "0.5", "SEEDS": "7:raise"}
    faults = Faults.from_environment({f"INFER_FAULT_{name}": v for name, v in values.items()})
    assert faults == Faults(3, (4, 1, "nan"), 0.5, seeds=(7, "raise"))
    assert "faults on purpose" in caplog.text


@pytest.mark.parametrize("kind", ["raise", "nan", "memory"])
def test_one_request_is_poisonous_and_everybody_is_preempted(kind: str) -> None:
    core = FaultyCore(make_hash_core(), Faults(3, (9, 2, kind), 0.0, True))
    requests = [request(f"{i}", 20 + i, num_tokens=40) for i in range(12)]
    for each in requests:
        core.add(each)
    outputs = core.outputs_until_complete()
    failed = [o.request_id for o in outputs if o.error is not None]
    assert len(failed) == (0 if kind == "memory" else 1)
    for each in requests:
        if each.request_id not in failed:
            assert tokens_of(outputs, each.request_id) == solo(each, VOCAB_SIZE)
    assert core.stats().counters.num_preemptions > 20


# ---- scorecard 5: a sequence reads no cell that it has not written


class ReadsTooFar(HashRunner):
    """A runner that reads the cell after the last one, which may hold another request's data."""

    def _compute(self, sequence: Any, start: int, num_tokens: int) -> int:
        cell = super()._compute(sequence, start, num_tokens)
        if (start + num_tokens) % self.page_size:
            self._read(sequence, start + num_tokens)
        return cell


@pytest.mark.parametrize("count", [650, pytest.param(2600, marks=pytest.mark.slow)])
def test_taken_pages_are_poisoned_and_nobody_notices(count: int) -> None:
    """Each request takes 8 pages from a pool so small that all pages are reused often."""
    faults = Faults(preempt_every=7, poison=True)
    core = FaultyCore(make_hash_core(num_pages=60, max_waiting_requests=3000), faults)
    taken, grow = 0, core.scheduler.allocator.grow

    def counted(table: Any, num_tokens: int) -> bool:
        nonlocal taken
        before = len(table.pages)
        result = grow(table, num_tokens)
        taken += len(table.pages) - before
        return result

    core.scheduler.allocator.grow = counted  # type: ignore[method-assign]
    requests = [request(f"{i}", i % 200, i % 7, num_tokens=20 + i % 20) for i in range(count)]
    for each in requests:
        core.add(each)
    outputs: dict[str, list[int | None]] = {each.request_id: [] for each in requests}
    for output in core.outputs_until_complete():
        outputs[output.request_id].append(output.token_id)
    assert taken > 7.6 * count
    assert all(outputs[each.request_id] == solo(each, VOCAB_SIZE) for each in requests)


@pytest.mark.parametrize("poison", [False, True])
def test_a_cell_too_many_is_noticed(poison: bool) -> None:
    """By the second request, which gets the first one's pages; only if pages are poisoned."""
    core = FaultyCore(
        make_hash_core(num_pages=9, runner=ReadsTooFar, enable_prefix_caching=False),
        Faults(poison=poison),
    )
    assert isinstance(core.runner.runner, HashRunner)  # type: ignore[attr-defined]
    core.runner.runner.cells = [[0] * 4 for _ in range(9)]  # type: ignore[attr-defined]
    core.add(request("a", 1, 2, 3, 4, 5))
    outputs = core.outputs_until_complete()
    assert (outputs[-1].error is not None) == poison


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_poison_on_the_real_model(backend: str, dtype: str) -> None:
    sampling = [GREEDY, GREEDY.replace(temperature=0.8, top_p=0.9, seed=1, logprobs=1)] * 4
    prompts = ["One day", "Once upon a time there was", "The fox", "A bird"] * 2
    settings: dict[str, Any] = {"dtype": dtype, "attention_backend": backend, "page_size": 4}
    with LLM(max_seq_len=64, **settings) as llm:
        wanted = [output.token_ids for output in llm.generate(prompts, sampling, use_tqdm=False)]
    with LLM(max_seq_len=64, kv_cache_memory_bytes=1 << 19, **settings) as llm:
        core = FaultyCore(llm.core, Faults(preempt_every=5, poison=True, strict_ledger=True))
        requests = [llm.make_request(*pair) for pair in zip(prompts, sampling, strict=True)]
        for each in requests:
            core.add(each)
        outputs = core.outputs_until_complete()
        for each, tokens in zip(requests, wanted, strict=True):
            assert tuple(tokens_of(outputs, each.request_id)) == tokens
        # The check works: poisoning the pages of a running sequence changes its answer.
        victim = llm.core.scheduler.add(llm.make_request("One day", GREEDY))
        llm.core.step()
        fill_with_nan(llm.core.runner, victim.table.pages)
        (*_, last) = llm.core.outputs_until_complete()
        assert last.error is not None
        assert last.error.message == NOT_FINITE


# ---- scorecard 19: poison requests among many, through a process


@pytest.mark.parametrize("count", [1000, pytest.param(5000, marks=pytest.mark.slow)])
def test_of_thousands_exactly_the_poisonous_ones_fail(count: int) -> None:
    dice, width = random.Random(0), 100
    poisonous = {i: dice.choice([13, 14]) for i in dice.sample(range(count), count // 100)}

    async def main() -> None:
        llm = launch_hash_llm("tests.support.faulty:sometimes", max_batch_size=32, num_pages=2000)
        async with llm:
            pid = pid_of(llm)
            free = asyncio.Semaphore(width)

            async def ask(i: int) -> bool:
                prompt = [poisonous.get(i, 20 + i % 200), i % 251, i // 251]
                async with free:
                    each = llm.make_request(prompt, GREEDY.replace(max_tokens=4 + i % 5))
                    try:
                        output = await llm.generate(each)
                    except EngineError:
                        return False
                assert list(output.token_ids) == solo(each, VOCAB_SIZE)
                return True

            went_well = await asyncio.gather(*[ask(i) for i in range(count)])
            assert {i for i, well in enumerate(went_well) if not well} == set(poisonous)
            stats = llm.stats()
            assert (stats["num_restarts"], pid_of(llm)) == (0, pid)
            assert stats["num_finished_error"] == len(poisonous)

    asyncio.run(main())


@pytest.mark.parametrize("error", [ErrorRecord("its own", "RequestError"), ErrorRecord("NaN")])
def test_requests_that_fail_by_themselves_never_end_the_engine(error: ErrorRecord) -> None:
    """100 in a row, each alone: an error that the runner attributes to a request says nothing about
    the engine."""

    class Pinned(HashRunner):
        def execute(self, plan: Plan) -> Seq[Sampled]:
            refused = error.kind == "RequestError"
            return [Sampled(0, error=error.message, is_refused=refused) for _ in plan]

    core = make_hash_core(runner=Pinned)
    for i in range(100):
        core.add(request(f"{i}", 20))
        (end,) = core.outputs_until_complete()
        assert end.error == error


def test_requests_that_make_steps_raise_never_end_an_engine_that_works() -> None:
    """100 in a row, each alone: a trial step shows that the requests are the cause."""
    core = make_hash_core(runner=Poisoned)
    for i in range(100):
        core.add(request(f"{i}", 13))
        *_, end = core.outputs_until_complete()
        assert end.finish_reason is FinishReason.ERROR
    good = request("good", 20)
    core.add(good)
    assert tokens_of(core.outputs_until_complete(), "good") == solo(good, VOCAB_SIZE)
    core.scheduler.check()
    assert core.scheduler.allocator.num_free == core.scheduler.allocator.num_usable


def test_a_trial_step_leaves_nothing_behind() -> None:
    core = make_hash_core(num_pages=4)
    assert core.try_out() == ""
    before = core.stats()
    assert before.gauges.num_touched_pages == 1  # its page is handed out first from then on
    assert core.try_out() == ""
    assert core.stats() == before
    assert before.counters == make_hash_core(num_pages=4).stats().counters
    core.scheduler.check()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_checkpoint_without_numbers_is_refused_at_the_start(
    tmp_path: Path, number: float
) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(Path(infer.__file__).parent / "demo_model", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("norm.weight"))
    weights[name] = torch.full_like(weights[name], number)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"a first step fails.*no finite numbers"):
        LLM(str(folder))
