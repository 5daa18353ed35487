"""Sessions of MQTT clients that move to the node to which their client connects.

    client ── CONNECT ──▶ node B ── take ──▶ all nodes
                                 ◀─ answer ─ node A, with the record of the session
                          node B subscribes, and accepts the client
                                 ── done ──▶ node A, which ends the session
                                 ◀─ late ─── with the messages that have arrived since

A node that does not answer in time is skipped. When it learns that the client is connected elsewhere, it ends its
session, and sends the messages in it to the client's node as `late`, marked as those of another session.
"""

from __future__ import annotations

import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from typing import Any

from smqrt.broker.deferred import Deferred
from smqrt.broker.mqtt.device import NEVER_S, UID_PREFIX, Device, uid_of
from smqrt.broker.mqtt.filters import Options
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message
from smqrt.broker.mqtt.records import restore_session, session_record
from smqrt.broker.outbox import Drop, run_at_once
from smqrt.cluster.mqtt_nodes import MqttNodes
from smqrt.cluster.remote_node import Phantom, RemoteNode
from smqrt.cluster.routing import paced
from smqrt.cluster.state import ClusterState
from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import cluster_mqtt
from smqrt.wire.cluster_packets import LinkType

log = logging.getLogger("smqrt")

ANSWER_S, MIGRATION_S = 2.0, 3.0
"""The maximum time for which a CONNECT waits for other nodes, and for one whose hub migrates to another process."""
LEAVING_S = 10.0
"""The maximum time for which a session that was handed over receives messages for the other node."""
MAX_UNSURE = 10_000
"""The maximum number of client ids that are remembered because a lost node may have a session of them."""
PORTION_BYTES = 256 << 10
"""The waiting messages that come with a record, approximately. Others follow in portions of this size."""

Json = dict[str, Any]


class _Move:
    """A CONNECT that waits for other nodes.

    Attributes:
        waiting: the nodes that have not answered.
        found: the sessions of other nodes: seconds since their last connection, node and record.
        is_denied: whether the session belongs to another user.
        is_clean: whether the client wants no session from before.
        result: resolved with whether the client may connect.
    """

    def __init__(self, client_id: str, waiting: list[RemoteNode], is_clean: bool) -> None:
        self.client_id, self.waiting, self.is_clean = client_id, waiting, is_clean
        self.found: list[tuple[float, RemoteNode, Json]] = []
        self.is_denied = False
        self.result: Deferred[bool] = Deferred()


class SessionMoves:
    """The sessions that one hub hands over to other nodes, and takes from them.

    Args:
        state: the state that the parts of the cluster share.
        nodes: the nodes with links of version 2.
    """

    def __init__(self, state: ClusterState, nodes: MqttNodes) -> None:
        self._state, self._nodes = state, nodes
        self._moves: dict[int, _Move] = {}
        self._leaving: dict[str, tuple[RemoteNode, Device]] = {}
        """Sessions that were handed over, by client id, and their new nodes."""
        self._unsure: dict[str, None] = {}
        """Client ids of sessions that began while a node was lost, which may have messages for them."""
        self._last = 0
        self._handlers: dict[str, Callable[[RemoteNode, Json], object]] = {
            "take": self._on_take,
            "answer": self._on_answer,
            "done": self._on_done,
            "late": self._on_late,
        }

    def _send(self, node: RemoteNode, kind: str, **fields: Any) -> None:
        body = json.dumps({"kind": kind, **fields}, default=lambda raw: {"bytes": b64encode(raw).decode()}).encode()
        node.send_queue.put(cluster_mqtt.packets(bytes((LinkType.SESSION,)), body))

    def on_session(self, node: RemoteNode, packet: bytes) -> None:
        """Process a Session packet."""
        body = self._nodes.body(node, packet[1:])
        try:
            found = json.loads(body, object_hook=lambda one: b64decode(one["bytes"]) if "bytes" in one else one)
            self._handlers[found["kind"]](node, found)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProtocolError(
                CloseReason.UNKNOWN_PACKET, f"a session of another node is malformed: {error!r}"
            ) from None

    # ---- the node to which the client connects

    def take(self, client_id: str, user: str | None, is_clean: bool) -> Deferred[bool] | bool:
        """See `ClusterMqtt.take_session`."""
        asked = self._nodes.asked()
        self._remember(client_id, is_clean, self._nodes.has_lost)
        if not asked:
            return True
        self._last += 1
        number, move = self._last, _Move(client_id, asked, is_clean)
        self._moves[number] = move
        for node in list(asked):
            self._send(node, "take", request=number, id=client_id, user=user, clean=is_clean)
        answer_s = MIGRATION_S if any(node.send_queue.keeps for node in asked) else ANSWER_S
        self._state.broker.call_later(answer_s, lambda: self._complete(number))
        return move.result

    def _remember(self, client_id: str, is_clean: bool, is_unsure: bool) -> None:
        """Remember whether a node that could not be asked may have messages for a client."""
        if is_clean:
            self._unsure.pop(client_id, None)
        elif is_unsure:
            self._unsure[client_id] = None
            if len(self._unsure) > MAX_UNSURE:
                del self._unsure[next(iter(self._unsure))]

    def _on_answer(self, node: RemoteNode, answer: Json) -> None:
        move = self._moves.get(answer["request"])
        if move is None or move.client_id != answer["id"] or node not in move.waiting:  # the answer is too late
            return
        move.waiting.remove(node)
        move.is_denied = move.is_denied or bool(answer.get("denied"))
        if "record" in answer:
            answer["left_s"] = self._state.broker.clock() - answer["now_s"]  # between the clocks of the two nodes
            move.found.append((answer["age_s"], node, answer))
        if not move.waiting:
            self._complete(answer["request"])

    def left(self, node: RemoteNode) -> None:
        """Do not wait for a node that is lost."""
        for number, move in list(self._moves.items()):
            if node in move.waiting:
                move.waiting.remove(node)
                self._remember(move.client_id, move.is_clean, True)
                if not move.waiting:
                    self._complete(number)

    def moved(self, before: RemoteNode, node: RemoteNode) -> None:
        """Wait for another node, to whose process a hub has migrated."""
        for move in self._moves.values():
            move.waiting = [node if one is before else one for one in move.waiting]

    def _complete(self, number: int) -> None:
        """Continue a CONNECT with the youngest session; the others are ended."""
        move = self._moves.pop(number, None)
        if move is None:
            return
        self._remember(move.client_id, move.is_clean, bool(move.waiting))
        devices = self._state.broker.devices
        own = devices.sessions.get(move.client_id) if devices is not None else None
        youngest = min(move.found, key=lambda one: one[0], default=None)
        if youngest is None or devices is None or move.is_denied or (own and self._age_s(own) <= youngest[0]):
            self._finish(move, None)
            return
        if own is not None:
            own.will = None
            devices.end(own)
        run_at_once(self._restore(move, youngest[1], youngest[2]), self._state.broker.clock)

    def _restore(self, move: _Move, node: RemoteNode, answer: Json) -> Iterator[None]:
        broker = self._state.broker
        devices, record = broker.devices, answer["record"]
        try:
            subscriptions, record["subscriptions"] = record["subscriptions"], []
            restore_session(devices, record)
            device: Device = devices.sessions[move.client_id]
            for message in (*device.waiting, *device.in_flight.values()):
                if message is not None:
                    message.expires_s += answer["left_s"]
            device.ends_s = NO_EXPIRY_S if device.expiry_s == NEVER_S else broker.clock() + device.expiry_s
            for text, *options in subscriptions:
                yield from devices.subscribe(device, text, Options(*options))
        except (ValueError, TypeError, KeyError):
            log.exception("the session of an MQTT client from node %d is malformed", node.number)
        self._finish(move, node)

    def _finish(self, move: _Move, chosen: RemoteNode | None) -> None:
        for _, node, _ in move.found:
            self._send(node, "done", id=move.client_id, late=node is chosen)
        move.result.resolve(not move.is_denied)

    def _on_late(self, node: RemoteNode, packet: Json) -> None:
        broker = self._state.broker
        devices = broker.devices
        device = devices.sessions.get(packet["id"]) if devices is not None else None
        is_other = bool(packet.get("is_other"))
        if is_other and device is not None and (device.client_id not in self._unsure or device.user != packet["user"]):
            device = None
        for name, payload, qos, retain, properties, left_s, identifiers in packet["messages"]:
            if device is None or (is_other and not device.may_get(name)):
                broker.stats.drop(Drop.UNROUTED, 1)
                continue
            expires_s = NO_EXPIRY_S if left_s is None else broker.clock() + left_s
            device.enqueue(Message(name, payload, qos, retain, properties, expires_s, identifiers))

    # ---- the node that has the session

    def _on_take(self, node: RemoteNode, request: Json) -> None:
        devices = self._state.broker.devices
        device = devices.sessions.get(request["id"]) if devices is not None else None
        answer: Json = {}
        # While the sessions of another process are expected, that one is asked, too.
        is_elsewhere = request["id"] in self._leaving or self._nodes.awaits_clients
        if device is None or is_elsewhere or device.ends_s <= self._state.broker.clock():
            pass
        elif device.user != request["user"]:
            answer["denied"] = True
        else:
            answer = self._hand_over(node, device, bool(request["clean"]))
        self._send(node, "answer", request=request["request"], id=request["id"], **answer)

    def _hand_over(self, node: RemoteNode, device: Device, is_clean: bool) -> Json:
        """Close the connection of a session and return its record; empty when the session has ended."""
        broker, client_id = self._state.broker, device.client_id
        devices, age_s = broker.devices, self._age_s(device)
        client = broker.uids.get(uid_of(client_id))
        if client is not None:
            devices.take_overs.record(client_id)
            client.disconnect(CloseReason.TAKEN_OVER, CloseReason.TAKEN_OVER.value.encode())
        if devices.sessions.get(client_id) is not device:
            return {}
        if is_clean:
            devices.end(device)
            return {}
        record = session_record(device)
        record["waiting"] = record["waiting"][: len(device.take_waiting(PORTION_BYTES))]
        device.will = None
        device.forget_in_flight()
        self._leaving[client_id] = node, device
        broker.call_later(LEAVING_S, lambda: self._end(client_id, device))
        return {"record": record, "age_s": age_s, "now_s": broker.clock()}

    def _on_done(self, node: RemoteNode, packet: Json) -> None:
        leaving, device = self._leaving.get(packet["id"], (None, None))
        if leaving is not node or device is None:
            return
        if packet["late"]:
            run_at_once(paced(node, self._send_late(node, device)), self._state.broker.clock)
        else:
            self._end(device.client_id, device)

    def _send_late(self, node: RemoteNode, device: Device) -> Iterator[None]:
        """Send the messages that wait in a session to its new node, in portions, and end it."""
        while device.waiting:
            self._send(node, "late", id=device.client_id, messages=self._left(device.take_waiting(PORTION_BYTES)))
            yield
        self._end(device.client_id, device)

    def _left(self, messages: list[Message]) -> list[tuple[object, ...]]:
        """Return the records of messages that have not expired, with the seconds until they do."""
        now_s = self._state.broker.clock()
        return [
            (
                one.name,
                one.payload,
                one.qos,
                one.retain,
                one.properties,
                None if one.expires_s == NO_EXPIRY_S else one.expires_s - now_s,
                one.identifiers,
            )
            for one in messages
            if one.expires_s > now_s
        ]

    def _end(self, client_id: str, device: Device) -> None:
        """End a session that was handed over, unless its client is connected here again."""
        if self._leaving.get(client_id, (None, None))[1] is not device:
            return
        del self._leaving[client_id]
        if device.client is None:
            self._state.broker.devices.end(device)

    def appeared(self, phantom: Phantom) -> None:
        """End the session of a client that is connected to another node now, which gets its messages."""
        devices = self._state.broker.devices
        if devices is None or phantom.node.send_queue.version < cluster_mqtt.VERSION:
            return
        device = self._device_of(phantom.uid)
        if device is None or device.client is not None or device.client_id in self._leaving:
            return
        if all(move.client_id != device.client_id for move in self._moves.values()):
            device.will = None
            messages = [one for one in (*device.in_flight.values(), *device.waiting) if one is not None]
            devices.end(device)
            run_at_once(paced(phantom.node, self._send_other(phantom.node, device, messages)), self._state.broker.clock)

    def _send_other(self, node: RemoteNode, device: Device, messages: list[Message]) -> Iterator[None]:
        """Send the messages of a session that has ended to the node where its client has another one, in portions."""
        portion, size = list[Message](), 0
        for at, one in enumerate(messages, 1):
            portion.append(one)
            size += one.size_bytes
            if size >= PORTION_BYTES or at == len(messages):
                other = {"is_other": True, "user": device.user}
                self._send(node, "late", id=device.client_id, messages=self._left(portion), **other)
                portion, size = [], 0
                yield

    def _device_of(self, uid: bytes) -> Device | None:
        devices = self._state.broker.devices
        found: Device | None = devices.sessions.get(uid.removeprefix(UID_PREFIX).decode("utf-8", "replace"))
        if found is None:
            found = devices.hashed.get(uid)
        return found if found is not None and uid_of(found.client_id) == uid else None

    def _age_s(self, device: Device) -> float:
        """Return the seconds since a client was last connected to a session."""
        return 0.0 if device.client is not None else self._state.broker.clock() - device.left_s
