"""The application in examples/fetch: pages fetched through a SOCKS5 proxy, many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import gevent
import pytest
from gevent.event import Event

from tests.apps.lua.app_server import Answer, AppServer
from tests.support.proxies import SocksProxy
from tests.support.scripted_http import ScriptedHttp, answer
from tests.support.waiting import wait_until

APP = Path(__file__).parent.parent / "examples" / "fetch"
BIG = b"x" * 1_000_000


@pytest.fixture
def proxy() -> Iterator[SocksProxy]:
    with SocksProxy("me", "secret") as running:
        yield running


@pytest.fixture
def fetching(server: AppServer) -> AppServer:
    application = server.applications.load("", APP)
    assert application.error is None, application.error
    return server


def fetch(server: AppServer, proxy: SocksProxy, url: str) -> Answer:
    return server.ask(f"/fetch.lsp?url={quote(url, safe='')}&proxyport={proxy.port}")


def test_a_page(fetching: AppServer, proxy: SocksProxy) -> None:
    pages = [answer(b"hello", "200 OK", "Content-Type: text/plain"), answer(BIG), answer(b"no", "404 Not")]
    with ScriptedHttp(pages[:1], pages[1:2], pages[2:]) as scripted:
        reply = fetch(fetching, proxy, scripted.url)
        assert (reply.status, reply.body, reply.headers["Content-Type"]) == (200, b"hello", "text/plain")
        assert fetch(fetching, proxy, scripted.url).body == BIG
        assert fetch(fetching, proxy, scripted.url).status == 404
        assert "X-Fetched-By: tests/apps/examples/fetch" in scripted.heads[0]
        assert proxy.seen == [f"127.0.0.1:{scripted.port}"] * 3


def test_failures(fetching: AppServer, proxy: SocksProxy) -> None:
    proxy.reply = 4
    reply = fetch(fetching, proxy, "http://a.example")
    assert (reply.status, reply.text.split("\t")[0]) == (502, "prxhostunreachable")
    proxy.password = "another"
    reply = fetch(fetching, proxy, "http://a.example")
    assert (reply.status, reply.text.split("\t")[0]) == (502, "proxyauth")


def test_many_at_a_time_without_waiting(fetching: AppServer, proxy: SocksProxy) -> None:
    go = Event()
    with ScriptedHttp([[lambda _client: go.wait(), *answer(b"slow")]]) as slow:
        jobs = [gevent.spawn(fetch, fetching, proxy, slow.url) for _ in range(50)]
        wait_until(lambda: len(slow.heads) == 50)
        assert fetch(fetching, proxy, "ftp://x/").status == 502  # while the others wait
        assert not any(job.ready() for job in jobs)
        go.set()
        gevent.joinall(jobs, timeout=5)
        assert [job.value.text for job in jobs] == ["slow"] * 50
    fetching.vm.eval("collectgarbage() collectgarbage()")
    assert all(client._stream is None for client in fetching.services.http_clients.values())
