"""Pages of the admin listener for programs: `/healthz`, `/readyz`, `/metrics` and `/api/v1/`."""

from __future__ import annotations

import json

from smqrt.errors import ArgumentError
from smqrt.http.headers import HttpError
from smqrt.http.message import Request
from smqrt.http.tree import Directory
from smqrt.loop.scheduling import Turn
from smqrt.operations.all_workers import AllWorkers, Answer
from smqrt.operations.context import Parts
from smqrt.operations.metrics import CONTENT_TYPE
from smqrt.operations.snapshots import Arguments, known, whole

BODY_BYTES = 1 << 20
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
            words = relpath.strip("/").split("/")
            if words[0] != "v1":
                raise HttpError(404, "The API is at /api/v1/.")
            _check_method(request, "GET", "HEAD", "POST")
            if request.method == "POST":
                status, answer = self._all_workers.answer(words[1:], {}, _body(request))
            else:
                status, answer = self._all_workers.answer(words[1:], _arguments(request))
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
                # None stands for silence: writing an empty line fails when the client has disconnected.
                response.write("\n" if event is None else _json_text(event) + "\n")
                response.flush()
        finally:
            events.close()


# ---- read a request


def _check_method(request: Request, *methods: str) -> None:
    if request.method not in methods:
        allowed = ", ".join(methods)
        raise HttpError(405, f"{request.method} is not allowed for this address.", headers={"Allow": allowed})


def _arguments(request: Request) -> Arguments:
    pairs = request.params()
    # Repeated parameters count separately. The last one is used.
    if len(pairs) > _MAX_PARAMETERS:
        raise ArgumentError(f"query: more than {_MAX_PARAMETERS} parameters")
    return dict(pairs)


def _body(request: Request) -> dict[str, object]:
    data = request.body(BODY_BYTES)
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


# ---- write JSON


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
