"""The status of queries for people: a table for a terminal, lines for a log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime

from rich.table import Table
from rich.text import Text

from smqrt.pipeline.status import Status
from smqrt.printable import printable

_STYLES = {
    "running": "green",
    "waiting": "green dim",
    "starting": "yellow",
    "stuck": "bold red",
    "failed": "bold red",
    "dead": "bold red",
}
_COLUMNS = ("query", "state", "batch", "rows/s", "lag", "batch time", "kept", "watermark", "too late", "left out")
_LEFT = ("query", "state", "watermark")
_DISPENSABLE = ("batch", "left out", "too late", "watermark", "kept")
"""What a narrow terminal doesn't show, in this order."""
_GAP = 2


def table(statuses: Sequence[Status], width: int = 200) -> Table:
    """Returns the table: a row for each query, below it why it failed.

    Args:
        statuses: as `read_all` returns them.
        width: characters in a line of the terminal; on a narrow one some columns are left out.
    """
    rows = [_cells(status) for status in statuses]
    chosen = _chosen(rows, width)
    shown = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in chosen:
        shown.add_column(_COLUMNS[column], justify="left" if _COLUMNS[column] in _LEFT else "right", no_wrap=True)
    for status, cells in zip(statuses, rows, strict=True):
        shown.add_row(*(_cell(status, column, cells[column]) for column in chosen))
    told = [f"{status.name}{sentence}" for status in statuses if (sentence := _sentence(status))]
    shown.caption = Text("\n".join(told), "red") if told else None
    shown.caption_justify = "left"
    return shown


def _chosen(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The columns that fit, the most needed ones; others than these could only be cut."""
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    chosen = list(range(len(_COLUMNS)))
    for name in _DISPENSABLE:
        if sum(widths[column] + _GAP for column in chosen) > width:
            chosen.remove(_COLUMNS.index(name))
    return chosen


def _cell(status: Status, column: int, text: str) -> Text:
    return Text(text, _STYLES.get(status.state, "dim") if _COLUMNS[column] == "state" else "")


def line(status: Status) -> str:
    """Returns one line for a log, the same words in the same order for every query."""
    name, state, batch, rate, lag, batch_time, kept, watermark, late, left_out = _cells(status)
    parts = [f"{name} {state}", f"batch {batch}", f"{rate} rows/s", f"lag {lag}", f"batch time {batch_time}"]
    parts += [f"kept {kept}"] if kept else []
    parts += [f"watermark {watermark}"] if watermark else []
    parts += [f"too late {late}"] if late else []
    parts += [f"left out {left_out}"] if left_out else []
    return ", ".join(parts) + _sentence(status)


def _sentence(status: Status) -> str:
    """What went wrong, or keeps a query from going on, behind a colon."""
    since = f" since {time.strftime('%H:%M:%S UTC', time.gmtime(status.stuck_since))}" if status.stuck_since else ""
    why = status.error or (status.trouble if status.stuck_since else "")
    return f"{since}: {printable(why, lines=True)}" if why else ""


def _cells(status: Status) -> list[str]:
    return [
        status.name,
        status.state,
        str(status.batch) if status.batch >= 0 else "-",
        f"{status.rows_per_s:,.0f}",
        f"{status.lag_rows:,} rows {status.lag_s:,.1f} s",
        f"{status.batch_ms:,} ms",
        _kept(status),
        _watermark(status),
        f"{status.dropped_by_watermark:,}" if status.dropped_by_watermark else "",
        _left_out(status),
    ]


def _kept(status: Status) -> str:
    return f"{status.state_rows:,} rows {_size(status.state_bytes)}" if status.state_rows or status.state_bytes else ""


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:,.1f} kB"


def _watermark(status: Status) -> str:
    """The time of day, with the date when it's another than today's."""
    try:
        moment = datetime.fromisoformat(status.watermark)
    except ValueError:
        return printable(status.watermark)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    text = moment.strftime("%Y-%m-%d %H:%M:%S")
    return text.removeprefix(today + " ") + " UTC"


def _left_out(status: Status) -> str:
    rows = status.bad_json + status.future + sum(status.expectations.values())
    return f"{rows:,}" if rows else ""
