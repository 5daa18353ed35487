"""The hub against a model of plain dictionaries, compared after every step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from smqrt.broker.broker import Broker
from smqrt.broker.outbox import flush_dirty
from smqrt.broker.routes import HandledRoute, UnroutedRoute
from smqrt.broker.sessions import Session, SessionState
from smqrt.broker.state import Hooks
from smqrt.errors import CloseReason
from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.broker.memory_clients import Ear
from tests.support.device import publish

NAMES = [b"a", b"b", b"\xff"]


@dataclass(eq=False)
class Client:
    """What the model knows of a client."""

    session: Session
    outbox: Ear
    uid: bytes
    etid: int = 0
    topics: list[int] = field(default_factory=list)
    observes: list[int] = field(default_factory=list)
    expected: list[bytes] = field(default_factory=list)
    alive: bool = True


class HubModel(RuleBasedStateMachine):
    """Random steps of random clients."""

    clients = Bundle("clients")

    @initialize()
    def begin(self) -> None:
        numbers = itertools.count(1000)
        self.live: list[Client] = []
        self.closed: list[tuple[int, CloseReason]] = []
        hooks = Hooks(onclose=lambda session, reason: self.closed.append((session.etid, reason)))
        self.broker = Broker(hooks, random_u32=lambda: next(numbers) << 6, encode=lambda run: run, clock=lambda: 0.0)
        self.tids: dict[bytes, int] = {}
        self.server_topics: set[int] = set()
        self.closings: list[tuple[int, CloseReason]] = []
        self.unrouted = 0

    # ---- the model's own bookkeeping

    def count(self, tid: int) -> int:
        return sum(tid in one.topics for one in self.live) + (tid in self.server_topics)

    def tell(self, tid: int) -> None:
        for one in self.live:
            if tid in one.observes:
                one.expected.append(smq.change(tid, self.count(tid)))

    def gone(self, client: Client, reason: CloseReason) -> None:
        client.alive = False
        self.live.remove(client)
        self.closings.append((client.etid, reason))
        for tid in client.topics:
            self.tell(tid)
        self.tell(client.etid)
        for one in self.live:
            one.observes = [tid for tid in one.observes if tid != client.etid]

    def message(self, tid: int, packet: bytes) -> None:
        receivers = [one for one in self.live if tid in one.topics or one.etid == tid]
        for one in receivers:
            one.expected.append(packet)
        if not receivers and tid not in self.server_topics and tid != 1:
            self.unrouted += 1

    # ---- steps

    @rule(target=clients, uid=st.sampled_from([b"uid-a1", b"uid-b1", b"uid-c1"]))
    def connect(self, uid: bytes) -> Client:
        old = next((one for one in self.live if one.uid == uid), None)
        outbox = Ear()
        session = Session(self.broker, outbox, 5)
        session.control(smq.connect(uid))
        if old:
            old.expected.append(smq.disconnect(b"reconnect"))
            self.gone(old, CloseReason.TAKEN_OVER)
            assert session.etid == old.etid
        client = Client(session, outbox, uid, session.etid)
        client.expected.append(smq.connack(0, session.etid))
        self.live.append(client)
        return client

    @rule(client=clients, name=st.sampled_from(NAMES))
    def subscribe(self, client: Client, name: bytes) -> None:
        client.session.control(smq.with_name(Type.SUBSCRIBE, name))
        if not client.alive:
            return
        tid = self.tids.setdefault(name, self.broker.topic_table.by_name[name].id)
        if tid not in client.topics:
            client.topics.append(tid)
            self.tell(tid)
        client.expected.append(smq.ack(Type.SUBACK, tid, name))

    @rule(client=clients, name=st.sampled_from(NAMES))
    def create(self, client: Client, name: bytes) -> None:
        client.session.control(smq.with_name(Type.CREATE, name))
        if client.alive:
            tid = self.tids.setdefault(name, self.broker.topic_table.by_name[name].id)
            client.expected.append(smq.ack(Type.CREATEACK, tid, name))

    def number(self, choice: int) -> int:
        """Any id there is or was, and one that never was."""
        known = [*self.tids.values(), *(one.etid for one in self.live), *(etid for etid, _ in self.closings), 1, 77]
        return known[choice % len(known)]

    @rule(client=clients, choice=st.integers(0, 40))
    def unsubscribe(self, client: Client, choice: int) -> None:
        tid = self.number(choice)
        client.session.control(smq.with_id(Type.UNSUBSCRIBE, tid))
        if client.alive and tid in client.topics:
            client.topics.remove(tid)
            self.tell(tid)

    @rule(client=clients, choice=st.integers(0, 40))
    def observe(self, client: Client, choice: int) -> None:
        tid = self.number(choice)
        client.session.control(smq.with_id(Type.OBSERVE, tid))
        if not client.alive:
            return
        named, alive = tid in self.tids.values(), tid == 1 or any(one.etid == tid for one in self.live)
        if (named or alive) and tid != client.etid and tid not in client.observes:
            client.observes.append(tid)
        if not alive:
            client.expected.append(smq.change(tid, self.count(tid)))

    @rule(client=clients, choice=st.integers(0, 40))
    def unobserve(self, client: Client, choice: int) -> None:
        tid = self.number(choice)
        client.session.control(smq.with_id(Type.UNOBSERVE, tid))
        client.observes = [one for one in client.observes if one != tid]

    @rule(client=clients, choice=st.integers(0, 40), data=st.binary(max_size=3))
    def publish(self, client: Client, choice: int, data: bytes) -> None:
        if client.alive:
            tid = self.number(choice)
            packet = publish(tid, client.etid, data)
            client.session.publish(smq.frame(packet))
            self.message(tid, packet)

    @rule(client=clients, choice=st.integers(0, 40))
    def fragments(self, client: Client, choice: int) -> None:
        tid = self.number(choice)
        for part, to in ((b"x", 0), (b"", 0), (b"y", tid)):
            client.session.control(publish(to, client.etid, part, kind=Type.PUBFRAG))
        if client.alive:
            self.message(tid, publish(tid, client.etid, b"xy"))

    @rule(choice=st.integers(0, 40), data=st.binary(max_size=3))
    def server_publishes(self, choice: int, data: bytes) -> None:
        tid = self.number(choice)
        self.broker.publish(data, tid)
        self.message(tid, publish(tid, 1, data))

    @rule(name=st.sampled_from(NAMES), on=st.booleans())
    def server_subscribes(self, name: bytes, on: bool) -> None:
        topic = self.broker.topic_table.named(name)
        tid = self.tids.setdefault(name, topic.id)
        changes = on != (tid in self.server_topics)
        if on:
            self.broker.server.subscribe(topic, lambda *_: None)
            self.server_topics.add(tid)
        else:
            self.broker.server.unsubscribe(topic)
            self.server_topics.discard(tid)
        if changes:
            self.tell(tid)

    @rule(client=clients, how=st.sampled_from(["disconnect", "lost", "forged", "unknown", "shutdown"]))
    def end(self, client: Client, how: str) -> None:
        reasons = {
            "disconnect": CloseReason.CLIENT_DISCONNECT,
            "lost": CloseReason.PEER_CLOSED,
            "forged": CloseReason.FORGED_PUBLISHER,
            "unknown": CloseReason.UNKNOWN_PACKET,
            "shutdown": CloseReason.SHUTDOWN,
        }
        match how:
            case "disconnect":
                client.session.control(smq.disconnect())
            case "lost":
                client.session.disconnect(CloseReason.PEER_CLOSED)
            case "forged":
                client.session.control(publish(5, 5, b"", kind=Type.PUBFRAG))
            case "unknown":
                client.session.control(b"\xff")
            case "shutdown":
                self.broker.shutdown(b"bye", client.etid if client.alive else 1)
        if client.alive:
            words = {"forged": b"corrupt frame", "shutdown": b"bye"}
            client.expected += [smq.disconnect(words[how])] if how in words else []
            flush_dirty()
            assert client.outbox.got == client.expected
            self.gone(client, reasons[how])

    # ---- what always holds

    @invariant()
    def everybody_got_what_is_due(self) -> None:
        flush_dirty()
        assert self.closed == self.closings
        assert self.unrouted == sum(self.broker.stats.drops.values())
        for one in self.live:
            assert one.outbox.got == one.expected
            assert not one.outbox.ended

    @invariant()
    def tables_agree(self) -> None:
        assert set(self.broker.sessions) == {one.etid for one in self.live}
        assert self.broker.uids == {one.uid: one.session for one in self.live}
        for name, tid in self.tids.items():
            topic = self.broker.topic_table.by_name[name]
            assert topic.id == tid
            assert topic.subscribers == self.count(tid)
            topic.settle()
            assert len(set(topic.raw)) == len(topic.raw) == topic.subscribers
        observed = {(tid, id(one.session)) for one in self.live for tid in one.observes}
        assert observed == {
            (topic.id, id(observer))
            for topic in self.broker.topic_table.by_key.values()
            for observer in topic.observers
        }
        for one in self.live:
            assert one.session.state is SessionState.CONNECTED
            assert set(one.session.topic_ids) == set(one.topics)

    @invariant()
    def route_caches_lead_to_living_topics(self) -> None:
        for one in self.live:
            for key, route in one.session.routes.items():
                topic = self.broker.topic_table.by_key[key[1:5]]
                ours = topic is self.broker.server.topic or topic.id in self.broker.server.topics
                assert isinstance(route, HandledRoute) == ours
                way = route.route if isinstance(route, HandledRoute) else route
                assert way is topic if topic.subscribers else isinstance(way, UnroutedRoute)
                assert one.session in (topic.cached or ())

    def teardown(self) -> None:
        for one in list(self.live):
            one.session.disconnect(CloseReason.PEER_CLOSED)
        flush_dirty()
        assert not any(topic.observers or topic.cached for topic in self.broker.topic_table.by_key.values())
        assert [key for key, topic in self.broker.topic_table.by_key.items() if topic.name is None] == [b"\0\0\0\1"]


TestHubModel = HubModel.TestCase
TestHubModel.settings = settings(max_examples=30, stateful_step_count=40)
