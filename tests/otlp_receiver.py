"""A real OTLP receiver: what an OpenTelemetry collector does with spans, as far as tests need it.

It takes `Export` over gRPC (opentelemetry.proto.collector.trace.v1.TraceService) and POST /v1/traces over HTTP
(protobuf), each on a free port, and keeps every span. The fixture `otlp_receiver` (tests/conftest.py) starts one;
children of the test reach it with the variables of `OtlpReceiver.environment`.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

Protocol = Literal["grpc", "http/protobuf"]
Value = str | bool | int | float
PATIENCE_S = 60.0
"""How long spans that must come are waited for; long, because the machine may be busy."""


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as it crossed the wire. Ids in hex; links: (trace id, span id); service: `service.name`."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    links: list[tuple[str, str]]
    error: str | None
    kind: str
    trace_state: str
    service: str
    resource: dict[str, Value]


class OtlpReceiver:
    """Receives spans by both protocols while it is open. A context manager."""

    def __init__(self) -> None:
        self._arrival = threading.Condition()
        self._spans: list[ReceivedSpan] = []
        self._grpc = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(TraceService(self.take), self._grpc)
        self._grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler_for(self.take))
        self._http_thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> Self:
        self._grpc.start()
        self._http_thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._grpc.stop(grace=None).wait()
        self._http.shutdown()
        self._http_thread.join()
        self._http.server_close()

    def endpoint(self, protocol: Protocol = "grpc") -> str:
        """Base URL, as OTEL_EXPORTER_OTLP_ENDPOINT wants it."""
        port = self._grpc_port if protocol == "grpc" else self._http.server_port
        return f"http://127.0.0.1:{port}"

    def environment(self, protocol: Protocol = "grpc") -> dict[str, str]:
        """Variables that make a process send its spans here, soon after they are over."""
        return {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint(protocol),
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    @property
    def spans(self) -> list[ReceivedSpan]:
        """Everything received so far, in order of arrival."""
        with self._arrival:
            return list(self._spans)

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of one trace so far, by their start."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start_ns)

    def wait_for(self, enough: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """All spans, once `enough` says so. Raises `TimeoutError`, naming what came, when it never does. Blocks."""
        deadline = time.monotonic() + PATIENCE_S
        with self._arrival:
            while not enough(self._spans):
                if not self._arrival.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"received only {[span.name for span in self._spans]}")
            return list(self._spans)

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        """Keeps the spans of one export."""
        received = [
            received_span(span, values(of_resource.resource.attributes))
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        with self._arrival:
            self._spans += received
            self._arrival.notify_all()


class TraceService(trace_service_pb2_grpc.TraceServiceServicer):
    """The gRPC side."""

    def __init__(self, take: Callable[[trace_service_pb2.ExportTraceServiceRequest], None]) -> None:
        self._take = take

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        self._take(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def handler_for(
    take: Callable[[trace_service_pb2.ExportTraceServiceRequest], None],
) -> type[BaseHTTPRequestHandler]:
    """The HTTP side."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path != "/v1/traces":
                self.send_error(404)
                return
            take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            answer = trace_service_pb2.ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            """Says nothing: the test's output is for the test."""

    return Handler


def received_span(span: Span, resource: dict[str, Value]) -> ReceivedSpan:
    """A protobuf span as tests like to read it."""
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=values(span.attributes),
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        error=span.status.message if span.status.code == Status.StatusCode.STATUS_CODE_ERROR else None,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_state=span.trace_state,
        service=str(resource.get("service.name", "")),
        resource=resource,
    )


def values(attributes: Any) -> dict[str, Value]:
    """Attributes of simple types, by name."""
    return {one.key: simple_value(one) for one in attributes}


def simple_value(attribute: KeyValue) -> Value:
    """What an attribute holds."""
    return getattr(attribute.value, attribute.value.WhichOneof("value") or "string_value")
