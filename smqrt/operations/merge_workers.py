"""What several workers answer an operator, as one answer: rows side by side, counters summed up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smqrt.operations.api_arguments import Arguments
from smqrt.operations.paging import LIMIT

Answers = dict[int, Any]
"""By the number of the worker, in their order."""

_SUMS = ("cpu_s", "memory_bytes", "open_files", "open_files_limit", "connections", "hubs", "peers", "queued_bytes",
         "lua_memory_bytes", "lua_activities", "log_errors", "log_warnings", "log_errors_lately")  # fmt: skip
_WORST = ("loop_lag_s", "loop_lag_worst_s", "loop_lag_5s_s")
_OF_A_WORKER = ("pid", "phase", "uptime_s", *_SUMS, *_WORST)
_OF_A_LISTENER = ("accepted", "open", "refused", "given", "handshakes", "handshakes_failed")


def server(answers: Answers, arguments: Arguments) -> object:
    """Returns the server as a whole, and below `workers` what each of them is."""
    whole = dict(_first(answers))
    for name in _SUMS:
        whole[name] = sum(one[name] for one in answers.values())
    for name in _WORST:
        whole[name] = max(one[name] for one in answers.values())
    told = dict.fromkeys(text for one in answers.values() for text in one["obstacles"])
    whole["obstacles"], whole["ready"] = list(told), not told
    whole["workers"] = [
        {"worker": number, **{name: one[name] for name in _OF_A_WORKER}} for number, one in answers.items()
    ]
    return whole


def listeners(answers: Answers, arguments: Arguments) -> object:
    """Returns the ports, with the sums of their counters."""
    by_name = {number: {one["name"]: one for one in rows} for number, rows in answers.items()}
    return [
        {**row, **{name: sum(one[row["name"]][name] for one in by_name.values()) for name in _OF_A_LISTENER}}
        for row in _first(answers)
    ]


def side_by_side(answers: Answers, arguments: Arguments) -> object:
    """Returns the rows of all, each with its worker."""
    return [{**row, "worker": number} for number, rows in answers.items() for row in rows]


def first(answers: Answers, arguments: Arguments) -> object:
    """Returns what worker 0 says; it is the only one that knows."""
    return _first(answers)


def apps(answers: Answers, arguments: Arguments) -> object:
    """Returns the applications; one that does not run everywhere is shown as the worker has it that has the trouble."""
    rows = {row["name"]: row for row in _first(answers)}
    for number, answer in answers.items():
        for row in answer:
            if rows.get(row["name"], row)["state"] == "running" != row["state"]:
                rows[row["name"]] = {**row, "worker": number}
    return list(rows.values())


def limits(answers: Answers, arguments: Arguments) -> object:
    """Returns the limits, with how often each was reached in all, and what was refused last."""
    merged = []
    for rows in zip(*answers.values(), strict=False):
        latest = max(rows, key=lambda row: row["last_at"] or "")
        merged.append({**latest, "reached": sum(row["reached"] for row in rows)})
    return merged


def peers(answers: Answers, arguments: Arguments) -> object:
    """Returns a page of the clients of all: hubs have their worker in their number, so it is in their order, too."""
    sort = arguments.get("sort", "")
    by_size: dict[str, Callable[[Any], Any]] = {"newest": lambda row: -row["connected_s"]}
    key = by_size.get(sort, lambda row: row[sort]) if sort else lambda row: (-row["hub"], -row["etid"])
    return _page(answers, arguments, key, lambda row: str(row["id"]), is_last=bool(sort))


def newest(answers: Answers, arguments: Arguments) -> object:
    """Returns the last endings of connections, or lines of the log, of all, the newest first. Their numbers are each
    worker's own: no page is behind."""
    return _page(answers, arguments, lambda row: row["at"], lambda row: str(row["number"]), is_last=True)


def traces(answers: Answers, arguments: Arguments) -> object:
    """Returns the last lines that each application traced, in any worker, in the order of their time."""
    limit = int(arguments.get("limit", LIMIT))
    lines: dict[str | None, list[Any]] = {row["app"]: [] for row in _first(answers)}
    for number, rows in answers.items():
        for row in rows:
            lines.setdefault(row["app"], []).extend({**line, "worker": number} for line in row["lines"])
    return [{"app": app, "lines": sorted(found, key=lambda one: one["at"])[-limit:]} for app, found in lines.items()]


def _page(
    answers: Answers, arguments: Arguments, key: Callable[[Any], Any], after: Callable[[Any], str], is_last: bool
) -> object:
    rows: Any = side_by_side({number: page["items"] for number, page in answers.items()}, arguments)
    rows.sort(key=key, reverse=True)
    limit = int(arguments.get("limit", LIMIT))
    has_more = len(rows) > limit or any(page["after"] is not None for page in answers.values())
    items = rows[:limit]
    return {
        "items": items,
        "after": after(items[-1]) if items and has_more and not is_last else None,
        "total": sum(page["total"] for page in answers.values()),
    }


def _first(answers: Answers) -> Any:
    return next(iter(answers.values()))


MERGES: dict[str, Callable[[Answers, Arguments], object]] = {
    "server": server,
    "listeners": listeners,
    "hubs": side_by_side,
    "apps": apps,
    "journals": side_by_side,
    "pipelines": first,
    "limits": limits,
    "clusters": side_by_side,
    "peers": peers,
    "closed": newest,
    "log": newest,
    "traces": traces,
}
"""By the address below `/api/v1/`; others are answered by one worker."""


def metrics(texts: dict[int, str]) -> str:
    """Returns the metrics of all workers as one text, with the label `worker`.

    Args:
        texts: in the text format of Prometheus, by worker.
    """
    families: dict[str, list[str]] = {}
    for number, text in texts.items():
        family: list[str] = []
        is_known = False
        for line in text.split("\n"):
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_known = name in families
                family = families.setdefault(name, [])
            if line and not line.startswith("#"):
                family.append(_labelled(line, number))
            elif line and not is_known:
                family.append(line)
    return "".join(f"{line}\n" for family in families.values() for line in family)


def _labelled(line: str, worker: int) -> str:
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f'{name}{{worker="{worker}",{rest}'
    name, _, value = line.partition(" ")
    return f'{name}{{worker="{worker}"}} {value}'
