"""Views of the console and their live updates.

A view is created when a page opens it, and is read every second. Expensive parts are refreshed less often.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from time import monotonic, time
from typing import Any, Generic, Protocol, TypeVar

import gevent
from gevent.event import Event

from smqrt.broker.mqtt.retained import name_matcher
from smqrt.errors import ArgumentError, ClosedError, CloseReason, JournalError
from smqrt.http.disk import ZipIo
from smqrt.http.open_files import disks
from smqrt.http.resources import IoError
from smqrt.journal import readers, writer
from smqrt.operations import all_workers
from smqrt.operations.api_pages import Snapshot
from smqrt.operations.console.console import Console, workers_of
from smqrt.operations.console.gauges import Rates, hub_choices, merged_hubs, merged_topics
from smqrt.operations.logs import MAX_KEPT
from smqrt.operations.mqtt_clients import STATES
from smqrt.operations.topic_listener import MAX_TOPICS, TopicListener
from smqrt.printable import printable
from smqrt.smq.close_log import explanation_of

# ---- Source lines around an error

_CONTEXT_LINES = 4
"""Lines shown before and after the line of the error."""
_MAX_FILE_BYTES = 1 << 20
_MAX_LINE_CHARS = 200
_LOCATION = re.compile(r"([^\s:][^:\n]{0,300}):(\d{1,7}):")


def source_lines(application: Path, error: str) -> Snapshot | None:
    """Return the source lines around the error of an application.

    Args:
        application: its folder or ZIP file.
        error: the text of its error, which starts with file and line: `led/.preload:3: ...`.

    Returns:
        `file`, `line` and `lines`, pairs of number and text; None when the error names no readable file of the
        application.
    """
    location = _LOCATION.match(error)
    if location is None:
        return None

    def read(name: PurePosixPath) -> bytes:
        if application.is_dir():
            path = application / name
            if not os.path.realpath(path).startswith(os.path.realpath(application) + os.sep):
                raise FileNotFoundError(path)  # a symbolic link out of the folder
            with path.open("rb") as file:
                return file.read(_MAX_FILE_BYTES)
        with ZipIo(application).open(str(name)) as member:
            return member.read(_MAX_FILE_BYTES)

    label, line = location[1], int(location[2])
    name = _name_within(application, PurePosixPath(label))
    if name is None:
        return None
    try:
        data = disks.call(str(application), read, name)
    except (OSError, IoError, TimeoutError):
        return None
    lines = data.decode("utf-8", "replace").splitlines()
    if not 1 <= line <= len(lines):
        return None
    first = max(line - _CONTEXT_LINES, 1)
    shown = lines[first - 1 : line + _CONTEXT_LINES]
    return {
        "file": printable(label),
        "line": line,
        "lines": [[first + at, printable(text[:_MAX_LINE_CHARS])] for at, text in enumerate(shown)],
    }


def _name_within(application: Path, file: PurePosixPath) -> PurePosixPath | None:
    """Return the path of a file relative to its application. Errors name it with the folder: "led/.preload"."""
    if file.is_absolute():
        folder = application.resolve()
        return file.relative_to(folder) if file.is_relative_to(folder) else None
    name = PurePosixPath(*file.parts[1:])
    return name if name.parts and ".." not in name.parts else None


# ---- Shared parts of views

PAGE = 50
"""The number of clients on a page."""
MAX_PEER_PAGES = 20
MAX_TOPIC_ROWS = 100
MAX_MQTT_ROWS = 100
MAX_PAYLOAD_CHARS = 300
MAX_CLOSES = 100
MAX_READERS = 100
MAX_LOG_ENTRIES = 60
MAX_NAME_CHARS = 120
"""The limit of shown characters of a name; names can have 65 KB."""
MAX_SEARCH_CHARS = 100
ORDER_S = 5.0
"""The order of a long list is refreshed at this interval; the figures in it are refreshed each second."""
_COST_FACTOR = 100
"""A result is reused for this multiple of its CPU time, so that finding it takes at most 1 % of each worker."""

Options = Mapping[str, Any]
T = TypeVar("T")


class PacedCache(Generic[T]):
    """Keeps the result of a function for `ORDER_S` seconds, or longer when the function is expensive.

    Args:
        function: returns the result, and the highest CPU time of a worker.
        clock: returns monotonic seconds.
    """

    def __init__(self, function: Callable[[T], tuple[Any, float]], clock: Callable[[], float] = monotonic) -> None:
        self._function, self._clock = function, clock
        self._argument: T | None = None
        self._expires_s = 0.0
        self._result: Any = None

    def get(self, argument: T) -> Any:
        """Return the result for `argument`, possibly a cached one."""
        now_s = self._clock()
        if argument != self._argument or now_s >= self._expires_s:
            (self._result, cost_s), self._argument = self._function(argument), argument
            self._expires_s = now_s + max(ORDER_S, cost_s * _COST_FACTOR)
        return self._result


def _chosen(console: Console, number: int | None) -> tuple[list[Snapshot], dict[str, Any] | None]:
    """Return the hubs to choose from, and the hub with a number, else the first hub."""
    hubs = merged_hubs(console.sample().hubs)
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
        }


class Peer(_Stateless):
    """The details of one client."""

    def __init__(self, console: Console, options: Options) -> None:
        self._server = console.server
        self._id = _text(options, "id")
        self._rates = Rates()

    def data(self) -> Snapshot:
        """See `View.data`."""
        self._rates.begin()
        address = ("peers", self._id)
        queries = [(address, {}), ((*address, "subscriptions"), {"limit": str(PAGE)})]
        peer, subscribed = self._server.get_many(queries).answers
        if peer is None or subscribed is None:
            peer, subscribed = self._server.get(*address), {"items": []}  # raises ArgumentError with the reason
        return {**peer_row(peer, self._rates), "topics": [shown_name(name) for name in subscribed["items"]]}


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
    """The topics of a hub with the most subscribers."""

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._hub = _number(options, "hub")
        self._search = _text(options, "find")
        self._order: PacedCache[tuple[int, ...]] = PacedCache(self._find)

    def _find(self, hubs: tuple[int, ...]) -> tuple[Snapshot, float]:
        arguments = {"limit": str(MAX_TOPIC_ROWS), "search": self._search, "sort": "subscribers"}
        results = self._console.server.get_many([(("topics",), {"hub": str(hub), **arguments}) for hub in hubs])
        return merged_topics(list(filter(None, results.answers)), MAX_TOPIC_ROWS), results.cost_s

    def data(self) -> Snapshot:
        """See `View.data`."""
        choices, hub = _chosen(self._console, self._hub)
        if hub is None:
            return {"hubs": choices, "rows": [], "matching": 0, "total": 0}
        found: Any = self._order.get(tuple(hub["ids"]))
        rows = [
            {**one, "name": shown_name(one["name"]), "exact": shown_name(one["name"]) == one["name"]}
            for one in found["items"]
        ]
        total = hub["topics"] if self._search else found["total"]
        return {"hubs": choices, "hub": hub["id"], "rows": rows, "matching": found["total"], "total": total}


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
        self._hub = _number(options, "hub")
        self._order: PacedCache[tuple[int, ...]] = PacedCache(self._find)

    def _find(self, hubs: tuple[int, ...]) -> tuple[Snapshot, float]:
        arguments = {"limit": str(MAX_MQTT_ROWS), **self._arguments}
        results = self._console.server.get_many([((self._path,), {"hub": str(hub), **arguments}) for hub in hubs])
        pages = list(filter(None, results.answers))
        items = [
            {"hub": hub, **one}
            for hub, page in zip(hubs, results.answers, strict=True)
            for one in (page or {"items": ()})["items"]
        ]
        rows = [self._row(one) for one in sorted(items, key=lambda one: str(one[self._key]))[:MAX_MQTT_ROWS]]
        return {"rows": rows, "matching": sum(page["total"] for page in pages)}, results.cost_s

    def data(self) -> Snapshot:
        """See `View.data`."""
        hubs = merged_hubs([hub for hub in self._console.sample().hubs if hub["mqtt"] is not None])
        choices = hub_choices(hubs)
        if not choices:
            return {"hubs": [], "ids": [], "rows": [], "matching": 0}
        by_number = {one: hub for hub in hubs for one in hub["ids"]}
        hub = by_number.get(self._hub or 0) or by_number[choices[0]["id"]]
        return {"hubs": choices, "hub": hub["id"], "ids": hub["ids"], **self._order.get(tuple(hub["ids"]))}


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
    """The journals with their readers, and the processes of pipelines."""

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
        return {"journals": journals, "readers": readers, "pipelines": also["pipelines"]}


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


def _limits(console: Console) -> Snapshot:
    rows = sorted(console.limits(), key=lambda one: (not one["reached"], one["name"]))
    return {"rows": rows, "now_s": int(time())}


def _closes(console: Console) -> Snapshot:
    counts: dict[str, int] = {}
    hubs = console.sample().hubs
    for hub in hubs:
        for reason, count in hub["closes"].items():
            counts[reason] = counts.get(reason, 0) + count
    reasons: list[dict[str, Any]] = []
    for name, count in counts.items():
        reason = CloseReason[name.upper()]
        explanation = explanation_of(reason)
        reasons.append(
            {
                "reason": reason.value,
                "count": count,
                "what": explanation.what,
                "remedy": explanation.remedy,
                "setting": explanation.setting,
                "is_trouble": explanation.is_trouble,
            }
        )
    reasons.sort(key=lambda row: (not row["is_trouble"], -row["count"]))
    found = console.server.get("closed", limit=str(MAX_CLOSES))
    shown = {hub["id"] for hub in hubs}  # not the internal ones, such as the console's own hub
    rows = [
        {
            **{key: one.get(key) for key in ("number", "worker", "at", "connected_s")},
            "reason": CloseReason[str(one["reason"]).upper()].value,
            **{key: shown_name(str(one[key])) for key in ("uid", "user", "address", "detail")},
        }
        for one in found["items"]
        if one["hub"] in shown
    ]
    return {"total": sum(counts.values()), "reasons": reasons, "rows": rows}


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
    "limits": lambda console, options: Plain(lambda: _limits(console)),
    "closes": lambda console, options: Plain(lambda: _closes(console)),
    "log": Log,
}
"""The views by the name in the request of a page."""


# ---- Live updates, once a second while a page shows a view
#
# A page sends a request to the ETID of the server: {"view", "options", "serial"}. An empty view ends the updates; a
# page in the background sends it. The answer is JSON, {"data"} or {"error"}, in pieces: each piece is a line
# `SERIAL PART PARTS` and a part of the text. Pages with the same request share a view. An unchanged answer is not sent
# again.

log = logging.getLogger("smqrt.console")

PERIOD_S = 1.0
MIN_PERIOD_S = 0.1
"""The minimum time between two rounds, and therefore the maximum delay of the first answer to a page."""
MAX_PAGES = 20
MAX_REQUEST_BYTES = 8192
_MAX_PIECE_BYTES = 60_000
"""Less than the maximum payload of a message (65,520 bytes), to leave room for the line before the part."""
_MAX_ANSWER_BYTES = 1 << 20
_FAILED = "This view failed; see the log of the server."


@dataclass(eq=False)
class _SharedView:
    """A view and the pages that show it.

    Attributes:
        view: the view.
        pages: the serials of the requests, by the ETID of the page.
        sent: the last answers, by the ETID of the page.
    """

    view: View
    pages: dict[int, int] = field(default_factory=dict)
    sent: dict[int, str] = field(default_factory=dict)


class LiveViews:
    """Updates the pages of the console.

    Args:
        make: creates a view by its name and options; raises ArgumentError.
        pulse: returns the figures that all pages receive each second.
        send: sends text to a page by its ETID.
        send_to_all: sends the pulse to all pages.
    """

    def __init__(
        self,
        make: Callable[[str, Mapping[str, Any]], View],
        pulse: Callable[[], Snapshot],
        send: Callable[[str, int], object],
        send_to_all: Callable[[str], object],
    ) -> None:
        self._make, self._pulse, self._send, self._send_to_all = make, pulse, send, send_to_all
        self._shared: dict[str, _SharedView] = {}
        self._keys: dict[int, str] = {}
        self._changed = Event()
        self._updating: gevent.Greenlet[..., None] | None = None
        self._pulse_at_s = 0.0

    def __len__(self) -> int:
        """Return the number of pages with a view."""
        return len(self._keys)

    @property
    def is_updating(self) -> bool:
        """Whether a greenlet updates pages."""
        return self._updating is not None

    def request(self, page: int, request: object) -> None:
        """Change the view of a page, or end its updates. Ignore an invalid request."""
        if not isinstance(request, dict):
            return
        name, options, serial = request.get("view"), request.get("options"), request.get("serial")
        self.remove(page)
        if not name or not isinstance(name, str) or not isinstance(options, dict) or not isinstance(serial, int):
            return
        try:
            if len(self._keys) >= MAX_PAGES:
                raise ArgumentError(f"{MAX_PAGES} pages of the console are open; close one of them")
            key = json.dumps([name, options], sort_keys=True)  # equal for the same request of another page
            if key not in self._shared:
                self._shared[key] = _SharedView(self._make(name, options))
        except (ArgumentError, ClosedError) as error:
            self._answer(page, serial, _json_text({"error": str(error)}))
            return
        self._shared[key].pages[page] = serial
        self._keys[page] = key
        self._changed.set()
        if self._updating is None:
            self._updating = gevent.spawn(self._update_loop)

    def remove(self, page: int) -> None:
        """End the updates of a page."""
        key = self._keys.pop(page, None)
        if key is None:
            return
        shared = self._shared[key]
        del shared.pages[page]
        shared.sent.pop(page, None)
        if not shared.pages:
            del self._shared[key]
            shared.view.close()

    def close(self) -> None:
        """End the updates of all pages. A second call does nothing."""
        for page in list(self._keys):
            self.remove(page)
        updating, self._updating = self._updating, None
        if updating is not None:
            updating.kill()

    def _update_loop(self) -> None:
        try:
            while self._keys:
                self._changed.clear()
                # A request starts a round early; the pulse keeps its period.
                if monotonic() - self._pulse_at_s >= PERIOD_S - MIN_PERIOD_S:
                    self._pulse_at_s = monotonic()
                    self._text_or_error(lambda: self._send_to_all(_json_text(self._pulse())))
                for shared in list(self._shared.values()):
                    answer = self._text_or_error(lambda view=shared.view: _json_text({"data": view.data()}))  # type: ignore[misc]
                    for page, serial in list(shared.pages.items()):
                        if shared.sent.get(page) != answer:
                            shared.sent[page] = answer
                            self._answer(page, serial, answer)
                    gevent.sleep(0)  # serve clients between two views
                gevent.sleep(MIN_PERIOD_S)
                self._changed.wait(PERIOD_S - MIN_PERIOD_S)
        except ClosedError:
            pass  # the hub of the console was closed, with the connections of its pages
        finally:
            self._updating = None

    def _text_or_error(self, call: Callable[[], Any]) -> str:
        try:
            return str(call())
        except (ArgumentError, ClosedError) as error:
            return _json_text({"error": str(error)})
        except Exception:
            log.exception("a view of the console failed")
            return _json_text({"error": _FAILED})

    def _answer(self, page: int, serial: int, answer: str) -> None:
        if len(answer) > _MAX_ANSWER_BYTES:
            answer = _json_text(
                {"error": f"The answer is too long for a page ({len(answer):,} bytes): narrow the search."}
            )
        pieces = [answer[at : at + _MAX_PIECE_BYTES] for at in range(0, len(answer), _MAX_PIECE_BYTES)]
        for number, piece in enumerate(pieces, 1):
            self._send(f"{serial} {number} {len(pieces)}\n{piece}", page)


def _json_text(value: Snapshot) -> str:
    """Return JSON in ASCII, which has as many bytes as characters."""
    return json.dumps(value, separators=(",", ":"))
