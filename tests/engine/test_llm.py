"""`LLM` as a Python program uses it: inputs, outputs, ends, errors, streams left early."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infer import LLM, EngineConfig, FinishReason, Grammar, RequestError, SamplingParams
from infer.config import SCHEDULER_POLICIES
from infer.engine.llm import Prompt
from infer.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    LoadError,
    UnprocessableError,
)
from infer.types import Sampling
from tests.support.checkpoints import END_ID, EOS_ID, write_llama

pytestmark = pytest.mark.usefixtures("kept_templates")

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_llama(path, num_hidden_layers=2, max_position_embeddings=256)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=str(folder), dtype="float32", max_batch_size=4) as llm:
        yield llm


def test_outputs_come_in_input_order_with_everything(llm: LLM) -> None:
    params = GREEDY.replace(logprobs=2)
    prompts: list[Prompt] = ["Once upon a time", [1, 5, 7]]
    outputs = llm.generate(prompts, params)
    assert outputs[1].prompt_token_ids == (1, 5, 7)
    assert outputs[0].prompt_token_ids == tuple(llm.tokenizer.encode("Once upon a time"))
    for output in outputs:
        assert len(output.token_ids) == 8
        assert output.finish_reason is FinishReason.LENGTH
        assert output.text == llm.tokenizer.decode(output.token_ids)
        assert output.logprobs is not None
        assert len(output.logprobs) == 8
        assert [entry.top[0][0] for entry in output.logprobs] == list(output.token_ids)
        assert output.logprobs[0].logprob == output.logprobs[0].top[0][1] <= 0


def test_one_prompt_of_each_kind(llm: LLM) -> None:
    assert len(llm.generate("hello", GREEDY)) == 1
    assert len(llm.generate([1, 2, 3], GREEDY)) == 1
    assert llm.generate([], GREEDY) == []


def test_prompts_as_dicts(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    prompts: list[Prompt] = [{"prompt": "hello"}, {"prompt_token_ids": ids}]
    text, tokens = llm.generate(prompts, GREEDY)
    assert text.token_ids == tokens.token_ids
    assert llm.generate({"prompt": "hello"}, GREEDY)[0].token_ids == text.token_ids
    for wrong in ({}, {"prompt": "a", "prompt_token_ids": [1]}, {"text": "a"}):
        with pytest.raises(RequestError, match="either prompt or prompt_token_ids"):
            llm.generate(wrong, GREEDY)


def test_the_core_says_what_each_request_produced(llm: LLM) -> None:
    [whole] = llm.generate("Once upon a time", GREEDY.replace(logprobs=1))
    requests = {
        name: llm.make_request(
            "Once upon a time", GREEDY.replace(max_tokens=n, logprobs=1), request_id=name
        )
        for name, n in (("short", 3), ("long", 8))
    }
    for request in requests.values():
        llm.core.add(request)
    [first] = llm.core.run_until_complete("short").values()
    assert first.token_ids == whole.token_ids[:3]
    assert first.finish_reason is FinishReason.LENGTH
    # The second call's result includes the tokens sampled during the first.
    rest = llm.core.run_until_complete()
    assert list(rest) == ["long"]
    assert rest["long"].token_ids == whole.token_ids
    assert len(rest["long"].logprobs) == 5
    assert llm.core.run_until_complete() == {}
    for name in ("short", "nobody"):
        with pytest.raises(RequestError, match=f"no unfinished request with id '{name}'"):
            llm.core.run_until_complete(name)


def test_many_more_prompts_than_the_queue_holds(folder: Path) -> None:
    with LLM(str(folder), max_batch_size=2, max_waiting_requests=1) as llm:
        outputs = llm.generate([[i + 1, 2] for i in range(20)], GREEDY)
        assert [output.prompt_token_ids[0] for output in outputs] == list(range(1, 21))


def test_a_parameter_for_each_prompt(llm: LLM) -> None:
    each = [GREEDY.replace(max_tokens=n) for n in (1, 5, 3)]
    outputs = llm.generate(["a", "b", "c"], each)
    assert [len(output.token_ids) for output in outputs] == [1, 5, 3]
    with pytest.raises(RequestError, match="3 prompts but 2 sampling parameters"):
        llm.generate(["a", "b", "c"], each[:2])


def test_chat_one_and_many(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hello"}]
    (one,) = llm.chat(conversation, GREEDY)
    wanted = "<|begin_of_text|><|user|>\nHello<|end|>\n<|assistant|>\n"
    assert llm.tokenizer.decode(one.prompt_token_ids, skip_special_tokens=False) == wanted
    many = llm.chat([conversation, conversation], GREEDY)
    assert [output.token_ids for output in many] == [one.token_ids] * 2
    with pytest.raises(RequestError, match="must not be empty"):
        llm.chat([])


@pytest.mark.parametrize(
    ("begun", "thinks"), [("", True), ("<think>\n", True), ("<think>\n\n</think>\n\n", False)]
)
def test_a_chats_grammar_holds_behind_the_thoughts(
    folder: Path, tmp_path: Path, begun: str, thinks: bool
) -> None:
    """As in the server: thoughts are free where the template has them and has not ended them."""
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
        "{% if add_generation_prompt %}" + begun + "{% endif %}",
        encoding="utf-8",
    )
    params = SamplingParams(grammar=Grammar.choice(["yes", "no"]), max_tokens=8, seed=1)
    conversation = [{"role": "user", "content": "Well?"}]
    with LLM(str(folder), dtype="float32", chat_template=str(template)) as llm:
        (one,) = llm.chat(conversation, params)
        streamed = "".join(piece.text for piece in llm.stream(conversation, params))
        (plain,) = llm.generate("Well?", params)
    assert plain.text in ("yes", "no")
    assert streamed == one.text
    if not thinks:
        assert one.text in ("yes", "no")
    elif begun:
        assert one.text not in ("yes", "no")
        assert len(one.token_ids) == 8  # and nothing in them ends the answer
    else:
        assert one.text in ("yes", "no") or "<think>".startswith(one.text[:7])


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (plain,) = llm.generate("stop here", GREEDY.replace(max_tokens=30))
    middle = plain.text[len(plain.text) // 2 :][:2]
    cut = plain.text.index(middle)
    (stopped,) = llm.generate("stop here", GREEDY.replace(max_tokens=30, stop=middle))
    assert stopped.text == plain.text[:cut]
    assert stopped.finish_reason is FinishReason.STOP
    assert len(stopped.token_ids) < 30
    params = GREEDY.replace(max_tokens=30, stop=[middle], include_stop_str_in_output=True)
    (kept,) = llm.generate("stop here", params)
    assert kept.text == plain.text[: cut + len(middle)]
    assert llm.stats()["num_running"] == 0


def test_eos_ends_and_is_not_shown(llm: LLM) -> None:
    for eos in (EOS_ID, END_ID):
        params = SamplingParams(temperature=0, max_tokens=8, logit_bias={eos: 100}, min_tokens=3)
        (output,) = llm.generate("x", params)
        assert output.finish_reason is FinishReason.EOS
        assert len(output.token_ids) == 4
        assert output.token_ids[-1] == eos
        assert output.text == llm.tokenizer.decode(output.token_ids[:3])
        (ignored,) = llm.generate("x", params.replace(ignore_eos=True))
        assert ignored.finish_reason is FinishReason.LENGTH


def test_a_stop_token_ends(llm: LLM) -> None:
    (plain,) = llm.generate("stop token", GREEDY)
    third = plain.token_ids[2]
    (stopped,) = llm.generate("stop token", GREEDY.replace(stop_token_ids=[third]))
    count = plain.token_ids.index(third)
    assert stopped.token_ids == plain.token_ids[: count + 1]
    assert stopped.text == llm.tokenizer.decode(plain.token_ids[:count])
    assert stopped.finish_reason is FinishReason.STOP
    params = GREEDY.replace(stop_token_ids=[third], include_stop_str_in_output=True)
    assert llm.generate("stop token", params)[0].text == llm.tokenizer.decode(stopped.token_ids)


def test_max_tokens_none_fills_the_context(llm: LLM) -> None:
    (output,) = llm.generate([1] * 240, GREEDY.replace(max_tokens=None))
    assert len(output.token_ids) == 16


def test_seeds_make_samples_repeatable(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    first, second = llm.generate(["a", "a"], params)
    assert first.token_ids == second.token_ids
    other, unseeded = llm.generate(["a", "a"], [params.replace(seed=6), params.replace(seed=None)])
    assert len({first.token_ids, other.token_ids, unseeded.token_ids}) == 3


def test_the_engine_seed_decides_for_requests_without_one(folder: Path) -> None:
    def sampled(seed: int) -> tuple[int, ...]:
        with LLM(str(folder), seed=seed) as llm:
            return llm.generate("a", SamplingParams(max_tokens=12))[0].token_ids

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_a_stream_is_the_text_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate("stream", GREEDY)
    pieces = list(llm.stream("stream", GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert sum((piece.token_ids for piece in pieces), ()) == whole.token_ids
    assert [piece.finish_reason for piece in pieces][-1] is FinishReason.LENGTH
    assert {piece.finish_reason for piece in pieces[:-1]} == {None}


def test_leaving_a_stream_frees_its_seat_and_pages(llm: LLM) -> None:
    stream = llm.stream("leave", GREEDY.replace(max_tokens=100))
    next(stream)
    assert llm.stats()["num_running"] == 1
    stream.close()
    stats = llm.stats()
    assert stats["num_running"] == 0
    assert stats["num_free_pages"] == stats["num_pages"]
    llm.stream("never started", GREEDY)
    assert llm.stats()["num_waiting"] == 0


def test_a_stream_that_has_stopped_frees_its_seat_before_it_is_read(llm: LLM) -> None:
    (plain,) = llm.generate("stop here", GREEDY)
    params = GREEDY.replace(max_tokens=200, stop=plain.text[2:4])
    stopping, other = llm.stream("stop here", params), llm.stream("x", GREEDY)
    next(stopping)
    for _ in other:
        pass
    assert llm.stats()["num_running"] == 0
    stopping.close()


def test_one_bad_prompt_is_refused_before_anything_runs(llm: LLM) -> None:
    steps = llm.stats()["num_steps"]
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["fine", ""])
    with pytest.raises(UnprocessableError, match="outside the vocabulary"):
        llm.generate([[1, 2], [99_999]])
    with pytest.raises(RequestError, match="length is 256 tokens"):
        llm.generate([[1] * 250], SamplingParams(max_tokens=7))
    with pytest.raises(RequestError, match="text or a list of token ids"):
        llm.generate([3.5])  # type: ignore[arg-type]
    for prompt in (None, 5):
        with pytest.raises(RequestError, match="text or a list of token ids"):
            llm.generate(prompt)  # type: ignore[arg-type]
    for params in ({"max_tokens": 3}, 5, [{"max_tokens": 3}], "x"):
        with pytest.raises(RequestError, match="must be SamplingParams"):
            llm.generate("a", params)  # type: ignore[arg-type]
    assert llm.stats()["num_steps"] == steps


def test_a_closed_llm_says_so(folder: Path) -> None:
    llm = LLM(str(folder))
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("x")


def test_a_failing_step_fails_loudly_and_frees_everything(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(plan: object) -> None:
        raise RuntimeError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(llm.core.runner, "execute", broken)
        with pytest.raises(EngineError, match="failed while computing"):
            llm.generate("x", GREEDY)
    stats = llm.stats()
    assert stats["num_free_pages"] == stats["num_pages"]
    assert len(llm.generate("x", GREEDY)[0].token_ids) == 8


# Settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_batchsize": 4},
            "max_batchsize: there is no such setting; did you mean 'max_batch_size'",
        ),
        ({"zzz": 1}, "zzz: there is no such setting; known: "),
        ({"dtype": "int3"}, "dtype: must be one of auto, bfloat16"),
        ({"dtype": None}, "dtype: must be given"),
        (
            {"device": "cuda:"},
            "device: must be one of auto, cpu, cuda, or cuda:N for the GPU number",
        ),
        ({"device": "gpu"}, "not 'gpu'"),
        ({"max_batch_size": 0}, "max_batch_size: must be at least 1"),
        ({"max_batch_size": 1.5}, "max_batch_size: must be an integer"),
        ({"max_batch_size": True}, "max_batch_size: must be an integer"),
        ({"batch_wait_timeout_s": float("nan")}, "batch_wait_timeout_s: must be at least 0"),
        ({"batch_wait_timeout_s": float("inf")}, "batch_wait_timeout_s: must be a finite number"),
        ({"batch_wait_timeout_s": "1"}, "batch_wait_timeout_s: must be a number"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching: must be True or False"),
        (
            {"scheduler_policy": "lifo"},
            f"{SCHEDULER_POLICIES[-1]}, or module:function of your own; not",
        ),
        ({"model": 5}, "model: must be a string, not int"),
        ({"batching_mode": "dynamic"}, "must be one of continuous, static, sequential"),
        ({"kv_cache_backend": "slotted", "page_size": 4}, "page_size: kv_cache_backend='slotted'"),
        ({"kv_cache_backend": "slotted", "enable_prefix_caching": True}, "cannot share pages"),
        ({"kv_cache_backend": "contiguous"}, "needs batching_mode='static'"),
        ({"kv_cache_backend": "none", "enable_prefix_caching": True}, "cannot share pages"),
        ({"kv_cache_backend": "none", "page_size": 4}, "page_size: kv_cache_backend='none'"),
        ({"kv_cache_backend": "none", "max_step_ms": 5.0}, "max_step_ms: cuts prompts"),
        ({"kv_cache_backend": "none", "scheduler_policy": "prefill_first"}, "only 'fcfs'"),
        ({"scheduler_policy": "prefill_first", "batching_mode": "static"}, "only 'fcfs'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_be_right(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(**settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_seq_len": 257}, "exceeds the model's own limit 256"),
        ({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes: "),
        ({"kv_cache_backend": "slotted", "kv_cache_memory_bytes": 100_000}, "lower max_batch_size"),
        ({"kv_cache_backend": "none", "max_num_batched_tokens": 255}, "255 is less than"),
        ({"device": "cuda"}, "finds no CUDA device"),
        ({"device": "cuda:1"}, "'cuda:1' was asked for, but torch finds no CUDA device"),
    ],
)
def test_a_setting_that_does_not_go_with_model_or_machine(
    folder: Path, settings: dict[str, object], message: str
) -> None:
    import torch

    if "device" in settings and torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(ConfigError) as caught:
        LLM(str(folder), **settings)
    assert message in str(caught.value)


def test_dummy_weights_need_only_a_config(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with LLM(str(tmp_path), load_format="dummy") as llm:
        first = llm.generate([[1, 2, 3]], GREEDY)[0].token_ids
    with LLM(str(tmp_path), load_format="dummy") as llm:
        assert llm.generate([[1, 2, 3]], GREEDY)[0].token_ids == first
    with pytest.raises(LoadError, match="tokenizer"):
        LLM(str(tmp_path))


def test_what_cannot_be_enforced_of_a_schema_is_dropped_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As the server does: a schema that people pass on is no error."""
    value = {"type": "string", "format": "path", "maxLength": 3}
    schema: dict[str, Any] = {"type": "object", "properties": {"v": value}, "required": ["v"]}
    schema["additionalProperties"] = False
    sampling = SamplingParams(grammar=Grammar.json(schema), max_tokens=40, temperature=0)
    with LLM(max_seq_len=128) as llm:
        [plain] = llm.generate("Hi", sampling)
        [said] = llm.chat([{"role": "user", "content": "Hi"}], sampling)
        bare = llm.make_request("Hi", Sampling(grammar=Grammar.json(schema)))
    for output in (plain, said):
        assert len(json.loads(output.text)["v"]) <= 3
    assert "path" not in str(bare.sampling.grammar)
    assert "not enforced: properties.v: format 'path'" in caplog.text
