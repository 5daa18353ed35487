"""Answers of the admin API, from this process and from all workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import thread_time
from typing import Any, NamedTuple

from smqrt.broker.mqtt.application import PublishOptions
from smqrt.broker.mqtt.client import MqttClient
from smqrt.errors import ArgumentError, ClosedError, CloseReason, SmqrtError
from smqrt.http.headers import HttpError
from smqrt.operations import mqtt_clients, snapshots, topic_listener
from smqrt.operations.api_pages import LIMIT, MAX_LIMIT, Arguments, Snapshot, known, limit_of, no_arguments, whole
from smqrt.operations.context import Parts
from smqrt.operations.limit_usage import client_usage
from smqrt.operations.metrics import Metrics
from smqrt.operations.snapshots import NotFoundError
from smqrt.operations.topic_listener import QUESTION as LISTEN
from smqrt.operations.topic_listener import (
    LocalPeerListener,
    LocalTopicListener,
    RemoteListener,
    TopicListener,
    serve_topic_listener,
)
from smqrt.operations.topics import brokers_with_key, incomplete_ids, merged_topics, topics
from smqrt.smq.gevent_broker import all_brokers
from smqrt.wire.smq import MAX_NAME_BYTES
from smqrt.workers.worker_rpc import END, Events, Message, News, WorkerRpc, WorkerRpcServer, worker_of_hub

# ---- Answers of this process

log = logging.getLogger("smqrt.admin")

Answer = object
"""A value for JSON."""
Body = dict[str, object]
Response = tuple[int, Answer]
"""Status and answer."""


def handle(parts: Parts, segments: Sequence[str], arguments: Arguments, body: Body | None = None) -> Answer:
    """Return the answer of this process.

    Args:
        parts: the parts of this process.
        segments: the path below `/api/v1/`, split at slashes.
        arguments: the query of the URL.
        body: the body of a POST; None for a GET.

    Raises:
        ArgumentError, ClosedError, HttpError: the address is unknown, or an argument is invalid.
    """
    if body is None:
        match segments:
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
        # `smqrt.cli.admin`, perhaps of another version, matches this text and the one below.
        raise HttpError(404, "There is no such address; /api/v1/ lists them.")
    match segments:
        case ["peers", name, "disconnect"]:
            return disconnect(parts, name, body)
        case ["apps", name, "restart"]:
            return restart(parts, name)
        case ["hubs", number, "publish"]:
            return publish(parts, whole("hub", number), body)
        case ["hubs", number, "mqtt-sessions", "disconnect"]:
            return mqtt_clients.disconnect_session(whole("hub", number), body)
        case ["hubs", number, "mqtt-sessions", "delete"]:
            return mqtt_clients.end_session(whole("hub", number), body)
        case ["hubs", number, "mqtt-retained", "delete"]:
            return mqtt_clients.delete_retained(whole("hub", number), body)
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


# ---- Actions of operators


def disconnect(parts: Parts, name: str, options: dict[str, object] | None = None) -> Snapshot:
    """Close the connection of a client.

    Args:
        parts: the parts of this process.
        name: the id of the client, such as "1.3055123".
        options: `text` is sent in a Disconnect packet, so that the client does not reconnect. Without it the
            connection is closed without a packet, and the client reconnects.

    Raises:
        ArgumentError: there is no such client, or the text is invalid.
    """
    text = known(options or {}, ("text",)).get("text")
    if text is not None and (not isinstance(text, str) or len(text.encode()) > MAX_NAME_BYTES):
        raise ArgumentError(f"text: a string of at most {MAX_NAME_BYTES} bytes is needed")
    session = snapshots.session_of(name)
    log.info("client %s: disconnect requested by an operator", name)
    if isinstance(session, MqttClient):
        session.kick(text or "")
    else:
        session.disconnect(CloseReason.SHUTDOWN, None if text is None else text.encode(), "by an operator")
    return {"id": name, "disconnected": True}


def restart(parts: Parts, name: str) -> Snapshot:
    """Restart an application. Blocks until it has started or failed.

    Args:
        parts: the parts of this process.
        name: the name of the application; "-" for the application at `/`.

    Raises:
        ArgumentError: there is no such application, or it is already starting or stopping.
    """
    application = snapshots.app_named(parts, name)
    if application.changing:
        raise ArgumentError(f"name: the application {application.uri} is already starting or stopping; try again")
    log.info("application %s: restart requested by an operator", application.uri)
    parts.restart(application)
    return {
        "name": application.name,
        "state": snapshots.app_state(application),
        "error": application.error,
    }


def publish(parts: Parts, hub: int, message: dict[str, object]) -> Snapshot:
    """Publish a message as the server.

    Args:
        parts: the parts of this process.
        hub: the number of the hub.
        message: `topic`, a name or a number; `data`, a string; optionally `subtopic`, a name or a number, and for MQTT
            clients `qos`, `retain`, `expiry` in seconds and `properties`, see `smqrt.hub.smq.MessageMethods.publish`.

    Raises:
        ArgumentError: there is no such hub, or a value is invalid.
        ClosedError: the hub is closed.
    """
    known(message, ("topic", "data", "subtopic", "qos", "retain", "expiry", "properties"))
    topic, data, subtopic = message.get("topic"), message.get("data", ""), message.get("subtopic")
    if not isinstance(data, str):
        raise ArgumentError("data: a string is needed; send JSON as a string")
    name = _destination("topic", topic)
    if name is None:
        raise ArgumentError("topic: a name or a number is needed")
    broker, sub = snapshots.broker_of(hub), _destination("subtopic", subtopic)
    qos: Any = message.get("qos")  # `publish_mqtt` checks these values
    retain, expiry, properties = (message.get(key) for key in ("retain", "expiry", "properties"))
    if not isinstance(retain, bool | None):
        raise ArgumentError("retain: true or false is needed")
    options = PublishOptions(qos, bool(retain), expiry, properties)  # type: ignore[arg-type]
    if options == PublishOptions():
        waiting = broker.publish(data.encode(), name, sub)
    else:
        waiting = broker.publish_mqtt(data.encode(), name, options, sub)
    return {"hub": hub, "topic": topic, "bytes": len(data.encode()), "waiting": waiting}


def drain(parts: Parts, options: dict[str, object]) -> Snapshot:
    """Close the SMQ clients over the drain period and reject new ones, or accept clients again.

    Args:
        parts: the parts of this process.
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


# ---- Addresses below `/api/v1/`


PLAIN: dict[str, Callable[[Parts], Answer]] = {
    "server": snapshots.server,
    "listeners": snapshots.listeners,
    "hubs": snapshots.hubs,
    "apps": snapshots.apps,
    "journals": snapshots.journals,
    "pipelines": snapshots.pipelines,
    "limits": snapshots.limits,
    "client-limits": lambda parts: client_usage(),
    "clusters": lambda parts: snapshots.clusters(),
}


def _hub_of(arguments: Arguments) -> int | None:
    return whole("hub", arguments["hub"]) if "hub" in arguments else None


def _peers(parts: Parts, arguments: Arguments) -> Answer:
    known(arguments, ("hub", "after", "limit", "search", "sort"))
    hub, search, sort = _hub_of(arguments), arguments.get("search", ""), arguments.get("sort", "")
    return snapshots.peers(parts, hub, arguments.get("after"), limit_of(arguments), search, sort)


def _topics(parts: Parts, arguments: Arguments) -> Answer:
    known(arguments, ("hub", "key", "after", "limit", "search", "sort", "ids"))
    if "key" in arguments:
        brokers = brokers_with_key(arguments["key"])
    else:
        brokers = [snapshots.broker_of(_required_hub(arguments, "topics"))]
    search, sort, ids = (arguments.get(name, "") for name in ("search", "sort", "ids"))
    return topics(brokers, arguments.get("after"), limit_of(arguments), search, sort, ids)


def _required_hub(arguments: Arguments, path: str) -> int:
    hub = _hub_of(arguments)
    if hub is None:
        raise ArgumentError(f"hub: an argument is needed, such as /api/v1/{path}?hub=1; /api/v1/hubs lists the hubs")
    return hub


def _mqtt_sessions(parts: Parts, arguments: Arguments) -> Answer:
    known(arguments, ("hub", "after", "limit", "search", "state"))
    hub = _required_hub(arguments, "mqtt-sessions")
    search, state = arguments.get("search", ""), arguments.get("state", "offline")
    return mqtt_clients.sessions(hub, arguments.get("after"), limit_of(arguments), search, state)


def _mqtt_retained(parts: Parts, arguments: Arguments) -> Answer:
    known(arguments, ("hub", "after", "limit", "filter"))
    hub = _required_hub(arguments, "mqtt-retained")
    return mqtt_clients.retained(hub, arguments.get("filter", ""), arguments.get("after"), limit_of(arguments))


def _closed(parts: Parts, arguments: Arguments) -> Answer:
    known(arguments, ("hub", "after", "limit", "reason", "uid"))
    hub, reason, uid = _hub_of(arguments), arguments.get("reason", ""), arguments.get("uid", "")
    return snapshots.closed(parts, arguments.get("after"), limit_of(arguments), hub, reason, uid)


PAGED: dict[str, Callable[[Parts, Arguments], Answer]] = {
    "peers": _peers,
    "topics": _topics,
    "mqtt-sessions": _mqtt_sessions,
    "mqtt-retained": _mqtt_retained,
    "closed": _closed,
    "log": lambda parts, arguments: snapshots.log_rows(parts, limit_of(known(arguments, ("limit",)))),
    "traces": lambda parts, arguments: snapshots.traces(parts, limit_of(known(arguments, ("limit",)))),
}


# ---- Merged answers

Answers = dict[int, Any]
"""Answers by the number of the worker, in ascending order of the numbers."""

_SUMMED = ("cpu_s", "memory_bytes", "open_files", "open_files_limit", "connections", "hubs", "peers", "queued_bytes",
         "lua_memory_bytes", "lua_activities", "log_errors", "log_warnings", "log_errors_lately")  # fmt: skip
_MAXIMA = ("loop_lag_s", "loop_lag_worst_s", "loop_lag_5s_s")
_WORKER_KEYS = ("pid", "phase", "uptime_s", *_SUMMED, *_MAXIMA)
_LISTENER_COUNTERS = ("accepted", "open", "refused", "reassigned", "given", "handshakes", "handshakes_failed")


def server(answers: Answers, arguments: Arguments) -> object:
    """Return the server as a whole, and the state of each worker in `workers`."""
    merged = dict(_first(answers))
    for name in _SUMMED:
        merged[name] = sum(one[name] for one in answers.values())
    for name in _MAXIMA:
        merged[name] = max(one[name] for one in answers.values())
    obstacles = dict.fromkeys(text for one in answers.values() for text in one["obstacles"])
    merged["obstacles"], merged["ready"] = list(obstacles), not obstacles
    merged["workers"] = [
        {"worker": number, **{name: one[name] for name in _WORKER_KEYS}} for number, one in answers.items()
    ]
    return merged


def listeners(answers: Answers, arguments: Arguments) -> object:
    """Return the listeners with the sums of their counters."""
    by_name = {number: {one["name"]: one for one in rows} for number, rows in answers.items()}
    return [
        {**row, **{name: sum(one[row["name"]].get(name, 0) for one in by_name.values()) for name in _LISTENER_COUNTERS}}
        for row in _first(answers)
    ]


def side_by_side(answers: Answers, arguments: Arguments) -> object:
    """Return the rows of all workers, each with the number of its worker."""
    return [{**row, "worker": number} for number, rows in answers.items() for row in rows]


def first(answers: Answers, arguments: Arguments) -> object:
    """Return the answer of worker 0, which alone has this state."""
    return _first(answers)


def apps(answers: Answers, arguments: Arguments) -> object:
    """Return the applications. The row of a worker in which an application does not run takes precedence."""
    rows = {row["name"]: row for row in _first(answers)}
    for number, answer in answers.items():
        for row in answer:
            if rows.get(row["name"], row)["state"] == "running" != row["state"]:
                rows[row["name"]] = {**row, "worker": number}
    return list(rows.values())


def limits(answers: Answers, arguments: Arguments) -> object:
    """Return the limits with the sums of their counters, the latest refusal, and the use of the fullest worker."""
    # By name: the import of a module registers its limits, and workers may have imported different modules.
    by_name: dict[str, list[Any]] = {}
    for worker_rows in answers.values():
        for row in worker_rows:
            by_name.setdefault(row["name"], []).append(row)
    merged = []
    for _, rows in sorted(by_name.items()):
        latest = max(rows, key=lambda row: row["last_at"] or "")
        fullest = max(rows, key=lambda row: -1 if row["used"] is None else row["used"])
        reached = sum(row["reached"] for row in rows)
        merged.append({**latest, "used": fullest["used"], "bound": fullest["bound"], "reached": reached})
    return merged


def client_limits(answers: Answers, arguments: Arguments) -> object:
    """Return the limits of clients with the use of the fullest client of all workers."""
    fullest: dict[str, Any] = {}
    for row in (row for rows in answers.values() for row in rows):
        if row["name"] not in fullest or row["used"] > fullest[row["name"]]["used"]:
            fullest[row["name"]] = row
    return list(fullest.values())


def peers(answers: Answers, arguments: Arguments) -> object:
    """Return a page of the clients of all workers. Hub numbers contain the worker, so no two keys are equal."""
    sort = arguments.get("sort", "")
    keys: dict[str, Callable[[Any], Any]] = {
        "": lambda row: (-row["hub"], -row["etid"]),
        "newest": lambda row: -row["connected_s"],
    }
    key = keys.get(sort, lambda row: row[sort])
    return _page(answers, arguments, key, lambda row: str(row["id"]), is_last=bool(sort))


def topics_of_all(answers: Answers, arguments: Arguments) -> object:
    """Return a page of the topics of a hub, whose argument `ids` was "all"."""
    return merged_topics(answers.values(), limit_of(arguments), arguments.get("sort", ""))


def newest(answers: Answers, arguments: Arguments) -> object:
    """Return the newest closed connections or log lines of all workers, without a next page.

    Each worker has separate serial numbers, so a number does not identify a place in the merged list.
    """
    return _page(answers, arguments, lambda row: row["at"], lambda row: str(row["number"]), is_last=True)


def traces(answers: Answers, arguments: Arguments) -> object:
    """Return the last trace lines of each application in all workers, ordered by time."""
    limit = int(arguments.get("limit", LIMIT))
    lines: dict[str | None, list[Any]] = {row["app"]: [] for row in _first(answers)}
    for number, rows in answers.items():
        for row in rows:
            lines.setdefault(row["app"], []).extend({**line, "worker": number} for line in row["lines"])
    return [{"app": app, "lines": sorted(found, key=lambda one: one["at"])[-limit:]} for app, found in lines.items()]


def _page(
    answers: Answers, arguments: Arguments, key: Callable[[Any], Any], after: Callable[[Any], str], is_last: bool
) -> object:
    rows: Any = side_by_side({number: page["items"] for number, page in answers.items()}, arguments)
    rows.sort(key=key, reverse=True)
    limit = int(arguments.get("limit", LIMIT))  # each worker has checked it
    has_more = len(rows) > limit or any(page["after"] is not None for page in answers.values())
    items = rows[:limit]
    return {
        "items": items,
        "after": after(items[-1]) if items and has_more and not is_last else None,
        "total": sum(page["total"] for page in answers.values()),
    }


def _first(answers: Answers) -> Any:
    return next(iter(answers.values()))


MERGES: dict[str, Callable[[Answers, Arguments], object]] = {
    "server": server,
    "listeners": listeners,
    "hubs": side_by_side,
    "apps": apps,
    "journals": side_by_side,
    "pipelines": first,
    "limits": limits,
    "client-limits": client_limits,
    "clusters": side_by_side,
    "peers": peers,
    "topics": topics_of_all,
    "closed": newest,
    "log": newest,
    "traces": traces,
}
"""The functions that merge answers, by the path below `/api/v1/`. Other paths are answered by one worker."""


def metrics(texts: dict[int, str]) -> str:
    """Return the metrics of all workers as one text, with the label `worker`.

    Args:
        texts: metrics in the text format of Prometheus, by worker.
    """
    families: dict[str, list[str]] = {}
    for number, text in texts.items():
        family: list[str] = []
        is_known = False
        for line in text.split("\n"):
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_known = name in families
                family = families.setdefault(name, [])
            if line and not line.startswith("#"):
                name, brace, rest = line.partition("{")
                if brace and " " not in name:
                    family.append(f'{name}{{worker="{number}",{rest}')
                else:  # without labels
                    name, _, value = line.partition(" ")
                    family.append(f'{name}{{worker="{number}"}} {value}')
            elif line and not is_known:
                family.append(line)
    return "".join(f"{line}\n" for family in families.values() for line in family)


# ---- Requests to all workers


RESTART_S = 60.0
"""Time limit for the restart of an application in another worker."""

Query = tuple[Sequence[str], Arguments]
"""The path below `/api/v1/`, split at slashes, and the arguments."""


class Results(NamedTuple):
    """Answers to several queries.

    Attributes:
        answers: the answers in the order of the queries; None for errors, and when a worker does not answer.
        cost_s: the highest CPU time of a worker.
    """

    answers: list[Any]
    cost_s: float


class AllWorkers:
    """Answers API requests for a server with one or more workers.

    Args:
        parts: the parts of this process.
        worker_rpc: calls the other workers; None without workers.

    Attributes:
        parts: see above.
    """

    def __init__(self, parts: Parts, worker_rpc: WorkerRpc | None = None) -> None:
        self.parts, self._worker_rpc = parts, worker_rpc

    def answer(self, segments: Sequence[str], arguments: Arguments, body: Body | None = None) -> Response:
        """Return status and answer. Blocks. The arguments and errors are those of `handle`."""
        if body is None:
            if list(segments) == ["topics"] and self._worker_rpc is not None:
                return self.topics(arguments)[0]
            query = segments, arguments
            found, _ = self._ask([query])
            return self._merged(query, found[0])
        question: Message = {"do": "act", "words": segments, "body": body}
        number = _worker_of(segments, {})
        if self._worker_rpc is not None and number in self._worker_rpc.others:
            reply = self._worker_rpc.ask(number, question)
            if reply is None:
                raise HttpError(503, f"Worker {number} does not answer.", headers={"Retry-After": "1"})
            return reply["status"], reply["answer"]
        own = response_of(lambda: handle(self.parts, segments, {}, body))
        if self._worker_rpc is None or own[0] != 200 or number is not None:
            return own
        # One worker after the other, so that a restarting application stays available in the others.
        for number in self._worker_rpc.others:
            reply = self._worker_rpc.ask(number, question, RESTART_S)
            if reply is not None and reply["status"] != 200:
                return reply["status"], reply["answer"]
        return own

    def get(self, *segments: str, **arguments: str) -> Any:
        """Return the answer for a path below `/api/v1/`. Blocks. Raises ArgumentError for all errors."""
        try:
            status, answer = self.answer(segments, arguments)
        except HttpError as error:
            raise ArgumentError(error.detail) from None
        if status != 200:
            raise ArgumentError(str(dict(answer)["error"]))  # type: ignore[call-overload]  # an error is a dict
        return answer

    def get_many(self, queries: Sequence[Query]) -> Results:
        """Return the answers to several queries, with one request to each worker. Blocks."""
        found, cost_s = self._ask(queries)
        began_s = thread_time()
        answers: list[Any] = []
        for query, responses in zip(queries, found, strict=True):
            try:
                status, answer = self._merged(query, responses)
            except HttpError:
                status, answer = 503, None
            answers.append(answer if status == 200 else None)
        return Results(answers, cost_s + thread_time() - began_s)

    def topics(self, arguments: Arguments) -> tuple[Response, float]:
        """Return a page of the topics of a hub in all workers, and `Results.cost_s`. Blocks.

        Args:
            arguments: see `snapshots.topics`; `hub`, or `key` for the hubs of all workers with this key.
        """
        if self._worker_rpc is None or not {"hub", "key"} & {*arguments}:
            found, cost_s = self._ask([(("topics",), arguments)])
            return found[0][0], cost_s
        chosen = {name: value for name, value in arguments.items() if name != "hub"}
        if "key" not in arguments:
            status, hub = self.answer(("hubs", arguments["hub"]), {})
            if status != 200:
                return (status, hub), 0.0
            chosen["key"] = hub["key"]  # type: ignore[index]
        try:
            limit, sort = limit_of(chosen), chosen.get("sort", "")
        except ArgumentError as error:
            return (400, {"error": str(error)}), 0.0
        # The largest topic of the server need not be the largest one of any worker.
        per_worker = max(limit, LIMIT) if sort else limit
        query = ("topics",), {**chosen, "ids": "all", "limit": str(per_worker)}
        found, cost_s = self._ask([query])
        status, answer = self._merged(query, found[0])
        if status != 200:
            return (status, answer), cost_s
        page: dict[str, Any] = answer  # type: ignore[assignment]
        page["items"] = page["items"][:limit]
        # A topic may be on the page of one worker and below the last row of another: its counters are read there too.
        pages: Any = [one for status, one in found[0].values() if status == 200]
        if ids := incomplete_ids(pages, per_worker, sort):
            again = {"key": chosen["key"], "sort": sort, "ids": ids, "limit": str(MAX_LIMIT)}
            found, more_s = self._ask([(("topics",), again)])
            pages = [one for status, one in found[0].values() if status == 200]
            page["items"], cost_s = merged_topics(pages, limit, sort)["items"], cost_s + more_s
        return (200, page), cost_s

    def metrics(self) -> Iterator[bytes]:
        """Yield the metrics of all workers in the text format of Prometheus."""
        lines = Metrics(self.parts).lines()
        if self._worker_rpc is None:
            yield from lines
            return
        found = self._worker_rpc.ask_all({"do": "metrics"})
        texts = {0: b"".join(lines).decode(), **{number: reply["answer"] for number, reply in found.items()}}
        yield metrics(texts).encode()

    def trace(self, hub: int | None, peer: str, topic: str) -> Events:
        """Yield the events of a trace, from the worker with the client or from all workers.

        A hub selects the hubs of all workers with the same key. The arguments and errors are those of
        `topic_listener.start_trace`.
        """
        if self._worker_rpc is None:
            return topic_listener.start_trace(hub, peer, topic)
        number = _worker_of(["peers", peer], {}) if "." in peer else None
        key = None if hub is None else self.get("hubs", str(hub))["key"]
        question: Message = {"do": "trace", "key": key, "peer": peer, "topic": topic}
        if number in self._worker_rpc.others:
            return self._worker_rpc.events([number], question)
        own = _own_trace(question)
        return own if own and number is not None else self._worker_rpc.events(self._worker_rpc.others, question, own)

    def listen(self, hub: int, topics: Sequence[str | int]) -> TopicListener:
        """Subscribe to topics of a hub of any worker until the result is closed. Errors: see `LocalTopicListener`."""
        number = worker_of_hub(hub)
        if self._worker_rpc is not None and number in self._worker_rpc.others:
            return RemoteListener(self._worker_rpc, number, {"hub": hub, "topics": list(topics)})
        return LocalTopicListener(snapshots.broker_of(hub), topics)

    def listen_to_peer(self, peer: str) -> TopicListener:
        """Record what a client of any worker publishes until the result is closed. Raises ArgumentError.

        Args:
            peer: the id of the client, such as "1.3055123".
        """
        number = _worker_of(["peers", peer], {})
        if self._worker_rpc is not None and number in self._worker_rpc.others:
            return RemoteListener(self._worker_rpc, number, {"peer": peer})
        return LocalPeerListener(peer)

    def _ask(self, queries: Sequence[Query]) -> tuple[list[dict[int, Response]], float]:
        """Return the responses to each query by the number of the worker, and `Results.cost_s`."""
        numbers = [0, *(self._worker_rpc.others if self._worker_rpc else [])]
        # The indexes of the queries by worker: all queries for a worker are sent as one request.
        indexes: dict[int, list[int]] = {number: [] for number in numbers}
        for index, (segments, arguments) in enumerate(queries):
            owner = _worker_of(segments, arguments)
            if owner in numbers:
                indexes[owner].append(index)
                continue
            for number in numbers if owner is None and _is_for_all(segments) else [0]:
                indexes[number].append(index)
        own, cost_s = _own_responses(self.parts, [queries[index] for index in indexes[0]])
        replies: dict[int, tuple[list[Response], float]] = {0: (own, cost_s)}
        if self._worker_rpc is not None:
            questions: dict[int, Message] = {
                number: {"do": "answers", "asked": [queries[index] for index in asked]}
                for number, asked in indexes.items()
                if asked and number
            }
            for number, reply in self._worker_rpc.ask_each(questions).items():
                replies[number] = reply["answers"], reply["cost_s"]
        found: list[dict[int, Response]] = [{} for _ in queries]
        for number, (responses, _) in replies.items():
            for index, (status, answer) in zip(indexes[number], responses, strict=True):
                found[index][number] = status, answer
        return found, max(cost_s for _, cost_s in replies.values())

    def _merged(self, query: Query, responses: dict[int, Response]) -> Response:
        segments, arguments = query
        owner = _worker_of(segments, arguments)
        if self._worker_rpc is not None and owner in self._worker_rpc.others and owner not in responses:
            raise HttpError(503, f"Worker {owner} does not answer.", headers={"Retry-After": "1"})
        if self._worker_rpc is None or owner is not None or not _is_for_all(segments):
            return next(iter(responses.values()))
        if responses[0][0] != 200:
            return responses[0]
        answers = {number: answer for number, (status, answer) in responses.items() if status == 200}
        return 200, MERGES[segments[0]](answers, arguments)


def _worker_of(segments: Sequence[str], arguments: Arguments) -> int | None:
    """Return the number of the worker that has the object of a query; None for other queries."""
    match segments:
        case ["hubs" | "peers", hub, *_]:
            number = hub.partition(".")[0]
        case ["peers"] | ["topics"] | ["mqtt-sessions"] | ["mqtt-retained"]:
            number = arguments.get("hub", "")
        case _:
            number = ""
    # Longer numbers are not numbers of hubs, and `int` of a very long text is slow.
    return worker_of_hub(int(number)) if number.isascii() and number.isdigit() and len(number) < 18 else None


def _is_for_all(segments: Sequence[str]) -> bool:
    """Whether the answers of all workers are merged. Other paths are answered by one worker."""
    return len(segments) == 1 and segments[0] in MERGES


def _own_responses(parts: Parts, queries: Sequence[Query]) -> tuple[list[Response], float]:
    """Return the responses of this process, and their CPU time in seconds."""
    began_s = thread_time()
    found = [response_of(partial(handle, parts, segments, arguments)) for segments, arguments in queries]
    return found, thread_time() - began_s


# ---- Answers to another worker


def serve_other_workers(rpc_server: WorkerRpcServer, parts: Parts) -> None:
    """Answer requests of the worker with the admin listener.

    Args:
        rpc_server: the RPC server of the worker.
        parts: the parts of the worker.
    """

    def answers(question: Message) -> Message:
        found, cost_s = _own_responses(parts, question["asked"])
        return {"do": "answers", "answers": found, "cost_s": cost_s}

    def act(question: Message) -> Message:
        status, found = response_of(partial(handle, parts, question["words"], {}, question["body"]))
        return {"do": "answer", "status": status, "answer": found}

    def trace(question: Message) -> News:
        try:
            for event in _own_trace(question) or ():
                yield {"do": "event", "answer": event}
        except SmqrtError as error:
            log.info("a trace for another worker failed: %s", error)
        yield END

    rpc_server.answers["answers"] = answers
    rpc_server.answers["act"] = act
    rpc_server.answers["metrics"] = lambda question: {
        "do": "answer",
        "answer": b"".join(Metrics(parts).lines()).decode(),
    }
    rpc_server.news["trace"] = trace
    rpc_server.news[LISTEN] = partial(serve_topic_listener, snapshots.broker_of)


def _own_trace(question: Message) -> Events | None:
    """Start the trace in this worker; return None when this worker does not have the hub."""
    key = question["key"]
    hub = next((one.number for one in all_brokers() if one.key == key), None)
    return None if key and hub is None else topic_listener.start_trace(hub, question["peer"], question["topic"])
