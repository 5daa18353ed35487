"""What each worker has of the limits that are meant for the whole server."""

from __future__ import annotations

from dataclasses import replace

from smqrt.settings.settings import Settings
from smqrt.settings.tree import Path, value_at, with_values
from smqrt.workers.worker_identity import WorkerPlace

SHARED: tuple[Path, ...] = (
    ("max_connections",),
    ("connections_per_address",),
    ("bodies_mib",),
    ("limits", "connections_per_user"),
    ("limits", "connect_rate"),
    ("limits", "connect_rate_per_address"),
    ("limits", "handshakes_per_address"),
    ("limits", "queues_bytes"),
)
"""Settings of the whole server; `max_connections` of listeners is one, too. Connections are spread evenly."""


def shared(settings: Settings, place: WorkerPlace) -> Settings:
    """Returns the settings of a worker: each of these limits is divided by the number of workers, and rounded up."""
    if place.count == 1:
        return settings
    values = {path: _share(value_at(settings, path), place) for path in SHARED}
    listeners = {
        name: replace(one, max_connections=place.share(one.max_connections)) for name, one in settings.listener.items()
    }
    return replace(with_values(settings, values), listener=listeners)


def _share(value: object, place: WorkerPlace) -> object:
    if isinstance(value, float):
        return value / place.count
    return place.share(value) if isinstance(value, int) else value
