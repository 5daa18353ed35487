"""Control packets of a connected client and their answers.

`HANDLERS` has one function for each packet type that a client may send after Connack, other than Publish:

    Subscribe ─▶ Suback      Create ─▶ Createack      Createsub ─▶ Createsuback      Observe ─▶ Change      Ping ─▶ Pong

Unsubscribe, Unobserve, Pong, PubFrag and Disconnect have no answer (spec: smq §2.6, §12). A handler returns true when
an application hook has not answered yet; the session is not read until it does. When names are saved across restarts,
an answer that acknowledges a new name waits for the disk, and all later answers wait behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from smqrt.broker import client_limits
from smqrt.broker.deferred import Deferred
from smqrt.broker.rare import RareSessionState, UnsavedAnswers
from smqrt.broker.topics import CLIENT_OBSERVES, CLIENT_SUBSCRIPTIONS, SubTopics, Topic, Topics
from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import smq
from smqrt.wire.smq import Type

MAX_UNSAVED_ANSWERS = 1000
"""A client with this many answers that wait for the disk is not read until there are fewer."""

NO_ID = 0
"""The id in an acknowledgement that denies a name."""
_NO_TID = b"\0\0\0\0"
"""The topic id in every PubFrag packet of a message but the last."""
_FRAGMENT_HEADER_BYTES = smq.PUBLISH_HEADER_BYTES - 2
"""Type, topic id, publisher id and sub-topic id of a PubFrag packet; a frame has two bytes of length before them."""

FEW_SUBSCRIPTIONS = 8
"""Up to this number a tuple has the subscriptions of a client: with one topic it takes 48 bytes, a dictionary 224."""

Value = TypeVar("Value")
Subscriptions = tuple[Topic, ...] | dict[Topic, None]
"""The topics of a client, in the order of its subscriptions. Removal from a dictionary takes constant time."""


class RequestingClient(client_limits.Client, Protocol):
    """Session of a client that sends control packets, see `Session`."""

    topics: Subscriptions
    observed: set[Topic] | None
    fragments: bytearray | None
    names_made: int
    names_made_bytes: int
    rare: RareSessionState
    unsaved_answers: UnsavedAnswers | None
    waits_for_disk: bool

    def ask(self, hook: Callable[..., Any] | None, arguments: tuple[Any, ...], then: Callable[[Any], None]) -> bool:
        """Call `then` with the answer of `hook`; return true when that comes later."""

    def call_or_disconnect(self, function: Callable[[Value], object], value: Value) -> bool:
        """Call `function(value)`; return false when it raised and the client was disconnected."""

    def publish(self, batch: bytes) -> bool:
        """Route Publish frames of this client; return true when it has to wait."""

    def changed(self, topic: Topic, subscribers: int) -> None:
        """See `Observer`."""


# ---- sending answers, in order


def send_answer(client: RequestingClient, packet: bytes) -> None:
    """Send an answer, behind those that wait for the disk."""
    if client.rare.unsaved_answers:
        client.rare.unsaved_answers.append((None, lambda saved: client.outbox.reply(packet)))
    else:
        client.outbox.reply(packet)


def send_acknowledgement(
    client: RequestingClient, kind: Type, number: int, name: bytes, saving: Deferred[None] | None
) -> None:
    """Send a Createack or Createsuback when `saving` is settled; it denies a name that was not saved."""
    when_saved(client, saving, lambda saved: client.outbox.reply(smq.ack(kind, number if saved else NO_ID, name)))


def deny_subscription(client: RequestingClient, name: bytes) -> None:
    """Send a Suback with topic id 0, which denies the subscription."""
    send_answer(client, smq.ack(Type.SUBACK, NO_ID, name))


def when_saved(client: RequestingClient, saving: Deferred[None] | None, then: Callable[[bool], None]) -> None:
    """Call `then(saved)` when a name is saved or saving has failed, behind the answers that wait already."""
    if saving is None and not client.rare.unsaved_answers:
        then(True)
        return
    if client.unsaved_answers is None:
        client.unsaved_answers = deque()
    client.unsaved_answers.append((saving, then))
    if saving:
        saving.then(lambda value, error: _send_saved(client))  # a name without `saving` waits for those before it


def _send_saved(client: RequestingClient) -> None:
    """Send the answers at the front of the queue whose names are saved."""
    while client.unsaved_answers and (client.unsaved_answers[0][0] is None or client.unsaved_answers[0][0].done):
        saving, then = client.unsaved_answers.popleft()
        if not client.call_or_disconnect(then, saving is None or not saving.failed):
            return
    if client.waits_for_disk and len(client.unsaved_answers or ()) < MAX_UNSAVED_ANSWERS:
        client.waits_for_disk = False
        client.outbox.resume()


# ---- topics


def with_topic(topics: Subscriptions, topic: Topic) -> Subscriptions:
    """Return the subscriptions of a client that also subscribes to `topic`; a dictionary is changed in place."""
    if isinstance(topics, tuple):
        if len(topics) < FEW_SUBSCRIPTIONS:
            return (*topics, topic)
        topics = dict.fromkeys(topics)
    topics[topic] = None
    return topics


def without_topic(topics: Subscriptions, topic: Topic) -> Subscriptions:
    """Return the subscriptions of a client that ends the one to `topic`; a dictionary is changed in place."""
    if isinstance(topics, tuple):
        return tuple(one for one in topics if one is not topic)
    del topics[topic]
    return topics


def subscribe(client: RequestingClient, packet: bytes) -> bool:
    """Handle a Subscribe packet: the answer is a Suback with the topic's id, or with 0 when it is denied."""
    name = smq.name(packet)
    topic = client.broker.topic_table.by_name.get(name)
    if topic and topic in client.topics:
        send_answer(client, smq.ack(Type.SUBACK, topic.id, name))
        return False
    if client.identity is not None and not client_limits.may_subscribe(client, name):
        deny_subscription(client, name)
        return False
    hook = client.broker.hooks.permittop
    if hook is None:
        _answer_subscribe(client, name, True)
        return False
    return client.ask(hook, (name, True, client), lambda permitted: _answer_subscribe(client, name, permitted))


def _answer_subscribe(client: RequestingClient, name: bytes, permitted: Any) -> None:
    """Subscribe the client to `name` if the hook has `permitted` it and no limit is reached; otherwise deny it."""
    broker = client.broker
    table = broker.topic_table
    if len(client.topics) >= broker.limits.subscriptions:
        broker.refuse(client, CLIENT_SUBSCRIPTIONS)
        permitted = False
    elif not permitted:
        broker.count_denial(client, "subscribe to", "topic", name)
    if not permitted or not _may_name(client, table, name):
        deny_subscription(client, name)
        return
    topic, saving = table.named(name), table.unsaved(name)
    if saving is None and not client.unsaved_answers:
        _send_suback(client, topic, name, True)
    else:
        when_saved(client, saving, lambda saved: _send_suback(client, topic, name, saved))


def _send_suback(client: RequestingClient, topic: Topic, name: bytes, saved: bool) -> None:
    broker = client.broker
    # The client may have sent the same Subscribe twice before the name was saved.
    is_new = saved and topic not in client.topics
    if is_new:
        client.topics = with_topic(client.topics, topic)
        broker.subscribed(topic, client.outbox)
        if topic.observers:
            topic.notify(client)  # before the Suback; other observers are notified at the end of the turn
    client.outbox.reply(smq.ack(Type.SUBACK, topic.id if saved else NO_ID, name))
    if is_new and (broker.last_values is not None or broker.devices is not None):
        broker.send_last_values(topic, client.outbox)


def unsubscribe(client: RequestingClient, packet: bytes) -> None:
    """Handle an Unsubscribe packet."""
    topic = client.broker.topic_table.get(smq.u32(packet))
    if topic and topic in client.topics:
        client.topics = without_topic(client.topics, topic)
        client.broker.unsubscribed(topic, client.outbox)


def create(client: RequestingClient, packet: bytes) -> bool:
    """Handle a Create packet: the answer is a Createack with the topic's id, or with 0 when it is denied."""
    name, table = smq.name(packet), client.broker.topic_table
    if client.identity is not None and not client_limits.may_create(client, name):
        send_answer(client, smq.ack(Type.CREATEACK, NO_ID, name))
        return False

    def send_createack(permitted: Any) -> None:
        if not permitted:
            client.broker.count_denial(client, "create", "topic", name)
        number = table.named(name).id if permitted and _may_name(client, table, name) else NO_ID
        send_acknowledgement(client, Type.CREATEACK, number, name, table.unsaved(name))

    return client.ask(client.broker.hooks.permittop, (name, False, client), send_createack)


def create_subtopic(client: RequestingClient, packet: bytes) -> bool:
    """Handle a Createsub packet: the answer is a Createsuback with the sub-topic's id, or with 0 when it is denied."""
    name, table = smq.name(packet), client.broker.subtopic_table
    hook = None if table.by_name.get(name) else client.broker.hooks.permitsubtop

    def send_createsuback(permitted: Any) -> None:
        if not permitted:
            client.broker.count_denial(client, "create", "sub-topic", name)
        number = table.named(name) if permitted and _may_name(client, table, name) else NO_ID
        send_acknowledgement(client, Type.CREATESUBACK, number, name, table.unsaved(name))

    return client.ask(hook, (name, client), send_createsuback)


def _may_name(client: RequestingClient, table: Topics | SubTopics, name: bytes) -> bool:
    """Whether the client may use `name`; a new one counts against its limits."""
    if name in table.by_name:
        return True
    limits = client.broker.limits
    reached = limits.of_all(table, name) or limits.of_client(client.names_made, client.names_made_bytes, name)
    if reached:
        client.broker.refuse(client, reached)
        return False
    client.names_made += 1
    client.names_made_bytes += len(name)
    return True


# ---- observing


def observe(client: RequestingClient, packet: bytes) -> None:
    """Handle an Observe packet: the answer is a Change with the number of subscribers, 0 when it is denied."""
    number = smq.u32(packet)
    topic = client.broker.topic_table.get(number)
    if topic is None or (client.identity is not None and not client_limits.may_observe(client, topic)):
        send_answer(client, smq.change(number, 0))
    elif topic is not client.topic:
        if client.observed is None:
            client.observed = set()
        if topic not in client.observed and len(client.observed) >= client.broker.limits.observes:
            client.broker.refuse(client, CLIENT_OBSERVES)  # the client gets the present number, and no later change
        else:
            client.observed.add(topic)
            client.broker.add_observer(topic, client)
        if topic.name is not None:
            send_answer(client, smq.change(number, topic.counted))


def unobserve(client: RequestingClient, packet: bytes) -> None:
    """Handle an Unobserve packet."""
    topic = client.broker.topic_table.get(smq.u32(packet))
    if topic and client.observed and topic in client.observed:
        client.observed.discard(topic)
        topic.unobserve(client)


# ---- other packets


def publish_fragment(client: RequestingClient, packet: bytes) -> bool:
    """Handle a PubFrag packet: keep its payload, or publish the message that it completes."""
    if not client.outbox.takes_fragments:
        raise ProtocolError(CloseReason.FRAGMENT_NOT_ALLOWED, "PubFrag is for raw sockets")
    if len(packet) < _FRAGMENT_HEADER_BYTES:
        raise ProtocolError(CloseReason.SHORT_PACKET)
    if client.fragments is None:
        client.fragments = bytearray()
    client.fragments += packet[_FRAGMENT_HEADER_BYTES:]
    limits = client.broker.publish_limits
    max_bytes = smq.MAX_PAYLOAD_BYTES if limits is None else limits.message_bytes
    if len(client.fragments) > max_bytes:
        raise ProtocolError(CloseReason.FRAGMENT_TOO_LARGE, f"fragments of more than {max_bytes} bytes")
    if packet[1:5] == _NO_TID:
        return False
    # The last fragment has the header of a Publish packet, except for its type.
    payload, client.fragments = bytes(client.fragments), None
    whole = smq.frame(bytes((Type.PUBLISH,)) + packet[1:_FRAGMENT_HEADER_BYTES] + payload)
    recorder = client.broker.recorder
    return recorder.record_assembled(client.publish, whole) if recorder else client.publish(whole)


def ping(client: RequestingClient, packet: bytes) -> None:
    """Handle a Ping packet: the answer is a Pong."""
    send_answer(client, smq.PONG)


def pong(client: RequestingClient, packet: bytes) -> None:
    """Ignore a Pong packet; the check for idle clients reads the time of the last received data from the kernel."""


def disconnect(client: RequestingClient, packet: bytes) -> None:
    """Handle a Disconnect packet."""
    client.disconnect(CloseReason.CLIENT_DISCONNECT)


HANDLERS: dict[int, Callable[[RequestingClient, bytes], bool | None]] = {
    Type.SUBSCRIBE: subscribe,
    Type.CREATE: create,
    Type.CREATESUB: create_subtopic,
    Type.UNSUBSCRIBE: unsubscribe,
    Type.DISCONNECT: disconnect,
    Type.PING: ping,
    Type.PONG: pong,
    Type.OBSERVE: observe,
    Type.UNOBSERVE: unobserve,
    Type.PUBFRAG: publish_fragment,
}
"""Handlers of the packets of a connected client, by packet type."""
