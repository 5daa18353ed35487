"""Send queue of an MQTT client: messages and subscriptions, in the order of the calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import gevent
from gevent.event import Event

from smqrt.clients.mqtt.options import MqttOptions
from smqrt.errors import QueueFullError
from smqrt.wire.mqtt.client import MqttClientEndpoint
from smqrt.wire.mqtt.properties import Props
from smqrt.wire.mqtt.reasons import FIRST_FAILURE
from smqrt.wire.mqtt.session import OutgoingMessage
from smqrt.wire.mqtt.topics import Routes

HEADER_BYTES = 10  # the most that PUBLISH has beside topic, properties and payload


class Delivery(OutgoingMessage):
    """Delivery of a published message.

    Attributes:
        done: QoS 0: the message was handed to the operating system; QoS 1 and 2: the broker has acknowledged it; or it
            failed.
        error: why it failed: "dropped" (the queue was full, and a newer message took its place), "closed" (the client
            ended first), "toolarge" (for this client or for the broker), or the reason code of the broker as an int;
            else None.
        size_bytes: topic, payload and properties.
    """

    __slots__ = ("_event", "done", "error")

    def __init__(self, topic: bytes, payload: bytes, qos: int, retain: bool, properties: bytes) -> None:
        super().__init__(topic, payload, qos, retain, properties)
        self.done = False
        self.error: str | int | None = None
        self._event: Event | None = None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the message is done, at most `timeout` seconds.

        Returns:
            True when it was delivered, False when it failed or time ran out.
        """
        if not self.done:
            if self._event is None:
                self._event = Event()
            self._event.wait(timeout)
        return self.done and self.error is None

    def finish(self, error: str | int | None = None) -> None:
        """Set the outcome; called by the session."""
        self.done, self.error = True, error
        if self._event is not None:
            self._event.set()


OnSuback = Callable[[str, int, Props], object]
"""`f(topic, reason, properties)`; the reason is the granted QoS, or a failure from 128 on."""


class SubscribeRequest(NamedTuple):
    """SUBSCRIBE (options is an int) or UNSUBSCRIBE (options is None), and the callback for the answer."""

    topic: str
    options: int | None
    properties: Props
    callback: OnSuback | None = None


class MqttSubscriptions:
    """Subscriptions that the application wants, and the requests that the broker has not answered.

    Requests that are not sent yet are in the send queue, in the order of the calls.

    Args:
        keeps: send unanswered requests again on the next connection, and all subscriptions when the session is lost.

    Attributes:
        routes: the callbacks of single subscriptions.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self._wanted: dict[str, SubscribeRequest] = {}
        self._asked: dict[int, SubscribeRequest] = {}
        self.routes = Routes()

    def add(self, request: SubscribeRequest) -> None:
        """Add a request of the application."""
        self._wanted.pop(request.topic, None)
        if request.options is not None:
            self._wanted[request.topic] = request

    def sent(self, packet_identifier: int, request: SubscribeRequest) -> None:
        """Note that a request was sent."""
        self._asked[packet_identifier] = request

    def answered(self, packet_identifier: int, reason: int) -> SubscribeRequest | None:
        """Return the request that the broker answered.

        A subscription that the broker refused or ended is removed, unless the application has requested it again.
        """
        request = self._asked.pop(packet_identifier, None)
        if request is None or request.options is not None and reason < FIRST_FAILURE:
            return request
        if self._wanted.get(request.topic) in (None, request):
            was_wanted = self._wanted.pop(request.topic, None) is request
            if was_wanted or request.options is None:
                self.routes.remove(request.topic)
        return request

    @property
    def is_answered(self) -> bool:
        """Whether the broker has answered every request."""
        return not self._asked

    def lost(self) -> list[SubscribeRequest]:
        """Handle a lost connection; return the requests to send again, before everything queued."""
        again = list(self._asked.values()) if self._keeps else []
        self._asked.clear()
        return again

    def session_lost(self, waiting: Iterable[object]) -> list[SubscribeRequest]:
        """Handle a connection without a session; return the requests to send before everything queued.

        Args:
            waiting: the queue; requests in it are not repeated.
        """
        if not self._keeps:
            return []
        open_topics = {item.topic for item in waiting if isinstance(item, SubscribeRequest)}
        return [item._replace(callback=None) for topic, item in self._wanted.items() if topic not in open_topics]


class SendQueue:
    """Send queue of one client, over all its connections.

    Args:
        options: `queuesize`, `queuebytes`, `queuefull`, and `timeout` for publishers that wait. Bytes that are sent and
            not acknowledged count as well.
        endpoint: sends the items.
        subscriptions: notes the requests that were sent.

    Attributes:
        is_sending: whether messages may be sent: the application has accepted the connection.
        items: the queue, the next one first.
        dropped: how many messages were dropped for newer ones.
        refused: how many times there was no room.
    """

    def __init__(self, options: MqttOptions, endpoint: MqttClientEndpoint, subscriptions: MqttSubscriptions) -> None:
        self._options, self._endpoint, self._subscriptions = options, endpoint, subscriptions
        self.items: deque[Delivery | SubscribeRequest] = deque()
        self.is_sending = False
        self.dropped = self.refused = 0
        self._size_bytes = 0
        self._waiters, self._is_closed = 0, False
        self._room, self._progress = Event(), Event()

    def __len__(self) -> int:
        return len(self.items)

    @property
    def _in_flight_bytes(self) -> int:
        return self._endpoint.session.in_flight_bytes

    def make_room(self, size_bytes: int) -> None:
        """Make room for a message by the policy `queuefull`; may wait.

        Args:
            size_bytes: of the message; 0 for a subscription.

        Raises:
            QueueFullError: no room, and the queue is not closed.
        """
        if self._has_room(size_bytes):
            return
        if self._options.queuefull == "drop":
            self._drop(size_bytes)
        elif self._options.queuefull == "wait" and gevent.getcurrent() is not gevent.get_hub():  # the loop can't wait
            self._wait(size_bytes)
        if not self._has_room(size_bytes) and not self._is_closed:
            self.refused += 1
            raise QueueFullError(
                f"{len(self.items)} messages with {self._size_bytes} bytes are queued, and {self._in_flight_bytes} "
                f"bytes are not acknowledged: no room within queuesize={self._options.queuesize} and "
                f"queuebytes={self._options.queuebytes}; publish more slowly, or raise these options"
            )

    def _has_room(self, size_bytes: int) -> bool:
        options, held_bytes = self._options, self._size_bytes + self._in_flight_bytes
        return len(self.items) < options.queuesize and (not held_bytes or held_bytes + size_bytes <= options.queuebytes)

    def _drop(self, size_bytes: int) -> None:
        while not self._has_room(size_bytes):
            oldest = next((item for item in self.items if isinstance(item, Delivery)), None)
            if oldest is None:
                return
            self.items.remove(oldest)
            self._size_bytes -= oldest.size_bytes
            self.dropped += 1
            oldest.finish("dropped")

    def _wait(self, size_bytes: int) -> None:
        self._waiters += 1
        try:
            with gevent.Timeout(self._options.timeout, False):  # type: ignore[arg-type]  # False: leave the block quietly
                while not self._has_room(size_bytes) and not self._is_closed:
                    self._room.clear()
                    self._room.wait()
        finally:
            self._waiters -= 1

    def wake_waiters(self) -> None:
        """Wake the publishers that wait: there may be room now."""
        if self._waiters:
            self._room.set()

    def close(self) -> None:
        """Take no more items, and wake the publishers that wait."""
        self._is_closed = True
        self.wake_waiters()

    def send_at_once(self, item: Delivery) -> bool:
        """Send a message if nothing is queued before it and the broker may receive it; return whether it was sent."""
        if self.items or not self.is_sending or not self._endpoint.can_send(item.qos):
            return False
        if item.qos and self._in_flight_bytes + item.size_bytes > self._options.queuebytes:
            return False
        self._endpoint.send(item)
        return True

    def put(self, item: Delivery | SubscribeRequest) -> None:
        """Append an item that there is room for, and send what may be sent."""
        self.items.append(item)
        if isinstance(item, Delivery):
            self._size_bytes += item.size_bytes
        self.pump()

    def pump(self) -> None:
        """Send as much as may be sent now."""
        endpoint, items = self._endpoint, self.items
        if self.is_sending:
            endpoint.send_again()
        while items:
            item = items[0]
            if isinstance(item, SubscribeRequest):
                if not endpoint.can_ask:
                    break
                self._ask(item)
            elif self.is_sending and endpoint.can_send(item.qos):
                self.take()
                endpoint.send(item)
            else:
                break
        self.wake_waiters()
        if not items:
            self._progress.set()

    def _ask(self, request: SubscribeRequest) -> None:
        self.take()
        if request.options is None:
            number = self._endpoint.unsubscribe(request.topic, request.properties)
        else:
            number = self._endpoint.subscribe(request.topic, request.options, request.properties)
        self._subscriptions.sent(number, request)
        if not number:
            self._endpoint.answer_too_large()

    @property
    def is_drained(self) -> bool:
        """Whether every message is sent, and acknowledged with QoS 1 and 2, and every subscription is answered."""
        endpoint = self._endpoint
        return (
            self._subscriptions.is_answered
            and not (self.items or endpoint.session.in_flight)
            and not (endpoint.is_open and endpoint.has_output)
        )

    def wait_progress(self) -> None:
        """Wait until `is_drained`, or another condition of a caller, may have changed."""
        self._progress.clear()
        self._progress.wait()

    def notify_progress(self) -> None:
        """Wake the callers of `wait_progress`."""
        self._progress.set()

    def put_back(self, requests: list[SubscribeRequest]) -> None:
        """Put requests before everything queued."""
        self.items.extendleft(reversed(requests))

    def take(self) -> Delivery | SubscribeRequest:
        """Remove and return the next item."""
        item = self.items.popleft()
        if isinstance(item, Delivery):
            self._size_bytes -= item.size_bytes
        return item

    def abandon(self) -> int:
        """Fail everything queued with "closed"; return the number of messages and subscriptions."""
        lost = len(self.items)
        while self.items:
            item = self.take()
            if isinstance(item, Delivery):
                item.finish("closed")
        return lost
