"""SMQ broker with gevent: sockets, clock, random numbers, files, and calls from threads.

The module also has the options of `create`, and the settings that apply to all hubs of this process.
"""

from __future__ import annotations

import itertools
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from gevent import get_hub

import smqrt
from smqrt.auth.service import IdentityService, server_identity_service
from smqrt.broker import client_limits, sessions
from smqrt.broker.broker import Name, check_size
from smqrt.broker.last_values import LastValueLimits, LastValues, check_filters
from smqrt.broker.last_values import clock as value_clock
from smqrt.broker.mqtt.application import PublishOptions, checked_options
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.outbox import Pressure, QueuedMemory, Slow, SlowPolicies, run_in_background
from smqrt.broker.sessions import Session
from smqrt.broker.state import Hooks
from smqrt.broker.topics import HubLimits, PublishLimits
from smqrt.errors import ArgumentError
from smqrt.process import current_process
from smqrt.settings.limits import SLOW_POLICIES, LimitSettings, current_limits, current_mqtt, current_topics, on_change
from smqrt.settings.option_types import InvalidValueError, Rule, choice, option, optional, path, switch, texts, whole
from smqrt.smq import close_log, data_path, handshake, mqtt_connection, session_migration
from smqrt.smq.connection import RawConnection
from smqrt.smq.connection_kinds import IdleClients, police
from smqrt.smq.handshake import (
    KEEPALIVE_SECONDS,
    Admission,
    DetachedConnection,
    HubAuthentication,
    KeepAlive,
    Origin,
)
from smqrt.smq.hub_registry import HubFile, RegisteredBroker, hub_registry
from smqrt.smq.mqtt_file import SqliteMqtt
from smqrt.smq.persist_file import SqliteNames, SqliteValues
from smqrt.transport.listener import KEEPALIVE_IDLE_S
from smqrt.transport.origins import Origins
from smqrt.wire.kernels import mqtt_packets
from smqrt.workers.worker_rpc import worker_place

value_clock.follow(time.monotonic_ns, time.time_ns())  # at import, before any message is stamped


def _origins(value: object) -> Origins:
    if not isinstance(value, str | Iterable):
        raise InvalidValueError
    return Origins(value)


def _name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS or not value.isprintable():
        raise InvalidValueError
    return value


MAX_NAME_CHARS = 100
_NAME = Rule(f"a string of 1 to {MAX_NAME_CHARS} printable characters", _name)
_ORIGINS = Rule("a string, or a list of strings", _origins)


@dataclass(slots=True)
class HubOptions:
    """The options of `create` that are neither callbacks nor the journal (spec: smq §2.2)."""

    keepidle_s: int = option(
        KEEPALIVE_IDLE_S,
        KEEPALIVE_SECONDS,
        "TCP keep-alive of clients: seconds of silence before the first probe",
        name="keepidle",
    )
    keepintv_s: int = option(
        0, KEEPALIVE_SECONDS, "seconds between probes", name="keepintv", shown="a tenth of `keepidle`, at least 3"
    )
    readtmo_ms: int | None = option(
        None,
        optional(whole(1, unit="ms")),
        "milliseconds in which a client must send Connect",
        name="readtmo",
        shown="`limits.handshake_s`, 4000",
    )
    queuesize: int = option(
        200,
        whole(1),
        "messages of the server that may be queued while `onpublish` blocks; further ones are dropped and counted",
    )
    budget_bytes: int | None = option(
        None,
        optional(whole(1, unit="bytes")),
        "size of a client's send queue in bytes, see [the data path](data-path.md)",
        name="budget",
        shown="`limits.queue_bytes`, 1 MiB",
    )
    slow: str | None = option(
        None,
        optional(choice(*SLOW_POLICIES)),
        "the policy for a full send queue: `newest`, `oldest`, `latest`, `disconnect` or `wait`, see [slow "
        "consumers](slow-consumers.md)",
        shown="`limits.slow`, `newest`",
    )
    origins: Origins | None = option(
        None,
        optional(_ORIGINS),
        "pages of other hosts that may connect, a list or a comma-separated string: `https://example.com`, "
        "`https://*.example.com`, `null`; `*` for all. The setting `origins` applies to all hubs",
    )
    maxnames: int | None = option(
        None,
        optional(whole(1)),
        "maximum number of topics, and of sub-topics; see [limits](hub-api.md#limits)",
        shown="`limits.names`, 250000",
    )
    clientnames: int | None = option(
        None,
        optional(whole(1)),
        "maximum number of names that a client may create, of its subscriptions, and of topics and clients it observes",
        shown="`limits.client_names`, 10000",
    )
    auth: bool = option(
        True,
        switch(),
        "apply the server's [users and rules](identity.md), if it has any; false: accept all clients",
    )
    name: str | None = option(
        None,
        optional(_NAME),
        "identifies the hub in a [hot restart](hot-restart.md), even if the application creates its hubs in "
        "another order; unique in an application",
        shown="its number in the order of creation",
    )
    keep: bool = option(
        False,
        switch(),
        "keep clients connected while the application [restarts](hot-restart.md#one-application) in this process",
    )
    rndtid: bool = option(False, switch(), "use a random etid for the server instead of 1")
    cluster: str | None = option(
        None,
        optional(_NAME),
        "the name of a cluster, which joins the hub with those of the same name in other processes, see "
        "[clusters](cluster.md)",
        shown="none",
    )
    observe: str | None = option(
        None,
        optional(choice("node", "cluster")),
        "subscribers that `observe` counts: those of this `node`, or of the whole `cluster`",
        shown="`node`; with [workers](workers.md) and no other nodes `cluster`",
    )
    mqtt: bool = option(
        False,
        switch(),
        "accept [MQTT clients](mqtt-hub.md) too: on the ports of the pages, and on WebSockets",
    )
    lastvalue: tuple[str, ...] = option(
        (),
        texts(),
        "topics whose newest message is sent to new subscribers: filters such as `site1/#`, a list or a "
        "comma-separated string, see [last values](last-value.md)",
        shown="none",
    )
    persist: str | None = option(
        None,
        optional(path()),
        "a file that keeps names with their numbers, last values, and MQTT sessions and retained messages across "
        "restarts (SQLite, for one hub only)",
        shown="none",
    )


@dataclass(frozen=True, slots=True)
class TopicRules:
    """The server's settings about topics, for all hubs.

    Attributes:
        last_values: filters of the topics whose last values are kept.
        limits: of these last values.
        sync_s: seconds from a change of a last value to its commit.
    """

    last_values: tuple[str, ...] = ()
    limits: LastValueLimits = LastValueLimits()
    sync_s: float = 1.0


class IdentifiedBroker(Protocol):
    """A broker whose clients may be users of the server.

    Attributes:
        identities: the identity service; None for none.
    """

    identities: IdentityService | None

    def clients(self) -> Iterator[Session]:
        """Return the connected clients."""


class _AllHubs:
    """The hubs of this process, and the settings that apply to all present and later ones."""

    def __init__(self) -> None:
        self.brokers: WeakSet[GeventBroker] = WeakSet()  # weak, so that unused hubs can be freed
        self.others: WeakSet[IdentifiedBroker] = WeakSet()  # brokers that are not hubs, see `follow_logins`
        self.numbers = itertools.count(1)
        self.topic_rules = TopicRules()
        self.accept_clients = True
        self.idle_clients: IdleClients | None = None  # once the limit is set


_all_hubs = _AllHubs()


def set_topic_rules(rules: TopicRules) -> None:
    """Apply these rules to all present and later hubs.

    Raises:
        ArgumentError: a filter is invalid; the former rules stay in effect.
    """
    check_filters(rules.last_values)
    _all_hubs.topic_rules = rules
    for broker in opened():
        broker.apply_topic_rules()


def accept_new_clients(on: bool) -> None:
    """Accept new clients at all present and later hubs, or answer them with 503."""
    _all_hubs.accept_clients = on
    for broker in opened():
        broker.draining = not on


def all_brokers() -> list[GeventBroker]:
    """Return the open brokers of this process except internal ones, in order of creation."""
    return sorted((broker for broker in opened() if broker.number), key=lambda broker: broker.number)


def mqtt_broker() -> GeventBroker | None:
    """Return the hub for MQTT clients that do not connect through a page; None without a hub for MQTT.

    The hub that the setting `mqtt.hub` names comes first, then those with the option `mqtt`, then the one that the
    setting has chosen without a name; of several, the one that was created first.
    """
    found = [broker for broker in opened() if broker.number and broker.devices is not None]
    return min(found, key=GeventBroker.mqtt_order, default=None)


def opened() -> list[GeventBroker]:
    """Return the open brokers of this process, including internal ones."""
    return [broker for broker in list(_all_hubs.brokers) if not broker.closed]


def follow(service: IdentityService) -> None:
    """Re-check the clients of all hubs, in portions, when users or rules of `service` change or logins expire."""

    def for_each_hub(steps: Callable[[list[Session]], Iterator[None]]) -> None:
        for broker in [*_all_hubs.brokers, *_all_hubs.others]:
            if broker.identities is service:
                run_in_background(steps(list(broker.clients())))

    service.changed.append(
        lambda: for_each_hub(lambda clients: client_limits.recheck_clients(clients, service.revalidate))
    )
    service.expiring.append(
        lambda: for_each_hub(lambda clients: client_limits.disconnect_expired(clients, time.time()))
    )


def follow_logins(broker: IdentifiedBroker) -> None:
    """Re-check the clients of a broker that is not a hub, too; see `follow`."""
    _all_hubs.others.add(broker)


def close_all() -> None:
    """Close all brokers of this process, when the server stops."""
    for broker in opened():
        broker.close()


class _PersistFile:
    """The `persist` file of a hub, as a `HubFile` that only one process opens at a time."""

    def __init__(self, broker: GeventBroker, path: str) -> None:
        self._broker, self._path = broker, path

    def open(self) -> None:
        """See `HubFile`."""
        names = SqliteNames(self._path)
        self._broker.keep_names_in(names)
        self._broker.keep_values_in(names)
        self._broker.keep_mqtt_in(names)

    def close(self) -> None:
        """See `HubFile`."""
        if self._broker.store:
            self._broker.store.close()


class GeventBroker(RegisteredBroker):
    """A broker that accepts clients from HTTP requests.

    Args:
        hooks: the application's callbacks.
        options: the other options of `create`.
        made_at: file and line of the call of `create`.

    Attributes:
        number: unique among all workers; 0 for internal brokers, which are hidden from operators.
        made_at: see above.
        app: the folder name of the application that created it; empty outside of applications.
        counts_of: the option `observe`.

    Raises:
        ArgumentError: a time for TCP keep-alive that Linux refuses; the `persist` file can't be used.
    """

    def __init__(self, hooks: Hooks, options: HubOptions, made_at: str = "") -> None:
        data_path.install()
        folder = current_process.application_folder()
        self._scope = scope = current_process.current_app.get()
        is_internal = scope is not None and scope.is_internal
        self.number = 0 if is_internal else worker_place().hub_number(next(_all_hubs.numbers))
        self.made_at, self.app = made_at, folder.name if folder else ""
        self._options, self.counts_of = options, options.observe
        self.identities = server_identity_service() if options.auth else None
        if self.identities is not None:
            HubAuthentication(self.identities, hooks)
        self._admission = Admission(
            origins=options.origins, keep_alive=KeepAlive(options.keepidle_s, options.keepintv_s)
        )
        self.key = hub_registry.key_of(options.name)
        names = hub_registry.names_for(self.key)
        self._files: list[HubFile] = []
        store = self._open_names()
        super().__init__(
            hooks,
            random_u32=random_u32,
            clock=time.monotonic,
            encode=data_path.encode,
            store=store,
            random_server_etid=options.rndtid,
            server_etid=names["server"] if names else 0,
            queue_size=options.queuesize,
        )
        if names:
            sessions.adopt_names(self, names)
        if options.persist:
            self._files.append(_PersistFile(self, worker_place().own_file(options.persist)))
        self.draining = not _all_hubs.accept_clients
        self.limit_chunks, self.call_later = handshake.limit_chunks, call_later
        self.measure = data_path.kernels.measure
        if self.number:
            self.on_end = partial(close_log.record, self.number)
        self.address_of = lambda client: close_log.address_of(client.outbox)
        self._values: LastValues | None = None
        if options.mqtt or self._is_chosen_for_mqtt():
            devices = Devices(self, current_mqtt())
            devices.pack = partial(mqtt_packets, data_path.kernels.packed)
            devices.take_overs.address_of = lambda client: close_log.address_of(client.outbox)
            devices.system.version = f"smqrt version {smqrt.__version__}"
            devices.system.transferred = lambda client: close_log.transferred(client.outbox)
        self._apply_settings(store)
        _all_hubs.brokers.add(self)  # last, so that changed settings are not applied to an incomplete hub
        if self.number:  # clients of internal hubs are operators, who log in again
            hub_registry.add(self)
        session_migration.claim(self)

    def _is_chosen_for_mqtt(self) -> bool:
        """Return whether the setting `mqtt.hub` means this hub."""
        chosen = current_mqtt().hub
        if chosen == "*":
            return bool(self.number) and mqtt_broker() is None
        return bool(chosen) and chosen == self._options.name

    def mqtt_order(self) -> tuple[bool, bool, int]:
        """Return the key by which `mqtt_broker` chooses the smallest."""
        is_named = current_mqtt().hub == self._options.name
        return not is_named, not self._options.mqtt, self.number

    def _apply_settings(self, store: SqliteNames | None) -> None:
        """Apply the limits and topic rules of the process, and restore the last values of `store`."""
        self.apply_limits(current_limits())
        try:
            self.apply_topic_rules()
            if store is not None:
                self.keep_values_in(store)
                self.keep_mqtt_in(store)
        except ArgumentError:
            self.abandon()
            raise

    def _open_names(self) -> SqliteNames | None:
        """Open the `persist` file; None without one, and while the old process of a hot restart has it open."""
        if not self._options.persist or hub_registry.is_waiting:
            return None
        try:
            return SqliteNames(worker_place().own_file(self._options.persist))
        except ArgumentError:
            hub_registry.free_key(self.key)
            raise

    @property
    def is_unloading(self) -> bool:
        """See `Broker`."""
        return self._scope is not None and self._scope.is_unloading

    def keep_clients(self) -> None:
        """Keep the clients for a restart of the application, if the option `keep` is set. Blocks."""
        if self._options.keep and not (self.closed or self.draining):
            session_migration.keep(self)

    def attach(self, file: HubFile) -> None:
        """Open `file`; in a hot restart, as soon as the old process has closed it. Raises the errors of `file.open`."""
        if not hub_registry.is_waiting:
            file.open()
        self._files.append(file)

    def open_files(self) -> None:
        """See `RegisteredBroker`. If one file can't be opened, the files opened before are closed again."""
        for count, file in enumerate(self._files):
            try:
                file.open()
            except BaseException:
                for one in self._files[:count]:
                    one.close()
                raise

    def close_files(self) -> None:
        """See `RegisteredBroker`."""
        for file in reversed(self._files):
            file.close()

    def apply_limits(self, settings: LimitSettings) -> None:
        """Apply limits, including to connected clients; the options of `create` take precedence."""
        options, admission = self._options, self._admission
        names, own = options.maxnames or settings.names, options.clientnames  # one option for three limits
        self.limits = HubLimits(
            names,
            settings.names_bytes,
            own or settings.client_names,
            settings.client_names_bytes,
            own or settings.subscriptions,
            own or settings.observes,
            settings.connections_per_user,
        )
        admission.readtmo_ms = options.readtmo_ms or round(settings.handshake_s * 1000)
        admission.budget_bytes = options.budget_bytes or settings.queue_bytes
        publish = PublishLimits(
            settings.publish_rate,
            settings.publish_bytes_per_s,
            settings.publish_burst_s,
            settings.publish_policy,
            settings.message_bytes,
        )
        before, self.publish_limits = self.publish_limits, publish if publish.is_any else None
        for session in self.clients():
            session.outbox.budget_bytes = admission.budget_bytes
            if before != self.publish_limits:
                session.apply_publish_limits()
        by_filter = {name: Slow(one.slow) for name, one in current_topics().items() if one.slow}
        self.set_slow(Slow(options.slow or settings.slow), by_filter)

    def apply_topic_rules(self) -> None:
        """Keep the last values that the options of this hub or the settings of the server select."""
        rules = _all_hubs.topic_rules
        filters = tuple(dict.fromkeys((*self._options.lastvalue, *rules.last_values)))
        if self._values is not None:
            self._values.set_filters(filters)
        elif filters:
            self._values = self._new_values(filters)
        self.last_values = self._values if filters else None  # None: routes need not record values
        for session in self.sessions.values():
            session.forget_routes()

    def _new_values(self, filters: Iterable[str]) -> LastValues:
        values = LastValues(filters, _all_hubs.topic_rules.limits)
        if self.identities is not None:
            values.permits = self.identities.may_still_publish
        return values

    def keep_values_in(self, names: SqliteNames) -> None:
        """Keep last values in the `persist` file, and restore those of the file.

        Raises:
            ArgumentError: the file was damaged.
        """
        if self._values is None:  # without filters: `load` deletes the values of former filters from the file
            self._values = self._new_values(())
        SqliteValues(names, _all_hubs.topic_rules.sync_s).load(self._values, self.topic_table, self.server.etid)

    def keep_mqtt_in(self, names: SqliteNames) -> None:
        """Keep MQTT sessions and retained messages in the `persist` file, and restore those of the file.

        Raises:
            ArgumentError: the file was damaged.
        """
        if self.devices is not None:
            SqliteMqtt(names, self.devices, _all_hubs.topic_rules.sync_s)

    def set_slow(self, default: Slow, by_filter: Mapping[str, Slow]) -> None:
        """Set the slow-consumer policies, including those of connected clients.

        Args:
            default: policy of topics that no filter selects.
            by_filter: policies by topic filter.
        """
        before = self.slow
        policed = default is not Slow.NEWEST or bool(by_filter)
        self.slow = SlowPolicies(self.topic_table.by_key, default, by_filter) if policed else None
        if before is self.slow:  # both are None
            return
        if self.slow is not None:
            self.slow.pressure.on_changed = lambda key, is_full: (
                self.cluster.pressed(key, is_full) if self.cluster is not None else None
            )
        if before is not None:
            before.pressure.remove_all_remote()
        for session in self.sessions.values():
            session.forget_routes()
            if isinstance(session.outbox, RawConnection):
                police(session.outbox, policed)

    def connect(self, request: object, arg: object = None) -> bool:
        """Turn an HTTP request into an SMQ connection; blocks until the handshake has ended (spec: smq §2.3).

        A request that is not SMQ is answered with 404, one from a page of a foreign host with 403, and any request to
        a closed broker with 503. Returns False without an answer when the WSGI server can't pass the connection on.
        """
        # Without these hooks the session does not reference the request, so that its memory is freed.
        needs_origin = self.hooks.authenticate or self.hooks.onconnect
        origin = Origin(request, arg) if needs_origin else None
        if isinstance(request, dict):
            if handshake.REQUEST in request:  # a WSGI application that this server runs
                request = request[handshake.REQUEST]
            elif handshake.HANDLER in request:  # another WSGI server with the handler of `smqrt.wsgi`
                request = handshake.HandlerRequest(request)
            else:
                return handshake.connect_environ(self, self._admission, request, origin)
        is_mqtt = self.devices is not None and mqtt_connection.sub_protocol(request) is not None
        start = mqtt_connection.start_websocket if is_mqtt else None
        handshake.connect(self, self._admission, request, origin, start)
        return True

    def connect_mqtt(self, detached: DetachedConnection, peer: tuple[str, int]) -> None:
        """Serve an MQTT client on a raw socket.

        Args:
            detached: its connection.
            peer: its address.
        """
        mqtt_connection.begin(self, self._admission, detached, Origin(mqtt_connection.NoRequest(peer), None), peer[0])

    def clients(self) -> Iterator[Session]:
        """Return the connected clients."""
        return (one for one in self.sessions.values() if isinstance(one, Session))

    def setkeepalive(self, idle_s: int, interval_s: int = 0) -> None:
        """Set TCP keep-alive for new connections; the interval is the idle time by default."""
        self._admission.keep_alive.set(idle_s, interval_s or idle_s)

    def publish_threadsafe(
        self, data: bytes, topic: Name, subtopic: Name | None = None, ptid: int | None = None
    ) -> bool:
        """Publish from any thread; return False when too many calls wait for the loop."""
        self._check_open()
        check_size(data)
        return data_path.inlet.put(len(data), self.publish, data, topic, subtopic, ptid)

    def publish_mqtt_threadsafe(
        self, data: bytes, topic: Name, options: PublishOptions, subtopic: Name | None = None, ptid: int | None = None
    ) -> bool:
        """Publish as `publish_mqtt` from any thread; return False when too many calls wait for the loop.

        Raises:
            ArgumentError: the payload is too large, or an option is invalid; the loop logs what it finds later.
            ClosedError: the hub is closed.
        """
        checked = checked_options(self.devices, options)
        if checked is None:
            return self.publish_threadsafe(data, topic, subtopic, ptid)
        self._check_open()
        check_size(data)
        size = len(data) + len(checked.properties)
        return data_path.inlet.put(size, self.publish_checked, data, topic, checked, subtopic, ptid)

    def abandon(self) -> None:
        """Close a hub whose creation failed, and free its key for the next one."""
        self.close()
        hub_registry.free_key(self.key)

    def close(self) -> None:
        """Publish the queued messages of other threads, then close."""
        if not self.closed:
            data_path.inlet.drain()  # `publish_threadsafe` has accepted these messages
            hub_registry.remove(self)
            super().close()


def _apply_limits(settings: LimitSettings) -> None:
    QueuedMemory.limit_bytes = settings.total_queue_bytes
    Pressure.max_wait_s = settings.slow_wait_s
    data_path.limits.apply(settings)
    for broker in opened():
        broker.apply_limits(settings)
    if _all_hubs.idle_clients is None and settings.idle_s is not None:
        _all_hubs.idle_clients = IdleClients(lambda: (one for broker in opened() for one in broker.clients()))
    if _all_hubs.idle_clients is not None:
        _all_hubs.idle_clients.apply(settings)


on_change(_apply_limits)


def call_later(delay_s: float, function: Callable[[], object]) -> None:
    """Call `function` in a callback of the loop after `delay_s`."""
    timer: Any = get_hub().loop.timer(delay_s)

    def call() -> None:
        timer.close()
        function()

    timer.start(call)


_DRAW = struct.Struct("1024I")
_random: list[int] = []
"""Random numbers that are not used yet. 1024 are read at once: a system call for each would slow down connects."""


def random_u32() -> int:
    """Return an unpredictable random 32-bit number."""
    if not _random:
        _random.extend(_DRAW.unpack(os.urandom(_DRAW.size)))
    return _random.pop()


os.register_at_fork(after_in_child=_random.clear)  # otherwise two processes would use the same numbers
