"""Connections that end: servers that are killed, stopped, full, or that lie; alone and in a cluster."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import gevent
import pytest
from gevent.server import StreamServer

from smqrt.cluster.nats import NatsClient, NatsState
from smqrt.cluster.nats import client as nats_client
from smqrt.cluster.nats.client import LASTED_S
from tests.cluster.cut import Cable
from tests.cluster.nats.server import NatsServer
from tests.support.factory import Factory
from tests.support.waiting import wait_until

Make = Callable[..., NatsClient]
Start = Callable[..., NatsServer]
INFO = b'INFO {"server_id":"x","max_payload":1000,"headers":true}\r\n'


def collected(client: NatsClient, subject: str) -> list[bytes]:
    found: list[bytes] = []
    client.subscribe(subject, lambda _, payload, *__: found.append(payload))
    return found


def test_a_server_that_is_killed_and_started_again(start_nats: Start, client: Make) -> None:
    server = start_nats()
    states: list[tuple[NatsState, str]] = []
    one = client(server.url, on_state=lambda *state: states.append(state), longest_reconnect_s=0.2)
    found = collected(one, "a.*")
    ended = one.subscribe("a.b", print)
    assert one.flush(10)
    for round_ in range(3):
        server.kill()
        wait_until(lambda: one.state is NatsState.DISCONNECTED)
        # What changes meanwhile holds for the next connection; what is published waits for it.
        more = collected(one, f"b.{round_}")
        if round_ == 0:
            one.unsubscribe(ended)
        assert one.publish("a.x", b"%d" % round_)
        assert one.publish(f"b.{round_}", b"")
        server.start()
        wait_until(lambda: len(found) == round_ + 1)  # noqa: B023
        wait_until(lambda: more == [b""])  # noqa: B023
    assert found == [b"0", b"1", b"2"]
    assert one.counters.reconnects == 3
    assert one.counters.lost == 0
    told = [state for state, _ in states]
    assert told[:2] == [NatsState.CONNECTED, NatsState.DISCONNECTED]
    assert told.count(NatsState.CONNECTED) == 4
    assert states[1][1].startswith(server.url)


def test_a_repeatedly_cut_connection_reconnects_at_once(
    start_nats: Start, client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cable = Cable(start_nats().port)
    told: list[tuple[float, NatsState]] = []
    one = client(
        f"nats://127.0.0.1:{cable.port}",
        on_state=lambda state, _: told.append((time.monotonic(), state)),
        reconnect_s=2,
        longest_reconnect_s=20,
    )
    assert one.flush(10)
    for cut in range(1, 6):
        gevent.sleep(LASTED_S + 0.05)
        cable.mend()  # ends the connections there are
        wait_until(lambda cut=cut: one.counters.reconnects == cut and one.state is NatsState.CONNECTED, told)
    downs = [after[0] - before[0] for before, after in pairwise(told) if before[1] is NatsState.DISCONNECTED]
    assert len(downs) == 5
    assert max(downs) < 1, "without the 1 to 2 s that are waited after a failure"
    # A server that ends each connection as soon as it is made is left alone.
    monkeypatch.setattr(nats_client, "LASTED_S", 1000)
    cable.mend()
    wait_until(lambda: told[-1][1] is NatsState.DISCONNECTED, told)
    gevent.sleep(0.5)
    assert told[-1][1] is NatsState.DISCONNECTED
    cable.close()


def test_many_subscriptions_come_back_in_shares_of_a_turn(start_nats: Start, client: Make) -> None:
    server = start_nats()
    one = client(server.url, longest_reconnect_s=0.2)
    count = 30_000
    subscriptions = [one.subscribe(f"many.{number}", lambda *_: None) for number in range(count)]
    assert one.flush(20)
    server.kill()
    wait_until(lambda: not one.connected)
    last_s, longest_s = time.thread_time(), 0.0
    server.start()
    changed = False
    while not one.connected:
        gevent.sleep(0.0005)
        now_s = time.thread_time()
        last_s, longest_s = now_s, max(longest_s, now_s - last_s)
        if one.subscriptions.late_lines is not None and not changed:
            changed = True
            one.unsubscribe(subscriptions[0])
            one.unsubscribe(subscriptions[-1])
            found = collected(one, "many.late")
    assert changed
    assert longest_s < 0.05
    assert one.publish("many.late", b"yes")
    assert one.publish("many.0", b"")
    assert one.publish(f"many.{count - 1}", b"")
    assert one.publish("many.1", b"")
    assert one.flush(20)
    assert found == [b"yes"]
    assert one.counters.received == 2
    assert one.counters.strays == 0


def test_a_cluster(start_cluster: Callable[..., list[NatsServer]], client: Make) -> None:
    servers = start_cluster(3, "lame_duck_duration: 30s\nlame_duck_grace_period: 10s")
    one = client(servers[0].url, longest_reconnect_s=0.2)
    other = client(servers[2].url, longest_reconnect_s=0.2)
    wait_until(lambda: len(one.servers) == 3)  # learned
    found = collected(other, "c")
    other.flush(10)
    wait_until(lambda: one.publish("c", b"") and found)  # interest has to reach the other server
    # Its server is killed: another one takes it at once.
    servers[0].kill()
    wait_until(lambda: one.counters.reconnects == 1 and one.connected)
    assert one.server is not None
    assert one.server.port != servers[0].port
    # The other's says that it will end: it goes before it has to.
    servers[2].send(signal.SIGUSR2)
    wait_until(lambda: other.counters.reconnects == 1 and other.connected)
    assert other.server is not None
    assert other.server.port == servers[1].port
    assert other.counters.lost == 0
    left = next(one for one in other._pool._known.values() if one.address.port == servers[2].port)
    assert left.not_before_s - time.monotonic() > 30
    assert servers[2].process.poll() is None
    found.clear()
    wait_until(lambda: one.publish("c", b"") and found)


def test_a_reader_that_is_too_slow(start_nats: Start, client: Make) -> None:
    server = start_nats('write_deadline: "200ms"\nmax_payload: 65536\nmax_pending: 65536')
    slow, quick = client(server.url), client(server.url)
    found = collected(slow, "s")
    assert slow.flush(10)
    slow._connection._watcher.stop()  # type: ignore[union-attr]  # as one whose process stands still
    for _ in range(200):
        quick.publish("s", bytes(60_000))
        quick.flush(10)
    slow._connection._watcher.start(slow._connection._readable)  # type: ignore[union-attr]
    wait_until(lambda: slow.counters.reconnects == 1 and slow.connected)
    found.clear()
    assert slow.flush(10)
    quick.publish("s", b"again")
    wait_until(lambda: b"again" in found)


# ---- servers that lie


@pytest.fixture
def lying() -> Iterator[Callable[..., str]]:
    """A factory of servers that say what they are given: `lying(b"...")` is the address of one."""
    with Factory(_start_lying, lambda server: server[0].stop(0)) as start:
        yield lambda *arguments: start(*arguments)[1]


def _start_lying(greeting: bytes, *flood: Any) -> tuple[StreamServer, str]:
    def serve(sock: Any, _address: Any) -> None:
        sock.sendall(greeting)
        if flood:
            sock.recv(65536)
            sock.sendall(b"PONG\r\n")
            flood[0](sock)
        else:
            sock.recv(65536)
            gevent.sleep(0.1)

    server = StreamServer(("127.0.0.1", 0), serve)
    server.start()
    return server, f"nats://127.0.0.1:{server.server_port}"


QUICK = {"reconnect_s": 0.01, "longest_reconnect_s": 0.01, "connect_timeout_s": 0.3, "wait": False}


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "unknown operation"),
        (b"INFO {}\r\nMSG a 1 0\r\n\r\n", "before a subscription"),
        (b"INFO []\r\n", "not a JSON object"),
        (b"INFO " + b"x" * 100_000, "a line of more than"),
        (b"", "did not accept within 0.3 s"),
        (INFO, "socketclosed"),
        (INFO + b"-ERR 'maximum connections exceeded'\r\n", "maximum connections exceeded"),
        (INFO + b"PING\r\n" * 50_000, "socketclosed|did not accept|socketreadfailed"),
    ],
)
def test_what_is_no_server_of_nats(greeting: bytes, words: str, lying: Callable[..., str], client: Make) -> None:
    one = client(lying(greeting), **QUICK)
    wait_until(lambda: any(word in one.reason for word in words.split("|")), words)
    assert one.state is NatsState.CONNECTING


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"BAD\r\n", "violated the protocol"),
        (b"MSG a 1 99999999\r\n", "violated the protocol"),
        (b"-ERR 'Stale Connection'\r\n", "Stale Connection"),
        (b"-ERR 'Slow Consumer'\r\n", "Slow Consumer"),
        (b"-ERR 'User Authentication Expired'\r\n", "check the user and password"),
    ],
)
def test_a_connection_that_goes_wrong(said: bytes, words: str, lying: Callable[..., str], client: Make) -> None:
    reasons: list[str] = []
    url = lying(INFO, lambda sock: (sock.sendall(said), gevent.sleep(0.2)))
    one = client(url, on_state=lambda _, reason: reasons.append(reason), **QUICK)
    wait_until(lambda: any(words in reason for reason in reasons), reasons)
    assert one.counters.slow_consumer == ("Slow" in words)
    if "password" in words:
        assert one._pool.next()[1] - time.monotonic() > 10


@pytest.mark.parametrize(("steady_s", "most", "least"), [(60, 12, 0), (0, 1000, 15)])
def test_a_server_with_brief_connections_is_tried_less(
    steady_s: float, most: int, least: int, lying: Callable[..., str], client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smqrt.cluster.nats.client.STEADY_S", steady_s)
    one = client(lying(INFO, lambda sock: sock.close()), wait=False, reconnect_s=0.01)
    gevent.sleep(1)
    assert least <= one.counters.reconnects <= most


def test_a_flood_never_holds_the_loop(lying: Callable[..., str], client: Make) -> None:
    small = b"PING\r\nMSG a 1 0\r\n\r\nPONG\r\nMSG a 2 5\r\nhello\r\n" * 2000

    def flood(sock: Any) -> None:
        sock.recv(1000)  # SUB
        sock.settimeout(1)
        try:
            while True:
                sock.sendall(small)
        except OSError:
            pass

    one = client(lying(INFO, flood), wait=False, pong_s=0.5)
    found = collected(one, "a")
    last_s, longest_s, until_s = time.thread_time(), 0.0, time.monotonic() + 1
    while time.monotonic() < until_s:
        gevent.sleep(0.0005)
        now_s = time.thread_time()
        last_s, longest_s = now_s, max(longest_s, now_s - last_s)
    assert len(found) > 1000
    assert one.counters.strays > 1000
    assert longest_s < 0.05
    assert one.queued_bytes < 1 << 20  # it reads no PONGs; one waits
