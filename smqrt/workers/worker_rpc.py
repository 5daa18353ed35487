"""Requests between the workers of a server.

Each worker answers at a Unix socket in the folder that the workers share. On a connection there is one question, then
either one answer, or a stream of messages (news) until one side closes.
"""

from __future__ import annotations

import array
import contextlib
import json
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, cast

import gevent
from gevent import socket as gsocket
from gevent.queue import Empty, Queue

from smqrt.errors import SmqrtError
from smqrt.settings.limits import LineLimit

# ---- Worker identity
#
# `smqrt serve --workers 4` starts four workers, numbered from 0 to 3. The supervisor assigns the number before the
# worker does anything else. Any other process, such as a server without workers, has number 0 of 1. Worker 0 does the
# tasks that must be done once.

ENVIRONMENT = "_SMQRT_WORKER"
"""The variable with the number of the inherited descriptor from which a worker reads its `WorkerPlace`."""
HUBS_OF_A_WORKER = 1_000_000
"""The distance between the hub numbers of two workers."""


@dataclass(frozen=True)
class WorkerPlace:
    """One worker among those of its server.

    Attributes:
        number: the number of the worker, from 0; the replacement of a dead worker has the same number.
        count: the number of workers.
        secret: 32 random bytes that only the workers of this server have; empty for a single process.
        directory: for Unix sockets between the workers, accessible to this user only, and deleted with the server. None
            for a single process.
        start: the number of earlier processes with this number; greater in the new process of a hot restart.
    """

    number: int = 0
    count: int = 1
    secret: bytes = field(default=b"", repr=False)
    directory: Path | None = None
    start: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this worker does tasks that must be done once, such as pipelines and the admin listener."""
        return self.number == 0

    @property
    def label(self) -> str:
        """The name in log lines: "w1"; empty for a single process."""
        return f"w{self.number}" if self.count > 1 else ""

    def socket_path(self, number: int, kind: str = "worker") -> Path:
        """Return the path of a worker's Unix socket.

        Args:
            number: the number of the worker.
            kind: the purpose of the socket.
        """
        assert self.directory is not None, "a single process has no sockets for workers"
        return self.directory / f"{kind}-{number}.sock"

    def hub_number(self, count: int) -> int:
        """Return the number of the `count`th hub of this worker for operators; it is unique among all workers."""
        return self.number * HUBS_OF_A_WORKER + count

    def share(self, total: int) -> int:
        """Return the share of one worker in a limit for all workers, rounded up; 0 stays 0."""
        return -(-total // self.count)

    def own_file(self, path: str) -> str:
        """Return the path for this worker of a file that only one process may open; worker 0 opens `path` itself."""
        return path if self.is_first else f"{path}.w{self.number}"


_own = WorkerPlace()


def worker_of_hub(number: int) -> int:
    """Return the number of the worker that has the hub with this number."""
    return number // HUBS_OF_A_WORKER


def worker_place() -> WorkerPlace:
    """Return the place of this process."""
    return _own


def take_place(place: WorkerPlace) -> None:
    """Set the place of this process."""
    global _own
    _own = place


def next_place(place: WorkerPlace) -> WorkerPlace:
    """Return the place for the next process with the same number."""
    return replace(place, start=place.start + 1)


# ---- Messages with file descriptors over a Unix socket
#
# A message is a dictionary of JSON values, with bytes anywhere in it. On the wire: the length of the JSON text, the
# length of the bytes, the number of descriptors; then the text and the bytes. An object `{"@": [place, length]}` in the
# text refers to bytes.

Message = dict[str, Any]

MAX_FDS = 250
"""The maximum number of descriptors in one message; Linux accepts 253 (SCM_MAX_FD)."""
MAX_JSON_BYTES = 64 << 20
MAX_BLOB_BYTES = 512 << 20
"""Twice the limit for all send queues of a server together."""
_HEAD = struct.Struct(">III")
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid
_PIECE_BYTES = 1 << 18


class ChannelError(SmqrtError):
    """The other process is gone, does not respond, or sent an invalid message."""


class ChannelSilent(ChannelError):
    """The other process exists, but does not respond."""


class FdChannel:
    """One end of a connection.

    Args:
        sock: a connected Unix stream socket; the channel closes it.
        max_bytes: the maximum size of a received message; use a small value for a process that is not trusted yet.
    """

    def __init__(self, sock: socket.socket, max_bytes: int = MAX_BLOB_BYTES) -> None:
        self._sock: Any = gsocket.socket(fileno=sock.detach())
        self.max_bytes = max_bytes
        self._data = bytearray()
        self._returned: Message | None = None
        self._fds: deque[int] = deque()

    def peer(self) -> tuple[int, int]:
        """Return the process and user id of the other side, from the kernel."""
        pid, uid, _ = _UCRED.unpack(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return pid, uid

    def is_of_this_user(self) -> bool:
        """Return whether the other side runs as the same user or as root."""
        return self.peer()[1] in (os.geteuid(), 0)

    def send(self, message: Message, fds: Sequence[int] = (), timeout_s: float = 10.0) -> None:
        """Send a message; blocks the greenlet until the kernel has accepted all of it.

        Raises:
            ChannelError: the other process is gone, or does not read for `timeout_s`.
        """
        assert len(fds) <= MAX_FDS
        text, blob = _encoded(message)
        rest = memoryview(b"".join((_HEAD.pack(len(text), len(blob), len(fds)), text, blob)))
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with gevent.Timeout(timeout_s):
                sent = self._sock.sendmsg([rest[:_PIECE_BYTES]], ancillary)
                self._sock.sendall(rest[sent:])
        except gevent.Timeout:
            raise ChannelSilent(f"the other process read nothing for {timeout_s:g} s") from None
        except OSError as error:
            raise ChannelError(f"the other process is gone ({error.strerror})") from None

    def put_back(self, message: Message) -> None:
        """Make the next `receive` return this message, which must not have descriptors, again."""
        self._returned = message

    def receive(self, timeout_s: float | None) -> tuple[Message, list[int]]:
        """Wait for the next message, and return it with its descriptors, which the caller has to close.

        Raises:
            ChannelError: the other process is gone, sends nothing for `timeout_s`, or sends too much.
        """
        if self._returned is not None:
            returned, self._returned = self._returned, None
            return returned, []
        try:
            with gevent.Timeout(timeout_s):
                self._fill(_HEAD.size)
                text_bytes, blob_bytes, count = _HEAD.unpack_from(self._data)
                if text_bytes > min(self.max_bytes, MAX_JSON_BYTES) or blob_bytes > self.max_bytes:
                    raise ChannelError(f"message too large: {text_bytes + blob_bytes} bytes")
                self._fill(_HEAD.size + text_bytes + blob_bytes)
        except gevent.Timeout:
            raise ChannelSilent(f"the other process sent nothing for {timeout_s:.3g} s") from None
        whole = memoryview(self._data)
        text = bytes(whole[_HEAD.size : _HEAD.size + text_bytes])
        blob = bytes(whole[_HEAD.size + text_bytes : _HEAD.size + text_bytes + blob_bytes])
        whole.release()
        del self._data[: _HEAD.size + text_bytes + blob_bytes]
        if len(self._fds) < count:
            raise ChannelError("descriptors are missing; raise the limit of open files (ulimit -n)")
        return _decoded(text, blob), [self._fds.popleft() for _ in range(count)]

    def _fill(self, size: int) -> None:
        while len(self._data) < size:
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    _PIECE_BYTES, socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                raise ChannelError(f"the other process is gone ({error.strerror})") from None
            for level, kind, value in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(value[: len(value) - len(value) % fds.itemsize])
                    self._fds.extend(fds)
            # The kernel drops the descriptors that exceed this process's limit, and sets MSG_CTRUNC.
            if flags & socket.MSG_CTRUNC or len(self._fds) > MAX_FDS * 4:
                raise ChannelError("descriptors are missing; raise the limit of open files (ulimit -n)")
            if not data:
                raise ChannelError("the other process is gone")
            self._data += data

    def close(self) -> None:
        """Close the socket and the descriptors of messages that were not read."""
        with contextlib.suppress(OSError):
            self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())


def _encoded(message: Message) -> tuple[bytes, bytes]:
    """Return the JSON text and the bytes to which it refers.

    An object that occurs several times is sent once: the queues of slow clients share objects.
    """
    pieces: list[bytes] = []
    places: dict[int, int] = {}
    end = 0

    def refer(value: object) -> object:
        nonlocal end
        if not isinstance(value, bytes):
            raise TypeError(f"{value!r} can't be sent")
        place = places.get(id(value))
        if place is None:
            place = places[id(value)] = end
            pieces.append(value)
            end += len(value)
        return {"@": [place, len(value)]}

    return json.dumps(message, default=refer, separators=(",", ":")).encode(), b"".join(pieces)


def _decoded(text: bytes, blob: bytes) -> Message:
    def refer(found: Any) -> Any:
        if "@" not in found:
            return found
        place, size = found["@"]
        if not 0 <= place <= place + size <= len(blob):
            raise ValueError("a reference beyond the end of the message")
        return blob[place : place + size]

    try:
        message = json.loads(text, object_hook=refer)
    except (ValueError, TypeError, RecursionError) as error:
        raise ChannelError(f"invalid message: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("do"), str):
        raise ChannelError('invalid message: no dictionary with a string "do"')
    return message


log = logging.getLogger("smqrt.admin")

KIND = "desk"
"""A part of the name of the socket. It must not change, since processes of two versions use it during a hot restart."""
QUESTION_S = 1.0
ANSWER_S = 3.0
"""The time limit of an answer. A worker that exceeds it, since an application blocks its loop, is left out."""
SILENT_S = 10.0
"""After such a timeout, no questions are sent to the worker for this time: a page for operators sends many at once."""
AGAIN_S = 0.5
"""The delay before the news of an unreachable worker are requested again."""
BACKLOG, QUESTION_BYTES = 64, 2 << 20
EVENTS = 1000
"""The maximum number of events of a trace that wait for the reader."""
END: Message = {"do": "end"}
"""The last message of complete news. If the connection ends without it, the worker is gone."""

News = Generator[Message, None, None]
Events = Generator[Any, None, None]


class WorkerRpcServer:
    """The server side of a worker.

    Args:
        place: the place of this worker.

    Attributes:
        answers: functions that answer questions, by the `do` of the question; each call has a separate greenlet.
        news: functions that return a generator of messages, by the `do`; it is closed when the caller disconnects.
    """

    def __init__(self, place: WorkerPlace) -> None:
        self._place = place
        self.answers: dict[str, Callable[[Message], Message]] = {}
        self.news: dict[str, Callable[[Message], News]] = {}
        self._socket: gsocket.socket | None = None
        self._accepting: gevent.Greenlet[..., None] | None = None
        self._serving: set[gevent.Greenlet[..., None]] = set()

    def open(self) -> None:
        """Begin to answer questions. Raises OSError when the socket can't be created."""
        path = self._place.socket_path(self._place.number, KIND)
        temporary = path.with_suffix(f".{os.getpid()}")
        self._socket = gsocket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(str(temporary))
            self._socket.listen(BACKLOG)
            temporary.rename(path)  # during a hot restart, it replaces the socket of the previous process
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
            pass  # the other worker has disconnected
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

    # While there are no events, no `send` fails, so that a disconnected reader would not be noticed.
    watching = gevent.spawn(stop_when_closed)
    try:
        with contextlib.closing(news):
            for message in news:
                channel.send(message)
    finally:
        watching.kill(block=False)


class WorkerRpc:
    """Calls to the other workers of a server, and the server side of this worker.

    Args:
        place: the place of this worker.

    Attributes:
        place: see above.
        server: the server side of this worker.
    """

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self.server = WorkerRpcServer(place)
        self._complaints = LineLimit()
        self._silent_until_s: dict[int, float] = {}

    @property
    def others(self) -> list[int]:
        """The numbers of the other workers."""
        return [number for number in range(self.place.count) if number != self.place.number]

    def ask(self, number: int, question: Message, timeout_s: float | None = None) -> Message | None:
        """Return the answer of a worker; None if it does not answer, or has not within the last `SILENT_S`. Blocks.

        Args:
            number: the worker.
            question: a message whose `do` selects the function in `answers`.
            timeout_s: the time limit; `ANSWER_S` by default.
        """
        begun_s = monotonic()
        if begun_s < self._silent_until_s.get(number, 0.0):
            return None
        try:
            with contextlib.closing(self._connect(number, question)) as channel:
                return channel.receive(timeout_s or ANSWER_S)[0]
        except (FileNotFoundError, ConnectionRefusedError):
            return None  # the worker is starting
        except (ChannelError, OSError) as error:
            self._complaints.warn(f"w{number} does not answer requests for operators: {error}")
            if monotonic() - begun_s >= QUESTION_S:
                self._silent_until_s[number] = monotonic() + SILENT_S
            return None

    def ask_each(self, questions: dict[int, Message]) -> dict[int, Message]:
        """Return the answers that arrive in time, by worker. Blocks.

        Args:
            questions: the questions by worker.
        """
        asking = {number: gevent.spawn(self.ask, number, question) for number, question in questions.items()}
        gevent.joinall(list(asking.values()))
        return {number: greenlet.value for number, greenlet in asking.items() if greenlet.value is not None}

    def ask_all(self, question: Message) -> dict[int, Message]:
        """Send a question to all other workers; return the answers that arrive in time, by worker. Blocks."""
        return self.ask_each(dict.fromkeys(self.others, question))

    def follow(self, number: int, question: Callable[[], Message], take: Callable[[Message], object]) -> None:
        """Call `take` with each message of a worker's news, until they are complete. Blocks the greenlet.

        The question is sent again if the worker is gone or not started yet.

        Args:
            number: the worker.
            question: returns the question; called for each attempt.
            take: called with each message.
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
            question: the question to these workers.
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
