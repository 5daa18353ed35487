"""Clients that stay at the old process of a hot restart: messages to them, and what the new process knows of them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from smqrt.broker.outbox import Drop
from smqrt.broker.sessions import Session
from smqrt.broker.state import Hooks
from smqrt.server.restart import kept_clients as module
from smqrt.server.restart.kept_clients import KeptClients, Relay, Relays, late_message, with_local_ids
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from smqrt.smq.hub_registry import hub_registry
from smqrt.wire import smq
from smqrt.workers.worker_rpc import FdChannel
from tests.broker.memory_clients import Ear, heard, observe, settle, subscribe
from tests.support.waiting import let_others_run, wait_until

OLD_ETID = 77


@pytest.fixture
def hub() -> Iterator[GeventBroker]:
    found = GeventBroker(Hooks(), HubOptions())
    yield found
    found.close()


def client(hub: GeventBroker, uid: bytes = b"here-1") -> Session:
    session = Session(hub, Ear(), 5)
    session.control(smq.connect(uid))
    settle()
    heard(session)
    return session


def message(tid: int, text: bytes = b"") -> bytes:
    return smq.publish_frame(tid, 5, 0, text)


# ---- late messages


def test_late_messages_have_the_names_of_their_topics(hub: GeventBroker) -> None:
    tid = hub.create(b"news")
    etid = client(hub).etid
    frames = [(tid, 5, message(tid)), (etid, 5, message(etid)), (tid, 5, message(tid))]
    found = late_message(hub, frames)
    assert (found["do"], found["key"]) == ("late", hub.key)
    assert found["names"] == [[tid, b"news"]]
    assert found["frames"] == [list(one) for one in frames]


def test_late_messages_get_the_numbers_of_this_process(hub: GeventBroker) -> None:
    here = hub.create(b"known")
    late = {
        "names": [[here + 1, b"known"], [here + 2, b"new"]],
        "frames": [[tid, 5, message(tid) * 2] for tid in (here, here + 1, here + 2)],
    }
    found = [
        (tid, ptid, [smq.unpack_publish(one)[0] for one in smq.frames(batch)])
        for tid, ptid, batch in with_local_ids(hub, late)
    ]
    assert hub.topic_table.by_name[b"new"].id == here + 2
    assert found == [(here, 5, [here, here]), (here, 5, [here, here]), (here + 2, 5, [here + 2, here + 2])]


def test_late_messages_make_no_topics_above_the_limit() -> None:
    hub = GeventBroker(Hooks(), HubOptions(maxnames=1))
    hub.create(b"known")
    frames = list(with_local_ids(hub, {"names": [[9, b"new"]], "frames": [[9, 5, message(9)]]}))
    assert frames == [(9, 5, message(9))]
    assert b"new" not in hub.topic_table.by_name
    hub.close()


# ---- the relay of a hub at the new process


class Kept:
    """A hub of the new process with the relay of clients of the old one.

    Attributes:
        passed: the messages for these clients.
    """

    def __init__(self, hub: GeventBroker) -> None:
        self.hub = hub
        self.passed: list[bytes] = []
        self.relay = Relay(hub, lambda relay, batches: self.passed.extend(map(relay.with_old_id, batches)))

    def update(
        self, topics: list[tuple[int, bytes, int]], clients: tuple[int, ...] = (), gone: tuple[int, ...] = ()
    ) -> None:
        self.relay.update(
            {
                "clients": [[etid, b"uid-%d" % etid, b"", b""] for etid in clients],
                "topics": [list(one) for one in topics],
                "gone": list(gone),
            }
        )
        settle()

    def publish(self, to: bytes | int) -> list[int]:
        """The destinations under which the clients of the old process get it."""
        self.passed.clear()
        self.hub.publish(b"hello", to)
        settle()
        return [smq.unpack_publish(frame)[0] for batch in self.passed for frame in smq.frames(batch)]


@pytest.fixture
def kept(hub: GeventBroker) -> Kept:
    return Kept(hub)


def test_topics_have_their_numbers_at_the_old_process(kept: Kept) -> None:
    here = kept.hub.create(b"known")
    kept.update([(here + 5, b"known", 1), (here + 6, b"new", 2)])
    assert kept.publish(b"known") == [here + 5]
    assert kept.publish(b"new") == [here + 6]
    kept.update([(here + 5, b"known", 0)])
    assert kept.publish(b"known") == []


def test_messages_to_a_kept_client_pass_until_it_goes(kept: Kept) -> None:
    kept.update([], clients=(OLD_ETID,))
    kept.update([], clients=(OLD_ETID,))  # a change may name it again
    assert kept.publish(OLD_ETID) == [OLD_ETID]
    assert kept.hub.topic_table.by_key[OLD_ETID.to_bytes(4, "big")].subscribers == 1
    kept.update([], gone=(OLD_ETID, OLD_ETID + 1))
    assert kept.publish(OLD_ETID) == []


def test_all_kept_subscribers_are_counted(kept: Kept) -> None:
    watcher = client(kept.hub)
    tid = kept.hub.create(b"news")
    subscribe(watcher, b"news")
    observe(watcher, tid)
    kept.update([(tid, b"news", 3)])
    topic = kept.hub.topic_table.by_name[b"news"]
    assert topic.subscribers + topic.nodes.elsewhere == 4
    heard(watcher)
    kept.update([(tid, b"news", 2)])
    settle()
    assert heard(watcher) == [], "the hub does not belong to this process yet"
    kept.relay.begin()
    kept.update([(tid, b"news", 1)])
    settle()
    (change,) = [one for one in heard(watcher) if one[0] == smq.Type.CHANGE]
    assert int.from_bytes(change[5:9], "big") == 2


def test_names_above_the_limit_or_unused_are_not_made() -> None:
    hub = GeventBroker(Hooks(), HubOptions(maxnames=1))
    kept = Kept(hub)
    kept.update([(9, b"unused", 0)])
    kept.update([(10, b"first", 1), (11, b"second", 1)])
    assert list(hub.topic_table.by_name) == [b"first"]
    hub.close()


def test_an_ended_relay_leaves_nothing(kept: Kept) -> None:
    tid = kept.hub.create(b"news")
    kept.update([(tid, b"news", 3)], clients=(OLD_ETID,))
    for _ in kept.relay.remove_all():
        pass
    settle()
    assert kept.hub.topic_table.by_name[b"news"].subscribers == 0
    assert OLD_ETID.to_bytes(4, "big") not in kept.hub.topic_table.by_key
    assert kept.publish(b"news") == []


# ---- both processes over a socket


class Both:
    """The old and the new process, each with a hub of the same key.

    Attributes:
        old, new: the hubs; here: a client that stays at the old one, subscribed to "news".
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, theirs = map(FdChannel, socket.socketpair(socket.AF_UNIX))
        self.kept = KeptClients(ours)
        message, (fd,) = theirs.receive(5)
        assert message == {"do": "relay"}
        ours.close()
        theirs.close()
        self.old, self.new = GeventBroker(Hooks(), HubOptions()), GeventBroker(Hooks(), HubOptions())
        hub_registry.remove(self.old)
        self.old.key = self.new.key
        self.relays = Relays(fd)
        self.here = client(self.old, b"stays-1")
        self.tid = subscribe(self.here, b"news")
        heard(self.here)
        frozen: Any = SimpleNamespace(broker=self.old, others=[self.here])
        self.record = self.kept.keep(frozen)

    def begin(self) -> None:
        self.relays.place(self.new, self.record)
        self.kept.begin(self.old)
        self.relays.begin(self.new)

    def got(self) -> list[bytes]:
        settle()
        return [packet[13:] for packet in heard(self.here) if packet[0] == smq.Type.PUBLISH]

    def close(self) -> None:
        self.relays.close()
        self.kept.close()
        settle()
        self.old.close()
        self.new.close()


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    found = Both(monkeypatch)
    yield found
    found.close()


def test_messages_of_the_new_process_reach_kept_clients(both: Both) -> None:
    at_server: list[bytes] = []
    both.old.subscribe(b"news", lambda data, *_: at_server.append(data))
    both.begin()
    both.new.publish(b"one", b"news")
    both.new.publish(b"two", both.here.etid)
    settle()
    got: list[bytes] = []
    wait_until(lambda: got.extend(both.got()) or len(got) == 2)  # type: ignore[func-returns-value]
    assert got == [b"one", b"two"]
    assert at_server == [], "the server of the new process has it"


def test_no_message_is_delivered_before_the_hub_has_moved(both: Both) -> None:
    both.relays.place(both.new, both.record)
    both.new.publish(b"one", b"news")
    settle()
    let_others_run(20)
    assert both.got() == []
    both.kept.begin(both.old)
    wait_until(lambda: both.got() == [b"one"])


def test_changes_of_kept_clients_reach_the_new_process(both: Both) -> None:
    both.begin()
    table = both.new.topic_table
    subscribe(both.here, b"more")
    both.here.control(smq.with_id(smq.Type.UNSUBSCRIBE, both.tid))
    wait_until(lambda: b"more" in table.by_name and not table.by_name[b"news"].subscribers)
    etid = both.here.etid.to_bytes(4, "big")
    assert etid in table.by_key
    both.here.control(bytes((smq.Type.DISCONNECT,)))
    wait_until(lambda: etid not in table.by_key)


def test_messages_for_a_slow_old_process_are_dropped(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_BYTES", 2 * len(message(1, b"hello")))
    both.begin()
    for _ in range(3):
        both.new.publish(b"hello", b"news")
        settle()
    assert both.new.stats.drops[Drop.OVER_BUDGET] == 1


def test_messages_for_an_ended_old_process_are_counted(both: Both) -> None:
    both.begin()
    both.new.publish(b"queued", b"news")
    settle()
    both.relays.close()
    assert both.new.stats.drops[Drop.CLOSED] == 1
    settle()
    assert not both.new.topic_table.by_name[b"news"].subscribers
    both.relays.place(both.new, both.record)
    assert not both.new.topic_table.by_name[b"news"].subscribers, "there is nobody any more"


def test_messages_to_unknown_topics_are_counted(both: Both) -> None:
    both.begin()
    both.new.publish(b"late", both.here.etid)
    both.here.control(bytes((smq.Type.DISCONNECT,)))
    settle()
    wait_until(lambda: both.old.stats.drops[Drop.CLOSED] == 1)
