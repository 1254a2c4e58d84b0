"""The calls of the other modules for a server of several models, one of them, none, or another.

The models differ in their chat templates: one takes one call at a time, one neither rules nor
tools, so that histories are brought into other forms.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from infer.models.hub import SHIPPED_FOLDER
from tests.fuzz import chats, endpoints, grammars, session_calls, texts
from tests.fuzz.call import MODEL, Call, CallSequence
from tests.support.tool_conversations import OWN

OTHERS = ("llama32", "strict")
"""Names of models, and of their templates in `OWN`."""
NAMES = [MODEL, *OTHERS, *OTHERS, "gone", "", None, 5]


def models(folder: Path) -> dict[str, Path]:
    """The folder of each model, by its name; those of others are written below `folder`."""
    made = {MODEL: SHIPPED_FOLDER}
    for name in OTHERS:
        made[name] = shutil.copytree(SHIPPED_FOLDER, folder / name)
        (made[name] / "chat_template.jinja").write_text(OWN[name][0], encoding="utf-8")
    return made


def for_model(call: Call, name: object) -> Call:
    """The call, to a model: named in the body, or in the query where there is no body."""
    if isinstance(call.body, dict):
        return replace(call, body={**call.body, "model": name})
    if call.body == b"" and name is not None and "?" not in call.path:
        return replace(call, path=f"{call.path}?model={name}")
    return call


def calls() -> SearchStrategy[Call | CallSequence]:
    """Each call for a model of its own, in a sequence too."""
    names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4)

    def named(made: Call | CallSequence, names: list[object]) -> Call | CallSequence:
        if isinstance(made, Call):
            return for_model(made, names[0])
        calls = enumerate(made.calls)
        return CallSequence(tuple(for_model(it, names[i % len(names)]) for i, it in calls))

    some = st.one_of(chats.calls(), chats.calls(), endpoints.calls(), endpoints.calls(),
                     grammars.calls(), texts.calls(), session_calls.calls())  # fmt: skip
    return st.builds(named, some, names)
