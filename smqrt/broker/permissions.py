"""Permissions of clients: checked at each request, and again when rules change.

A permission is checked when a client subscribes, observes or creates, and when a route is resolved, never for each
message. A client without an identity has all permissions, and callers do not ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

from smqrt.auth.acl import SERVER
from smqrt.auth.identity import Action, Identity
from smqrt.broker.outbox import Drop
from smqrt.broker.state import BrokerClient, BrokerPeer, BrokerState
from smqrt.broker.topics import Topic
from smqrt.errors import CloseReason
from smqrt.wire.smq import count_frames

EXPIRY_CHECKS_PER_STEP = 200
"""Clients whose login is checked for expiry before other work of the event loop runs."""


class Client(BrokerClient, Protocol):
    """Session of a client whose permissions are checked.

    Attributes:
        broker: the broker that it is connected to.
        topics: the topics that it subscribes to, by id.
        observed: the topics that it observes.
    """

    broker: BrokerState

    @property
    def topics(self) -> Mapping[int, Topic] | None: ...
    @property
    def observed(self) -> Collection[Topic] | None: ...

    def end_subscription(self, topic: Topic) -> None:
        """Unsubscribe the client and notify it."""
        ...

    def end_observation(self, topic: Topic) -> None:
        """Stop notifying the client of a topic's subscribers."""
        ...


def may_take_over(client: Client, old: BrokerPeer) -> bool:
    """Whether a client may replace another one that has the same uid, and get its ETID.

    Messages to that ETID are meant for the user who had it.
    """
    return client.identity is None or old.identity is None or client.identity.user == old.identity.user


def may_subscribe(client: Client, name: bytes) -> bool:
    """Whether it may subscribe to a topic, which creates the topic if it is new."""
    return _may(client, name, Action.READ) and _may_create_if_new(client, name)


def may_create(client: Client, name: bytes) -> bool:
    """Whether it may ask for the id of a topic, which publishing and observing require."""
    return _may(client, name, Action.WRITE, Action.OBSERVE) and _may_create_if_new(client, name)


def may_observe(client: Client, topic: Topic) -> bool:
    """Whether it may observe a topic, or the ETID of a client that it may send to."""
    if topic.name is None:
        return _may(client, _receiver(client.broker, topic), Action.ONETOONE)
    return _may(client, topic.name, Action.OBSERVE)


def may_publish(client: Client, topic: Topic) -> bool:
    """Whether it may publish to a topic, or send to another client."""
    if topic.name is None:
        return _may(client, _receiver(client.broker, topic), Action.ONETOONE)
    return _may(client, topic.name, Action.WRITE)


def _may_create_if_new(client: Client, name: bytes) -> bool:
    return name in client.broker.topic_table.by_name or _may(client, name, Action.CREATE)


def _may(client: Client, name: bytes, *actions: Action) -> bool:
    return client.identity is None or client.identity.may(name, *actions)


def _receiver(broker: BrokerState, topic: Topic) -> bytes:
    """Return the name of an ETID's owner in the access control list: its user, or the server."""
    if topic is broker.server.topic:
        return SERVER
    owner: BrokerPeer | None = broker.sessions.get(topic.id)
    if owner is None and broker.cluster is not None:
        owner = broker.cluster.phantom(topic.id)
    identity = owner.identity if owner is not None else None
    return (identity.shown if identity is not None else "").encode("utf-8", "surrogateescape")


class DeniedRoute:
    """Route to a destination that is denied to the publisher: counts the messages."""

    __slots__ = ("_broker",)

    def __init__(self, broker: BrokerState) -> None:
        self._broker = broker

    def deliver(self, batch: bytes) -> None:
        """Count the messages as dropped."""
        self._broker.stats.drop(Drop.DENIED, count_frames(batch))

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(bytes(view))


def look_again(clients: Collection[Client], revalidate: Callable[[Identity], str | None]) -> Iterator[None]:
    """Check all clients after rules or users have changed, in portions; end what is permitted no longer.

    Args:
        clients: some may disconnect meanwhile.
        revalidate: updates the groups of an identity, and returns why its login is no longer valid, or None.
    """
    for client in clients:
        if client.identity is not None and not client.closed:
            fault = revalidate(client.identity)
            if fault is None:
                yield from _recheck(client)
            else:
                client.disconnect(CloseReason.LOGIN_ENDED, fault.encode())
        yield


def _recheck(client: Client) -> Iterator[None]:
    client.forget_routes()
    for topic in list((client.topics or {}).values()):
        if not _may(client, topic.name or b"", Action.READ):
            client.end_subscription(topic)
        yield
    for topic in list(client.observed or ()):
        if not client.closed and not may_observe(client, topic):
            client.end_observation(topic)
        yield


def end_expired(clients: Collection[Client], now_s: float) -> Iterator[None]:
    """Disconnect the clients whose login has expired, in portions.

    Args:
        clients: some may disconnect meanwhile.
        now_s: the time, in seconds since 1970.
    """
    for count, client in enumerate(clients, 1):
        identity = client.identity
        if identity is not None and identity.expires_s is not None and identity.expires_s <= now_s:
            client.disconnect(CloseReason.LOGIN_ENDED, b"the login has expired")
        if not count % EXPIRY_CHECKS_PER_STEP:
            yield
