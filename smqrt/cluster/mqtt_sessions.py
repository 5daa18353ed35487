"""Sessions of MQTT clients that move to the node to which their client connects.

    client ── CONNECT ──▶ node B ── take ──▶ all nodes
                                 ◀─ answer ─ node A, with the record of the session
                          node B subscribes, and accepts the client
                                 ── done ──▶ node A, which ends the session
                                 ◀─ late ─── with the messages that have arrived since

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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from smqrt.broker.deferred import Deferred
from smqrt.broker.mqtt.arrivals import class_of, prefix_of
from smqrt.broker.mqtt.client_ids import UID_PREFIX, uid_of
from smqrt.broker.mqtt.device import NEVER_S, Device
from smqrt.broker.mqtt.filters import Options
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message
from smqrt.broker.mqtt.records import restore_session, session_record
from smqrt.broker.outbox import Drop, run_at_once, run_in_background
from smqrt.cluster.leaving_nodes import AbsentNode, AbsentNodes
from smqrt.cluster.mqtt_nodes import MqttNodes
from smqrt.cluster.mqtt_streams import Acknowledgement, MqttStreams
from smqrt.cluster.remote_node import Phantom, RemoteNode
from smqrt.cluster.routing import TIMER_TOLERANCE_S, paced
from smqrt.cluster.state import ClusterState
from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import cluster_mqtt
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
MAX_RANGES = 16
MAX_IDS = 100_000
"""Ids of messages that a session remembers while older ones may follow."""
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


Ranges = dict[int, list[tuple[int, int]]]
"""Ids of messages by class, see `class_of`: above the first id and up to the second one of each pair."""


class SeenIds:
    """The messages that a session has got, which began or moved while another node may have messages for it.

    Args:
        known: what the session has got at former nodes.
        base: what this node had delivered before the session was here, see `Arrivals.delivered`.
    """

    def __init__(self, known: Ranges, base: dict[int, int]) -> None:
        self._known, self._base = known, dict(base)
        self._ids: dict[int, None] = {}

    def takes(self, origin: int) -> bool:
        """Return whether a message is new, and remember it."""
        return not (origin and _covers(self._known, origin)) and self.is_new(origin)

    def takes_late(self, origin: int, is_rest: bool) -> bool:
        """Return whether a message of another node is new, and remember it.

        Args:
            origin: its id.
            is_rest: whether it has waited in the session when the session was handed over.
        """
        return (is_rest or not _covers(self._known, origin, 1)) and self.is_new(origin)

    def is_new(self, origin: int) -> bool:
        """Return whether the session has not got a message here, and remember it."""
        if not origin:
            return True
        if origin in self._ids:
            return False
        self._ids[origin] = None
        if len(self._ids) > MAX_IDS:
            del self._ids[next(iter(self._ids))]
        return True

    def known(self, delivered: dict[int, int]) -> tuple[Ranges, list[int]]:
        """Return what the session has got, for its next node, and ids that are not in these ranges.

        Args:
            delivered: what this node has delivered, see `Arrivals.delivered`.
        """
        found = {key: list(ranges) for key, ranges in self._known.items()}
        for key, last in delivered.items():
            found[key] = [*found.get(key, ()), (self._base.get(key, 0), last)][-MAX_RANGES:]
        return found, [one for one in self._ids if not _covers(found, one)]


def _covers(known: Ranges, origin: int, lowest: int = 0) -> bool:
    """Return whether an id is in one of the ranges that begin at `lowest` or above."""
    return any(lowest <= low < origin <= high for low, high in known.get(class_of(origin), ()))


class LateIds:
    """The messages that the former node of a session still takes: not those of nodes that know its new node.

    Attributes:
        known: the prefixes of the ids of such nodes.
    """

    def __init__(self) -> None:
        self.known: set[int] = set()

    def takes(self, origin: int) -> bool:
        """Return whether the message is one of these."""
        return bool(origin) and origin >> 64 not in self.known


class _Leaving:
    """A session that was handed over.

    Attributes:
        node: its new node.
        device: the session here.
        handed: the messages that were handed over, until the node has confirmed them.
        is_done: whether the node has confirmed.
        until_s: when it ends here.
    """

    def __init__(self, node: RemoteNode, device: Device, handed: list[Message], until_s: float) -> None:
        self.node, self.device, self.handed, self.until_s = node, device, handed, until_s
        self.is_done = False


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
            # Without the text of the error, which may have all bytes of the packet.
            raise ProtocolError(
                CloseReason.UNKNOWN_PACKET, "a session of another node is malformed: not the JSON of a known kind"
            ) from None

    # ---- the node to which the client connects

    def take(self, client_id: str, user: str | None, is_clean: bool) -> Deferred[bool] | bool:
        """See `ClusterMqtt.take_session`."""
        asked, broker = self._nodes.asked(), self._state.broker
        self._remember(client_id, is_clean, self._nodes.has_lost)
        lost = [] if is_clean or self._has_own(client_id) else self._returning()
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
        """Ask a node that is back for the sessions of clients that wait for it."""
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
            if leaving.node is node and not leaving.is_done:
                self._take_back(leaving)
            if absent is not None and isinstance(leaving.device.origins, LateIds):
                leaving.device.origins.known.discard(prefix_of(absent.identity))

    def _take_back(self, leaving: _Leaving) -> None:
        """Keep messages that were handed over to a node that was lost before it had confirmed them."""
        del self._leaving[leaving.device.client_id]
        for message in leaving.handed:
            leaving.device.keep(message)

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
        youngest = min(move.found, key=lambda one: one[0], default=None)
        if youngest is None or devices is None or move.is_denied or (own and self._age_s(own) <= youngest[0]):
            self._finish(move, None)
            return
        rest = list[Message]()
        if own is not None:
            own.will = None
            leaving = self._leaving.pop(move.client_id, None)
            rest = list(own.waiting) if leaving is not None and leaving.device is own else []
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
            restored = [one for one in (*device.in_flight.values(), *device.waiting) if one is not None]
            for one, origin in zip(restored, ids, strict=False):
                one.origin = origin
            seen = self._see(device, known, [*ids, *map(int, answer.get("more_ids", ()))])
            for message in (*device.waiting, *device.in_flight.values()):
                if message is not None:
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
            self._send(node, "done", id=move.client_id, late=node is chosen)
        move.result.resolve(not move.is_denied)

    def _see(self, device: Device, known: Ranges, ids: Iterable[int]) -> SeenIds:
        """Remember the ids of the messages of a session, while another node may send it the same ones.

        Args:
            device: the session.
            known: see `SeenIds`.
            ids: ids of messages that the session has already.
        """
        device.origins = seen = SeenIds(known, device.devices.arrivals.delivered)
        for one in ids:
            seen.is_new(one)

        def forget() -> None:
            if device.origins is not seen:
                return
            if self._nodes.has_lost or device.client_id in self._unsure:
                self._state.broker.call_later(LEAVING_S, forget)
            else:
                device.origins = None

        self._state.broker.call_later(LEAVING_S * 2, forget)
        return seen

    def connected(self, device: Device) -> None:
        """Prepare a session that has a connection now."""
        leaving = self._leaving.get(device.client_id)
        if leaving is not None and leaving.device is device:
            device.origins = None
            del self._leaving[device.client_id]
        if device.origins is None and device.client_id in self._unsure:
            self._see(device, {}, ())

    def _on_late(self, node: RemoteNode, packet: Json) -> None:
        broker = self._state.broker
        devices = broker.devices
        device = devices.sessions.get(packet["id"]) if devices is not None else None
        is_other = bool(packet.get("is_other"))
        seen = device.origins if device is not None and isinstance(device.origins, SeenIds) else None
        if is_other and device is not None:
            is_expected = seen is not None or device.client_id in self._unsure
            if not is_expected or device.user != packet["user"]:
                device = None
        for name, payload, qos, retain, properties, left_s, identifiers, *origin in packet["messages"]:
            if device is None or (is_other and not device.may_get(name)):
                broker.stats.drop(Drop.UNROUTED, 1)
                continue
            expires_s = NO_EXPIRY_S if left_s is None else broker.clock() + left_s
            message = Message(name, payload, qos, retain, properties, expires_s, identifiers)
            message.origin = int(origin[0]) if origin else 0  # older versions have none
            if seen is None or seen.takes_late(message.origin, bool(packet.get("rest"))):
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
        handed = [one for one in device.in_flight.values() if one is not None]
        taken = device.take_waiting(PORTION_BYTES)
        record["waiting"] = record["waiting"][: len(taken)]
        device.will = None
        device.forget_in_flight()
        self._leaving[client_id] = leaving = _Leaving(node, device, handed + taken, broker.clock() + LEAVING_S)
        broker.call_later(LEAVING_S, lambda: self._end_if_due(client_id, leaving))
        delivered, seen = devices.arrivals.delivered, device.origins
        known = {key: [(0, last)] for key, last in delivered.items()}
        known, more_ids = seen.known(delivered) if isinstance(seen, SeenIds) else (known, [])
        return {
            "record": record,
            "age_s": age_s,
            "now_s": broker.clock(),
            "ids": [str(one.origin) for one in handed + taken],
            "again": [[number, str(origin)] for number, origin in devices.again.pop(device, {}).items()],
            "known": [[str(low), str(high)] for ranges in known.values() for low, high in ranges],
            "more_ids": list(map(str, more_ids)),
        }

    def _on_done(self, node: RemoteNode, packet: Json) -> None:
        leaving = self._leaving.get(packet["id"])
        if leaving is None or leaving.node is not node or leaving.is_done:
            return
        leaving.is_done, leaving.handed = True, []
        device = leaving.device
        if packet["late"]:
            run_at_once(paced(node, self._send_late(leaving)), self._state.broker.clock)
        elif device.client is None:
            self._end(device.client_id, leaving)

    def _send_late(self, leaving: _Leaving) -> Iterator[None]:
        """Send the messages that wait in a session to its new node, in portions.

        The session takes messages of lost nodes for a while, since they know only now that it has moved.
        """
        device = leaving.device
        yield from self._send_waiting(leaving, is_rest=True)
        is_old = leaving.node.send_queue.version < cluster_mqtt.STREAM_VERSION
        if is_old or not (self.transit_s or self._misses_others):
            self._end(device.client_id, leaving)
            return
        device.origins = LateIds()
        device.expiry_s = 0  # not saved any more: after a crash, its client would get these messages twice
        devices = self._state.broker.devices
        devices.session_changed(device)
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
        if not self._misses_others:
            run_in_background(self._end_after_messages(leaving))
        elif isinstance(leaving.device.origins, LateIds):
            answering = [node for node in self._state.remotes if not node.send_queue.is_quiet]
            leaving.device.origins.known.update(prefix_of(node.identity) for node in answering)

    def _end_after_messages(self, leaving: _Leaving) -> Iterator[None]:
        if not leaving.node.gone:
            yield from self._send_waiting(leaving)
        self._end(leaving.device.client_id, leaving)

    @property
    def _misses_others(self) -> bool:
        """Whether another node may have messages for a session: one that is lost, or does not answer."""
        return bool(self._lost.nodes) or any(node.send_queue.is_quiet for node in self._state.remotes)

    def _send_waiting(self, leaving: _Leaving, is_rest: bool = False) -> Iterator[None]:
        device = leaving.device
        while device.waiting:
            messages = self._left(device.take_waiting(PORTION_BYTES))
            self._send(leaving.node, "late", id=device.client_id, messages=messages, rest=is_rest)
            yield

    def _send_all_late(self) -> None:
        """Send what has arrived for sessions that were handed over, in the background."""
        for leaving in self._leaving.values():
            if leaving.node.gone:  # it may be back
                identity = leaving.node.identity
                back = (one for one in self._state.remotes if identity and one.identity == identity)
                leaving.node = next(back, leaving.node)
            if leaving.is_done and leaving.device.client is None and leaving.device.waiting and not leaving.node.gone:
                run_in_background(paced(leaving.node, self._send_waiting(leaving)))
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
        if self._lost.nodes:
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
