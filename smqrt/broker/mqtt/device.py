"""The session of an MQTT client, which may outlive its connections (MQTT 5 §4.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from smqrt.auth.identity import Action, Identity
from smqrt.broker.mqtt.connected_client import ConnectedClient, OriginFilter
from smqrt.broker.mqtt.filters import Delivery, Options
from smqrt.broker.mqtt.ledger import Row, SessionRows
from smqrt.broker.mqtt.messages import LARGE_BYTES, MAX_NUMBER, MESSAGE_BYTES, NO_EXPIRY_S, Message, Run
from smqrt.broker.mqtt.wills import Will
from smqrt.broker.outbox import Drop, run_in_background
from smqrt.errors import MqttError
from smqrt.wire.mqtt.fields import PacketType, Reason

if TYPE_CHECKING:
    from smqrt.broker.mqtt.devices import Devices
    from smqrt.broker.mqtt.retained import RetainedFeed

NEVER_S = 0xFFFFFFFF
"""The session expiry that means that a session does not expire."""
MAX_LARGE_BYTES = 1 << 20
"""Payloads of large messages in flight; with so many bytes, a client gets the next message after an acknowledgement."""
FED_MESSAGES = 50
"""Retained messages that are looked up and sent together."""
WRITE_BYTES = 16 << 10
"""Messages that have waited are sent in writes of about this size: between two, the room in the queue is checked."""
_FIRST_ANSWER = {1: PacketType.PUBACK, 2: PacketType.PUBREC}
"""The answer to PUBLISH, by QoS."""
_ANSWERED_QOS: dict[int, int] = {PacketType.PUBACK: 1, PacketType.PUBREC: 2, PacketType.PUBCOMP: 0}
"""The QoS of messages that an answer completes; 0 for those after PUBREC."""
_NO_MESSAGES: deque[Message] = deque()
_NO_FEEDS: deque[RetainedFeed] = deque()
_NO_NUMBERS: Set[int] = frozenset()
_UNKNOWN: Any = object()
_NOTHING_IN_FLIGHT: Any = MappingProxyType({})
_NOTHING_UNSENT: Any = ()
"""Shared by sessions without any, which saves 1.5 KB for each; never written to."""


class Device:
    """The session of one MQTT client.

    Args:
        devices: the sessions of the hub.
        client_id: the client id.

    Attributes:
        client: the connected client; None while there is none.
        etid: the ETID of the last connection.
        identity: the identity of the last connection; None without users, and for a session from a file.
        is_checked: whether it has a filter that matches topics which the client may not read (`mqtt.acl`).
        user: the user who owns the session; None for anonymous clients.
        version: the version of the last connection: 3, 4 or 5.
        subscriptions: options by filter, as the client has written it.
        wildcards: the number of `+` in these.
        in_flight: messages that wait for an acknowledgement, by packet identifier; None after PUBREC.
        large_bytes: the payloads above `LARGE_BYTES` among these.
        waiting: messages that wait for the client, or for room among those in flight.
        waiting_bytes: their memory, approximately.
        unreleased: packet identifiers of received QoS 2 messages without PUBREL.
        expiry_s: seconds for which the session is kept without a connection; 0 ends it with the connection.
        left_s: when the last connection ended, on the clock of the broker; 0 when that is unknown.
        ends_s: when the session ends, on the clock of the broker, while there is no connection.
        will: the will of the connection.
        dropped: messages that were lost because too many waited.
        is_pressed: whether publishers wait because many messages wait here, see `Devices.pressed`.
        is_stuck: whether they have waited for the maximum time; they do not wait again until the session has room.
        rows: its messages in the `persist` file; None for a session that is not kept there.
        origins: decides by their ids which messages with QoS 1 and 2 the session gets; None for all.
    """

    __slots__ = (
        "_stored_bytes",
        "_unsent",
        "last_number",
        "client",
        "client_id",
        "devices",
        "dropped",
        "ends_s",
        "etid",
        "expiry_s",
        "feeds",
        "identity",
        "in_flight",
        "is_checked",
        "is_feeding",
        "is_pressed",
        "is_stuck",
        "large_bytes",
        "origins",
        "rows",
        "left_s",
        "subscriptions",
        "unreleased",
        "user",
        "version",
        "waiting",
        "waiting_bytes",
        "wildcards",
        "will",
    )

    def __init__(self, devices: Devices, client_id: str) -> None:
        self.devices, self.client_id = devices, client_id
        self.client: ConnectedClient | None = None
        self.user: str | None = None
        self.identity: Identity | None = None
        self.is_checked = False
        self.version = 4
        self.subscriptions: dict[str, Options] = {}
        self.in_flight: dict[int, Message | None] = _NOTHING_IN_FLIGHT
        self.waiting = _NO_MESSAGES
        self.waiting_bytes = self.last_number = self.dropped = self.etid = self.wildcards = 0
        self.large_bytes = self._stored_bytes = 0
        self._unsent: list[int] = _NOTHING_UNSENT  # packet identifiers in flight that this connection has not seen yet
        self.unreleased: Set[int] = _NO_NUMBERS
        self.expiry_s = 0
        self.ends_s = NO_EXPIRY_S
        self.left_s = 0.0
        self.will: Will | None = None
        self.feeds = _NO_FEEDS
        self.is_feeding = self.is_pressed = self.is_stuck = False
        self.rows: SessionRows | None = None
        self.origins: OriginFilter | None = None

    # ---- messages to the client

    def deliver(self, run: Run, one: Delivery, is_chosen: bool = False) -> None:
        """Send a batch to the client, or keep it for the client: messages with QoS 0 only while it is connected.

        Args:
            run: the batch.
            one: how the client subscribes.
            is_chosen: whether no other client of the shared subscription gets it.
        """
        client = self.client
        if one.no_local and run.publisher == self.etid:
            if one.own is None:  # [MQTT-3.8.3-3]
                return
            one = one.own
        qos, retain = min(one.qos, run.qos), run.retain and one.retain_as_published
        if not qos:
            if client is not None:
                client.send_run(run, retain, one.identifiers)
            return
        if self.origins is not None and not is_chosen:
            for message in run.messages(qos, retain, one.identifiers):
                if self.origins.takes(message.origin):
                    self.enqueue(message)
            return
        room = 0 if client is None or self.waiting or self._unsent else self._room
        if not room:
            self._keep_all(run.messages(qos, retain, one.identifiers), run.size_bytes)
            return
        assert client is not None
        is_plain = self.rows is None and not (client.peer_limit_bytes or client.max_aliases_out or run.is_large)
        if is_plain and run.is_short:
            self._send_one(client, run.messages(qos, retain, one.identifiers)[0], run.now_s)
            return
        if is_plain and run.count <= room:
            numbered = run.numbered(self.version, qos, retain, one.identifiers, self.last_number + 1)
            if numbered is not None and self._take_numbers(numbered[0]):
                client.send_encoded(numbered[1])
                return
        messages = run.messages(qos, retain, one.identifiers)
        if client.peer_limit_bytes:
            for message in messages:
                self.enqueue(message)
        else:
            self._send_all(client, messages[:room], run.now_s)
            self._keep_all(messages[room:])

    def _send_one(self, client: ConnectedClient, message: Message, now_s: float) -> None:
        """Send a message with QoS 1 or 2 of a session without `rows` and topic aliases."""
        number = self._new_number()
        self.in_flight[number] = message
        before, after = message.parts(self.version, now_s)
        client.send_encoded(before + number.to_bytes(2) + after)

    def _take_numbers(self, messages: dict[int, Message]) -> bool:
        """Add messages in flight with their packet identifiers, if these are free; return whether they are."""
        if self.in_flight is _NOTHING_IN_FLIGHT:
            self.in_flight = {}
        elif not self.in_flight.keys().isdisjoint(messages):
            return False
        self.in_flight.update(messages)
        self.last_number = next(reversed(messages))
        return True

    def _send_all(self, client: ConnectedClient, messages: list[Message], now_s: float) -> None:
        """Send messages with QoS 1 or 2 in one write; with `rows`, those that must wait for the disk later."""
        rows, version = self.rows, self.version
        if rows is None and not client.max_aliases_out and self._send_shared(client, messages):
            return
        packets: list[bytes] = []
        aliases = client.max_aliases_out
        for number, message in zip(self._new_numbers(len(messages)), messages, strict=True):
            self._add_in_flight(number, message)
            if rows is not None:
                rows.send(number, message)
                if rows.must_wait(number):
                    rows.ledger.hold_message(self, client, number)
                    continue
            alias = client.alias_of(message.name) if aliases else 0
            before, after = message.parts(version, now_s, alias)
            packets += (before, number.to_bytes(2), after)
        if packets:
            client.send_encoded(b"".join(packets))

    def _send_shared(self, client: ConnectedClient, messages: list[Message]) -> bool:
        """Send messages with the bytes that other sessions have sent; return false when these would be different."""
        shared, version, number = self.devices.shared_rows, self.version, self.last_number + 1
        if number + len(messages) > MAX_NUMBER:
            return False
        row = shared.find(messages, version, number) or shared.encode(messages, version, number)
        if row is None or not self._take_numbers(row.by_number):
            return False
        client.send_encoded(row.packets)
        return True

    def enqueue(self, message: Message) -> None:
        """Send a message with QoS 1 or 2, or let it wait; the oldest one is lost when too many wait."""
        if not self.waiting and not self._unsent and self._room:
            self._transmit(message)
        else:
            self._keep_all([message])

    def _keep_all(self, messages: list[Message], size_bytes: int = -1) -> None:
        """Let messages wait; the oldest ones are lost when too many wait.

        Args:
            messages: the messages.
            size_bytes: the sum of their `size_bytes`; -1 when it is unknown.
        """
        devices = self.devices
        if devices.sessions.get(self.client_id) is not self:  # it has ended: nothing would remove them
            return
        if self.waiting is _NO_MESSAGES:
            self.waiting = deque()
        self.waiting += messages
        if size_bytes < 0:
            size_bytes = sum([message.size_bytes for message in messages])
        size = size_bytes + MESSAGE_BYTES * len(messages)
        self.waiting_bytes += size
        devices.waiting_bytes += size
        if self.rows is not None:
            for message in messages:
                self.rows.keep(message)
        limits = devices.limits
        if len(self.waiting) << 1 > limits.queued_messages or self.waiting_bytes << 1 > limits.queued_bytes:
            devices.pressed(self)
            self.drop_excess()
        elif devices.waiting_bytes > limits.total_queued_bytes:
            self.drop_excess()

    def drop_excess(self) -> None:
        """Remove the oldest messages that wait, above the limits."""
        while self.waiting and self._is_over_limit():
            self._next_waiting()
            if self.rows is not None:
                self.rows.drop_first()
            self.dropped += 1
            self.devices.session_overflowed(self)

    def keep(self, message: Message) -> None:
        """Append a message to those that wait, unless the session has ended: then nothing would remove it."""
        if self.devices.sessions.get(self.client_id) is not self:
            return
        if self.waiting is _NO_MESSAGES:
            self.waiting = deque()
        self.waiting.append(message)
        size = message.size_bytes + MESSAGE_BYTES
        self.waiting_bytes += size
        self.devices.waiting_bytes += size
        if self.rows is not None:
            self.rows.keep(message)

    def _next_waiting(self) -> Message:
        """Remove and return the message that has waited longest."""
        message = self.waiting.popleft()
        size = message.size_bytes + MESSAGE_BYTES
        self.waiting_bytes -= size
        self.devices.waiting_bytes -= size
        return message

    def take_waiting(self, size_bytes: int) -> list[Message]:
        """Remove and return the oldest messages that wait, at least one, of about so many bytes."""
        taken: list[Message] = []
        while self.waiting and size_bytes > 0:
            taken.append(self._next_waiting())
            if self.rows is not None:
                self.rows.drop_first()
            size_bytes -= taken[-1].size_bytes + MESSAGE_BYTES
        return taken

    def _is_over_limit(self) -> bool:
        limits = self.devices.limits
        if len(self.waiting) > limits.queued_messages or self.waiting_bytes > limits.queued_bytes:
            return True
        return self.devices.waiting_bytes > limits.total_queued_bytes

    def forget_in_flight(self) -> None:
        """Remove the messages in flight: they have moved to another node."""
        if self.rows is not None:
            for number in self.in_flight:
                self.rows.complete(number)
        self.in_flight = _NOTHING_IN_FLIGHT
        self.large_bytes = 0
        self._count_stored(0)

    def forget_messages(self) -> None:
        """Remove all messages: the session has ended."""
        self.devices.waiting_bytes -= self.waiting_bytes
        self.waiting_bytes = 0
        self.waiting = _NO_MESSAGES
        self.forget_in_flight()
        if self.rows is not None:
            self.rows.forget()
            self.rows = None

    @property
    def is_blank(self) -> bool:
        """Whether it has neither subscriptions nor messages nor packet identifiers."""
        return not (self.subscriptions or self.in_flight or self.waiting or self.unreleased)

    @property
    def _can_send(self) -> bool:
        client = self.client
        return client is not None and len(self.in_flight) - len(self._unsent) < client.window and client.has_room

    @property
    def _room(self) -> int:
        """The number of messages that the client takes now."""
        client = self.client
        room = client.window - len(self.in_flight) + len(self._unsent) if client is not None else 0
        if room <= 0 or self.large_bytes >= MAX_LARGE_BYTES:
            return 0
        assert client is not None
        return room if client.has_room else 0

    def _add_in_flight(self, number: int, message: Message) -> None:
        self.in_flight[number] = message
        if len(message.payload) > LARGE_BYTES:
            self.large_bytes += len(message.payload)

    def _remove_in_flight(self, number: int) -> None:
        message = self.in_flight.pop(number)
        if message is not None and len(message.payload) > LARGE_BYTES:
            self.large_bytes -= len(message.payload)

    def _transmit(self, message: Message, has_waited: bool = False) -> None:
        """Send a message; one that has waited is removed from `waiting` already."""
        client, rows = self.client, self.rows
        assert client is not None
        number = self._new_number() if message.qos else 0
        if rows is not None and number:
            self._add_in_flight(number, message)
            if has_waited:
                rows.send_first(number)
            else:
                rows.send(number, message)
            self._send_row(rows, client, number, False)
        elif client.send_message(message, number, False) and number:
            self._add_in_flight(number, message)

    def _send_row(self, rows: SessionRows, client: ConnectedClient, number: int, is_dup: bool) -> None:
        """Send a message in flight or PUBREL; with QoS 2, when the disk has the row."""
        message = self.in_flight[number]
        if rows.must_wait(number):
            rows.ledger.hold_message(self, client, number, is_dup)
        elif message is None:
            client.send_release(number)
        elif not client.send_message(message, number, is_dup):
            self._remove_in_flight(number)
            rows.complete(number)

    def send_saved(self, row: Row, client: ConnectedClient, number: int, is_dup: bool) -> None:
        """Send a message or PUBREL whose row is saved now, unless the client has another connection meanwhile."""
        row.is_held = False
        rows = self.rows
        if rows is None or rows.sent.get(number) is not row:
            return
        if self.client is client:
            self._send_row(rows, client, number, is_dup)
            if number not in self.in_flight:  # larger than the client takes
                self.pump()
        elif self.client is not None and number not in self._unsent:
            self._send_row(rows, self.client, number, True)

    def _new_number(self) -> int:
        """Return a free packet identifier; the window is smaller than their number, so there is one."""
        if self.in_flight is _NOTHING_IN_FLIGHT:
            self.in_flight = {}
        number = self.last_number
        while True:
            number = number % MAX_NUMBER + 1
            if number not in self.in_flight:
                self.last_number = number
                return number

    def _new_numbers(self, count: int) -> Sequence[int]:
        """Return free packet identifiers, see `_new_number`."""
        if self.in_flight is _NOTHING_IN_FLIGHT:
            self.in_flight = {}
        first = self.last_number + 1
        numbers = range(first, first + count)
        if first + count <= MAX_NUMBER and self.in_flight.keys().isdisjoint(numbers):
            self.last_number += count
            return numbers
        return [self._new_number() for _ in numbers]

    def pump(self) -> None:
        """Send messages that wait, as far as there is room."""
        if self._unsent:
            self._send_again()
        while self.waiting and not self._unsent and (room := self._room):
            if self.client is not None and self.rows is None and not self.client.peer_limit_bytes:
                self._send_waiting(self.client, room)
                continue
            message = self._next_waiting()
            if message.expires_s > self.devices.broker.clock():
                self._transmit(message, has_waited=True)
            elif self.rows is not None:
                self.rows.drop_first()
        if self.is_pressed:
            limits = self.devices.limits
            if len(self.waiting) << 2 < limits.queued_messages and self.waiting_bytes << 2 < limits.queued_bytes:
                self.devices.relieved(self)
        if self.feeds and not self.is_feeding and self.client is not None:
            self.is_feeding = True
            run_in_background(self._feed())

    def _send_waiting(self, client: ConnectedClient, room: int) -> None:
        """Send messages that wait in one write, at most `WRITE_BYTES` and one more, of a session without `rows`."""
        if not client.max_aliases_out and self._send_shared_waiting(client, room):
            return
        now_s, size = self.devices.broker.clock(), 0
        messages: list[Message] = []
        while self.waiting and len(messages) < room and size < WRITE_BYTES:
            message = self.waiting.popleft()
            size += message.size_bytes + MESSAGE_BYTES
            if message.expires_s > now_s:
                messages.append(message)
        self.waiting_bytes -= size
        self.devices.waiting_bytes -= size
        if messages:
            self._send_all(client, messages, now_s)

    def _send_shared_waiting(self, client: ConnectedClient, room: int) -> bool:
        """Do what `_send_waiting` does with the bytes of another session; return false when there are none."""
        waiting = self.waiting
        row = self.devices.shared_rows.beginning_with(waiting[0], self.version, self.last_number + 1)
        if row is None:
            return False
        count = len(row.messages)
        is_whole = count == room or (count < room and (count == len(waiting) or row.memory_bytes >= WRITE_BYTES))
        if not is_whole or list(islice(waiting, count)) != row.messages or not self._take_numbers(row.by_number):
            return False
        for _ in row.messages:
            waiting.popleft()
        self.waiting_bytes -= row.memory_bytes
        self.devices.waiting_bytes -= row.memory_bytes
        client.send_encoded(row.packets)
        return True

    def feed(self, messages: RetainedFeed) -> None:
        """Send retained messages, as fast as the client reads them; see `RetainedMessages.matching`."""
        if self.feeds is _NO_FEEDS:
            self.feeds = deque()
        same = [one for one in self.feeds if not one.has_begun and one.text == messages.text]
        for one in same:
            if type(one) is type(messages):  # a client may subscribe again and again without reading
                self.feeds.remove(one)
        self.feeds.append(messages)
        self.pump()

    def forget_feeds(self, text: str) -> None:
        """Send no more retained messages for a filter: the client has unsubscribed."""
        if self.feeds:
            self.feeds = deque(one for one in self.feeds if one.text != text)

    def _feed(self) -> Iterator[None]:
        size = 0
        try:
            while self.feeds and not self.waiting and not self._unsent and (room := self._room):
                feed, client = self.feeds[0], self.client
                sent, is_over = self._send_fed(feed, room if feed.options.qos else FED_MESSAGES)
                if is_over:
                    self.feeds.popleft()
                size += sent
                if size >= WRITE_BYTES and client is not None:
                    size = 0
                    client.flush()  # otherwise the queue could fill in this turn, and QoS 0 would be lost
                yield
        finally:
            self.is_feeding = False

    def _send_fed(self, feed: RetainedFeed, room: int) -> tuple[int, bool]:
        """Send some retained messages, at most `room`; return their bytes, and whether there are no more."""
        client, size, is_over = self.client, 0, True
        assert client is not None
        messages: list[Message] = []
        for message in feed:
            if message is not None and self.may_read(message.name):
                messages.append(message)
                size += message.size_bytes
            if message is None or len(messages) >= min(room, FED_MESSAGES) or size >= WRITE_BYTES:
                is_over = False
                break
        now_s = self.devices.broker.clock()
        if self.rows is not None or client.peer_limit_bytes:
            for message in messages:
                self._transmit(message)
        elif messages:
            unnumbered = [message.packet(self.version, 0, False, now_s) for message in messages if not message.qos]
            if unnumbered:
                client.send_unnumbered(b"".join(unnumbered))
            numbered = messages if not unnumbered else [message for message in messages if message.qos]
            if numbered:
                self._send_all(client, numbered, now_s)
        return size, is_over

    # ---- permissions

    def may_read(self, name: bytes) -> bool:
        """Return whether the client may get messages of a topic that one of its filters matches."""
        identity = self.identity
        return not self.is_checked or identity is None or identity.allows(name, Action.READ)

    def may_get(self, name: bytes) -> bool:
        """Return whether the client has a filter that matches a topic, and may read it."""
        found = self.devices.filters.match(name)
        return found is not None and found.has(self) and self.may_read(name)

    def drop_denied(self) -> None:
        """Remove waiting messages that the client may not read now: rights may have changed without a connection."""
        waiting = self.waiting
        if self.is_checked and waiting:
            kept = [one for one in waiting if self.may_read(one.name)]
            if len(kept) == len(waiting):
                return
            self.devices.broker.stats.drop(Drop.DENIED, len(waiting) - len(kept))
            self.take_waiting(self.waiting_bytes)
            for one in kept:
                self.keep(one)

    # ---- acknowledgements of the client

    def acknowledged(self, number: int, kind: int) -> None:
        """Handle PUBACK, PUBCOMP, or PUBREC with a failure: the message is complete. Unknown ones are ignored.

        Raises:
            MqttError: the message has another QoS, or is not that far.
        """
        self.acknowledged_row((number,), kind)

    def acknowledged_row(self, numbers: Sequence[int], kind: int) -> None:
        """Handle acknowledgements of one kind as `acknowledged` does, then send what waits."""
        in_flight, rows, unsent, qos = self.in_flight, self.rows, self._unsent, _ANSWERED_QOS[kind]
        done = 0 if rows is not None or unsent or self.large_bytes or not qos else self._remove_first(numbers, qos)
        for number in numbers[done:]:
            message = in_flight.get(number, _UNKNOWN)
            if message is _UNKNOWN:
                continue
            if (0 if message is None else message.qos) != qos:
                expected = _FIRST_ANSWER[message.qos] if message is not None else PacketType.PUBCOMP
                raise MqttError(Reason.PROTOCOL_ERROR, f"{PacketType(kind).name} instead of {expected.name}")
            del in_flight[number]
            if self.large_bytes and message is not None and len(message.payload) > LARGE_BYTES:
                self.large_bytes -= len(message.payload)
            if rows is not None:
                rows.complete(number)
            if unsent and number in unsent:
                unsent.remove(number)
        if self.waiting or self.feeds or unsent:
            self.pump()

    def _remove_first(self, numbers: Sequence[int], qos: int) -> int:
        """Remove the messages in flight with a QoS up to the first one that is unknown; return their number."""
        in_flight, done = self.in_flight, 0
        for number in numbers:
            message = in_flight.get(number)
            if message is None or message.qos != qos:
                break
            del in_flight[number]
            done += 1
        return done

    def expect_releases(self, numbers: Sequence[int], is_saved: bool = False, origin: int = 0) -> None:
        """Remember messages with QoS 2 of the client until PUBREL.

        Args:
            numbers: their packet identifiers.
            is_saved: whether they are saved in the `persist` file, too.
            origin: the id of the first message in a cluster; 0 for none.
        """
        if is_saved and self.rows is not None:
            position = self.devices.arrivals.position_of(origin)
            for at, number in enumerate(numbers):
                self.rows.expect(number, position and position + at)
        if self.unreleased is _NO_NUMBERS:
            self.unreleased = set()
        self.unreleased.update(numbers)  # type: ignore[attr-defined]

    def released_all(self, numbers: Sequence[int]) -> bool:
        """Handle PUBREL packets if there are messages for all of them; return whether there are."""
        found = set(numbers)
        if len(found) < len(numbers) or not found <= self.unreleased:
            return False
        self.unreleased -= found
        return True

    def released(self, number: int) -> bool:
        """Handle PUBREL; return whether there was such a message."""
        if number not in self.unreleased:
            return False
        self.unreleased.remove(number)  # type: ignore[attr-defined]
        return True

    def received(self, number: int) -> bool:
        """Handle PUBREC; return whether there is such a message.

        Raises:
            MqttError: the message has QoS 1.
        """
        if number not in self.in_flight:
            return False
        message = self.in_flight[number]
        if message is not None:
            if message.qos == 1:
                raise MqttError(Reason.PROTOCOL_ERROR, "PUBREC of a message with QoS 1")
            self._remove_in_flight(number)  # PUBREL packets are sent again in the order of PUBREC [MQTT-4.6.0-4]
            self.in_flight[number] = None
            if self.rows is not None:
                self.rows.receive(number)
        return True

    def received_all(self, numbers: Sequence[int]) -> bool:
        """Handle PUBREC packets of a session without `rows` if there are messages with QoS 2 for all of them.

        Returns:
            Whether there are; otherwise nothing has changed.
        """
        in_flight = self.in_flight
        for number in numbers:
            message = in_flight.get(number)
            if message is None or message.qos == 1:
                return False
        if len(set(numbers)) < len(numbers):
            return False
        for number in numbers:
            self._remove_in_flight(number)  # see `received`
            in_flight[number] = None
        return True

    # ---- connections

    def disconnected(self) -> None:
        """Free what only a connection needs: there may be many sessions without one."""
        self.client = None
        if not self.is_checked:
            self.identity = None
        self._unsent, self.feeds = _NOTHING_UNSENT, _NO_FEEDS
        self.in_flight = self.in_flight or _NOTHING_IN_FLIGHT
        self.waiting = self.waiting or _NO_MESSAGES
        self.unreleased = self.unreleased or _NO_NUMBERS
        self.count_stored()

    def count_stored(self) -> None:
        """Count the memory of the messages in flight and of a delayed will among what waits: there is no connection."""
        messages = [one for one in self.in_flight.values() if one is not None]
        if self.will is not None:
            messages.append(self.will.message)
        self._count_stored(sum(one.size_bytes + MESSAGE_BYTES for one in messages))

    def _count_stored(self, size_bytes: int) -> None:
        self.devices.waiting_bytes += size_bytes - self._stored_bytes
        self._stored_bytes = size_bytes

    def drop_in_flight(self) -> None:
        """Remove the messages in flight: the limit of all sessions is reached, and there is no connection."""
        count = sum(one is not None for one in self.in_flight.values())
        self.forget_in_flight()
        self.dropped += count
        for _ in range(count):
            self.devices.session_overflowed(self)

    def _begin_connection(self, client: ConnectedClient) -> None:
        self.client, self.etid, self.ends_s = client, client.etid, NO_EXPIRY_S
        self._count_stored(0)
        sizes = [len(one.payload) for one in self.in_flight.values() if one is not None]
        self.large_bytes = sum(size for size in sizes if size > LARGE_BYTES)

    @property
    def unsent(self) -> list[int]:
        """Packet identifiers of messages in flight that this connection has not seen yet."""
        return self._unsent

    def not_sent(self, numbers: Iterable[int]) -> None:
        """Send messages in flight later: they have waited for the disk, and do no longer."""
        self._unsent = sorted({*self._unsent, *numbers}, key=list(self.in_flight).index) or _NOTHING_UNSENT

    def continue_with(self, client: ConnectedClient, unsent: list[int]) -> None:
        """Continue with the connection of a client that has migrated; see `unsent`."""
        self._begin_connection(client)
        self._unsent = unsent
        self.devices.groups_changed(self)

    def resume(self, client: ConnectedClient) -> None:
        """Send what is in flight again, in order [MQTT-4.4.0-1], then what waits."""
        self._begin_connection(client)
        self._unsent = list(self.in_flight) or _NOTHING_UNSENT
        self.devices.groups_changed(self)
        self.pump()

    def _send_again(self) -> None:
        """Send messages in flight again, as far as the window of this connection takes them, and all PUBREL packets.

        PUBREL is not limited by the receive maximum (MQTT 5 §4.9), so it does not wait behind a message that is.
        """
        client, left = self.client, list[int]()
        numbers, self._unsent = self._unsent, _NOTHING_UNSENT
        waiting = len(numbers)
        for number in numbers:
            message = self.in_flight[number]
            has_place = client is not None and len(self.in_flight) - waiting < client.window and client.has_room
            if client is None or (message is not None and (left or not has_place)):
                left.append(number)
                continue
            waiting -= 1
            if self.rows is not None:
                self._send_row(self.rows, client, number, True)
            elif message is None:
                client.send_release(number)
            elif not client.send_message(message, number, True):
                self._remove_in_flight(number)
        self._unsent = left or _NOTHING_UNSENT
