"""State that the clients of one broker share: its tables, hooks, limits, counters and recorder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from smqrt.broker.hooks import BrokerClient, BrokerPeer, Hooks, Recorder
from smqrt.broker.outbox import Drop, Outbox, put_off
from smqrt.broker.topics import NameLimits, NameStore, Refusal, SubTopics, Topic, Topics
from smqrt.errors import CloseReason

log = logging.getLogger("smqrt")

LOG_INTERVAL_S = 1.0
"""A slow client's drops are logged at most this often, and that a limit was reached."""


@dataclass(slots=True)
class Stats:
    """The counters of one broker: nothing is lost without being counted."""

    connects: int = 0
    refusals: int = 0
    closes: int = 0
    drops: dict[Drop, int] = field(default_factory=lambda: dict.fromkeys(Drop, 0))
    refused: dict[Refusal, int] = field(default_factory=lambda: dict.fromkeys(Refusal, 0))

    def drop(self, reason: Drop, messages: int) -> None:
        """Count `messages` that were not delivered for `reason`."""
        self.drops[reason] += messages


class ServerPeer(BrokerPeer, Protocol):
    """The server's own client, as routes see it.

    Attributes:
        topic: its own ETID's.
        behind: whether its handlers have not got all messages yet: who publishes to them has to wait.
    """

    topic: Topic
    topics: dict[int, Topic]
    behind: bool

    def hold(self, peer: BrokerPeer) -> bool:
        """Let the outbox of `peer` resume when the handlers are no longer behind; gives whether it has to wait."""
        ...


class BrokerState:
    """What the clients of one broker share.

    Args:
        hooks: the extension points.
        random_u32: gives random 32-bit numbers.
        encode: the WebSocket encoder for runs.
        store: keeps names over restarts, or None.
        node: this node's number in a cluster.
        clock: monotonic seconds.
        limits: how many names clients may make it keep.
    """

    server: ServerPeer

    def __init__(
        self,
        hooks: Hooks,
        *,
        random_u32: Callable[[], int],
        encode: Callable[[bytes], bytes],
        clock: Callable[[], float],
        store: NameStore | None = None,
        node: int = 0,
        limits: NameLimits | None = None,
    ) -> None:
        self.hooks = hooks
        self.limits = limits or NameLimits()
        self.stats = Stats()
        self.topic_table = Topics(random_u32, encode, node, store)
        self.subtopic_table = SubTopics(random_u32, store)
        self.random_u32 = random_u32
        self.clock = clock
        self.store = store
        self.sessions: dict[int, BrokerClient] = {}
        self.uids: dict[bytes, BrokerClient] = {}
        self.recorder: Recorder | None = None
        self.limit_chunks: Callable[[BrokerClient, int], None] = lambda session, size_bytes: None
        self.closed = False
        self._logged_s: dict[BrokerPeer, float] = {}
        self._changed: dict[Topic, None] = {}
        self._refused_s: dict[Refusal, float] = {}

    # ---- clients come and go

    def add(self, client: BrokerClient) -> None:
        """Count and list a client that was accepted."""
        self.sessions[client.etid] = self.uids[client.uid] = client
        self.stats.connects += 1

    def remove(self, client: BrokerClient, topic: Topic, reason: CloseReason) -> None:
        """Take out a client whose connection ended, and the `topic` of its ETID."""
        self.stats.closes += 1
        if self.hooks.onclose:
            try:
                self.hooks.onclose(client, reason)
            except Exception:  # the client has to go all the same
                log.exception("error in onclose")
        if self.recorder:
            self.recorder.left(client)
        del self.sessions[client.etid]
        if self.uids.get(client.uid) is client:
            del self.uids[client.uid]
        topic.discard(client.outbox)
        self.topic_table.remove(topic)

    def release(self, client: BrokerClient, topic: Topic) -> None:
        """A client that was removed is out of every table: let its ETID be drawn again, once its observers know."""
        self._logged_s.pop(client, None)
        self._changed_count(topic)
        if not topic.observers:
            self.topic_table.release(topic)

    def subscribed(self, topic: Topic, outbox: Outbox) -> None:
        """Let `outbox` receive `topic`; observers are told."""
        topic.add(outbox)
        self._changed_count(topic)

    def unsubscribed(self, topic: Topic, outbox: Outbox) -> None:
        """Take `outbox` out of `topic`; observers are told."""
        topic.discard(outbox)
        self._changed_count(topic)

    def _changed_count(self, topic: Topic) -> None:
        """Have the observers told once per turn, however often the number changes in it."""
        if topic.observers:
            if not self._changed:
                put_off(self._tell())
            self._changed[topic] = None

    def _tell(self) -> Iterator[None]:
        changed, self._changed = self._changed, {}
        for topic in changed:
            for observer in list(topic.observers):
                topic.tell(observer)
                yield
            if topic.name is None:
                topic.unobserve_all()
                self.topic_table.release(topic)

    # ---- accounting

    def log(self, peer: BrokerPeer | None, text: str) -> None:
        """Tell the operator's log hook."""
        if self.hooks.log:
            self.hooks.log(peer, text)

    def refuse(self, peer: BrokerPeer | None, refusal: Refusal) -> None:
        """Count that a limit was reached; say so in the log, at most once a second for each limit."""
        self.stats.refused[refusal] += 1
        now_s = self.clock()
        if now_s - self._refused_s.get(refusal, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._refused_s[refusal] = now_s
            text = f"refused: {refusal.value}; {self.stats.refused[refusal]} times so far"
            log.warning("%s", text)
            self.log(peer, text)

    def overflowed(self, peer: BrokerPeer, reason: Drop, messages: int) -> None:
        """Count copies that a slow client did not get; log it at most once a second per client."""
        self.stats.drop(reason, messages)
        now_s = self.clock()
        if now_s - self._logged_s.get(peer, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._logged_s[peer] = now_s
            self.log(peer, f"slow consumer: {peer.outbox.dropped} messages dropped so far ({reason.value})")
