"""How queries are doing while one watches: a live table on a terminal, lines in a log."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from smqrt.cli.pipeline_table import line, table
from smqrt.pipeline.status import Status, read_all
from smqrt.printable import printable

_REFRESH_S = 0.5
_LINE_EVERY_S = 10.0


@contextmanager
def shown(state: Path, names: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """While inside, shows how queries are doing: a live table on a terminal, else a line for each now and then.

    Args:
        state: folder of the state of queries.
        names: of the queries; their dead letters are shown too.

    Yields:
        What prints a sentence without tearing the table apart.
    """
    over = threading.Event()
    show = _live if sys.stderr.isatty() else _lines
    console = Console(stderr=True)
    thread = threading.Thread(target=show, args=(state, names, over, console), daemon=True)
    thread.start()
    try:
        yield lambda text: console.print(Text(printable(text, lines=True)), soft_wrap=not console.is_terminal)
    finally:
        over.set()
        thread.join()


def _live(state: Path, names: Sequence[str], over: threading.Event, console: Console) -> None:
    from rich.live import Live

    began = time.time()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while not over.wait(_REFRESH_S):
            live.update(table(_recent(state, names, began), console.width), refresh=True)
        live.update(table(_recent(state, names, began), console.width), refresh=True)


def _lines(state: Path, names: Sequence[str], over: threading.Event, console: Console) -> None:
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
                console.print(Text(line(status)), soft_wrap=True)


def _recent(state: Path, names: Sequence[str], began: float) -> list[Status]:
    """The status of these queries, and of their dead letters, of this run."""
    known = read_all(state)
    return [each for each in known if each.since >= began - 1 and (each.name in names or each.pid == os.getpid())]


def watching(look: Callable[[], Sequence[Status]]) -> None:
    """Shows a live table until Ctrl-C.

    Args:
        look: gives the status of queries.
    """
    from rich.live import Live

    with suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
        while True:
            live.update(table(look(), live.console.width), refresh=True)
            time.sleep(_REFRESH_S)
