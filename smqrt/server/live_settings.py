"""The settings of a running server: applied at its start, and again when they change.

A reload applies settings that are marked `live`. It logs the names of other changed settings: they need a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from smqrt.broker.last_values import LastValueLimits, check_filters
from smqrt.cluster.engines.process_cluster import ClusterPlan
from smqrt.errors import ArgumentError, SmqrtError, StartError
from smqrt.http.access import Access
from smqrt.http.body import HttpLimits
from smqrt.http.forwarded import Proxies
from smqrt.http.server import HttpServer
from smqrt.server.listeners import Listeners
from smqrt.settings.limits import apply_limits
from smqrt.settings.options import options_of
from smqrt.settings.settings import ClusterSettings, Settings
from smqrt.settings.tree import Path as SettingPath
from smqrt.settings.tree import named_settings_of, settings_of, value_at, with_values
from smqrt.smq import gevent_broker
from smqrt.transport.admission import open_connections
from smqrt.transport.origins import Hosts, Origins, is_loopback
from smqrt.transport.trusted_proxies import TrustedNetworks

log = logging.getLogger("smqrt")

Apply = Callable[[Settings], None]


class LiveSettings:
    """The settings of a running server.

    Args:
        current: the settings at the start.
        report: takes each line for the terminal.

    Attributes:
        current: the settings in force.
    """

    def __init__(self, current: Settings, report: Callable[[str], None]) -> None:
        self.current = self._last = current
        self._read: Callable[[], Settings] | None = None
        self._report = report
        self._watchers: list[tuple[tuple[str, ...], Apply]] = []

    def read_with(self, read: Callable[[], Settings], last: Settings) -> None:
        """Set how `reload` reads the settings.

        Args:
            read: reads them; raises StartError.
            last: what it returned last, without the changes of the program itself.
        """
        self._read, self._last = read, last

    def watch(self, names: tuple[str, ...], apply: Apply) -> None:
        """Have `apply` called, with all settings, after one of these has changed.

        Args:
            names: settings or groups: "max_connections", "limits".
            apply: applies them. When it can't, it raises SmqrtError and changes nothing.
        """
        self._watchers.append((names, apply))

    def reload(self) -> str | None:
        """Read the settings and apply those that may change. Return what was wrong, None for nothing."""
        if self._read is None:
            return None
        try:
            found = self._read()
        except StartError as error:
            return str(error)
        changed = dict(_changes(self._last, found))
        live = {path for path, is_live in changed.items() if is_live}
        if fixed := sorted(".".join(path) for path in changed.keys() - live):
            log.warning("settings that need a restart to change: %s", ", ".join(fixed))
        if not live:
            return None
        self._last = _with(self._last, found, live)
        self.current = _with(self.current, found, live)
        self._report(f"settings changed: {', '.join(sorted(map('.'.join, live)))}")
        names = {path[0] for path in live} | {".".join(path) for path in live}
        faults = []
        for watched, apply in self._watchers:
            if not names.isdisjoint(watched):
                try:
                    apply(self.current)
                except SmqrtError as error:
                    faults.append(str(error))
        return "; ".join(faults) or None


def _with(made: Settings, found: Settings, paths: set[SettingPath]) -> Settings:
    """Return `made` with the values of `found` at these paths. The path (group, name) means a whole named table."""
    named = _named_groups()
    tables: dict[str, dict[str, object]] = {path[0]: dict(getattr(made, path[0])) for path in paths if path[0] in named}
    for group, name in (path for path in paths if path[0] in named):
        there: Mapping[str, object] = getattr(found, group)
        tables[group].pop(name, None)
        tables[group] |= {name: there[name]} if name in there else {}
    others = {path: value_at(found, path) for path in paths if path[0] not in named}
    return with_values(replace(made, **tables), others)  # type: ignore[arg-type]  # tables of settings, by their groups


def _changes(old: Settings, new: Settings) -> Iterator[tuple[SettingPath, bool]]:
    """Yield the path of each difference, and whether it may change while the server runs."""
    for setting in settings_of(Settings):
        if value_at(old, setting.path) != value_at(new, setting.path):
            yield setting.path, setting.live
    for group, is_live in _named_groups().items():
        before: Mapping[str, object] = getattr(old, group)
        after: Mapping[str, object] = getattr(new, group)
        for name in before.keys() | after.keys():
            one, other = before.get(name), after.get(name)
            if one is None or other is None:  # a table was added or removed
                yield (group, name), is_live
            elif one != other:
                items = options_of(type(one)).values()
                changed = [item for item in items if getattr(one, item.name) != getattr(other, item.name)]
                yield (group, name), all(item.metadata["live"] for item in changed)


def _named_groups() -> dict[str, bool]:
    """Return the groups of named tables, each with whether all settings of its tables are live."""
    groups: dict[str, bool] = {}
    for setting in named_settings_of(Settings):
        groups[setting.path[0]] = groups.get(setting.path[0], True) and setting.live
    return groups


# ---- settings applied


def apply_settings(live: LiveSettings, http: HttpServer, listeners: Listeners) -> None:
    """Apply the settings of these parts, now and whenever live ones change.

    Raises:
        StartError: topic filters contradict one another.
    """

    def apply_access(settings: Settings) -> None:
        address = next(iter(listeners.values())).address[0]
        own = {settings.host.strip("[]"), address}  # pipelines of this machine use it
        hosts = Hosts([*settings.hosts.split(","), *own] if settings.hosts else ())
        http.access = Access(Origins(settings.origins), hosts, is_loopback(address), settings.debug)

    def apply_topics(settings: Settings) -> None:
        filters = tuple(name for name, topics in settings.topics.items() if topics.last_value)
        limits = LastValueLimits(settings.last_value.max_values, settings.last_value.max_bytes)
        try:
            check_filters(settings.topics)
            gevent_broker.set_topic_rules(gevent_broker.TopicRules(filters, limits, settings.last_value.sync_s))
        except ArgumentError as error:
            raise StartError(f"topics: {error}.") from None

    def apply_proxies(settings: Settings) -> None:
        trusted = open_connections.proxies = TrustedNetworks(settings.proxy.trusted)
        http.proxies = Proxies(trusted, settings.proxy.headers) if trusted else None

    def apply_all_limits(settings: Settings) -> None:
        apply_limits(settings.limits, settings.topics)
        http.limits = http_limits(settings)

    for names, apply in (
        (("hosts", "origins", "debug"), apply_access),
        (("topics",), apply_topics),
        (("proxy",), apply_proxies),
    ):
        apply(live.current)
        live.watch(names, apply)
    # These have been applied when the parts were made.
    live.watch(("max_connections", "connections_per_address"), apply_connection_limits)
    live.watch(("cert", "key", "client_ca", "tls", "listener", "admin"), listeners.change)
    live.watch(("limits", "topics"), apply_all_limits)


def apply_connection_limits(settings: Settings) -> None:
    """Apply the limits on connections of the process."""
    open_connections.limit = settings.max_connections
    open_connections.per_address = settings.connections_per_address


def cluster_plan(settings: ClusterSettings) -> ClusterPlan:
    """Return how the hubs of this process form clusters with other processes."""
    return ClusterPlan(
        listen=settings.listen,
        nodes=settings.nodes,
        directory=Path(settings.directory) if settings.directory else None,
        password=settings.password or "",
        ca=settings.ca or "",
        cert=settings.cert or "",
        key=settings.key or "",
        credentials=settings.credentials or "",
        number=settings.node,
        hubs=settings.hubs,
        ping_s=settings.ping_s,
        silence_s=settings.silence_s,
        queue_bytes=settings.queue_bytes,
    )


def http_limits(settings: Settings) -> HttpLimits:
    """Return the limits of HTTP requests."""
    limits = settings.limits
    return HttpLimits(
        first_byte_s=limits.first_byte_s,
        header_s=limits.head_s,
        body_idle_s=limits.body_pause_s,
        keep_alive_s=limits.keep_alive_s,
        head_bytes=limits.head_bytes,
        body_bytes=limits.body_bytes,
        bodies_bytes=settings.bodies_mib << 20,
    )
