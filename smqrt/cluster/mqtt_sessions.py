"""Sessions of MQTT clients that move to the node to which their client connects.

    client ── CONNECT ──▶ node B ── take ──▶ all nodes
                                 ◀─ answer ─ node A, with the record of the session
                          node B subscribes, and accepts the client
                                 ── done ──▶ node A, which ends the session
                                 ◀─ late ─── with the messages that have arrived since, numbered as in `mqtt_streams`

A CONNECT waits for a node that was lost a moment ago, and may have its session. A node that does not answer in time is
skipped. When it learns that the client is connected elsewhere, it ends its session, and sends the messages in it to the
client's node as `late`, marked as those of another session.

For a while, both nodes may get a message: node A keeps the session for messages of nodes that it had lost. Node B finds
such messages by their ids, see decision 0051.
"""

from __future__ import annotations

import json
import logging
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from smqrt.broker.deferred import Deferred
from smqrt.broker.mqtt.arrivals import CHOSEN, class_of, prefix_of, set_bounded
from smqrt.broker.mqtt.client_ids import UID_PREFIX, uid_of
from smqrt.broker.mqtt.device import NEVER_S, Device
from smqrt.broker.mqtt.devices import SELF
from smqrt.broker.mqtt.filters import Options
from smqrt.broker.mqtt.messages import MESSAGE_BYTES, NO_EXPIRY_S, Message
from smqrt.broker.mqtt.records import restore_session, session_record
from smqrt.broker.outbox import Drop, run_at_once, run_in_background
from smqrt.cluster.leaving_nodes import AbsentNode, AbsentNodes
from smqrt.cluster.mqtt_nodes import MqttNodes, expires_s_of
from smqrt.cluster.mqtt_streams import Acknowledgement, MessageStream, MqttStreams
from smqrt.cluster.remote_node import Phantom, RemoteNode
from smqrt.cluster.routing import TIMER_TOLERANCE_S, paced
from smqrt.cluster.seen_ids import LateIds, Ranges, SeenIds
from smqrt.cluster.state import ClusterState
from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import cluster_mqtt, smq
from smqrt.wire.cluster_mqtt import Numbered
from smqrt.wire.cluster_packets import LinkType

log = logging.getLogger("smqrt")

ANSWER_S, MIGRATION_S, LOST_S = 2.0, 3.0, 15.0
"""The maximum time for which a CONNECT waits for other nodes, for one whose hub migrates to another process, and the
default for a client with a kept session while a node is lost."""
CATCH_UP_S = 2.0
"""The maximum time for which a session is not handed over because other nodes have kept messages for it."""
TRANSIT_S = 1.0
"""Time from the subscription at the new node until no messages are on their way to the former one."""
LATE_S = 0.1
"""Time between two portions of messages that arrive at the former node of a session."""
LEAVING_S = 10.0
"""The maximum time for which a session that was handed over receives messages for the other node."""
CONFIRM_S = 120.0
"""The maximum time for which the other node may save the session, before it ends here."""
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
        lost: lost nodes that may return in time.
        result: resolved with whether the client may connect.
    """

    def __init__(self, client_id: str, waiting: list[RemoteNode], is_clean: bool) -> None:
        self.client_id, self.waiting, self.is_clean = client_id, waiting, is_clean
        self.found: list[tuple[float, RemoteNode, Json]] = []
        self.user: str | None = None
        self.lost: list[AbsentNode] = []
        self.is_denied = False
        self.result: Deferred[bool] = Deferred()


def _remember(of: dict[str, None], client_id: str, is_set: bool) -> None:
    """Add a client id to those that are remembered, or remove it."""
    if is_set:
        set_bounded(of, client_id, None, MAX_UNSURE)
    else:
        of.pop(client_id, None)


def _messages(device: Device) -> list[Message]:
    """Return the messages in flight and those that wait in a session."""
    return [one for one in (*device.in_flight.values(), *device.waiting) if one is not None]


def _malformed() -> ProtocolError:
    # Without the text of the error, which may have all bytes of the packet.
    return ProtocolError(
        CloseReason.UNKNOWN_PACKET, "a session of another node is malformed: not the JSON of a known kind"
    )


class _Leaving:
    """A session that was handed over.

    Attributes:
        node: its new node.
        stream: the messages to this node; None for one of an older release.
        device: the session here.
        handed: the waiting messages that were handed over; they stay in the session until the node has confirmed.
        is_done: whether the node has confirmed.
        groups: the shared subscriptions that it has left here since then.
        begun_s, until_s: when it was handed over, and when it ends here.
    """

    def __init__(self, node: RemoteNode, device: Device, handed: list[Message], until_s: float) -> None:
        self.node, self.device, self.handed, self.until_s = node, device, handed, until_s
        self.stream = node.stream if node.send_queue.version >= cluster_mqtt.SESSION_VERSION else None
        self.begun_s = until_s - LEAVING_S
        self.is_done = False
        self.groups: dict[str, Options] = {}


class SessionMoves:
    """The sessions that one hub hands over to other nodes, and takes from them.

    Args:
        state: the state that the parts of the cluster share.
        nodes: the nodes with links of version 2.
        lost: the lost nodes.
        streams: numbered messages.

    Attributes:
        wait_s: seconds for which a CONNECT waits for a lost node.
        transit_s: seconds for which a session that was handed over gets messages that are on their way.
    """

    def __init__(self, state: ClusterState, nodes: MqttNodes, lost: AbsentNodes, streams: MqttStreams) -> None:
        self._state, self._nodes, self._lost, self._streams = state, nodes, lost, streams
        self._takes: list[tuple[RemoteNode, Json]] = []
        """Requests that wait until messages have arrived that other nodes have kept."""
        self.wait_s, self.transit_s = LOST_S, TRANSIT_S
        self._moves: dict[int, _Move] = {}
        self._leaving: dict[str, _Leaving] = {}
        """Sessions that were handed over, by client id."""
        self._is_sending = False
        self._unsure: dict[str, None] = {}
        """Client ids of sessions that began while a node was lost, which may have messages for them."""
        self._doubtful: dict[str, None] = {}
        """Client ids of new sessions, while a node was lost that may have the former one."""
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
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _malformed() from None

    # ---- the node to which the client connects

    def take(self, client_id: str, user: str | None, is_clean: bool) -> Deferred[bool] | bool:
        """See `ClusterMqtt.take_session`."""
        asked, broker = self._nodes.asked(), self._state.broker
        self._remember(client_id, is_clean, self._nodes.has_lost)
        has_own = self._has_own(client_id)
        _remember(self._doubtful, client_id, self._nodes.has_lost and not (is_clean or has_own))
        lost = [] if is_clean or has_own else self._returning()
        if not asked and not lost:
            return True
        self._last += 1
        number, move = self._last, _Move(client_id, asked, is_clean)
        move.user, move.lost = user, lost
        self._moves[number] = move
        for node in list(asked):
            self._ask(number, move, node)
        answer_s = MIGRATION_S if any(node.send_queue.keeps for node in asked) else ANSWER_S
        if not is_clean:
            answer_s = max(answer_s, self.wait_s)
        broker.call_later(answer_s, lambda: self._complete(number))
        return move.result

    def _ask(self, number: int, move: _Move, node: RemoteNode) -> None:
        self._send(node, "take", request=number, id=move.client_id, user=move.user, clean=move.is_clean)

    def _has_own(self, client_id: str) -> bool:
        """Return whether this node has the session of a client, which was not handed over."""
        return client_id in self._state.broker.devices.sessions and client_id not in self._leaving

    def _returning(self) -> list[AbsentNode]:
        """Return the lost nodes for which a CONNECT waits: a worker that was killed is back soon."""
        since_s = self._state.broker.clock() - self.wait_s
        return [one for one in self._lost.nodes if one.has_mqtt and one.lost_s > since_s]

    def returned(self, node: RemoteNode) -> None:
        """Ask a node that is back for the sessions of clients that wait for it.

        Sessions that were handed over do not wait for its messages much longer.
        """
        for leaving in self._leaving.values():
            if isinstance(leaving.device.origins, LateIds):
                self._state.broker.call_later(self.transit_s, partial(self._narrow, leaving))
        for number, move in list(self._moves.items()):
            found = [one for one in move.lost if one in self._lost.at(node)]
            if not found:
                continue
            move.lost = [one for one in move.lost if one not in found]
            if node.has_mqtt and node not in move.waiting:
                move.waiting.append(node)
                self._ask(number, move, node)
            elif not move.waiting and not move.lost:
                self._complete(number)

    def forgotten(self, absent: AbsentNode) -> None:
        """Do not wait for a lost node any more."""
        for number, move in list(self._moves.items()):
            if absent in move.lost:
                move.lost.remove(absent)
                if not move.waiting and not move.lost:
                    self._complete(number)

    def _remember(self, client_id: str, is_clean: bool, is_unsure: bool) -> None:
        """Remember whether a node that could not be asked may have messages for a client."""
        if is_clean or is_unsure:
            _remember(self._unsure, client_id, not is_clean)

    def is_doubtful(self, client_id: str) -> bool:
        """See `ClusterMqtt`."""
        return client_id in self._doubtful

    def _on_answer(self, node: RemoteNode, answer: Json) -> None:
        move = self._moves.get(answer["request"])
        if move is None or move.client_id != answer["id"] or node not in move.waiting:  # the answer is too late
            return
        move.waiting.remove(node)
        move.is_denied = move.is_denied or bool(answer.get("denied"))
        if "record" in answer:
            answer["left_s"] = self._state.broker.clock() - answer["now_s"]  # between the clocks of the two nodes
            move.found.append((answer["age_s"], node, answer))
        if not move.waiting and (move.found or move.is_denied or not move.lost):
            self._complete(answer["request"])

    def left(self, node: RemoteNode, absent: AbsentNode | None) -> None:
        """Do not wait for a node that has left; for one that is lost, until it returns or the time is over.

        Args:
            node: the node.
            absent: the same, if it is lost.
        """
        for number, move in list(self._moves.items()):
            if node not in move.waiting:
                continue
            move.waiting.remove(node)
            move.found = [one for one in move.found if one[1] is not node]
            self._remember(move.client_id, move.is_clean, True)
            if absent in self._returning() and not move.is_clean and not self._has_own(move.client_id):
                move.lost += [absent] if absent is not None else []
            elif not move.waiting and not move.lost:
                self._complete(number)
        for leaving in list(self._leaving.values()):
            if leaving.node is node and not leaving.is_done:  # the session stays here
                del self._leaving[leaving.device.client_id]
            if absent is not None and isinstance(leaving.device.origins, LateIds):
                leaving.device.origins.known.discard(prefix_of(absent.identity))

    def moved(self, before: RemoteNode, node: RemoteNode) -> None:
        """Wait for another node, to whose process a hub has migrated."""
        for move in self._moves.values():
            move.waiting = [node if one is before else one for one in move.waiting]

    def _complete(self, number: int) -> None:
        """Continue a CONNECT with the youngest session; the others are ended."""
        move = self._moves.pop(number, None)
        if move is None:
            return
        self._remember(move.client_id, move.is_clean, bool(move.waiting or move.lost))
        devices = self._state.broker.devices
        own = devices.sessions.get(move.client_id) if devices is not None else None
        leaving = self._leaving.get(move.client_id)
        is_leaving = leaving is not None and leaving.device is own
        youngest = min(move.found, key=lambda one: one[0], default=None)
        if own is not None or youngest is not None or not (move.waiting or move.lost):
            self._doubtful.pop(move.client_id, None)
        is_own_younger = own and youngest and not is_leaving and self._age_s(own) <= youngest[0]
        if youngest is None or devices is None or move.is_denied or is_own_younger:
            if own is not None and move.found and own.origins is None:  # messages of the older sessions follow
                self._see(own, {}, [one.origin for one in _messages(own)])
            self._finish(move, None)
            return
        rest = list[Message]()
        if own is not None:
            own.will = None
            self._leaving.pop(move.client_id, None)
            rest = [one for one in _messages(own) if is_leaving or one.origin & CHOSEN]
            devices.end(own)
        run_at_once(self._restore(move, youngest[1], youngest[2], rest), self._state.broker.clock)

    def _restore(self, move: _Move, node: RemoteNode, answer: Json, rest: list[Message]) -> Iterator[None]:
        broker = self._state.broker
        devices, record = broker.devices, answer["record"]
        try:
            subscriptions, record["subscriptions"] = record["subscriptions"], []
            restore_session(devices, record)
            device: Device = devices.sessions[move.client_id]
            if again := {number: int(origin) for number, origin in answer.get("again", ())}:
                devices.again[device] = again
            known: Ranges = {}
            for low, high in answer.get("known", ()):
                known.setdefault(class_of(int(high)), []).append((int(low), int(high)))
            ids = list(map(int, answer.get("ids", ())))
            for one, origin in zip(_messages(device), ids, strict=False):
                one.origin = origin
            seen = self._see(device, known, [*ids, *map(int, answer.get("more_ids", ()))])
            if node.send_queue.version >= cluster_mqtt.SESSION_VERSION:
                seen.former = node.identity
            for message in _messages(device):
                message.expires_s += answer["left_s"]
            device.ends_s = NO_EXPIRY_S if device.expiry_s == NEVER_S else broker.clock() + device.expiry_s
            for text, *options in subscriptions:
                yield from devices.subscribe(device, text, Options(*options))
            for message in rest:
                if seen.takes(message.origin):
                    device.enqueue(message)
        except (ValueError, TypeError, KeyError):
            log.exception("the session of an MQTT client from node %d is malformed", node.number)
        self._finish(move, node)

    def _finish(self, move: _Move, chosen: RemoteNode | None) -> None:
        for _, node, _ in move.found:
            if node is not chosen:
                self._send(node, "done", id=move.client_id, late=False)
        if chosen is not None:  # it keeps the session until the file here has it
            self._streams.when_saved(lambda: self._send(chosen, "done", id=move.client_id, late=True))
        move.result.resolve(not move.is_denied)

    def _see(self, device: Device, known: Ranges, ids: Iterable[int]) -> SeenIds:
        """Remember the ids of the messages of a session, while another node may send it the same ones.

        Args:
            device: the session.
            known: see `SeenIds`.
            ids: ids of messages that the session has already.
        """
        device.origins = seen = SeenIds(known, device.devices.arrivals.delivered)
        until_s = self._state.broker.clock() + self._lost.kept_s
        for one in ids:
            seen.is_new(one)

        def forget() -> None:
            if device.origins is not seen:
                return
            is_followed = any(seen.former and node.identity == seen.former for node in self._state.remotes)
            is_young = self._state.broker.clock() < until_s
            if self._nodes.has_lost or (is_young and (is_followed or device.client_id in self._unsure)):
                self._state.broker.call_later(LEAVING_S, forget)
            else:
                device.origins = None

        self._state.broker.call_later(LEAVING_S * 2, forget)
        return seen

    def connected(self, device: Device) -> None:
        """Prepare a session that has a connection now."""
        leaving = self._leaving.pop(device.client_id, None)
        if leaving is not None and leaving.device is device:
            device.origins = None
            for text, options in leaving.groups.items():
                run_at_once(device.devices.subscribe(device, text, options), self._state.broker.clock)
        if device.origins is None and device.client_id in self._unsure:
            self._see(device, {}, ())

    def _on_late(self, node: RemoteNode, packet: Json) -> None:
        """Process messages of a node of an older release for a session that has moved."""
        now_s = self._state.broker.clock()
        for name, payload, qos, retain, properties, left_s, identifiers, *origin in packet["messages"]:
            expires_s = NO_EXPIRY_S if left_s is None else now_s + left_s
            message = Message(name, payload, qos, retain, properties, expires_s, identifiers)
            message.origin = int(origin[0]) if origin else 0  # even older versions have none
            self._follow(packet, message)

    def on_message(self, found: Numbered) -> None:
        """Process a message of another node for a session that has moved.

        Raises:
            ProtocolError: its description is malformed.
        """
        sent, payload = found.messages, found.messages.frames[smq.PUBLISH_HEADER_BYTES :]
        payload = payload if sent.large is None else sent.large
        expires_s = expires_s_of(sent.left_ms, self._state.broker.clock())
        try:
            packet = json.loads(sent.session)
            identifiers = bytes.fromhex(packet["identifiers"])
            message = Message(sent.name, payload, sent.qos, sent.retain, sent.properties, expires_s, identifiers)
            message.origin = found.origin
            if not sent.qos or not isinstance(packet["id"], str):
                raise ValueError("a message with QoS 0, or no client id")
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _malformed() from None
        self._streams.in_order(lambda: self._follow_numbered(packet, message, found))

    def _follow_numbered(self, packet: Json, message: Message, found: Numbered) -> None:
        """Add a message to a session, and save its number: those before it in the stream are delivered."""
        self._follow(packet, message)
        devices = self._state.broker.devices
        if devices.ledger is not None:
            devices.ledger.touch((found.stream, found.number))

    def _follow(self, packet: Json, message: Message) -> None:
        """Add a message that has arrived at another node to a session here, if it is new.

        Args:
            packet: `id`: the client id; `is_other`, `user`: whether it was another session of this user that has ended;
                `rest`: whether the message has waited when the session was handed over; `is_end`: whether it is no
                message, but the former node gets none for the session any more.
            message: the message.
        """
        broker = self._state.broker
        devices = broker.devices
        device = devices.sessions.get(packet["id"]) if devices is not None else None
        seen = device.origins if device is not None and isinstance(device.origins, SeenIds) else None
        if packet.get("is_other") and device is not None:
            is_expected = seen is not None or device.client_id in self._unsure
            if not is_expected or device.user != packet["user"] or not device.may_get(message.name):
                device = None
        if packet.get("is_end"):
            if seen is not None:
                seen.former = b""
        elif device is None:
            broker.stats.drop(Drop.UNROUTED, 1)
        elif seen is None or seen.takes_late(message.origin, bool(packet.get("rest"))):
            device.enqueue(message)

    # ---- the node that has the session

    def _on_take(self, node: RemoteNode, request: Json) -> None:
        """Process a request for a session; it waits until messages have arrived that other nodes have kept for it."""
        if not self._streams.is_behind and not self._takes:
            self._answer(node, request)
            return
        self._takes.append((node, request))
        if not self._streams.is_behind:
            return
        if len(self._takes) == 1:
            self._state.broker.call_later(CATCH_UP_S, self._answer_all)

    def caught_up(self) -> None:
        """Answer the requests that have waited, when the messages are delivered to the sessions."""
        devices = self._state.broker.devices
        if self._takes and devices is not None:
            mark = Acknowledgement()
            mark.send = self._answer_all
            devices.put(mark)

    def _answer_all(self) -> None:
        takes, self._takes = self._takes, []
        for node, request in takes:
            if not node.gone:
                self._answer(node, request)

    def _answer(self, node: RemoteNode, request: Json) -> None:
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
        handed, size = list[Message](), 0
        for message in device.waiting:
            handed.append(message)
            size += message.size_bytes + MESSAGE_BYTES
            if size >= PORTION_BYTES:
                break
        for message in (*device.in_flight.values(), *handed):
            if message is not None and not message.origin:  # it was sent to no other node; now two may have it
                message.origin = devices.arrivals.new_origin(1, message.qos) | CHOSEN
        record["waiting"] = record["waiting"][: len(handed)]
        device.will = None
        self._leaving[client_id] = leaving = _Leaving(node, device, handed, broker.clock() + LEAVING_S)
        broker.call_later(LEAVING_S, lambda: self._end_if_due(client_id, leaving))
        delivered, seen = devices.arrivals.delivered, device.origins
        known = {key: [(0, last)] for key, last in delivered.items()}
        known, more_ids = seen.known(delivered) if isinstance(seen, SeenIds) else (known, [])
        return {
            "record": record,
            "age_s": age_s,
            "now_s": broker.clock(),
            "ids": [str(one.origin) for one in (*device.in_flight.values(), *handed) if one is not None],
            "again": [[number, str(origin)] for number, origin in devices.again.get(device, {}).items()],
            "known": [[str(low), str(high)] for ranges in known.values() for low, high in ranges],
            "more_ids": list(map(str, more_ids)),
        }

    def _on_done(self, node: RemoteNode, packet: Json) -> None:
        leaving = self._leaving.get(packet["id"])
        if leaving is None or leaving.node is not node or leaving.is_done:
            return
        leaving.is_done = True
        device = leaving.device
        if not packet["late"]:  # another session is younger; messages for one client of a group are only here
            messages = [one for one in _messages(device) if one.origin & CHOSEN]
            self._end(device.client_id, leaving)
            self._send_other(node, device, messages)
            return
        device.devices.again.pop(device, None)
        device.forget_in_flight()
        for message in leaving.handed:
            if device.waiting and device.waiting[0] is message:  # not if too many waited meanwhile
                device.take_waiting(1)
        leaving.handed = []
        self._send_late(leaving)

    def _send_late(self, leaving: _Leaving) -> None:
        run_at_once(self._paced(leaving, self._send_rest(leaving)), self._state.broker.clock)

    def _paced(self, leaving: _Leaving, steps: Iterator[None]) -> Iterator[None]:
        return paced(leaving.node, steps) if leaving.stream is None else steps

    def _send_rest(self, leaving: _Leaving) -> Iterator[None]:
        """Send the messages that wait in a session to its new node, in portions.

        The session takes messages of lost nodes for a while, since they know only now that it has moved.
        """
        device = leaving.device
        yield from self._send_waiting(leaving, is_rest=True)
        if self._leaving.get(device.client_id) is not leaving or device.client is not None:
            return
        if device.waiting:  # more than the link takes now
            self._state.broker.call_later(LATE_S, lambda: self._send_late(leaving))
            return
        is_old = leaving.node.send_queue.version < cluster_mqtt.STREAM_VERSION
        if is_old or not (self.transit_s or self._misses_others):
            yield from self._end_after_messages(leaving)
            return
        device.origins = LateIds()
        device.expiry_s = 0  # not saved any more: after a crash, its client would get these messages twice
        devices = self._state.broker.devices
        devices.session_changed(device)
        for text in [one for one in device.subscriptions if one.startswith("$share/")]:
            if self._leaving.get(device.client_id) is not leaving:
                return
            leaving.groups[text] = device.subscriptions[text]
            devices.unsubscribe(device, text)  # the new node has subscribed, and gets what still arrives here
            yield
        if devices.ledger is not None:
            devices.ledger.wake()
        self._state.broker.call_later(self.transit_s, lambda: self._narrow(leaving))
        if not self._is_sending:
            self._is_sending = True
            self._state.broker.call_later(LATE_S, self._send_all_late)

    def _narrow(self, leaving: _Leaving) -> None:
        """Take only messages of nodes that do not know yet that a session has moved; without any, end it."""
        if self._leaving.get(leaving.device.client_id) is not leaving:
            return
        if self._streams.is_behind:
            self._state.broker.call_later(LATE_S, lambda: self._narrow(leaving))
        elif not self._misses_others:
            run_in_background(self._end_after_messages(leaving))
        elif isinstance(leaving.device.origins, LateIds):
            answering = [node for node in self._state.remotes if not node.send_queue.is_quiet]
            leaving.device.origins.known.update(prefix_of(node.identity) for node in answering)

    def _end_after_messages(self, leaving: _Leaving) -> Iterator[None]:
        yield from self._send_waiting(leaving)
        is_open = leaving.stream is not None or not leaving.node.gone
        if leaving.device.waiting and is_open and self._leaving.get(leaving.device.client_id) is leaving:
            later = partial(run_in_background, self._end_after_messages(leaving))
            self._state.broker.call_later(LATE_S, later)
            return
        self._end(leaving.device.client_id, leaving)
        if leaving.stream is not None:
            end = json.dumps({"id": leaving.device.client_id, "identifiers": "", "is_end": True}).encode()
            self._streams.put_for_session(leaving.stream, Message(SELF, b"", 1), end)

    @property
    def _misses_others(self) -> bool:
        """Whether another node may have messages for a session: one that is lost, or does not answer."""
        return bool(self._lost.nodes) or any(node.send_queue.is_quiet for node in self._state.remotes)

    def _send_waiting(self, leaving: _Leaving, is_rest: bool = False) -> Iterator[None]:
        """Send the messages that wait in a session to its new node, in portions, as far as the link takes them.

        Args:
            leaving: the session.
            is_rest: whether they have waited when the session was handed over.
        """
        device, stream = leaving.device, leaving.stream
        while device.waiting and (stream is None or stream.has_room):
            if stream is None and leaving.node.gone:
                return
            messages = device.take_waiting(PORTION_BYTES)
            self._send_portion(leaving.node, stream, device, messages, rest=is_rest)
            yield

    def _send_portion(
        self, node: RemoteNode, stream: MessageStream | None, device: Device, messages: list[Message], **more: object
    ) -> None:
        """Send messages to the node that has the session of a client now; see `_follow`."""
        if stream is None:
            self._send(node, "late", id=device.client_id, messages=self._left(messages), **more)
            return
        now_s = self._state.broker.clock()
        for one in messages:
            if one.expires_s > now_s:
                session = {"id": device.client_id, "identifiers": one.identifiers.hex(), **more}
                self._streams.put_for_session(stream, one, json.dumps(session).encode())

    def _send_all_late(self) -> None:
        """Send what has arrived for sessions that were handed over, in the background."""
        for leaving in self._leaving.values():
            if leaving.node.gone:  # it may be back
                identity = leaving.node.identity
                back = (one for one in self._state.remotes if identity and one.identity == identity)
                leaving.node = next(back, leaving.node)
            if leaving.is_done and leaving.device.client is None and leaving.device.waiting:
                run_in_background(self._paced(leaving, self._send_waiting(leaving)))
        self._is_sending = bool(self._leaving)
        if self._is_sending:
            self._state.broker.call_later(LATE_S, self._send_all_late)

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
                str(one.origin),
            )
            for one in messages
            if one.expires_s > now_s
        ]

    def _end_if_due(self, client_id: str, leaving: _Leaving) -> None:
        """End a session that was handed over, when all nodes are reachable for some time."""
        broker = self._state.broker
        if self._leaving.get(client_id) is not leaving:
            return
        is_unconfirmed = not (leaving.is_done or leaving.node.gone) and broker.clock() < leaving.begun_s + CONFIRM_S
        if self._lost.nodes or is_unconfirmed:
            leaving.until_s = broker.clock() + LEAVING_S
        if broker.clock() < leaving.until_s - TIMER_TOLERANCE_S:
            broker.call_later(LEAVING_S, lambda: self._end_if_due(client_id, leaving))
        else:
            run_in_background(self._end_after_messages(leaving))

    def _end(self, client_id: str, leaving: _Leaving) -> None:
        """End a session that was handed over, unless its client is connected here again."""
        if self._leaving.get(client_id) is not leaving:
            return
        del self._leaving[client_id]
        if leaving.device.client is None:
            self._state.broker.devices.end(leaving.device)

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
            messages = _messages(device)
            devices.end(device)
            self._send_other(phantom.node, device, messages)

    def _send_other(self, node: RemoteNode, device: Device, messages: list[Message]) -> None:
        """Send the messages of a session that has ended to the node where its client has another one."""
        stream = node.stream if node.send_queue.version >= cluster_mqtt.SESSION_VERSION else None
        steps = self._send_others(node, stream, device, deque(messages))
        run_at_once(paced(node, steps) if stream is None else steps, self._state.broker.clock)

    def _send_others(
        self, node: RemoteNode, stream: MessageStream | None, device: Device, messages: deque[Message]
    ) -> Iterator[None]:
        while messages:
            if stream is not None and not stream.has_room:
                later = partial(run_in_background, self._send_others(node, stream, device, messages))
                self._state.broker.call_later(LATE_S, later)
                return
            portion, size = list[Message](), 0
            while messages and size < PORTION_BYTES:
                portion.append(messages.popleft())
                size += portion[-1].size_bytes + MESSAGE_BYTES
            self._send_portion(node, stream, device, portion, is_other=True, user=device.user)
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
