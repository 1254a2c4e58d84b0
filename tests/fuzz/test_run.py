"""A few examples of the fuzzer's kinds; hours of them: `python tests/fuzz/run.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.models.hub import SHIPPED_FOLDER
from infer.server.comparisons import MAX_S
from tests.fuzz.call import Call
from tests.fuzz.checkpoint_files import ByteEdit, Damage
from tests.fuzz.json_edits import JsonEdit
from tests.fuzz.run import DEADLINE_S, KINDS, deadline_of, run, strategy_of, try_examples
from tests.support.hostile_files import Loader

OTHERS = ["several models", "files"]


@pytest.mark.parametrize(
    "kinds",
    [
        [kind for kind in KINDS if kind not in OTHERS],
        pytest.param(OTHERS, marks=pytest.mark.slow),
    ],
    ids=["one server", "more"],
)
@pytest.mark.timeout(300)
def test_nothing_breaks(kinds: list[str]) -> None:
    found = run(kinds, 2, 18, max_calls=5)
    assert found["findings"] == []
    assert found["examples"] == dict.fromkeys(kinds, 5)
    assert (found["exits"], found["restarts"], found["5xx"]) == (0, 0, 0)


def test_a_call_that_breaks_something_is_made_small() -> None:
    def check(call: Call) -> None:
        assert b"guided" not in call.content

    with pytest.raises(AssertionError) as caught:
        try_examples(check, strategy_of("grammars"), 100, 1)
    told = "\n".join(getattr(caught.value, "__notes__", ()))
    assert "guided_" in told
    assert len(told) < 1500


def test_what_breaks_once_and_not_again_is_told() -> None:
    num_broken = 0

    def check(call: Call) -> None:
        nonlocal num_broken
        if b"guided" in call.content:
            num_broken += 1
            assert num_broken > 1, "no answer"

    with pytest.raises(AssertionError, match="once, and not again: no answer") as caught:
        try_examples(check, strategy_of("grammars"), 100, 1)
    assert any("guided_" in note for note in caught.value.__notes__)


def test_a_deadline_is_that_of_the_route_however_the_path_is_written() -> None:
    paths = ("/v1/engine/comparisons", "//v1/engine//comparisons/?a=/", "/v1/engine/%63omparisons")
    assert {deadline_of(path) for path in paths} == {MAX_S + 30}
    assert deadline_of("/v1/engine/comparisons/x") == deadline_of("/v1/models") == DEADLINE_S


def test_calls_are_sent_as_they_say() -> None:
    assert Call("POST", "/x", {"a": "é"}).content == b'{"a": "\\u00e9"}'
    assert Call("POST", "/x", {"a": 1}).sent_headers == {"Content-Type": "application/json"}
    assert Call("GET", "/x").content == b""
    assert Call("POST", "/x", b"{", {"A": "b"}).sent_headers == {"A": "b"}


def test_damages_do_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "a").symlink_to(SHIPPED_FOLDER)
    loader = Loader()

    def kind(file: str, *edits: ByteEdit | JsonEdit) -> str:
        folder = Damage("a", file, edits).write(tmp_path / "bases", tmp_path / "it")
        return loader.load(folder).kind

    try:
        assert kind("config.json", JsonEdit((10**6, 0), 1)) in ("loaded", "LoadError")
        assert kind("config.json", JsonEdit((), [])) == "LoadError"
        assert kind("model.safetensors", ByteEdit(0, 8, b"\xff" * 8)) == "LoadError"
        assert kind("model.safetensors", JsonEdit((1,), None, is_removed=True)) == "LoadError"
        assert kind("chat_template.jinja", ByteEdit(0, 0, b"a")) == "loaded"
    finally:
        loader.close()
    # A rewritten header keeps the data behind it where it was.
    content = (SHIPPED_FOLDER / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    changed = JsonEdit((0,), {"format": "pt"}).apply(content)
    new_size = int.from_bytes(changed[:8], "little")
    assert changed[8 + new_size :] == content[8 + size :]
