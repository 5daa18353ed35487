"""The NATS client against a real server: messages, subscriptions, bounds, and the end."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable

import gevent
import pytest

from smqrt.cluster.nats import NatsClient, NatsState
from smqrt.errors import ArgumentError, ClosedError, NoAnswer
from smqrt.wire.nats import parse_headers
from tests.cluster.nats.server import NatsServer
from tests.support.waiting import let_others_run, wait_until

Make = Callable[..., NatsClient]
Message = tuple[bytes, bytes, bytes, bytes]


def collect(client: NatsClient, subject: str, **options: str) -> list[Message]:
    """The messages that come from now on."""
    found: list[Message] = []
    client.subscribe(subject, lambda *message: found.append(message), **options)
    assert client.flush(10)
    return found


def test_messages_arrive_in_order(nats_server: NatsServer, client: Make) -> None:
    one, two = client(nats_server.url), client(f"127.0.0.1:{nats_server.port}")
    found = collect(two, "order.>")
    wanted = [(b"order.a", b"%d" % number + bytes(number % 700), b"", b"") for number in range(3000)]
    for _, payload, _, _ in wanted:
        assert one.publish("order.a", payload)
    wait_until(lambda: len(found) == 3000)
    assert found == wanted
    assert one.counters.published == two.counters.received == 3000
    assert one.counters.published_bytes == two.counters.received_bytes == sum(len(one[1]) for one in wanted)
    assert one.counters.sent_bytes > one.counters.published_bytes
    assert one.queued_bytes == one.counters.lost == 0


def test_replies_headers_groups_and_ends(nats_server: NatsServer, client: Make) -> None:
    one, two = client(nats_server.url), client(nats_server.url)
    found = collect(two, "kinds.*")
    one.publish("kinds.a", b"", "inbox.1")
    one.publish("kinds.b", b"hi", headers={"Trace": "7"})
    one.publish("kinds.c", b"hi", "inbox.2", {"a": "b", "c": "d"})
    wait_until(lambda: len(found) == 3)
    assert found[0] == (b"kinds.a", b"", b"inbox.1", b"")
    assert found[1][:3] == (b"kinds.b", b"hi", b"")
    assert parse_headers(found[1][3]) == (None, {"Trace": "7"})
    assert found[2][2] == b"inbox.2"
    assert parse_headers(found[2][3])[1] == {"a": "b", "c": "d"}
    # A message for a group reaches one of it.
    left, right = collect(one, "work", queue="w"), collect(two, "work", queue="w")
    for _ in range(60):
        one.publish("work", b"")
    wait_until(lambda: len(left) + len(right) == 60)
    assert left
    assert right
    # What is over gets nothing more, and says so to the server.
    gone: list[bytes] = []
    subscription = two.subscribe("gone", lambda _, payload, *__: gone.append(payload))
    two.flush(10)
    two.unsubscribe(subscription)
    two.unsubscribe(subscription)
    assert subscription.is_over
    assert two.flush(10)
    one.publish("gone", b"")
    assert one.flush(10)
    assert two.flush(10)
    assert gone == []
    assert two.counters.strays == 0


def test_what_one_publishes_oneself(nats_server: NatsServer, client: Make) -> None:
    loud, quiet = client(nats_server.url), client(nats_server.url, echo=False)
    heard = collect(loud, "echo"), collect(quiet, "echo")
    loud.publish("echo", b"loud")
    quiet.publish("echo", b"quiet")
    wait_until(lambda: len(heard[0]) == 2)
    quiet.flush(10)
    assert [payload for _, payload, *_ in heard[1]] == [b"loud"]


def test_a_turn_is_one_write(nats_server: NatsServer, client: Make) -> None:
    one = client(nats_server.url)
    found = collect(one, "turn")
    transport = one._connection._transport  # type: ignore[union-attr]
    sent: list[int] = []

    class Counting:
        def send(self, data: bytes) -> int:
            sent.append(len(data))
            return int(transport.send(data))

    one.outbox._transport = Counting()  # type: ignore[assignment]
    for _ in range(500):
        one.publish("turn", b"x" * 50)
    assert sent == []
    wait_until(lambda: len(found) == 500)
    assert len(sent) == 1


def test_a_callback_that_raises_is_logged_and_counted(
    nats_server: NatsServer, client: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one = client(nats_server.url)
    one.subscribe("bad", lambda *_: 1 / 0)
    found = collect(one, "good")
    for subject in ("bad", "bad", "good"):
        one.publish(subject, b"")
    wait_until(lambda: found)
    assert one.counters.failed_callbacks == 2
    assert [record.exc_info is not None for record in caplog.records if "messages to bad" in record.message] == [True]


def test_heavy_readers_yield_to_others(nats_server: NatsServer, client: Make) -> None:
    one, two = client(nats_server.url), client(nats_server.url, ping_s=0.05, pong_s=0.3)  # it looks while much waits
    found: list[int] = []

    def slowly(*_: bytes) -> None:
        until_s = time.thread_time() + 0.001
        while time.thread_time() < until_s:
            pass
        found.append(1)

    two.subscribe("flood", slowly)
    two.flush(10)
    longest_s, last_s = 0.0, time.thread_time()

    def look() -> None:
        nonlocal longest_s, last_s
        now_s = time.thread_time()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s

    timer = gevent.get_hub().loop.timer(0.0005, 0.0005)
    for _ in range(1000):
        one.publish("flood", b"")
    timer.start(look)
    wait_until(lambda: len(found) == 1000)
    timer.stop()
    assert longest_s < 0.05


def test_a_large_message_and_one_that_is_too_large(nats_server: NatsServer, client: Make) -> None:
    one = client(nats_server.url)
    found = collect(one, "large")
    largest = one.info.max_payload_bytes  # type: ignore[union-attr]
    assert one.publish("large", b"x" * largest)
    assert not one.publish("large", b"x" * (largest + 1))
    assert not one.publish("large", b"x" * largest, headers={"a": "b"})
    assert one.publish("large", b"behind")
    wait_until(lambda: len(found) == 2)
    assert [len(payload) for _, payload, *_ in found] == [largest, 6]
    assert one.counters.refused_large == 2
    assert one.connected


def test_what_waits_for_a_slow_server_is_bounded(start_nats: Callable[..., NatsServer], client: Make) -> None:
    server = start_nats()
    one = client(server.url, queue_bytes=1 << 20, pong_s=0.4, ping_s=60, reconnect_queue_bytes=1 << 16)
    server.pause()
    taken = 0
    while one.publish("x", bytes(10_000)):
        taken += 1
        let_others_run(1)
        assert taken < 10_000
    assert one.counters.refused_full == 1
    assert one.queued_bytes <= 1 << 20
    wait_until(lambda: one.state is NatsState.DISCONNECTED)
    assert "read nothing for 0.4 s" in one.reason
    # The newest go when less may wait for the next connection.
    assert one.queued_bytes <= 1 << 16
    assert one.counters.lost > 80
    assert not one.publish("x", bytes(1 << 16))
    assert one.counters.refused_disconnected == 1
    server.send(signal.SIGCONT)
    assert one.wait_connected(20)
    assert one.flush(10)
    assert one.counters.reconnects == 1


def test_a_server_that_does_not_answer_is_left(start_nats: Callable[..., NatsServer], client: Make) -> None:
    server = start_nats()
    one = client(server.url, ping_s=0.2, pong_s=0.3)
    assert 0 < one.rtt(5) < 5
    gevent.sleep(0.8)
    assert one.counters.reconnects == 0  # it answers
    server.pause()
    assert not one.flush(0.01)
    with pytest.raises(NoAnswer):
        one.rtt(0.01)
    began_s = time.monotonic()
    wait_until(lambda: one.state is NatsState.DISCONNECTED)
    assert time.monotonic() - began_s < 5
    assert "did not answer" in one.reason
    assert not one.flush(0.01)
    server.send(signal.SIGCONT)
    assert one.wait_connected(20)
    server.pause()
    flushing = gevent.spawn(one.flush, 60)
    let_others_run()
    server.kill()
    assert flushing.get(timeout=10) is False


def test_close_delivers_messages_in_transit(nats_server: NatsServer, client: Make) -> None:
    one, two = client(nats_server.url), client(nats_server.url)
    states: list[NatsState] = []
    three = client(nats_server.url, on_state=lambda state, _: states.append(state))
    found, late = collect(two, "end"), collect(three, "end")
    for _ in range(2000):
        one.publish("end", b"x" * 100)
    assert one.close()
    assert three.close()
    assert len(late) == 2000
    wait_until(lambda: len(found) == 2000)
    assert not one.publish("end", b"")
    assert one.counters.refused_closed == 1
    with pytest.raises(ClosedError):
        one.subscribe("end", print)
    assert not one.close()
    assert not one.wait_connected(0)
    assert states == [NatsState.CONNECTED, NatsState.CLOSED]


def test_a_group_member_ends_without_loss(nats_server: NatsServer, client: Make) -> None:
    one, two, three = (client(nats_server.url) for _ in range(3))
    left, right = collect(two, "group", queue="g"), collect(three, "group", queue="g")
    count = 4000

    def publish() -> None:
        for number in range(count):
            one.publish("group", b"%d" % number)
            if number % 20 == 0:
                let_others_run(1)

    publishing = gevent.spawn(publish)
    wait_until(lambda: len(left) > 100)
    assert two.close()
    publishing.get()
    wait_until(lambda: len(left) + len(right) == count)
    assert sorted(int(payload) for _, payload, *_ in left + right) == list(range(count))


def test_a_process_that_stood_still_reads_before_it_judges(nats_server: NatsServer, client: Make) -> None:
    one = client(nats_server.url)
    connection = one._connection
    assert connection is not None
    connection._heard_s -= 1000
    connection._tick()  # asks
    gevent.sleep(0)
    let_others_run(1)
    connection._heard_s = connection._pinged_s = time.monotonic() - 1000
    connection.ping(lambda _: None)
    connection._outbox.flush()
    time.sleep(0.2)  # the answer comes meanwhile
    connection._tick()
    assert connection.is_open
    connection._heard_s = connection._pinged_s = time.monotonic() - 1000
    connection._tick()
    assert not connection.is_open


def test_the_end_in_a_callback(nats_server: NatsServer, client: Make) -> None:
    one = client(nats_server.url)
    one.subscribe("stop", lambda *_: one.close())
    one.publish("stop", b"")
    wait_until(lambda: one.state is NatsState.CLOSED)
    two = client(nats_server.url, on_state=lambda *_: two.close(), wait=False)
    wait_until(lambda: two.state is NatsState.CLOSED)


WRONG = ["", "http://a", "nats://", "nats://a:x", "nats://a/b", "ws://a", "nats://a,[::1"]


@pytest.mark.parametrize("servers", WRONG)
def test_what_is_no_address(servers: str, client: Make) -> None:
    with pytest.raises(ArgumentError, match="servers"):
        client(servers, wait=False)


def test_wrong_options_are_named(client: Make) -> None:
    for options, name in (
        ({"pings": 1}, "ping_s"),
        ({"user": "a", "token": "b"}, "user and token"),
        ({"tls_ca": "/nowhere"}, "/nowhere"),
    ):
        with pytest.raises(ArgumentError, match=name):
            client("a", wait=False, **options)
    with pytest.raises(ArgumentError) as caught:
        client("nats://user:secret@host/path", wait=False)
    assert "secret" not in str(caught.value)


def test_no_server_answers(client: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "smqrt.nats")
    one = client("nats://127.0.0.1:1", wait=False, reconnect_s=0.01, longest_reconnect_s=0.01)
    wait_until(lambda: "cannotconnect" in one.reason)
    gevent.sleep(0.2)
    assert one.state is NatsState.CONNECTING
    assert not one.connected
    assert len(caplog.records) == 1  # each reason once
    assert one.publish("a", b"kept")
    assert not one.close(0)
    assert one.counters.lost == 1
