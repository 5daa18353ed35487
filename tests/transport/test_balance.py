"""Shared state of workers that spread connections. The workers themselves are in tests/workers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from smqrt.settings.server_settings import MAX_WORKERS
from smqrt.transport.admission import Balance, BalanceSockets
from smqrt.workers.worker_rpc import MAX_FDS

ADDRESS = ("127.0.0.1", 1234)


def test_the_maximum_of_workers_fits_two_messages() -> None:
    sockets = BalanceSockets(MAX_WORKERS)
    try:
        lists = sockets.filenos()
        assert sum(map(len, lists)) == 1 + 2 * MAX_WORKERS
        assert max(map(len, lists)) <= MAX_FDS
    finally:
        sockets.close()


@pytest.fixture
def workers() -> Iterator[list[Balance]]:
    """Three, of which the first has 10 connections and the last one does not accept any."""
    sockets = BalanceSockets(3)
    made = [Balance(number, *([os.dup(fd) for fd in fds] for fds in sockets.filenos())) for number in range(3)]
    sockets.accepting([0, 1])
    made[0]._open[0] = 10
    yield made
    for one in made:
        one.close()
    sockets.close()


def connection() -> tuple[int, socket.socket]:
    """A descriptor, as an accepted connection is one, and its other end."""
    ours, client = socket.socketpair()
    return ours.detach(), client


def test_the_fullest_worker_passes_to_the_emptiest_accepting_one(workers: list[Balance]) -> None:
    giver, taker, _ = workers
    clients = []
    while True:
        fd, client = connection()
        clients.append(client)
        if not giver.pass_on("http", fd, ADDRESS):
            break
    os.close(fd)
    assert len(clients) == 8, "7 were given, and 3 more than the other has one keeps"
    told: list[tuple[str, int]] = []
    taker.reject_queued(lambda name, fd: told.append((name, fd)))
    assert [name for name, _ in told] == ["http"] * 7
    for (_, fd), client in zip(told, clients, strict=False):
        assert not os.get_inheritable(fd), "children of applications do not get it"
        os.write(fd, b"busy")
        os.close(fd)
        assert client.recv(10) == b"busy"


def test_a_worker_that_left_gets_no_connections(workers: list[Balance]) -> None:
    giver, taker, _ = workers
    fd, _ = connection()
    taker.leave()
    assert not giver.pass_on("http", fd, ADDRESS)
    os.close(fd)


def test_what_does_not_fit_a_message_stays(workers: list[Balance]) -> None:
    fd, _ = connection()
    assert not workers[0].pass_on("x" * 600, fd, ADDRESS)
    os.close(fd)
