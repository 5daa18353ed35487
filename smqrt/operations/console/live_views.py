"""The pages that look at the console, and the greenlet that feeds them: one round a second while somebody looks.

A page says to the server's ETID what it looks at: {"view", "options", "serial"}; an empty view for nothing, as a page
in the background does. The answer comes in pieces, each `SERIAL PART PARTS` in a line and then its part of a JSON text:
{"data"} or {"error"}. Pages that look at the same share the work, and what has not changed is not sent again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

import gevent
from gevent.event import Event

from smqrt.errors import ArgumentError, ClosedError
from smqrt.operations.snapshots import Snapshot

log = logging.getLogger("smqrt.console")

PERIOD_S = 1.0
SOON_S = 0.1
"""The first answer to a page comes so soon, and rounds are at least so far apart."""
MAX_PAGES = 20
ASKED_BYTES = 8192
_PIECE_BYTES = 60_000
_ANSWER_BYTES = 1 << 20
_FAILED = "The console failed here; the server's log says why."


class Looked(Protocol):
    """See `smqrt.operations.console.views.View`."""

    def data(self) -> Snapshot: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class _Shared:
    """A view and the pages that look at it, with what each was sent last."""

    view: Looked
    pages: dict[int, int] = field(default_factory=dict)  # ETID to the serial of its question
    sent: dict[int, str] = field(default_factory=dict)


class Watching:
    """The pages that look.

    Args:
        make: makes a view by its name and options; raises ArgumentError.
        pulse: gives what all pages get each second.
        send: sends text to a page, by its ETID.
        beat: sends the pulse to all pages.
    """

    def __init__(
        self,
        make: Callable[[str, Mapping[str, Any]], Looked],
        pulse: Callable[[], Snapshot],
        send: Callable[[str, int], object],
        beat: Callable[[str], object],
    ) -> None:
        self._make, self._pulse, self._send, self._beat = make, pulse, send, beat
        self._shared: dict[str, _Shared] = {}
        self._asked: dict[int, str] = {}
        self._soon = Event()
        self._feeding: gevent.Greenlet[..., None] | None = None
        self._beat_at_s = 0.0

    def __len__(self) -> int:
        """How many pages look."""
        return len(self._asked)

    def asked(self, page: int, question: object) -> None:
        """A page looks at something else, or at nothing; what is no question is left aside."""
        if not isinstance(question, dict):
            return
        name, options, serial = question.get("view"), question.get("options"), question.get("serial")
        self.left(page)
        if not name or not isinstance(name, str) or not isinstance(options, dict) or not isinstance(serial, int):
            return
        try:
            self._look(page, name, options, serial)
        except (ArgumentError, ClosedError) as error:
            self._answer(page, serial, _text({"error": str(error)}))
            return
        self._soon.set()
        if self._feeding is None:
            self._feeding = gevent.spawn(self._feed)

    def _look(self, page: int, name: str, options: dict[str, Any], serial: int) -> None:
        if len(self._asked) >= MAX_PAGES:
            raise ArgumentError(f"{MAX_PAGES} pages of the console are open; close one of them")
        key = json.dumps([name, options], sort_keys=True)
        if key not in self._shared:
            self._shared[key] = _Shared(self._make(name, options))
        self._shared[key].pages[page] = serial
        self._asked[page] = key

    def left(self, page: int) -> None:
        """A page looks at nothing any more."""
        key = self._asked.pop(page, None)
        if key is None:
            return
        shared = self._shared[key]
        del shared.pages[page]
        shared.sent.pop(page, None)
        if not shared.pages:
            del self._shared[key]
            shared.view.close()

    def close(self) -> None:
        """Feed nobody any more; a second call does nothing."""
        for page in list(self._asked):
            self.left(page)
        feeding, self._feeding = self._feeding, None
        if feeding is not None:
            feeding.kill()

    def _feed(self) -> None:
        try:
            while self._asked:
                self._soon.clear()
                self._round()
                gevent.sleep(SOON_S)
                self._soon.wait(PERIOD_S - SOON_S)
        except ClosedError:
            pass  # the hub of the console has ended, and with it the pages
        finally:
            self._feeding = None

    def _round(self) -> None:
        if monotonic() - self._beat_at_s >= PERIOD_S - SOON_S:
            self._beat_at_s = monotonic()
            self._guarded(lambda: self._beat(_text(self._pulse())))
        for shared in list(self._shared.values()):
            answer = self._guarded(lambda shared=shared: _text({"data": shared.view.data()}))  # type: ignore[misc]
            for page, serial in list(shared.pages.items()):
                if shared.sent.get(page) != answer:
                    shared.sent[page] = answer
                    self._answer(page, serial, answer)
            gevent.sleep(0)

    def _guarded(self, give: Callable[[], Any]) -> str:
        try:
            return str(give())
        except (ArgumentError, ClosedError) as error:
            return _text({"error": str(error)})
        except Exception:
            log.exception("a view of the console failed")
            return _text({"error": _FAILED})

    def _answer(self, page: int, serial: int, answer: str) -> None:
        if len(answer) > _ANSWER_BYTES:
            answer = _text({"error": f"That is more than a page takes: {len(answer):,} bytes. Search for less."})
        pieces = [answer[at : at + _PIECE_BYTES] for at in range(0, len(answer), _PIECE_BYTES)]
        for number, piece in enumerate(pieces, 1):
            self._send(f"{serial} {number} {len(pieces)}\n{piece}", page)


def _text(value: Snapshot) -> str:
    """JSON in ASCII: as many bytes as characters."""
    return json.dumps(value, separators=(",", ":"))
