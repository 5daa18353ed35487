"""The ledger of a trial: what publishers were told is stored, what the journal has, and what pipelines made of it."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import gevent

from smqrt.client import SmqClient
from smqrt.errors import JournalError
from smqrt.journal import commit, files
from smqrt.journal import segment as numbers
from smqrt.journal.reader import Journal
from tests.pipeline.receivers import ClientThread, Delivery, Result

KEYS = 10
LATE_US = 2_000_000
"""The watermark of the windows."""
WINDOW_US = 1_000_000
TICK_S = 0.1
RETRY_S = 600.0
_LAST_S = 60.0

Message = tuple[bytes, bytes | None, bytes]


def message(publisher: str, number: int) -> Message:
    """Return a message that is told from all others."""
    key = number % KEYS
    return f"in/{key}".encode(), None, json.dumps({"id": f"{publisher}-{number}", "key": key}).encode()


class Publisher(threading.Thread):
    """Publishes numbered messages over HTTP, and notes which of them the hub has confirmed.

    Args:
        name: begins its messages' ids.
        journal: whose hub they go to.
        rate: messages a second.

    Attributes:
        acknowledged: ids that the hub has confirmed; uncertain: of which nobody knows, for the hub went away amidst.
    """

    def __init__(self, name: str, journal: Path, rate: int) -> None:
        super().__init__(name=name, daemon=True)
        self.acknowledged: list[str] = []
        self.uncertain: list[str] = []
        self._hub = files.HubAddress.of(journal)
        self._count = max(1, round(rate * TICK_S))
        self._over = threading.Event()

    def run(self) -> None:
        first = 0
        while not self._over.wait(TICK_S):
            numbers = range(first, first + self._count)
            ids = [f"{self.name}-{number}" for number in numbers]
            try:
                commit.publish(self._hub, [message(self.name, number) for number in numbers], retry_s=RETRY_S)
            except JournalError as error:
                if "not known" not in str(error):
                    raise
                self.uncertain += ids
            else:
                self.acknowledged += ids
            first += self._count

    def finish(self) -> None:
        """Let it end with the messages that are under way."""
        self._over.set()
        self.join(_LAST_S)
        assert not self.is_alive(), "a message was never confirmed"


class Client(Publisher):
    """Publishes as a client of SMQ: confirmed is what it receives itself, of a hub whose `sync` is "publish".

    Args:
        name, journal, rate: as for `Publisher`.
        url: what it connects to.
        thread: the one of all clients.
    """

    def __init__(self, name: str, journal: Path, rate: int, url: str, thread: ClientThread) -> None:
        super().__init__(name, journal, rate)
        self._url, self._thread = url, thread

    def start(self) -> None:
        """Begins, in the thread of the clients."""
        self._thread.spawn(self._publish)

    def finish(self) -> None:
        """Let it end."""
        self._over.set()

    def _publish(self) -> None:
        client = SmqClient(self._url, onclose=lambda *_: TICK_S, queue_bytes=1 << 20)
        for key in range(KEYS):
            client.subscribe(f"in/{key}", onmsg=self._received)
        first = 0
        while not self._over.is_set():
            for number in range(first, first + self._count):
                topic, _, payload = message(self.name, number)
                client.publish(payload, topic.decode())
            first += self._count
            gevent.sleep(TICK_S)
        client.close()

    def _received(self, payload: bytes, *_: Any) -> None:
        if (name := json.loads(payload)["id"]).startswith(f"{self.name}-"):
            self.acknowledged.append(name)


@dataclass(frozen=True)
class Sent:
    """A message as the journal has it."""

    id: str
    ts_us: int
    key: int


@dataclass
class Recorded:
    """What was in a journal, in the order of its numbers.

    Attributes:
        sent: messages; end: by node the number behind the last one; out: by topic of results the ids that came;
            windows: results of the stateful query; future: ids that were left out of it; gaps: missing numbers;
            commits: (query:batch) of all results; results: by topic, those that subscribers ought to get.
    """

    sent: list[Sent] = field(default_factory=list)
    end: dict[str, int] = field(default_factory=dict)
    out: dict[str, Counter[str]] = field(default_factory=dict)
    windows: list[dict[str, int]] = field(default_factory=list)
    future: set[str] = field(default_factory=set)
    gaps: int = 0
    commits: set[str] = field(default_factory=set)
    results: dict[str, list[Result]] = field(default_factory=dict)

    def add(self, node: str, row: Any) -> None:
        """Take the next row of a node."""
        if row.txn:
            self.commits.add(row.txn)
            self.results.setdefault(row.topic, []).append(Result(node, row.seq, row.payload, row.txn))
        if row.topic == "out/sums":
            self.windows.append(json.loads(row.payload))
        elif row.topic == "out/future":
            self.future.add(json.loads(json.loads(row.payload)["payload"])["id"])
        elif row.topic.startswith("in/"):
            payload = json.loads(row.payload)
            self.sent.append(Sent(payload["id"], row.ts_us, payload["key"]))
            self.end[node] = row.seq + 1
        else:
            self.out.setdefault(row.topic, Counter())[json.loads(row.payload)["id"]] += 1

    def in_order(self) -> dict[str, list[Result]]:
        """Return, by topic, the results in the order of their commits, whichever of several hubs has stored them."""
        return {topic: _in_order(some) for topic, some in self.results.items()}


def _in_order(some: list[Result]) -> list[Result]:
    queries: dict[str, int] = {}

    def key(result: Result) -> tuple[int, int, float, int]:
        name, _, batch = result.txn.rpartition(":")
        query, _, part = name.partition(".")
        number = queries.setdefault(query, len(queries))  # a query that begins anew has a new id
        return number, int(batch), float(part) if part else inf, result.seq  # the part without a number is the last

    return sorted(some, key=key)


class Collector(threading.Thread):
    """Follows a journal as a pipeline does, since retention removes what all have read.

    Args:
        journal: its folder.

    Attributes:
        recorded: what it has seen; next: by node the number of the row that it reads next.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(name="collector", daemon=True)
        self.recorded, self.next = Recorded(), dict[str, int]()
        self._path, self._over = journal, threading.Event()
        self._looked = threading.Condition()
        self._looks = 0
        self.fault: BaseException | None = None

    def run(self) -> None:
        hub = files.HubAddress.of(self._path)
        try:
            while not self._over.wait(0.2):
                with suppress(JournalError, OSError):  # its folder is away
                    self._look()
                    commit.report_progress(hub, "collector", "collector", self.next)
                with self._looked:
                    self._looks += 1
                    self._looked.notify_all()
        except BaseException as error:
            self.fault = error
            raise

    def _look(self) -> None:
        journal = Journal(self._path)
        for node, end in journal.end().items():
            for row in journal.rows({node: self.next.get(node, 0)}, {node: end}):
                expected = self.next.get(node, 0)
                # Behind a hub that was killed numbers go on with the next step (decision 0035).
                self.recorded.gaps += row.seq != expected and not numbers.is_gap(expected, row.seq)
                self.recorded.add(node, row)
                self.next[node] = row.seq + 1

    def caught_up(self) -> Recorded:
        """Waits until it has looked once more; returns what it has seen."""
        with self._looked:
            wanted = self._looks + 2
            assert self._looked.wait_for(lambda: self._looks >= wanted or self.fault, _LAST_S), "it can't read"
        if self.fault:
            raise self.fault
        return self.recorded

    def finish(self) -> None:
        """End it."""
        self._over.set()
        self.join(_LAST_S)


# ---- the comparison


@dataclass(frozen=True)
class Figures:
    """What became of the messages.

    Attributes:
        acknowledged: messages of which publishers were told that they are stored; lost: of these, how many the journal
            lacks; expected: messages that the journal has; doubled: of these, how many it has again; gaps: missing
            numbers.
        results: by what made them, how many there are; wrong_results: how many of these are missing, too many, or of
            no message.
        windows: results of the stateful query; wrong: how many have another count than their messages; twice: how many
            came again; missing: how many never came; late: messages that a clock set back made too late, which may be
            in their window or not; future: messages that a clock set forward put out of windows.
        deliveries: by subscriber of the results, what became of its copies.
    """

    acknowledged: int
    lost: int
    expected: int
    doubled: int
    gaps: int
    results: dict[str, int]
    wrong_results: dict[str, int]
    windows: int
    wrong: int
    twice: int
    missing: int
    late: int
    future: int
    deliveries: dict[str, Delivery]

    @property
    def exact(self) -> bool:
        """Whether everything was done exactly once, and each subscriber got what it could get."""
        faults = self.lost + self.doubled + self.gaps + self.wrong + self.twice + self.missing
        are_delivered = all(one.exact for one in self.deliveries.values())
        is_complete = are_delivered and not any(self.wrong_results.values())
        return not faults and is_complete and self.expected > 0 and self.windows > 0


Window = tuple[int, int]


def figures(
    recorded: Recorded, acknowledged: Iterable[str], kept: Iterable[str], deliveries: dict[str, Delivery]
) -> Figures:
    """Compare what came in with what went out.

    Args:
        recorded: what the journal had.
        acknowledged: ids that publishers know to be stored.
        kept: ids in the table.
        deliveries: by subscriber, what became of its copies.
    """
    truth, promised = Counter(one.id for one in recorded.sent), set(acknowledged)
    results = {**recorded.out, "table": Counter(kept)}
    least, most = _bounds(recorded)
    told = Counter((each["start"], each["key"]) for each in recorded.windows)
    counts = {(each["start"], each["key"]): each["n"] for each in recorded.windows}
    return Figures(
        acknowledged=len(promised),
        lost=len(promised - truth.keys()),
        expected=len(recorded.sent),
        doubled=len(recorded.sent) - len(truth),
        gaps=recorded.gaps,
        results={name: found.total() for name, found in results.items()},
        wrong_results={name: ((found - truth) + (truth - found)).total() for name, found in results.items()},
        windows=len(recorded.windows),
        wrong=sum(not least[window] <= n <= most[window] for window, n in counts.items()),
        twice=sum(times - 1 for times in told.values()),
        missing=sum(1 for window in _final(recorded, least) if window not in told),
        late=most.total() - least.total(),
        future=len(recorded.future),
        deliveries=deliveries,
    )


def _timed(recorded: Recorded) -> Iterator[Sent]:
    return (one for one in recorded.sent if one.id not in recorded.future)


def _bounds(recorded: Recorded) -> tuple[Counter[Window], Counter[Window]]:
    """Return how many messages each window has at least, and at most: one that came when the watermark may have been
    past its window counts or not, as micro-batches fell.
    """
    least, most = Counter[Window](), Counter[Window]()
    latest_us = 0
    for one in _timed(recorded):
        start = one.ts_us // WINDOW_US
        most[start, one.key] += 1
        least[start, one.key] += latest_us - LATE_US < (start + 1) * WINDOW_US
        latest_us = max(latest_us, one.ts_us)
    return least, most


def _final(recorded: Recorded, least: Counter[Window]) -> Iterator[Window]:
    """Yield the windows that ought to have been published."""
    watermark_us = max(one.ts_us for one in _timed(recorded)) - LATE_US
    return (window for window, n in least.items() if n and (window[0] + 1) * WINDOW_US < watermark_us)
