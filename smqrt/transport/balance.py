"""Connections are spread evenly over the workers of a server: one that has more than another gives it those that come.

The kernel spreads them by a hash, which is even for thousands. A hundred are 50 and 50 give or take 10, and when a
worker has died its clients come back to all, so that the others keep them for days. How many each worker has open is in
memory that all share; an accepted connection goes to another worker over a socket pair, before a byte of it was read.
"""

from __future__ import annotations

import fcntl
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

SLACK, SLACK_SHARE = 3, 32
"""So many connections more than another worker, and one more for each 32 of that one's, a worker keeps: to give one
away costs more than an uneven connection does."""
TAKEN_AT_ONCE = 64
WAITING_BYTES = 16 * 768
"""What may be on its way to one worker: 16 connections, of which the kernel counts each so. A worker that something
holds gets no more."""
MAX_ON_THE_WAY = 1000
_MESSAGE_BYTES = 512
_ANCILLARY_BYTES = socket.CMSG_LEN(4)
"""One descriptor. `socket.recv_fds` takes no notice of its flags in Python 3.11."""
_CELL_BYTES = 4


class BalanceSockets:
    """What the workers of a server share for that, made by their supervisor: the sockets outlive a worker, and what is
    on its way to a process that dies is taken by the next one.

    Args:
        count: of the workers.

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
        """What `Balance` takes; in two lists, since a message has no more than 253 of them."""
        inboxes, senders = zip(*self._pairs, strict=True)
        return [self._table, *(one.fileno() for one in inboxes)], [one.fileno() for one in senders]

    def accepting(self, numbers: Iterable[int]) -> None:
        """Say which workers may be given connections."""
        wanted = set(numbers)
        for number in range(self._count):
            self._cells[self._count + number] = number in wanted

    def close(self) -> None:
        """Close them in this process."""
        os.close(self._table)
        for one in (one for pair in self._pairs for one in pair):
            one.close()


class Balance:
    """A worker's part.

    Args:
        number: of the worker.
        table_and_inboxes, senders: see `BalanceSockets.filenos`; they are its own from now on.
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
        self._takes_for = {number}
        self._takers: dict[str, Callable[[int, tuple[Any, ...]], object]] = {}
        self._accepting: set[str] = set()
        open_connections.publish_in(self._open[number : number + 1])

    # ---- giving

    def gives(self, name: str, fd: int, address: tuple[Any, ...]) -> bool:
        """Give an accepted connection to the worker that has fewest, when this one has too many; False when it stays.

        Args:
            name: of the listener that accepted it.
            fd: of the connection; closed here when it was given.
            address: of the client.
        """
        least = min(self._open)
        if self._open[self._number] <= least + SLACK + least // SLACK_SHARE:
            return False
        to = self._fewest()
        if self._open[self._number] <= self._open[to] + SLACK + self._open[to] // SLACK_SHARE:
            return False
        message = json.dumps([name, *address]).encode()
        try:
            if _waiting_bytes(self._senders[to]) > WAITING_BYTES or len(message) > _MESSAGE_BYTES:
                return False
            if not open_connections.may_come(address[0]):
                return False  # and is refused here
            socket.send_fds(self._senders[to], [message], [fd])
        except OSError:
            return False  # there is no memory for it, or too many descriptors are on their way
        os.close(fd)
        self._open[to] += 1  # until it says so itself, those that come at the same moment would all go there
        return True

    def _fewest(self) -> int:
        """The worker with the fewest connections of those that accept, this one among them."""
        accepting = [number for number, accepts in enumerate(self._accepts) if accepts]
        return min((*accepting, self._number), key=self._open.__getitem__)

    # ---- taking

    def add(self, name: str, take: Callable[[int, tuple[Any, ...]], object]) -> None:
        """Have `take` called with descriptor and address of what is given to the listener of that name."""
        self._takers[name] = take

    def begin(self, name: str) -> None:
        """The listener of that name accepts."""
        self._accepting.add(name)
        self._watch()

    def rest(self, name: str) -> None:
        """It accepts no more; what is on its way here is left to the next process when no other one does."""
        self._accepting.discard(name)
        self._watch()

    def take_for(self, others: Iterable[int]) -> None:
        """Take what is on its way to these workers, too, which don't accept themselves."""
        self._takes_for = {self._number, *others}
        self._watch()

    def _watch(self) -> None:
        for number, watcher in enumerate(self._watchers):
            if self._accepting and number in self._takes_for:
                watcher.start(self._readable, self._inboxes[number])
            else:
                watcher.stop()

    def _readable(self, inbox: socket.socket) -> None:
        for fd, name, address in _received(inbox, TAKEN_AT_ONCE):
            take = self._takers.get(name)
            if take is None:
                os.close(fd)  # of a port that this worker was started without
            else:
                take(fd, address)

    def leave(self) -> None:
        """Be given no more connections."""
        self._accepts[self._number] = 0

    def turn_away(self, say_busy: Callable[[str, int], object]) -> None:
        """Nobody takes what is on its way to this worker any more: have `say_busy` called with the listener's name and
        the descriptor of each, which is its own from then on.
        """
        for number in self._takes_for:
            for fd, name, _ in _received(self._inboxes[number], MAX_ON_THE_WAY):
                say_busy(name, fd)

    def close(self) -> None:
        """Give and take no more. A second call does nothing."""
        for watcher in self._watchers:
            watcher.stop()
            watcher.close()
        self._watchers = []
        for one in (*self._inboxes, *self._senders):
            one.close()


def _received(inbox: socket.socket, most: int) -> Iterator[tuple[int, str, tuple[Any, ...]]]:
    """Connections that have been given: the descriptor, the name of the listener and the address of the client."""
    for _ in range(most):
        try:
            message, ancillary, _, _ = inbox.recvmsg(_MESSAGE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return  # there are no more
        if not ancillary:
            CONNECTIONS.refused("a connection of another worker", "there are no descriptors left")
            continue
        ((_, _, fd),) = ancillary
        name, *address = json.loads(message)
        yield int.from_bytes(fd, sys.byteorder), name, tuple(address)


def _waiting_bytes(sender: socket.socket) -> int:
    """What was sent, by anybody, and not yet received."""
    found: int = struct.unpack("i", fcntl.ioctl(sender, termios.TIOCOUTQ, bytes(4)))[0]
    return found


def _cells(table: int, count: int) -> memoryview:
    """Numbers of 32 bits: the open connections of each worker, and whether it accepts."""
    return memoryview(mmap.mmap(table, 2 * _CELL_BYTES * count)).cast("I")
