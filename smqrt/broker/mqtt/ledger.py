"""Unsaved changes of MQTT sessions, and the packets that wait until they are saved.

A change gets the next number of a sequence. A group of changes is taken in this order and committed at once; then the
packets are sent whose changes it has. See `smqrt.smq.mqtt_file` for the file, and decision 0048 for the reasons.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from struct import unpack
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from smqrt.broker.mqtt.arrivals import KnownNode
from smqrt.broker.mqtt.messages import Mark, Message, MqttBatch

if TYPE_CHECKING:
    from smqrt.broker.mqtt.connected_client import ConnectedClient
    from smqrt.broker.mqtt.device import Device
    from smqrt.broker.mqtt.devices import Devices

WAITING, SENT, RELEASING, RECEIVED = range(4)
"""States of a row: a message that waits for the client, one that is in flight to it, one that waits for PUBCOMP, and
the packet identifier of a received message with QoS 2 that waits for PUBREL."""
MAX_HELD = 1000
"""Acknowledgements of one client that wait for the disk; then the client is not read until half of them are sent."""
MAX_TOTAL_HELD = 100_000
"""Packets of all clients that wait for the disk; then each client waits for its own before it is read again."""
MAX_RELEASED = 64
"""Removed packet identifiers of a session that are remembered, apart from those that are still in the file."""
KEYS_PER_STEP = 50
KEYS_PER_COPY = 1000
"""Changes that are looked up together: a disk that is slow may leave a million."""


class Publisher(Protocol):
    """The client that gets an acknowledgement.

    Attributes:
        held: its acknowledgements that wait for the disk.
    """

    held: int

    def send_held(self, data: bytes) -> None:
        """Send an acknowledgement that has waited."""


class Body:
    """A message in the file.

    Attributes:
        number: its key.
        users: the rows in the file that refer to it.
    """

    __slots__ = ("number", "users")

    def __init__(self, number: int) -> None:
        self.number, self.users = number, 0


class Row:
    """A message in a session, or the packet identifier of a received one.

    Attributes:
        number: its key in the file.
        session: the number of the session.
        position: its place in the order of the session.
        state: one of the states above.
        packet: the packet identifier; 0 while the message waits.
        message: the message; None when only its packet identifier is needed.
        stored: the message of the row in the file.
        seq: the change that has to be saved.
        is_stored: whether the row is in the file, or in a group that is being written.
        is_gone: whether the row is to be removed from the file.
        is_held: whether a packet of this row waits for the disk.
    """

    __slots__ = (
        "is_gone",
        "is_held",
        "is_stored",
        "message",
        "number",
        "packet",
        "position",
        "seq",
        "session",
        "state",
        "stored",
    )

    def __init__(self, number: int, session: int, state: int, packet: int, message: Message | None) -> None:
        self.number = self.position = number
        self.session, self.state, self.packet, self.message = session, state, packet, message
        self.stored: Message | None = None
        self.seq = 0
        self.is_stored = self.is_gone = self.is_held = False


class Group(NamedTuple):
    """Changes that are committed together.

    Attributes:
        through: the number of the last change.
        messages: new messages, with their keys.
        rows: key, session, position, state, packet identifier, and the key of the message or None.
        records: sessions that have changed, by client id; None for those that have ended. See `saved_record`.
        retained: retained messages that have changed, by name; None for those that were deleted.
        gone_rows: keys of rows to remove.
        gone_messages: keys of messages to remove.
        streams: the last numbers of streams whose messages are in this group, see `Arrivals`.
        nodes: whether other hubs of the cluster are known, by their identity.
    """

    through: int
    messages: list[tuple[int, Message]]
    rows: list[tuple[int, int, int, int, int, int | None]]
    records: dict[str, dict[str, Any] | None]
    retained: dict[bytes, Message | None]
    gone_rows: list[int]
    gone_messages: list[int]
    streams: dict[int, int]
    nodes: dict[bytes, bool]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not any(self[1:])


_NO_ROWS: deque[Row] = deque()
"""Shared by sessions without messages that wait: an empty deque takes 760 bytes. Nothing is added to it."""


class SessionRows:
    """The rows of a session that is kept. Its methods follow the messages of a `Device`.

    Args:
        ledger: the changes of the hub.
        number: the number of the session in the file.

    Attributes:
        begun: the change that writes the session for the first time; 0 when the file has had it at the start.
    """

    __slots__ = ("begun", "ledger", "number", "received", "released", "sent", "waiting")

    def __init__(self, ledger: Ledger, number: int) -> None:
        self.ledger, self.number, self.begun = ledger, number, 0
        self.waiting = _NO_ROWS
        self.sent: dict[int, Row] = {}
        self.received: dict[int, Row] = {}
        self.released: dict[int, Row] = {}  # perhaps still in the file

    def keep(self, message: Message) -> None:
        """Add a message that waits."""
        self.append_waiting(self.ledger.add_row(self.number, WAITING, 0, message))

    def append_waiting(self, row: Row) -> None:
        """Add the row of a message that waits."""
        if self.waiting is _NO_ROWS:
            self.waiting = deque()
        self.waiting.append(row)

    def drop_first(self) -> None:
        """Remove the message that has waited longest."""
        self.ledger.remove_row(self.waiting.popleft())

    def send_first(self, packet: int) -> None:
        """The message that has waited longest is in flight now."""
        row = self.sent[packet] = self.waiting.popleft()
        self.ledger.change_row(row, SENT, packet, row.message)

    def send(self, packet: int, message: Message | None) -> None:
        """Add a message in flight."""
        state = RELEASING if message is None else SENT
        self.sent[packet] = self.ledger.add_row(self.number, state, packet, message)

    def receive(self, packet: int) -> None:
        """PUBREC has arrived: only the packet identifier is needed."""
        self.ledger.change_row(self.sent[packet], RELEASING, packet, None)

    def complete(self, packet: int) -> None:
        """Remove a message that was in flight."""
        row = self.sent.pop(packet, None)
        if row is not None:
            self.ledger.remove_row(row)

    def expect(self, packet: int, position: int = 0) -> None:
        """Add the packet identifier of a received message with QoS 2.

        Args:
            packet: the packet identifier.
            position: the lower 64 bits of the id of the message in a cluster; 0 for none.
        """
        if packet not in self.received:
            row = self.received[packet] = self.ledger.add_row(self.number, RECEIVED, packet, None)
            row.position = position or row.position

    def release(self, packet: int) -> bool:
        """Remove the packet identifier of a received message; return whether PUBCOMP waits until the disk has done so.

        Also that for a repeated PUBREL waits: the client may use the identifier again then.
        """
        row = self.received.pop(packet, None)
        if row is not None:
            self.ledger.remove_row(row)
            if len(self.released) >= MAX_RELEASED:
                self.released = {one: last for one, last in self.released.items() if self.ledger.is_unsaved(last)}
            self.released[packet] = row
        last = self.released.get(packet)
        return last is not None and self.ledger.is_unsaved(last)

    def must_wait(self, packet: int) -> bool:
        """Return whether a message in flight can't be sent yet: with QoS 2, the disk has to know its identifier."""
        row = self.sent[packet]
        if not self.ledger.waits or (row.message is not None and row.message.qos < 2):
            return False
        return self.ledger.is_unsaved(row)

    def forget(self) -> None:
        """Remove all rows: the session has ended, or is not kept any more."""
        for row in (*self.waiting, *self.sent.values(), *self.received.values()):
            self.ledger.remove_row(row)
        self.waiting.clear()
        self.sent.clear()
        self.received.clear()


class Barrier(Mark):
    """A place among the batches of `Devices`: the messages before it have been delivered when it is reached.

    Attributes:
        ledger: see `Ledger`.
        answers: the acknowledgements of messages before it.
        forwards: messages with QoS 2 before it, and functions that send them to other nodes.
    """

    ledger: Ledger
    answers: list[tuple[Publisher, bytes]]
    forwards: list[tuple[MqttBatch, Callable[[], object]]]

    def reached(self) -> None:
        """Let the acknowledgements wait for the changes until now.

        Messages with QoS 2 go to other nodes when their packet identifiers are saved: the publisher sends them again
        after a crash before that.
        """
        for batch, _ in self.forwards:
            if batch.received is not None:
                device, numbers = batch.received
                device.expect_releases(unpack(f">{len(numbers) >> 1}H", numbers), True, batch.origin)
        self.ledger.cut = self.ledger.seq
        for _, send in self.forwards:
            self.ledger.hold(send)
        for client, data in self.answers:
            self.ledger.hold(client.send_held, data)
        if self.ledger.held:
            self.ledger.wake()


class Ledger:
    """The unsaved changes of the MQTT clients of a hub.

    Args:
        devices: the MQTT clients.
        waits: whether acknowledgements wait for the commit of their changes.
        next_number: the first number for rows, messages and sessions.

    Attributes:
        waits: see above.
        next_number: the next number for a row, a message or a session.
        dirty: changed rows, ids of changed sessions, names of changed retained messages, and numbers of streams with
            the stream before; with the number of the change, in this order.
        seq: the number of the last change.
        cut: the last change that the next group may have: the messages of a batch are in one group.
        saved: the number of the last change that is saved.
        held: what is sent when the change with a number is saved.
        recorded: the ids of sessions in the file.
        ended: the changes that remove kept sessions from the file, by client id; older ones may be there too.
        commits: the number of groups that were written.
        failures: the number of failed attempts to write a group.
        lost_clients: sessions that ended with a crash, and whose wills are not published yet, by client id.
        is_awake: whether `on_change` was called since the last group.
        is_urgent: whether a packet waits for the next group.
        on_change: called once before each group when there is something to save; with true when a packet waits.
    """

    def __init__(self, devices: Devices, waits: bool, next_number: int = 1) -> None:
        self._devices, self.waits, self.next_number = devices, waits, next_number
        self.dirty: dict[Row | str | bytes | tuple[int, int] | KnownNode, int] = {}
        self.seq = self.cut = self.saved = 0
        self.held: deque[tuple[int, Callable[..., object], tuple[Any, ...]]] = deque()
        self.recorded: set[str] = set()
        self.ended: dict[str, int] = {}
        self.commits = self.failures = 0
        self.lost_clients: dict[str, Device] = {}
        self.on_change: Callable[[bool], object] = lambda is_urgent: None
        self.is_awake = self.is_urgent = False

    def new_number(self) -> int:
        """Return the next number for a row, a message or a session."""
        number, self.next_number = self.next_number, self.next_number + 1
        return number

    # ---- changes

    def touch(self, key: Row | str | bytes | tuple[int, int] | KnownNode) -> int:
        """Save a row, a session, the retained message of a topic, the number of a stream or a node.

        Returns:
            The number of the change.
        """
        seq = self.dirty.get(key)
        if seq is None:
            self.seq = seq = self.seq + 1
            self.dirty[key] = seq
            if not self.is_awake:
                self.is_awake = True
                self.on_change(False)
        return seq

    def add_row(self, session: int, state: int, packet: int, message: Message | None) -> Row:
        """Add a row to a session."""
        row = Row(self.new_number(), session, state, packet, message)
        row.seq = self.touch(row)
        return row

    def change_row(self, row: Row, state: int, packet: int, message: Message | None) -> None:
        """Change a row; it is the last one of its session with this state then."""
        row.state, row.packet, row.message, row.position = state, packet, message, self.new_number()
        row.seq = self.touch(row)

    def remove_row(self, row: Row) -> None:
        """Remove a row; one that is not in the file yet is never written."""
        row.is_gone = True
        if row.is_stored:
            row.seq = self.touch(row)
        else:
            self.dirty.pop(row, None)
            row.seq = 0

    def is_unsaved(self, row: Row) -> bool:
        """Return whether the file may have an earlier state of a row."""
        return row in self.dirty or row.seq > self.saved

    def session_changed(self, device: Device) -> None:
        """Save a session if it is kept, or if it has a will; otherwise remove it from the file."""
        is_open = self._devices.sessions.get(device.client_id) is device
        was_kept, before = device.rows is not None, device.rows
        if is_open and device.expiry_s:
            if device.rows is None:
                self._begin_rows(device)
        elif is_open and device.rows is not None:
            device.rows.forget()
            device.rows = None
        if is_open and (device.expiry_s or device.will is not None):
            self.recorded.add(device.client_id)
        if device.client_id in self.recorded:
            seq = self.touch(device.client_id)
            if device.rows is not None and device.rows is not before:
                device.rows.begun = seq
            elif was_kept and not (is_open and device.rows is not None):
                self.ended[device.client_id] = seq

    def is_session_saved(self, device: Device) -> bool:
        """Return whether a crash would restore the session with this id, or none if it is not kept."""
        is_begun = device.rows is None or device.rows.begun <= self.saved
        return is_begun and self.ended.get(device.client_id, 0) <= self.saved

    def _begin_rows(self, device: Device) -> None:
        rows = device.rows = SessionRows(self, self.new_number())
        for number, message in device.in_flight.items():
            rows.send(number, message)
        for message in device.waiting:
            rows.keep(message)
        for number in device.unreleased:
            rows.expect(number)

    def forget_lost(self, client_id: str) -> None:
        """Do not publish the will of a session that ended with a crash: its client is back."""
        device = self.lost_clients.pop(client_id, None)
        if device is not None:
            device.will = None
            self.touch(client_id)

    def detach(self) -> None:
        """Save no more changes: the file is closed."""
        devices = self._devices
        if devices.ledger is self:
            devices.ledger = None
        for device in devices.sessions.values():
            if device.rows is not None:
                device.not_sent(number for number, row in device.rows.sent.items() if row.is_held)
            device.rows = None
            for message in (*device.waiting, *device.in_flight.values()):
                if message is not None:
                    message.body = None

    # ---- groups

    def begin_group(self, is_last: bool = False) -> Group:
        """Return a group without changes yet, see `fill`.

        Args:
            is_last: whether all changes are taken, also in the middle of a batch: the hub is closed.
        """
        self.is_awake = self.is_urgent = False
        if self.ended:
            self.ended = {client_id: seq for client_id, seq in self.ended.items() if seq > self.saved}
        if is_last or not self._devices.is_delivering:
            self.cut = self.seq
        return Group(self.cut, [], [], {}, {}, [], [], {}, {})

    def fill(self, group: Group, record_of: Callable[[Device], dict[str, Any]]) -> Iterator[None]:
        """Move changes into a group, in portions.

        Args:
            group: the group.
            record_of: returns the record of a session.
        """
        released: list[Message] = []
        while changes := [one for one in islice(self.dirty.items(), KEYS_PER_COPY) if one[1] <= group.through]:
            for count, (key, seq) in enumerate(changes, 1):
                if self.dirty.get(key) == seq:  # not removed since the copy was made
                    del self.dirty[key]
                    self._take_key(key, group, released, record_of)
                if not count % KEYS_PER_STEP:
                    yield
        for message in released:
            body = message.body
            if body is not None and not body.users:
                group.gone_messages.append(body.number)
                message.body = None

    def _take_key(
        self,
        key: Row | str | bytes | tuple[int, int] | KnownNode,
        group: Group,
        released: list[Message],
        record_of: Callable[[Device], dict[str, Any]],
    ) -> None:
        if isinstance(key, Row):
            self._take_row(key, group, released)
        elif isinstance(key, bytes):
            group.retained[key] = self._devices.retained.by_name.get(key)
        elif isinstance(key, KnownNode):
            group.nodes[key.identity] = key.identity in self._devices.arrivals.nodes
        elif isinstance(key, tuple):
            stream, number = key
            group.streams[stream] = max(number, group.streams.get(stream, 0))
        else:
            device = self._devices.sessions.get(key) or self.lost_clients.get(key)
            if device is not None and (device.expiry_s or device.will is not None):
                group.records[key] = record_of(device)
            else:
                group.records[key] = None
                self.recorded.discard(key)
                self.lost_clients.pop(key, None)

    def _take_row(self, row: Row, group: Group, released: list[Message]) -> None:
        before, message = row.stored, None if row.is_gone else row.message
        if before is not message and before is not None and before.body is not None:
            before.body.users -= 1
            released.append(before)
        if message is not None and message is not before:
            if message.body is None:
                message.body = Body(self.new_number())
                group.messages.append((message.body.number, message))
            message.body.users += 1
        row.stored, row.is_stored = message, True
        if row.is_gone:
            group.gone_rows.append(row.number)
            return
        number = None if message is None or message.body is None else message.body.number
        group.rows.append((row.number, row.session, row.position, row.state, row.packet, number))

    # ---- packets that wait

    @property
    def is_full(self) -> bool:
        """Whether no more packets should wait for the disk."""
        return len(self.held) >= MAX_TOTAL_HELD

    def answer(self, client: Publisher, data: bytes, is_saved: bool) -> None:
        """Send an acknowledgement, when the messages before it have been delivered and saved.

        Args:
            client: the publisher.
            data: the packets.
            is_saved: whether there is something to save; otherwise it only follows those that wait.
        """
        client.held += 1
        if not self.waits or not (is_saved or client.held > 1):
            client.send_held(data)
            return
        self.barrier().answers.append((client, data))

    def answer_change(self, client: Publisher, data: bytes) -> None:
        """Send an acknowledgement when the changes until now are saved."""
        client.held += 1
        if self.waits:
            self.hold(client.send_held, data)
            self.wake()
        else:
            client.send_held(data)

    def barrier(self) -> Barrier:
        """Return a barrier behind the batches until now."""
        queue = self._devices.queue
        last = queue[-1] if queue else None
        if isinstance(last, Barrier):
            return last
        barrier = Barrier()
        barrier.ledger, barrier.answers, barrier.forwards = self, [], []
        self._devices.put(barrier)
        return barrier

    def forward(self, batch: MqttBatch, send: Callable[[], object]) -> None:
        """Send messages with QoS 2 to another node when their packet identifiers are saved, see `Barrier`."""
        self.barrier().forwards.append((batch, send))

    def hold(self, send: Callable[..., object], *arguments: object) -> None:
        """Call a function with its arguments when the changes until now are saved."""
        self.held.append((self.seq, send, arguments))

    def hold_message(self, device: Device, client: ConnectedClient, packet: int, is_dup: bool = False) -> None:
        """Send a message in flight to a client, or PUBREL, when its row is saved."""
        assert device.rows is not None
        row = device.rows.sent[packet]
        if not row.is_held:  # a client may repeat PUBREC
            row.is_held = True
            self.hold(device.send_saved, row, client, packet, is_dup)
            self.wake()

    def wake(self) -> None:
        """Start a group: a packet waits."""
        if not self.is_urgent:
            self.is_awake = self.is_urgent = True
            self.on_change(True)

    def released(self) -> Iterator[None]:
        """Send the packets whose changes are saved, one by one."""
        while self.held and self.held[0][0] <= self.saved:
            _, send, arguments = self.held.popleft()
            send(*arguments)
            yield
