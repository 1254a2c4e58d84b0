"""A custom scheduling policy: sequences with the fewest prompt tokens left to compute come first.

A policy gets the sequences that have a seat, in order of arrival, and returns the order in which
they get tokens of the step. A sequence without a token for four steps is owed one, and what is no
order of all sequences is not used, so a policy can neither starve a request nor change its tokens.
It is named as `module:function`, here and in
`infer serve --scheduler-policy own_policy:shortest_prompt_first`.
"""

from collections.abc import Sequence
from typing import Any

from infer import LLM, SamplingParams

LONG, SHORT = "Once upon a time " + "there was a fox and " * 60, "Once upon a time"


def shortest_prompt_first(seated: Sequence[Any]) -> list[Any]:
    """The policy. `num_remaining` is 1 in decode; before, it counts prompt tokens to compute."""
    return sorted(seated, key=lambda sequence: sequence.num_remaining)


def order_of_first_tokens(policy: str) -> list[str]:
    """The order in which a long and a short prompt, added together, get their first tokens."""
    with LLM(scheduler_policy=policy, max_num_batched_tokens=64) as llm:
        for name, prompt in (("long", LONG), ("short", SHORT)):
            sampling_params = SamplingParams(temperature=0, max_tokens=4)
            llm.core.add(llm.make_request(prompt, sampling_params, request_id=name))
        seen: list[str] = []
        while llm.core.has_work:
            for output in llm.core.step(flush=True):
                if output.request_id not in seen:
                    seen.append(output.request_id)
        return seen


def main() -> None:
    """Compare the policy with the default one."""
    for policy in ("fcfs", "own_policy:shortest_prompt_first"):
        print(f"{policy}: first tokens in the order {order_of_first_tokens(policy)}")


if __name__ == "__main__":
    main()
