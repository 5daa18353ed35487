"""Requests between the workers of a server, for operators above all.

Each worker answers at a Unix socket in the folder that the workers share. A connection carries one question and then
one answer, or a stream of messages (news) until one side closes.
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
"""In the name of the socket; workers of two versions, as at a hot restart, have to agree on it."""
QUESTION_S = 1.0
ANSWER_S = 3.0
"""A worker that needs longer, since an application blocks its loop, is left out of the answer."""
SILENT_S = 10.0
"""After such a timeout the worker is not asked for this long: an operator's page asks many questions at once."""
AGAIN_S = 0.5
"""The delay before the news of a worker that is gone are requested again."""
BACKLOG, QUESTION_BYTES = 64, 2 << 20
EVENTS = 1000
"""How many events of a trace may wait for their reader."""
END: Message = {"do": "end"}
"""The last message of news that are complete; without it the worker is gone."""

News = Generator[Message, None, None]
Events = Generator[Any, None, None]


class WorkerRpcServer:
    """The answering side of a worker.

    Args:
        place: which worker this is.

    Attributes:
        answers: functions that answer a question, by its `do`; each call gets a greenlet of its own.
        news: functions that return a generator of messages, the same way; it is closed when the caller disconnects.
    """

    def __init__(self, place: WorkerPlace) -> None:
        self._place = place
        self.answers: dict[str, Callable[[Message], Message]] = {}
        self.news: dict[str, Callable[[Message], News]] = {}
        self._socket: gsocket.socket | None = None
        self._accepting: gevent.Greenlet[..., None] | None = None
        self._serving: set[gevent.Greenlet[..., None]] = set()

    def open(self) -> None:
        """Begin to answer. Raises OSError when the socket can't be created."""
        path = self._place.socket_path(self._place.number, KIND)
        temporary = path.with_suffix(f".{os.getpid()}")
        self._socket = gsocket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(str(temporary))
            self._socket.listen(BACKLOG)
            temporary.rename(path)  # at a hot restart, the previous process had this name until now
        except OSError:
            self._socket.close()
            raise
        self._accepting = gevent.spawn(self._accept, self._socket)

    def close(self) -> None:
        """Stop answering, and close all connections; a second call does nothing."""
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
                    _send_news(channel, news(question))
        except ChannelError:
            pass  # the asking worker has gone
        except SmqrtError as error:
            log.info("a question of another worker failed: %s", error)
        finally:
            channel.close()


def _send_news(channel: FdChannel, news: News) -> None:
    sending = cast("gevent.Greenlet[..., None]", gevent.getcurrent())

    def stop_when_closed() -> None:
        with contextlib.suppress(ChannelError):
            channel.receive(None)
        sending.kill(block=False)

    # A generator without events sends nothing, so that a failing `send` would not show that the reader has gone.
    watching = gevent.spawn(stop_when_closed)
    try:
        with contextlib.closing(news):
            for message in news:
                channel.send(message)
    finally:
        watching.kill(block=False)


class WorkerRpc:
    """Calls to the other workers of a server, and the server of this one.

    Args:
        place: which worker this is.

    Attributes:
        place: see above.
        desk: the answering side of this worker.
    """

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self.desk = WorkerRpcServer(place)
        self._complaints = LineLimit()
        self._silent_until_s: dict[int, float] = {}

    @property
    def others(self) -> list[int]:
        """The numbers of the other workers."""
        return [number for number in range(self.place.count) if number != self.place.number]

    def ask(self, number: int, question: Message, timeout_s: float | None = None) -> Message | None:
        """Return the answer of a worker; None when it does not answer, or did not within the last `SILENT_S`. Blocks.

        Args:
            number: the worker.
            question: its `do` names the answering function.
            timeout_s: `ANSWER_S` by default.
        """
        begun_s = monotonic()
        if begun_s < self._silent_until_s.get(number, 0.0):
            return None
        try:
            with contextlib.closing(self._connect(number, question)) as channel:
                return channel.receive(timeout_s or ANSWER_S)[0]
        except (FileNotFoundError, ConnectionRefusedError):
            return None  # it is being started
        except (ChannelError, OSError) as error:
            self._complaints.warn(f"w{number} does not answer operators: {error}")
            if monotonic() - begun_s >= QUESTION_S:
                self._silent_until_s[number] = monotonic() + SILENT_S
            return None

    def ask_each(self, questions: dict[int, Message]) -> dict[int, Message]:
        """Return the answers of those that answer in time, by worker. Blocks.

        Args:
            questions: by worker.
        """
        asking = {number: gevent.spawn(self.ask, number, question) for number, question in questions.items()}
        gevent.joinall(list(asking.values()))
        return {number: greenlet.value for number, greenlet in asking.items() if greenlet.value is not None}

    def ask_all(self, question: Message) -> dict[int, Message]:
        """Return the answers of all other workers that answer in time, by worker. Blocks."""
        return self.ask_each(dict.fromkeys(self.others, question))

    def follow(self, number: int, question: Callable[[], Message], take: Callable[[Message], object]) -> None:
        """Call `take` with each message of a worker's news, until they are complete; needs a greenlet of its own.

        A worker that is gone, or not started yet, is asked again.

        Args:
            number: the worker.
            question: returns the question; called for each attempt.
            take: gets each message.
        """
        while True:
            with contextlib.suppress(ChannelError, OSError), contextlib.closing(self._connect(number, question())) as c:
                while (message := c.receive(None)[0]) != END:
                    take(message)
                return
            gevent.sleep(AGAIN_S)

    def events(self, numbers: list[int], question: Message, own: Events | None = None) -> Events:
        """Yield the events of workers until the iterator is closed; None after `ANSWER_S` without an event.

        Args:
            numbers: the workers.
            question: what is asked.
            own: the events of this worker.
        """
        queue: Queue[Any] = Queue(EVENTS)

        def forward(events: Events) -> None:
            for event in events:
                queue.put(event)

        following: list[gevent.Greenlet[..., None]] = [
            gevent.spawn(self.follow, number, lambda: question, lambda message: queue.put(message["answer"]))
            for number in numbers
        ]
        if own:
            following.append(gevent.spawn(forward, own))
        try:
            while not all(greenlet.ready() for greenlet in following) or not queue.empty():
                with contextlib.suppress(Empty):
                    yield queue.get(timeout=ANSWER_S)
                    continue
                yield None
        finally:
            gevent.killall(following)

    def _connect(self, number: int, question: Message) -> FdChannel:
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
