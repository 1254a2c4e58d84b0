"""What is answered about requests: a list, the story of one, its end; of one engine or several."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from infer.errors import RequestError
from infer.server.http.error_responses import HttpError
from infer.server.observe.request_trace import Stories, Story, not_found, summary, view
from infer.server.tenancy.limits import tenant_of


def listed(all_stories: Sequence[Stories], http: HttpRequest) -> Response:
    """Those that run, then the latest that have ended, the newest first."""
    sight = tenant_of(http.scope).sight
    found = [story for stories in all_stories for story in stories.all(sight)]
    found.sort(key=_newest_first)
    return JSONResponse({"object": "list", "data": list(map(summary, found))})


def _newest_first(story: Story) -> tuple[bool, float]:
    if story.ended_s is None:
        return False, -story.visit.received_s
    return True, -story.ended_s


def shown(all_stories: Sequence[Stories], http: HttpRequest) -> Response:
    """The story of the one that the path names."""
    return JSONResponse(view(_found(all_stories, http)[1]))


def cancelled(all_stories: Sequence[Stories], http: HttpRequest) -> Response:
    """The one that the path names has ended, or ends now."""
    stories, story = _found(all_stories, http)
    done = stories.cancel(story)
    return JSONResponse({"id": story.id, "object": "request.cancel", "cancelled": done})


def _found(all_stories: Sequence[Stories], http: HttpRequest) -> tuple[Stories, Story]:
    sight, name = tenant_of(http.scope).sight, http.path_params["id"]
    error: RequestError = not_found()
    for stories in all_stories:
        try:
            return stories, stories.find(name, sight)
        except HttpError as missing:
            error = missing
    raise error
