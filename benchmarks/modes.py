"""Four ways to compute the same 64 mixed requests: `python benchmarks/modes.py`.

It runs them without a KV cache and in each batching mode with the model that ships, checks that the
greedy tokens of every request are the same in all, and prints the table of docs/architecture.md.
Steps and tokens are exact; the time is this machine's, and no test uses it. `--picture
docs/modes.png` draws which request had which seat in which step, from a recorded run of 16 of the
requests on 4 seats.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

from infer import LLM, SamplingParams
from infer.bench.comparison import NUM_REQUESTS, mixed

SEATS = 8
WAYS: dict[str, dict[str, Any]] = {
    "no cache": {"batching_mode": "sequential", "kv_cache_backend": "none"},
    "cache": {"batching_mode": "sequential"},
    "static": {"batching_mode": "static"},
    "continuous": {"batching_mode": "continuous"},
}
"""Each row of the table, which adds one idea to the row before, with its settings."""


class Turn(NamedTuple):
    """The seat of one request in one step."""

    step: int
    seat: int
    request: int
    is_prompt: bool


def recorded(mode: str, num_requests: int, num_seats: int) -> list[Turn]:
    """The seats of each step; all requests are there from the start."""
    turns: list[Turn] = []
    seats: dict[str, int] = {}
    with LLM(dtype="float32", batching_mode=mode, max_batch_size=num_seats) as llm:
        for number, (prompt, params) in enumerate(zip(*mixed(), strict=True)):
            if number < num_requests:
                llm.core.add(llm.make_request(prompt, params, request_id=str(number)))
        step = 0
        while llm.core.has_work:
            before = {s.request_id: s.num_output for s in llm.core.scheduler.unfinished}
            moved = {o.request_id for o in llm.core.step(flush=True)}
            seated = {s.request_id for s in llm.core.scheduler.running} | moved
            seats = {name: seat for name, seat in seats.items() if name in seated}
            for name in sorted(seated, key=int):
                free = min(set(range(num_seats)) - set(seats.values()), default=0)
                seat = seats.setdefault(name, free)
                turns.append(Turn(step, seat, int(name), before[name] == 0))
            step += 1
    return turns


def draw(path: Path, num_requests: int = 16, num_seats: int = 4) -> None:
    """Draws the picture: a lane for each seat, a colour for each request, gaps for free seats."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    modes = ("sequential", "static", "continuous")
    runs = {mode: recorded(mode, num_requests, num_seats) for mode in modes}
    longest = max(turn.step for turns in runs.values() for turn in turns) + 1
    colours = [plt.get_cmap("tab20")(i) for i in range(20)]
    heights = [1, num_seats, num_seats]
    figure, panels = plt.subplots(
        3, 1, figsize=(11, 5.2), sharex=True, height_ratios=heights, layout="constrained"
    )
    for panel, mode, num_lanes in zip(panels, modes, heights, strict=True):
        for turn in runs[mode]:
            colour = colours[turn.request % len(colours)]
            panel.broken_barh(
                [(turn.step, 1)],
                (turn.seat + 0.08, 0.84),
                color=colour,
                hatch="////" if turn.is_prompt else None,
                edgecolor="black" if turn.is_prompt else colour,
                linewidth=0.2,
            )
        num_steps = max(turn.step for turn in runs[mode]) + 1
        used = len(runs[mode]) / (num_steps * num_lanes)
        panel.set_title(f"{mode}: {num_steps} steps, {used:.0%} of the seats used", loc="left")
        panel.set_ylim(num_lanes, 0)
        panel.set_yticks([lane + 0.5 for lane in range(num_lanes)])
        panel.set_yticklabels([f"seat {lane + 1}" for lane in range(num_lanes)], fontsize=8)
        panel.set_xlim(0, longest)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
        panel.tick_params(length=0)
    panels[-1].set_xlabel("step of the model (hatched: the step that computes a prompt)")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the four ways, compare them and print the table; or draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, help="draw here, and do nothing else")
    arguments = parser.parse_args()
    if arguments.picture:
        draw(arguments.picture)
        return
    prompts, params = mixed()
    tokens = {}
    print(
        "| way | steps | tokens computed | tokens a step | mean sequences a step | padded / real"
        " | seconds |"
    )
    print("|---|---|---|---|---|---|---|")
    for way, settings in WAYS.items():
        with LLM(dtype="float32", max_batch_size=SEATS, **settings) as llm:
            llm.generate("warm up", SamplingParams(max_tokens=4))
            before = llm.stats()
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            after = llm.stats()
        tokens[way] = [output.token_ids for output in outputs]
        steps = after["num_steps"] - before["num_steps"]
        computed = after["num_computed_tokens"] - before["num_computed_tokens"]
        sampled = after["num_sampled_tokens"] - before["num_sampled_tokens"]
        padded = "—"
        if after.get("num_batch_tokens"):
            padded = f"{after['num_padded_tokens'] / after['num_batch_tokens']:.2f}"
        print(
            f"| {way} | {steps:,} | {computed:,} | {computed / steps:.1f} | {sampled / steps:.2f}"
            f" | {padded} | {seconds:.2f} |"
        )
    same = all(each == tokens["no cache"] for each in tokens.values())
    print(f"\ngreedy tokens of all {NUM_REQUESTS} requests equal in the four ways: {same}")
    assert same


if __name__ == "__main__":
    main()
