"""Messages that are forwarded in LuaJIT are recorded like all others (smq/forwarder.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smqrt.journal.reader import Journal
from smqrt.journal.record import Row
from smqrt.smq import forwarder
from tests.support.device import Device, Site

MANY = 3 * forwarder.JOIN_AFTER
CLOCK_US = 50_000
"""The journal's clock may differ by this much from the one of the test."""


def is_forwarded(site: Site, device: Device) -> bool:
    forwarded: bool = site.state.sessions[device.etid].outbox.is_forwarded
    return forwarded


def rows(site: Site, path: Path) -> list[Row]:
    """Close the hub, and return the rows of its journal."""
    site.smq.close()
    journal = Journal(path)
    return list(journal.rows(journal.begin(), journal.end()))


def exchange(pairs: list[tuple[Device, Device, int]], first: int, count: int) -> None:
    for number in range(first, first + count):
        for publisher, _, tid in pairs:
            publisher.publish(tid, b"%d" % number)
        for _, subscriber, _ in pairs:
            assert subscriber.receive()[13:] == b"%d" % number


def pairs_of(site: Site) -> list[tuple[Device, Device, int]]:
    found = []
    for name in (b"left", b"right"):
        subscriber = site.device(b"to %s" % name)
        found.append((site.device(b"from %s" % name), subscriber, subscriber.subscribe(name)))
    return found


def test_forwarded_messages_are_recorded(make_site: Callable[..., Site], tmp_path: Path) -> None:
    site = make_site(journal={"path": str(tmp_path)})
    pairs = pairs_of(site)
    begin_us = time.time_ns() // 1000
    exchange(pairs, 0, MANY)
    assert all(is_forwarded(site, publisher) for publisher, _, _ in pairs)
    pairs[0][0].expect_nothing()  # a Ping: it is read by Python now
    exchange(pairs, MANY, 5)
    pairs[1][0].publish(pairs[1][2], bytes(60_000))
    assert pairs[1][1].receive()[13:] == bytes(60_000)
    exchange(pairs, MANY + 5, 5)
    end_us = time.time_ns() // 1000
    found = rows(site, tmp_path)
    numbers = [b"%d" % number for number in range(MANY + 10)]
    for name, expected in (("left", numbers), ("right", [*numbers[: MANY + 5], bytes(60_000), *numbers[MANY + 5 :]])):
        assert [row.payload for row in found if row.uid == f"from {name}" and row.topic == name] == expected
    assert len(found) == 2 * len(numbers) + 1
    assert all(begin_us - CLOCK_US <= row.ts_us <= end_us + CLOCK_US for row in found)


@pytest.mark.parametrize("settings", [{"sync": "publish"}, {"sync": "always"}, {"topics": ["right"]}])
def test_what_can_not_be_forwarded(make_site: Callable[..., Site], tmp_path: Path, settings: dict[str, Any]) -> None:
    """Rows that are on the disk first, and messages that are counted as skipped."""
    site = make_site(journal={"path": str(tmp_path), **settings})
    pairs = pairs_of(site)
    exchange(pairs, 0, MANY)
    assert not is_forwarded(site, pairs[0][0])
    left = [row.payload for row in rows(site, tmp_path) if row.topic == "left"]
    assert left == ([] if "topics" in settings else [b"%d" % number for number in range(MANY)])


def test_two_hubs_record_into_their_own_journals(make_site: Callable[..., Site], tmp_path: Path) -> None:
    sites = [make_site(journal={"path": str(tmp_path / name), "name": name}) for name in ("one", "two")]
    pairs = [pair for site in sites for pair in pairs_of(site)]
    exchange(pairs, 0, MANY)
    assert all(is_forwarded(site, pairs[2 * at][0]) for at, site in enumerate(sites))
    for site, name in zip(sites, ("one", "two"), strict=True):
        found = rows(site, tmp_path / name)
        for topic in ("left", "right"):
            assert [row.payload for row in found if row.topic == topic] == [b"%d" % number for number in range(MANY)]


def test_publishers_wait_while_the_journal_can_not_write(make_site: Callable[..., Site], tmp_path: Path) -> None:
    site = make_site(journal={"path": str(tmp_path)})
    pairs = pairs_of(site)
    exchange(pairs, 0, MANY)
    publisher, subscriber, tid = pairs[0]
    site.state.recorder.full = True
    publisher.publish(tid, b"held")
    assert subscriber.receive()[13:] == b"held"  # recorded, and delivered; only the next one waits
    publisher.publish(tid, b"later")
    subscriber.expect_nothing()
    assert site.state.sessions[publisher.etid].outbox.paused
    site.state.recorder.resume()
    assert subscriber.receive()[13:] == b"later"
    assert [row.payload for row in rows(site, tmp_path) if row.topic == "left"][-2:] == [b"held", b"later"]
