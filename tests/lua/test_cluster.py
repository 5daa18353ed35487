"""The documented cluster API in Lua: two servers on two loopback addresses, as an old application has it."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.client import SMQClient
from tests.conftest import Served
from tests.waiting import wait_until

APP = Path(__file__).parent.parent / "apps" / "cluster"


def ask(served: Served, what: str) -> str:
    text: bytes = urllib.request.urlopen(f"{served.url}/ask/{what}", timeout=10).read()
    return text.decode()


@pytest.fixture
def nodes(serve: Callable[..., Served]) -> list[Served]:
    addresses = ("127.0.0.1", "127.0.0.2")
    made = [serve(APP, env={"OWN": own}) for own in addresses]
    for one in made:
        assert one.port
    wait_until(lambda: all(ask(one, "status") == "true" for one in made), "the link")
    return made


def test_an_old_application_on_two_addresses(nodes: list[Served]) -> None:
    one, other = nodes
    wait_until(lambda: ask(one, "servers") == "1", "the other server")
    other.wait_for("server\t127.0.0.1\tgreeting")
    ask(one, "news")
    one.wait_for("news\tnews of 127.0.0.1\town")
    other.wait_for("news\tnews of 127.0.0.1\tother")
    assert [ask(one, what) for what in ("self", "hascon", "isopen", "nobody")] == ["nil", "true", "true", "false"]
    with SMQClient(f"{other.url}/smq.lsp", uid=b"the client") as client:
        assert client.wait_connected(5)
        got: list[bytes] = []
        client.subscribe("news", onmsg=lambda data, ptid, tid, subtid: got.append(data))
        wait_until(lambda: client.topic2tid("news"), "Suback")
        wait_until(lambda: ask(one, "phantoms") == "1", "the phantom")
        assert ask(one, "phantom") == "the client true true"
        assert ask(one, "nodes") == "1"
        ask(one, "news")
        wait_until(lambda: b"news of 127.0.0.1" in got, got)
        assert ask(one, "pubon") == "true"
        wait_until(lambda: b"on behalf" in got, got)
    wait_until(lambda: ask(one, "phantoms") == "0", "no phantom")
    other.process.send_signal(signal.SIGKILL)
    wait_until(lambda: ask(one, "status") == "false", "the end of the link")
    assert ask(one, "servers") == "0"


def test_shutdown_of_all_nodes_and_leaving(nodes: list[Served]) -> None:
    one, other = nodes
    ended: list[object] = []
    with SMQClient(f"{other.url}/smq.lsp", uid=b"the client", onclose=lambda *given: ended.append(given)):
        wait_until(lambda: ask(one, "phantoms") == "1", "the phantom")
        ask(one, "shutdown")
        wait_until(lambda: ask(one, "phantoms") == "0", "the end of the client")
        wait_until(lambda: ended, "the good-bye")
    ask(one, "close")
    wait_until(lambda: ask(other, "servers") == "0", "the other is alone")
    assert ask(one, "isopen") == "false"
