"""Counts of a hub's traffic: exact on every path, however many subscribers there were meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from smqrt.operations.snapshots import traffic
from tests.support.device import KINDS, Site, publish
from tests.support.waiting import wait_until

HEADER = 15  # of a frame


def count(site: Site) -> tuple[int, int, int, int]:
    went = traffic(site.state)
    return went.messages, went.bytes, went.copies, went.copied_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_singles_and_runs_to_a_changing_number_of_subscribers(make_site: Callable[..., Site], kind: str) -> None:
    site = make_site()
    sender, first, second = (site.device(uid, kind) for uid in (b"sender", b"first-1", b"second"))
    tid = first.subscribe(b"room")
    sender.create(b"room")

    def say(*payloads: bytes) -> None:
        sender.send_bytes(b"".join(sender.framed(publish(tid, sender.etid, one)) for one in payloads))
        sender.sync()

    say(b"a")
    assert count(site) == (1, HEADER + 1, 1, HEADER + 1)
    second.subscribe(b"room")
    say(*[b"x" * 10] * 200)
    size = 200 * (HEADER + 10)
    assert count(site) == (201, HEADER + 1 + size, 401, HEADER + 1 + 2 * size)
    second.disconnect()
    wait_until(lambda: site.state.topic_table.by_name[b"room"].subscribers == 1)
    say(b"b")
    assert count(site)[0::2] == (202, 402)


def test_partitions_are_counted(make_site: Callable[..., Site]) -> None:
    site = make_site()
    sender = site.device(b"sender")
    tids = [site.device(b"device%d" % number).subscribe(b"t%d" % number) for number in range(20)]
    for _ in range(3):
        sender.send_bytes(b"".join(sender.framed(publish(tid, sender.etid, b"x")) for tid in tids * 10))
        sender.sync()
    assert count(site)[0::2] == (600, 600)
    assert count(site)[1::2] == (600 * 16, 600 * 16)


def test_swallowed_and_unrouted_are_messages_without_copies(make_site: Callable[..., Site]) -> None:
    site = make_site(onpublish=lambda data, *_: data == b"good")
    sender, other = site.device(b"sender"), site.device(b"other-1")
    tid, nobody = other.subscribe(b"room"), sender.create(b"nobody")
    for run in ([b"good"] * 20 + [b"bad"] * 30, [b"bad"] * 30, [b"bad"], [b"good"]):
        sender.send_bytes(b"".join(sender.framed(publish(tid, sender.etid, one)) for one in run))
        sender.sync()
    assert count(site)[0::2] == (82, 21)
    sender.send_bytes(b"".join(sender.framed(publish(nobody, sender.etid, b"good")) for _ in range(40)))
    sender.sync()
    assert count(site)[0::2] == (122, 21)
    assert site.smq.drops()["unrouted"] == 40


def test_the_servers_own_messages_count(make_site: Callable[..., Site]) -> None:
    site = make_site()
    device = site.device(b"device")
    device.subscribe(b"room")
    site.smq.publish(b"hello", "room")
    device.sync()
    assert count(site)[0::2] == (1, 1)
