"""`OutputProcessor`: turns the tokens of one request into text and ends it at its stop strings"""

from __future__ import annotations

from collections.abc import Sequence

from infer.errors import InferError
from infer.text.stop import StopMatcher
from infer.text.tokenizer import Tokenizer
from infer.types import FinishReason, Request, RequestOutput, StepOutput, TextDelta

_BY_TOKEN = (FinishReason.EOS, FinishReason.STOP)


class OutputProcessor:
    """There is one per request, in the façade, because the core knows no text. Text is held back
    while it could still be part of a stop string or of an unfinished character, so text that was
    given out is never taken back. At a stop string the request has ended for the caller; the owner
    of the processor then aborts it in the core (`take_abort`)."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self.finish_reason: FinishReason | None = None
        self._needs_abort = False
        self._detokenizer = tokenizer.new_detokenizer(
            skip_special_tokens=sampling.skip_special_tokens,
            shown_token_ids=request.shown_token_ids,
        )
        self._stop = StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
        self._keep_end = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._stopped = False

    def push(self, output: StepOutput) -> TextDelta | None:
        """Process one output of the core; returns the new piece for the caller, None after the
        end."""
        if self.finish_reason is not None:
            return None
        text, reason = "", output.finish_reason
        if output.token_id is not None:
            self._num_tokens += 1
            if reason not in _BY_TOKEN or self._keep_end:
                text, stopped = self._show(self._detokenizer.push(output.token_id))
                if stopped:
                    self._needs_abort = reason is None
                    reason = FinishReason.STOP
        if reason is not None and not self._stopped:
            rest, stopped = self._show(self._detokenizer.finish())
            text += rest
            if stopped:
                reason = FinishReason.STOP
            else:
                text += self._stop.finish()
        self.finish_reason = reason
        return TextDelta(
            text,
            () if output.token_id is None else (output.token_id,),
            () if output.logprobs is None else (output.logprobs,),
            reason,
            output.num_cached,
            output.error,
            output.prompt_logprobs,
            output.num_predicted,
            self._stop.found,
        )

    def take_abort(self) -> bool:
        """Whether the request ended here while the core still computes it; True at most once."""
        needs_abort, self._needs_abort = self._needs_abort, False
        return needs_abort

    def _show(self, text: str) -> tuple[str, bool]:
        """The text that may be given out, and whether a stop string was reached."""
        if self._num_tokens < self._min_tokens or not text:
            return text, False
        shown, self._stopped = self._stop.push(text)
        return shown, self._stopped


def error_of(delta: TextDelta) -> InferError:
    """The exception for a request that has ended with an error."""
    assert delta.error is not None, "a request that ends with ERROR says why"
    return delta.error.exception()


def collected(request: Request, pieces: Sequence[TextDelta]) -> RequestOutput:
    """Join all pieces of a request; raises its error if it ended with one."""
    last = pieces[-1]
    assert last.finish_reason is not None
    if last.finish_reason is FinishReason.ERROR:
        raise error_of(last)
    logprobs = tuple(entry for piece in pieces for entry in piece.logprobs)
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        finish_reason=last.finish_reason,
        logprobs=None if request.sampling.logprobs is None else logprobs,
        num_cached=last.num_cached,
        prompt_logprobs=pieces[0].prompt_logprobs,
        num_predicted=max(piece.num_predicted for piece in pieces),
        stop_string=last.stop_string,
    )
