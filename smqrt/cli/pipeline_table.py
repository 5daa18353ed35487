"""The status of queries for people: a table for a terminal, lines for a log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime

from rich.table import Table
from rich.text import Text

from smqrt.pipeline.status import Status

_STYLES = {
    "running": "green",
    "waiting": "green dim",
    "starting": "yellow",
    "failed": "bold red",
    "dead": "bold red",
}
_COLUMNS = ("query", "state", "batch", "rows/s", "lag", "batch time", "kept", "watermark", "left out")
_LEFT = ("query", "state", "watermark")


def table(statuses: Sequence[Status]) -> Table:
    """Returns the table: a row for each query, below it why it failed.

    Args:
        statuses: as `read_all` returns them.
    """
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in _COLUMNS:
        shown.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=name != "query")
    for status in statuses:
        cells = [Text(cell) for cell in _cells(status)]
        cells[1].stylize(_STYLES.get(status.state, "dim"))
        shown.add_row(*cells)
    failed = [status for status in statuses if status.error]
    shown.caption = Text("\n".join(f"{status.name}: {status.error}" for status in failed), "red") if failed else None
    shown.caption_justify = "left"
    return shown


def line(status: Status) -> str:
    """Returns one line for a log, the same words in the same order for every query."""
    name, state, batch, rate, lag, batch_time, kept, watermark, left_out = _cells(status)
    parts = [f"{name} {state}", f"batch {batch}", f"{rate} rows/s", f"lag {lag}", f"batch time {batch_time}"]
    parts += [f"kept {kept}"] if kept else []
    parts += [f"watermark {watermark}"] if watermark else []
    parts += [f"left out {left_out}"] if left_out else []
    return ", ".join(parts) + (f": {status.error}" if status.error else "")


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
        return status.watermark
    today = time.strftime("%Y-%m-%d", time.gmtime())
    text = moment.strftime("%Y-%m-%d %H:%M:%S")
    return text.removeprefix(today + " ") + " UTC"


def _left_out(status: Status) -> str:
    rows = status.bad_json + sum(status.expectations.values())
    return f"{rows:,}" if rows else ""
