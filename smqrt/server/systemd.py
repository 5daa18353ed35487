"""Interface to systemd: readiness, watchdog and passed sockets (sd_notify(3), sd_listen_fds(3)).

Without systemd, these functions do nothing.
"""

from __future__ import annotations

import _socket
import fcntl
import logging
import os
import time
from collections.abc import MutableMapping, Sequence
from contextlib import closing
from typing import Any

from gevent import get_hub

from smqrt.errors import StartError

log = logging.getLogger("smqrt")

FIRST_FD = 3  # SD_LISTEN_FDS_START
_MAX_SOCKETS = 64
_FAMILIES = (_socket.AF_INET, _socket.AF_INET6, _socket.AF_UNIX)
_LISTEN = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_KEEP_ALIVES_PER_TIMEOUT = 3  # so that one delayed message does not expire the watchdog
_MAX_STATUS_CHARS = 500


class Notifier:
    """Sends the state of the server to the service manager.

    Args:
        environ: has `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`.

    Attributes:
        watchdog_s: systemd kills a service that is silent for this time; 0 for no watchdog.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        # "@" begins the name of an abstract socket. Other kinds (vsock) are for virtual machines: ignored.
        self._address = "\0" + path[1:] if path.startswith("@") else path if path.startswith("/") else ""
        usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
        is_watched = bool(self._address) and usec.isdecimal() and pid in ("", str(os.getpid()))
        self.watchdog_s = int(usec) / 1e6 if is_watched else 0.0
        self._timer: Any = None
        self._has_failed = False

    def ready(self, status: str) -> None:
        """Report that the server is ready, and start sending keep-alive messages to the watchdog.

        A timer of the event loop sends them, so that systemd kills a process whose loop is blocked.
        """
        self.send("READY=1", _status(status))
        if self.watchdog_s and self._timer is None:
            every_s = self.watchdog_s / _KEEP_ALIVES_PER_TIMEOUT
            self._timer = get_hub().loop.timer(every_s, every_s, ref=False)
            self._timer.start(self.send, "WATCHDOG=1")

    def reloading(self) -> None:
        """Report that a reload begins; `reloaded` ends it."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reloaded(self) -> None:
        """Report that a reload is done."""
        self.send("READY=1")

    def replaced(self, pid: int) -> None:
        """Report that another process is the service now, so that the exit of this one does not end the service."""
        self.send(f"MAINPID={pid}")

    def stopping(self, timeout_s: float) -> None:
        """Report a shutdown that takes at most `timeout_s`, 0 for no limit.

        The watchdog stays on, because a shutdown may hang.
        """
        extend = [f"EXTEND_TIMEOUT_USEC={int(timeout_s * 1e6)}"] if timeout_s else []
        self.send("STOPPING=1", _status("draining"), *extend)

    def close(self) -> None:
        """Stop sending keep-alive messages."""
        if self._timer is not None:
            self._timer.stop()
            self._timer.close()
            self._timer = None

    def send(self, *lines: str) -> None:
        """Send lines as one message. Only the first failure is logged."""
        if not self._address:
            return
        try:
            with closing(_socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)) as sock:
                # A service manager that does not read must not block the server.
                sock.setblocking(False)
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            if not self._has_failed:
                log.warning("cannot send %s to systemd: %s", lines[0], error.strerror)
            self._has_failed = True


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())[:_MAX_STATUS_CHARS]


# ---- passed sockets


def passed_sockets(
    listeners: Sequence[str], unix: Sequence[str] = (), environ: MutableMapping[str, str] = os.environ
) -> dict[str, _socket.socket]:
    """Take the listening sockets that systemd passes.

    A socket belongs to the listener of its name (`FileDescriptorName=`). If no name is that of a listener and the
    counts are equal, sockets and listeners are matched in order. Without a Unix socket, only the others count.

    Args:
        listeners: their names, in the order of the settings.
        unix: the names of those on Unix sockets.
        environ: has `LISTEN_FDS` and the related variables. They are removed: child processes must not use them.

    Returns:
        The sockets by listener; none without systemd, or when they are for another process.

    Raises:
        StartError: the sockets are unusable, or do not match the listeners; one sentence.
    """
    passed = {name: environ.pop(name, "") for name in _LISTEN}
    if passed["LISTEN_PID"] != str(os.getpid()) or not passed["LISTEN_FDS"]:
        return {}
    count = int(passed["LISTEN_FDS"]) if passed["LISTEN_FDS"].isdecimal() else 0
    if not 0 < count <= _MAX_SOCKETS:
        raise StartError(f"systemd passes LISTEN_FDS={passed['LISTEN_FDS']}; it must be from 1 to {_MAX_SOCKETS}.")
    names = passed["LISTEN_FDNAMES"].split(":") if passed["LISTEN_FDNAMES"] else []
    if names and len(names) != count:
        raise StartError(f"systemd passes {count} sockets and {len(names)} names; their numbers must be equal.")
    names = names or ["unknown"] * count  # as in sd_listen_fds_with_names(3)
    sockets = []
    for fd, name in enumerate(names, FIRST_FD):
        what = f"systemd passes {name!r} (descriptor {fd}), which is"
        try:
            fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
            sock = _socket.socket(fileno=fd)
        except OSError as error:
            raise StartError(f"{what} not a socket: {error.strerror}.") from None
        if sock.family not in _FAMILIES or sock.type != _socket.SOCK_STREAM:
            raise StartError(f"{what} not a TCP or Unix stream socket; write ListenStream= in the socket unit.")
        if not sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_ACCEPTCONN):
            raise StartError(f"{what} a connection; the socket unit needs Accept=no.")
        sock.setblocking(False)
        sockets.append(sock)
    if len(set(names)) == len(names) and set(names) <= set(listeners):
        return dict(zip(names, sockets, strict=True))
    has_unix = any(sock.family == _socket.AF_UNIX for sock in sockets)
    in_order = [name for name in listeners if has_unix or name not in unix]
    if len(names) == len(in_order) and not set(names) & set(listeners):
        return dict(zip(in_order, sockets, strict=True))
    raise StartError(
        f"systemd passes the sockets {', '.join(names)}, and the listeners are {', '.join(listeners)}; name each "
        "socket after its listener: FileDescriptorName=http"
    )
