"""Shared state of all pages of the console."""

from __future__ import annotations

import logging
import socket
from time import time
from typing import Any

import gevent

from smqrt.operations.all_workers import AllWorkers
from smqrt.operations.console.alerts import AlertInput, find_alerts
from smqrt.operations.console.gauges import NAMES, STEP_S, Gauges, Growth, History, Sample, hub_name, merged_hubs
from smqrt.operations.snapshots import Snapshot

_DAY_S = 86400

log = logging.getLogger("smqrt.console")


class Console:
    """Samples the figures of a server, and returns the data of the console's pages.

    Args:
        server: the server with all its workers.

    Attributes:
        server: see above.
        history: the figures of the last hour.
        point: the newest point of the history.
    """

    def __init__(self, server: AllWorkers) -> None:
        self.server = server
        self.history = History(NAMES)
        self.point: Snapshot = {}
        # Separate gauges, because rates are computed between two samples: charts and pages have other intervals.
        self._history_gauges = Gauges(server, "limits")
        self._page_gauges = Gauges(server, "listeners", "apps", "journals", "pipelines", "limits")
        self._limits, self._drops = Growth(), Growth()
        self._sampling = gevent.spawn(self._sample_loop)
        self._host = socket.gethostname()
        self._workers: list[int] = []

    def close(self) -> None:
        """Stop sampling. A second call does nothing."""
        self._sampling.kill()

    def _sample_loop(self) -> None:
        while True:
            try:
                sample = self._history_gauges.sample()
                workers = [one["worker"] for one in workers_of(sample)]
                if workers != self._workers:  # sums over other workers can't be compared with these
                    self._workers, self._limits, self._drops = workers, Growth(), Growth()
                at_s = time()
                self.history.add(at_s, sample.now)
                self.point = {"time": round(at_s, 1), **{name: _rounded(value) for name, value in sample.now.items()}}
                self._drops.add({"dropped": sum(hub["dropped"] for hub in sample.hubs)})
                self._limits.add({str(one["name"]): reached(one) for one in sample.also["limits"]})
            except Exception:
                log.exception("the console can't read the figures of the server")
            gevent.sleep(STEP_S)

    def sample(self) -> Sample:
        """Return the current sample. All pages of a round share one request to each worker."""
        return self._page_gauges.sample()

    def pulse(self) -> Snapshot:
        """Return the figures that all pages receive each second."""
        sample = self.sample()
        counts = {
            "attention": len(self._alerts(sample)),
            "peers": sample.now["peers"],
            "topics": sum(hub["topics"] for hub in merged_hubs(sample.hubs)),
            "apps_failed": sum(one["state"] == "failed" for one in sample.also["apps"]),
            "errors": sample.server["log_errors"],
        }
        now = {name: _rounded(value) for name, value in sample.now.items()}
        return {"now": now, "counts": counts, "point": self.point}

    def overview(self) -> Snapshot:
        """Return the data of the overview, without the figures of `pulse`."""
        sample = self.sample()
        server = sample.server
        return {
            "server": {
                "version": f"smqrt {server['version']}",
                "uptime_s": int(server["uptime_s"]),
                "host": self._host,
                "pid": server["pid"],
                "state": server["phase"],
                "workers": len(workers_of(sample)),
            },
            "attention": self._alerts(sample),
            "hubs": [
                {
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
                for hub in sample.hubs
            ],
            "listeners": _listeners(sample),
        }

    def limits(self) -> list[dict[str, Any]]:
        """Return the limits. `lately` is the number of refusals of each in the last minutes."""
        return self._with_growth(self.sample())

    def _with_growth(self, sample: Sample) -> list[dict[str, Any]]:
        return [{**one, "lately": self._limits.of(str(one["name"]), reached(one))} for one in sample.also["limits"]]

    def _alerts(self, sample: Sample) -> list[Snapshot]:
        return find_alerts(
            AlertInput(
                server=sample.server,
                listeners=_listeners(sample),
                applications=sample.also["apps"],
                journals=sample.also["journals"],
                pipelines=sample.also["pipelines"],
                limits=self._with_growth(sample),
                dropped_lately=self._drops.of("dropped", sum(hub["dropped"] for hub in sample.hubs)),
                errors_lately=sample.server["log_errors_lately"],
            )
        )


def workers_of(sample: Sample) -> list[dict[str, Any]]:
    """Return the states of the workers; empty without workers."""
    found: list[dict[str, Any]] = sample.server.get("workers", [])
    return found


def reached(limit: Any) -> int:
    """Return the number of refusals of a limit since the start."""
    return int(limit["reached"])


def _listeners(sample: Sample) -> list[Snapshot]:
    """Return the listeners, with the days until their certificates expire."""
    rows: list[Snapshot] = []
    for one in sample.also["listeners"]:
        host, tls = str(one["host"]), one["tls"]
        expires_s = min((found["not_after_s"] for found in tls["certificates"]), default=None) if tls else None
        row: Snapshot = {name: one[name] for name in ("name", "open", "accepted", "refused")}
        row |= {
            "address": f"[{host}]:{one['port']}" if ":" in host else f"{host}:{one['port']}",
            "tls": tls is not None,
            "certificate_expires_s": expires_s,
            "certificate_days": None if expires_s is None else int((expires_s - time()) // _DAY_S),
            "certificate_fault": tls["fault"] if tls else None,
        }
        rows.append(row)
    return rows


def _rounded(value: float | None) -> float | None:
    """Round to five digits, so that JSON is short."""
    return None if value is None else float(f"{value:.5g}") if value < 1e5 else round(value)
