"""A broker at one instant as plain values, and back: its clients go on at another broker, of this process or of the
next one. Records are dictionaries of numbers, texts, bytes, and lists of them, so that they can be sent.
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
from smqrt.broker.topics import Topic
from smqrt.wire import smq

Record = dict[str, Any]
PORTION_BYTES = 1 << 20


class EtidTaken(ValueError):
    """A client can't go on here: something else has its number."""


# ---- names


def names_of(broker: Broker) -> Record:
    """What the other broker needs before its application creates a topic: who has which number."""
    return {
        "server": broker.server.etid,
        "topics": [[number, name] for number, name in broker.topics()],
        "subtopics": [[number, name] for number, name in broker.subtopics()],
    }


def adopt_names(broker: Broker, names: Record) -> list[bytes]:
    """Give topics and sub-topics the numbers that clients know; returns the names that had others here."""
    renumbered = [name for number, name in names["topics"] if broker.renumber(name, number)]
    return renumbered + [name for number, name in names["subtopics"] if broker.subtopic_table.renumber(name, number)]


# ---- counters


def counters_of(broker: Broker) -> Record:
    """The counters, by the names of their enumerations."""
    stats = broker.stats
    return {
        "connects": stats.connects,
        "refusals": stats.refusals,
        "closes": stats.closes,
        "drops": {reason.name: count for reason, count in stats.drops.items() if count},
        "refused": {limit.name: count for limit, count in stats.refused.items() if count},
    }


def add_counters(broker: Broker, counters: Record) -> None:
    """Count on from there. What this version does not know is left out."""
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
    """The last values that another broker can't find in the file of names, in portions of about a megabyte. The message
    without payload stands for a value that was taken away.
    """
    portion: Record = {"values": [], "sources": [], "stamps": []}
    places: dict[Identity | None, int] = {}
    size_bytes = 0
    for topic, frame, source in broker.last_values.unsaved() if broker.last_values else ():
        if source not in places:
            places[source] = len(places)
            portion["sources"].append(source and _identity_record(source))
        portion["values"].append([topic.id, frame, places[source]])
        portion["stamps"].append(broker.last_values.stamp_at((topic.key, frame[11:15])) if broker.last_values else 0)
        size_bytes += len(frame) + VALUE_BYTES
        if size_bytes >= PORTION_BYTES:
            yield portion
            portion, places, size_bytes = {"values": [], "sources": [], "stamps": []}, {}, 0
    if portion["values"]:
        yield portion


def adopt_values(broker: Broker, portion: Record) -> None:
    """Have the last values of a portion, whose topics are there; those that no filter names here are left out."""
    sources = [one and _identity_of(one, None) for one in portion["sources"]]
    stamps = portion.get("stamps") or itertools.repeat(None)  # none from a process of an older version
    for (number, frame, source), stamp in zip(portion["values"], stamps, strict=False):
        topic = broker.topic_table.get(number)
        if broker.last_values is not None and topic is not None and broker.last_values.selects(topic):
            broker.last_values.of(topic).take_frame(frame, sources[source], stamp)


def valued_topics(broker: Broker) -> set[int]:
    """The topics of the application's own subscriptions that have last values: it got them when it subscribed."""
    values = broker.last_values
    return {number for number, topic in broker.server.topics.items() if values is not None and values.greeting(topic)}


def greet_application(broker: Broker, greeted: set[int]) -> None:
    """Give the application the last values of topics it subscribed to before they came."""
    for number, topic in list(broker.server.topics.items()):
        if number not in greeted and number not in broker.server.once:
            broker.greet(topic, broker.server)


# ---- clients


def client_record(session: Session) -> Record:
    """A connected client."""
    return {
        "etid": session.etid,
        "uid": session.uid,
        "info": session.info,
        "seed": session.seed,
        "names": [session.names_made, session.names_made_bytes],
        "topics": list(session.topics or ()),
        "observed": [[topic.id, topic.observers.get(session, 0)] for topic in session.observed or ()],
        "since": session.since_s,  # the clock of all processes of a machine
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
    """Who a client of a record is."""
    known = {**record, "groups": tuple(record["groups"]), "method": Method(record["method"])}
    return Identity(**known, rights=rights)


def join(broker: Broker, outbox: Outbox, record: Record, rights: Rights | None = None) -> Session:
    """Let the client of a record go on at `broker`, whose names are adopted. Nobody is told: for others it never left.

    Raises:
        EtidTaken: its number, or its uid, is somebody else's here.
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
        _subscribe(session, broker.topic_table.get(number))
    if record["identity"] is not None:
        session.identity = _identity_of(record["identity"], rights)
    broker.list(session)
    return session


def _subscribe(session: Session, topic: Topic | None) -> None:
    if topic is not None:
        if session.topics is None:
            session.topics = {}
        session.topics[topic.id] = topic
        topic.add(session.outbox)


def observe(session: Session, record: Record) -> None:
    """Let a client that joined observe what it did, once all others have joined: it is told what has changed since."""
    for number, told in record["observed"]:
        topic = session.broker.topic_table.get(number)
        if topic is None:
            if told:  # a client that could not be taken along
                session.outbox.reply(smq.change(number, 0))
            continue
        if session.observed is None:
            session.observed = set()
        session.observed.add(topic)
        topic.observe(session)
        topic.observers[session] = told
        topic.tell(session)


def leave(session: Session) -> None:
    """A client goes on elsewhere: its session here is over, and nobody is told."""
    session.state = SessionState.CLOSED
    session.forget_routes()
    session.outbox.queue = []
    session.topics = session.observed = session.fragments = None


def forget_clients(broker: Broker, gone: set[Session]) -> None:
    """Take clients that have left out of every table."""
    for session in gone:
        broker.unlist(session)
        if session.topic is not None:
            broker.topic_table.remove(session.topic)
            broker.topic_table.release(session.topic)
    outboxes = {session.outbox for session in gone}
    for topic in broker.topic_table.by_key.values():
        topic.forget(outboxes, gone)
