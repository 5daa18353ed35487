"""The Unix socket of a server at which it is asked for a hot restart, by processes of its user."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import gevent
from gevent import socket as gsocket

from smqrt.errors import StartError
from smqrt.settings.limit_register import LineLimit
from smqrt.workers.fd_channel import ChannelError, FdChannel, Message

# ---- Messages between the old process and the new one, in this order:
#
#     new                                  old
#     hello {version, pid}            ──▶
#                                     ◀──  welcome {version, pid, listeners, hubs, nodes, failed} and listening sockets
#     (loads the applications)
#     ready {hubs, relays, succeeds},
#     or failed {why}                 ──▶
#                                     ◀──  relay and a socket, when the new one says `relays`; see staying.py
#                                          (while all are served on:)
#                                     ◀──  ahead {key, clients} and their sockets, as often as needed
#                                          (accepts no more; for each hub:)
#                                     ◀──  hub {key, record, unchanged, staying, node, others}; of the unchanged nothing
#                                          more is sent; with `node`, when the new one says `succeeds`, the other nodes
#                                          keep what is for the hub with this number, see cluster/migration.py;
#                                          `others` are their numbers
#                                     ◀──  values {values, sources}, as often as needed: last values that no file has
#                                     ◀──  changed {clients}, as often as needed: others that were sent ahead
#                                     ◀──  clients {clients} and their sockets, as often as needed: all the rest
#                                     ◀──  end
#     have, or failed {why}           ──▶
#                                     ◀──  go: from here on the hub is the new one's
#                                          (and in the end:)
#                                     ◀──  http {connections} and their sockets
#                                     ◀──  done
#     serving                         ──▶
#                                     ◀──  left: it is in no cluster any more by a number that is fixed
#                                     ◀──  late {key, frames, names}, until the old process ends
#
# `abort {why}` of the old one ends it all. Silence and a connection that ends mean that the other process is gone.

VERSION = 1
HELLO_S = 5.0
STEP_S = 5.0
"""What each step of the move may take the other process; the longest of them opens a journal."""
ENVIRONMENT = "_SMQRT_TAKE_OVER"
"""The number of the descriptor that a new process inherits."""
FDS_AT_ONCE = 200
BYTES_AT_ONCE = 4 << 20
MAX_PATH_BYTES = 107
"""Of a Unix socket, on Linux. While it is made, it has the number of the process behind its name."""
_NUMBER_BYTES = 8


def check_socket_path(what: str, path: str) -> None:
    """Raise StartError when `path` is too long for a Unix socket that is replaced by renaming; `what` names it."""
    most = MAX_PATH_BYTES - _NUMBER_BYTES
    if len(os.fsencode(path)) > most:
        raise StartError(f"{what}: {path} is longer than {most} bytes, which a Unix socket has at most; shorten it.")


class Refused(ChannelError):
    """The other process says why it does not go on."""


def expect(channel: FdChannel, kind: str, timeout_s: float) -> Message:
    """Wait for a message of `kind`.

    Raises:
        Refused: the other process does not go on.
        ChannelError: it is gone, silent, or says something else.
    """
    message, fds = channel.receive(timeout_s)
    for fd in fds:
        os.close(fd)
    if message["do"] in ("failed", "abort"):
        raise Refused(str(message.get("why", "no reason was given"))[:1000])
    if message["do"] != kind:
        raise ChannelError(f"{message['do']!r} came instead of {kind!r}")
    return message


log = logging.getLogger("smqrt")

STRANGER_BYTES = 4096
"""What a process may say before it is known what it wants."""
BACKLOG = 16


class ControlSocket:
    """The socket.

    Args:
        path: where it is; empty for none.
        answer: called with a channel and what was said there first; must not block.
    """

    def __init__(self, path: str, answer: Callable[[FdChannel, Message], None]) -> None:
        self._path, self._answer = path, answer
        self._socket: gsocket.socket | None = None
        self._accepting: gevent.Greenlet[..., None] | None = None
        self._strangers, self._nonsense = LineLimit(), LineLimit()

    def open(self, is_successor: bool = False) -> None:
        """Listen, if there is a path.

        Args:
            is_successor: the server that listens there now is the one whose place this one takes.

        Raises:
            StartError: it can't be made, or another server has it.
        """
        path = self._path
        if not path:
            return
        check_socket_path("restart.socket", path)
        sock = gsocket.socket(socket.AF_UNIX)
        beside = f"{path}.{os.getpid()}"
        before = os.umask(0o177)
        try:
            if not is_successor and _answers(path):
                raise StartError(
                    f"restart.socket: another server listens at {path}; start this one with --take-over, or give each "
                    "server a socket of its own."
                )
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
            sock.bind(beside)
            sock.listen(BACKLOG)
            _check_replaceable(path)
            os.rename(beside, path)  # nobody finds none there
        except OSError as error:
            sock.close()
            raise StartError(f"restart.socket: {path}: {error.strerror}; give a path in a folder of its own.") from None
        finally:
            os.umask(before)
        self._socket = sock
        self._accepting = gevent.spawn(self._accept, sock)

    def close(self, leaves_file: bool = False) -> None:
        """Listen no more.

        Args:
            leaves_file: the socket's file is another process's by now.
        """
        if self._accepting is not None:
            self._accepting.kill()
        if self._socket is not None:
            self._socket.close()
            if not leaves_file:
                with contextlib.suppress(OSError):
                    os.unlink(self._path)
            self._socket = None

    def _accept(self, sock: gsocket.socket) -> None:
        while True:
            try:
                client, _ = sock.accept()
            except OSError as error:
                log.error("restart.socket: %s", error)
                gevent.sleep(1)
                continue
            self._serve(FdChannel(client, STRANGER_BYTES))

    def _serve(self, channel: FdChannel) -> None:
        """One after the other: who says nothing holds the others for `HELLO_S` at most, and is of this user."""
        pid, uid = channel.peer()
        if not channel.is_of_this_user():
            self._strangers.warn(f"refused: a process of user {uid} (pid {pid}) at restart.socket")
            channel.close()
            return
        try:
            message, fds = channel.receive(HELLO_S)
        except ChannelError as error:
            self._nonsense.warn(f"refused: process {pid} at restart.socket: {error}")
            channel.close()
            return
        for fd in fds:
            os.close(fd)
        self._answer(channel, message)


def _answers(path: str) -> bool:
    """Whether a server listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def _check_replaceable(path: str) -> None:
    """Raises FileExistsError when something else than a socket is there."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(Path(path).lstat().st_mode):
            raise FileExistsError(17, "there is a file that is no socket")
