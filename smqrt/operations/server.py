"""The admin listener: a port of its own for health, metrics, the API and the console."""

from __future__ import annotations

import _socket
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from smqrt.apps.lua.applications import Application
from smqrt.auth.service import IdentityService
from smqrt.errors import StartError
from smqrt.http.access import Access
from smqrt.http.logins import Authenticator, FunctionAuthorizer, LoginGuard, Logins, ServerUsers
from smqrt.http.message import Request
from smqrt.http.server import HttpServer
from smqrt.http.sessions import RequestSessions
from smqrt.http.tree import Directory, Root
from smqrt.operations.all_workers import Together
from smqrt.operations.api import Api, Probes, Scraped, answer_json
from smqrt.operations.context import Parts
from smqrt.server.ports import ADMIN_PORT
from smqrt.transport.listener import Listener
from smqrt.transport.origins import Hosts, Origins, is_loopback
from smqrt.transport.server_tls import ListenerTls
from smqrt.transport.tls import HANDSHAKE_S

# ---- Announcements of a user's admin listeners, for commands: a file for each, that only this user reads.

log = logging.getLogger("smqrt.admin")


def folder() -> Path:
    """Returns the folder in which servers of this user leave the address of their admin listener."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "smqrt" if runtime else Path(tempfile.gettempdir()) / f"smqrt-{os.getuid()}"


def announce(url: str, certificate: str | None = None) -> Path | None:
    """Write the address into a file that only this user can read.

    Args:
        url: of the admin listener.
        certificate: the file of its certificate, when it speaks TLS: commands of this machine trust it as it is.
    """
    path = folder() / f"{os.getpid()}.json"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        found = path.parent.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            log.info("%s belongs to others too; commands of this machine are told with --url", path.parent)
            return None
        beside = path.with_suffix(".new")
        new = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(new, "w") as file:
            about = {"url": url, "pid": os.getpid(), "folder": os.getcwd()}
            json.dump(about | ({"certificate": str(Path(certificate).resolve())} if certificate else {}), file)
        beside.replace(path)  # whoever looks finds all of it, or nothing
    except OSError as error:
        log.info("%s can't be written: %s; commands of this machine are told with --url", path, error.strerror)
        return None
    return path


def announced() -> list[dict[str, object]]:
    """Returns what the servers of this user left that are still there, the newest first.

    Of two processes of one server, as there are during a hot restart, the newer one.
    """
    found: list[tuple[float, dict[str, object]]] = []
    with suppress(OSError):
        if folder().lstat().st_uid != os.getuid():
            return []
        for path in folder().glob("*.json"):
            with suppress(OSError, ValueError):
                if path.stat().st_uid == os.getuid() and Path(f"/proc/{path.stem}").exists():
                    found.append((path.stat().st_mtime, json.loads(path.read_text("utf-8"))))
    newest_first = [one for _, one in sorted(found, key=lambda entry: entry[0], reverse=True)]
    by_url: dict[object, dict[str, object]] = {}
    for one in newest_first:
        by_url.setdefault(one["url"], one)
    return list(by_url.values())


GROUP = "admin"
"""The group of users who may come in where others reach the admin listener."""
VIEWERS = "viewer"
"""The group of those who may look there, and change nothing."""
_LOOKING = ("GET", "HEAD")
_OPEN = ("/healthz", "/readyz")


class _Refusing(Directory):
    def refuse(self, request: Request) -> None:
        """See `Directory.refuse`; the API answers programs."""
        if not request.path.startswith("/api/"):
            super().refuse(request)
        elif request.method in _LOOKING:
            answer_json(request, 403, {"error": f"Your login may not look: that takes the group {VIEWERS} or {GROUP}."})
        else:
            sentence = f"Your login may look, and change nothing: that takes the group {GROUP}."
            answer_json(request, 403, {"error": sentence})


class _Root(Root):
    """The tree of the admin listener, with a login before it where one is needed."""

    _guard: LoginGuard | None = None

    def require_login(self, identities: IdentityService) -> None:
        """Let in the users of the group `admin`, and those of `viewer` to look."""

        def permits(name: str, method: str, path: str, session: object) -> bool:
            groups = identities.groups_of(name)
            return GROUP in groups or (VIEWERS in groups and method in _LOOKING)

        users = ServerUsers(identities)
        self._guard = LoginGuard(
            Authenticator(users, "basic", realm="smqrt admin"), FunctionAuthorizer(permits), _Refusing("")
        )

    def dispatch(self, request: Request) -> None:
        """See `Root.dispatch`."""
        if self._guard is None or request.path in _OPEN or not self._guard.stops(request, request.path[1:]):
            super().dispatch(request)


class AdminServer:
    """The admin listener. Its port is bound from the beginning, and served from `start` on.

    Args:
        host: the address to listen on.
        port: the port; None for `ADMIN_PORT`, or a free one when that is taken.
        identities: the server's users. On an address that others reach, those of the group `admin` may come in, by
            Basic, and those of the group `viewer`, who may only look; `/healthz` and `/readyz` are for all.
        tls: speaks TLS; None for plain HTTP.
        handshake_s: seconds that a TLS handshake may take.
        given: listening sockets of somebody else, instead of a new one.

    Attributes:
        root: the tree of what it serves.
        application: runs while the listener does: the console; None for none.

    Raises:
        StartError: the address can't be bound, or isn't loopback.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int | None = None,
        identities: IdentityService | None = None,
        tls: ListenerTls | None = None,
        handshake_s: float = HANDSHAKE_S,
        given: Sequence[_socket.socket] = (),
    ) -> None:
        self.root = _Root()
        self._tls, self._given = tls, given
        self.http = HttpServer(self.root, logins=Logins(RequestSessions()))
        self.listener = self._bound(host, port, handshake_s)
        address = self.listener.address[0]
        if not is_loopback(address) and identities is not None and identities.settings.users:
            self.root.require_login(identities)
            self.http.logins.throttle = identities.throttle
            if tls is None:
                log.warning(
                    "admin.host = %s: passwords come in clear text; give admin.cert and admin.key, or put a proxy with"
                    " TLS before it",
                    host,
                )
        elif not is_loopback(address):
            self.listener.close()
            raise StartError(
                f"admin.host = {host} would let everybody in who reaches this machine; name a file of users in"
                " auth.users, or leave the admin listener on 127.0.0.1."
            )
        self.http.access = Access(Origins(), Hosts(), loopback=is_loopback(address))
        self._file: Path | None = None
        self.application: Application | None = None
        self._parts: Parts | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self.listener.address
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}/" if ":" in host else f"{scheme}://{host}:{port}/"

    def mount(self, parts: Parts, together: Together) -> None:
        """Serve what is told of a server: of this process, and of all its workers."""
        self._parts = parts
        for directory in (Probes(parts), Scraped(together), Api(together)):
            self.root.insert(directory)

    def start(self) -> None:
        """Begin to accept; and leave the address where the commands of this user find it."""
        if self._parts is not None:
            self._parts.start()
        self.listener.start()
        if self.application is not None:
            self.application.load()
        self._file = announce(self.url, self._tls.certificates[0].path if self._tls else None)

    def close(self) -> None:
        """End it; a second call does nothing."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None
        self.listener.close()
        if self.application is not None:
            self.application.unload()
        if self._parts is not None:
            self._parts.stop()
        self.http.close()

    def _bound(self, host: str, port: int | None, handshake_s: float) -> Listener:
        if port is None:
            try:
                return self._bound(host, ADMIN_PORT, handshake_s)
            except StartError:
                return self._bound(host, 0, handshake_s)
        if self._tls is None:
            return Listener(host, port, self.http.accepted, given=self._given)
        return Listener(
            host, port, self.http.accepted_secure, self._tls.context, handshake_s=handshake_s, given=self._given
        )
