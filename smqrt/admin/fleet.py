"""Questions between the workers of a server: worker 0, which has the admin listener, asks the others.

Each worker answers at a Unix socket in the folder that the workers share: one question for each connection, and an
answer, or events until the other side hangs up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Generator
from time import monotonic
from typing import Any

import gevent
from gevent import socket as gsocket
from gevent.queue import Empty, Queue

from smqrt.errors import SmqrtError
from smqrt.limits import LineLimit
from smqrt.net.fd_channel import ChannelError, FdChannel, Message
from smqrt.net.worker_place import WorkerPlace

log = logging.getLogger("smqrt.admin")

KIND = "admin"
QUESTION_S = 1.0
ANSWER_S = 3.0
"""A worker that takes longer, because an application holds it, is left out."""
SILENT_S = 10.0
"""So long a worker that took longer is not asked again: an operator who looks at one page asks many questions."""
BACKLOG, QUESTION_BYTES = 64, 2 << 20
EVENTS = 1000
"""Of a trace, that may wait for who reads it."""

Answers = Generator[Message, None, None]
Events = Generator[Any, None, None]


class Desk:
    """Where a worker answers.

    Args:
        place: which worker this is.
        answer: gives what is to be answered to a question, one message or more; called in a greenlet of its own.

    Raises:
        OSError: the socket can't be made.
    """

    def __init__(self, place: WorkerPlace, answer: Callable[[Message], Answers]) -> None:
        path = place.socket_path(place.number, KIND)
        beside = path.with_suffix(f".{os.getpid()}")
        self._answer = answer
        self._socket = gsocket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(str(beside))
            self._socket.listen(BACKLOG)
            beside.rename(path)  # the process before, at a hot restart, has that name until now
        except OSError:
            self._socket.close()
            raise
        self._accepting: gevent.Greenlet[..., None] | None = None

    def start(self) -> None:
        """Begin to answer."""
        self._accepting = gevent.spawn(self._accept)

    def close(self) -> None:
        """Answer no more."""
        if self._accepting is not None:
            self._accepting.kill(block=False)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            client, _ = self._socket.accept()
            gevent.spawn(self._serve, FdChannel(client, QUESTION_BYTES))

    def _serve(self, channel: FdChannel) -> None:
        try:
            if channel.is_of_this_user():
                question, _ = channel.receive(QUESTION_S)
                with contextlib.closing(self._answer(question)) as answers:
                    for one in answers:
                        channel.send(one)
        except ChannelError:
            pass  # who asked has gone
        except SmqrtError as error:
            log.info("a question of another worker: %s", error)
        finally:
            channel.close()


class Fleet:
    """The other workers, for the one that asks.

    Args:
        place: which worker this is.
    """

    def __init__(self, place: WorkerPlace) -> None:
        self._place = place
        self._complaints = LineLimit()
        self._silent_until_s: dict[int, float] = {}

    @property
    def others(self) -> list[int]:
        """Their numbers."""
        return [number for number in range(self._place.count) if number != self._place.number]

    def ask(self, number: int, question: Message, timeout_s: float = ANSWER_S) -> Message | None:
        """Returns the answer of a worker; None when there is none, or there was none a moment ago. Blocks."""
        begun_s = monotonic()
        if begun_s < self._silent_until_s.get(number, 0.0):
            return None
        try:
            with contextlib.closing(self._asked(number, question)) as channel:
                return channel.receive(timeout_s)[0]
        except (FileNotFoundError, ConnectionRefusedError):
            return None  # it is being started
        except (ChannelError, OSError) as error:
            self._complaints.warn(f"w{number} does not answer operators: {error}")
            if monotonic() - begun_s >= QUESTION_S:
                self._silent_until_s[number] = monotonic() + SILENT_S
            return None

    def ask_all(self, question: Message) -> dict[int, Message]:
        """Returns the answers of all that answer in time. Blocks."""
        asked = {number: gevent.spawn(self.ask, number, question) for number in self.others}
        gevent.joinall(list(asked.values()))
        return {number: one.value for number, one in asked.items() if one.value is not None}

    def events(self, numbers: list[int], question: Message, own: Events | None = None) -> Events:
        """Yields what workers tell, as it comes, until the iterator is closed; None when none said anything for long.

        Args:
            numbers: the workers.
            question: what is asked.
            own: what this worker tells.
        """
        found: Queue[Any] = Queue(EVENTS)
        listening: list[gevent.Greenlet[..., None]]
        listening = [gevent.spawn(self._listen, number, question, found) for number in numbers]
        if own:
            listening.append(gevent.spawn(_pour, own, found))
        try:
            while not all(one.ready() for one in listening) or not found.empty():
                with contextlib.suppress(Empty):
                    yield found.get(timeout=ANSWER_S)
                    continue
                yield None
        finally:
            gevent.killall(listening)

    def _listen(self, number: int, question: Message, found: Queue[Any]) -> None:
        with contextlib.suppress(ChannelError, OSError), contextlib.closing(self._asked(number, question)) as channel:
            while True:
                found.put(channel.receive(None)[0]["answer"])

    def _asked(self, number: int, question: Message) -> FdChannel:
        sock = gsocket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(QUESTION_S)
            sock.connect(str(self._place.socket_path(number, KIND)))
        except OSError:
            sock.close()
            raise
        channel = FdChannel(sock)
        channel.send(question, timeout_s=QUESTION_S)
        return channel


def _pour(events: Events, found: Queue[Any]) -> None:
    for event in events:
        found.put(event)
