"""Data of the console's pages.

A view is created when a page opens it, and is read every second. Expensive parts are refreshed less often.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from time import monotonic, time
from typing import Any, Protocol

from smqrt.broker.mqtt.retained import name_matcher
from smqrt.errors import ArgumentError, CloseReason, JournalError
from smqrt.http.open_files import disks
from smqrt.journal import readers, writer
from smqrt.operations import all_workers
from smqrt.operations.api_pages import Snapshot
from smqrt.operations.console.console import Console, workers_of
from smqrt.operations.console.gauges import TOPICS_S, PacedCache, Rates, hub_choices, merged_hubs
from smqrt.operations.console.source_lines import source_lines
from smqrt.operations.logs import MAX_KEPT
from smqrt.operations.mqtt_clients import STATES
from smqrt.operations.topic_listener import MAX_TOPICS, TopicListener
from smqrt.printable import printable
from smqrt.smq.close_log import explanation_of

# ---- Shared parts of views

PAGE = 50
"""The number of clients on a page."""
MAX_PEER_PAGES = 20
MAX_TOPIC_ROWS = 100
MAX_MQTT_ROWS = 100
MAX_PAYLOAD_CHARS = 300
MAX_CLOSES = 100
"""The limit of closed connections of each reason."""
MAX_PEER_MESSAGES = 100
MAX_PEER_CLOSES = 50
MAX_ERROR_CHARS = 2000
MAX_READERS = 100
MAX_LOG_ENTRIES = 60
MAX_NAME_CHARS = 120
"""The limit of shown characters of a name; names can have 65 KB."""
MAX_SEARCH_CHARS = 100
Options = Mapping[str, Any]


def _chosen(console: Console, number: int | None) -> tuple[list[Snapshot], dict[str, Any] | None]:
    """Return the hubs to choose from, and the hub with a number, else the first hub."""
    hubs = console.hubs()
    choices = hub_choices(hubs)
    by_number = {one: hub for hub in hubs for one in hub["ids"]}
    return choices, by_number.get(number or 0) or (by_number[choices[0]["id"]] if choices else None)


def shown_name(text: str) -> str:
    """Return the beginning of a name without control characters, for a page."""
    cut = text[:MAX_NAME_CHARS]
    more = f"… ({len(text):,} characters)" if len(text) > len(cut) else ""
    return printable(cut) + more


def _number(options: Options, name: str) -> int | None:
    value = options.get(name)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def _text(options: Options, name: str) -> str:
    value = options.get(name, "")
    return value[:MAX_SEARCH_CHARS] if isinstance(value, str) else ""


# ---- Views


class View(Protocol):
    """A view of one page, or of several pages with the same request."""

    def data(self) -> Snapshot:
        """Return the current data. Raises ArgumentError for an object that does not exist."""

    def close(self) -> None:
        """Release the resources of the view, after its last page has left it."""


class _Stateless:
    """A view without resources to release."""

    def close(self) -> None:
        """See `View.close`."""


class Plain(_Stateless):
    """A view without state.

    Args:
        data: see `View.data`.
    """

    def __init__(self, data: Callable[[], Snapshot]) -> None:
        self.data = data


class Peers(_Stateless):
    """A page of the clients of a hub in all workers."""

    _SORTS = {"since": "newest", "queue": "queued_bytes", "dropped": "dropped", "subscriptions": "subscriptions"}

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._hub = _number(options, "hub")
        self._search = _text(options, "find")
        self._sort = self._SORTS.get(_text(options, "sort"), "newest")
        self._first = min(_number(options, "page") or 0, MAX_PEER_PAGES - 1) * PAGE
        self._order: PacedCache[tuple[int, ...]] = PacedCache(self._find)
        self._rates = Rates()

    def _find(self, hubs: tuple[int, ...]) -> tuple[tuple[list[str], int], float]:
        arguments = {"limit": str(self._first + PAGE), "search": self._search, "sort": self._sort}
        results = self._console.server.get_many([(("peers",), {"hub": str(hub), **arguments}) for hub in hubs])
        pages = {at: page for at, page in enumerate(results.answers) if page is not None}
        found: Any = all_workers.peers(pages, arguments)
        return ([one["id"] for one in found["items"][self._first :]], found["total"]), results.cost_s

    def data(self) -> Snapshot:
        """See `View.data`."""
        choices, hub = _chosen(self._console, self._hub)
        if hub is None:
            return {"hubs": choices, "rows": [], "matching": 0, "total": 0}
        ids, matching = self._order.get(tuple(hub["ids"]))
        self._rates.begin()
        found = self._console.server.get_many([(("peers", one), {}) for one in ids]).answers
        rows = [peer_row(one, self._rates) for one in found if one is not None]  # the others have disconnected
        return {
            "hubs": choices,
            "hub": hub["id"],
            "rows": rows,
            "matching": matching,
            "reachable": min(matching, MAX_PEER_PAGES * PAGE),
            "total": hub["peers"],
            "everywhere": self._console.sample().now["peers"],
        }


class Peer:
    """One client: its figures, subscriptions, last messages, and the closed connections of the same uid.

    Messages are recorded while the view is open. After the client has disconnected, the rest stays visible.
    """

    def __init__(self, console: Console, options: Options) -> None:
        self._console, self._server = console, console.server
        self._id = _text(options, "id")
        self._rates = Rates()
        self._last: Snapshot = {}
        self._uid = ""
        self._messages: deque[Snapshot] = deque(maxlen=MAX_PEER_MESSAGES)
        self._missed = 0
        self._listening: TopicListener | None = None
        self._successor: PacedCache[tuple[int, ...]] = PacedCache(self._find_successor)

    def data(self) -> Snapshot:
        """See `View.data`."""
        self._rates.begin()
        address = ("peers", self._id)
        subscriptions: Any = {"items": []}
        peer, subscribed = self._server.get_many(
            [(address, {}), ((*address, "subscriptions"), {"limit": str(PAGE)})]
        ).answers
        if peer is not None:
            if self._listening is None:
                self._uid, self._listening = peer["uid"], self._server.listen_to_peer(self._id)
            subscriptions = subscribed or subscriptions
            topics = [shown_name(name) for name in subscriptions["items"]]
            self._last = {**peer_row(peer, self._rates), "topics": topics}
        elif not self._last:
            self._server.get(*address)  # raises ArgumentError with the reason
        if self._listening is not None:
            messages, missed = self._listening.take()
            self._messages.extend(messages)
            self._missed += missed
        hub = self._hub()
        ids = tuple(hub["ids"]) if hub else ()
        return {
            **self._last,
            "hub_name": hub["name"] if hub else "",
            "is_connected": peer is not None,
            "successor": None if peer is not None else self._successor.get(ids),
            "messages": list(self._messages),
            "missed": self._missed,
            "closes": self._closes(ids),
        }

    def _hub(self) -> dict[str, Any] | None:
        hubs = merged_hubs(self._console.sample().hubs)
        return next((hub for hub in hubs if self._last["hub"] in hub["ids"]), None)

    def _closes(self, hubs: tuple[int, ...]) -> list[Snapshot]:
        if not self._uid:
            return []  # closed connections without a uid belong to any client
        found = self._server.get("closed", uid=self._uid, limit=str(MAX_PEER_CLOSES))
        return [_closed_row(one) for one in found["items"] if one["hub"] in hubs]

    def _find_successor(self, hubs: tuple[int, ...]) -> tuple[str | None, float]:
        """Return the id of a connected client with the same uid."""
        arguments = {"search": self._uid, "sort": "newest", "limit": str(PAGE)}
        queries = [(("peers",), {"hub": str(hub), **arguments}) for hub in hubs]
        results = self._server.get_many(queries if self._uid else [])
        rows = [one for page in results.answers if page is not None for one in page["items"]]
        return next((one["id"] for one in rows if one["uid"] == self._uid), None), results.cost_s

    def close(self) -> None:
        """See `View.close`."""
        if self._listening is not None:
            self._listening.close()


def peer_row(found: Mapping[str, Any], rates: Rates) -> Snapshot:
    """Return a client, see `snapshots.peer`, with its rates of received and sent bytes."""
    row, peer = dict(found), found["id"]
    received, sent = row.pop("bytes_received"), row.pop("bytes_sent")
    connected_s: Any = row["connected_s"]
    row["connected_s"] = int(connected_s)
    row["in_bytes_per_s"] = rates.per_s((peer, "in"), received)
    row["out_bytes_per_s"] = rates.per_s((peer, "out"), sent)
    for name in ("uid", "info", "user", "address"):
        row[name] = shown_name(str(row[name]))
    return row


class Topics(_Stateless):
    """The topics of a hub with the most subscribers or messages, and the rates of their messages."""

    _SORTS = ("subscribers", "messages")

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._hub = _number(options, "hub")
        self._search = _text(options, "find")
        sort = _text(options, "sort")
        self._sort = sort if sort in self._SORTS else self._SORTS[0]
        self._rates = Rates()
        self._found: PacedCache[str] = PacedCache(self._find, kept_s=TOPICS_S)

    def _find(self, key: str) -> tuple[Snapshot, float]:
        arguments = {"key": key, "limit": str(MAX_TOPIC_ROWS), "search": self._search, "sort": self._sort}
        (status, page), cost_s = self._console.server.topics(arguments)
        found: Any = page if status == 200 else {"items": [], "total": 0}
        self._rates.begin()
        rows = []
        for one in found["items"]:
            name = shown_name(one["name"])
            rate = self._rates.per_s(one["name"], one["messages"])
            rows.append({**one, "name": name, "exact": name == one["name"], "per_s": rate})
        return {"rows": rows, "matching": found["total"], "read_s": round(monotonic(), 3)}, cost_s

    def data(self) -> Snapshot:
        """See `View.data`. `read_s` changes when the figures were read again."""
        choices, hub = _chosen(self._console, self._hub)
        if hub is None:
            return {"hubs": choices, "rows": [], "matching": 0, "total": 0}
        everywhere = sum(one["topics"] for one in self._console.hubs())
        counts = {"total": hub["topics"], "everywhere": everywhere}
        return {"hubs": choices, "hub": hub["id"], **counts, **self._found.get(hub["key"])}


class MqttList(_Stateless):
    """A list of a hub with MQTT clients: its sessions, or its retained messages.

    Args:
        console: the console.
        options: the options of the page.
        path: the path of the list in the API.
        arguments: arguments of the request beside hub and limit.
        row: returns a row of the page for an item of the API.
        key: the field that orders the rows.
    """

    def __init__(
        self,
        console: Console,
        options: Options,
        path: str,
        arguments: dict[str, str],
        row: Callable[[dict[str, Any]], Snapshot],
        key: str,
    ) -> None:
        self._console, self._path, self._arguments, self._row, self._key = console, path, arguments, row, key
        self._counter = path.removeprefix("mqtt-")
        self._hub = _number(options, "hub")
        self._order: PacedCache[tuple[int, ...]] = PacedCache(self._find)

    def _find(self, hubs: tuple[int, ...]) -> tuple[Snapshot, float]:
        arguments = {"limit": str(MAX_MQTT_ROWS), **self._arguments}
        results = self._console.server.get_many([((self._path,), {"hub": str(hub), **arguments}) for hub in hubs])
        pages = list(filter(None, results.answers))
        # A session is at one worker; all workers have the same retained messages.
        items: dict[str, dict[str, Any]] = {}
        for hub, page in zip(hubs, results.answers, strict=True):
            for one in (page or {"items": ()})["items"]:
                items.setdefault(one[self._key], {"hub": hub, **one})
        rows = [self._row(items[key]) for key in sorted(items)[:MAX_MQTT_ROWS]]
        matching = (max if self._counter == "retained" else sum)([0, *(page["total"] for page in pages)])
        return {"rows": rows, "matching": matching}, results.cost_s

    def data(self) -> Snapshot:
        """See `View.data`."""
        hubs = merged_hubs([hub for hub in self._console.sample().hubs if hub["mqtt"] is not None])
        choices = hub_choices(hubs, self._counter)
        if not choices:
            return {"hubs": [], "ids": [], "rows": [], "matching": 0, "everywhere": 0}
        by_number = {one: hub for hub in hubs for one in hub["ids"]}
        hub = by_number.get(self._hub or 0) or by_number[choices[0]["id"]]
        everywhere = sum(one[self._counter] for one in hubs)
        found = self._order.get(tuple(hub["ids"]))
        return {"hubs": choices, "hub": hub["id"], "ids": hub["ids"], "everywhere": everywhere, **found}


def _sessions(console: Console, options: Options) -> View:
    """Return the view of the sessions of MQTT clients."""

    def row(one: dict[str, Any]) -> Snapshot:
        return {**one, "key": f"{one['hub']}:{one['client_id']}", "name": shown_name(one["client_id"])}

    state = _text(options, "state")
    arguments = {"search": _text(options, "find"), "state": state if state in STATES else "all"}
    return MqttList(console, options, "mqtt-sessions", arguments, row, "client_id")


def _retained(console: Console, options: Options) -> View:
    """Return the view of the retained messages. Raises ArgumentError for an invalid filter."""

    def row(one: dict[str, Any]) -> Snapshot:
        shown: Snapshot = {"name": shown_name(one["topic"]), "payload": printable(one["payload"][:MAX_PAYLOAD_CHARS])}
        shown["cut"] = one["bytes"] > len(one["payload"]) or len(one["payload"]) > MAX_PAYLOAD_CHARS
        properties = {shown_name(name): shown_name(str(value)) for name, value in one["properties"].items()}
        return {**one, **shown, "key": f"{one['hub']}:{one['topic']}", "properties": properties}

    wanted = _text(options, "find")
    name_matcher(wanted)
    return MqttList(console, options, "mqtt-retained", {"filter": wanted}, row, "topic")


class Messages:
    """The messages of some topics of a hub."""

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._hub = _number(options, "hub")
        topics = options.get("topics") or []
        if not isinstance(topics, list) or not all(type(one) in (str, int) and one for one in topics):
            raise ArgumentError("topics: a list of names and numbers is needed")
        if len(topics) > MAX_TOPICS:
            raise ArgumentError(f"topics: a page shows at most {MAX_TOPICS} topics")
        self._topics = topics
        self._listening: TopicListener | None = None
        self._listens_to: object = None

    def data(self) -> Snapshot:
        """See `View.data`."""
        choices, hub = _chosen(self._console, self._hub)
        if hub is None:
            return {"hubs": choices, "messages": [], "missed": 0}
        if self._listens_to != hub["id"]:  # also after the application has created a new hub
            self.close()
            self._listens_to = hub["id"]
            self._listening = self._console.server.listen(hub["id"], self._topics) if self._topics else None
        messages, missed = self._listening.take() if self._listening else ([], 0)
        return {"hubs": choices, "hub": hub["id"], "messages": messages, "missed": missed}

    def close(self) -> None:
        """See `View.close`."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None


class Applications(_Stateless):
    """The applications, with the source lines around their errors and with their last traces."""

    _MAX_TRACES = 40

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._sources: dict[tuple[str, str], Snapshot | None] = {}

    def data(self) -> Snapshot:
        """See `View.data`."""
        sources, self._sources = self._sources, {}
        found = self._console.server.get("traces", limit=str(self._MAX_TRACES))
        traces: dict[str | None, list[str]] = {}
        for one in found:
            traces[one["app"]] = [
                f"w{line['worker']}: {line['text']}" if "worker" in line else line["text"] for line in one["lines"]
            ]
        states = {one["name"]: one for one in self._console.sample().also["apps"]}
        rows = []
        for application in self._console.server.parts.applications:
            row = states.get(application.name)
            if row is None:
                continue  # it was added after the sample
            error = printable(row["error"] or "", lines=True)
            key = (application.uri, error)
            if error:
                self._sources[key] = sources.get(key) or source_lines(application.path, error)
            name = str(application.name or application.path.resolve().stem)
            named = {"id": application.name or "-", "name": name, "error": error or None}
            traced = traces.get(application.name, [])
            rows.append({**row, **named, "source": self._sources.get(key), "traces": traced})
        return {"rows": rows, "traces": traces[None]}


class Journals(_Stateless):
    """The journals with their readers, and the queries of pipelines with their processes."""

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._order: PacedCache[int] = PacedCache(lambda _: (_readers(), 0.0))

    def data(self) -> Snapshot:
        """See `View.data`."""
        also = self._console.sample().also
        readers = self._order.get(0)
        journals = [
            {**one, "sync_ms": round(one["sync_s"] / one["syncs"] * 1000, 3) if one["syncs"] else None}  # the mean
            for one in also["journals"]
        ]
        pipelines = [{"path": one["path"], "state": one["state"]} for one in also["pipelines"]]
        return {
            "journals": journals,
            "readers": readers,
            "pipelines": pipelines,
            "queries": query_rows(also["pipelines"], time()),
        }


def query_rows(pipelines: Iterable[Mapping[str, Any]], now_s: float) -> list[Snapshot]:
    """Return the queries of pipelines, those with an error first.

    Args:
        pipelines: see `snapshots.pipelines`.
        now_s: the current time, in Unix seconds.
    """
    rows: list[dict[str, Any]] = []
    for process in pipelines:
        for query in process.get("queries", ())[:MAX_READERS]:
            why = str(query.get("error") or query.get("trouble") or query.get("warning") or "")
            updated_s = query.get("updated")
            row = {
                "path": process["path"],
                "process": process["state"],
                "name": shown_name(str(query.get("name", ""))),
                "state": shown_name(str(query.get("state", "unknown"))),
                "error": printable(why[:MAX_ERROR_CHARS], lines=True),
                "updated_ago_s": None if not updated_s else max(0, int(now_s - updated_s)),
                **{name: query.get(name) for name in ("kind", "lag_rows", "lag_s", "rows_per_s", "batch_ms")},
            }
            rows.append(row)
    rows.sort(key=lambda row: (not row["error"], row["path"], row["name"]))
    return rows[:MAX_READERS]


class Clusters(_Stateless):
    """The hubs in clusters, links and addresses of this server."""

    def __init__(self, console: Console, options: Options) -> None:
        self._server = console.server

    def data(self) -> Snapshot:
        """See `View.data`."""
        nodes: list[dict[str, Any]] = self._server.get("clusters")
        return {
            name: [{**row, "own": one["node"]} for one in nodes for row in one[name]]
            for name in ("hubs", "links", "addresses")
        }


def _readers() -> list[Snapshot]:
    """Return the queries that read the journals. The files are read in threads."""

    def waiting(name: str, journal: Path) -> list[Snapshot]:
        now_s = time()
        return [
            {
                "journal": name,
                "query": shown_name(one.name),
                "behind": behind,
                "seen_ago_s": int(now_s - one.seen_us / 1e6),
            }
            for one, behind in islice(readers.backlogs(journal, 0), MAX_READERS)  # 0 reads no rows
        ]

    found: list[Snapshot] = []
    for name, journal in list(writer.opened.items()):
        try:
            found += disks.call(str(journal.path), waiting, name, journal.path)
        except (OSError, JournalError, TimeoutError) as error:
            found.append({"journal": name, "query": "", "error": printable(str(error))})
    return found[:MAX_READERS]


class Limits(_Stateless):
    """The limits: those that were reached first, then in descending order of their use."""

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._of_clients: PacedCache[int] = PacedCache(self._find)

    def _find(self, _: int) -> tuple[dict[str, Snapshot], float]:
        (rows,), cost_s = self._console.server.get_many([(("client-limits",), {})])
        return {row["name"]: row for row in rows or ()}, cost_s

    def data(self) -> Snapshot:
        """See `View.data`."""

        def fraction(row: dict[str, Any]) -> float:
            used, bound = row["used"], row["bound"]
            return used / bound if used and type(bound) in (int, float) and bound else 0

        of_clients = self._of_clients.get(0)
        rows = [{**row, **of_clients.get(row["name"], {})} for row in self._console.limits()]
        return {"rows": sorted(rows, key=lambda row: (not row["reached"], -fraction(row), row["title"]))}


class Closes(_Stateless):
    """The reasons of closed connections with their counts, and the last connections of each."""

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._counts: dict[str, int] = {}
        self._reasons: list[Snapshot] = []

    def data(self) -> Snapshot:
        """See `View.data`."""
        counts: Counter[str] = Counter()
        hubs = self._console.sample().hubs
        for hub in hubs:
            counts.update(hub["closes"])
        if counts != self._counts:
            self._counts = dict(counts)
            self._reasons = self._read({hub["id"] for hub in hubs})
        return {"total": sum(counts.values()), "reasons": self._reasons}

    def _read(self, hubs: set[int]) -> list[Snapshot]:
        """Return the reasons, those of trouble first, without connections of internal hubs."""
        queries = [(("closed",), {"reason": name, "limit": str(MAX_CLOSES)}) for name in self._counts]
        pages = self._console.server.get_many(queries).answers
        reasons: list[dict[str, Any]] = []
        for (name, count), page in zip(self._counts.items(), pages, strict=True):
            reason = CloseReason[name.upper()]
            explanation = explanation_of(reason)
            row = {
                "reason": reason.value,
                "count": count,
                "what": explanation.what,
                "remedy": explanation.remedy,
                "setting": explanation.setting,
                "is_trouble": explanation.is_trouble,
                "clients": closed_clients(one for one in (page or {"items": ()})["items"] if one["hub"] in hubs),
            }
            reasons.append(row)
        return sorted(reasons, key=lambda row: (not row["is_trouble"], -row["count"]))


def closed_clients(closes: Iterable[Mapping[str, Any]]) -> list[Snapshot]:
    """Return one row for the closes of each client, with their number in `times`; the newest close first.

    Args:
        closes: closed connections, the newest first; see `snapshots.closed`.
    """
    rows: dict[tuple[object, ...], dict[str, Any]] = {}
    for one in closes:
        key = one["hub"], one["uid"], one["user"], one["address"], one["detail"]
        row = rows.setdefault(key, {**_closed_row(one), "times": 0})
        row["times"] += 1
    return list(rows.values())


def _closed_row(one: Mapping[str, Any]) -> Snapshot:
    return {
        **{key: one.get(key) for key in ("number", "worker", "at", "connected_s")},
        "reason": CloseReason[str(one["reason"]).upper()].value,
        **{key: shown_name(str(one[key])) for key in ("uid", "user", "address", "detail")},
    }


class Log(_Stateless):
    """The last errors and warnings. They are read again only when their counts have changed."""

    _MAX_CHARS = 800

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._counts: list[tuple[int, int, int]] = []
        self._rows: list[Snapshot] = []

    def data(self) -> Snapshot:
        """See `View.data`."""
        sample = self._console.sample()
        counts = [(one["pid"], one["log_errors"], one["log_warnings"]) for one in workers_of(sample) or [sample.server]]
        if counts != self._counts:
            found = self._console.server.get("log", limit=str(MAX_LOG_ENTRIES))
            self._rows = [{**one, "text": one["text"][: self._MAX_CHARS]} for one in found["items"]]
            self._counts = counts
        errors, warnings = sample.server["log_errors"], sample.server["log_warnings"]
        return {"rows": self._rows, "errors": errors, "warnings": warnings, "kept": MAX_KEPT}


VIEWS: dict[str, Callable[[Console, Options], View]] = {
    "overview": lambda console, options: Plain(console.overview),
    "peers": Peers,
    "peer": Peer,
    "topics": Topics,
    "sessions": _sessions,
    "retained": _retained,
    "messages": Messages,
    "applications": Applications,
    "journals": Journals,
    "clusters": Clusters,
    "limits": Limits,
    "closes": Closes,
    "log": Log,
}
"""The views by the name in the request of a page."""
