"""The signals of a server's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import gevent

from smqrt.process import early_signals

Reaction = Callable[[], object]


class Signals:
    """Handlers of signals, in the event loop.

    Args:
        at_once: what is done at each of these signals.
        when_ready: what needs a server that serves: a signal that arrives before `ready` is handled there.
    """

    def __init__(self, at_once: Mapping[int, Reaction], when_ready: Mapping[int, Reaction]) -> None:
        self._at_once, self._when_ready = at_once, when_ready
        self._waiting: dict[int, None] | None = {}
        self._watchers = [gevent.signal_handler(number, self._react, number) for number in (*at_once, *when_ready)]
        for number in early_signals.take():
            self._react(number)

    def _react(self, number: int) -> None:
        if number in self._at_once:
            self._at_once[number]()
        elif self._waiting is None:
            self._when_ready[number]()
        else:
            self._waiting[number] = None

    def ready(self) -> None:
        """Handle what has waited, and from now on every signal at once."""
        waiting, self._waiting = self._waiting, None
        for number in waiting or ():
            self._when_ready[number]()

    def cancel(self) -> None:
        """Handle no signal any more."""
        for watcher in self._watchers:
            watcher.cancel()
