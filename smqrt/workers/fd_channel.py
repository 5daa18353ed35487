"""Messages with file descriptors between two processes of one user, over a Unix socket.

A message is a dictionary of JSON values, with bytes anywhere in it. On the wire: the length of the JSON text, the
length of the bytes behind it, the number of descriptors; then the text and the bytes. In the text an object
`{"@": [place, length]}` refers to bytes.
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
"""In one message; Linux accepts 253 (SCM_MAX_FD)."""
MAX_JSON_BYTES = 64 << 20
MAX_BLOB_BYTES = 512 << 20
"""Twice the bound of all send queues of a server together."""
_HEAD = struct.Struct(">III")
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid
_PIECE_BYTES = 1 << 18


class ChannelError(SmqrtError):
    """The other process is gone, does not respond, or sent an invalid message."""


class ChannelSilent(ChannelError):
    """The other process exists, and does not respond."""


class FdChannel:
    """One end of a connection.

    Args:
        sock: a connected Unix stream socket; the channel closes it.
        most_bytes: of one received message; for a process that is not trusted yet, use a small value.
    """

    def __init__(self, sock: socket.socket, most_bytes: int = MAX_BLOB_BYTES) -> None:
        self._sock: Any = gsocket.socket(fileno=sock.detach())
        self.most_bytes = most_bytes
        self._data = bytearray()
        self._returned: Message | None = None
        self._fds: deque[int] = deque()

    def peer(self) -> tuple[int, int]:
        """Return process and user id of the other side, from the kernel."""
        pid, uid, _ = _UCRED.unpack(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return pid, uid

    def is_of_this_user(self) -> bool:
        """Whether the other side runs as our user, or as root."""
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
        """Have the next `receive` return this message again; it must have come without descriptors."""
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
                if text_bytes > min(self.most_bytes, MAX_JSON_BYTES) or blob_bytes > self.most_bytes:
                    raise ChannelError(f"message too large: {text_bytes + blob_bytes} bytes")
                self._fill(_HEAD.size + text_bytes + blob_bytes)
        except gevent.Timeout:
            raise ChannelSilent(f"the other process sent nothing for {timeout_s:g} s") from None
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
    """Return the JSON text and the bytes that it refers to. The same object is sent once: queues of slow clients share
    theirs.
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
            raise ValueError("a reference beyond the bytes of the message")
        return blob[place : place + size]

    try:
        message = json.loads(text, object_hook=refer)
    except (ValueError, TypeError, RecursionError) as error:
        raise ChannelError(f"invalid message: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("do"), str):
        raise ChannelError('invalid message: no dictionary with a text "do"')
    return message
