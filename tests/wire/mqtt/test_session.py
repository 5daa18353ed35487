"""The state of a session: packet identifiers, what is in flight, and what a reconnect makes of it."""

from __future__ import annotations

import pytest

from smqrt.wire.mqtt.endpoint import MqttSession, OutgoingMessage


class Message(OutgoingMessage):
    """Remembers how it ended."""

    __slots__ = ("ends",)

    def __init__(self, payload: bytes = b"x", qos: int = 1) -> None:
        super().__init__(b"t", payload, qos, False, b"")
        self.ends: list[str | int | None] = []

    def finish(self, error: str | int | None = None) -> None:
        self.ends.append(error)


def begun(session: MqttSession, count: int, qos: int = 1) -> list[Message]:
    messages = [Message(qos=qos) for _ in range(count)]
    for message in messages:
        session.begin(message)
    return messages


def test_identifiers_go_from_1_to_65535_and_around() -> None:
    session = MqttSession()
    found = [session.new_identifier() for _ in range(0xFFFF + 2)]
    assert found == [*range(1, 0x10000), 1, 2]


def test_an_identifier_in_use_is_passed_over() -> None:
    session = MqttSession()
    begun(session, 2)
    session.requests[session.new_identifier()] = 1
    for _ in range(0xFFFF - 3):
        session.new_identifier()
    assert session.new_identifier() == 4


def test_the_last_free_identifier_is_found() -> None:
    session = MqttSession()
    messages = begun(session, 0xFFFF)
    session.acknowledged(messages[41].packet_identifier, 0)
    assert session.new_identifier() == 42


def test_qos_1_ends_with_puback() -> None:
    session = MqttSession()
    first, second = begun(session, 2)
    assert session.in_flight_bytes == 4
    session.acknowledged(1, 0x10)
    session.acknowledged(2, 0x97)
    assert (first.ends, second.ends) == ([None], [0x97])
    assert not session.in_flight
    assert session.in_flight_bytes == 0


def test_qos_2_ends_with_pubcomp() -> None:
    session = MqttSession()
    (message,) = begun(session, 1, qos=2)
    session.completed(1)
    assert session.received(1, 0)
    assert session.received(1, 0)
    assert not message.ends
    session.completed(1)
    session.completed(1)
    assert message.ends == [None]
    assert session.in_flight_bytes == 0


def test_a_refusal_ends_qos_2_at_once() -> None:
    session = MqttSession()
    (message,) = begun(session, 1, qos=2)
    assert session.received(1, 0x87) is False
    assert message.ends == [0x87]
    assert session.received(1, 0) is None


@pytest.mark.parametrize("number", [1, 2, 9])
def test_acknowledgements_of_another_kind_are_ignored(number: int) -> None:
    session = MqttSession()
    (first,) = begun(session, 1, qos=1)
    (second,) = begun(session, 1, qos=2)
    if number != 1:
        session.acknowledged(number, 0)
    if number != 2:
        assert session.received(number, 0) is None
    session.completed(number)
    assert not first.ends + second.ends
    assert session.in_flight_bytes == 4


def test_messages_in_flight_are_resent_in_order() -> None:
    session = MqttSession()
    messages = begun(session, 3)
    session.acknowledged(2, 0)
    session.resume(True)
    assert list(session.unsent.values()) == [messages[0], messages[2]]
    assert all(message.is_dup for message in session.unsent.values())
    session.acknowledged(1, 0)
    assert list(session.unsent) == [3]


def test_a_kept_session_goes_on_where_it_was() -> None:
    session = MqttSession()
    (message,) = begun(session, 1, qos=2)
    session.received(1, 0)
    session.unreleased.add(7)
    session.requests[8] = 1
    session.resume(True)
    assert session.unreleased == {7}
    assert not session.requests
    assert list(session.unsent.values()) == [message]
    assert message.is_released


def test_a_lost_session_ends_received_and_restarts_other_messages() -> None:
    session = MqttSession()
    taken, open_message = begun(session, 2, qos=2)
    session.received(1, 0)
    session.unreleased.add(7)
    session.resume(False)
    assert not session.unreleased
    assert taken.ends == [None]
    assert list(session.unsent.values()) == [open_message]
    assert not open_message.is_dup


def test_undelivered_messages_are_no_duplicates_in_a_new_session() -> None:
    session = MqttSession()
    (message,) = begun(session, 1)
    session.resume(False)  # and this connection breaks before it was sent again
    session.resume(True)
    assert not message.is_dup
    session.unsent.clear()
    session.resume(True)
    assert message.is_dup


def test_settled_messages_are_not_resent() -> None:
    session = MqttSession()
    (message,) = begun(session, 1)
    session.resume(True)
    session.settle(message, "toolarge")
    assert not session.unsent
    assert message.ends == ["toolarge"]
