"""The terminal of a command: messages as JSON, progress bars, and an orderly end after Ctrl-C and SIGTERM.

Every `--json` prints one JSON object a line, with the same names for the same things (help: command-line).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from smqrt import printable
from smqrt.journal.payload_schema import load_json

Item = TypeVar("Item")
_SHARE_EVERY_S = 0.2


def payload_fields(payload: bytes) -> dict[str, object]:
    """Returns a message's payload as every `--json` shows it: as `payload` when it is UTF-8, else as `payload_hex`; and
    its value as `json` when it is JSON.
    """
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return {"payload_hex": payload.hex()}
    value = load_json(payload)
    return {"payload": text} if value is ... else {"payload": text, "json": value}


def now() -> str:
    """Returns the time as every `--json` shows it: ISO, UTC, microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def json_line(fields: Mapping[str, object]) -> bytes:
    """Returns one JSON object as a line, without its end, that is safe to print."""
    return printable.json_line(fields).encode()


def write_line(line: bytes) -> None:
    """Writes a line to the standard output, at once."""
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def discard_output() -> None:
    """The reader of the standard output, such as `head`, has seen enough: what else is written goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar on the standard error while inside, when that is a terminal.

    Args:
        what: what is being done, one word.
        total: how much there is to do.

    Yields:
        What takes how much more was done.
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
    """Shows a bar on the standard error while inside, when that is a terminal.

    Args:
        what: what is being done, one word.
        done: tells now and then how much of it is done, 0 to 1; from a thread of its own.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    over = threading.Event()
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        thread = threading.Thread(target=_advance, args=(bar, bar.add_task(what, total=1.0), done, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _advance(bar: Progress, task: TaskID, done: Callable[[], float], over: threading.Event) -> None:
    with suppress(Exception):  # what is asked has ended
        while not over.wait(_SHARE_EVERY_S):
            bar.update(task, completed=done())


def counted(items: Iterable[Item], advance: Callable[[int], None], every: int = 256) -> Iterator[Item]:
    """Yields `items`, and calls `advance` for each `every` of them."""
    for number, item in enumerate(items, 1):
        yield item
        if number % every == 0:
            advance(every)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which unwinds what runs as Ctrl-C does."""


class InterruptibleCommand(click.Command):
    """A command that ends with exit code 130 after Ctrl-C, and 143 after SIGTERM, as a shell has it.

    What an interrupt says is printed, without it that it was one.
    """

    def invoke(self, ctx: click.Context) -> object:
        """See `click.Command.invoke`."""
        with _sigterm_unwinds():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as interrupt:
                click.echo(str(interrupt) or "Interrupted.", err=True)
                sys.exit(128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT))


class Interruptible(InterruptibleCommand, click.Group):
    """A group of such commands."""


@contextmanager
def only_this_greenlet() -> Iterator[None]:
    """While inside, Ctrl-C and SIGTERM interrupt the greenlet that entered; those of a client go on and deliver."""
    import gevent

    here, kinds = gevent.getcurrent(), {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
    earlier = {number: signal.getsignal(number) for number in kinds}
    watchers = [gevent.signal_handler(number, gevent.kill, here, kind) for number, kind in kinds.items()]
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.cancel()
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _terminated(number: int, frame: Any) -> None:
    raise Terminated
