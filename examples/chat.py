"""A conversation: each answer is streamed and added to the messages of the next question."""

from infer import LLM, SamplingParams

QUESTIONS = ["Tell me a story about a fox.", "And what did the bird say?"]


def main() -> None:
    """Ask the questions one after the other and print each answer while it is generated."""
    history = []
    sampling_params = SamplingParams(temperature=0.7, seed=1, max_tokens=60)
    with LLM() as llm:
        for question in QUESTIONS:
            print(f"\n> {question}")
            history.append({"role": "user", "content": question})
            answer = ""
            for piece in llm.stream(history, sampling_params):
                answer += piece.text
                print(piece.text, end="", flush=True)
            print()
            history.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
