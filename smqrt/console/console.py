"""The console of one server: what its pages have in common."""

from __future__ import annotations

import logging
import socket
from time import time
from typing import Any

import gevent

from smqrt.admin.snapshots import Snapshot
from smqrt.admin.together import Together
from smqrt.console.attention import LATELY_S, Looked, things
from smqrt.console.gauges import NAMES, Gauges, Growth, hub_name
from smqrt.console.history import STEP_S, History
from smqrt.console.log_tail import LogTail

_DAY_S = 86400

log = logging.getLogger("smqrt.console")


class Console:
    """Samples the figures of a server for as long as it runs, and gives pages what they show.

    Args:
        server: with all of its workers.
    """

    def __init__(self, server: Together) -> None:
        self.server = server
        self.log = LogTail()
        self.history = History(NAMES)
        self.point: Snapshot = {}
        self._sampled, self._now = Gauges(server, int(STEP_S)), Gauges(server, int(STEP_S))
        self._limits, self._drops = Growth(), Growth()
        self._sampling = gevent.spawn(self._sample_for_ever)
        self._host = socket.gethostname()
        self._seen: Snapshot = {}
        self._workers: list[int] = []
        self._hubs: list[dict[str, Any]] = []

    def close(self) -> None:
        """End it; a second call does nothing."""
        self._sampling.kill()
        self.log.close()

    def _sample_for_ever(self) -> None:
        while True:
            try:
                self._sample()
            except Exception:
                log.exception("the console can't read the figures of the server")
            gevent.sleep(STEP_S)

    def _sample(self) -> None:
        server, hubs, now = self._sampled.look()
        workers = [one["worker"] for one in server.get("workers", ())]
        if workers != self._workers:  # sums of others than before say nothing of growth
            self._workers, self._limits, self._drops = workers, Growth(), Growth()
        at_s = time()
        self.history.add(at_s, now)
        self.point = {"time": round(at_s, 1), **{name: _rounded(value) for name, value in now.items()}}
        self._drops.look({"dropped": sum(hub["dropped"] for hub in hubs)})
        self._limits.look({str(one["name"]): reached(one) for one in self.server.look("limits")})

    # ---- what all pages get, each second

    def pulse(self) -> Snapshot:
        """Returns the figures of now; the overview, asked for behind it, shows the same moment."""
        server, hubs, now = self._now.look()
        self._hubs = hubs
        attention = things(self._looked(server, hubs))
        self._seen = {"server": self._server(server), "attention": attention, "hubs": [_hub(hub) for hub in hubs]}
        failed = sum(one["state"] == "failed" for one in self.server.look("apps"))
        counts = {
            "attention": len(attention),
            "peers": now["peers"],
            "topics": sum(hub["topics"] for hub in hubs),
            "apps_failed": failed,
            "errors": self.log.errors,
        }
        return {"now": {name: _rounded(value) for name, value in now.items()}, "counts": counts, "point": self.point}

    def overview(self) -> Snapshot:
        """Returns what the overview shows beside the figures of the pulse."""
        return {**self._seen, "listeners": self.listeners()}

    def _server(self, server: dict[str, Any]) -> Snapshot:
        return {
            "version": f"smqrt {server['version']}",
            "uptime_s": int(server["uptime_s"]),
            "host": self._host,
            "pid": server["pid"],
            "state": server["phase"],
        }

    def listeners(self) -> list[Snapshot]:
        """Returns the listeners, with the days that their certificates are good for."""
        return [_listener(dict(one)) for one in self.server.look("listeners")]

    def limits(self) -> list[dict[str, Any]]:
        """Returns the limits, with how often each was reached in the last minutes."""
        return [
            {**one, "lately": self._limits.of(str(one["name"]), reached(one))} for one in self.server.look("limits")
        ]

    def hubs(self) -> list[dict[str, Any]]:
        """Returns the hubs of the applications, as the last pulse saw them: to look at 10,000 clients takes 1 ms."""
        return self._hubs

    def _looked(self, server: dict[str, Any], hubs: list[dict[str, Any]]) -> Looked:
        return Looked(
            server=server,
            listeners=self.listeners(),
            applications=self.server.look("apps"),
            journals=self.server.look("journals"),
            pipelines=self.server.look("pipelines"),
            limits=self.limits(),
            dropped_lately=self._drops.of("dropped", sum(hub["dropped"] for hub in hubs)),
            errors_lately=self.log.errors_since(time() - LATELY_S),
        )


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
