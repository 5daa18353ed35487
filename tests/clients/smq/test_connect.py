"""The way to the broker: proxies, certificates, and the words when it is barred."""

from __future__ import annotations

import logging
from collections.abc import Callable

import gevent
import pytest
import trustme

from smqrt.client import SmqClient
from smqrt.errors import ArgumentError, StreamError
from smqrt.transport.outgoing_proxy import Proxy
from smqrt.transport.stream import Stream
from tests.conftest import free_port
from tests.support.local_broker import LocalBroker
from tests.support.pki import client_of, expired, identity_of, server_of
from tests.support.proxies import ConnectProxy, SocksProxy, TestProxy
from tests.support.waiting import wait_until

Make = Callable[..., SmqClient]


@pytest.mark.parametrize("kind", [SocksProxy, ConnectProxy])
def test_through_a_proxy(broker: LocalBroker, make_client: Make, kind: type[TestProxy]) -> None:
    with kind("me", "secret") as proxy:
        for url in (broker.url, broker.ws_url):
            spec = Proxy("127.0.0.1", proxy.port, kind is SocksProxy, "me", "secret")
            assert make_client(url, proxy=spec).wait_connected(5)
        assert proxy.seen == [f"127.0.0.1:{broker.port}"] * 2
        refused = make_client(broker.url, proxy=Proxy("127.0.0.1", proxy.port, kind is SocksProxy, "me", "wrong"))
        assert not refused.wait_connected(5)
        assert (refused.end.word, refused.end.can_reconnect) == ("proxyauth", False)


def test_certificates(start_broker: Callable[..., LocalBroker], make_client: Make) -> None:
    ca, devices = trustme.CA(), trustme.CA()
    broker = start_broker(context=server_of(ca.issue_cert("127.0.0.1"), devices).context())
    tls = client_of(ca)
    tls.add_identity(identity_of(devices.issue_cert("device-1")))
    assert make_client(broker.url, tls=tls).wait_connected(5)
    stranger = make_client(broker.url, tls=client_of(trustme.CA()))
    assert not stranger.wait_connected(5)
    assert "certificate not trusted: no trusted authority has signed the certificate; name" in str(stranger.end)
    assert "cafile" in str(stranger.end)


def test_out_of_date(start_broker: Callable[..., LocalBroker], make_client: Make) -> None:
    ca = trustme.CA()
    broker = start_broker(context=server_of(expired(ca, "127.0.0.1")).context())
    client = make_client(broker.url, tls=client_of(ca))
    assert not client.wait_connected(5)
    assert str(client.end).endswith("certificate not trusted: the certificate is not valid at this time")


def test_files_that_are_not_there() -> None:
    with pytest.raises(ArgumentError, match="cafile: cannot read /none.pem: No such file"):
        SmqClient("https://a.example/", cafile="/none.pem")


def test_a_function_makes_the_connection(broker: LocalBroker, make_client: Make) -> None:
    made: list[Stream] = []

    def connect() -> Stream:
        made.append(Stream.connect("127.0.0.1", broker.port, 5))
        made[-1].write(b"GET /smq.lsp HTTP/1.1\r\nHost: x\r\nSimpleMQ: 1\r\n\r\n")
        return made[-1]

    client = make_client(connect)
    assert client.wait_connected(5)
    made[0].close()
    wait_until(lambda: len(made) >= 2 and client.connected)


def test_a_function_that_can_not(make_client: Make) -> None:
    def connect() -> Stream:
        raise StreamError("cannotconnect", "not today")

    client = make_client(connect, reconnect=False)
    assert not client.wait_connected(5)
    assert (client.end.word, str(client.end)) == (
        "cannotconnect",
        "the connection of the application: no connection: not today",
    )


@pytest.mark.parametrize("url", ["mqtt://anna:secret@h", "http://anna:secret@h:99999", "http://anna:sec/secret@h"])
def test_errors_do_not_contain_the_password(url: str) -> None:
    with pytest.raises(ArgumentError, match="anna") as caught:
        SmqClient(url)
    assert "sec" not in str(caught.value)


def test_a_program_without_onclose_gets_a_warning_of_the_first_failure(
    make_client: Make, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"http://127.0.0.1:{free_port()}/"
    ends: list[str] = []
    options = {"reconnect_delay": 0.01, "reconnect_delay_max": 0.01}
    with caplog.at_level(logging.INFO, "smqrt.client"):
        make_client(url, **options)
        wait_until(lambda: len(caplog.records) >= 3)
        levels = [record.levelno for record in caplog.records[:3]]
        assert levels == [logging.WARNING, logging.INFO, logging.INFO]
        assert caplog.messages[0] == f"not connected: {url}: connection refused; is the server running there?"
        make_client(url, onclose=lambda word, can_reconnect: ends.append(word), **options)
        wait_until(lambda: ends)
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1


def test_a_denied_subscription_without_onack_is_logged(
    start_broker: Callable[..., LocalBroker], make_client: Make, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(start_broker(permittop=lambda topic, issub, peer: topic == "say").url)
    answers: list[bool] = []
    client.subscribe(b"secret")
    client.subscribe("other", onack=lambda accepted, topic, tid: answers.append(accepted))
    client.subscribe("say", onack=lambda accepted, topic, tid: answers.append(accepted))
    wait_until(lambda: answers == [False, True])
    gevent.sleep(0)
    assert [record.getMessage() for record in caplog.records if record.name == "smqrt.client"] == [
        "the broker denied the subscription to 'secret'"
    ]
