"""Alerts for operators: a problem, its remedy, and the view of the console that shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smqrt.operations.api_pages import Snapshot

LONG_LOOP_S = 0.1
"""A longer turn of the event loop causes an alert."""
WARN_DAYS, URGENT_DAYS = 30, 7
"""Certificates that expire within this number of days cause a warning, or an urgent alert."""
_MAX_ALERTS = 20
_MANY_FILES = 0.8
"""More open files than this fraction of the limit cause an alert."""

Row = Mapping[str, Any]
LATE_S = 60.0
"""A query whose oldest unprocessed row is older causes an alert."""
_FAILED_STATES = {"failed": "has failed", "stuck": "is stuck", "disk full": "is waiting for disk space"}
"""The states of a query that cause an alert, and the end of its text."""


@dataclass
class AlertInput:
    """The state of a server for `find_alerts`; see `smqrt.operations.snapshots` for the rows.

    Attributes:
        limits: the limits; `lately` is the number of refusals of each in the last minutes.
        dropped_lately: messages dropped at slow consumers in the last minutes.
        errors_lately: errors in the log in the last minutes.
    """

    server: Row
    listeners: Sequence[Row]
    applications: Sequence[Row]
    journals: Sequence[Row]
    pipelines: Sequence[Row]
    limits: Sequence[Row]
    dropped_lately: int
    errors_lately: int


def find_alerts(state: AlertInput) -> list[Snapshot]:
    """Return the alerts, the urgent ones first."""
    found = [*_server(state), *_certificates(state), *_applications(state), *_limits(state)]
    # Sorting is stable: within a level, alerts keep this order.
    return sorted(found, key=lambda alert: alert["level"] != "bad")[:_MAX_ALERTS]


def _alert(level: str, what: str, remedy: str, view: str) -> Snapshot:
    return {"level": level, "what": what, "remedy": remedy, "view": view}


def _server(state: AlertInput) -> Iterator[Snapshot]:
    server = state.server
    if server["phase"] == "draining":
        remedy = "It accepts no clients and closes its connections."
        yield _alert("warn", "The server is shutting down.", remedy, "peers")
    late_s = server["loop_lag_worst_s"]
    if late_s > LONG_LOOP_S:
        what = f"The event loop was blocked for {late_s * 1000:.0f} ms in the last minute."
        remedy = "All clients waited. Move long computations of applications into threads."
        yield _alert("warn", what, remedy, "overview")
    if server["open_files"] > _MANY_FILES * server["open_files_limit"]:
        what = f"{server['open_files']} of {server['open_files_limit']} file descriptors are in use."
        yield _alert("warn", what, "Raise the limit (ulimit -n, LimitNOFILE), or lower max_connections.", "overview")
    if state.errors_lately:
        what = f"{_counted(state.errors_lately, 'error')} in the log in the last five minutes."
        yield _alert("warn", what, "Each entry names the application or the client.", "log")


def _certificates(state: AlertInput) -> Iterator[Snapshot]:
    acme = state.server.get("acme")
    if acme and acme["fault"]:
        what = f"The certificate of {', '.join(acme['names'])} could not be ordered: {acme['fault']}"
        remedy = "The server tries again later, or at once after SIGHUP. Until then it uses its current certificate."
        yield _alert("bad", what, remedy, "overview")
    for listener in state.listeners:
        if listener["certificate_fault"]:
            what = f"New certificate files of listener {listener['name']} are invalid: {listener['certificate_fault']}"
            yield _alert(
                "bad", what, "The old certificate stays in use. Fix the files; the server reloads them.", "overview"
            )
        days = listener["certificate_days"]
        if days is None or days >= WARN_DAYS:
            continue
        expiry = "has expired" if days < 0 else f"expires in {_counted(days, 'day')}"
        remedy = "Replace the files; the server reloads them automatically, or at SIGHUP."
        what = f"The certificate of the listener {listener['name']} {expiry}."
        yield _alert("bad" if days < URGENT_DAYS else "warn", what, remedy, "overview")


def _applications(state: AlertInput) -> Iterator[Snapshot]:
    for one in state.applications:
        if one["state"] == "failed":
            first = str(one["error"]).partition("\n")[0]
            remedy = "Fix the line in the error, then restart the application."
            yield _alert("bad", f"The application {one['uri']} failed: {first}", remedy, "applications")
    for journal in state.journals:
        if journal.get("alarm"):
            remedy = "Check whether the disk is full, failing or slow. Publishers wait for it."
            yield _alert("bad", f"The disk does not keep up with the journal {journal['name']}.", remedy, "journals")
    for pipeline in state.pipelines:
        if pipeline["state"] == "waiting":
            remedy = "The log of the server has the error. The server starts the process again after increasing delays."
            yield _alert("bad", f"The pipelines of {pipeline['path']} failed.", remedy, "journals")
        for query in pipeline.get("queries", ()):
            if query.get("state") in _FAILED_STATES:
                why = str(query.get("error") or query.get("trouble") or "").partition("\n")[0]
                what = f"The query {query.get('name')} of {pipeline['path']} {_FAILED_STATES[query['state']]}"
                remedy = "`smqrt pipeline status` shows more."
                yield _alert("bad", f"{what}: {why}" if why else f"{what}.", remedy, "journals")
            elif pipeline["state"] == "running" and (late_s := query.get("lag_s") or 0.0) > LATE_S:
                rows = _counted(query.get("lag_rows") or 0, "unprocessed row")
                what = f"The query {query.get('name')} of {pipeline['path']} is {late_s:,.0f} s late, with {rows}."
                remedy = "It processes fewer rows than arrive: see “Pipelines” in the manual."
                yield _alert("warn", what, remedy, "journals")


def _limits(state: AlertInput) -> Iterator[Snapshot]:
    if state.dropped_lately:
        what = f"{_counted(state.dropped_lately, 'message')} dropped in the last five minutes."
        remedy = "Slow consumers miss messages; sort the peers by Dropped."
        yield _alert("warn", what, remedy, "peers")
    for limit in state.limits:
        if limit["lately"]:
            times = _counted(limit["lately"], "time")
            what = f"The limit {limit['name']} was reached {times} in the last five minutes."
            setting = limit["setting"]
            remedy = f"Last: {limit['last']}. " if limit["last"] else ""
            remedy += f"The setting {setting} changes it." if setting else "No setting changes it."
            yield _alert("warn", what, remedy, "limits")


def _counted(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 's'}"
