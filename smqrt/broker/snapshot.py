"""Records of a broker's state, and restoring them at another broker.

A record is a dictionary of numbers, texts, bytes and lists, so that it can be sent to another process. Migration of
sessions and hot restarts use them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from smqrt.auth.identity import Identity, Method, Rights
from smqrt.broker.broker import Broker
from smqrt.broker.last_values import VALUE_BYTES
from smqrt.broker.outbox import Drop, Outbox
from smqrt.broker.session import Session, SessionState
from smqrt.wire import smq

Record = dict[str, Any]
PORTION_BYTES = 1 << 20
"""Size of the portions in which last values are sent."""


class EtidTaken(ValueError):
    """A session cannot be restored here, because its ETID or uid is in use."""


# ---- names


def names_of(broker: Broker) -> Record:
    """Return the names and their ids, which the other broker needs before its application creates topics."""
    return {
        "server": broker.server.etid,
        "topics": [[number, name] for number, name in broker.topics()],
        "subtopics": [[number, name] for number, name in broker.subtopics()],
    }


def adopt_names(broker: Broker, names: Record) -> list[bytes]:
    """Give topics and sub-topics the ids that clients know; return the names that had others here."""
    renumbered = [name for number, name in names["topics"] if broker.renumber(name, number)]
    return renumbered + [name for number, name in names["subtopics"] if broker.subtopic_table.renumber(name, number)]


# ---- counters


def counters_of(broker: Broker) -> Record:
    """Return the counters, by the names of their enumerations."""
    stats = broker.stats
    return {
        "connects": stats.connects,
        "refusals": stats.refusals,
        "closes": stats.closes,
        "drops": {reason.name: count for reason, count in stats.drops.items() if count},
        "refused": {limit.name: count for limit, count in stats.refused.items() if count},
    }


def add_counters(broker: Broker, counters: Record) -> None:
    """Add the counters of another broker; names that this version does not know are left out."""
    stats = broker.stats
    stats.connects += counters["connects"]
    stats.refusals += counters["refusals"]
    stats.closes += counters["closes"]
    for reason in Drop:
        stats.drops[reason] += counters["drops"].get(reason.name, 0)
    for limit in stats.refused:
        stats.refused[limit] += counters["refused"].get(limit.name, 0)


# ---- last values


def values_of(broker: Broker) -> Iterator[Record]:
    """Yield the last values that the other broker does not find in its file, in portions of about a megabyte.

    A message without payload stands for a deleted value.
    """
    portion: Record = {"values": [], "sources": [], "stamps": []}
    places: dict[Identity | None, int] = {}
    size_bytes = 0
    for topic, frame, source in broker.last_values.unsaved() if broker.last_values else ():
        if source not in places:
            places[source] = len(places)
            portion["sources"].append(source and _identity_record(source))
        portion["values"].append([topic.id, frame, places[source]])
        portion["stamps"].append(broker.last_values.stamp_at((topic.key, frame[smq.STID])) if broker.last_values else 0)
        size_bytes += len(frame) + VALUE_BYTES
        if size_bytes >= PORTION_BYTES:
            yield portion
            portion, places, size_bytes = {"values": [], "sources": [], "stamps": []}, {}, 0
    if portion["values"]:
        yield portion


def adopt_values(broker: Broker, portion: Record) -> None:
    """Take over a portion of last values whose topics exist; leave out those that no filter selects here."""
    sources = [one and _identity_of(one, None) for one in portion["sources"]]
    stamps = portion.get("stamps") or itertools.repeat(None)  # an older version sends none
    for (number, frame, source), stamp in zip(portion["values"], stamps, strict=False):
        topic = broker.topic_table.get(number)
        if broker.last_values is not None and topic is not None and broker.last_values.selects(topic):
            broker.last_values.of(topic).take_frame(frame, sources[source], stamp)


def valued_topics(broker: Broker) -> set[int]:
    """Return the ids of topics the application subscribes to that have last values, which it has received therefore."""
    values = broker.last_values
    return {number for number, topic in broker.server.topics.items() if values is not None and values.greeting(topic)}


def greet_application(broker: Broker, greeted: set[int]) -> None:
    """Send the application the last values of its topics that arrived after it subscribed."""
    for number, topic in list(broker.server.topics.items()):
        if number not in greeted and number not in broker.server.once:
            broker.send_last_values(topic, broker.server)


# ---- clients


def client_record(session: Session) -> Record:
    """Return the record of a connected client."""
    return {
        "etid": session.etid,
        "uid": session.uid,
        "info": session.info,
        "seed": session.seed,
        "names": [session.names_made, session.names_made_bytes],
        "topics": list(session.topics or ()),
        "observed": [[topic.id, topic.observers.get(session, 0)] for topic in session.observed or ()],
        "since": session.since_s,  # monotonic: the same clock in all processes of a machine
        "identity": None if session.identity is None else _identity_record(session.identity),
        "fragments": None if session.fragments is None else bytes(session.fragments),
    }


def _identity_record(identity: Identity) -> Record:
    return {
        "user": identity.user,
        "groups": list(identity.groups),
        "method": identity.method.value,
        "client_id": identity.client_id,
        "address": identity.address,
        "expires_s": identity.expires_s,
        "proof": identity.proof,
    }


def _identity_of(record: Record, rights: Rights | None) -> Identity:
    known = {**record, "groups": tuple(record["groups"]), "method": Method(record["method"])}
    return Identity(**known, rights=rights)


def join(broker: Broker, outbox: Outbox, record: Record, rights: Rights | None = None) -> Session:
    """Restore the session of a record at `broker`, whose names are adopted already.

    No hook, observer or node is notified: for them the client has not left.

    Raises:
        EtidTaken: its ETID or its uid is in use here.
    """
    if broker.topic_table.get(record["etid"]) or record["uid"] in broker.uids:
        raise EtidTaken(record["etid"])
    session = Session(broker, outbox, record["seed"])
    session.uid, session.info = record["uid"], record["info"]
    session.since_s = record["since"]
    session.names_made, session.names_made_bytes = record["names"]
    session.fragments = None if record["fragments"] is None else bytearray(record["fragments"])
    topic = broker.topic_table.ephemeral(record["etid"])
    session.topic, session.etid, session.state = topic, topic.id, SessionState.CONNECTED
    topic.add(outbox)
    for number in record["topics"]:
        named = broker.topic_table.get(number)
        if named is not None:
            if session.topics is None:
                session.topics = {}
            session.topics[named.id] = named
            named.add(outbox)
    if record["identity"] is not None:
        session.identity = _identity_of(record["identity"], rights)
    broker.register(session)
    return session


def observe(session: Session, record: Record) -> None:
    """Restore the observations of a session, once all others have joined; notify the client of changes since.

    Args:
        session: the session that joined.
        record: its record.
    """
    for number, notified in record["observed"]:
        topic = session.broker.topic_table.get(number)
        if topic is None:
            if notified:  # a client that was not restored
                session.outbox.reply(smq.change(number, 0))
            continue
        if session.observed is None:
            session.observed = set()
        session.observed.add(topic)
        topic.observe(session)
        topic.observers[session] = notified
        topic.notify(session)


def leave(session: Session) -> None:
    """Close a session that was restored elsewhere, without notifications."""
    session.state = SessionState.CLOSED
    session.forget_routes()
    session.outbox.queue = []
    session.topics = session.observed = session.fragments = None


def forget_clients(broker: Broker, sessions: set[Session]) -> None:
    """Remove sessions that were restored elsewhere from all tables."""
    for session in sessions:
        broker.deregister(session)
        if session.topic is not None:
            broker.topic_table.remove(session.topic)
            broker.topic_table.release(session.topic)
    outboxes = {session.outbox for session in sessions}
    for topic in broker.topic_table.by_key.values():
        topic.forget(outboxes, sessions)
