"""Endpoints about requests: a list, the trace of one, and cancelling; for one engine or several."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from infer.server.observe.request_trace import (
    RequestTrace,
    RequestTraces,
    cancel_answer,
    summary,
    the_one,
    view,
)
from infer.server.tenancy.limits import tenant_of


def listed(all_traces: Sequence[RequestTraces], http: HttpRequest) -> Response:
    """Those that run, then the latest that have ended, the newest first."""
    visible_to = tenant_of(http.scope).visible_to
    found = [trace for traces in all_traces for trace in traces.all(visible_to)]
    found.sort(key=_newest_first)
    return JSONResponse({"object": "list", "data": list(map(summary, found))})


def _newest_first(trace: RequestTrace) -> tuple[bool, float]:
    if trace.ended_s is None:
        return False, -trace.context.received_s
    return True, -trace.ended_s


def shown(all_traces: Sequence[RequestTraces], http: HttpRequest) -> Response:
    """The trace of the request that the path names."""
    return JSONResponse(view(_found(all_traces, http)[1]))


def cancelled(all_traces: Sequence[RequestTraces], http: HttpRequest) -> Response:
    """The one that the path names has ended, or ends now."""
    traces, trace = _found(all_traces, http)
    return JSONResponse(cancel_answer(trace, traces.cancel(trace)))


def _found(
    all_traces: Sequence[RequestTraces], http: HttpRequest
) -> tuple[RequestTraces, RequestTrace]:
    visible_to, name = tenant_of(http.scope).visible_to, http.path_params["id"]
    found = [(traces, trace) for traces in all_traces for trace in traces.named(name, visible_to)]
    meant = the_one([trace for _, trace in found], name)
    return next(pair for pair in found if pair[1] is meant)
