"""The console: its mount on the admin listener, and the state that its pages share."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from time import time
from typing import Any

import gevent

from smqrt.apps.lua.applications import Application, Running
from smqrt.apps.python.application import PythonApplication
from smqrt.apps.python.directory import ApplicationDirectory
from smqrt.http.disk import DiskIo
from smqrt.http.message import Request
from smqrt.http.tree import Branch, Directory
from smqrt.operations.all_workers import AllWorkers
from smqrt.operations.api_pages import Snapshot
from smqrt.operations.console.alerts import AlertInput, find_alerts
from smqrt.operations.console.gauges import (
    NAMES,
    STEP_S,
    TOPICS_S,
    Growth,
    History,
    PacedCache,
    Sample,
    Sampler,
    merged_hubs,
)
from smqrt.process.current_process import AppScope
from smqrt.transport.unix_sockets import is_unix_path

# ---- Console in the directory tree of the admin listener

NAME = "console"
HEADERS = {
    # Only scripts and styles in files of this server: the name of a topic or client can't inject code into a page.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _StartPage(Directory):
    """Redirects `/` of the admin listener to the console while that is running."""

    def __init__(self, console: Application) -> None:
        super().__init__(None, -127)  # the lowest priority
        self._console = console

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        if relpath or not self._console.running:
            return False
        request.response.redirect(f"/{NAME}/")
        return True


def mount(
    server: AllWorkers, root: Branch, find_session: Callable[[Request], object] = lambda request: None
) -> Application:
    """Return the console as an application, not loaded yet: `load` inserts it into `root`, `unload` removes it.

    Args:
        server: the server that the console shows.
        root: the tree of the admin listener.
        find_session: returns the session of a request, or None.
    """
    folder = Path(str(resources.files("smqrt.operations.console")))

    def start() -> Running:
        scope = AppScope(folder, NAME)
        scope.is_internal = True  # the hub of the console is not shown in the console
        reader = ApplicationDirectory(NAME, 0, DiskIo(folder), scope, find_session, f"{NAME}/")
        reader.headers = dict(HEADERS)
        scope.names["server"] = server
        script = PythonApplication(NAME, reader, scope)
        root.insert(reader)
        return Running(scope, reader, [script])

    application = Application(NAME, folder, start)
    root.insert(_StartPage(application))
    return application


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
        # Separate samplers, because rates are computed between two samples: charts and pages have different intervals.
        self._history_sampler = Sampler(server, "limits")
        self._page_sampler = Sampler(server, "listeners", "apps", "journals", "pipelines", "limits")
        self._limits, self._drops = Growth(), Growth()
        self._topic_counts: PacedCache[tuple[str, ...]] = PacedCache(self._count_topics, kept_s=TOPICS_S)
        self._sampling = gevent.spawn(self._sample_loop)
        self._host = socket.gethostname()
        self._workers: list[int] = []

    def close(self) -> None:
        """Stop sampling. A second call does nothing."""
        self._sampling.kill()

    def _sample_loop(self) -> None:
        while True:
            try:
                sample = self._history_sampler.sample()
                workers = [one["worker"] for one in workers_of(sample)]
                if workers != self._workers:  # sums over different workers can't be compared
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
        return self._page_sampler.sample()

    def hubs(self) -> list[dict[str, Any]]:
        """Return the merged hubs, see `merged_hubs`. A topic counts once, also if several workers have it."""
        hubs = merged_hubs(self.sample().hubs)
        if shared := tuple(hub["key"] for hub in hubs if len(hub["ids"]) > 1):
            counts = self._topic_counts.get(shared)
            for hub in hubs:
                hub["topics"] = counts.get(hub["key"], hub["topics"])
        return hubs

    def _count_topics(self, keys: tuple[str, ...]) -> tuple[dict[str, int], float]:
        queries = [(("topics",), {"key": key, "limit": "1", "ids": "all"}) for key in keys]
        pages, cost_s = self.server.get_many(queries)
        return {key: page["total"] for key, page in zip(keys, pages, strict=True) if page is not None}, cost_s

    def pulse(self) -> Snapshot:
        """Return the figures that all pages receive each second."""
        sample = self.sample()
        counts: dict[str, float | None] = {
            "alerts": len(self._alerts(sample)),
            "peers": sample.now["peers"],
            "topics": sum(hub["topics"] for hub in self.hubs()),
            "apps_failed": sum(one["state"] == "failed" for one in sample.also["apps"]),
            "errors": sample.server["log_errors"],
        }
        hubs, has_mqtt = self.hubs(), any(hub["mqtt"] is not None for hub in sample.hubs)
        for name in ("sessions", "retained"):  # without MQTT clients, the pages are not in the navigation
            counts[name] = sum(hub[name] for hub in hubs) if has_mqtt else None
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
            "alerts": self._alerts(sample),
            "hubs": [
                {
                    "id": hub["id"],
                    "name": hub["name"],
                    "peers": hub["peers"],
                    "topics": hub["topics"],
                    "in_per_s": _rounded(hub["in_per_s"]),
                    "out_per_s": _rounded(hub["out_per_s"]),
                    "queued_bytes": hub["queued_bytes"],
                    "dropped": hub["dropped"],
                    "dropped_lately": hub["dropped_per_s"],
                }
                for hub in self.hubs()
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
        address = f"[{host}]:{one['port']}" if ":" in host else f"{host}:{one['port']}"
        row |= {
            "address": f"unix:{host}" if is_unix_path(host) else address,
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
