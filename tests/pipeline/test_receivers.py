"""The ledger of deliveries tells copies that a subscriber may miss from lost ones."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.pipeline.receivers import AWAY, KILLED, NOT_YET, UNDELIVERED_COMMITS, Delivery, Moment, Result, delivery

RESULTS = [Result("n1", number, b"%d" % number, f"q:{number}") for number in range(30)]


def at(at_s: float, seq: int) -> Moment:
    return Moment(at_s, {"n1": seq})


START, KILL, BACK, LINKED = at(0.0, 0), at(10.0, 20), at(11.0, 22), at(12.0, 25)


def of(got: list[int], subscribed: list[Moment], kills: list[Moment]) -> Delivery:
    """Of one at the hub, whose connection is lost with it; of one at another node when it subscribes only once."""
    ways = [subscribed] if BACK in subscribed else [[START, LINKED]]
    return delivery({"out/echo": RESULTS}, {"out/echo": [b"%d" % number for number in got]}, subscribed, kills, ways)


ALL = list(range(30))
CASES = {
    "all": (ALL, [START], [], {}, 0),
    "joined late": (ALL[5:], [at(1.0, 5)], [], {NOT_YET: 5}, 0),
    "joined late and missed some": (ALL[7:], [at(1.0, 5)], [], {NOT_YET: 5}, 2),
    "only the first subscriber gets results": ([], [START], [], {}, 30),
    "a gap": (ALL[:4] + ALL[5:], [START], [], {}, 1),
    "the end is missing": (ALL[:-3], [START], [], {}, 3),
    "a kill": (ALL[:18] + ALL[22:], [START, BACK], [KILL], {KILLED: 2, AWAY: 2}, 0),
    "a gap before a kill": (ALL[:17] + ALL[19:20] + ALL[22:], [START, BACK], [KILL], {AWAY: 2}, 2),
    "deaf after it was back": (ALL[:20] + ALL[25:], [START, BACK], [KILL], {AWAY: 2}, 3),
    "deaf long before a kill": (ALL[:2] + ALL[22:], [START, BACK], [KILL], {KILLED: UNDELIVERED_COMMITS, AWAY: 2}, 16),
    "another node": (ALL[:19] + ALL[25:], [START], [KILL], {KILLED: 1, AWAY: 5}, 0),
    "another node that gets nothing when it is linked again": (ALL[:20], [START], [KILL], {AWAY: 5}, 5),
    "another node, and something before it was linked": (
        ALL[:20] + ALL[22:23] + ALL[25:],
        [START],
        [KILL],
        {AWAY: 2},
        2,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_missed_copies_have_their_reason(case: str) -> None:
    got, subscribed, kills, missed, lost = CASES[case]
    found = of(got, subscribed, kills)
    assert (found.missed, found.lost) == (Counter(missed), lost)
    assert found.exact == (not lost)


def test_duplicate_late_and_foreign_copies_are_detected() -> None:
    found = of([0, 2, 1, 1, *ALL[3:], 99], [START], [])
    assert (found.doubled, found.disordered, found.foreign, found.lost) == (1, 1, 1, 0)
    assert not found.exact


def test_links_to_one_node_are_made_before_another() -> None:
    results = [Result("n1" if number % 2 else "n2", number, b"%d" % number, f"q:{number}") for number in range(30)]
    ends = {"n1": 20, "n2": 20}
    ways = [[Moment(0.0, {}), Moment(12.0, {"n1": 26, "n2": 26})]]
    got = [*range(20), 21, 23, *range(25, 30)]
    payloads = [b"%d" % number for number in got]
    found = delivery({"out/echo": results}, {"out/echo": payloads}, [START], [Moment(10.0, ends)], ways)
    assert (found.missed, found.lost) == (Counter({AWAY: 3}), 0)
