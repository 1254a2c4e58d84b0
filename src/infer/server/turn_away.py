"""`TurnAway`: refuses generating requests by their headers while the engine has no room for more"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import OverloadedError
from infer.server.http.anthropic_errors import is_anthropic
from infer.server.http.context import RequestContext
from infer.server.http.error_forms import anthropic_response
from infer.server.http.error_responses import describe
from infer.server.http.paths import canonical_path


class TurnAway:
    """Under overload nearly all requests are refused. A request that is refused here costs no task,
    no reading of its body and no pass through the app's layers; the answer, the log and the
    counters are the same. It is used by servers without keys only: with keys, a request must be
    authenticated first."""

    def __init__(
        self,
        engine: AsyncLLM,
        paths: Collection[str],
        on_end: Sequence[Callable[[RequestContext], None]] = (),
        overload_status: int = OverloadedError.status,
    ) -> None:
        """`paths`: of the endpoints that generate. `on_end` is called with each refused request, as
        the outermost layer does with all others. `overload_status`: see `describe`."""
        self._engine = engine
        self._paths = paths
        self._on_end = on_end
        self._overload_status = overload_status

    def __call__(self, scope: Scope) -> Response | None:
        """The refusal of a request by its headers; None if the app is to answer it.

        The app answers all requests with an Origin, which browsers send, because its layers for
        hosts and origins come first.
        """
        if scope["method"] != "POST" or canonical_path(scope["path"]) not in self._paths:
            return None
        if any(name == b"origin" for name, _ in scope["headers"]):
            return None
        error = self._engine.refusal()
        if error is None:
            return None
        context = RequestContext.of(scope)
        response = describe(error, self._overload_status)
        if is_anthropic(canonical_path(scope["path"]), Headers(scope=scope)):
            response = anthropic_response(response, context.shown_id)
        context.status, context.model = response.status_code, self._engine.model_name
        response.raw_headers += context.standard_headers
        for listener in self._on_end:
            listener(context)
        return response
