"""Listening sockets in the file system (unix(7)).

Their clients have no address. Wherever an address is shown, stored or compared, it is `UNIX_ADDRESS`.
"""

from __future__ import annotations

import _socket
import contextlib
import os
import stat
from pathlib import Path

from smqrt.errors import StartError
from smqrt.transport.origins import is_loopback

UNIX_HOST = "unix"
UNIX_ADDRESS = (UNIX_HOST, 0)
"""The address of all clients of Unix sockets."""
DEFAULT_MODE = "0660"
"""The permissions of a socket file in octal digits: its user and its group may connect."""
MAX_PATH_BYTES = 107
"""The limit of Linux for the path of a Unix socket: `sun_path` without its last NUL."""


def is_unix_path(host: str) -> bool:
    """Return whether the host of a listener is the path of a Unix socket."""
    return host.startswith("/")


def is_local_client(address: str) -> bool:
    """Return whether a client is on this machine: it uses a loopback address or a Unix socket."""
    return address == UNIX_HOST or is_loopback(address)


def check_path(path: str, what: str) -> None:
    """Raise StartError when a path is too long for a Unix socket; `what` names it."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise StartError(f"{what}: the path is longer than {MAX_PATH_BYTES} bytes, the limit of Linux; shorten it")


def listening_socket(path: str, mode: str = DEFAULT_MODE, backlog: int = 4096) -> _socket.socket:
    """Open a listening socket at a path. A socket file without a listening process is replaced.

    Args:
        path: absolute path of the socket file.
        mode: permissions of the file, in octal digits.
        backlog: size of the kernel's queue; the kernel caps it at net.core.somaxconn.

    Raises:
        StartError: another server listens there, or the file can't be created; one sentence.
    """
    where = f"cannot listen on unix:{path}"
    check_path(path, where)
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        _remove_stale(path, where)
        sock.setblocking(False)
        sock.bind(path)
        os.chmod(path, int(mode, 8))  # before `listen`: until then, the kernel refuses all connections
        sock.listen(backlog)
    except StartError:
        sock.close()
        raise
    except FileNotFoundError:
        sock.close()
        raise StartError(f"{where}: its folder does not exist; create it for the user of the server") from None
    except (OSError, ValueError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise StartError(f"{where}: {reason}; set a path in a folder where the server may create files") from None
    return sock


def _remove_stale(path: str, where: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise StartError(f"{where}: the file exists and is not a socket; remove it or set another path")
    with contextlib.closing(_socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)) as probe:
        probe.setblocking(False)  # with a full queue, the call fails at once with EAGAIN
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass
    raise StartError(f"{where}: another server listens there; stop it or set another path")


class SocketFile:
    """The file of a listening Unix socket, which a server removes at its end.

    Args:
        path: path of the file.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._id = self._found()

    def _found(self) -> tuple[int, int] | None:
        try:
            found = self._path.lstat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def remove(self) -> None:
        """Remove the file, unless another process has replaced it."""
        if self._id is not None and self._found() == self._id:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._id = None
