"""Order of servers: addresses, learned servers, times between attempts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from smqrt.cluster.nats.options import MAX_SERVERS, NatsAddress, ServerPool, parse_server, parse_servers


def test_addresses() -> None:
    assert parse_server("nats://u%40x:p%2C@host:1") == NatsAddress("host", 1, user="u@x", password="p,")
    assert parse_server("tls://token@host") == NatsAddress("host", 4222, secure=True, user="token")
    assert parse_server("[::1]:7") == NatsAddress("::1", 7)
    assert str(parse_server("nats://u:p@[::1]")) == "nats://[::1]:4222"
    assert str(parse_server("tls://h:1")) == "tls://h:1"
    assert parse_servers(" nats://a , b:1,nats://a:4222") == [NatsAddress("a"), NatsAddress("b", 1)]
    assert parse_servers(["a", "b"]) == [NatsAddress("a"), NatsAddress("b")]


def pool(*hosts: str, draw: Callable[[], float] = lambda: 1.0) -> ServerPool:
    return ServerPool([NatsAddress(host) for host in hosts], 0.1, 5, draw)


def test_each_server_has_its_own_time() -> None:
    a, b = NatsAddress("a"), NatsAddress("b")
    servers = pool("a", "b")
    assert servers.next() == (a, 0)
    servers.failed(a, 100)
    assert servers.next() == (b, 0)
    servers.failed(b, 100, at_least_s=30)
    assert servers.next() == (a, 100.1)
    times = []
    for _ in range(10):
        servers.failed(a, 100)
        times.append(round(servers.next()[1] - 100, 3))
    assert times == [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5, 5]
    servers.forget_failures(a)
    servers.failed(a, 100)
    assert servers.next() == (a, 100.1)
    servers.postpone(a, 160)
    assert servers.next() == (b, 130)


def test_a_connection_that_broke_is_made_again_at_once() -> None:
    a = NatsAddress("a")
    servers = pool("a")
    for _ in range(5):
        servers.failed(a, 100)
    servers.retry_at_once(a, 110)
    assert servers.next() == (a, 110)
    servers.failed(a, 110)
    assert servers.next() == (a, 110.1), "and then after the usual times"


def test_the_times_are_drawn() -> None:
    for drawn, wanted_s in ((0.0, 100.05), (1.0, 100.1)):
        servers = pool("a", draw=lambda drawn=drawn: drawn)
        servers.failed(NatsAddress("a"), 100)
        assert servers.next()[1] == pytest.approx(wanted_s)


def test_what_is_learned() -> None:
    source = parse_server("tls://u:p@one.example")
    servers = ServerPool([source], 0.1, 5, lambda: 1.0)
    new = servers.learn(source, ["10.0.0.1:4222", "two.example:4222", "one.example:4222", "http://x", ":"])
    assert new == [
        NatsAddress("10.0.0.1", 4222, True, "one.example", "u", "p"),
        NatsAddress("two.example", 4222, True, None, "u", "p"),
    ]
    # From one that was learned: the name of its certificate goes on.
    assert servers.learn(new[0], ["10.0.0.2:4222", "10.0.0.1:4222"])[0].tls_hostname == "one.example"
    # What is not told of any more is forgotten, but not what was given.
    assert [str(one) for one in servers.addresses] == [
        "tls://one.example:4222",
        "tls://10.0.0.1:4222",
        "tls://10.0.0.2:4222",
    ]
    servers.learn(source, [f"10.1.0.{number % 250}:{1 + number}" for number in range(1000)])
    assert len(servers) == MAX_SERVERS
    servers.failed(NatsAddress("gone"), 0)
    servers.forget_failures(NatsAddress("gone"))
    servers.postpone(NatsAddress("gone"), 0)
