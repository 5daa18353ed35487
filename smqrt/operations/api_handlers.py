"""Answers of this process to operators: snapshots and actions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from smqrt.errors import ArgumentError, ClosedError, CloseReason
from smqrt.http.headers import HttpError
from smqrt.operations import snapshots
from smqrt.operations.context import Parts
from smqrt.operations.paging import Arguments, known, limit_of, no_arguments, whole
from smqrt.operations.snapshots import NotFoundError
from smqrt.wire.smq import MAX_NAME_BYTES

log = logging.getLogger("smqrt.admin")

Answer = object
"""A value for JSON."""
Body = dict[str, object]
Response = tuple[int, Answer]
"""Status and answer."""


def handle(parts: Parts, words: Sequence[str], arguments: Arguments, body: Body | None = None) -> Answer:
    """Return the answer of this process.

    Args:
        parts: the server.
        words: the path below `/api/v1/`, split at slashes.
        arguments: the query.
        body: the body of a POST; None for a GET.

    Raises:
        ArgumentError, ClosedError, HttpError: the address is unknown, or an argument is invalid.
    """
    if body is None:
        match words:
            case [] | [""]:
                return {"paths": [f"/api/v1/{name}" for name in [*PLAIN, *PAGED]]}
            case [name] if name in PLAIN:
                no_arguments(arguments)
                return PLAIN[name](parts)
            case [name] if name in PAGED:
                return PAGED[name](parts, arguments)
            case ["hubs", number]:
                no_arguments(arguments)
                return snapshots.hub(snapshots.broker_of(whole("hub", number)))
            case ["peers", name]:
                no_arguments(arguments)
                return snapshots.peer(snapshots.peer_id(name)[0], snapshots.session_of(name))
            case ["peers", name, "subscriptions"]:
                return snapshots.subscriptions(name, limit_of(arguments))
        # The commands of `smqrt.cli.admin` recognize this text and the one below.
        raise HttpError(404, "There is no such address; /api/v1/ lists them.")
    match words:
        case ["peers", name, "disconnect"]:
            return disconnect(parts, name, body)
        case ["apps", name, "restart"]:
            return restart(parts, name)
        case ["hubs", number, "publish"]:
            return publish(parts, whole("hub", number), body)
        case ["drain"]:
            return drain(parts, body)
    raise HttpError(404, "There is nothing to do at this address.")


def response_of(call: Callable[[], Answer]) -> Response:
    """Return the status and the answer of `call()`; for an exception, its status and `{"error": text}`."""
    try:
        return 200, call()
    except NotFoundError as error:
        return 404, {"error": str(error)}
    except ArgumentError as error:
        return 400, {"error": str(error)}
    except ClosedError as error:
        return 409, {"error": str(error)}
    except HttpError as error:
        return error.status, {"error": error.detail}


# ---- actions of operators


def disconnect(parts: Parts, name: str, options: dict[str, object] | None = None) -> snapshots.Snapshot:
    """Close the connection of a client.

    Args:
        parts: the server.
        name: the id of the client, such as "1.3055123".
        options: `text` is sent in a Disconnect packet, so that the client does not reconnect. Without it the
            connection is closed without a packet, and the client reconnects.

    Raises:
        ArgumentError: there is no such client, or the text is invalid.
    """
    text = known(options or {}, ("text",)).get("text")
    if text is not None and (not isinstance(text, str) or len(text.encode()) > MAX_NAME_BYTES):
        raise ArgumentError(f"text: a text of at most {MAX_NAME_BYTES} bytes is needed")
    session = snapshots.session_of(name)
    log.info("disconnect of the client %s by an operator", name)
    session.disconnect(CloseReason.SHUTDOWN, text.encode() if isinstance(text, str) else None, "by an operator")
    return {"id": name, "disconnected": True}


def restart(parts: Parts, name: str) -> snapshots.Snapshot:
    """Restart an application. Blocks until it has started or failed.

    Args:
        parts: the server.
        name: the name of the application; "-" for the one at the root.

    Raises:
        ArgumentError: there is no such application, or it is already starting or stopping.
    """
    application = snapshots.app_named(parts, name)
    if application.changing:
        raise ArgumentError(f"name: the application {application.uri} is already starting or stopping; try again")
    log.info("restart of the application %s by an operator", application.uri)
    parts.restart(application)
    return {
        "name": application.name,
        "state": snapshots.app_state(application),
        "error": application.error,
    }


def publish(parts: Parts, hub: int, message: dict[str, object]) -> snapshots.Snapshot:
    """Publish a message as the server.

    Args:
        parts: the server.
        hub: the number of the hub.
        message: `topic`, a name or a number; `data`, a text; optionally `subtopic`, a name or a number.

    Raises:
        ArgumentError: there is no such hub, or a value is invalid.
        ClosedError: the hub is closed.
    """
    known(message, ("topic", "data", "subtopic"))
    topic, data, subtopic = message.get("topic"), message.get("data", ""), message.get("subtopic")
    if not isinstance(data, str):
        raise ArgumentError("data: a text is needed; send JSON as a text")
    name = _destination("topic", topic)
    if name is None:
        raise ArgumentError("topic: a name or a number is needed")
    waiting = snapshots.broker_of(hub).publish(data.encode(), name, _destination("subtopic", subtopic))
    return {"hub": hub, "topic": topic, "bytes": len(data.encode()), "waiting": waiting}


def drain(parts: Parts, options: dict[str, object]) -> snapshots.Snapshot:
    """Close the SMQ clients over the drain period and reject new ones, or accept clients again.

    Args:
        parts: the server.
        options: `on`, true by default; false accepts clients again.

    Raises:
        ArgumentError: `on` is not a boolean.
    """
    on = known(options, ("on",)).get("on", True)
    if not isinstance(on, bool):
        raise ArgumentError("on: true or false is needed")
    parts.drain(on)
    return {"drained": on, "peers": snapshots.server(parts)["peers"]}


def _destination(what: str, value: object) -> bytes | int | None:
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ArgumentError(f"{what}: a name or a number is needed")


# ---- addresses


PLAIN: dict[str, Callable[[Parts], Answer]] = {
    "server": snapshots.server,
    "listeners": snapshots.listeners,
    "hubs": snapshots.hubs,
    "apps": snapshots.apps,
    "journals": snapshots.journals,
    "pipelines": snapshots.pipelines,
    "limits": snapshots.limits,
    "clusters": lambda parts: snapshots.clusters(),
}


def _limit_only(arguments: Arguments) -> int:
    return limit_of(known(arguments, ("limit",)))


def _peers(parts: Parts, arguments: Arguments) -> Answer:
    known(arguments, ("hub", "after", "limit", "search", "sort"))
    hub = whole("hub", arguments["hub"]) if "hub" in arguments else None
    return snapshots.peers(
        parts, hub, arguments.get("after"), limit_of(arguments), arguments.get("search", ""), arguments.get("sort", "")
    )


def _topics(parts: Parts, arguments: Arguments) -> Answer:
    known(arguments, ("hub", "after", "limit", "search", "sort"))
    if "hub" not in arguments:
        raise ArgumentError("hub: an argument is needed, such as /api/v1/topics?hub=1; /api/v1/hubs lists the hubs")
    return snapshots.topics(
        parts,
        whole("hub", arguments["hub"]),
        arguments.get("after"),
        limit_of(arguments),
        arguments.get("search", ""),
        arguments.get("sort", ""),
    )


def _closed(parts: Parts, arguments: Arguments) -> Answer:
    known(arguments, ("hub", "after", "limit", "reason"))
    hub = whole("hub", arguments["hub"]) if "hub" in arguments else None
    return snapshots.closed(parts, arguments.get("after"), limit_of(arguments), hub, arguments.get("reason", ""))


PAGED: dict[str, Callable[[Parts, Arguments], Answer]] = {
    "peers": _peers,
    "topics": _topics,
    "closed": _closed,
    "log": lambda parts, arguments: snapshots.log_rows(parts, _limit_only(arguments)),
    "traces": lambda parts, arguments: snapshots.traces(parts, _limit_only(arguments)),
}
