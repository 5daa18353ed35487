"""The send queue of a client: bounds, order, and its rest after a broken connection; on real sockets."""

from __future__ import annotations

import _socket
from collections.abc import Iterator

import pytest

from smqrt.cluster.nats.connection import LARGE_BYTES, WRITE_BYTES, NatsOutbox
from smqrt.smq import data_path
from smqrt.wire import nats
from tests.support.waiting import let_others_run, wait_until

LIMIT_BYTES = 1 << 20


class Pair:
    """An outbox and the other end of its connection, which holds little."""

    def __init__(self) -> None:
        data_path.install()
        self.broken: list[OSError] = []
        self.outbox = NatsOutbox(LIMIT_BYTES)
        self.far: _socket.socket | None = None

    def attach(self, *lines: bytes) -> None:
        near, self.far = _socket.socketpair()
        near.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, 4096)
        for sock in (near, self.far):
            sock.setblocking(False)
        self.outbox.attach(near, list(lines), LIMIT_BYTES, self.broken.append)

    def read(self) -> bytes:
        assert self.far is not None
        found = b""
        while True:
            let_others_run(2)
            try:
                found += self.far.recv(1 << 20)
            except BlockingIOError:
                return found


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.outbox.detach(0)


def message(number: int, size_bytes: int = 1000) -> bytes:
    return nats.pub("a", b"%07d" % number + bytes(size_bytes - 7))


def test_lines_go_first_and_cost_no_room(pair: Pair) -> None:
    pair.outbox.add(message(1))
    assert pair.outbox.limit_bytes == LIMIT_BYTES
    line = nats.sub("a", 7)
    pair.attach(line)
    assert pair.outbox.limit_bytes == LIMIT_BYTES + len(line)
    assert pair.read() == line + message(1)
    assert pair.outbox.queued_bytes == 0


def test_nothing_is_lost_or_torn_over_a_narrow_connection(pair: Pair) -> None:
    pair.attach()
    wanted = [message(number, 7 + number * 37) for number in range(400)]
    for entry in wanted:
        pair.outbox.add(entry)
    found = pair.read()
    assert found == b"".join(wanted)
    assert pair.outbox.queued_bytes == 0
    assert pair.outbox.sent_bytes == len(found)


def test_a_write_is_bounded(pair: Pair) -> None:
    sizes: list[int] = []

    class Wide:
        def fileno(self) -> int:
            return near.fileno()

        def send(self, data: bytes) -> int:
            sizes.append(len(data))
            return len(data)

    near, far = _socket.socketpair()
    pair.outbox.attach(Wide(), [], LIMIT_BYTES, pair.broken.append)  # type: ignore[arg-type]
    for number in range(1000):
        pair.outbox.add(message(number))
    pair.outbox.add(message(0, 2 * WRITE_BYTES))
    wait_until(lambda: not pair.outbox.queue)
    assert max(sizes[:-1]) <= LARGE_BYTES < WRITE_BYTES < sizes[-1]
    assert len(sizes) == 33
    far.close()


def test_what_a_broken_connection_leaves(pair: Pair) -> None:
    pair.attach()
    pair.outbox.add(message(0, 100_000))
    pair.outbox.add(nats.sub("a", 1))
    let_others_run()  # a part of both is on its way
    pair.outbox.add(nats.unsub(1))
    pair.outbox.add(nats.PING)
    for number in range(1, 4):
        pair.outbox.add(message(number))
    assert pair.outbox.detach(2 * len(message(0))) == 2  # the one that was torn, and the newest
    assert pair.outbox.queue == [message(1), message(2)]
    assert pair.outbox.queued_bytes == pair.outbox.limit_bytes == 2 * len(message(0))
    pair.attach(nats.sub("b", 2))
    assert pair.read() == nats.sub("b", 2) + message(1) + message(2)
    assert pair.outbox.detach(LIMIT_BYTES) == 0


def test_clients_that_read_nothing_get_one_answer(pair: Pair) -> None:
    pair.attach()
    pair.outbox.add(message(0, 50_000))
    let_others_run()
    for _ in range(1000):
        pair.outbox.add_pong()
    assert pair.outbox.queue == [nats.PONG]
    assert pair.read() == message(0, 50_000) + nats.PONG
    pair.outbox.add_pong()
    pair.outbox.add_pong()
    assert pair.read() == 2 * nats.PONG


def test_a_broken_connection_is_reported(pair: Pair) -> None:
    pair.attach()
    assert pair.far is not None
    pair.far.close()
    pair.outbox.add(message(0))
    wait_until(lambda: pair.broken)
    assert pair.outbox.detach(LIMIT_BYTES) == 0
    assert pair.outbox.queue == [message(0)]
