"""What this process answers an operator: snapshots to read, and the few things an operator may do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from smqrt.errors import ArgumentError, ClosedError, CloseReason
from smqrt.http.headers import HttpError
from smqrt.operations import snapshots
from smqrt.operations.paging import Arguments, known, limit_of, none, whole
from smqrt.operations.snapshots import NotThereError
from smqrt.wire.smq import MAX_NAME_BYTES

if TYPE_CHECKING:
    from smqrt.operations.context import Parts

log = logging.getLogger("smqrt.admin")

Answer = object
Body = dict[str, object]


def answer(parts: Parts, words: Sequence[str], arguments: Arguments, body: Body | None = None) -> Answer:
    """Answer for this process.

    Args:
        parts: the server.
        words: the address below `/api/v1/`.
        arguments: of the query.
        body: of a POST; None to read.

    Raises:
        ArgumentError, ClosedError, HttpError: there is nothing at this address, or an argument is none.
    """
    return _read(parts, words, arguments) if body is None else _act(parts, words, body)


def responded(give: Callable[[], Answer]) -> tuple[int, Answer]:
    """Returns status and answer of what `give` gives; those of an error are what it says."""
    try:
        return 200, give()
    except NotThereError as error:
        return 404, {"error": str(error)}
    except ArgumentError as error:
        return 400, {"error": str(error)}
    except ClosedError as error:
        return 409, {"error": str(error)}
    except HttpError as error:
        return error.status, {"error": error.detail}


def _read(parts: Parts, words: Sequence[str], arguments: Arguments) -> Answer:
    match words:
        case [] | [""]:
            return {"paths": [f"/api/v1/{name}" for name in [*PLAIN, *PAGED]]}
        case [name] if name in PLAIN:
            none(arguments)
            return PLAIN[name](parts)
        case [name] if name in PAGED:
            return PAGED[name](parts, arguments)
        case ["hubs", number]:
            none(arguments)
            return snapshots.hub(snapshots.broker_of(whole("hub", number)))
        case ["peers", name]:
            none(arguments)
            return snapshots.peer(snapshots.peer_id(name)[0], snapshots.session_of(name))
        case ["peers", name, "subscriptions"]:
            return snapshots.subscriptions(name, limit_of(arguments))
    raise HttpError(404, "There is no such address; /api/v1/ lists them.")


def _act(parts: Parts, words: Sequence[str], body: Body) -> Answer:
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
    said = known(options or {}, ("text",)).get("text")
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
    """Sends the SMQ clients of this process to other servers, or takes new ones again.

    Args:
        parts: the server.
        options: `on`, true by default.

    Raises:
        ArgumentError: `on` is no truth value.
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


# ---- the addresses


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


def _peers(parts: Parts, arguments: Arguments) -> Answer:
    known(dict(arguments), ("hub", "after", "limit", "search", "sort"))
    hub = whole("hub", arguments["hub"]) if "hub" in arguments else None
    return snapshots.peers(
        parts, hub, arguments.get("after"), limit_of(arguments), arguments.get("search", ""), arguments.get("sort", "")
    )


def _topics(parts: Parts, arguments: Arguments) -> Answer:
    known(dict(arguments), ("hub", "after", "limit", "search", "sort"))
    if "hub" not in arguments:
        raise ArgumentError("hub: which hub's topics? /api/v1/topics?hub=1; /api/v1/hubs lists the hubs")
    return snapshots.topics(
        parts,
        whole("hub", arguments["hub"]),
        arguments.get("after"),
        limit_of(arguments),
        arguments.get("search", ""),
        arguments.get("sort", ""),
    )


def _closed(parts: Parts, arguments: Arguments) -> Answer:
    known(dict(arguments), ("hub", "after", "limit", "reason"))
    hub = whole("hub", arguments["hub"]) if "hub" in arguments else None
    return snapshots.closed(parts, arguments.get("after"), limit_of(arguments), hub, arguments.get("reason", ""))


def _log(parts: Parts, arguments: Arguments) -> Answer:
    known(dict(arguments), ("limit",))
    return snapshots.log_rows(parts, limit_of(arguments))


def _traces(parts: Parts, arguments: Arguments) -> Answer:
    known(dict(arguments), ("limit",))
    return snapshots.traces(parts, limit_of(arguments))


PAGED: dict[str, Callable[[Parts, Arguments], Answer]] = {
    "peers": _peers, "topics": _topics, "closed": _closed, "log": _log, "traces": _traces,
}  # fmt: skip
