"""Spans for OpenTelemetry: one for each request to the model, with `gen_ai.*` attributes

A span is made from the times of a trace after its end, so tracing costs nothing while tokens are
sampled. The SDK's variables (`OTEL_EXPORTER_OTLP_…`) say where spans are sent. The client's
`traceparent` is the parent. Needs the extra `otel`; imported only with `--tracing`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from infer.errors import ConfigError
from infer.extras import to_install
from infer.server.observe.request_trace import RequestTrace
from infer.types.ends import NORMAL_OUTCOMES
from infer.version import VERSION


def check_packages() -> None:
    """Raise `ConfigError` without the extra `otel`; called before a model is loaded."""
    try:
        importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        importlib.import_module("opentelemetry.sdk.trace.export")
    except ImportError:
        message = f"needs the packages of an extra: {to_install('otel')}"
        raise ConfigError("tracing", message) from None


def make_tracing(model_name: str) -> Callable[[RequestTrace], None]:
    """A function that sends the span of a trace that has ended; see `check_packages`."""
    check_packages()
    from opentelemetry import propagate
    from opentelemetry import trace as otel
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if not isinstance(otel.get_tracer_provider(), TracerProvider):
        named = OTELResourceDetector().detect().attributes  # what OTEL_… variables say wins
        service = {"service.name": "infer", "service.version": VERSION, **named}
        provider = TracerProvider(resource=Resource.create(service))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        otel.set_tracer_provider(provider)
    tracer = otel.get_tracer("infer")

    def send(trace: RequestTrace) -> None:
        context = trace.context

        def ns(at_s: float | None) -> int:
            assert at_s is not None
            return int((context.received_at + at_s - context.received_s) * 1e9)

        kind = "chat" if trace.id.startswith("chat") else "text_completion"
        carrier = {"traceparent": context.traceparent} if context.traceparent else {}
        span = tracer.start_span(
            f"{kind} {model_name}",
            context=propagate.extract(carrier),
            kind=otel.SpanKind.SERVER,
            start_time=ns(context.received_s),
            attributes={
                "gen_ai.operation.name": kind,
                "gen_ai.provider.name": "infer",
                "gen_ai.request.model": model_name,
                "gen_ai.response.model": model_name,
                "gen_ai.response.id": trace.id,
                "gen_ai.response.finish_reasons": [trace.outcome or ""],
                "gen_ai.request.max_tokens": trace.max_tokens,
                "gen_ai.usage.input_tokens": trace.num_prompt,
                "gen_ai.usage.output_tokens": trace.sum_of("num_tokens"),
                "gen_ai.usage.cache_read.input_tokens": trace.sum_of("num_cached"),
            },
        )
        if trace.batches:
            span.set_attribute("infer.batch.ids", trace.batch_ids)
        if trace.replicas:
            span.set_attribute("infer.replicas", trace.replicas)
        for name, attribute in (("admitted", "admitted_s"), ("first token", "first_s")):
            if (at_s := trace.earliest(attribute)) is not None:
                span.add_event(name, timestamp=ns(at_s))
        if trace.outcome not in NORMAL_OUTCOMES:
            span.set_status(otel.StatusCode.ERROR, trace.outcome)
        span.end(ns(trace.ended_s))

    return send
