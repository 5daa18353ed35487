"""A hub: one SMQ broker. It owns the tables and is the one place where a connection ends (specification: smq.md §2)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from smqrt.broker.hooks import Hooks
from smqrt.broker.limits import Limits
from smqrt.broker.outbox import Outbox, Retired, put_off
from smqrt.broker.routes import Recorder
from smqrt.broker.server_client import ServerClient
from smqrt.broker.session import Session, State
from smqrt.broker.stats import Drop, Refusal, Stats
from smqrt.broker.topics import NameStore, Observer, SubTopics, Topic, Topics
from smqrt.errors import ArgumentError, CloseReason
from smqrt.wire import smq

SERVER_ETID = 1
log = logging.getLogger("smqrt")

LOG_INTERVAL_S = 1.0
"""A slow client's drops are logged at most this often."""


class Hub:
    """The state of one broker.

    Args:
        hooks: the extension points.
        random_u32: gives random 32-bit numbers.
        encode: the WebSocket encoder for runs.
        store: keeps names over restarts, or None.
        node: this node's number in a cluster.
        random_server_etid: give the server's own client a random ETID instead of 1.
        queue_size: places in the server's publish queue.
        clock: monotonic seconds.
        limits: what clients may make it keep.
    """

    def __init__(
        self,
        hooks: Hooks,
        *,
        random_u32: Callable[[], int],
        encode: Callable[[bytes], bytes],
        store: NameStore | None = None,
        node: int = 0,
        random_server_etid: bool = False,
        queue_size: int = 200,
        clock: Callable[[], float],
        limits: Limits | None = None,
    ) -> None:
        self.hooks = hooks
        self.limits = limits or Limits()
        self.stats = Stats()
        self.topics = Topics(random_u32, encode, node, store)
        self.subtopics = SubTopics(random_u32, store)
        self.random_u32 = random_u32
        self.store = store
        self.sessions: dict[int, Session] = {}
        self.uids: dict[bytes, Session] = {}
        self.server = ServerClient(self, 0 if random_server_etid else SERVER_ETID, queue_size)
        self.recorder: Recorder | None = None
        self.limit_chunks: Callable[[Session, int], None] = lambda session, size_bytes: None
        self.closed = False
        self.clock = clock
        self._logged: dict[Session | ServerClient, float] = {}
        self._changed: dict[Topic, None] = {}
        self._refused_s: dict[Refusal, float] = {}

    # ---- clients come and go

    def accept(self, session: Session) -> None:
        """Let an authenticated client in; one that is connected under the same uid gives way and leaves its ETID."""
        old = self.uids.get(session.uid)
        if old:
            self.disconnect(old, CloseReason.TAKEN_OVER, CloseReason.TAKEN_OVER.value.encode())
        if self.closed:
            self.disconnect(session, CloseReason.SHUTDOWN)
        if session.state is State.CLOSED:
            return
        topic = self.topics.ephemeral(session, old.etid if old else 0)
        session.topic, session.etid, session.state = topic, topic.id, State.CONNECTED
        topic.add(session.outbox)
        self.sessions[topic.id] = self.uids[session.uid] = session
        self.stats.connects += 1
        session.outbox.reply(smq.connack(smq.ConnackCode.ACCEPTED, topic.id))
        session.outbox.settled()
        if self.hooks.onconnect:
            self.hooks.onconnect(session)

    def connect_timed_out(self, session: Session) -> None:
        """Refuse a client that sent no Connect in time, or whom `authenticate` gave no answer in time."""
        if session.state is State.ASKING:
            self.log(session, "authenticate gave no answer in time: the client is refused")
        if session.state in (State.WAITING, State.ASKING):
            session.refuse(smq.ConnackCode.SERVER_UNAVAILABLE, b"", CloseReason.CONNECT_TIMEOUT)

    def disconnect(self, session: Session, reason: CloseReason, text: bytes | None = None) -> None:
        """End a connection, whatever the reason; `text` goes out in a Disconnect packet first."""
        state, session.state = session.state, State.CLOSED
        if state is State.CLOSED:
            return
        if text is not None:
            session.outbox.reply(smq.disconnect(text))
        if state is State.CONNECTED:
            self._remove(session, reason)
        session.outbox.finish(reason)
        if state is State.CONNECTED:
            session.outbox.queue = Retired(session.outbox, self.stats)
        self._logged.pop(session, None)

    def _remove(self, session: Session, reason: CloseReason) -> None:
        self.stats.closes += 1
        if self.hooks.onclose:
            try:
                self.hooks.onclose(session, reason)
            except Exception:  # the client has to go all the same
                log.exception("error in onclose")
        if self.recorder:
            self.recorder.left(session)
        del self.sessions[session.etid]
        if self.uids.get(session.uid) is session:
            del self.uids[session.uid]
        topic = session.topic
        assert topic
        topic.discard(session.outbox)
        self.topics.remove(topic)
        put_off(self._leave(session, session.leave(), topic))

    def _leave(self, session: Session, steps: Iterator[None], topic: Topic) -> Iterator[None]:
        """What is left to do for a client that is gone, in portions: it may have held many thousand topics."""
        yield from steps
        session.outbox.queue = []
        self._changed_count(topic)
        if not topic.observers:
            self.topics.release(topic)

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
                self.topics.release(topic)

    def shutdown(self, text: bytes | None = None, etid: int | None = None) -> None:
        """End one client (`etid`) or all of them; `text` goes out in a Disconnect packet, without it sockets just
        close.
        """
        chosen = [self.sessions.get(etid)] if etid is not None else list(self.sessions.values())
        for session in chosen:
            if session:
                self.disconnect(session, CloseReason.SHUTDOWN, text)

    def close(self) -> None:
        """End all clients without a word, so that they come back, and let nobody in any more."""
        self.closed = True
        self.shutdown()
        self.server.close()

    def record(self, recorder: Recorder | None) -> None:
        """Write what is published from now on to `recorder`; None ends it."""
        self.recorder = recorder
        for session in self.sessions.values():
            session.forget_routes()

    # ---- the server's own client

    def publish(self, data: bytes, tid: int, stid: int = 0, ptid: int | None = None) -> int:
        """Publish as the server (or as `ptid`); gives the number of messages waiting in the server's queue.

        Raises:
            ArgumentError: `data` has more than 0xFFF0 bytes.
        """
        if len(data) > smq.MAX_PAYLOAD_BYTES:
            raise ArgumentError(f"data: {len(data)} bytes; a message carries at most {smq.MAX_PAYLOAD_BYTES}, split it")
        ptid = self.server.etid if ptid is None else ptid
        return self.server.publish(tid, ptid, smq.publish_frame(tid, ptid, stid, data))

    def pubon(self, data: bytes, to_etid: int, from_etid: int, stid: int = 0) -> bool:
        """Send to one client on behalf of another; false unless both are connected."""
        target = self.sessions.get(to_etid)
        if target is None or from_etid not in self.sessions:
            return False
        self.publish(data, to_etid, stid, from_etid)
        return True

    def observe(self, topic: Topic, observer: Observer) -> None:
        """Tell `observer` of every change of the number of subscribers of `topic`."""
        topic.observe(observer)

    def unobserve(self, topic: Topic, observer: Observer) -> None:
        """Take back `observe`."""
        topic.unobserve(observer)

    def peers(self) -> Iterator[Session | ServerClient]:
        """Every connected client and the server's own."""
        return iter([self.server, *self.sessions.values()])

    # ---- accounting

    def log(self, session: Session | ServerClient | None, text: str) -> None:
        """Tell the operator's log hook."""
        if self.hooks.log:
            self.hooks.log(session, text)

    def refuse(self, session: Session | None, refusal: Refusal) -> None:
        """Count that a limit was reached; say so in the log, at most once a second for each limit."""
        self.stats.refused[refusal] += 1
        now_s = self.clock()
        if now_s - self._refused_s.get(refusal, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._refused_s[refusal] = now_s
            text = f"refused: {refusal.value}; {self.stats.refused[refusal]} times so far"
            log.warning("%s", text)
            self.log(session, text)

    def overflowed(self, session: Session | ServerClient, reason: Drop, messages: int) -> None:
        """Count copies that a slow client did not get; log it at most once a second per client."""
        self.stats.drop(reason, messages)
        now = self.clock()
        if now - self._logged.get(session, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._logged[session] = now
            self.log(session, f"slow consumer: {session.outbox.dropped} messages dropped so far ({reason.value})")
