"""Questions between the workers of a server: what one needs to know of the others, for operators above all.

Each worker answers at a Unix socket in the folder that the workers share: one question for each connection, and an
answer, or news until one of both hangs up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Generator
from time import monotonic
from typing import Any, cast

import gevent
from gevent import socket as gsocket
from gevent.queue import Empty, Queue

from smqrt.errors import SmqrtError
from smqrt.settings.limit_register import LineLimit
from smqrt.workers.fd_channel import ChannelError, FdChannel, Message
from smqrt.workers.worker_identity import WorkerPlace

log = logging.getLogger("smqrt.admin")

KIND = "desk"
QUESTION_S = 1.0
ANSWER_S = 3.0
"""A worker that takes longer, because an application holds it, is left out."""
SILENT_S = 10.0
"""So long a worker that took longer is not asked again: an operator who looks at one page asks many questions."""
AGAIN_S = 0.5
"""A worker that has gone is asked again for its news after that time."""
BACKLOG, QUESTION_BYTES = 64, 2 << 20
EVENTS = 1000
"""Of a trace, that may wait for who reads it."""
END: Message = {"do": "end"}
"""Says that there will be no more news, in contrast to a worker that has gone."""

News = Generator[Message, None, None]
Events = Generator[Any, None, None]


class WorkerRpcServer:
    """Where a worker answers.

    Args:
        place: which worker this is.

    Attributes:
        answers: what gives the answer to a question, by the `do` of the question; called in a greenlet of its own.
        news: what gives message after message, the same way; closed when who asked hangs up.
    """

    def __init__(self, place: WorkerPlace) -> None:
        self._place = place
        self.answers: dict[str, Callable[[Message], Message]] = {}
        self.news: dict[str, Callable[[Message], News]] = {}
        self._socket: gsocket.socket | None = None
        self._accepting: gevent.Greenlet[..., None] | None = None
        self._serving: set[gevent.Greenlet[..., None]] = set()

    def open(self) -> None:
        """Begin to answer. Raises OSError when the socket can't be made."""
        path = self._place.socket_path(self._place.number, KIND)
        beside = path.with_suffix(f".{os.getpid()}")
        self._socket = gsocket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(str(beside))
            self._socket.listen(BACKLOG)
            beside.rename(path)  # the process before, at a hot restart, has that name until now
        except OSError:
            self._socket.close()
            raise
        self._accepting = gevent.spawn(self._accept, self._socket)

    def close(self) -> None:
        """Answer no more, and hang up; a second call does nothing."""
        if self._accepting is not None:
            self._accepting.kill(block=False)
        if self._socket is not None:
            self._socket.close()
        gevent.killall(list(self._serving), block=False)

    def _accept(self, listening: gsocket.socket) -> None:
        while True:
            client, _ = listening.accept()
            serving = gevent.spawn(self._serve, FdChannel(client, QUESTION_BYTES))
            self._serving.add(serving)
            serving.rawlink(self._serving.discard)

    def _serve(self, channel: FdChannel) -> None:
        try:
            if channel.is_of_this_user():
                question, _ = channel.receive(QUESTION_S)
                if answer := self.answers.get(question["do"]):
                    channel.send(answer(question))
                elif news := self.news.get(question["do"]):
                    _tell(channel, news(question))
        except ChannelError:
            pass  # who asked has gone
        except SmqrtError as error:
            log.info("a question of another worker: %s", error)
        finally:
            channel.close()


def _tell(channel: FdChannel, news: News) -> None:
    """Who waits for something to tell would not notice that nobody listens any more: that is looked for meanwhile."""
    leaving = gevent.spawn(_end_when_gone, channel, cast("gevent.Greenlet[..., None]", gevent.getcurrent()))
    try:
        with contextlib.closing(news):
            for one in news:
                channel.send(one)
    finally:
        leaving.kill(block=False)


def _end_when_gone(channel: FdChannel, telling: gevent.Greenlet[..., None]) -> None:
    with contextlib.suppress(ChannelError):
        channel.receive(None)
    telling.kill(block=False)


class WorkerRpc:
    """The workers of a server: the others, whom this one asks, and this one, which answers them.

    Args:
        place: which worker this is.

    Attributes:
        place: see above.
        desk: where this one answers.
    """

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self.desk = WorkerRpcServer(place)
        self._complaints = LineLimit()
        self._silent_until_s: dict[int, float] = {}

    @property
    def others(self) -> list[int]:
        """Their numbers."""
        return [number for number in range(self.place.count) if number != self.place.number]

    def ask(self, number: int, question: Message, timeout_s: float | None = None) -> Message | None:
        """Returns the answer of a worker; None when there is none, or there was none a moment ago. Blocks, for
        `ANSWER_S` unless something else is said.
        """
        begun_s = monotonic()
        if begun_s < self._silent_until_s.get(number, 0.0):
            return None
        try:
            with contextlib.closing(self._asked(number, question)) as channel:
                return channel.receive(timeout_s or ANSWER_S)[0]
        except (FileNotFoundError, ConnectionRefusedError):
            return None  # it is being started
        except (ChannelError, OSError) as error:
            self._complaints.warn(f"w{number} does not answer operators: {error}")
            if monotonic() - begun_s >= QUESTION_S:
                self._silent_until_s[number] = monotonic() + SILENT_S
            return None

    def ask_each(self, questions: dict[int, Message]) -> dict[int, Message]:
        """Returns the answers of those that answer in time, by worker. Blocks.

        Args:
            questions: by worker.
        """
        asked = {number: gevent.spawn(self.ask, number, question) for number, question in questions.items()}
        gevent.joinall(list(asked.values()))
        return {number: one.value for number, one in asked.items() if one.value is not None}

    def ask_all(self, question: Message) -> dict[int, Message]:
        """Returns the answers of all that answer in time, by worker. Blocks."""
        return self.ask_each(dict.fromkeys(self.others, question))

    def follow(self, number: int, question: Callable[[], Message], take: Callable[[Message], object]) -> None:
        """Give `take` what a worker tells, until it says that this was all: for a greenlet of its own. A worker that
        has gone, or is not there yet, is asked again.

        Args:
            number: the worker.
            question: gives what is asked, each time.
            take: gets each message.
        """
        while True:
            with contextlib.suppress(ChannelError, OSError), contextlib.closing(self._asked(number, question())) as one:
                while (said := one.receive(None)[0]) != END:
                    take(said)
                return
            gevent.sleep(AGAIN_S)

    def events(self, numbers: list[int], question: Message, own: Events | None = None) -> Events:
        """Yields what workers tell, as it comes, until the iterator is closed; None when none said anything for long.

        Args:
            numbers: the workers.
            question: what is asked.
            own: what this worker tells.
        """
        found: Queue[Any] = Queue(EVENTS)
        listening: list[gevent.Greenlet[..., None]] = [
            gevent.spawn(self.follow, number, lambda: question, lambda said: found.put(said["answer"]))
            for number in numbers
        ]
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

    def _asked(self, number: int, question: Message) -> FdChannel:
        sock = gsocket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(QUESTION_S)
            sock.connect(str(self.place.socket_path(number, KIND)))
        except OSError:
            sock.close()
            raise
        channel = FdChannel(sock)
        try:
            channel.send(question, timeout_s=QUESTION_S)
        except ChannelError:
            channel.close()
            raise
        return channel


def _pour(events: Events, found: Queue[Any]) -> None:
    for event in events:
        found.put(event)
