"""Admin listener: a separate port for health, metrics, the console and the API."""

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
from smqrt.errors import ArgumentError, StartError
from smqrt.http.access import Access
from smqrt.http.headers import HttpError
from smqrt.http.logins import Authenticator, FunctionAuthorizer, LoginGuard, Logins, ServerUsers
from smqrt.http.message import Request
from smqrt.http.server import HttpServer
from smqrt.http.sessions import RequestSessions
from smqrt.http.tree import Directory, Root
from smqrt.loop.scheduling import Turn
from smqrt.operations.all_workers import AllWorkers, Answer
from smqrt.operations.api_pages import Arguments, known, whole
from smqrt.operations.context import Parts
from smqrt.operations.metrics import CONTENT_TYPE
from smqrt.server.listeners import ADMIN_PORT
from smqrt.transport.listener import Listener
from smqrt.transport.origins import Hosts, Origins, is_loopback
from smqrt.transport.server_tls import ListenerTls
from smqrt.transport.tls import HANDSHAKE_S

# ---- Announcements: a file for each admin listener that only this user can read, for commands on this machine

log = logging.getLogger("smqrt.admin")


def folder() -> Path:
    """Return the folder of the announcements of this user's servers."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "smqrt" if runtime else Path(tempfile.gettempdir()) / f"smqrt-{os.getuid()}"


def make_folder() -> bool:
    """Create the folder of the announcements; return False when other users have access to it. Raises OSError."""
    path = folder()
    path.mkdir(mode=0o700, exist_ok=True)
    # In /tmp another user may have created the folder, or a link of this name.
    found = path.lstat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o077


def _start_of(pid: int) -> int:
    """Return when a process has started, in clock ticks since the start of the system. Raises OSError."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # a name may contain ")"
    return int(fields[19])


def announce(url: str, certificate: str | None = None) -> Path | None:
    """Write the address of an admin listener into a file that only this user can read, and return its path.

    Args:
        url: URL of the admin listener.
        certificate: the file of its certificate, which commands on this machine trust; None without TLS.

    Returns:
        None when the file can't be written, or the folder belongs to another user.
    """
    path = folder() / f"{os.getpid()}.json"
    try:
        if not make_folder():
            log.info("%s: other users have access to this folder; commands need --url", path.parent)
            return None
        new_path = path.with_suffix(".new")
        new = os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(new, "w") as file:
            about: dict[str, object] = {"url": url, "pid": os.getpid(), "folder": os.getcwd()}
            about["started"] = _start_of(os.getpid())
            json.dump(about | ({"certificate": str(Path(certificate).resolve())} if certificate else {}), file)
        new_path.replace(path)  # atomically, so that readers never find an incomplete file
    except OSError as error:
        log.info("%s can't be written: %s; commands need --url", path, error.strerror)
        return None
    return path


def announced() -> list[dict[str, object]]:
    """Return the announcements of the running servers of this user, the newest first.

    During a hot restart a server has two processes; the newer one is returned.
    """
    found: list[tuple[float, dict[str, object]]] = []
    with suppress(OSError):
        if folder().lstat().st_uid != os.getuid():
            return []
        for path in folder().glob("*.json"):
            with suppress(OSError, ValueError):
                if path.stat().st_uid != os.getuid():
                    continue
                about = json.loads(path.read_text("utf-8"))
                # A killed server leaves its file. Its process is gone, or is another one with the same number.
                start = _start_of(about["pid"])
                if about.pop("started", start) == start:
                    found.append((path.stat().st_mtime, about))
    newest_first = [one for _, one in sorted(found, key=lambda entry: entry[0], reverse=True)]
    by_url: dict[object, dict[str, object]] = {}
    for one in newest_first:
        by_url.setdefault(one["url"], one)
    return list(by_url.values())


GROUP = "admin"
"""The group of users with all permissions, when the admin listener is not on a loopback address."""
VIEWERS = "viewer"
"""The group of users with read-only access."""
_READ_METHODS = ("GET", "HEAD")
_PUBLIC_PATHS = ("/healthz", "/readyz")


class _Forbidden(Directory):
    def deny(self, request: Request) -> None:
        """See `Directory.deny`. The API responds with JSON."""
        if not request.path.startswith("/api/"):
            super().deny(request)
        elif request.method in _READ_METHODS:
            answer_json(request, 403, {"error": f"Your login has no access: it needs the group {VIEWERS} or {GROUP}."})
        else:
            answer_json(request, 403, {"error": f"Your login is read-only: changes need the group {GROUP}."})


class _Root(Root):
    """The tree of the admin listener, behind a login if `require_login` was called."""

    _guard: LoginGuard | None = None

    def require_login(self, identities: IdentityService) -> None:
        """Require a login of the group `admin`, or of `viewer` for reading."""

        def permits(name: str, method: str, path: str, session: object) -> bool:
            groups = identities.groups_of(name)
            return GROUP in groups or (VIEWERS in groups and method in _READ_METHODS)

        users = ServerUsers(identities)
        self._guard = LoginGuard(
            Authenticator(users, "basic", realm="smqrt admin"), FunctionAuthorizer(permits), _Forbidden("")
        )

    def dispatch(self, request: Request) -> None:
        """See `Root.dispatch`."""
        if self._guard is None or request.path in _PUBLIC_PATHS or not self._guard.stops(request, request.path[1:]):
            super().dispatch(request)


class AdminServer:
    """The admin listener. The constructor binds its port; `start` begins to accept connections.

    Args:
        host: the address to listen on.
        port: the port; None for `ADMIN_PORT`, or a free one when that is in use.
        identities: the users of the server. Unless the address is loopback, users of the groups `admin` and `viewer`
            log in by Basic authentication; `viewer` is read-only. `/healthz` and `/readyz` need no login.
        tls: the TLS settings; None for plain HTTP.
        handshake_s: time limit of a TLS handshake.
        given: open listening sockets to use; empty to open one.

    Attributes:
        root: the tree of its pages.
        application: the console, which is loaded by `start` and unloaded by `close`; None without one.

    Raises:
        StartError: the address can't be bound, or it is not loopback and no users file is set.
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
        self.listener = self._bind(host, port, handshake_s)
        address = self.listener.address[0]
        if not is_loopback(address) and identities is not None and identities.settings.users:
            self.root.require_login(identities)
            self.http.logins.throttle = identities.throttle
            if tls is None:
                log.warning(
                    "admin.host = %s: passwords are sent in clear text. Set admin.cert and admin.key, or use a proxy"
                    " with TLS.",
                    host,
                )
        elif not is_loopback(address):
            self.listener.close()
            raise StartError(
                f"admin.host = {host} would give everyone on the network access. Set auth.users to a users file, or"
                " leave the admin listener on 127.0.0.1."
            )
        # Pages of other sites must not reach the API through the browser of an operator.
        self.http.access = Access(Origins(), Hosts(), loopback=is_loopback(address))
        self._file: Path | None = None
        self.application: Application | None = None
        self._parts: Parts | None = None

    @property
    def url(self) -> str:
        """The URL of the listener."""
        host, port = self.listener.address
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}/" if ":" in host else f"{scheme}://{host}:{port}/"

    def mount(self, parts: Parts, all_workers: AllWorkers) -> None:
        """Serve the pages of a server: its health, and the metrics and the API of all its workers."""
        self._parts = parts
        for directory in (Probes(parts), MetricsPage(all_workers), Api(all_workers)):
            self.root.insert(directory)

    def start(self) -> None:
        """Start accepting connections, and announce the address to the commands of this user."""
        if self._parts is not None:
            self._parts.start()
        self.listener.start()
        if self.application is not None:
            self.application.load()
        self._file = announce(self.url, self._tls.certificates[0].path if self._tls else None)

    def close(self) -> None:
        """Close the listener. A second call does nothing."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None
        self.listener.close()
        if self.application is not None:
            self.application.unload()
        if self._parts is not None:
            self._parts.stop()
        self.http.close()

    def _bind(self, host: str, port: int | None, handshake_s: float) -> Listener:
        if port is None:
            try:
                return self._bind(host, ADMIN_PORT, handshake_s)
            except StartError:
                return self._bind(host, 0, handshake_s)  # another server uses the default port
        if self._tls is None:
            return Listener(host, port, self.http.accepted, given=self._given)
        return Listener(
            host, port, self.http.accepted_secure, self._tls.context, handshake_s=handshake_s, given=self._given
        )


# ---- Pages of the admin listener for programs: `/healthz`, `/readyz`, `/metrics` and `/api/v1/`

MAX_BODY_BYTES = 1 << 20
_JSON = "application/json; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_ITEMS_PER_TIME_CHECK = 50
"""The number of items of a page between two checks of the time slice."""
_MAX_PARAMETERS = 16


class Probes(Directory):
    """`/healthz` and `/readyz`. They need no login, because they show only the state."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(None, 127)  # the highest priority: no other directory receives these paths
        self._health = parts.health

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        if relpath == "healthz":
            return self._respond(request, 200, "ok\n")
        if relpath == "readyz":
            # The status is for load balancers, the text for people.
            obstacles = self._health.obstacles()
            return self._respond(request, 503 if obstacles else 200, "\n".join(obstacles or ["ready"]) + "\n")
        return False

    def _respond(self, request: Request, status: int, text: str) -> bool:
        _check_method(request, "GET", "HEAD")
        response = request.response
        response.status = status
        response.headers.set("Content-Type", _TEXT)
        response.headers.set("Cache-Control", "no-store")
        response.write(text)
        return True


class MetricsPage(Directory):
    """`/metrics`, for Prometheus."""

    def __init__(self, all_workers: AllWorkers) -> None:
        super().__init__(None, 126)
        self._all_workers = all_workers

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        if relpath != "metrics" or (self.guard is not None and self.guard.stops(request, relpath)):
            return relpath == "metrics"  # the guard has responded
        _check_method(request, "GET", "HEAD")
        response = request.response
        response.headers.set("Content-Type", CONTENT_TYPE)
        response.headers.set("Cache-Control", "no-store")
        for part in self._all_workers.metrics():
            response.write(part)
        return True


class Api(Directory):
    """`/api/v1/`: snapshots as JSON, and actions of operators.

    Args:
        all_workers: the server with all its workers.
    """

    def __init__(self, all_workers: AllWorkers) -> None:
        super().__init__("api")
        self._all_workers = all_workers

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        if self.guard is not None and self.guard.stops(request, relpath):
            return True
        try:
            if relpath.strip("/") == "v1/trace":
                self._trace(request)
                return True
            segments = relpath.strip("/").split("/")
            if segments[0] != "v1":
                raise HttpError(404, "The API is at /api/v1/.")
            _check_method(request, "GET", "HEAD", "POST", "DELETE")
            if request.method == "DELETE":
                status, answer = self._all_workers.answer(*deletion(segments[1:], _arguments(request)))
            elif request.method == "POST":
                status, answer = self._all_workers.answer(segments[1:], {}, _body(request))
            else:
                status, answer = self._all_workers.answer(segments[1:], _arguments(request))
        except ArgumentError as error:
            status, answer = 400, {"error": str(error)}
        except HttpError as error:
            status, answer = error.status, {"error": error.detail}
            for name, value in error.headers.items():
                request.response.headers.set(name, value)
        answer_json(request, status, answer)
        return True

    def _trace(self, request: Request) -> None:
        """Write the events of a trace, one JSON object on each line, until the client disconnects."""
        _check_method(request, "GET")
        arguments = known(_arguments(request), ("hub", "peer", "topic"))
        hub = whole("hub", arguments["hub"]) if "hub" in arguments else None
        events = self._all_workers.trace(hub, arguments.get("peer", ""), arguments.get("topic", ""))
        response = request.response
        response.headers.set("Content-Type", "application/x-ndjson; charset=utf-8")
        response.headers.set("Cache-Control", "no-store")
        try:
            for event in events:
                # None means no event for some time. Writing an empty line fails when the client has disconnected.
                response.write("\n" if event is None else _json_text(event) + "\n")
                response.flush()
        finally:
            events.close()


# ---- Read a request


def _check_method(request: Request, *methods: str) -> None:
    if request.method not in methods:
        allowed = ", ".join(methods)
        raise HttpError(405, f"{request.method} is not allowed for this address.", headers={"Allow": allowed})


def deletion(segments: list[str], arguments: Arguments) -> tuple[list[str], Arguments, dict[str, object]]:
    """Return the path, arguments and body of the POST that means the same as a DELETE.

    Raises:
        ArgumentError: the argument `hub` is missing.
        HttpError: nothing can be deleted at this address.
    """
    if segments not in (["mqtt-retained"], ["mqtt-sessions"]):
        raise HttpError(405, "DELETE is not allowed for this address.", headers={"Allow": "GET, HEAD, POST"})
    if "hub" not in arguments:
        raise ArgumentError(
            f"hub: an argument is needed, such as /api/v1/{segments[0]}?hub=1; /api/v1/hubs lists the hubs"
        )
    body: dict[str, object] = {name: value for name, value in arguments.items() if name != "hub"}
    return ["hubs", arguments["hub"], segments[0], "delete"], {}, body


def _arguments(request: Request) -> Arguments:
    pairs = request.params()
    # Repeated parameters count separately. The last one is used.
    if len(pairs) > _MAX_PARAMETERS:
        raise ArgumentError(f"query: {len(pairs)} parameters; at most {_MAX_PARAMETERS} are permitted")
    return dict(pairs)


def _body(request: Request) -> dict[str, object]:
    data = request.body(MAX_BODY_BYTES)
    if not data:
        return {}
    if not (request.get("content-type") or "").lower().startswith("application/json"):
        # A form of another site can't send this type unless this server permits it (a CORS preflight request).
        raise HttpError(415, "Send JSON, with Content-Type: application/json.")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise HttpError(400, "The body is not JSON.") from None
    if not isinstance(found, dict):
        raise HttpError(400, "The body is not a JSON object.")
    return found


# ---- Write JSON


def answer_json(request: Request, status: int, answer: Answer) -> None:
    """Send a response with JSON, and yield to the event loop between the items of a page."""
    response = request.response
    response.status = status
    response.headers.set("Content-Type", _JSON)
    response.headers.set("Cache-Control", "no-store")
    response.headers.set("X-Content-Type-Options", "nosniff")
    if not isinstance(answer, dict) or not isinstance(answer.get("items"), list):
        response.write(_json_text(answer) + "\n")
        return
    # A page is written item by item, and other greenlets run in between: it may have thousands of rows.
    turn, items = Turn(), answer["items"]
    response.write('{"items": [')
    for number, item in enumerate(items):
        if not number % _ITEMS_PER_TIME_CHECK:
            turn.yield_if_due()
        response.write((",\n" if number else "\n") + _json_text(item))
    rest = {name: value for name, value in answer.items() if name != "items"}
    end = "".join(f", {_json_text(name)}: {_json_text(value)}" for name, value in rest.items())
    response.write(f"\n]{end}}}\n")


def _json_text(value: object) -> str:
    # Names with bytes that are not UTF-8 contain lone surrogates, which a response can't contain.
    return json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace").decode()
