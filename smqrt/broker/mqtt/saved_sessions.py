"""MQTT sessions in the form of the `persist` file, and their restoration at a start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from smqrt.broker.mqtt.device import Device
from smqrt.broker.mqtt.devices import SESSIONS, Devices
from smqrt.broker.mqtt.ledger import RECEIVED, WAITING, Body, Ledger, Row, SessionRows
from smqrt.broker.mqtt.messages import Message
from smqrt.broker.mqtt.records import message_of, restore_session, settings_record, will_of, will_record

Record = dict[str, Any]

_NO_MESSAGES: Record = {"in_flight": (), "waiting": (), "unreleased": ()}
"""The messages of a session are rows of their own."""


class SavedRow(NamedTuple):
    """A row of the file.

    Attributes:
        number: its key.
        position: its place in the order of the session.
        state: see `ledger`.
        packet: the packet identifier.
        message: the key of the message; None without one.
    """

    number: int
    position: int
    state: int
    packet: int
    message: int | None


def saved_record(device: Device) -> Record:
    """Return the record of a session for the file: its messages are rows of their own."""
    return {
        **settings_record(device),
        "number": 0 if device.rows is None else device.rows.number,
        "will": will_record(device.will),
    }


def restore_saved(
    devices: Devices,
    ledger: Ledger,
    record: Record,
    rows: Sequence[SavedRow],
    messages: dict[int, Message],
    will_grace_s: float,
) -> None:
    """Restore a session.

    Args:
        devices: the MQTT clients of the hub.
        ledger: the changes of the hub, not in use yet.
        record: the record from `saved_record`, with the times of this hub's clock; it is changed.
        rows: the rows of the session, in order of their position.
        messages: the messages by key.
        will_grace_s: seconds until the will of a client is published that was connected when the server ended.
    """
    client_id, will = record["id"], will_of(record["will"])
    ledger.recorded.add(client_id)
    if record["expiry_s"]:
        if len(devices.offline) >= devices.limits.sessions:
            SESSIONS.refused(f"the MQTT client {ascii(client_id[:64])}")
            ledger.touch(client_id)
            return
        record |= _NO_MESSAGES
        device = restore_session(devices, record)
        own = SessionRows(ledger, record["number"])
        if rows:
            _restore_rows(device, own, rows, messages)
        else:
            device.rows = own
    elif will is not None:
        device = ledger.lost_clients[client_id] = Device(devices, client_id)
    else:
        ledger.touch(client_id)
        return
    if will is not None:
        now_s = devices.broker.clock()
        due_s = now_s + max(will_grace_s, min(will.delay_s, device.expiry_s)) if will.due_s is None else will.due_s
        devices.wills.delay(device, will, due_s)


def _restore_rows(device: Device, rows: SessionRows, saved: Sequence[SavedRow], messages: dict[int, Message]) -> None:
    device.in_flight = {}
    for one in saved:
        message = None if one.message is None else messages[one.message]
        row = Row(one.number, rows.number, one.state, one.packet, message)
        row.position, row.stored, row.is_stored = one.position, message, True
        if message is not None and message.body is not None:
            message.body.users += 1
        if one.state == WAITING and message is not None:
            device.keep(message)
            rows.append_waiting(row)
        elif one.state == RECEIVED:
            device.expect_releases((one.packet,))
            rows.received[one.packet] = row
            if one.position > one.number:  # with the id of the message, see `SessionRows.expect`
                origin = device.devices.arrivals.origin_of(one.position)
                device.devices.again.setdefault(device, {})[one.packet] = origin
                device.devices.arrivals.know((origin,))
        else:
            device.in_flight[one.packet] = message
            device.last_number = one.packet
            rows.sent[one.packet] = row
    device.rows = rows  # now: `keep` would add rows for the messages
    device.count_stored()
    device.drop_excess()


def restored_message(number: int, record: list[Any]) -> Message:
    """Return a message of the file with the key `number`; see `message_of`."""
    message = message_of(record)
    message.body = Body(number)
    return message
