"""Even distribution of connections over the workers of a server.

The kernel distributes connections by a hash. This is even for thousands, but a hundred connections on two workers
split 50 to 50, give or take 10. When a worker has died, its clients reconnect to all workers, and the imbalance stays
for days. Therefore a worker with more connections than another passes new ones on, over a socket pair, before it
reads any data. Shared memory contains the number of open connections of each worker.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import mmap
import os
import socket
import struct
import sys
import termios
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gevent import get_hub

from smqrt.loop.readiness import READ
from smqrt.transport.admission import CONNECTIONS, open_connections
from smqrt.transport.tls import Address

SLACK, SLACK_SHARE = 3, 32
"""A worker keeps this many connections more than another, and one more for each 32 of the other's: passing one on costs
more than a small imbalance."""
MAX_RECEIVED = 64
"""Connections received per event of the loop."""
MAX_IN_TRANSIT_BYTES = 16 * 768
"""The most in transit to one worker, so that a blocked worker gets no more: 16 connections, of which the kernel counts
each as 768 bytes."""
MAX_REJECTED = 1000
_MESSAGE_BYTES = 512
_ANCILLARY_BYTES = socket.CMSG_LEN(4)
"""One descriptor. `socket.recv_fds` ignores its flags in Python 3.11."""
_CELL_BYTES = 4


class BalanceSockets:
    """The shared memory and socket pairs of the workers, created by their supervisor.

    The sockets outlive a worker: the next process receives the connections in transit to one that has died.

    Args:
        count: number of workers.

    Raises:
        OSError: there are no descriptors left.
    """

    def __init__(self, count: int) -> None:
        self._table = os.memfd_create("smqrt-connections")
        os.ftruncate(self._table, 2 * _CELL_BYTES * count)
        self._cells = _cells(self._table, count)
        self._count = count
        self._pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]

    def filenos(self) -> tuple[list[int], list[int]]:
        """Return the descriptors for `Balance`, in two lists because a message has at most 253."""
        inboxes, senders = zip(*self._pairs, strict=True)
        return [self._table, *(one.fileno() for one in inboxes)], [one.fileno() for one in senders]

    def accepting(self, numbers: Iterable[int]) -> None:
        """Set the workers that accept connections of others."""
        accepting = set(numbers)
        for number in range(self._count):
            self._cells[self._count + number] = number in accepting

    def close(self) -> None:
        """Close the descriptors of this process."""
        os.close(self._table)
        for sock in itertools.chain.from_iterable(self._pairs):
            sock.close()


class Balance:
    """The balancing of one worker: passes connections on and receives those of others.

    Args:
        number: number of the worker.
        table_and_inboxes, senders: see `BalanceSockets.filenos`; owned by this object.
    """

    def __init__(self, number: int, table_and_inboxes: Sequence[int], senders: Sequence[int]) -> None:
        table, *inboxes = table_and_inboxes
        self._number, count = number, len(inboxes)
        self._cells = _cells(table, count)
        os.close(table)
        self._open, self._accepts = self._cells[:count], self._cells[count:]
        self._inboxes = [socket.socket(fileno=fd) for fd in inboxes]
        self._senders = [socket.socket(fileno=fd) for fd in senders]
        for one in (*self._inboxes, *self._senders):
            one.setblocking(False)
        self._watchers: list[Any] = [get_hub().loop.io(one.fileno(), READ) for one in self._inboxes]
        self._receives_for = {number}
        self._takers: dict[str, Callable[[int, Address], object]] = {}
        self._accepting: set[str] = set()
        open_connections.publish_in(self._open[number : number + 1])

    # ---- passing on

    def gives(self, name: str, fd: int, address: Address) -> bool:
        """Pass an accepted connection on to the worker with the fewest. Return False when this worker keeps it.

        Args:
            name: name of the listener that accepted it.
            fd: descriptor of the connection; closed here when it is passed on.
            address: address of the client.
        """
        least = min(self._open)
        if self._open[self._number] <= least + SLACK + least // SLACK_SHARE:  # the cheaper test first
            return False
        accepting = [number for number, accepts in enumerate(self._accepts) if accepts]
        to = min((*accepting, self._number), key=self._open.__getitem__)
        if self._open[self._number] <= self._open[to] + SLACK + self._open[to] // SLACK_SHARE:
            return False
        message = json.dumps([name, *address]).encode()
        try:
            unread: int = struct.unpack("i", fcntl.ioctl(self._senders[to], termios.TIOCOUTQ, bytes(4)))[0]
            if unread > MAX_IN_TRANSIT_BYTES or len(message) > _MESSAGE_BYTES:
                return False
            if not open_connections.use_rate(address[0]):
                return False  # the caller refuses it
            socket.send_fds(self._senders[to], [message], [fd])
        except OSError:
            return False  # no memory, or too many descriptors in transit
        os.close(fd)
        self._open[to] += 1  # the receiver counts later: until then all new connections would go there
        return True

    # ---- receiving

    def add(self, name: str, take: Callable[[int, Address], object]) -> None:
        """Call `take` with descriptor and address of each connection for the listener of that name."""
        self._takers[name] = take

    def begin(self, name: str) -> None:
        """Receive connections: the listener of that name accepts."""
        self._accepting.add(name)
        self._watch()

    def rest(self, name: str) -> None:
        """Note that a listener has stopped; with the last one this worker leaves connections to the next process."""
        self._accepting.discard(name)
        self._watch()

    def take_for(self, others: Iterable[int]) -> None:
        """Also receive the connections in transit to these workers, which do not accept."""
        self._receives_for = {self._number, *others}
        self._watch()

    def _watch(self) -> None:
        for number, watcher in enumerate(self._watchers):
            if self._accepting and number in self._receives_for:
                watcher.start(self._readable, self._inboxes[number])
            else:
                watcher.stop()

    def _readable(self, inbox: socket.socket) -> None:
        for fd, name, address in _received(inbox, MAX_RECEIVED):
            take = self._takers.get(name)
            if take is None:
                os.close(fd)  # the port of a listener that this worker does not have
            else:
                take(fd, address)

    def leave(self) -> None:
        """Stop other workers from passing connections on to this one."""
        self._accepts[self._number] = 0

    def turn_away(self, say_busy: Callable[[str, int], object]) -> None:
        """Reject all connections in transit to this worker.

        Args:
            say_busy: called with the listener's name and the descriptor of each, which it closes.
        """
        for number in self._receives_for:
            for fd, name, _ in _received(self._inboxes[number], MAX_REJECTED):
                say_busy(name, fd)

    def close(self) -> None:
        """Close the sockets and watchers. A second call does nothing."""
        for watcher in self._watchers:
            watcher.stop()
            watcher.close()
        self._watchers = []
        for one in (*self._inboxes, *self._senders):
            one.close()


def _received(inbox: socket.socket, max_count: int) -> Iterator[tuple[int, str, Address]]:
    """Yield descriptor, listener name and client address of the connections in transit."""
    for _ in range(max_count):
        try:
            message, ancillary, _, _ = inbox.recvmsg(_MESSAGE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return  # no more
        if not ancillary:
            CONNECTIONS.refused("a connection of another worker", "no file descriptors are left")
            continue
        ((_, _, fd),) = ancillary
        name, *address = json.loads(message)
        yield int.from_bytes(fd, sys.byteorder), name, tuple(address)


def _cells(table: int, count: int) -> memoryview:
    """Map the shared 32-bit numbers: open connections of each worker, then whether each accepts."""
    return memoryview(mmap.mmap(table, 2 * _CELL_BYTES * count)).cast("I")
