"""`TurnAway`: refuses generating requests at their heads while the engine has no room for more.

Under overload nearly all requests end with 503. One that is refused here costs neither a task, nor
its body, nor a pass through the app's layers; the answer, the log and the counters are the same.
Only for servers without keys: with keys, whose request it is decides first what the answer is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from starlette.responses import Response
from starlette.types import Scope

from infer.engine.client.async_llm import AsyncLLM
from infer.server.http.context import RequestContext
from infer.server.http.error_responses import describe


class TurnAway:
    """See the module's docstring."""

    def __init__(
        self,
        engine: AsyncLLM,
        paths: Collection[str],
        on_end: Sequence[Callable[[RequestContext], None]] = (),
    ) -> None:
        """`paths`: of the endpoints that generate. `on_end` is called with each refused request, as
        the outermost layer does with all others."""
        self._engine = engine
        self._paths = paths
        self._on_end = on_end

    def __call__(self, scope: Scope) -> Response | None:
        """The refusal of a request, of which only the head has come; None: the app answers it.

        The app also answers browsers, whose requests have an Origin: its layers for hosts and for
        other origins come before everything else.
        """
        if scope["method"] != "POST" or scope["path"] not in self._paths:
            return None
        if any(name == b"origin" for name, _ in scope["headers"]):
            return None
        error = self._engine.refusal()
        if error is None:
            return None
        context = RequestContext.of(scope)
        response = describe(error)
        context.status = response.status_code
        response.headers["x-request-id"] = context.shown_id
        response.headers["x-content-type-options"] = "nosniff"
        for listener in self._on_end:
            listener(context)
        return response
