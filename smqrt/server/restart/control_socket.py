"""Control socket of a server: a Unix socket for hot restarts, for processes of its user."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import gevent
from gevent import socket as gsocket

from smqrt.errors import StartError
from smqrt.settings.limits import LineLimit
from smqrt.workers.worker_rpc import ChannelError, FdChannel, Message

# ---- messages between the old process and the new process, in this order
#
#     new                                  old
#     hello {version, pid}            ──▶
#                                     ◀──  welcome {version, pid, listeners, kept_files, hubs, nodes, failed}
#                                          and listening sockets
#     (loads the applications)
#     ready {hubs, relays, succeeds},
#     or failed {why}                 ──▶
#                                     ◀──  relay and a socket, when `ready` has `relays`; see kept_clients.py
#                                          (while all clients are served:)
#                                     ◀──  ahead {key, clients} and their sockets, as often as needed
#                                          (accepts no more; for each hub:)
#                                     ◀──  hub {key, record, unchanged, staying, node, others}; `unchanged` are the
#                                          clients that were sent ahead and have not changed since; with `node`, when
#                                          `ready` has `succeeds`, other nodes keep messages for the hub with this
#                                          number, see cluster/leaving_nodes.py; `others` are the numbers of these nodes
#                                     ◀──  values {values, sources}, as often as needed: last values without a file
#                                     ◀──  changed {clients}, as often as needed: clients that were sent ahead, and
#                                          have changed since
#                                     ◀──  clients {clients} and their sockets, as often as needed: all other clients
#                                     ◀──  end
#     have, or failed {why}           ──▶
#                                     ◀──  go: from now on the hub belongs to the new process
#                                          (after all hubs:)
#                                     ◀──  http {connections} and their sockets
#                                     ◀──  done
#     serving                         ──▶
#                                     ◀──  left: the old process has left the clusters where its number is fixed
#                                     ◀──  late {key, frames, names}, until the old process exits
#
# `abort {why}` of the old process ends the hand-over. After a timeout, or when the connection is closed, a process acts
# as if the other one had died.

VERSION = 1
HELLO_S = 5.0
STEP_S = 5.0
"""The time limit of each step of the other process; the longest step opens a journal."""
ENVIRONMENT = "_SMQRT_TAKE_OVER"
"""The environment variable with the descriptor that a new process inherits."""
FDS_AT_ONCE = 200
"""The limit of descriptors in a message; Linux allows 253 (SCM_MAX_FD)."""
BYTES_AT_ONCE = 4 << 20
MAX_PATH_BYTES = 107
"""The limit of Linux for the path of a Unix socket. The socket is made with the process id at the end of its name."""
_PID_BYTES = 8
MAX_WHY_CHARS = 1000


def check_socket_path(what: str, path: str) -> None:
    """Raise StartError when `path` is too long for a Unix socket that is replaced by renaming; `what` names it."""
    limit = MAX_PATH_BYTES - _PID_BYTES
    if len(os.fsencode(path)) > limit:
        raise StartError(f"{what}: {path} is longer than {limit} bytes, the limit of a Unix socket; shorten it.")


class Refused(ChannelError):
    """The other process has ended the hand-over; the text is the reason."""


def expect(channel: FdChannel, kind: str, timeout_s: float) -> Message:
    """Wait for a message of `kind`.

    Raises:
        Refused: the other process has ended the hand-over.
        ChannelError: it has died, does not answer, or has sent another message.
    """
    message, fds = channel.receive(timeout_s)
    for fd in fds:
        os.close(fd)
    if message["do"] in ("failed", "abort"):
        raise Refused(str(message.get("why", "no reason was given"))[:MAX_WHY_CHARS])
    if message["do"] != kind:
        raise ChannelError(f"the other process sent {message['do']!r} instead of {kind!r}")
    return message


# ---- the socket

log = logging.getLogger("smqrt")

MAX_FIRST_MESSAGE_BYTES = 4096
"""The limit of the first message, whose sender is not yet known to be a new process."""
BACKLOG = 16


class ControlSocket:
    """A Unix socket where a server accepts processes of its user, or of root: for a hot restart, or `smqrt lua`.

    Args:
        path: its path; empty for no socket.
        on_request: called with a channel and its first message; must not block.
        setting: the setting of the socket, for messages.
    """

    def __init__(
        self, path: str, on_request: Callable[[FdChannel, Message], object], setting: str = "restart.socket"
    ) -> None:
        self._path, self._on_request, self._setting = path, on_request, setting
        self._socket: gsocket.socket | None = None
        self._accepting: gevent.Greenlet[..., None] | None = None
        self._other_user_lines, self._invalid_lines = LineLimit(), LineLimit()

    def open(self, is_successor: bool = False) -> None:
        """Listen, unless the path is empty.

        Args:
            is_successor: this server replaces the one that listens there now.

        Raises:
            StartError: the socket can't be created, or another server uses it.
        """
        path = self._path
        if not path:
            return
        check_socket_path(self._setting, path)
        sock = gsocket.socket(socket.AF_UNIX)
        new_path = f"{path}.{os.getpid()}"
        before = os.umask(0o177)  # from its creation, only this user can connect to the socket
        try:
            if not is_successor and _is_listening(path):
                raise StartError(
                    f"restart.socket: another server listens at {path}; start this one with --take-over, or set "
                    "another path."
                )
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new_path)
            sock.bind(new_path)
            sock.listen(BACKLOG)
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(Path(path).lstat().st_mode):
                    raise FileExistsError(errno.EEXIST, "the file exists and is not a socket")
            os.rename(new_path, path)  # atomically, so that the path always exists
        except OSError as error:
            sock.close()
            raise StartError(f"{self._setting}: {path}: {error.strerror}; set a path in a separate folder.") from None
        finally:
            os.umask(before)
        self._socket = sock
        self._accepting = gevent.spawn(self._accept, sock)

    def close(self, leaves_file: bool = False) -> None:
        """Stop listening.

        Args:
            leaves_file: another process has replaced the socket file.
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
                log.error("%s: %s", self._setting, error)
                gevent.sleep(1)
                continue
            channel = FdChannel(client, MAX_FIRST_MESSAGE_BYTES)
            pid, uid = channel.peer()
            if not channel.is_of_this_user():
                self._other_user_lines.warn(f"refused: a process of user {uid} (pid {pid}) at {self._setting}")
                channel.close()
                continue
            try:
                # One process after the other: only a silent process of this user blocks the others, for HELLO_S.
                message, fds = channel.receive(HELLO_S)
            except ChannelError as error:
                self._invalid_lines.warn(f"refused: process {pid} at {self._setting}: {error}")
                channel.close()
                continue
            for fd in fds:
                os.close(fd)
            self._on_request(channel, message)


def _is_listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
