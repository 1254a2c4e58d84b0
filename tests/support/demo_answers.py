"""Answers of the model that ships."""

from __future__ import annotations

from typing import Any

from infer.config import EngineConfig
from infer.engine.build.assemble import build_async_llm
from tests.support.serving import App, with_app


def demo(path: str, *bodies: dict[str, Any], **settings: Any) -> list[Any]:
    engine = build_async_llm(EngineConfig(max_seq_len=256, served_model_name="m", **settings))

    async def use(app: App) -> list[Any]:
        replies = [await app.post(path, {"temperature": 0, **body}) for body in bodies]
        assert {reply.status for reply in replies} == {200}, replies
        return [
            r.events() if body.get("stream") else r.json()
            for r, body in zip(replies, bodies, strict=True)
        ]

    return with_app(engine, use)
