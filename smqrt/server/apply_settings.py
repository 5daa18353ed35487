"""Settings brought into force: at the start, and those that may change also while the server runs."""

from __future__ import annotations

from pathlib import Path

from smqrt.broker.last_values import LastValueLimits, check_filters
from smqrt.cluster.engines.process_cluster import ClusterPlan
from smqrt.errors import ArgumentError, StartError
from smqrt.http.access import Access
from smqrt.http.body import HttpLimits
from smqrt.http.forwarded import Proxies
from smqrt.http.server import HttpServer
from smqrt.server.listeners import Listeners
from smqrt.server.live_settings import LiveSettings
from smqrt.settings.limits import bring_into_force
from smqrt.settings.settings import ClusterSettings, Settings
from smqrt.smq import gevent_broker
from smqrt.transport.admission import open_connections
from smqrt.transport.origins import Hosts, Origins, is_loopback
from smqrt.transport.trusted_proxies import TrustedNetworks


def apply_settings(live: LiveSettings, http: HttpServer, listeners: Listeners) -> None:
    """Bring the settings of these parts into force, now and whenever live ones change.

    Raises:
        StartError: topic filters contradict one another.
    """
    applied = _Applied(http, listeners)
    for names, apply in (
        (("hosts", "origins", "debug"), applied.access),
        (("topics",), applied.topics),
        (("proxy",), applied.proxies),
    ):
        apply(live.current)
        live.watch(names, apply)
    live.watch(("max_connections", "connections_per_address"), apply_connection_limits)
    live.watch(("cert", "key", "client_ca", "tls", "listener", "admin"), listeners.change)
    live.watch(("limits", "topics"), applied.limits)


class _Applied:
    def __init__(self, http: HttpServer, listeners: Listeners) -> None:
        self._http, self._listeners = http, listeners

    def access(self, settings: Settings) -> None:
        address = next(iter(self._listeners.values())).address[0]
        own = {settings.host.strip("[]"), address}  # pipelines of this machine come by it
        hosts = Hosts([*settings.hosts.split(","), *own] if settings.hosts else ())
        self._http.access = Access(Origins(settings.origins), hosts, is_loopback(address), settings.debug)

    def topics(self, settings: Settings) -> None:
        filters = tuple(name for name, topics in settings.topics.items() if topics.last_value)
        limits = LastValueLimits(settings.last_value.max_values, settings.last_value.max_bytes)
        try:
            check_filters(settings.topics)
            gevent_broker.set_topic_rules(gevent_broker.TopicRules(filters, limits, settings.last_value.sync_s))
        except ArgumentError as error:
            raise StartError(f"topics: {error}.") from None

    def proxies(self, settings: Settings) -> None:
        trusted = open_connections.proxies = TrustedNetworks(settings.proxy.trusted)
        self._http.proxies = Proxies(trusted, settings.proxy.headers) if trusted else None

    def limits(self, settings: Settings) -> None:
        bring_into_force(settings.limits, settings.topics)
        self._http.limits = http_limits(settings)


def apply_connection_limits(settings: Settings) -> None:
    """Limit the connections of the process."""
    open_connections.limit = settings.max_connections
    open_connections.per_address = settings.connections_per_address


def cluster_plan(settings: ClusterSettings) -> ClusterPlan:
    """Returns how the process is joined with others."""
    directory = Path(settings.directory) if settings.directory else None
    return ClusterPlan(
        listen=settings.listen,
        nodes=settings.nodes,
        directory=directory,
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
    """Returns the limits of HTTP requests."""
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
