"""`ProcessTransport`: the same answers as from a thread, refusals, logs, the end of the process."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from infer import EngineConfig, FinishReason, SamplingParams
from infer.engine.client.async_llm import AsyncLLM
from infer.engine.commands import Abort, Add, Command, Reset, Stop
from infer.errors import ConfigError, EngineDeadError, EngineError, LoadError
from infer.replicas.host import ReplicaHost
from infer.replicas.launch import launch
from infer.replicas.messages import (
    Begin,
    Commands,
    Draining,
    EngineHealth,
    Failing,
    FrameBuffer,
    HasBegun,
    Heartbeat,
    Inward,
    IsolatedStep,
    Log,
    Loss,
    Outward,
    Prepare,
    PromptScores,
    Ready,
    Refused,
    Report,
    ScoreCollector,
    Text,
    decode_inward,
    decode_outward,
    encode,
    frame_of,
    reports,
)
from infer.replicas.process_transport import ProcessTransport
from infer.replicas.replica import Replica
from infer.text.checkpoint_text import TextFiles
from infer.types import ErrorRecord, Request, Sampling, StepOutput, TokenLogprobs
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineCounters, EngineGauges, EngineStats
from infer.types.step_events import (
    Admitted,
    BatchEnded,
    BatchFormed,
    ComputedChunk,
    Preempted,
    Queued,
    Resumed,
    Speculated,
    StepEvent,
    StepEvents,
)
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.doubles import launch_hash_llm, pid_of, replica_of
from tests.support.hash_engine import solo
from tests.support.server_process import engines_below
from tests.support.waits import until_async

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def run(body: Callable[[AsyncLLM], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        async with launch_hash_llm(**settings) as llm:
            return await body(llm)

    return asyncio.run(main())


def worker_of(llm: AsyncLLM) -> Replica:
    return replica_of(llm)


def idle(llm: AsyncLLM) -> bool:
    stats = llm.stats()
    busy = [stats[f"num_{name}"] for name in ("open", "running", "waiting", "preempted")]
    return not any(busy) and stats["num_free_pages"] == stats["num_pages"]


# ---- the messages


def test_a_request_crosses_whole() -> None:
    sampling = SamplingParams(
        temperature=0.3,
        top_p=0.9,
        logit_bias={5: -1.5, 2: 100.0},
        stop=("a", "é"),
        stop_token_ids=[3, 4],
        seed=-(2**63),
        logprobs=4,
    )
    request = Request(
        *("id", (1, 2, 3), sampling, 2**63 - 1, 7, (9,), -2, "scope"),
        output_token_ids=(4, 5),
        num_crashes=1,
    )
    commands = Commands(4, [Add(request), Add(request), Abort("gone"), Reset(), Stop()])
    first, second, *others = crossed(commands).commands
    assert dataclasses.asdict(first.request) == dataclasses.asdict(request)
    assert first == second
    assert first.request.sampling is second.request.sampling, "choices share what is large"
    assert type(first.request.sampling) is Sampling
    assert others == [Abort("gone"), Reset(), Stop()]


def crossed(message: Inward | Outward) -> Any:
    """A message as the other process decodes it."""
    frame = encode(message)
    is_inward = isinstance(message, get_args(Inward))
    return decode_inward(frame) if is_inward else decode_outward(frame)


STATS = EngineStats(
    EngineGauges(num_running=1, num_pages=9),
    EngineCounters(num_steps=2, num_finished={FinishReason.EOS: 3}),
)
LIMITS = EngineLimits(vocab_size=7, max_seq_len=8, num_seats=2, max_waiting_requests=3)
EXAMPLES = (
    *(Prepare("a:b"), Begin("a:b", {"n": 1, "x": None}, 20), Commands(1, [])),
    HasBegun(),
    Text("name", TextFiles("{}", {"eos_token": "x"}, (3,), {"default": "x"})),
    Ready(3, LIMITS, STATS),
    Refused(ErrorRecord("m", "LoadError")),
    Report([], STATS),
    PromptScores("a", 1, b"\x90"),
    *(IsolatedStep("a"), IsolatedStep(None)),
    *(Heartbeat(), Heartbeat(EngineHealth(STATS, 0.5, 0.25, True, False))),
    *(Loss("it has died", True, "a"), Draining(2.5), Failing("it fails")),
    Log("infer.x", 20, "line"),
)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_crosses_whole(message: Inward | Outward) -> None:
    assert crossed(message) == message


def test_settings_cross_whole_that_are_no_valid_unicode() -> None:
    """A path whose bytes the locale cannot decode has lone surrogates in Python."""
    settings = {"model": "m\udcc3\udcb6del", "n": 1, "name": "ö", "share": {"index": 0}}
    assert crossed(Begin("a:b", settings, 20)) == Begin("a:b", settings, 20)


@pytest.mark.parametrize(
    ("message", "read"),
    [
        (Log("infer.x", 20, "m\udcc3\udcb6del"), Log("infer.x", 20, "mödel")),
        (Log("infer.x", 20, "\ud800"), Log("infer.x", 20, "\ufffd")),
        (
            Refused(ErrorRecord("m\udcf6del is missing", "LoadError")),
            Refused(ErrorRecord("m\ufffddel is missing", "LoadError")),
        ),
    ],
)
def test_other_messages_are_made_readable(message: Outward, read: Outward) -> None:
    assert crossed(message) == read


@pytest.mark.parametrize("value", [10**30, -(2**70), object()])
def test_settings_that_cannot_be_sent_end_the_load_at_once(value: Any) -> None:
    """The process would wait for them until the load's time is up, which is an hour."""
    with pytest.raises(LoadError, match="the engine's settings cannot be sent to it"):
        launch_hash_llm(seed=1, page_size=value)
    assert not engines_below(os.getpid())


def test_a_command_that_cannot_be_sent_ends_the_process_and_not_the_others() -> None:
    async def body(llm: AsyncLLM) -> None:
        before = pid_of(llm)
        worker_of(llm).abort(object(), 1)  # type: ignore[arg-type]
        await until_async(lambda: llm.is_ready and pid_of(llm) != before, 60)
        assert (await llm.generate(llm.make_request("abc", GREEDY))).text

    run(body)


def test_each_kind_of_message_and_command_is_a_record_with_an_example() -> None:
    kinds = {*get_args(Inward), *get_args(Outward)}
    assert {type(example) for example in EXAMPLES} == kinds
    for kind in (*kinds, *get_args(Command)):
        assert issubclass(kind, msgspec.Struct), kind
        assert kind.__struct_config__.tag, kind


@pytest.mark.parametrize("reason", FinishReason)
def test_an_abort_crosses_with_its_reason(reason: FinishReason) -> None:
    assert crossed(Commands(2, [Abort("a", reason)])) == Commands(2, [Abort("a", reason)])


@pytest.mark.parametrize("frame", [None, "stop", ["stop"], ["later", 1], [["add", {}]]])
def test_a_frame_that_is_no_message_is_refused(frame: Any) -> None:
    for decode in (decode_inward, decode_outward):
        with pytest.raises(msgspec.ValidationError):
            decode(msgspec.msgpack.encode(frame))


EVENTS = (
    Queued("a", 2, 1, ("b", "c")),
    Resumed("b", 0, 3),
    Preempted("c", 5, "a"),
    Preempted("c", 5),
    Admitted("a", 3, 7),
    Admitted("a", 3, 7, "batch-a-1"),
    BatchFormed("batch-a-1", 2.5, 3, 0.25, 40, 60),
    BatchEnded("batch-a-1", 70, 75),
    ComputedChunk("a", 3, 4),
    Speculated("a", 9, 4),
)


def test_an_output_crosses_whole() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(StepEvent))
    logprobs = TokenLogprobs(-0.125, ((3, -0.125), (4, float("-inf"))))
    outputs = [
        StepOutput("a", 3, None, logprobs, num_cached=4),
        StepOutput("b", None, FinishReason.ERROR, error=ErrorRecord("m", "EngineError", "p", "c")),
    ]
    step_events = StepEvents(7, 0.5, 0.75, 2, EVENTS)
    report = Report(outputs, STATS, step_events)
    assert crossed(report) == report


def test_log_probabilities_of_long_prompts_cross_in_small_frames() -> None:
    """Reading them at once would keep the interpreter, and so everybody's streams, for a second."""
    entries = tuple(
        TokenLogprobs(-i / 7, tuple((i + j, -j / 3) for j in range(20))) for i in range(3000)
    )
    outputs = [
        StepOutput("a", 3, prompt_logprobs=entries),
        StepOutput("b", 4),
        StepOutput("c", 5, prompt_logprobs=entries[:2]),
        StepOutput("d", 6, prompt_logprobs=()),
    ]
    frames = [msgspec.msgpack.encode(each) for each in reports(outputs, STATS, None)]
    assert max(map(len, frames)) < 100_000
    collector, found = ScoreCollector(), list[StepOutput]()
    for event in map(decode_outward, frames):
        if isinstance(event, PromptScores):
            collector.add(event)
        else:
            assert isinstance(event, Report)
            found += collector.complete(event.outputs)
    packed = found[0].prompt_logprobs
    assert packed is not None
    assert (len(packed), packed[-1], packed[:2]) == (3000, entries[-1], entries[:2])
    assert packed == entries
    assert list(found[2].prompt_logprobs or ()) == list(entries[:2])
    assert not found[1].prompt_logprobs
    assert not found[3].prompt_logprobs
    assert [each.token_id for each in found] == [3, 4, 5, 6]
    # An iterator reads a frame at a time: the others may be of any content until it comes to them.
    first, *others = [e for e in map(decode_outward, frames) if isinstance(e, PromptScores)]
    for event in (first, *(PromptScores(e.request_id, e.count, b"\xc1") for e in others)):
        collector.add(event)
    [output] = collector.complete([outputs[0]])
    assert next(iter(output.prompt_logprobs or ())) == entries[0]
    with pytest.raises(msgspec.DecodeError):
        list(output.prompt_logprobs or ())


@pytest.mark.parametrize("error", [LoadError("no such"), ConfigError("dtype", "must be: a")])
def test_an_error_of_the_start_crosses_whole(error: LoadError) -> None:
    again = crossed(Refused(ErrorRecord.of(error))).error.exception()
    assert (type(again), str(again)) == (type(error), str(error))


# ---- an engine in a process


def test_many_at_once_each_get_their_own() -> None:
    async def body(llm: AsyncLLM) -> None:
        drawn = GREEDY.replace(temperature=0.7, seed=5, logprobs=2)
        requests = [llm.make_request([i + 1, 7], (GREEDY, drawn)[i % 2]) for i in range(30)]
        outputs = await asyncio.gather(*[llm.generate(request) for request in requests])
        for request, output in zip(requests, outputs, strict=True):
            assert list(output.token_ids) == solo(request, VOCAB_SIZE)
            assert (output.logprobs is None) == (request.sampling.logprobs is None)
        await until_async(lambda: idle(llm))
        assert llm.stats()["num_restarts"] == 0

    run(body)


def test_leaving_aborts_and_a_stop_string_too() -> None:
    async def body(llm: AsyncLLM) -> None:
        plain = await llm.generate(llm.make_request("abc", GREEDY))
        stop = next(char for char in plain.text if char.isascii() and char.isprintable())
        long = GREEDY.replace(max_tokens=400)
        stopped = await llm.generate(llm.make_request("abc", long.replace(stop=stop)))
        assert stopped.text == plain.text[: plain.text.index(stop)]
        async with llm.stream(llm.make_request("abc", long)) as pieces:
            async for _ in pieces:
                break
        await until_async(lambda: idle(llm))
        assert llm.stats()["num_finished_abort"] == llm.stats()["num_finished_stop"] == 1

    run(body, step_s=0.002)


def test_the_engines_refusal_and_its_log_come_across(caplog: pytest.LogCaptureFixture) -> None:
    async def body(llm: AsyncLLM) -> None:
        request = llm.make_request([1], GREEDY.replace(max_tokens=300))
        with pytest.raises(ValueError, match=r"needs 75 pages of KV cache; the whole cache has 9"):
            await llm.generate(request)

    with caplog.at_level(logging.INFO, "infer"):
        run(body, factory="tests.support.faulty:talkative", num_pages=10)
    assert ("infer.test", logging.INFO, "made over there") in caplog.record_tuples


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        ("tests.support.faulty:misconfigured", ConfigError, "page_size: must be odd"),
        ("tests.support.faulty:without_weights", LoadError, "the weights are not there"),
        ("tests.support.faulty:exploding", LoadError, "ended while it started"),
        ("tests.support.faulty:speechless", LoadError, "tokenizer.json"),
    ],
)
def test_what_keeps_an_engine_from_starting(
    factory: str, error: type[LoadError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        launch_hash_llm(factory)
    assert type(caught.value) is error
    assert not engines_below(os.getpid())


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    except OSError:
        return ""


def test_closing_ends_the_process_at_once_and_what_runs_with_an_error() -> None:
    async def main() -> None:
        llm = launch_hash_llm(step_s=0.5)  # the request would take minutes
        await llm.start()
        pid = pid_of(llm)
        task = asyncio.create_task(
            llm.generate(llm.make_request("abc", GREEDY.replace(max_tokens=400)))
        )
        await until_async(lambda: llm.stats()["num_running"] == 1)
        await llm.close()
        with pytest.raises(EngineError, match="shutting down"):
            await task
        assert not command_of(pid)
        with pytest.raises(EngineDeadError):
            await llm.generate(llm.make_request("abc", GREEDY))

    asyncio.run(main())


ORPHAN = textwrap.dedent(
    """
    import asyncio, sys, time
    from tests.support.doubles import launch_hash_llm, pid_of
    assert "torch" not in sys.modules
    llm = launch_hash_llm(step_s=float(sys.argv[1]))
    async def main():
        await llm.start()
        async with llm.stream(llm.make_request("abc")):
            print(pid_of(llm), "torch" in sys.modules, flush=True)
            time.sleep(60)
    asyncio.run(main())
    """
)


@pytest.mark.parametrize("step_s", ["0", "30"])
def test_the_process_dies_with_its_parent_and_the_parent_has_no_torch(step_s: str) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    arguments = [sys.executable, "-c", ORPHAN, step_s]
    with subprocess.Popen(
        arguments, env=env, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        pid, has_torch = process.stdout.readline().split()
        assert has_torch == "False"
        assert "infer.replicas.child" in command_of(int(pid))
        process.kill()
    deadline_s = time.monotonic() + 5
    while command_of(int(pid)):
        assert time.monotonic() < deadline_s, "an orphan"
        time.sleep(0.01)


def test_signals_to_the_whole_group_are_the_parents_business() -> None:
    async def body(llm: AsyncLLM) -> None:
        pid = pid_of(llm)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        request = llm.make_request("abc", GREEDY)
        assert list((await llm.generate(request)).token_ids) == solo(request, VOCAB_SIZE)
        assert (pid_of(llm), llm.stats()["num_restarts"]) == (pid, 0)

    run(body)


def test_a_model_that_does_not_exist() -> None:
    with pytest.raises(LoadError, match="neither a folder here nor a hub id"):
        launch(EngineConfig(model="/no/such/model"))


def test_a_host_of_links_begins_a_generation_only_when_the_process_has_ended_the_one_before() -> (
    None
):
    process = ProcessTransport("tests.support.hash_engine:hash_blueprint", {})
    process.begin()
    ready = process.wait(lambda text: None)
    replica = Replica("engine", ready.limits, process, ready=ready)
    host = ReplicaHost(replica)
    replica.start(host)
    try:
        wanted = Request("r", (1, 2, 3), SamplingParams(temperature=0), 1, 60)
        ends_s, generation, tokens = time.monotonic() + 60, 0, list[int | None]()
        link = host.attach("front", lambda: None)
        while (len(tokens) < 60 or generation < 30) and time.monotonic() < ends_s:
            for frame in FrameBuffer(link.take() or b"").frames():
                event = decode_outward(frame)
                if isinstance(event, Ready):
                    generation, tokens = event.generation, []
                    host.command("front", frame_of(Commands(generation, [Add(wanted)])))
                elif isinstance(event, Report):
                    tokens += [output.token_id for output in event.outputs]
            if generation < 30 and tokens:  # the engine is in the midst of it each time
                host.command("front", frame_of(Commands(generation, [Reset()])))
                tokens = []
        assert generation >= 30
        assert tokens == solo(wanted, VOCAB_SIZE)
    finally:
        replica.stop()
