"""The console of one server: what its pages have in common."""

from __future__ import annotations

import logging
import socket
from time import time
from typing import Any

import gevent

from smqrt.operations.all_workers import Together
from smqrt.operations.console.alerts import Looked, find_alerts
from smqrt.operations.console.gauges import NAMES, STEP_S, Gauges, Growth, History, Seen, hub_name
from smqrt.operations.console.workers import over_workers
from smqrt.operations.snapshots import Snapshot

_DAY_S = 86400

log = logging.getLogger("smqrt.console")


class Console:
    """Samples the figures of a server for as long as it runs, and gives pages what they show.

    Args:
        server: with all of its workers.
    """

    def __init__(self, server: Together) -> None:
        self.server = server
        self.history = History(NAMES)
        self.point: Snapshot = {}
        self._sampled = Gauges(server, "limits")
        self._now = Gauges(server, "listeners", "apps", "journals", "pipelines", "limits")
        self._limits, self._drops = Growth(), Growth()
        self._sampling = gevent.spawn(self._sample_for_ever)
        self._host = socket.gethostname()
        self._workers: list[int] = []

    def close(self) -> None:
        """End it; a second call does nothing."""
        self._sampling.kill()

    def _sample_for_ever(self) -> None:
        while True:
            try:
                self._sample()
            except Exception:
                log.exception("the console can't read the figures of the server")
            gevent.sleep(STEP_S)

    def _sample(self) -> None:
        seen = self._sampled.look()
        workers = [one["worker"] for one in workers_of(seen)]
        if workers != self._workers:  # sums of others than before say nothing of growth
            self._workers, self._limits, self._drops = workers, Growth(), Growth()
        at_s = time()
        self.history.add(at_s, seen.now)
        self.point = {"time": round(at_s, 1), **{name: _rounded(value) for name, value in seen.now.items()}}
        self._drops.look({"dropped": sum(hub["dropped"] for hub in seen.hubs)})
        self._limits.look({str(one["name"]): reached(one) for one in seen.also["limits"]})

    # ---- what all pages get, each second

    def seen(self) -> Seen:
        """Returns what there is now: what pages show at one moment costs one question to each worker."""
        return self._now.look()

    def pulse(self) -> Snapshot:
        """Returns the figures of now."""
        seen = self.seen()
        counts = {
            "attention": len(self._attention(seen)),
            "peers": seen.now["peers"],
            "topics": sum(hub["topics"] for hub in over_workers(seen.hubs)),
            "apps_failed": sum(one["state"] == "failed" for one in seen.also["apps"]),
            "errors": seen.server["log_errors"],
        }
        now = {name: _rounded(value) for name, value in seen.now.items()}
        return {"now": now, "counts": counts, "point": self.point}

    def overview(self) -> Snapshot:
        """Returns what the overview shows beside the figures of the pulse."""
        seen = self.seen()
        return {
            "server": self._server(seen),
            "attention": self._attention(seen),
            "hubs": [_hub(hub) for hub in seen.hubs],
            "listeners": _listeners(seen),
        }

    def _server(self, seen: Seen) -> Snapshot:
        server = seen.server
        return {
            "version": f"smqrt {server['version']}",
            "uptime_s": int(server["uptime_s"]),
            "host": self._host,
            "pid": server["pid"],
            "state": server["phase"],
            "workers": len(workers_of(seen)),
        }

    def limits(self) -> list[dict[str, Any]]:
        """Returns the limits, with how often each was reached in the last minutes."""
        return self._with_growth(self.seen())

    def _with_growth(self, seen: Seen) -> list[dict[str, Any]]:
        return [{**one, "lately": self._limits.of(str(one["name"]), reached(one))} for one in seen.also["limits"]]

    def _attention(self, seen: Seen) -> list[Snapshot]:
        return find_alerts(
            Looked(
                server=seen.server,
                listeners=_listeners(seen),
                applications=seen.also["apps"],
                journals=seen.also["journals"],
                pipelines=seen.also["pipelines"],
                limits=self._with_growth(seen),
                dropped_lately=self._drops.of("dropped", sum(hub["dropped"] for hub in seen.hubs)),
                errors_lately=seen.server["log_errors_lately"],
            )
        )


def workers_of(seen: Seen) -> list[dict[str, Any]]:
    """What each worker is; empty when there is one process."""
    found: list[dict[str, Any]] = seen.server.get("workers", [])
    return found


def reached(limit: Any) -> int:
    """How often a limit was reached so far."""
    return int(limit["reached"])


def _hub(hub: dict[str, Any]) -> Snapshot:
    return {
        "id": hub["id"],
        "name": hub_name(hub),
        "peers": hub["peers"],
        "topics": hub["topics"],
        "in_per_s": _rounded(hub["in_per_s"]),
        "out_per_s": _rounded(hub["out_per_s"]),
        "queued_bytes": hub["queued_bytes"],
        "dropped": hub["dropped"],
        "dropped_lately": hub["dropped_per_s"] or 0,
    }


def _listeners(seen: Seen) -> list[Snapshot]:
    """The listeners, with the days that their certificates are good for."""
    return [_listener(one) for one in seen.also["listeners"]]


def _listener(one: dict[str, Any]) -> Snapshot:
    host, tls = str(one["host"]), one["tls"]
    expires_s = min((found["not_after_s"] for found in tls["certificates"]), default=None) if tls else None
    return {
        **{name: one[name] for name in ("name", "open", "accepted", "refused")},
        "address": f"[{host}]:{one['port']}" if ":" in host else f"{host}:{one['port']}",
        "tls": tls is not None,
        "certificate_expires_s": expires_s,
        "certificate_days": None if expires_s is None else int((expires_s - time()) // _DAY_S),
        "certificate_fault": tls["fault"] if tls else None,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}") if value < 1e5 else round(value)
