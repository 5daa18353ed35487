"""Hubs with `keep`: their clients stay connected while their application starts again in this process.

the application ends ──▶ kept: not read, nothing sent ──▶ it has started again: they go on at its new hub
                                 └──── KEEP_S ───▶ closed, and they come back when there is a hub again
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gevent import get_hub

from smqrt.broker.snapshot import Record, adopt_values, values_of
from smqrt.process import current_application
from smqrt.smq.hub_registry import SucceedingBroker, succession
from smqrt.smq.session_migration import ArrivingHub, StandingHub, pause_others

KEEP_S = 10.0
"""For an application that does not start again, by a mistake in it for instance."""


class _Kept(NamedTuple):
    record: Record
    values: list[Record]
    clients: list[tuple[Record, Any]]
    place: Record
    timer: Any


_kept: dict[str, _Kept] = {}


def keep(broker: SucceedingBroker) -> None:
    """Keep the clients of a hub that is closed next; blocks until hooks have done what they are at, and the
    other nodes of its cluster keep what is for it.
    """
    place = pause_others(broker)
    standing = StandingHub(broker, with_tls=True)
    standing.settle()
    record = standing.take()
    timer = get_hub().loop.timer(KEEP_S, ref=False)
    _kept[broker.key] = _Kept(record, list(values_of(broker)), standing.hand_over(), place, timer)
    succession.names[broker.key] = record["names"]
    timer.start(drop, broker.key)


def claim(broker: SucceedingBroker) -> None:
    """A hub was made: once its application is loaded, the clients that were kept for it go on there."""
    if broker.key not in _kept:
        return
    for portion in _kept[broker.key].values:
        adopt_values(broker, portion)
    app = current_application.current_app.get()
    if app is None:
        get_hub().loop.run_callback(_give, broker)
    else:
        app.when_loaded.append(lambda: _give(broker))


def _give(broker: SucceedingBroker) -> None:
    kept = None if broker.closed else _take(broker.key)
    if kept is None:
        return
    arriving = ArrivingHub(broker)
    arriving.adopt(kept.record)
    for record, transport in kept.clients:
        arriving.place(record, transport)
    arriving.begin(kept.place)


def _take(key: str) -> _Kept | None:
    kept = _kept.pop(key, None)
    if kept is not None:
        del succession.names[key]
        kept.timer.stop()
        kept.timer.close()
    return kept


def drop(key: str) -> None:
    """Close the clients that are kept for a hub; nothing happens when there are none."""
    kept = _take(key)
    for _, transport in kept.clients if kept else ():
        transport.close()
    broker = succession.find(key)
    if broker is not None and broker.cluster is not None and broker.cluster.awaits_clients:
        broker.cluster.resync()


def drop_all() -> None:
    """Close all of them, as the server does when it stops."""
    for key in list(_kept):
        drop(key)
