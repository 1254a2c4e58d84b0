"""Spans for OpenTelemetry: one for each request to the model, with `gen_ai.*` attributes.

A span is written when its story has ended, from the story's own times, so tracing costs nothing
while tokens flow. Where to send them is said by the SDK's environment (`OTEL_EXPORTER_OTLP_…`). A
client's `traceparent` is the parent. Needs the extra `otel`; imported only with `--tracing`.
"""

from __future__ import annotations

from collections.abc import Callable

from infer.errors import ConfigError
from infer.server.observe.request_trace import Story
from infer.types.ends import NORMAL_OUTCOMES


def make_tracing(model_name: str) -> Callable[[Story], None]:
    """What is to be called with each story that has ended."""
    try:
        from opentelemetry import propagate, trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        message = "needs the packages of the extra: pip install 'infer[otel]'"
        raise ConfigError("tracing", message) from None
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
    tracer = trace.get_tracer("infer")

    def send(story: Story) -> None:
        visit = story.visit

        def ns(at_s: float | None) -> int:
            assert at_s is not None
            return int((visit.received_at + at_s - visit.received_s) * 1e9)

        kind = "chat" if story.id.startswith("chat") else "text_completion"
        carrier = {"traceparent": visit.traceparent} if visit.traceparent else {}
        span = tracer.start_span(
            f"{kind} {model_name}",
            context=propagate.extract(carrier),
            kind=trace.SpanKind.SERVER,
            start_time=ns(visit.received_s),
            attributes={
                "gen_ai.operation.name": kind,
                "gen_ai.provider.name": "infer",
                "gen_ai.request.model": model_name,
                "gen_ai.response.model": model_name,
                "gen_ai.response.id": story.id,
                "gen_ai.response.finish_reasons": [story.outcome or ""],
                "gen_ai.request.max_tokens": story.max_tokens,
                "gen_ai.usage.input_tokens": story.num_prompt,
                "gen_ai.usage.output_tokens": story.sum_of("num_tokens"),
                "gen_ai.usage.cache_read.input_tokens": story.sum_of("num_cached"),
            },
        )
        for name, attribute in (("admitted", "admitted_s"), ("first token", "first_s")):
            if (at_s := story.earliest(attribute)) is not None:
                span.add_event(name, timestamp=ns(at_s))
        if story.outcome not in NORMAL_OUTCOMES:
            span.set_status(trace.StatusCode.ERROR, story.outcome)
        span.end(ns(story.ended_s))

    return send
