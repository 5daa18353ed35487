"""Received results of subscribers in a trial, and the reasons for missing ones."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import gevent

from smqrt.client import SmqClient
from smqrt.errors import JournalError
from smqrt.journal.reader import Journal

TOPICS = ("out/echo", "out/sums", "out/plain")
NOT_YET = "before it subscribed"
KILLED = "hub killed before delivery"
AWAY = "hub killed, not back yet"
UNDELIVERED_COMMITS = 2
"""Results of so many commits may be stored and not yet read by a subscriber when a hub dies; more are lost."""
_SPREAD_S = 0.5
"""After so long other workers and nodes know of a subscription."""
_TICK_S = 0.1
_CALL_S = 0.02
_LAST_S = 60.0


class Result(NamedTuple):
    """A result as the journal has it: the number `seq` of a node; `txn` is its commit."""

    node: str
    seq: int
    payload: bytes
    txn: str

    def is_before(self, moment: Moment) -> bool:
        """Return whether it was stored before a moment."""
        return self.seq < moment.ends.get(self.node, 0)


class Moment(NamedTuple):
    """When something happened: on the clock of `time.monotonic`, and the journal's next numbers then, or later."""

    at_s: float
    ends: Mapping[str, int]


def moment(journal: Path, at_s: float) -> Moment:
    """Return what the journal's next numbers are, as soon as it can be read."""
    while True:
        with suppress(JournalError, OSError):  # its folder is away
            return Moment(at_s, Journal(journal).end())
        gevent.sleep(_TICK_S)


class ClientThread(threading.Thread):
    """The thread of all clients of SMQ: they belong to one thread of a process, and not to one for each."""

    def __init__(self) -> None:
        super().__init__(name="clients", daemon=True)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            while not self._calls.empty():
                gevent.spawn(self._calls.get())
            gevent.sleep(_CALL_S)

    def spawn(self, function: Callable[[], None]) -> None:
        """Has it call a function in a greenlet."""
        self._calls.put(function)

    def finish(self) -> None:
        """End it, and whatever runs there."""
        self._over.set()
        self.join(_LAST_S)


class Receiver:
    """Subscribes to results, and comes back when the connection is lost.

    Args:
        name: for the figures.
        journal: of the hub that stores the results.
        url: what it connects to.
        is_at_hub: of the hub that is killed, or of another node.

    Attributes:
        got: payloads by topic, as they came; subscribed: when subscriptions held, once for each connection.
    """

    def __init__(self, name: str, journal: Path, url: str, is_at_hub: bool) -> None:
        self.name, self.is_at_hub = name, is_at_hub
        self.got: dict[str, list[bytes]] = {topic: [] for topic in TOPICS}
        self.subscribed: list[Moment] = []
        self._journal, self._url = journal, url
        self._over, self._ready = threading.Event(), threading.Event()

    def run(self) -> None:
        """Receives, in the thread of the clients, until `finish` is called."""
        client = SmqClient(self._url, onclose=lambda *_: _TICK_S, onreconnect=self._note)
        for topic in TOPICS:
            noting = {"onack": self._note} if topic == TOPICS[-1] else {}
            client.subscribe(topic, onmsg=partial(self._received, topic), **noting)
        while not self._over.is_set():
            gevent.sleep(_TICK_S)
        client.close()

    def _received(self, topic: str, payload: bytes, *_: Any) -> None:
        self.got[topic].append(bytes(payload))

    def _note(self, *_: Any) -> None:
        gevent.spawn_later(_SPREAD_S, self._note_moment, time.monotonic())

    def _note_moment(self, at_s: float) -> None:
        self.subscribed.append(moment(self._journal, at_s))
        self._ready.set()

    def wait_subscribed(self) -> None:
        """Waits until it has subscribed for the first time."""
        assert self._ready.wait(_LAST_S), f"{self.name} has not subscribed"

    def finish(self) -> None:
        """End it."""
        self._over.set()


@dataclass
class Delivery:
    """What became of the copies of one subscriber.

    Attributes:
        received: how many came; doubled: of these, how many came again; disordered: how many came behind a later
            one; foreign: how many are not in the journal; missed: by reason, how many did not come; lost: how many did
            not come without a reason.
    """

    received: int = 0
    doubled: int = 0
    disordered: int = 0
    foreign: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    lost: int = 0

    @property
    def exact(self) -> bool:
        """Whether each copy came once and in order, or is missed for a reason."""
        return self.received > 0 and not self.doubled + self.disordered + self.foreign + self.lost


def delivery(
    results: Mapping[str, Sequence[Result]],
    got: Mapping[str, Sequence[bytes]],
    subscribed: Sequence[Moment],
    kills: Sequence[Moment],
    ways: Sequence[Sequence[Moment]],
) -> Delivery:
    """Compare what a subscriber received with what the journal has.

    Args:
        results: those of each topic, in the order of their commits.
        got: what came of each topic, in the order in which it came.
        subscribed: when subscriptions held.
        kills: when the hub was killed.
        ways: what has to be there again after a kill before results come, each as the moments at which it was: the
            subscription of one at the hub, links between workers and nodes.
    """
    made = Delivery()
    reached: dict[str, set[int]] = {}
    for topic, payloads in got.items():
        numbers = {result.payload: number for number, result in enumerate(results.get(topic, ()))}
        found = [numbers[payload] for payload in payloads if payload in numbers]
        reached[topic] = set(found)
        made.received += len(payloads)
        made.foreign += len(payloads) - len(found)
        made.doubled += len(found) - len(reached[topic])
        made.disordered += sum(later < earlier for earlier, later in pairwise(found))
    for topic in got:
        for stored, numbers in _by_node(results.get(topic, ()), reached[topic]):
            found_reasons = Counter(_Reasons(stored, numbers, subscribed, kills, ways).all())
            made.lost += found_reasons.pop("", 0)
            made.missed.update(found_reasons)
    return made


def _by_node(results: Sequence[Result], reached: set[int]) -> Iterable[tuple[list[Result], set[int]]]:
    """Yield the results that each node has stored, and which of them came: links to one node may be there again
    before those to another one.
    """
    for node in {one.node for one in results}:
        numbers = [number for number, one in enumerate(results) if one.node == node]
        yield (
            [results[number] for number in numbers],
            {at for at, number in enumerate(numbers) if number in reached},
        )


class _Reasons:
    """Why a subscriber missed results of one topic."""

    def __init__(
        self,
        results: Sequence[Result],
        reached: set[int],
        subscribed: Sequence[Moment],
        kills: Sequence[Moment],
        ways: Sequence[Sequence[Moment]],
    ) -> None:
        self._results, self._reached = results, reached
        self._subscribed, self._ways = subscribed, ways
        self._reached_below = [0, *accumulate(number in reached for number in range(len(results)))]
        self._kills = [(kill, sum(result.is_before(kill) for result in results)) for kill in kills]
        new = (one.txn != next_one.txn for one, next_one in pairwise(results))
        self._commit = [0, *accumulate(new)]

    def all(self) -> Iterable[str]:
        """Yield the reason for each missed one; "" is none."""
        first = min(self._reached, default=len(self._results))
        for number, result in enumerate(self._results):
            if number in self._reached:
                continue
            if number < first and self._subscribed and result.is_before(self._subscribed[0]):
                yield NOT_YET
            elif self._is_away(number, result):
                yield AWAY
            else:
                yield KILLED if self._is_cut_off(number) else ""

    def _is_away(self, number: int, result: Result) -> bool:
        """Return whether nothing came between the last kill and this one, and the way to it was not there again."""
        kill, first = next((one for one in reversed(self._kills) if one[1] <= number), (None, 0))
        if kill is None or not self._are_missed(first, number):
            return False
        back = (next((one for one in way if one.at_s > kill.at_s), None) for way in self._ways)
        return any(one is not None and result.is_before(one) for one in back)

    def _is_cut_off(self, number: int) -> bool:
        """Return whether nothing came between this one and the next kill, and it is of the last commits before that."""
        end = next((end for _, end in self._kills if end > number), 0)
        if not end:
            return False
        commits = self._commit[end - 1] - self._commit[number] + 1
        return commits <= UNDELIVERED_COMMITS and self._are_missed(number, end)

    def _are_missed(self, first: int, end: int) -> bool:
        return self._reached_below[first] == self._reached_below[end]
