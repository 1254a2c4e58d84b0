"""`BodyReader`: a request's body becomes a wire model, if it is meant for the model served here."""

from __future__ import annotations

from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from infer.server.http.error_responses import IGNORED, HttpError
from infer.server.offload import Offload
from infer.server.openai import schema_base
from infer.server.openai.schema import Body

W = TypeVar("W", bound=Body)


class BodyReader:
    """It has one model's name; a large body is read in a thread."""

    def __init__(self, offload: Offload, model_name: str) -> None:
        self._offload = offload
        self._model_name = model_name

    async def read_object(self, http: HttpRequest) -> dict[str, Any]:
        """The JSON object that the body is; see `Offload.read_object`."""
        return await self._offload.read_object(http)

    async def validate(self, http: HttpRequest, model: type[W], body: dict[str, Any]) -> W:
        """`body` as a `model`; raises 400 or 422, and 404, or the
        body's own status, where it names another model."""
        return await self._offload.run(http, self._validated, http, model, body)

    def _validated(self, http: HttpRequest, model: type[W], body: dict[str, Any]) -> W:
        wire = schema_base.read(model, body, http.scope[IGNORED])
        if wire.model not in (None, self._model_name):  # there is one: its name may be left out
            message = f"there is no such model here; this server has {self._model_name!r}"
            status = model.unknown_model_status
            raise HttpError(status, message, param="model", code="model_not_found")
        return wire
