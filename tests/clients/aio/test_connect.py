"""Connections: TLS, proxies, time limits, and close reasons, which are those of the other client."""

from __future__ import annotations

import asyncio
import logging

import pytest
import trustme

from smqrt.aio import Proxy
from smqrt.clients.aio.connection import Reader
from smqrt.errors import ArgumentError
from smqrt.wire import smq
from tests.clients.aio.conftest import client
from tests.conftest import free_port
from tests.support.pki import Authority, client_of, gevent_context, identity_of, server_context
from tests.support.proxies import ConnectProxy, SocksProxy
from tests.support.scripted_broker import ScriptedBroker


@pytest.fixture
def scripted(request):
    broker = ScriptedBroker(request.param)
    yield broker
    broker.close()


async def end_of(smq):
    """The close reason of the first attempt."""
    async with asyncio.timeout(10):
        await smq.start()
        while smq.end is None:
            await asyncio.sleep(0.001)
    end = smq.end
    await smq.close()
    return end.word, end.can_reconnect, str(end)


def test_tls_and_client_certificates(run, start_broker):
    ca, devices = trustme.CA(), trustme.CA()
    broker = start_broker(context=gevent_context(ca.issue_cert("127.0.0.1"), devices))
    tls = client_of(ca)
    tls.add_identity(identity_of(devices.issue_cert("device-1")))

    async def program():
        for url in (broker.url, broker.ws_url):
            async with client(url, tls=tls) as smq:
                subscription = await smq.subscribe("t")
                await smq.publish(b"x" * 60_000, "t")
                assert len((await anext(subscription)).data) == 60_000
        word, can_reconnect, text = await end_of(client(broker.url, tls=client_of(trustme.CA())))
        assert (word, can_reconnect) == ("sslnottrusted", False)
        assert "certificate not trusted: no trusted authority has signed the certificate" in text
        careless = client_of(trustme.CA())
        careless.add_identity(tls.identities[0])
        async with client(broker.url, tls=careless, verify=False) as smq:
            assert await smq.wait_connected(10)

    run(program)


def test_certificates_in_files(run, start_broker, tmp_path):
    authority = Authority(tmp_path)
    broker = start_broker(context=server_context(*authority.pair("server")))

    async def program():
        async with client(broker.url, cafile=str(authority.path)) as smq:
            assert await smq.wait_connected(10)
        with pytest.raises(ArgumentError, match="cafile: cannot read"):
            await client(broker.url, cafile=str(tmp_path / "none.pem")).start()

    run(program)


@pytest.mark.parametrize("kind", [SocksProxy, ConnectProxy])
def test_through_a_proxy(run, broker, kind):
    with kind("me", "secret") as proxy:

        async def program():
            for url in (broker.url, broker.ws_url):
                async with client(url, proxy=Proxy("127.0.0.1", proxy.port, kind is SocksProxy, "me", "secret")) as smq:
                    assert await smq.wait_connected(10)
            refused = client(broker.url, proxy=Proxy("127.0.0.1", proxy.port, kind is SocksProxy, "me", "wrong"))
            assert (await end_of(refused))[:2] == ("proxyauth", False)
            proxy.reply = 5 if kind is SocksProxy else 502
            closed = client(broker.url, proxy=Proxy("127.0.0.1", proxy.port, kind is SocksProxy, "me", "secret"))
            assert (await end_of(closed))[:2] == ("prxrefused", True)

        run(program)
        assert proxy.seen == [f"127.0.0.1:{broker.port}"] * 2


def test_no_broker(run):
    async def program():
        word, can_reconnect, text = await end_of(client(f"http://127.0.0.1:{free_port()}/"))
        assert (word, can_reconnect) == ("cannotconnect", True)
        assert text.endswith("connection refused; is the server running there?")
        word, _, text = await end_of(client("http://host.invalid/"))
        assert (word, text) == ("cannotresolve", "http://host.invalid/: host name not found")

    run(program)


def rejects_http(conversation):
    conversation.read_head()
    conversation.raw(b"HTTP/1.1 404 Not Found\r\n\r\n")


def is_silent(conversation):
    conversation.wait_closed()


def answers_no_ping(conversation):
    conversation.accept()
    conversation.wait_closed()


def answers_pings(conversation):
    conversation.accept()
    for _ in range(3):
        assert conversation.receive() == smq.PING
        conversation.send(smq.PONG)
    conversation.send(smq.disconnect(b"enough"))


def sends_rubbish(conversation):
    conversation.accept()
    conversation.send(b"\xff")
    conversation.wait_closed()


@pytest.mark.parametrize(
    ("scripted", "options", "expected"),
    [
        (rejects_http, {}, ("nonsmq", False)),
        (is_silent, {"timeout": 0.1}, ("timeout", True)),
        (answers_pings, {"ping": 0.05, "pong": 10.0}, ("enough", False)),
        (answers_no_ping, {"ping": 0.05, "pong": 0.05}, ("pong", True)),
        (sends_rubbish, {}, ("protocolerror", True)),
    ],
    indirect=["scripted"],
)
def test_close_reasons(run, scripted, options, expected):
    async def program():
        for url in (scripted.url, scripted.ws_url):
            assert (await end_of(client(url, **options)))[:2] == expected

    run(program)


@pytest.mark.parametrize(
    ("onauth", "expected"),
    [
        (lambda *_: 1 / 0, ("onauth", False, "onauth failed: division by zero")),
        (lambda *_: 7, ("onauth", False, "onauth returned int; credentials are str or bytes")),
        (lambda *_: "x" * 256, ("onauth", False, "onauth returned 256 bytes; at most 255 can be sent")),
        (lambda *_: asyncio.sleep(20), ("timeout", True, "onauth did not return within 2 s")),
    ],
)
def test_credentials_that_cannot_be_sent(run, broker, onauth, expected):
    async def program():
        assert await end_of(client(broker.url, onauth=onauth, timeout=2.0 if expected[1] else 15.0)) == expected

    run(program)


def test_the_broker_ends_the_connection(run, broker, in_broker):
    async def program():
        async with client(broker.url) as smq:
            assert await smq.wait_connected(10)
            smq.onclose = lambda word, can_reconnect: False
            await in_broker(broker.smq.shutdown, "maintenance")
            assert await smq.wait_closed(10)
            assert (smq.end.word, smq.end.by_broker) == ("maintenance", True)

    run(program)


def test_received_data_is_read_before_an_error(run):
    """A Disconnect packet names the reason; a reset may come while it waits to be read."""

    async def program():
        reader = Reader()
        reader.feed_data(b"reason")
        reader.set_exception(ConnectionResetError("reset"))
        assert [await reader.read(100), await reader.read(100)] == [b"reason", b""]
        assert str(reader.failure) == "reset"

    run(program)


def test_a_program_without_onclose_gets_a_warning_of_the_first_failure(run, caplog):
    url = f"http://127.0.0.1:{free_port()}/"

    async def program():
        async with asyncio.timeout(10), client(url, reconnect_delay=0.01, reconnect_delay_max=0.01):
            while len(caplog.records) < 3:
                await asyncio.sleep(0.001)

    with caplog.at_level(logging.INFO, "smqrt.client"):
        run(program)
    levels = [record.levelno for record in caplog.records[:3]]
    assert levels == [logging.WARNING, logging.INFO, logging.INFO]
    assert caplog.messages[0] == f"not connected: {url}: connection refused; is the server running there?"
