"""OpenTelemetry traces of requests. Times of the engine are those that it reports with an answer."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping

from opentelemetry import context, propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from vlora.errors import BadConfig
from vlora.types import Request, RequestOutput
from vlora.types.composition import BASE, UNKNOWN

_PROTOCOL = "http/protobuf"
_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Tracing:
    """Spans, which a thread sends to the receiver of the variables OTEL_*. model: the base model's name."""

    def __init__(self, model: str) -> None:
        """Raises BadConfig for another protocol than OTLP over HTTP."""
        self._model = model
        protocol = next(filter(None, map(os.environ.get, _VARIABLES)), _PROTOCOL)
        if protocol != _PROTOCOL:
            raise BadConfig(f"OTLP's protocol is {protocol!r} in the environment; traces are sent by {_PROTOCOL} only")
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "vlora"}))
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("vlora")

    @contextlib.contextmanager
    def within(self, carrier: Mapping[str, str]) -> Iterator[None]:
        """Requests in the block continue the trace of a carrier of W3C's `traceparent`."""
        token = context.attach(propagate.extract(carrier))
        try:
            yield
        finally:
            context.detach(token)

    def begin(self, operation: str, tenant: str | None) -> RequestTrace:
        """Begin the trace of a request. operation: by the semantic conventions for generative AI."""
        return RequestTrace(self._tracer, self._model, operation, tenant)

    def close(self) -> None:
        """Send the spans that have ended."""
        self._provider.shutdown()


class RequestTrace:
    """A span of the front end, with children for the phases of the request. Used from the front end's event loop."""

    def __init__(self, tracer: trace.Tracer, model: str, operation: str, tenant: str | None) -> None:
        self._tracer, self._model, self._operation = tracer, model, operation
        self._span = tracer.start_span(operation, kind=trace.SpanKind.SERVER)
        self._within = trace.set_span_in_context(self._span)
        self._counts: Counter[str] = Counter()
        self._reasons: list[str] = []
        if tenant is not None:
            self._span.set_attribute("vlora.tenant", tenant)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A phase that is the block."""
        with self._tracer.start_as_current_span(name, self._within):
            yield

    def answered(self, request: Request, output: RequestOutput, sent_ns: int) -> None:
        """Add the phases of a choice in the engine, from its last output. sent_ns: when it was sent to the engine."""
        self._counts["gen_ai.usage.input_tokens"] = len(request.prompt_ids)  # of all choices
        self._reasons.append("stop" if output.finish_reason == "cancelled" else output.finish_reason or "")
        if (timings := output.timings) is None:
            return
        self._counts["gen_ai.usage.output_tokens"] += timings.num_completion_tokens
        self._counts["gen_ai.usage.cache_read.input_tokens"] += timings.num_cached_tokens
        self._counts["vlora.preemptions"] += timings.num_preemptions
        self._counts.update({f"vlora.steps.{mode}": number for mode, number in timings.steps_by_mode.items()})
        first_s = timings.latency_s if timings.ttft_s is None else timings.ttft_s
        ends = [0.0, timings.queue_s, first_s, timings.latency_s]
        times = [sent_ns + round(1e9 * end_s) for end_s in ends]
        for name, begin, end in zip(("queue", "prefill", "decode"), times, times[1:], strict=False):
            if name != "decode" or timings.num_completion_tokens:
                self._tracer.start_span(name, self._within, start_time=begin).end(end)

    def end(self, outcome: str, adapter: str) -> None:
        """adapter: Its name, or `BASE` or `UNKNOWN`."""
        name = self._model if adapter in (BASE, UNKNOWN) else adapter
        self._span.update_name(f"{self._operation} {name}")
        self._span.set_attributes(
            {
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": "vlora",
                "gen_ai.request.model": name,
                "gen_ai.response.model": self._model,
                "vlora.adapter": adapter,
                **self._counts,
            }
        )
        if outcome == "ok":
            self._span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
        else:
            self._span.set_attribute("error.type", outcome)
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()
