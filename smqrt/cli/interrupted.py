"""Commands that are ended in the middle: Ctrl-C and SIGTERM unwind them, and one line says so."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click


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
