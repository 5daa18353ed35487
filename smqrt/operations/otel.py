"""Traces of requests for OpenTelemetry (extra `otel`).

Spans are queued here and exported by a real thread, because the batch processor of the OpenTelemetry library does not
work with gevent. When the collector is slow or unreachable, new spans are discarded and counted.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import gevent
from gevent.event import Event

import smqrt
from smqrt.errors import StartError
from smqrt.http.message import Request
from smqrt.loop.threads import DiskThreads
from smqrt.settings.limits import Limit

MAX_QUEUED_SPANS = 10_000
MAX_BATCH_SPANS = 512
EXPORT_PERIOD_S = 1.0
"""Spans that end within this time are exported together."""
EXPORT_TIMEOUT_S = 10.0
LAST_EXPORT_S = 2.0
"""The time limit of the last exports, in `close`."""
_SPAN = "otel_span"  # in Request.env

SPANS = Limit("otel_spans", "", f"{MAX_QUEUED_SPANS} spans wait for the collector")


class Tracing:
    """Creates a span for each request and sends it to a collector (OTLP over HTTP).

    Args:
        endpoint: URL of the collector, such as "http://127.0.0.1:4318/v1/traces".
        service: name of this server in the traces.

    Raises:
        StartError: the library is missing.
    """

    def __init__(self, endpoint: str, service: str) -> None:
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
        except ImportError:
            raise StartError("otel.endpoint needs OpenTelemetry: pip install 'smqrt[otel]'.") from None
        self._trace, self._extract = trace, propagate.extract
        provider = TracerProvider(
            resource=Resource.create({"service.name": service, "service.version": smqrt.__version__}),
            shutdown_on_exit=False,  # no atexit handler: `close` ends the exports
        )
        provider.add_span_processor(_QueueProcessor(self))  # type: ignore[arg-type]
        self._tracer = provider.get_tracer("smqrt", smqrt.__version__)
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._endpoint = endpoint
        self._queue: deque[Any] = deque()
        self._has_queued, self._closed = Event(), False
        self._threads = DiskThreads("of the trace collector")
        self._sender = gevent.spawn(self._send_loop)

    def began(self, request: Request) -> None:
        """See `RequestObserver`."""
        # W3C trace context: the span of the client is the parent.
        carrier = {name: value for name in ("traceparent", "tracestate") if (value := request.get(name))}
        request.env[_SPAN] = self._tracer.start_span(
            request.method,
            context=self._extract(carrier) if carrier else None,
            kind=self._trace.SpanKind.SERVER,
            attributes={
                "http.request.method": request.method,
                "url.path": request.path[:1024],
                "url.scheme": "https" if request.secure else "http",
                "client.address": request.peer[0],
            },
        )

    def ended(self, request: Request, is_detached: bool) -> None:
        """See `RequestObserver`."""
        span = request.env.pop(_SPAN, None)
        if span is None:
            return
        status = 101 if is_detached else request.response.status
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("http.response.body.size", request.response.size)
        if status >= 500:  # 4xx are errors of the client, by the conventions of OpenTelemetry
            span.set_status(self._trace.StatusCode.ERROR)
        span.end()

    def enqueue(self, span: object) -> None:
        """Queue an ended span, or discard it when the queue is full."""
        if len(self._queue) >= MAX_QUEUED_SPANS:
            SPANS.refused("a span")
            return
        self._queue.append(span)
        self._has_queued.set()

    def _send_loop(self) -> None:
        while not self._closed or self._queue:
            self._has_queued.wait()
            self._has_queued.clear()
            if not self._closed:
                gevent.sleep(EXPORT_PERIOD_S)
            while self._queue:
                spans = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH_SPANS))]
                try:
                    outcome = self._threads.call(self._exporter.export, spans)
                    fault = "" if outcome.name == "SUCCESS" else "it rejected the spans"
                except Exception as error:  # the library may raise any exception; the loop must continue
                    fault = str(error)
                if fault:
                    rule = f"the export to the collector {self._endpoint} failed: {fault}"
                    SPANS.refused(f"{len(spans)} spans", rule)

    def close(self) -> None:
        """Export the queued spans within two seconds, then stop. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._has_queued.set()
        self._sender.join(LAST_EXPORT_S)
        self._sender.kill(block=False)


class _QueueProcessor:
    """The interface to the library. Only `on_end` has an effect; `Tracing.close` does the shutdown."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def on_start(self, span: object, parent_context: object = None) -> None:
        """Do nothing."""

    def _on_ending(self, span: object) -> None:
        """Do nothing."""

    def on_end(self, span: object) -> None:
        """Queue a span."""
        self._tracing.enqueue(span)

    def shutdown(self) -> None:
        """Do nothing."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Do nothing."""
        return True
