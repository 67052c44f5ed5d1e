"""OpenTelemetry traces of requests: in memory, and at a receiver of OTLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.server.api import Api, running_api
from tests.server.running import png
from tests.sites import Page, site
from vlora import tracing as module
from vlora.config import ServerConfig, Token
from vlora.errors import BadConfig, UnknownAdapter
from vlora.tracing import Tracing

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
USER = "user-token-0123456789"
CHAT = {"model": "base", "messages": [{"role": "user", "content": "say:one two"}]}


@pytest.fixture(scope="module")
def exported() -> Iterator[InMemorySpanExporter]:
    """Spans, which are exported when they end."""
    exporter = InMemorySpanExporter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "OTLPSpanExporter", lambda: exporter)
        patch.setattr(module, "BatchSpanProcessor", SimpleSpanProcessor)
        yield exporter


@pytest.fixture(scope="module")
def api(exported: InMemorySpanExporter) -> Iterator[Api]:
    with running_api(adapters={"cam": {"night": 1}}, tokens=(Token(name="me", secret=USER),), tracing=True) as made:
        yield made._replace(token=USER)


@pytest.fixture
def spans(exported: InMemorySpanExporter) -> Callable[[], tuple[ReadableSpan, list[ReadableSpan]]]:
    """The span of the front end of the last request, and its children in order of their begin."""
    exported.clear()

    def read() -> tuple[ReadableSpan, list[ReadableSpan]]:
        *_, root = found = exported.get_finished_spans()
        exported.clear()
        assert root.kind == trace.SpanKind.SERVER and root.context is not None
        for child in found[:-1]:
            assert child.parent is not None and child.parent.span_id == root.context.span_id
        return root, sorted(found[:-1], key=lambda span: span.start_time or 0)

    return read


def test_a_request_over_http_continues_the_trace_of_its_header(api: Api, spans: Any) -> None:
    status, answer = api.call("POST", "/v1/chat/completions", CHAT, headers={"traceparent": PARENT})
    assert status == 200
    root, children = spans()
    assert f"{root.context.trace_id:032x}-{root.parent.span_id:016x}" == PARENT[3:-3]
    assert root.name == "chat base" and root.status.status_code == trace.StatusCode.UNSET
    assert [span.name for span in children] == ["process input", "queue", "prefill", "decode"]
    times = [root.start_time, *(time for span in children for time in (span.start_time, span.end_time))]
    assert times == sorted(times), "the phases follow each other"
    assert abs(children[-1].end_time - root.end_time) < 5e9
    steps = {key: value for key, value in root.attributes.items() if key.startswith("vlora.steps.")}
    assert sum(steps.values()) > 0
    assert {key: value for key, value in root.attributes.items() if key not in steps} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vlora",
        "gen_ai.request.model": "base",
        "gen_ai.response.model": "base",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "vlora.adapter": "base",
        "vlora.preemptions": 0,
        "vlora.tenant": "me",
    }


def test_requests_over_rpyc_continue_the_callers_span(api: Api, spans: Any) -> None:
    tracer = TracerProvider().get_tracer("caller")
    with api.client() as client, tracer.start_as_current_span("caller") as caller:
        "".join(client.stream("say:x"))
        root, children = spans()
        assert (root.parent.span_id, root.context.trace_id) == (
            caller.get_span_context().span_id,
            caller.get_span_context().trace_id,
        )
        assert len(children) == 4
    with api.client() as client:
        client.ask_head([png()], "cam", "night")
        root, children = spans()
        assert root.parent is None and (root.name, root.attributes["vlora.adapter"]) == ("head cam", "cam")
        assert [span.name for span in children] == ["process input", "queue", "prefill"]
        with pytest.raises(UnknownAdapter):
            client.generate("say:x", adapter="absent")
        root, children = spans()
        assert root.attributes["error.type"] == "unknown_adapter" and not children
        assert root.status.status_code == trace.StatusCode.ERROR


def test_choices_have_their_own_phases_and_a_wrong_header_begins_a_trace(api: Api, spans: Any) -> None:
    body = {**CHAT, "n": 2, "stream": True}
    assert api.call("POST", "/v1/chat/completions", body, headers={"traceparent": "00-zz-1-01"})[0] == 200
    root, children = spans()
    assert root.parent is None and len(root.attributes["gen_ai.response.finish_reasons"]) == 2
    assert (
        sorted(span.name for span in children) == ["decode"] * 2 + ["prefill"] * 2 + ["process input"] + ["queue"] * 2
    )


def test_spans_reach_a_receiver_of_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    with site(lambda path: Page()) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url(""))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=7")
        for real in (OTLPSpanExporter, BatchSpanProcessor):
            monkeypatch.setattr(module, real.__name__, real)
        with running_api(tracing=True) as api:
            api.call("POST", "/v1/chat/completions", CHAT, headers={"traceparent": PARENT})
    ((path, headers),), (body,) = receiver.requested, receiver.bodies  # the end of the server sends all spans
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert (path, headers["x-key"]) == ("/v1/traces", "7")
    assert {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"] == "vlora"
    spans = resource.scope_spans[0].spans
    assert {span.trace_id.hex() for span in spans} == {PARENT.split("-")[1]}
    assert [span.name for span in spans] == ["process input", "queue", "prefill", "decode", "chat base"]


def test_tracing_is_off_by_default_and_other_protocols_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ServerConfig().tracing
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(BadConfig, match="OTLP's protocol is 'grpc' in the environment"):
        Tracing("base")
