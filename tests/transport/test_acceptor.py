"""Listening sockets that are asked: a burst of clients, and a lack of file descriptors."""

from __future__ import annotations

import os
import resource
import select
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import gevent
import pytest
from gevent import socket

from smqrt.errors import StreamError
from smqrt.loop.scheduling import block
from smqrt.transport.listener import PAUSE_S, Acceptor

BURST = 1000


@pytest.fixture
def acceptor() -> Iterator[Acceptor]:
    listening = Acceptor(0, "127.0.0.1")
    yield listening
    listening.close()


def callers(acceptor: Acceptor, count: int) -> list[Any]:
    """Sockets that have begun to connect."""
    made = [socket.socket() for _ in range(count)]
    for one in made:
        one.setblocking(False)
        one.connect_ex(acceptor.sockname())
    return made


def test_a_burst_waits_in_the_kernel_queue(acceptor: Acceptor) -> None:
    """Whoever finds no room there is not refused: his system tries again after 1 s, 3 s, 7 s and so on, and the fifth
    try comes later than most clients are ready to wait."""
    began_s = time.monotonic()
    burst = callers(acceptor, BURST)
    poll = select.poll()
    for one in burst:
        poll.register(one.fileno(), select.POLLOUT)
    while (connected := len(poll.poll(10))) < BURST and time.monotonic() - began_s < 0.8:
        pass
    assert connected == BURST
    for one in burst:
        one.close()


def take_all(taken: list[int]) -> None:
    """Add every free descriptor, as those that earlier tests have just let go."""
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))


@pytest.fixture
def no_descriptors(acceptor: Acceptor) -> Iterator[list[int]]:
    """All file descriptors but one are taken, the list gives them back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = callers(acceptor, 2)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 2, hard))
    take_all(taken)
    yield taken
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for one in waiting:
        one.close()


def test_a_lack_of_file_descriptors_is_waited_out(
    acceptor: Acceptor, no_descriptors: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert acceptor.try_accept() is None
    began_s = time.process_time()
    block(acceptor.acceptable())
    assert time.process_time() - began_s < PAUSE_S / 2  # nobody runs in circles
    take_all(no_descriptors)
    assert acceptor.try_accept() is None
    assert [record.message for record in caplog.records] == [
        "cannot accept connections: Too many open files; raise the limit of open files (ulimit -n)"
    ]
    for fd in no_descriptors:
        os.close(fd)
    block(acceptor.acceptable())
    for _ in range(2):
        acceptor.try_accept().close()
    assert acceptor.try_accept() is None


def test_closing_ends_the_wait_for_descriptors(acceptor: Acceptor, no_descriptors: list[int]) -> None:
    assert acceptor.try_accept() is None
    waiting = gevent.spawn(block, acceptor.acceptable())
    gevent.sleep(0)
    acceptor.close()
    with pytest.raises(StreamError, match="socketclosed"):
        waiting.get(timeout=1)
    for fd in no_descriptors:
        os.close(fd)
