"""Send queue: messages and subscriptions in the order in which the application handed them in, bounded."""

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

HEADER_BYTES = 10  # of PUBLISH besides topic, properties and payload, at most


class Delivery(OutgoingMessage):
    """What became of a published message.

    Attributes:
        done: QoS 0: it is with the system's network; QoS 1 and 2: the broker has acknowledged it; or it failed.
        error: why it failed: "dropped" (the queue was full, and a newer message took its place), "closed" (the client
            ended first), "toolarge" (for this client or for the broker), or the broker's reason code as an int; None
            when it did not.
        size_bytes: topic, payload and properties.
    """

    __slots__ = ("_event", "done", "error")

    def __init__(self, topic: bytes, payload: bytes, qos: int, retain: bool, properties: bytes) -> None:
        super().__init__(topic, payload, qos, retain, properties)
        self.done = False
        self.error: str | int | None = None
        self._event: Event | None = None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, at most `timeout` seconds.

        Returns:
            True when it was delivered, False when it failed or time ran out.
        """
        if not self.done:
            if self._event is None:
                self._event = Event()
            self._event.wait(timeout)
        return self.done and self.error is None

    def finish(self, error: str | int | None = None) -> None:
        """Settle it; called by the session."""
        self.done, self.error = True, error
        if self._event is not None:
            self._event.set()


OnSuback = Callable[[str, int, Props], object]
"""`f(topic, reason, properties)`; the reason is the granted QoS, or at least 128: refused."""


class SubscribeRequest(NamedTuple):
    """SUBSCRIBE (options is an int) or UNSUBSCRIBE (options is None), and who waits for the answer."""

    topic: str
    options: int | None
    properties: Props
    callback: OnSuback | None = None


class MqttSubscriptions:
    """What is wanted of the broker, what it has been asked, and what it has granted. What it is still to be asked waits
    among the messages, in the order in which the application called.

    Args:
        keeps: ask again on the next connection what was not answered, and what was granted when the session is lost.

    Attributes:
        routes: the callbacks of single subscriptions.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self._wanted: dict[str, SubscribeRequest] = {}
        self._asked: dict[int, SubscribeRequest] = {}
        self.routes = Routes()

    def add(self, request: SubscribeRequest) -> None:
        """The application asks for it."""
        self._wanted.pop(request.topic, None)
        if request.options is not None:
            self._wanted[request.topic] = request

    def sent(self, packet_identifier: int, request: SubscribeRequest) -> None:
        """The broker has been asked."""
        self._asked[packet_identifier] = request

    def answered(self, packet_identifier: int, reason: int) -> SubscribeRequest | None:
        """The broker answered; what that was the answer to. A subscription that it refused or ended is forgotten,
        unless the application has asked for it anew."""
        request = self._asked.pop(packet_identifier, None)
        if request is None or request.options is not None and reason < FIRST_FAILURE:
            return request
        if self._wanted.get(request.topic) in (None, request):
            was_wanted = self._wanted.pop(request.topic, None) is request
            if was_wanted or request.options is None:
                self.routes.remove(request.topic)
        return request

    @property
    def is_quiet(self) -> bool:
        """Whether the broker has answered all that it was asked."""
        return not self._asked

    def lost(self) -> list[SubscribeRequest]:
        """The connection is gone; returns what is to be asked again, before all that waits."""
        again = list(self._asked.values()) if self._keeps else []
        self._asked.clear()
        return again

    def session_lost(self, waiting: Iterable[object]) -> list[SubscribeRequest]:
        """A connection stands, and the broker knows nothing of earlier ones; returns what is to be asked again, before
        all that waits.

        Args:
            waiting: what is to be sent anyway; requests among it are not repeated.
        """
        if not self._keeps:
            return []
        open_topics = {item.topic for item in waiting if isinstance(item, SubscribeRequest)}
        return [item._replace(callback=None) for topic, item in self._wanted.items() if topic not in open_topics]


class SendQueue:
    """The queue of one client, over all its connections.

    Args:
        options: `queuesize`, `queuebytes`, `queuefull`, and `timeout` for who waits. Bytes that are sent and not
            acknowledged count as well.
        endpoint: where it all goes.
        subscriptions: told what the broker is asked.

    Attributes:
        is_sending: whether messages may go out: the application has accepted the connection.
        items: what waits, the next one first.
        dropped: how many messages were given up for newer ones.
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
        """See to it that there is room for a message; may wait.

        Args:
            size_bytes: of the message; 0 for a subscription.

        Raises:
            QueueFullError: there is none, and the queue is not closed.
        """
        if self._has_room(size_bytes):
            return
        if self._options.queuefull == "drop":
            self._drop(size_bytes)
        elif self._options.queuefull == "wait" and gevent.getcurrent() is not gevent.get_hub():
            self._wait(size_bytes)
        if not self._has_room(size_bytes) and not self._is_closed:
            self.refused += 1
            raise QueueFullError(
                f"{len(self.items)} messages with {self._size_bytes} bytes wait for the broker, and "
                f"{self._in_flight_bytes} bytes for its acknowledgement: no room within "
                f"queuesize={self._options.queuesize} and queuebytes={self._options.queuebytes}; "
                "publish more slowly, or choose larger ones"
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

    def tell_waiters(self) -> None:
        """There may be room now."""
        if self._waiters:
            self._room.set()

    def close(self) -> None:
        """Nobody shall wait any more: nothing more is taken in."""
        self._is_closed = True
        self.tell_waiters()

    def send_at_once(self, item: Delivery) -> bool:
        """Send a message now, if nothing waits before it and the broker may get it; whether it was sent."""
        if self.items or not self.is_sending or not self._endpoint.can_send(item.qos):
            return False
        if item.qos and self._in_flight_bytes + item.size_bytes > self._options.queuebytes:
            return False
        self._endpoint.send(item)
        return True

    def put(self, item: Delivery | SubscribeRequest) -> None:
        """Add what there is room for, and send what may be sent."""
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
        self.tell_waiters()
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
        """Whether everything is sent, acknowledged if it has to be, and every subscription answered."""
        endpoint = self._endpoint
        return (
            self._subscriptions.is_quiet
            and not (self.items or endpoint.session.in_flight)
            and not (endpoint.is_open and endpoint.has_output)
        )

    def wait_progress(self) -> None:
        """Wait until something has changed that `is_drained` and the like may depend on."""
        self._progress.clear()
        self._progress.wait()

    def tell_progress(self) -> None:
        """End `wait_progress`."""
        self._progress.set()

    def put_back(self, requests: list[SubscribeRequest]) -> None:
        """Put subscriptions before all that waits."""
        self.items.extendleft(reversed(requests))

    def take(self) -> Delivery | SubscribeRequest:
        """Take the next one."""
        item = self.items.popleft()
        if isinstance(item, Delivery):
            self._size_bytes -= item.size_bytes
        return item

    def give_up(self) -> int:
        """Fail all that waits with "closed"; returns how many messages and subscriptions that were."""
        lost = len(self.items)
        while self.items:
            item = self.take()
            if isinstance(item, Delivery):
                item.finish("closed")
        return lost
