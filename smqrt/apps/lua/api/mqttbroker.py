"""Python half of `mqttbroker` (spec: smq §10).

Lua refers to brokers, their clients and its local clients by integers. A client gets an integer at its first use in a
callback.
"""

from __future__ import annotations

import itertools
from typing import Any

from smqrt.apps.lua import bridge
from smqrt.apps.lua.api.smq_hub import ask, mapped
from smqrt.apps.lua.api.sockets import SocketBinding
from smqrt.apps.lua.bridge import LuaValue, LuaValues, methods, utf8
from smqrt.apps.lua.socket_handles import PeerHandle, StreamHandle
from smqrt.apps.lua.vm import Services, Vm
from smqrt.auth.service import server_identity_service
from smqrt.broker.deferred import Deferred
from smqrt.errors import StreamError
from smqrt.smq.local_client import LocalClient, forwarded_properties
from smqrt.smq.port_broker import Login, Permission, PortBroker, PortClient, PortOptions
from smqrt.transport.tls import TlsTransport
from smqrt.wire.mqtt.fields import NAMES, PacketType, Props, pack_properties, unpack_properties, varint
from smqrt.wire.mqtt.packets import PublishPacket, WillMessage

_FORWARDED = frozenset(
    ("payloadformatindicator", "messageexpiryinterval", "contenttype", "responsetopic", "correlationdata")
)
_NO_USERS = b"auth: the server has no users; set auth.users to a file with users"


def fault_of_server() -> bytes | None:
    """Return the message if the server has no identity service; None if it has one."""
    return None if server_identity_service() is not None else _NO_USERS


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
    table = bridge.load(values)
    given = {key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key): table[key] for key in table}
    found = {name: given.pop(name, None) for name in NAMES}
    kept = {name: value for name, value in found.items() if name in _FORWARDED and value is not None}
    return pack_properties(kept | given, PacketType.PUBLISH)


class LuaPortBroker:
    """A broker with its Lua callbacks, see `PortEvents`.

    Args:
        vm: the runtime.
        number: its integer.
        table: assigns integers to clients.
        callbacks: references of the Lua functions `report`, `left`, `authenticate`, `permit` and `permit_all`; 0 for
            none.
        options: its options.
    """

    def __init__(self, vm: Vm, number: int, table: PortBinding, callbacks: LuaValues, options: PortOptions) -> None:
        self._vm, self._number, self._table = vm, number, table
        self._report, self._left, self._authenticate, self._permit, self._permit_all = callbacks
        self.authenticate: Login | None = self._ask_login if self._authenticate else None
        self.permit: Permission | None = self._ask_permission if self._permit else None
        self.broker = PortBroker(options, self)

    def _ask(self, ref: LuaValue, name: str, default: LuaValues, *arguments: LuaValue) -> Any:
        assert isinstance(ref, int)
        return mapped(ask(self._vm, ref, f"mqttbroker.{name}", default, self._number, *arguments), _first)

    def _ask_login(self, client: PortClient, username: str | None, password: bytes | None) -> Any:
        name = None if username is None else utf8(username)
        return self._ask(self._authenticate, "auth", (), self._table.handle(client), name, password)

    def _ask_permission(self, client: PortClient, topic: bytes, retain: bool, payload: bytes) -> Any:
        return self._ask(self._permit, "onpublish", (), self._table.handle(client), topic, retain, payload)

    def permit_all(self, client: PortClient, topic: bytes, retain: bool, batch: bytes) -> bytes | Deferred[Any]:
        """See `PortEvents`."""
        answer = self._ask(self._permit_all, "onpublish", (b"",), self._table.handle(client), topic, retain, batch)
        found: bytes | Deferred[Any] = mapped(answer, lambda value: batch if value is True else value)
        return found

    def report(self, client: PortClient | None, kind: str, status: int | str, text: str = "") -> None:
        """See `PortEvents`."""
        if not self._report:
            return
        number = None if client is None else self._table.handle(client)
        word = status if isinstance(status, int) else status.encode()
        self._ask(self._report, "onerror", (), number, kind.encode(), word, utf8(text) if text else None)

    def left(self, client: PortClient) -> None:
        """See `PortEvents`."""
        if client.extra is not None:
            self._table.drop(client)
            assert isinstance(self._left, int)
            self._vm.start(self._left, self._number, client.extra)


def _first(values: LuaValues) -> LuaValue:
    return values[0] if values else None


class LuaLocalClient:
    """Events of a local client for Lua, see `LocalEvents`.

    Args:
        vm: the runtime.
        ref: reference of the Lua function `event(number, kind, ...)`.
        number: its integer.
        broker: its broker.
    """

    def __init__(self, vm: Vm, ref: int, number: int, broker: PortBroker) -> None:
        self._vm, self._ref, self._number = vm, ref, number
        self.client = LocalClient(broker, self)

    def _event(self, *values: LuaValue) -> None:
        ask(self._vm, self._ref, "mqttbroker", (), self._number, *values)

    def on_connected(self, properties: Props) -> None:
        """See `LocalEvents`."""
        self._event(b"connect", bridge.dump(dict(properties)))

    def on_answer(self, number: int, code: int) -> None:
        """See `LocalEvents`."""
        self._event(b"answer", number, code)

    def on_message(self, message: PublishPacket) -> None:
        """See `LocalEvents`."""
        identifiers: Any = message.properties.get("subscriptionidentifier", ())
        numbers = identifiers if isinstance(identifiers, list | tuple) else (identifiers,)
        properties = forwarded_properties(message)
        values = utf8(message.topic), message.payload, message.retain, message_table(properties) if properties else None
        self._event(b"message", *values, *numbers)

    def on_disconnected(self, code: int) -> None:
        """See `LocalEvents`."""
        self._event(b"disconnect", code)


class PortBinding:
    """Lua's brokers, their clients and its local clients by integer.

    Args:
        vm: the runtime.
        sockets: the sockets of Lua.

    Attributes:
        brokers: the brokers by their integers.
    """

    def __init__(self, vm: Vm, sockets: SocketBinding) -> None:
        self._vm, self._sockets = vm, sockets
        self._numbers = itertools.count(1)
        self.brokers: dict[int, PortBroker] = {}
        self._clients: dict[int, PortClient] = {}
        self._locals: dict[int, LocalClient] = {}

    # ---- brokers

    def new(
        self, packet_bytes: int, max_clients: int, wildcards: bool, has_identities: bool, *callbacks: LuaValue
    ) -> int:
        """Create a broker and return its integer; see `PortOptions` and `LuaPortBroker`."""
        number = next(self._numbers)
        identities = server_identity_service() if has_identities else None
        options = PortOptions(packet_bytes, max_clients, wildcards, identities)
        self.brokers[number] = LuaPortBroker(self._vm, number, self, callbacks, options).broker
        return number

    def serve(self, number: int, socket: int) -> None:
        """Serve a connection that Lua has accepted; its socket in Lua ends."""
        handle = self._sockets.handle(socket)
        assert isinstance(handle, StreamHandle)
        self._sockets.drop(socket)
        try:
            address = handle.peername()
            transport, data = handle.stream.release()
        except StreamError:  # the client has closed it
            handle.close()
            return
        self.brokers[number].serve(transport, data, address, type(transport) is TlsTransport)

    def stop(self, number: int) -> None:
        """Shut a broker down, see `PortBroker.stop`."""
        self.brokers[number].stop()

    def close(self, number: int) -> None:
        """Close a broker at once."""
        self.brokers[number].close()

    def release(self, number: int) -> None:
        """Close and forget a broker whose Lua object was collected."""
        self.brokers.pop(number).close()

    def counts(self, number: int) -> LuaValues:
        """Return the numbers of clients, dropped messages, rejected connections, and connections."""
        broker = self.brokers[number]
        return len(broker.sessions), broker.dropped, broker.rejected, len(broker.connections)

    # ---- clients

    def handle(self, client: PortClient) -> int:
        """Return the integer of a client; assign one at its first use."""
        if client.extra is None:
            client.extra = next(self._numbers)
            self._clients[client.extra] = client
        number: int = client.extra
        return number

    def drop(self, client: PortClient) -> None:
        """Forget a client that has disconnected."""
        self._clients.pop(client.extra, None)

    def describe(self, number: int) -> LuaValues | None:
        """Return address, port, whether it is secure, version, identifier, user name and user of a client."""
        client = self._clients.get(number)
        if client is None:
            return None
        name, identity = client.username, client.identity
        user = utf8(identity.user) if identity is not None and identity.user else None
        host, port = client.address[:2]
        client_id = utf8(client.client_id) if client.version else None
        username = None if name is None else utf8(name)
        return utf8(host), port, client.is_secure, client.version or None, client_id, username, user

    def socket(self, number: int) -> int | None:
        """Return the number of the socket of a client; None after it has disconnected."""
        client = self._clients.get(number)
        return None if client is None else self._sockets.add(PeerHandle(client))

    # ---- local clients

    def join(self, number: int, event: int, client_id: bytes) -> int:
        """Connect a local client and return its integer; an empty identifier lets the broker choose one."""
        own = next(self._numbers)
        client = LuaLocalClient(self._vm, event, own, self.brokers[number]).client
        self._locals[own] = client
        client.connect(client_id.decode("utf-8", "replace"))
        return own

    def leave(self, number: int, with_will: bool) -> None:
        """Disconnect a local client."""
        client = self._locals.pop(number, None)
        if client is not None:
            client.leave(with_will)

    def publish(self, number: int, topic: bytes, payload: bytes, retain: bool, properties: bytes) -> None:
        """See `LocalClient.send`."""
        self._locals[number].send(topic, payload, retain, properties)

    def request(
        self, number: int, packet: int, topic_filter: bytes, options: int | None = None, identifier: int = 0
    ) -> None:
        """See `LocalClient.request`."""
        self._locals[number].request(packet, topic_filter, options, identifier)

    def set_will(
        self,
        number: int,
        topic: bytes | None = None,
        payload: bytes = b"",
        retain: bool = False,
        properties: bytes = b"",
    ) -> None:
        """See `LocalClient.set_will`; without a topic there is no will."""
        will = None
        if topic is not None:
            block = varint(len(properties)) + properties if properties else b""
            found = unpack_properties(properties, 0, len(properties), PacketType.WILL)
            will = WillMessage(topic.decode("utf-8", "replace"), payload, 0, retain, found, block)
        self._locals[number].set_will(will)


_DIRECT = "new serve stop close release counts describe socket join leave publish request set_will"


def install(vm: Vm, services: Services) -> None:
    """Install the Python half of `mqttbroker`."""
    services.mqtt_brokers = PortBinding(vm, services.sockets)
    functions = methods(services.mqtt_brokers, _DIRECT)
    functions |= {fn.__name__: fn for fn in (fault_of_server, message_table, pack_message)}
    vm.namespace("mqttbroker.python", functions)
