"""`generate_batch`: a list of prompts to a list of texts in one static batch, with its statistics.

The prompts have different lengths, and none is padded: a step computes exactly the tokens of each.
What padding would have cost is in the statistics.
"""

from infer import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The fox said", "One day, a little bird sat in a tree and"]


def generate_batch(llm: LLM, prompts: list[str], max_new_tokens: int = 20) -> list[str]:
    """The greedy continuations of `prompts`, in their order; each is what its prompt has alone."""
    sampling_params = SamplingParams(temperature=0, max_tokens=max_new_tokens)
    return [output.text for output in llm.generate(prompts, sampling_params)]


def main() -> None:
    """Print the texts, then what the batch was like."""
    with LLM(batching_mode="static", max_batch_size=8) as llm:
        for prompt, text in zip(PROMPTS, generate_batch(llm, PROMPTS), strict=True):
            print(f"{prompt!r} -> {text!r}")
        stats = llm.stats()
        for name in ("mode", "batches_formed", "mean_batch_size", "success_rate"):
            print(f"{name}: {stats[name]}")


if __name__ == "__main__":
    main()
