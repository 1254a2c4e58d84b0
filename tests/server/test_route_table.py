"""The table of routes: a row is a route, once, in each app that has the row's endpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from starlette.routing import Mount, Route

from infer.server.app import create_app, layers
from infer.server.fronts import FrontQueries
from infer.server.loaded_models import LoadedModels
from infer.server.multi_model import ModelRouter
from infer.server.request_views import OneServer, RequestViews
from infer.server.route_table import GENERATING, ROUTES
from infer.server.settings import ServerSettings
from tests.support.doubles import make_hash_llm

ROWS = [(method, path) for method, path, _ in ROUTES]
OF_ENGINES = [
    (method, path)
    for method, path, answer in ROUTES
    if answer is getattr(RequestViews, answer.__name__, None)
]


def rows_of(routes: list[Any]) -> list[tuple[str, str]]:
    return [
        (method, route.path)
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    ]


@pytest.fixture
def router() -> ModelRouter:
    make_app = partial(create_app, is_inner=True)
    return ModelRouter(LoadedModels(dict.fromkeys("ab", make_hash_llm), make_app))


def test_one_model_has_every_row_once() -> None:
    generating = [("POST", api.path) for api in GENERATING]
    assert len(set(ROWS)) == len(ROWS)
    assert rows_of(create_app(make_hash_llm()).routes) == [*generating, *ROWS]


def test_several_models_have_the_rows_of_engines_and_pass_the_others_on(
    router: ModelRouter,
) -> None:
    *routes, rest = router.make_app(layers(ServerSettings())).routes
    assert rows_of(routes) == OF_ENGINES
    assert isinstance(rest, Mount)


def test_who_answers_for_requests_answers_all_of_it() -> None:
    assert RequestViews.__abstractmethods__
    for kind in (OneServer, ModelRouter, FrontQueries):
        assert issubclass(kind, RequestViews)
        assert not kind.__abstractmethods__
