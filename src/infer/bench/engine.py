"""The engine in this process as a target of the driver: `infer bench offline`.

The target is `AsyncLLM`, on which the server stands too, without HTTP. torch is imported when an
engine is built, not before.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from infer.bench.drive import Piece, Prompt, Usage
from infer.bench.recording import Recorder
from infer.config import EngineConfig
from infer.engine.client.async_llm import AsyncLLM
from infer.types import SamplingParams
from infer.types.stats_summary import ServingStats


class EngineTarget:
    """A target that takes token ids and answers with token ids."""

    def __init__(self, llm: AsyncLLM, *, ignore_eos: bool = True) -> None:
        self.llm = llm
        self._ignore_eos = ignore_eos

    def prompt(self, planned: Prompt) -> Prompt:
        """The prompt itself; the text of a trace becomes token ids."""
        if isinstance(planned, str):
            return self.llm.make_request(planned, SamplingParams(max_tokens=1)).prompt_token_ids
        return planned

    async def send(
        self, prompt: Prompt, output_len: int, temperature: float = 0.0
    ) -> AsyncGenerator[Piece, None]:
        """The answer, in one piece for each token."""
        sampling = SamplingParams(
            temperature=temperature, max_tokens=output_len, ignore_eos=self._ignore_eos
        )
        request = self.llm.make_request(prompt, sampling)
        count = 0
        async with self.llm.stream(request, merge=False) as pieces:
            async for piece in pieces:
                if piece.error is not None:
                    raise piece.error.exception()
                count += len(piece.token_ids)
                usage = None
                if piece.finish_reason is not None:
                    usage = Usage(len(prompt), count, piece.num_cached)
                yield Piece(len(piece.token_ids), piece.token_ids, usage)

    def stats(self) -> ServingStats:
        """The engine's statistics since it was made."""
        return self.llm.read_stats()


@asynccontextmanager
async def engine_target(
    config: EngineConfig, *, ignore_eos: bool, recorder: Recorder | None = None
) -> AsyncIterator[EngineTarget]:
    """Loads a model and starts an engine; stops it at the end of the block. `recorder` keeps the
    engine's steps."""
    from infer.engine.build.assemble import build_async_llm  # this imports torch

    llm = build_async_llm(config)
    if recorder is not None:
        llm.observe(recorder)
    async with llm:
        yield EngineTarget(llm, ignore_eos=ignore_eos)
