"""The frozen records that cross between the engine and its callers: requests, outputs, errors.

`SamplingParams` and `Request` travel inward; `StepOutput` and `StepEvents` travel outward. All are
frozen records of numbers, strings and tuples, so that a message boundary (thread, process, machine)
can be put between the two sides without changing either. `TextDelta` and `RequestOutput` are what
callers of the façades see. The records check values (a `Request` that exists is valid); they know
no model and no tokenizer.
"""

from __future__ import annotations

from infer.types.ends import FinishReason as FinishReason
from infer.types.error_record import ErrorRecord as ErrorRecord
from infer.types.request import Request as Request
from infer.types.request_output import RequestOutput as RequestOutput
from infer.types.request_output import TextDelta as TextDelta
from infer.types.sampling import Sampling as Sampling
from infer.types.sampling import SamplingParams as SamplingParams
from infer.types.step_output import StepOutput as StepOutput
from infer.types.step_output import TokenLogprobs as TokenLogprobs
