"""The pages of the admin listener that programs read: `/healthz`, `/readyz`, `/metrics` and `/api/v1/`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from smqrt.admin import snapshots, tracing
from smqrt.admin.metrics import CONTENT_TYPE, Metrics
from smqrt.admin.paging import LIMIT
from smqrt.admin.snapshots import NotThereError
from smqrt.errors import ArgumentError, ClosedError, CloseReason
from smqrt.http.status import HttpError
from smqrt.http.tree import Directory
from smqrt.net.scheduling import Turn
from smqrt.wire.smq import MAX_NAME_BYTES

if TYPE_CHECKING:
    from smqrt.admin.parts import Parts
    from smqrt.http.message import Request

log = logging.getLogger("smqrt.admin")

BODY_BYTES = 1 << 20
_JSON = "application/json; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_ITEMS_AT_ONCE = 50
"""Items of a page between two looks at the clock."""
_MAX_QUERY = 16

Answer = object
Arguments = dict[str, str]


class Probes(Directory):
    """`/healthz` and `/readyz`, for which nobody logs in: they tell of nothing but the state."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(None, 127)
        self._health = parts.health

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        if relpath == "healthz":
            return self._say(request, 200, "ok\n")
        if relpath == "readyz":
            obstacles = self._health.obstacles()
            return self._say(request, 503 if obstacles else 200, "\n".join(obstacles or ["ready"]) + "\n")
        return False

    def _say(self, request: Request, status: int, text: str) -> bool:
        _check_method(request, "GET", "HEAD")
        response = request.response
        response.status = status
        response.headers.set("Content-Type", _TEXT)
        response.headers.set("Cache-Control", "no-store")
        response.write(text)
        return True


class Scraped(Directory):
    """`/metrics`, for Prometheus."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(None, 126)
        self._metrics = metrics

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        if relpath != "metrics" or (self.guard is not None and self.guard.stops(request, relpath)):
            return relpath == "metrics"
        _check_method(request, "GET", "HEAD")
        response = request.response
        response.headers.set("Content-Type", CONTENT_TYPE)
        response.headers.set("Cache-Control", "no-store")
        for part in self._metrics.lines():
            response.write(part)
        return True


class Api(Directory):
    """`/api/v1/`: snapshots as JSON, and the few things an operator may do.

    Args:
        parts: the server.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__("api")
        self._parts = parts

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        if self.guard is not None and self.guard.stops(request, relpath):
            return True
        try:
            if relpath.strip("/") == "v1/trace":
                self._trace(request)
                return True
            status, answer = 200, self._answer(request, relpath)
        except NotThereError as error:
            status, answer = 404, {"error": str(error)}
        except ArgumentError as error:
            status, answer = 400, {"error": str(error)}
        except ClosedError as error:
            status, answer = 409, {"error": str(error)}
        except HttpError as error:
            status, answer = error.status, {"error": error.detail}
            for name, value in error.headers.items():
                request.response.headers.set(name, value)
        answer_json(request, status, answer)
        return True

    def _trace(self, request: Request) -> None:
        """Write what happens, an object in each line, until the client goes away."""
        _check_method(request, "GET")
        arguments = _known_arguments(_arguments(request), ("hub", "peer", "topic"))
        hub = _whole("hub", arguments["hub"]) if "hub" in arguments else None
        events = tracing.begin(hub, arguments.get("peer", ""), arguments.get("topic", ""))
        response = request.response
        response.headers.set("Content-Type", "application/x-ndjson; charset=utf-8")
        response.headers.set("Cache-Control", "no-store")
        try:
            for event in events:
                response.write("\n" if event is None else _dumped(event) + "\n")
                response.flush()
        finally:
            events.close()

    def _answer(self, request: Request, relpath: str) -> Answer:
        words = relpath.strip("/").split("/")
        if words[0] != "v1":
            raise HttpError(404, "The API is at /api/v1/.")
        if request.method in ("GET", "HEAD"):
            return self._read(words[1:], _arguments(request))
        if request.method == "POST":
            return self._act(request, words[1:])
        raise HttpError(405, f"{request.method} is not for this address.", headers={"Allow": "GET, HEAD, POST"})

    def _read(self, words: list[str], arguments: Arguments) -> Answer:
        parts = self._parts
        match words:
            case [] | [""]:
                return {"paths": [f"/api/v1/{name}" for name in [*_PLAIN, *_PAGED]]}
            case [name] if name in _PLAIN:
                _none(arguments)
                return _PLAIN[name](parts)
            case [name] if name in _PAGED:
                return _PAGED[name](parts, arguments)
            case ["hubs", number]:
                _none(arguments)
                return snapshots.hub(snapshots.broker_of(_whole("hub", number)))
            case ["peers", name]:
                _none(arguments)
                return snapshots.peer(snapshots.peer_id(name)[0], snapshots.session_of(name))
            case ["peers", name, "subscriptions"]:
                return snapshots.subscriptions(name, _limit(arguments))
        raise HttpError(404, "There is no such address; /api/v1/ lists them.")

    def _act(self, request: Request, words: list[str]) -> Answer:
        match words:
            case ["peers", name, "disconnect"]:
                return disconnect(self._parts, name, _body(request))
            case ["apps", name, "restart"]:
                return restart(self._parts, name)
            case ["hubs", number, "publish"]:
                return publish(self._parts, _whole("hub", number), _body(request))
        raise HttpError(404, "There is nothing to do at this address.")


# ---- what an operator may do


def disconnect(parts: Parts, name: str, options: dict[str, object] | None = None) -> snapshots.Snapshot:
    """Ends the connection of the client with an id.

    Args:
        parts: the server.
        name: the id, such as "1.3055123".
        options: `text`, which goes out in a Disconnect packet: clients that are told so stay away. Without it the
            connection just closes, and they come back.

    Raises:
        ArgumentError: there is no such client, or the text is none.
    """
    said = _known(options or {}, ("text",)).get("text")
    if said is not None and (not isinstance(said, str) or len(said.encode()) > MAX_NAME_BYTES):
        raise ArgumentError(f"text: a text of at most {MAX_NAME_BYTES} bytes is needed")
    session = snapshots.session_of(name)
    log.info("disconnect of the client %s by an operator", name)
    session.disconnect(CloseReason.SHUTDOWN, said.encode() if isinstance(said, str) else None, "by an operator")
    return {"id": name, "disconnected": True}


def restart(parts: Parts, name: str) -> snapshots.Snapshot:
    """Restarts an application; blocks until that is done.

    Args:
        parts: the server.
        name: the application's; "-" is the one at the root.

    Raises:
        ArgumentError: there is no such application, or it is being changed.
    """
    application = snapshots.app_named(parts, name)
    if application.changing:
        raise ArgumentError(f"name: the application {application.uri} is being changed already; try again")
    log.info("restart of the application %s by an operator", application.uri)
    parts.restart(application)
    return {
        "name": application.name,
        "state": snapshots.app_state(application),
        "error": application.error,
    }


def publish(parts: Parts, hub: int, message: dict[str, object]) -> snapshots.Snapshot:
    """Publishes as the server.

    Args:
        parts: the server.
        hub: the number of the hub.
        message: `topic`, a name or a number; `data`, a text; `subtopic`, or none.

    Raises:
        ArgumentError: there is no such hub, or a value is none.
        ClosedError: the hub is being closed.
    """
    _known(message, ("topic", "data", "subtopic"))
    topic, data, subtopic = message.get("topic"), message.get("data", ""), message.get("subtopic")
    if not isinstance(data, str):
        raise ArgumentError("data: a text is needed; send JSON as a text")
    name = _destination("topic", topic)
    if name is None:
        raise ArgumentError("topic: a name or a number is needed")
    waiting = snapshots.broker_of(hub).publish(data.encode(), name, _destination("subtopic", subtopic))
    return {"hub": hub, "topic": topic, "bytes": len(data.encode()), "waiting": waiting}


def _destination(what: str, value: object) -> bytes | int | None:
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ArgumentError(f"{what}: a name or a number is needed")


# ---- reading a request


def _check_method(request: Request, *methods: str) -> None:
    if request.method not in methods:
        raise HttpError(405, f"{request.method} is not for this address.", headers={"Allow": ", ".join(methods)})


def _arguments(request: Request) -> Arguments:
    pairs = request.params()
    if len(pairs) > _MAX_QUERY:
        raise ArgumentError(f"query: at most {_MAX_QUERY} parameters are taken")
    return dict(pairs)


def _known(given: dict[str, object], names: tuple[str, ...]) -> dict[str, object]:
    for name in given:
        if name not in names:
            raise ArgumentError(f"{name[:40]}: there is no such argument; there are {', '.join(names)}")
    return given


def _known_arguments(arguments: Arguments, names: tuple[str, ...]) -> Arguments:
    _known(dict(arguments), names)
    return arguments


def _none(arguments: Arguments) -> None:
    if arguments:
        raise ArgumentError(f"{next(iter(arguments))[:40]}: this address takes no arguments")


def _whole(what: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise ArgumentError(f"{what}: {value[:40]!r} is no number")
    return int(value)


def _limit(arguments: Arguments) -> int:
    return _whole("limit", arguments["limit"]) if "limit" in arguments else LIMIT


def _body(request: Request) -> dict[str, object]:
    data = request.body(BODY_BYTES)
    if not data:
        return {}
    if not (request.get("content-type") or "").lower().startswith("application/json"):
        # A form of a foreign page can't send this type without being asked about it by the browser.
        raise HttpError(415, "Send JSON, with Content-Type: application/json.")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise HttpError(400, "The body is no JSON.") from None
    if not isinstance(found, dict):
        raise HttpError(400, "The body is no JSON object.")
    return found


_PLAIN: dict[str, Callable[[Parts], Answer]] = {
    "server": snapshots.server,
    "listeners": snapshots.listeners,
    "hubs": snapshots.hubs,
    "apps": snapshots.apps,
    "journals": snapshots.journals,
    "pipelines": snapshots.pipelines,
    "limits": snapshots.limits,
}


def _peers(parts: Parts, arguments: Arguments) -> Answer:
    _known(dict(arguments), ("hub", "after", "limit", "search", "sort"))
    hub = _whole("hub", arguments["hub"]) if "hub" in arguments else None
    return snapshots.peers(
        parts, hub, arguments.get("after"), _limit(arguments), arguments.get("search", ""), arguments.get("sort", "")
    )


def _topics(parts: Parts, arguments: Arguments) -> Answer:
    _known(dict(arguments), ("hub", "after", "limit", "search", "sort"))
    if "hub" not in arguments:
        raise ArgumentError("hub: which hub's topics? /api/v1/topics?hub=1; /api/v1/hubs lists the hubs")
    return snapshots.topics(
        parts,
        _whole("hub", arguments["hub"]),
        arguments.get("after"),
        _limit(arguments),
        arguments.get("search", ""),
        arguments.get("sort", ""),
    )


def _closed(parts: Parts, arguments: Arguments) -> Answer:
    _known(dict(arguments), ("hub", "after", "limit", "reason"))
    hub = _whole("hub", arguments["hub"]) if "hub" in arguments else None
    return snapshots.closed(parts, arguments.get("after"), _limit(arguments), hub, arguments.get("reason", ""))


_PAGED: dict[str, Callable[[Parts, Arguments], Answer]] = {"peers": _peers, "topics": _topics, "closed": _closed}


# ---- writing JSON


def answer_json(request: Request, status: int, answer: Answer) -> None:
    """Answer a request with a JSON text."""
    response = request.response
    response.status = status
    response.headers.set("Content-Type", _JSON)
    response.headers.set("Cache-Control", "no-store")
    response.headers.set("X-Content-Type-Options", "nosniff")
    for part in _json(answer):
        response.write(part)


def _json(answer: Answer) -> Iterator[str]:
    """The pieces of a JSON text; others run between the items of a page."""
    if not isinstance(answer, dict) or not isinstance(answer.get("items"), list):
        yield _dumped(answer) + "\n"
        return
    turn, items = Turn(), answer["items"]
    yield '{"items": ['
    for number, item in enumerate(items):
        if not number % _ITEMS_AT_ONCE:
            turn.breathe()
        yield (",\n" if number else "\n") + _dumped(item)
    rest = {name: value for name, value in answer.items() if name != "items"}
    yield "\n]" + "".join(f", {_dumped(name)}: {_dumped(value)}" for name, value in rest.items()) + "}\n"


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace").decode()
