"""A trace for an operator: a stream of JSON lines, as long as somebody reads."""

from __future__ import annotations

from collections.abc import Generator
from time import time

from gevent.event import Event

from smqrt.broker.trace import Trace
from smqrt.errors import ArgumentError
from smqrt.operations import snapshots
from smqrt.settings.limit_register import Limit
from smqrt.smq.gevent_broker import GeventBroker, all_brokers

AT_ONCE = 4
SILENCE_S = 5.0
"""So often there is an empty line when nothing happens: that somebody has gone is noticed when writing to him fails."""

TRACES = Limit("traces", "", f"{AT_ONCE} traces are running")
_running: list[Trace] = []


def begin(hub: int | None, peer: str, topic: str) -> Generator[dict[str, object] | None, None, None]:
    """Begins a trace; yields what happens, None when nothing did for a while. It ends when the iterator is closed.

    Args:
        hub: the number of the hub; None when there is one only, or `peer` names it.
        peer: the id of a client, such as "1.3055123", or its uid; empty to trace a topic.
        topic: the name of a topic; empty to trace a client.

    Raises:
        ArgumentError: not exactly one of both is given, there is no such client or hub, or too many traces run.
    """
    if bool(peer) == bool(topic):
        raise ArgumentError("trace: give a peer or a topic, one of both")
    broker, uid = _broker_and_uid(hub, peer)
    if len(_running) >= AT_ONCE:
        TRACES.refused("a trace")
        raise ArgumentError(f"trace: {AT_ONCE} traces are running; end one of them first")
    more = Event()
    trace = Trace(broker, uid, topic.encode("utf-8", "surrogateescape") if topic else None, more.set)
    return _events(trace, more)


def _broker_and_uid(hub: int | None, peer: str) -> tuple[GeventBroker, bytes | None]:
    head, dot, tail = peer.partition(".")
    if dot and head.isdigit() and tail.isdigit():
        session = snapshots.session_of(peer)
        return snapshots.broker_of(snapshots.peer_id(peer)[0]), session.uid
    brokers = all_brokers()
    if hub is None and len(brokers) != 1:
        raise ArgumentError("hub: which one? give hub=N; /api/v1/hubs lists them")
    broker = brokers[0] if hub is None else snapshots.broker_of(hub)
    return broker, peer.encode("utf-8", "surrogateescape") if peer else None


def _events(trace: Trace, more: Event) -> Generator[dict[str, object] | None, None, None]:
    _running.append(trace)
    trace.start()
    try:
        yield {"event": "tracing", "time": snapshots.iso(time())}
        while not trace.broker.closed:
            more.clear()
            for event in trace.take():
                yield {"time": snapshots.iso(time()), **event}
            if not more.wait(SILENCE_S):
                yield None
    finally:
        trace.stop()
        _running.remove(trace)
