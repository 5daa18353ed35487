"""Status of queries for people: a table on a terminal, live while one watches, and lines in a log."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from smqrt.pipeline.status import DISK_FULL, Status, read_all
from smqrt.printable import printable

_STYLES = {
    "running": "green",
    "waiting": "green dim",
    "starting": "yellow",
    "stuck": "bold red",
    "disk full": "bold red",
    "failed": "bold red",
    "dead": "bold red",
}
_COLUMNS = ("query", "state", "batch", "rows/s", "lag", "batch time", "kept", "watermark", "too late", "left out")
_LEFT = ("query", "state", "watermark")
_DISPENSABLE = ("batch", "left out", "too late", "watermark", "kept")
"""What a narrow terminal doesn't show, in this order."""
_GAP = 2
_UNKNOWN = "–"


def status_table(statuses: Sequence[Status], width: int = 200) -> Table:
    """Returns the table: a row for each query, below it why it failed.

    Args:
        statuses: as `read_all` returns them.
        width: characters in a line of the terminal; on a narrow one some columns are left out.
    """
    rows = [_cells(status) for status in statuses]
    chosen = _chosen_columns(rows, width)
    shown = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in chosen:
        shown.add_column(_COLUMNS[column], justify="left" if _COLUMNS[column] in _LEFT else "right", no_wrap=True)
    for status, cells in zip(statuses, rows, strict=True):
        shown.add_row(*(_cell(status, column, cells[column]) for column in chosen))
    told = [f"{status.name}{sentence}" for status in statuses if (sentence := _sentence(status))]
    shown.caption = Text("\n".join(told), "red") if told else None
    shown.caption_justify = "left"
    return shown


def _chosen_columns(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The columns that fit, the most needed ones; others than these could only be cut."""
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    chosen = list(range(len(_COLUMNS)))
    for name in _DISPENSABLE:
        if sum(widths[column] + _GAP for column in chosen) > width:
            chosen.remove(_COLUMNS.index(name))
    return chosen


def _cell(status: Status, column: int, text: str) -> Text:
    return Text(text, _STYLES.get(status.state, "dim") if _COLUMNS[column] == "state" else "")


def status_line(status: Status) -> str:
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
        _UNKNOWN if _is_lag_unknown(status) else f"{status.lag_rows:,} rows {status.lag_s:,.1f} s",
        f"{status.batch_ms:,} ms",
        _kept(status),
        _watermark_text(status),
        f"{status.dropped_by_watermark:,}" if status.dropped_by_watermark else "",
        _left_out(status),
    ]


def _is_lag_unknown(status: Status) -> bool:
    """Whether nobody has told yet how far the query is behind."""
    return status.state in ("starting", DISK_FULL) and not status.lag_rows


def _kept(status: Status) -> str:
    return f"{status.state_rows:,} rows {_size(status.state_bytes)}" if status.state_rows or status.state_bytes else ""


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:,.1f} kB"


def _watermark_text(status: Status) -> str:
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


_REFRESH_S = 0.5
_LINE_EVERY_S = 10.0


@contextmanager
def shown_progress(state: Path, names: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """While inside, shows how queries are doing: a live table on a terminal, else a line for each now and then.

    Args:
        state: folder of the state of queries.
        names: of the queries; their dead letters are shown too.

    Yields:
        What prints a sentence without tearing the table apart.
    """
    over = threading.Event()
    show = _live_table if sys.stderr.isatty() else _print_lines
    console = Console(stderr=True)
    thread = threading.Thread(target=show, args=(state, names, over, console), daemon=True)
    thread.start()
    try:
        yield lambda text: console.print(Text(printable(text, lines=True)), soft_wrap=not console.is_terminal)
    finally:
        over.set()
        thread.join()


def _live_table(state: Path, names: Sequence[str], over: threading.Event, console: Console) -> None:
    from rich.live import Live

    began = time.time()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while not over.wait(_REFRESH_S):
            live.update(status_table(_recent(state, names, began), console.width), refresh=True)
        live.update(status_table(_recent(state, names, began), console.width), refresh=True)


def _print_lines(state: Path, names: Sequence[str], over: threading.Event, console: Console) -> None:
    """A line for each query when its state changes, and every ten seconds while it works."""
    told: dict[str, tuple[str, float]] = {}
    began = time.time()
    done = False
    while not done:
        done = over.wait(_REFRESH_S)
        for status in _recent(state, names, began):
            before, when = told.get(status.name, ("", 0.0))
            if status.state != before or (status.rows_per_s and time.monotonic() - when >= _LINE_EVERY_S):
                told[status.name] = (status.state, time.monotonic())
                console.print(Text(status_line(status)), soft_wrap=True)


def _recent(state: Path, names: Sequence[str], began: float) -> list[Status]:
    """The status of these queries, and of their dead letters, of this run."""
    known = read_all(state)
    return [each for each in known if each.since >= began - 1 and (each.name in names or each.pid == os.getpid())]


def watch_table(look: Callable[[], Sequence[Status]]) -> None:
    """Shows a live table until Ctrl-C.

    Args:
        look: gives the status of queries.
    """
    from rich.live import Live

    with suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
        while True:
            live.update(status_table(look(), live.console.width), refresh=True)
            time.sleep(_REFRESH_S)
