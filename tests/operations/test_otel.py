"""Export of spans to a collector."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.conftest import Served, free_port
from tests.support.waiting import wait_until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Speaks OTLP over HTTP, as a collector does."""
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            asked = ExportTraceServiceRequest.FromString(data)
            got.extend((one, asked.resource_spans[0]) for one in asked.resource_spans[0].scope_spans[0].spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
    server.shutdown()


def test_requests_become_spans(serve: Callable[..., Served], tmp_path: Path, collector: tuple[str, list[Any]]) -> None:
    url, got = collector
    (tmp_path / "page.lsp").write_text("<?lsp print 'hi' ?>")
    (tmp_path / "broken.lsp").write_text("<?lsp error 'no' ?>")
    served = serve(tmp_path, "--otel-endpoint", url, "--otel-service", "mine")
    assert requests.get(f"{served.url}/page.lsp?token=hush", headers={"traceparent": PARENT}, timeout=5).ok
    assert requests.get(f"{served.url}/broken.lsp", timeout=5).status_code == 500
    wait_until(lambda: len(got) == 2)
    (page, resource), (broken, _) = got
    attributes = {one.key: one.value for one in page.attributes}
    assert page.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert page.parent_span_id.hex() == "b7ad6b7169203331"
    assert attributes["url.path"].string_value == "/page.lsp"
    assert attributes["http.response.status_code"].int_value == 200
    assert 0 < page.end_time_unix_nano - page.start_time_unix_nano < 5e9
    assert broken.status.code == 2
    named = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert named["service.name"] == "mine"


def test_unreachable_collector_blocks_no_requests(serve: Callable[..., Served], tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("hi")
    served = serve(tmp_path, "--otel-endpoint", f"http://127.0.0.1:{free_port()}/v1/traces")
    assert served.port
    began_s = time.monotonic()
    for _ in range(20):
        assert requests.get(served.url, timeout=5).text == "hi"
    assert time.monotonic() - began_s < 5
    assert served.stop() == 0
