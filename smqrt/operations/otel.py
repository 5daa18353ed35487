"""Traces of requests for OpenTelemetry, by its own library (extra `otel`).

The library's batch processor and its threads misbehave under gevent. So spans wait in a bounded queue here, and a real
thread exports them; when the collector is slow or away, the newest are left out and counted.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import gevent
from gevent.event import Event

import smqrt
from smqrt.errors import StartError
from smqrt.loop.threads import DiskThreads
from smqrt.settings.limit_register import Limit

if TYPE_CHECKING:
    from smqrt.http.message import Request

log = logging.getLogger("smqrt.otel")

WAITING_SPANS = 10_000
AT_ONCE = 512
COLLECT_S = 1.0
EXPORT_S = 10.0
CLOSE_S = 2.0
_SPAN = "otel_span"  # in Request.env

SPANS = Limit("otel_spans", "", f"{WAITING_SPANS} spans wait for the collector")


class Tracing:
    """Makes a span of each request, and sends them to a collector (OTLP over HTTP).

    Args:
        endpoint: where, such as "http://127.0.0.1:4318/v1/traces".
        service: what the traces call this server.

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
            shutdown_on_exit=False,
        )
        provider.add_span_processor(_Queue(self))  # type: ignore[arg-type]
        self._tracer = provider.get_tracer("smqrt", smqrt.__version__)
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)
        self._endpoint = endpoint
        self._waiting: deque[Any] = deque()
        self._more, self._closed = Event(), False
        self._threads = DiskThreads("of the trace collector")
        self._sender = gevent.spawn(self._send_for_ever)

    # ---- what is told

    def began(self, request: Request) -> None:
        """See `RequestObserver`."""
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
        if status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end()

    def take(self, span: object) -> None:
        """Keep a span that ended, unless too many wait."""
        if len(self._waiting) >= WAITING_SPANS:
            SPANS.refused("a span")
            return
        self._waiting.append(span)
        self._more.set()

    # ---- sending

    def _send_for_ever(self) -> None:
        while not self._closed or self._waiting:
            self._more.wait()
            self._more.clear()
            if not self._closed:
                gevent.sleep(COLLECT_S)
            while self._waiting:
                self._send()

    def _send(self) -> None:
        spans = [self._waiting.popleft() for _ in range(min(len(self._waiting), AT_ONCE))]
        try:
            outcome = self._threads.call(self._exporter.export, spans)
            fault = "" if outcome.name == "SUCCESS" else "it did not take them"
        except Exception as error:  # what the library raises is its own affair, and no reason to end
            fault = str(error)
        if fault:
            SPANS.refused(f"{len(spans)} spans", f"the collector {self._endpoint} can't be told: {fault}")

    def close(self) -> None:
        """Send what waits, within two seconds; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._more.set()
        self._sender.join(CLOSE_S)
        self._sender.kill(block=False)


class _Queue:
    """What the library calls a span processor."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def on_start(self, span: object, parent_context: object = None) -> None:
        """Nothing to do."""

    def _on_ending(self, span: object) -> None:
        """Nothing to do."""

    def on_end(self, span: object) -> None:
        """A span ended."""
        self._tracing.take(span)

    def shutdown(self) -> None:
        """Nothing to do: `Tracing.close` does."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing to do."""
        return True
