"""The engine core without a server: add requests, run steps, read outputs. See docs/core.md."""

from infer import LLM, SamplingParams

PROMPTS = ["Once upon a time", "One day, a little bird", "The fox said"]


def main() -> None:
    """Serve three prompts with two seats; the third starts when one of the others has ended."""
    with LLM(max_batch_size=2) as llm:
        core = llm.core
        for number, prompt in enumerate(PROMPTS):
            sampling_params = SamplingParams(temperature=0, max_tokens=8 * (number + 1))
            core.add(llm.make_request(prompt, sampling_params, request_id=str(number)))
        while core.has_work:
            outputs = core.step(flush=True)
            tokens = {o.request_id: o.token_id for o in outputs if o.token_id is not None}
            shown = {name: llm.tokenizer.token_piece(token) for name, token in tokens.items()}
            print(f"waiting {len(core.scheduler.waiting)}, tokens {shown}")


if __name__ == "__main__":
    main()
