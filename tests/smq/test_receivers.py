"""Receivers, and their effect on publishers: with a hub made in Python, and one made in Lua."""

from __future__ import annotations

from smqrt.transport.listener import Listener
from tests.apps.lua.hub_site import both, lua_site
from tests.support.device import KINDS, RAW_HEADERS, Device, Site, publish
from tests.support.waiting import wait_until

__all__ = ["both", "lua_site"]


def test_only_the_framing_differs_between_transports(both: Site) -> None:
    devices = [both.device(b"uid-%s" % kind.encode(), kind) for kind in KINDS]
    (tid, *_) = [device.subscribe(b"news") for device in devices]
    for sender in devices:
        packet = publish(tid, sender.etid, bytes(range(256)) * 3, 0xFFFEFDFC)
        sender.send(packet)
        for device in devices:
            device.expect(packet)


def test_a_mapped_address_is_reported_as_ipv4(both: Site) -> None:
    listener = Listener("::", 0, both.server.accepted)
    listener.start()
    device = Device(("127.0.0.1", listener.address[1]))
    assert device.start(RAW_HEADERS).ip == b"127.0.0.1"
    device.close()
    listener.close()


def test_a_blocked_reader_misses_messages_and_delays_no_other(both: Site) -> None:
    lazy, reader, publisher = (both.device(uid) for uid in (b"lazy-1", b"reader", b"publisher"))
    (tid, _) = [device.subscribe(b"news") for device in (lazy, reader)]
    dropped = both.state.uids[b"lazy-1"].outbox
    for number in range(2000):
        packet = publish(tid, publisher.etid, b"%d" % number + b"x" * 60_000)
        publisher.send(packet)
        reader.expect(packet)
        if dropped.dropped:
            break
    assert dropped.dropped
    publisher.expect_nothing()
    assert lazy.receive() == publish(tid, publisher.etid, b"0" + b"x" * 60_000), "what was sent before arrives"


def test_a_subscriber_with_a_failed_socket_is_closed(both: Site) -> None:
    broken, publisher = both.device(b"broken"), both.device(b"publisher")
    tid = broken.subscribe(b"news")
    broken.reset()
    publisher.publish(tid, b"x")
    wait_until(lambda: list(both.state.uids) == [b"publisher"], "the end of the other")
    publisher.expect_nothing()
