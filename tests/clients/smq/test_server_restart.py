"""A server that is restarted by its operator: every client comes back by itself and finds its subscriptions."""

from __future__ import annotations

from pathlib import Path

import pytest
from gevent.threadpool import ThreadPool

from smqrt.client import SmqClient
from tests.support.waiting import wait_until

APP = Path(__file__).parents[2] / "browser" / "smqjs" / "app"


@pytest.mark.parametrize("scheme", ["http", "ws"])
def test_clients_come_back_after_sigterm(serve, scheme):
    pool, received, ends = ThreadPool(1), [], []
    first = serve(APP)
    client = SmqClient(
        f"{scheme}://127.0.0.1:{first.port}/smq.lsp",
        reconnect_delay=0.1,
        reconnect_delay_max=0.3,
        onclose=lambda err, can_reconnect: ends.append((err, can_reconnect)),
    )
    with client:
        client.subscribe("t", onmsg=lambda data, *_: received.append(data))
        assert client.flush(5)
        assert pool.apply(first.stop) == 0
        assert ends[0][1] is True, ends
        second = serve(APP, "--port", str(first.port))
        pool.apply(second.wait_for, ("listening on",))
        assert client.wait_connected(5)
        client.publish("back", "t")
        assert client.flush(5)
        wait_until(lambda: received)
    assert received == [b"back"]
