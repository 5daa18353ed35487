"""The protocol between systemd and a service: sockets it has opened, readiness, a watchdog (sd_listen_fds(3),
sd_notify(3)). Without systemd nothing here does anything.
"""

from __future__ import annotations

import _socket
import fcntl
import logging
import os
import time
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import closing
from typing import Any

from gevent import get_hub

from smqrt.errors import StartError

log = logging.getLogger("smqrt")

FIRST_FD = 3  # SD_LISTEN_FDS_START
_MAX_SOCKETS = 64
_LISTEN = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_FEEDS_PER_TIMEOUT = 3
_SHOWN = 500  # characters of a status


class Notifier:
    """Tells the service manager how the server does.

    Args:
        environ: where `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` are.

    Attributes:
        watchdog_s: how long the service may be silent; 0 for no watchdog.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        # "@" is how an abstract socket is written; other kinds (vsock) are for virtual machines.
        self._address = "\0" + path[1:] if path.startswith("@") else path if path.startswith("/") else ""
        self.watchdog_s = _watchdog_s(environ) if self._address else 0.0
        self._timer: Any = None
        self._has_failed = False

    def ready(self, status: str) -> None:
        """It serves. From now on the loop feeds the watchdog, if there is one: a loop that is held does not."""
        self.tell("READY=1", _status(status))
        if self.watchdog_s and self._timer is None:
            every_s = self.watchdog_s / _FEEDS_PER_TIMEOUT
            self._timer = get_hub().loop.timer(every_s, every_s, ref=False)
            self._timer.start(self.tell, "WATCHDOG=1")

    def status(self, status: str) -> None:
        """A line for `systemctl status`."""
        self.tell(_status(status))

    def reloading(self) -> None:
        """It reads its files again; `reloaded` ends that."""
        self.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reloaded(self) -> None:
        """It has read them."""
        self.tell("READY=1")

    def replaced(self, pid: int) -> None:
        """Another process is the service from now on: this one ends, and that is no end of the service."""
        self.tell(f"MAINPID={pid}")

    def stopping(self, most_s: float) -> None:
        """It ends, and that may take so long; 0 for no limit. The watchdog goes on: an end that hangs is noticed."""
        self.tell("STOPPING=1", _status("draining"), *([f"EXTEND_TIMEOUT_USEC={int(most_s * 1e6)}"] if most_s else ()))

    def close(self) -> None:
        """Feed the watchdog no more."""
        if self._timer is not None:
            self._timer.stop()
            self._timer.close()
            self._timer = None

    def tell(self, *lines: str) -> None:
        """Send some lines at once; one that can't be sent is logged once, and does no harm."""
        if not self._address:
            return
        try:
            with closing(_socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            if not self._has_failed:
                log.warning("systemd can't be told %s: %s", lines[0], error.strerror)
            self._has_failed = True


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())[:_SHOWN]


def _watchdog_s(environ: MutableMapping[str, str]) -> float:
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(usec) / 1e6


# ---- sockets that systemd has opened


def passed_sockets(
    listeners: Sequence[str], environ: MutableMapping[str, str] = os.environ
) -> dict[str, _socket.socket]:
    """Take the listening sockets that systemd passes, and the variables about them, which are not for child processes.

    A socket belongs to the listener whose name it has (`FileDescriptorName=`). Sockets with other names belong to the
    listeners in their order, when there are as many as listeners.

    Args:
        listeners: their names, in the order of the settings.
        environ: where `LISTEN_FDS` and the like are; they are taken out.

    Returns:
        sockets by listener; none without systemd, or when they are for another process.

    Raises:
        StartError: they can't be used, or do not match the listeners; one sentence.
    """
    said = {name: environ.pop(name, "") for name in _LISTEN}
    if said["LISTEN_PID"] != str(os.getpid()) or not said["LISTEN_FDS"]:
        return {}
    count = int(said["LISTEN_FDS"]) if said["LISTEN_FDS"].isdecimal() else 0
    if not 0 < count <= _MAX_SOCKETS:
        raise StartError(f"systemd passes LISTEN_FDS={said['LISTEN_FDS']}; from 1 to {_MAX_SOCKETS} are possible.")
    names = said["LISTEN_FDNAMES"].split(":") if said["LISTEN_FDNAMES"] else []
    if names and len(names) != count:
        raise StartError(f"systemd passes {count} sockets and {len(names)} names; both must be as many.")
    names = names or ["unknown"] * count
    sockets = [_listening(FIRST_FD + at, name) for at, name in enumerate(names)]
    return dict(zip(_matched(names, listeners), sockets, strict=True))


def _matched(names: Sequence[str], listeners: Sequence[str]) -> Sequence[str]:
    """The listener of each socket."""
    if len(set(names)) == len(names) and set(names) <= set(listeners):
        return names
    if len(names) == len(listeners) and not set(names) & set(listeners):
        return listeners
    raise StartError(
        f"systemd passes the sockets {_listed(names)}, and the listeners are {_listed(listeners)}; name each socket "
        "after its listener: FileDescriptorName=http"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _listening(fd: int, name: str) -> _socket.socket:
    """The socket at a descriptor."""
    what = f"systemd passes {name!r} (descriptor {fd}), which is"
    try:
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        sock = _socket.socket(fileno=fd)
    except OSError as error:
        raise StartError(f"{what} no socket: {error.strerror}.") from None
    if sock.family not in (_socket.AF_INET, _socket.AF_INET6) or sock.type != _socket.SOCK_STREAM:
        raise StartError(f"{what} no socket of TCP; write ListenStream=9357 in the socket unit.")
    if not sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_ACCEPTCONN):
        raise StartError(f"{what} a connection; the socket unit needs Accept=no.")
    sock.setblocking(False)
    return sock
