"""`SupervisorState`: the properties of each state, and the transitions that the table allows."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from infer.replicas.supervisor_state import TRANSITIONS, Lifecycle, SupervisorState
from tests.support.cases import over
from tests.support.doubles import launch_hash_llm, pid_of

NEW, LOADING, LOADED, SERVING, RESTARTING, REFUSING, STOPPING, STOPPED, DEAD = SupervisorState
PATHS = {
    NEW: (),
    LOADING: (LOADING,),
    LOADED: (LOADING, LOADED),
    SERVING: (LOADING, LOADED, SERVING),
    RESTARTING: (LOADING, LOADED, SERVING, RESTARTING),
    REFUSING: (LOADING, LOADED, SERVING, RESTARTING, REFUSING),
    STOPPING: (STOPPING,),
    STOPPED: (STOPPING, STOPPED),
    DEAD: (DEAD,),
}


def at(state: SupervisorState) -> Lifecycle:
    lifecycle = Lifecycle()
    for to in PATHS[state]:
        assert lifecycle.move(to)
    assert lifecycle.state is state
    return lifecycle


@over("to", SupervisorState)
@over("state", SupervisorState)
def test_only_the_moves_of_the_table_exist(state: SupervisorState, to: SupervisorState) -> None:
    lifecycle = at(state)
    if to in TRANSITIONS[state]:
        assert lifecycle.move(to)
        assert lifecycle.state is to
    elif state.is_ending:  # a stop has priority
        assert not lifecycle.move(to)
        assert lifecycle.state is state
    else:
        with pytest.raises(RuntimeError, match=f"is {state.value} cannot be {to.value}"):
            lifecycle.move(to)
        assert lifecycle.state is state


@pytest.mark.parametrize("state", SupervisorState)
def test_each_state_says_what_it_is(state: SupervisorState) -> None:
    assert state.has_worker == (state in (LOADED, SERVING))
    assert state.is_ending == (state in (STOPPING, STOPPED, DEAD))
    assert state.is_ending != (STOPPING in TRANSITIONS[state])


@pytest.mark.parametrize("state", SupervisorState)
def test_to_stop_is_possible_everywhere_and_wakes_who_waits(state: SupervisorState) -> None:
    lifecycle = at(state)
    if not state.is_ending:
        assert not lifecycle.wait_for_stop(0.001)
        threading.Timer(0.02, lifecycle.stop).start()
    assert lifecycle.wait_for_stop(10)
    assert lifecycle.stop() is (state if state.is_ending else STOPPING)
    assert lifecycle.state is (state if state.is_ending else STOPPING)


def test_a_process_that_dies_leads_through_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SupervisorState] = []
    move = Lifecycle.move

    def watched(self: Lifecycle, to: SupervisorState) -> bool:
        moved = move(self, to)
        if moved:
            seen.append(to)
        return moved

    monkeypatch.setattr(Lifecycle, "move", watched)

    async def main() -> None:
        async with launch_hash_llm() as llm:
            os.kill(pid_of(llm), signal.SIGKILL)
            async with asyncio.timeout(20):
                while seen != [LOADING, LOADED, SERVING, RESTARTING, SERVING]:
                    await asyncio.sleep(0.01)
        assert not llm.is_alive

    asyncio.run(main())
    assert seen[5:] == [STOPPING, STOPPED]
