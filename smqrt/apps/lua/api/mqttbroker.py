"""MQTT codec and logins of the broker that is written in Lua (lib/mqttbroker).

Splitting the stream into packets and parsing PUBLISH without properties are done in Lua, where they cost less than a
call of Python per message.
"""

from __future__ import annotations

import itertools
import time

from smqrt.apps.lua import bridge
from smqrt.apps.lua.bridge import LuaResult, methods
from smqrt.apps.lua.vm import Services, Vm
from smqrt.auth.identity import TOKEN, Action, Identity
from smqrt.auth.service import (
    IdentityService,
    LoginFailure,
    LoginRejected,
    PresentedCredentials,
    server_identity_service,
)
from smqrt.errors import ArgumentError, MqttError
from smqrt.wire.mqtt.fields import NAMES, PacketType, cut_properties, pack_properties, unpack_properties
from smqrt.wire.mqtt.packets import (
    ConnackPacket,
    ConnectPacket,
    DisconnectPacket,
    Packet,
    SubscribeAnswer,
    SubscribePacket,
    UnsubscribePacket,
    connect_version,
    decode,
    encode,
)
from smqrt.wire.mqtt.server import check_message_properties

Refusal = tuple[None, int, bytes]
"""None, the reason code and a message."""

_FORWARDED = frozenset(
    ("payloadformatindicator", "messageexpiryinterval", "contenttype", "responsetopic", "correlationdata")
)


def _refusal(error: MqttError) -> Refusal:
    return None, int(error.code), str(error).encode()


def decode_packet(first: int, body: bytes, version: int) -> bytes | Refusal:
    """Return the fields of a client's packet other than PUBLISH as a packed table.

    Args:
        first: the first byte of the packet.
        body: the packet after the fixed header.
        version: the protocol version of the connection.
    """
    try:
        return bridge.dump(_table(decode(first, body, version, True)))
    except MqttError as error:
        return _refusal(error)


def _table(packet: Packet) -> dict[str, object]:
    if isinstance(packet, ConnectPacket):
        will = None
        if packet.will is not None:
            check_message_properties(packet.will.properties)
            block = packet.will.property_bytes
            will = {
                "topic": packet.will.topic,
                "payload": packet.will.payload,
                "qos": packet.will.qos,
                "retain": packet.will.retain,
                "properties": packet.will.properties,
                # The delay is for the broker; the other properties are forwarded with the message.
                "forwarded": cut_properties(block, "willdelayinterval") if block else b"",
            }
        return {
            "version": packet.version,
            "clean": packet.clean_start,
            "keepalive_s": packet.keepalive_s,
            "properties": packet.properties,
            "id": packet.client_identifier,
            "will": will,
            "username": packet.username,
            "password": packet.password,
        }
    if isinstance(packet, SubscribePacket):
        return {
            "id": packet.packet_identifier,
            "filters": [one.topic for one in packet.subscriptions],
            "options": [one.options for one in packet.subscriptions],
            "subscription": packet.properties.get("subscriptionidentifier"),
        }
    if isinstance(packet, UnsubscribePacket):
        return {"id": packet.packet_identifier, "filters": packet.topics}
    return {"code": packet.code, "properties": packet.properties} if isinstance(packet, DisconnectPacket) else {}


def has_alias(properties: bytes) -> bool | Refusal:
    """Check the properties of a PUBLISH packet, without their length field; return whether one is a topic alias."""
    try:
        found = unpack_properties(properties, 0, len(properties), PacketType.PUBLISH)
        check_message_properties(found)
    except MqttError as error:
        return _refusal(error)
    return "topicalias" in found


def message_table(forwarded: bytes) -> bytes:
    """Return the forwarded properties of a message as a packed table.

    If several user properties have the same name, the table contains the last one.
    """
    found = unpack_properties(forwarded, 0, len(forwarded), PacketType.PUBLISH)
    return bridge.dump({name: value[-1] if isinstance(value, list) else value for name, value in found.items()})


def pack_message(values: bytes) -> bytes:
    """Return the properties of an application's message in wire format.

    Properties that MQTT defines for other packets are omitted. Unknown names become user properties.
    """
    given = _named(values)
    found = {name: given.pop(name, None) for name in NAMES}
    kept = {name: value for name, value in found.items() if name in _FORWARDED and value is not None}
    return pack_properties(kept | given, PacketType.PUBLISH)


def _named(values: bytes) -> dict[str, object]:
    table = bridge.load(values)
    return {key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key): table[key] for key in table}


def connack(version: int, code: int, values: bytes) -> bytes:
    """Return a CONNACK without a session, with the properties in the order of their identifiers."""
    found = _named(values)
    return encode(ConnackPacket(False, code, {name: found[name] for name in NAMES if name in found}), version)


def suback(version: int, number: int, codes: bytes) -> bytes:
    """Return a SUBACK for the packet `number`."""
    return encode(SubscribeAnswer(PacketType.SUBACK, number, codes), version)


def unsuback(version: int, number: int, codes: bytes) -> bytes:
    """Return an UNSUBACK for the packet `number`."""
    return encode(SubscribeAnswer(PacketType.UNSUBACK, number, codes), version)


def disconnect(code: int, text: bytes | None) -> bytes:
    """Return a DISCONNECT for MQTT 5."""
    return encode(DisconnectPacket(code, {"reasonstring": text} if text is not None else {}), 5)


class MqttIdentities:
    """Clients that the server's identity service has authenticated, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._known: dict[int, Identity] = {}
        self._observed: IdentityService | None = None  # whose changes increment the generation
        self._generation = 0

    def fault_of_server(self) -> bytes | None:
        """Return the message if the server has no identity service; None if it has one."""
        return None if server_identity_service() is not None else _NO_USERS.encode()

    def _service(self) -> IdentityService:
        service = server_identity_service()
        if service is None:
            raise ArgumentError(_NO_USERS)
        if service is not self._observed:
            self._observed = service
            service.changed.append(self._changed)
            service.expiring.append(self._end_expired)
        return service

    def _changed(self) -> None:
        self._generation += 1

    def _end_expired(self) -> None:
        now_s = time.time()
        if any(one.expires_s is not None and one.expires_s <= now_s for one in self._known.values()):
            self._changed()

    def login(self, client_id: bytes, name: bytes | None, password: bytes | None, address: bytes) -> LuaResult:
        """Authenticate a client and return its number; blocks.

        After a rejection, returns nil, whether the client may try again later, and the message.
        """
        # A token may be the password of any user name: MQTT clients have no other field for it.
        token = password if password is not None and TOKEN.match(password) else None
        user = None if name is None or token is not None else name.decode("utf-8", "replace")
        shown = PresentedCredentials(address.decode("ascii", "replace"), client_id, user, password, token)
        try:
            identity = self._service().login(shown)
        except LoginRejected as rejected:
            return None, rejected.reason in (LoginFailure.BUSY, LoginFailure.THROTTLED), str(rejected).encode()
        number = next(self._numbers)
        self._known[number] = identity
        return number

    def user(self, number: int) -> bytes:
        return self._known[number].user.encode("utf-8", "surrogateescape")

    def same(self, number: int, other: int) -> bool:
        """Return whether two clients have the same user."""
        return self._known[number].user == self._known[other].user

    def may_publish(self, number: int, topic: bytes) -> bool:
        return self._known[number].may(topic, Action.WRITE)

    def may_subscribe(self, number: int, topic_filter: bytes) -> bool:
        return self._known[number].may_filter(topic_filter, Action.READ)

    def fault(self, number: int) -> bytes | None:
        """Return the reason why a client must be disconnected; None if it may stay connected."""
        fault = self._service().revalidate(self._known[number])
        return None if fault is None else fault.encode()

    def leave(self, number: int) -> None:
        self._known.pop(number, None)

    def generation(self) -> int:
        """Return a number that changes with the users and rules."""
        return self._generation


_NO_USERS = "auth: the server has no users; set auth.users to a file with users"
_DIRECT = "fault_of_server user same may_publish may_subscribe fault leave generation"


def install(vm: Vm, _services: Services) -> None:
    """Install the codec and the identity service."""
    identities = MqttIdentities()
    vm.namespace("mqttbroker.identity", methods(identities, _DIRECT), methods(identities, "login"))
    functions = (decode_packet, has_alias, message_table, pack_message, connack, suback, unsuback, disconnect)
    vm.namespace("mqttbroker.codec", {fn.__name__: fn for fn in functions} | {"connect_version": connect_version})
