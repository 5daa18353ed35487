"""Things for an operator to look at now: a sentence of what is wrong, one of what to do, and the view that shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smqrt.operations.snapshots import Snapshot

LONG_LOOP_S = 0.1
FEW_DAYS, FEWER_DAYS = 30, 7
"""A certificate that is good for so long only is told; for less it is urgent."""
_MOST = 20
_MANY_FILES = 0.8

Row = Mapping[str, Any]
_TROUBLED = {"failed": "has failed", "stuck": "is stuck", "disk full": "waits for room on a disk"}
"""What is told of a query in such a state."""


@dataclass
class Looked:
    """What is looked at; see `smqrt.operations.snapshots` for the rows.

    Attributes:
        limits: with `lately`, how often each was reached in the last minutes.
        dropped_lately, errors_lately: messages that slow clients missed, and errors in the log, in the last minutes.
    """

    server: Row
    listeners: Sequence[Row]
    applications: Sequence[Row]
    journals: Sequence[Row]
    pipelines: Sequence[Row]
    limits: Sequence[Row]
    dropped_lately: int
    errors_lately: int


def find_alerts(looked: Looked) -> list[Snapshot]:
    """Returns what to look at, the urgent first; empty when all is well."""
    found = [*_server(looked), *_certificates(looked), *_applications(looked), *_data(looked), *_limits(looked)]
    return sorted(found, key=lambda thing: thing["level"] != "bad")[:_MOST]


def _thing(level: str, what: str, remedy: str, view: str) -> Snapshot:
    return {"level": level, "what": what, "remedy": remedy, "view": view}


def _server(looked: Looked) -> Iterator[Snapshot]:
    server = looked.server
    if server["phase"] == "draining":
        yield _thing("warn", "The server is ending.", "It accepts nobody any more and closes its connections.", "peers")
    late_s = server["loop_lag_worst_s"]
    if late_s > LONG_LOOP_S:
        what = f"Something held the event loop for {late_s * 1000:.0f} ms in the last minute."
        yield _thing("warn", what, "Everybody waited. Move long computations of applications into threads.", "overview")
    if server["open_files"] > _MANY_FILES * server["open_files_limit"]:
        what = f"{server['open_files']} of {server['open_files_limit']} file descriptors are in use."
        yield _thing("warn", what, "Raise the limit (ulimit -n, LimitNOFILE), or lower max_connections.", "overview")
    if looked.errors_lately:
        what = f"{_counted(looked.errors_lately, 'error')} in the log in the last five minutes."
        yield _thing("warn", what, "Each says which application or client it was about.", "log")


def _certificates(looked: Looked) -> Iterator[Snapshot]:
    acme = looked.server.get("acme")
    if acme and acme["fault"]:
        what = f"The certificate of {', '.join(acme['names'])} could not be ordered: {acme['fault']}"
        remedy = "The server tries again by itself, at SIGHUP at once. Until then it uses the certificate that it has."
        yield _thing("bad", what, remedy, "overview")
    for listener in looked.listeners:
        if listener["certificate_fault"]:
            what = f"New files of the listener {listener['name']} can't be used: {listener['certificate_fault']}"
            yield _thing(
                "bad", what, "The old certificate stays in use. Mend the files; they are read again.", "overview"
            )
        days = listener["certificate_days"]
        if days is None or days >= FEW_DAYS:
            continue
        ends = "has expired" if days < 0 else f"expires in {_counted(days, 'day')}"
        remedy = "Put a new one into its place; the server reads it by itself, or at SIGHUP."
        what = f"The certificate of the listener {listener['name']} {ends}."
        yield _thing("bad" if days < FEWER_DAYS else "warn", what, remedy, "overview")


def _applications(looked: Looked) -> Iterator[Snapshot]:
    for one in looked.applications:
        if one["state"] == "failed":
            first = str(one["error"]).partition("\n")[0]
            remedy = "Mend the line it names, then restart it."
            yield _thing("bad", f"The application {one['uri']} failed: {first}", remedy, "applications")


def _data(looked: Looked) -> Iterator[Snapshot]:
    for journal in looked.journals:
        if journal.get("alarm"):
            remedy = "Look at the disk: full, failing or slow. Publishers wait until it takes what they sent."
            yield _thing("bad", f"The disk does not keep up with the journal {journal['name']}.", remedy, "journals")
    for pipeline in looked.pipelines:
        if pipeline["state"] == "waiting":
            remedy = "The server's output has its error; it is started again by itself, ever less often."
            yield _thing("bad", f"The pipelines of {pipeline['path']} failed.", remedy, "journals")
        for query in pipeline.get("queries", ()):
            if query.get("state") in _TROUBLED:
                why = str(query.get("error") or query.get("trouble") or "").partition("\n")[0]
                what = f"The query {query.get('name')} of {pipeline['path']} {_TROUBLED[query['state']]}"
                remedy = "`smqrt pipeline status` tells more."
                yield _thing("bad", f"{what}: {why}" if why else f"{what}.", remedy, "journals")
    if looked.dropped_lately:
        what = f"{_counted(looked.dropped_lately, 'message')} dropped in the last five minutes."
        remedy = "Clients that do not read fast enough miss messages; sort the peers by Dropped."
        yield _thing("warn", what, remedy, "peers")


def _limits(looked: Looked) -> Iterator[Snapshot]:
    for limit in looked.limits:
        if limit["lately"]:
            times = _counted(limit["lately"], "time")
            what = f"The limit {limit['name']} was reached {times} in the last five minutes."
            setting = limit["setting"]
            remedy = f"Last: {limit['last']}. " if limit["last"] else ""
            remedy += f"The setting {setting} changes it." if setting else "No setting changes it."
            yield _thing("warn", what, remedy, "limits")


def _counted(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 's'}"
