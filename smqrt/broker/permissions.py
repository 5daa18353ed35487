"""Permissions of one client: asked when it subscribes, observes, creates, and when a route is looked up, never
for each message; and looked at again when rules change.

A client without an identity may do everything, and never comes here.
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

EXPIRED_AT_ONCE = 200
"""So many clients are looked at for their time before others run."""


class Client(BrokerClient, Protocol):
    """A client whose rights are looked at.

    Attributes:
        broker: whose client it is.
        observed: what it observes.
    """

    broker: BrokerState

    @property
    def topics(self) -> Mapping[int, Topic] | None: ...
    @property
    def observed(self) -> Collection[Topic] | None: ...

    def end_subscription(self, topic: Topic) -> None:
        """Take it out of a topic, and tell it."""
        ...

    def end_observation(self, topic: Topic) -> None:
        """Tell it nothing more of a topic."""
        ...


def may_take_over(client: Client, old: BrokerPeer) -> bool:
    """Whether a client may end another one that has the same uid, and get its ETID: what is sent to that is for the
    user who had it."""
    return client.identity is None or old.identity is None or client.identity.user == old.identity.user


def may_subscribe(client: Client, name: bytes) -> bool:
    """Whether it may subscribe to a topic, which it may bring in by that."""
    return _may(client, name, Action.READ) and _may_bring_in(client, name)


def may_create(client: Client, name: bytes) -> bool:
    """Whether it may ask for the number of a topic, which one needs to publish and to observe."""
    return _may(client, name, Action.WRITE, Action.OBSERVE) and _may_bring_in(client, name)


def may_observe(client: Client, topic: Topic) -> bool:
    """Whether it may be told of the subscribers of a topic, or that another client goes: of those it may send to."""
    if topic.name is None:
        return _may(client, _receiver(client.broker, topic), Action.ONETOONE)
    return _may(client, topic.name, Action.OBSERVE)


def may_publish(client: Client, topic: Topic) -> bool:
    """Whether it may send to a topic, or to another client."""
    if topic.name is None:
        return _may(client, _receiver(client.broker, topic), Action.ONETOONE)
    return _may(client, topic.name, Action.WRITE)


def _may_bring_in(client: Client, name: bytes) -> bool:
    return name in client.broker.topic_table.by_name or _may(client, name, Action.CREATE)


def _may(client: Client, name: bytes, *actions: Action) -> bool:
    return client.identity is None or client.identity.may(name, *actions)


def _receiver(broker: BrokerState, topic: Topic) -> bytes:
    """How the access control list calls the owner of an ETID: by its user, or the server."""
    if topic is broker.server.topic:
        return SERVER
    owner: BrokerPeer | None = broker.sessions.get(topic.id)
    if owner is None and broker.cluster is not None:
        owner = broker.cluster.phantom(topic.id)
    identity = owner.identity if owner is not None else None
    return (identity.shown if identity is not None else "").encode("utf-8", "surrogateescape")


class DeniedRoute:
    """The route of messages to where their publisher may not send: they are counted."""

    __slots__ = ("_broker",)

    def __init__(self, broker: BrokerState) -> None:
        self._broker = broker

    def deliver(self, batch: bytes) -> None:
        """Count the batch as dropped."""
        self._broker.stats.drop(Drop.DENIED, count_frames(batch))

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(bytes(view))


def look_again(clients: Collection[Client], still: Callable[[Identity], str | None]) -> Iterator[None]:
    """Look at all clients after rules or users have changed, in portions: what one may not do any more ends.

    Args:
        clients: some may go meanwhile.
        still: why somebody may not stay, None when he may; it brings the groups up to date.
    """
    for client in clients:
        if client.identity is not None and not client.closed:
            fault = still(client.identity)
            if fault is None:
                yield from _look_at(client)
            else:
                client.disconnect(CloseReason.LOGIN_ENDED, fault.encode())
        yield


def end_expired(clients: Collection[Client], now_s: float) -> Iterator[None]:
    """End those whose login has expired, in portions.

    Args:
        clients: some may go meanwhile.
        now_s: the time, in seconds since 1970.
    """
    for count, client in enumerate(clients, 1):
        identity = client.identity
        if identity is not None and identity.expires_s is not None and identity.expires_s <= now_s:
            client.disconnect(CloseReason.LOGIN_ENDED, b"the login has expired")
        if not count % EXPIRED_AT_ONCE:
            yield


def _look_at(client: Client) -> Iterator[None]:
    client.forget_routes()
    for topic in list((client.topics or {}).values()):
        if not _may(client, topic.name or b"", Action.READ):
            client.end_subscription(topic)
        yield
    for topic in list(client.observed or ()):
        if not client.closed and not may_observe(client, topic):
            client.end_observation(topic)
        yield
