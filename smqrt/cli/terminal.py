"""Terminal output and interruption of commands.

Every `--json` prints one JSON object per line, with the same field names in all commands (help: command-line).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import FrameType
from typing import TypeVar

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from smqrt import printable
from smqrt.journal.payload_schema import load_json

Item = TypeVar("Item")
_POLL_S = 0.2


def payload_fields(payload: bytes) -> dict[str, object]:
    """Return the JSON fields of a payload: `payload` when it is UTF-8, else `payload_hex`; `json` when it is JSON."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return {"payload_hex": payload.hex()}
    value = load_json(payload)
    return {"payload": text} if value is ... else {"payload": text, "json": value}


def now() -> str:
    """Return the current time for JSON: ISO, UTC, microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def json_line(fields: Mapping[str, object]) -> bytes:
    """Return a JSON object as a line without line end; control characters are escaped."""
    return printable.json_line(fields).encode()


def write_line(line: bytes) -> None:
    """Write a line to standard output and flush it."""
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def discard_output() -> None:
    """Redirect standard output to /dev/null, after the program at the end of the pipe, such as `head`, has exited."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error, when that is a terminal.

    Args:
        what: the operation, one word.
        total: the number of items.

    Yields:
        A function that advances the bar by a number of items.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda count: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def polled_progress(what: str, done: Callable[[], float]) -> Iterator[None]:
    """Show a progress bar on standard error, when that is a terminal.

    Args:
        what: the operation, one word.
        done: returns the completed share, 0 to 1; called regularly in a thread.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    finished = threading.Event()
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=1.0)

        def poll() -> None:
            with suppress(Exception):  # the operation may end between two polls
                while not finished.wait(_POLL_S):
                    bar.update(task, completed=done())

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()


def counted(items: Iterable[Item], advance: Callable[[int], None], every: int = 256) -> Iterator[Item]:
    """Yield `items`; call `advance(every)` after each batch of `every` items."""
    for number, item in enumerate(items, 1):
        yield item
        if number % every == 0:
            advance(every)


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised as an interrupt like Ctrl-C."""


class InterruptibleCommand(click.Command):
    """A command that exits with code 130 after Ctrl-C and 143 after SIGTERM, as shells report them.

    It prints the text of the interrupt, or "Interrupted.".
    """

    def invoke(self, ctx: click.Context) -> object:
        """See `click.Command.invoke`."""

        def terminate(number: int, frame: FrameType | None) -> None:
            raise Terminated

        # Only the main thread may set handlers.
        is_main = threading.current_thread() is threading.main_thread()
        earlier = signal.signal(signal.SIGTERM, terminate) if is_main else None
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            click.echo(str(interrupt) or "Interrupted.", err=True)
            sys.exit(128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT))
        finally:
            if is_main:
                signal.signal(signal.SIGTERM, earlier)


class InterruptibleGroup(InterruptibleCommand, click.Group):
    """A group of `InterruptibleCommand`s."""


@contextmanager
def interrupt_this_greenlet() -> Iterator[None]:
    """Context manager: Ctrl-C and SIGTERM interrupt this greenlet only; the greenlets of clients continue to send."""
    import gevent  # slow to import, and most commands do without it

    current, kinds = gevent.getcurrent(), {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
    earlier = {number: signal.getsignal(number) for number in kinds}
    watchers = [gevent.signal_handler(number, gevent.kill, current, kind) for number, kind in kinds.items()]
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.cancel()
        for number, handler in earlier.items():
            signal.signal(number, handler)
