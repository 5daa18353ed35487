"""Messages with file descriptors between two processes of one user, over a Unix socket.

A message is a dictionary of what JSON knows, and bytes anywhere in it. On the wire: the length of the JSON text, the
length of the bytes behind it, and how many descriptors come along, then both.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import gevent
from gevent import socket as gsocket

from smqrt.errors import SmqrtError

Message = dict[str, Any]

MAX_FDS = 250
"""Of one message: Linux takes 253 at once."""
MAX_JSON_BYTES = 64 << 20
MAX_BLOB_BYTES = 512 << 20
"""Twice what all queues of a server may hold."""
_HEAD = struct.Struct(">III")
_PEER = struct.Struct("3i")
_PIECE_BYTES = 1 << 18


class ChannelError(SmqrtError):
    """The other process is gone, is silent, or says what it should not."""


class ChannelSilent(ChannelError):
    """The other process is there, and does nothing."""


class FdChannel:
    """One end of a connection.

    Args:
        sock: a connected Unix stream socket, which the channel owns from now on.
        most_bytes: of one message that comes; a stranger gets less.
    """

    def __init__(self, sock: socket.socket, most_bytes: int = MAX_BLOB_BYTES) -> None:
        self._sock: Any = gsocket.socket(fileno=sock.detach())
        self.most_bytes = most_bytes
        self._data = bytearray()
        self._again: Message | None = None
        self._fds: deque[int] = deque()

    def peer(self) -> tuple[int, int]:
        """Process and user id of the other side, as the kernel knows them."""
        pid, uid, _ = _PEER.unpack(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return pid, uid

    def is_of_this_user(self) -> bool:
        """Whether the other side belongs to our user, or to root."""
        return self.peer()[1] in (os.geteuid(), 0)

    def send(self, message: Message, fds: Sequence[int] = (), timeout_s: float = 10.0) -> None:
        """Send a message; blocks the greenlet until the kernel has it.

        Raises:
            ChannelError: the other process is gone, or takes nothing for `timeout_s`.
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
            raise ChannelSilent(f"the other process took nothing for {timeout_s:g} s") from None
        except OSError as error:
            raise ChannelError(f"the other process is gone ({error.strerror})") from None

    def put_back(self, message: Message) -> None:
        """Have `receive` give a message again, which came without descriptors."""
        self._again = message

    def receive(self, timeout_s: float | None) -> tuple[Message, list[int]]:
        """Wait for the next message; gives it and its descriptors, which are now the caller's.

        Raises:
            ChannelError: the other process is gone, says nothing for `timeout_s`, or too much.
        """
        if self._again is not None:
            again, self._again = self._again, None
            return again, []
        try:
            with gevent.Timeout(timeout_s):
                self._fill(_HEAD.size)
                text_bytes, blob_bytes, count = _HEAD.unpack_from(self._data)
                if text_bytes > min(self.most_bytes, MAX_JSON_BYTES) or blob_bytes > self.most_bytes:
                    raise ChannelError(f"a message of {text_bytes + blob_bytes} bytes")
                self._fill(_HEAD.size + text_bytes + blob_bytes)
        except gevent.Timeout:
            raise ChannelSilent(f"the other process said nothing for {timeout_s:g} s") from None
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
            if flags & socket.MSG_CTRUNC or len(self._fds) > MAX_FDS * 4:
                raise ChannelError("descriptors are missing; raise the limit of open files (ulimit -n)")
            if not data:
                raise ChannelError("the other process is gone")
            self._data += data

    def close(self) -> None:
        """Close, with the descriptors that nobody took."""
        with contextlib.suppress(OSError):
            self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())


def _encoded(message: Message) -> tuple[bytes, bytes]:
    """The JSON text, and the bytes that it refers to by place and length. The same object is kept once: the queues of
    many slow clients share theirs."""
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
            raise ValueError("bytes that did not come")
        return blob[place : place + size]

    try:
        message = json.loads(text, object_hook=refer)
    except (ValueError, TypeError, RecursionError) as error:
        raise ChannelError(f"a message that is none: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("do"), str):
        raise ChannelError("a message that is none")
    return message
