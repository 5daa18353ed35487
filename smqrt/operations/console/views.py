"""Contents of each view of the console, as functions of what its page asks for.

A view is made when a page begins to look and asked for its data every second; what takes long to find out is looked at
less often.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from time import monotonic, time
from typing import Any, Generic, Protocol, TypeVar

from smqrt.errors import ArgumentError, CloseReason, JournalError
from smqrt.http.blocking_io import disks
from smqrt.http.disk import ZipIo
from smqrt.http.resources import IoError
from smqrt.journal import readers, writer
from smqrt.operations import all_workers
from smqrt.operations.console.console import Console, workers_of
from smqrt.operations.console.gauges import Rates, hub_choices
from smqrt.operations.console.workers import over_workers, topics_over_workers
from smqrt.operations.logs import KEPT
from smqrt.operations.snapshots import Snapshot
from smqrt.operations.topic_listener import TOPICS, Listener
from smqrt.printable import printable
from smqrt.smq.close_log import Ending, ending_of

# ---- The lines of an application's file around the one at which it failed.

AROUND = 4
"""Lines shown before and behind it."""
_FILE_BYTES = 1 << 20
_LINE_CHARACTERS = 200
_PLACE = re.compile(r"([^\s:][^:\n]{0,300}):(\d{1,7}):")


def place_of(error: str) -> tuple[str, int] | None:
    """Returns file and line with which the text of an error begins: `led/.preload:3: ...`; None when it has none."""
    found = _PLACE.match(error)
    return (found[1], int(found[2])) if found else None


def around(application: Path, error: str) -> Snapshot | None:
    """Returns the lines at which an application failed.

    Args:
        application: its folder or ZIP file.
        error: the text of its error.

    Returns:
        `file`, `line` and `lines`, pairs of number and text; None when the error names no file of the application, or
        that can't be read.
    """
    place = place_of(error)
    if place is None:
        return None
    label, line = place
    name = _within(application, PurePosixPath(label))
    if name is None:
        return None
    try:
        data = disks.call(str(application), _read, application, name)
    except (OSError, IoError, TimeoutError):
        return None
    lines = data.decode("utf-8", "replace").splitlines()
    if not 1 <= line <= len(lines):
        return None
    first = max(line - AROUND, 1)
    shown = lines[first - 1 : line + AROUND]
    return {
        "file": printable(label),
        "line": line,
        "lines": [[first + at, printable(text[:_LINE_CHARACTERS])] for at, text in enumerate(shown)],
    }


def _within(application: Path, file: PurePosixPath) -> PurePosixPath | None:
    """The name of a file in its application; an error says "led/.preload", with the folder's name first."""
    if file.is_absolute():
        folder = application.resolve()
        return file.relative_to(folder) if file.is_relative_to(folder) else None
    name = PurePosixPath(*file.parts[1:])
    return name if name.parts and ".." not in name.parts else None


def _read(application: Path, name: PurePosixPath) -> bytes:
    if application.is_dir():
        path = application / name
        if not os.path.realpath(path).startswith(os.path.realpath(application) + os.sep):
            raise FileNotFoundError(path)  # a link out of the folder
        with path.open("rb") as file:
            return file.read(_FILE_BYTES)
    with ZipIo(application).open(str(name)) as member:
        return member.read(_FILE_BYTES)


PAGE = 50
MAX_PAGES = 20
SHOWN_TOPICS = 100
SHOWN_CLOSES = 100
SHOWN_READERS = 100
SHOWN_ENTRIES = 60
NAME_CHARACTERS = 120
"""Names may have 65 KB: so much of each is sent to a page."""
SEARCH_CHARACTERS = 100
ORDER_S = 5.0
"""So long the order of a long list stays; the figures in it are new each second."""
_COST = 100
"""Looking for an order takes at most one in so many of all seconds."""

Options = Mapping[str, Any]
T = TypeVar("T")


class View(Protocol):
    """One view of one page, or of several that look at the same."""

    def data(self) -> Snapshot:
        """What to show now. Raises ArgumentError for what isn't there."""

    def close(self) -> None:
        """Nobody looks any more."""


class Plain:
    """A view that keeps nothing."""

    def __init__(self, data: Callable[[], Snapshot]) -> None:
        self.data = data

    def close(self) -> None:
        """See `View.close`."""


class Peers:
    """A page of the clients of a hub, at all workers."""

    _SORTS = {"since": "newest", "queue": "queued_bytes", "dropped": "dropped", "subscriptions": "subscriptions"}

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._hub = _number(options, "hub")
        self._search = _text(options, "find")
        self._sort = self._SORTS.get(_text(options, "sort"), "newest")
        self._first = min(_number(options, "page") or 0, MAX_PAGES - 1) * PAGE
        self._order: Paced[tuple[int, ...]] = Paced(self._look)
        self._rates = Rates()

    def _look(self, hubs: tuple[int, ...]) -> tuple[tuple[list[str], int], float]:
        asked = {"limit": str(self._first + PAGE), "search": self._search, "sort": self._sort}
        looks = self._console.server.looks([(("peers",), {"hub": str(hub), **asked}) for hub in hubs])
        pages = {at: page for at, page in enumerate(looks.answers) if page is not None}
        found: Any = all_workers.peers(pages, asked)
        return ([one["id"] for one in found["items"][self._first :]], found["total"]), looks.cost_s

    def data(self) -> Snapshot:
        """See `View.data`."""
        choices, hub = _chosen(self._console, self._hub)
        if hub is None:
            return {"hubs": choices, "rows": [], "matching": 0, "total": 0}
        ids, matching = self._order.get(tuple(hub["ids"]))
        self._rates.begin()
        found = self._console.server.looks([(("peers", one), {}) for one in ids]).answers
        rows = [peer_row(one, self._rates) for one in found if one is not None]  # others have gone since
        return {
            "hubs": choices,
            "hub": hub["id"],
            "rows": rows,
            "matching": matching,
            "reachable": min(matching, MAX_PAGES * PAGE),
            "total": hub["peers"],
        }

    def close(self) -> None:
        """See `View.close`."""


class Peer:
    """One client closely."""

    def __init__(self, console: Console, options: Options) -> None:
        self._server = console.server
        self._id = _text(options, "id")
        self._rates = Rates()

    def data(self) -> Snapshot:
        """See `View.data`."""
        self._rates.begin()
        address = ("peers", self._id)
        asked = [(address, {}), ((*address, "subscriptions"), {"limit": str(PAGE)})]
        peer, subscribed = self._server.looks(asked).answers
        if peer is None or subscribed is None:
            peer, subscribed = self._server.look(*address), {"items": []}  # says why not
        return {**peer_row(peer, self._rates), "topics": [_shown(name) for name in subscribed["items"]]}

    def close(self) -> None:
        """See `View.close`."""


def peer_row(found: Mapping[str, Any], rates: Rates) -> Snapshot:
    """Returns a client, see `snapshots.peer`, with how many bytes a second come and go."""
    row, peer = dict(found), found["id"]
    received, sent = row.pop("bytes_received"), row.pop("bytes_sent")
    connected_s: Any = row["connected_s"]
    row["connected_s"] = int(connected_s)
    row["in_bytes_per_s"] = rates.per_s((peer, "in"), received)
    row["out_bytes_per_s"] = rates.per_s((peer, "out"), sent)
    for name in ("uid", "info", "user", "address"):
        row[name] = _shown(str(row[name]))
    return row


class Topics:
    """The topics of a hub with most subscribers."""

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._hub = _number(options, "hub")
        self._search = _text(options, "find")
        self._order: Paced[tuple[int, ...]] = Paced(self._look)

    def _look(self, hubs: tuple[int, ...]) -> tuple[Snapshot, float]:
        asked = {"limit": str(SHOWN_TOPICS), "search": self._search, "sort": "subscribers"}
        looks = self._console.server.looks([(("topics",), {"hub": str(hub), **asked}) for hub in hubs])
        return topics_over_workers(list(filter(None, looks.answers)), SHOWN_TOPICS), looks.cost_s

    def data(self) -> Snapshot:
        """See `View.data`."""
        choices, hub = _chosen(self._console, self._hub)
        if hub is None:
            return {"hubs": choices, "rows": [], "matching": 0, "total": 0}
        found: Any = self._order.get(tuple(hub["ids"]))
        rows = [
            {**one, "name": _shown(one["name"]), "exact": _shown(one["name"]) == one["name"]} for one in found["items"]
        ]
        total = hub["topics"] if self._search else found["total"]
        return {"hubs": choices, "hub": hub["id"], "rows": rows, "matching": found["total"], "total": total}

    def close(self) -> None:
        """See `View.close`."""


class Messages:
    """What comes to some topics of a hub."""

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._hub = _number(options, "hub")
        topics = options.get("topics") or []
        if not isinstance(topics, list) or not all(type(one) in (str, int) and one for one in topics):
            raise ArgumentError("topics: a list of names and numbers is needed")
        if len(topics) > TOPICS:
            raise ArgumentError(f"topics: at most {TOPICS} can be looked at at once")
        self._topics = topics
        self._listening: Listener | None = None
        self._listens_to: object = None

    def data(self) -> Snapshot:
        """See `View.data`."""
        choices, hub = _chosen(self._console, self._hub)
        if hub is None:
            return {"hubs": choices, "messages": [], "missed": 0}
        if self._listens_to != hub["id"]:  # also when the application made its hub anew
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


class Applications:
    """The applications, with the lines at which they failed and what they traced."""

    _TRACED = 40

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._sources: dict[tuple[str, str], Snapshot | None] = {}

    def data(self) -> Snapshot:
        """See `View.data`."""
        sources, self._sources = self._sources, {}
        found = self._console.server.look("traces", limit=str(self._TRACED))
        traces = {one["app"]: [_traced(line) for line in one["lines"]] for one in found}
        states = {one["name"]: one for one in self._console.seen().also["apps"]}
        rows = []
        for application in self._console.server.parts.applications:
            row = states.get(application.name)
            if row is None:
                continue  # it has come since
            error = printable(row["error"] or "", lines=True)
            key = (application.uri, error)
            if error:
                self._sources[key] = sources.get(key) or around(application.path, error)
            named = {"id": application.name or "-", "name": _app_name(application), "error": error or None}
            traced = traces.get(application.name, [])
            rows.append({**row, **named, "source": self._sources.get(key), "traces": traced})
        return {"rows": rows, "traces": traces[None]}

    def close(self) -> None:
        """See `View.close`."""


def _app_name(application: Any) -> str:
    return str(application.name or application.path.resolve().stem)


def _traced(line: Mapping[str, Any]) -> str:
    return f"w{line['worker']}: {line['text']}" if "worker" in line else str(line["text"])


class Journals:
    """The journals, who reads them and how far behind, and the processes of pipelines."""

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._order: Paced[int] = Paced(lambda _: (_readers(), 0.0))

    def data(self) -> Snapshot:
        """See `View.data`."""
        also = self._console.seen().also
        readers = self._order.get(0)
        journals = [{**one, "sync_ms": _sync_ms(one)} for one in also["journals"]]
        return {"journals": journals, "readers": readers, "pipelines": also["pipelines"]}

    def close(self) -> None:
        """See `View.close`."""


class Clusters:
    """The nodes that hubs of this server work together with."""

    def __init__(self, console: Console, options: Options) -> None:
        self._server = console.server

    def data(self) -> Snapshot:
        """See `View.data`."""
        nodes: list[dict[str, Any]] = self._server.look("clusters")
        return {
            name: [{**row, "own": one["node"]} for one in nodes for row in one[name]]
            for name in ("hubs", "links", "addresses")
        }

    def close(self) -> None:
        """See `View.close`."""


def _sync_ms(row: Mapping[str, Any]) -> float | None:
    """How long the disk takes to keep what was written, on average."""
    return round(row["sync_s"] / row["syncs"] * 1000, 3) if row["syncs"] else None


def _readers() -> list[Snapshot]:
    found: list[Snapshot] = []
    for name, journal in list(writer.opened.items()):
        try:
            found += disks.call(str(journal.path), _waiting, name, journal.path)
        except (OSError, JournalError, TimeoutError) as error:
            found.append({"journal": name, "query": "", "error": printable(str(error))})
    return found[:SHOWN_READERS]


def _waiting(name: str, journal: Path) -> list[Snapshot]:
    now_s = time()
    return [
        {"journal": name, "query": _shown(one.name), "behind": behind, "seen_ago_s": int(now_s - one.seen_us / 1e6)}
        for one, behind in islice(readers.waiting(journal, 0), SHOWN_READERS)  # no rows are read in a hub
    ]


def _limits(console: Console) -> Snapshot:
    rows = sorted(console.limits(), key=lambda one: (not one["reached"], one["name"]))
    return {"rows": rows, "now_s": int(time())}


def _closes(console: Console) -> Snapshot:
    counts: dict[str, int] = {}
    hubs = console.seen().hubs
    for hub in hubs:
        for reason, count in hub["closes"].items():
            counts[reason] = counts.get(reason, 0) + count
    reasons = [_reason(CloseReason[name.upper()], count) for name, count in counts.items()]
    reasons.sort(key=lambda row: (not row["is_trouble"], -row["count"]))
    found = console.server.look("closed", limit=str(SHOWN_CLOSES))
    shown = {hub["id"] for hub in hubs}
    rows = [_closed(one) for one in found["items"] if one["hub"] in shown]
    return {"total": sum(counts.values()), "reasons": reasons, "rows": rows}


def _reason(reason: CloseReason, count: int) -> dict[str, Any]:
    ending: Ending = ending_of(reason)
    return {
        "reason": reason.value,
        "count": count,
        "what": ending.what,
        "remedy": ending.remedy,
        "setting": ending.setting,
        "is_trouble": ending.is_trouble,
    }


def _closed(one: Mapping[str, Any]) -> Snapshot:
    shown = {name: _shown(str(one[name])) for name in ("uid", "user", "address", "detail")}
    reason = CloseReason[str(one["reason"]).upper()].value
    known = {name: one.get(name) for name in ("number", "worker", "at", "connected_s")}
    return {**known, "reason": reason, **shown}


class Log:
    """The last errors and warnings; they are asked for when there are new ones."""

    _CHARACTERS = 800

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._counts: list[tuple[int, int, int]] = []
        self._rows: list[Snapshot] = []

    def data(self) -> Snapshot:
        """See `View.data`."""
        seen = self._console.seen()
        counts = [(one["pid"], one["log_errors"], one["log_warnings"]) for one in workers_of(seen) or [seen.server]]
        if counts != self._counts:
            found = self._console.server.look("log", limit=str(SHOWN_ENTRIES))
            self._rows = [{**one, "text": one["text"][: self._CHARACTERS]} for one in found["items"]]
            self._counts = counts
        whole = seen.server
        return {"rows": self._rows, "errors": whole["log_errors"], "warnings": whole["log_warnings"], "kept": KEPT}

    def close(self) -> None:
        """See `View.close`."""


VIEWS: dict[str, Callable[[Console, Options], View]] = {
    "overview": lambda console, options: Plain(console.overview),
    "peers": Peers,
    "peer": Peer,
    "topics": Topics,
    "messages": Messages,
    "applications": Applications,
    "journals": Journals,
    "clusters": Clusters,
    "limits": lambda console, options: Plain(lambda: _limits(console)),
    "closes": lambda console, options: Plain(lambda: _closes(console)),
    "log": Log,
}
"""By the name that a page asks for."""


class Paced(Generic[T]):
    """Remembers what `look(argument)` gave, for `ORDER_S` seconds, or longer when looking takes long.

    Args:
        look: gives something, and how many seconds of CPU that took the worker that needed most.
    """

    def __init__(self, look: Callable[[T], tuple[Any, float]]) -> None:
        self._look = look
        self._argument: T | None = None
        self._until_s = 0.0
        self._found: Any = None

    def get(self, argument: T) -> Any:
        """What `look` gives for `argument`, or gave a short while ago."""
        now_s = monotonic()
        if argument != self._argument or now_s >= self._until_s:
            (self._found, cost_s), self._argument = self._look(argument), argument
            self._until_s = now_s + max(ORDER_S, cost_s * _COST)
        return self._found


def _chosen(console: Console, number: int | None) -> tuple[list[Snapshot], dict[str, Any] | None]:
    """The hubs to choose from, over all workers, and the one with a number, or else the first of them."""
    hubs = over_workers(console.seen().hubs)
    choices = hub_choices(hubs)
    by_number = {one: hub for hub in hubs for one in hub["ids"]}
    return choices, by_number.get(number or 0) or (by_number[choices[0]["id"]] if choices else None)


def _shown(text: str) -> str:
    """A name as pages show it: its beginning, without characters that steer or displace."""
    cut = text[:NAME_CHARACTERS]
    more = f"… ({len(text):,} characters)" if len(text) > len(cut) else ""
    return printable(cut) + more


def _number(options: Options, name: str) -> int | None:
    value = options.get(name)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def _text(options: Options, name: str) -> str:
    value = options.get(name, "")
    return value[:SEARCH_CHARACTERS] if isinstance(value, str) else ""
