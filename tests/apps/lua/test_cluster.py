"""The documented cluster API in Lua: two servers on two loopback addresses, as an old application has it."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.client import SMQClient
from tests.conftest import Served
from tests.support.waiting import wait_until

PLACE = os.getpid() % 0xFFFF + 1
"""Tests of other processes use the same port, which is the custom, at other addresses."""
ONE, OTHER = (f"127.{PLACE >> 8}.{PLACE & 0xFF}.{host}" for host in (1, 2))
APP = Path(__file__).parent.parent / "examples" / "cluster"


def ask(served: Served, what: str) -> str:
    try:
        text: bytes = urllib.request.urlopen(f"{served.url}/ask/{what}", timeout=10).read()
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error}: {error.read().decode()}\n{served.output}") from None
    return text.decode()


@pytest.fixture
def nodes(serve: Callable[..., Served]) -> list[Served]:
    made = [serve(APP, env={"OWN": own, "OTHER": other}) for own, other in ((ONE, OTHER), (OTHER, ONE))]
    for one in made:
        assert one.port
    wait_until(lambda: all(ask(one, "status") == "true" for one in made), "the link")
    return made


def test_an_old_application_on_two_addresses(nodes: list[Served]) -> None:
    one, other = nodes
    wait_until(lambda: ask(one, "servers") == "1", "the other server")
    other.wait_for(f"server\t{ONE}\tgreeting")
    ask(one, "news")
    one.wait_for(f"news\tnews of {ONE}\town")
    other.wait_for(f"news\tnews of {ONE}\tother")
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
        wait_until(lambda: f"news of {ONE}".encode() in got, got)
        assert ask(one, "pubon") == "true"
        wait_until(lambda: b"on behalf" in got, got)
    wait_until(lambda: ask(one, "phantoms") == "0", "no phantom")
    other.process.send_signal(signal.SIGKILL)
    wait_until(lambda: ask(one, "status") == "false", "the end of the link")
    assert ask(one, "servers") == "0"


def test_a_channel_of_the_application_beside_the_hub(nodes: list[Served]) -> None:
    one, other = nodes
    for node, hello in ((one, OTHER), (other, ONE)):
        node.wait_for("channel\tup")
        node.wait_for(rf'data\t{{"hello":"{hello}"}}')
    assert ask(one, "send") == "1"
    other.wait_for(f"data\tfrom {ONE}")
    assert ask(other, "count") in ("2", "3")  # two links that met at once have each brought a hello
    assert "the channel 'chat' is open already; close it first" in ask(one, "second")
    assert "data: 65521 bytes; a message carries at most 65520, split it" in ask(one, "large")
    wait_until(lambda: ask(one, "trips") == "true", "a round trip", 15)
    one.wait_for(f"trip\t{OTHER}\ttrue")
    assert ask(one, "closed") == "true"
    other.wait_for("channel\tdown\tgood night")
    assert "the channel 'chat' is closed; open it again" in ask(one, "late")
    assert ask(other, "send") == "nil"
    assert [ask(one, what) for what in ("isopen", "servers")] == ["true", "1"]  # the hub is another thing
    other.process.send_signal(signal.SIGKILL)
    wait_until(lambda: ask(one, "servers") == "0", "the end of the link")


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
    assert [ask(one, what) for what in ("isopen", "closed", "isopen")] == ["true", "true", "false"]  # the channel
