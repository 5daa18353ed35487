"""Updates of the console's pages, once a second while a page shows a view.

A page sends a request to the ETID of the server: {"view", "options", "serial"}. An empty view ends the updates; a
page in the background sends it. The answer is JSON, {"data"} or {"error"}, in pieces: each piece is a line
`SERIAL PART PARTS` and a part of the text. Pages with the same request share a view. An unchanged answer is not sent
again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import gevent
from gevent.event import Event

from smqrt.errors import ArgumentError, ClosedError
from smqrt.operations.api_pages import Snapshot
from smqrt.operations.console.views import View

log = logging.getLogger("smqrt.console")

PERIOD_S = 1.0
MIN_PERIOD_S = 0.1
"""The minimum time between two rounds, and therefore the maximum delay of the first answer to a page."""
MAX_PAGES = 20
MAX_REQUEST_BYTES = 8192
_MAX_PIECE_BYTES = 60_000
"""Less than the maximum payload of a message (65,520 bytes), to leave room for the line before the part."""
_MAX_ANSWER_BYTES = 1 << 20
_FAILED = "This view failed; see the log of the server."


@dataclass(eq=False)
class _SharedView:
    """A view and the pages that show it.

    Attributes:
        view: the view.
        pages: the serials of the requests, by the ETID of the page.
        sent: the last answers, by the ETID of the page.
    """

    view: View
    pages: dict[int, int] = field(default_factory=dict)
    sent: dict[int, str] = field(default_factory=dict)


class LiveViews:
    """Updates the pages of the console.

    Args:
        make: creates a view by its name and options; raises ArgumentError.
        pulse: returns the figures that all pages receive each second.
        send: sends text to a page by its ETID.
        send_to_all: sends the pulse to all pages.
    """

    def __init__(
        self,
        make: Callable[[str, Mapping[str, Any]], View],
        pulse: Callable[[], Snapshot],
        send: Callable[[str, int], object],
        send_to_all: Callable[[str], object],
    ) -> None:
        self._make, self._pulse, self._send, self._send_to_all = make, pulse, send, send_to_all
        self._shared: dict[str, _SharedView] = {}
        self._keys: dict[int, str] = {}
        self._changed = Event()
        self._updating: gevent.Greenlet[..., None] | None = None
        self._pulse_at_s = 0.0

    def __len__(self) -> int:
        """Return the number of pages with a view."""
        return len(self._keys)

    @property
    def is_updating(self) -> bool:
        """Whether a greenlet updates pages."""
        return self._updating is not None

    def request(self, page: int, request: object) -> None:
        """Change the view of a page, or end its updates. Ignore an invalid request."""
        if not isinstance(request, dict):
            return
        name, options, serial = request.get("view"), request.get("options"), request.get("serial")
        self.remove(page)
        if not name or not isinstance(name, str) or not isinstance(options, dict) or not isinstance(serial, int):
            return
        try:
            if len(self._keys) >= MAX_PAGES:
                raise ArgumentError(f"{MAX_PAGES} pages of the console are open; close one of them")
            key = json.dumps([name, options], sort_keys=True)  # equal for the same request of another page
            if key not in self._shared:
                self._shared[key] = _SharedView(self._make(name, options))
        except (ArgumentError, ClosedError) as error:
            self._answer(page, serial, _json_text({"error": str(error)}))
            return
        self._shared[key].pages[page] = serial
        self._keys[page] = key
        self._changed.set()
        if self._updating is None:
            self._updating = gevent.spawn(self._update_loop)

    def remove(self, page: int) -> None:
        """End the updates of a page."""
        key = self._keys.pop(page, None)
        if key is None:
            return
        shared = self._shared[key]
        del shared.pages[page]
        shared.sent.pop(page, None)
        if not shared.pages:
            del self._shared[key]
            shared.view.close()

    def close(self) -> None:
        """End the updates of all pages. A second call does nothing."""
        for page in list(self._keys):
            self.remove(page)
        updating, self._updating = self._updating, None
        if updating is not None:
            updating.kill()

    def _update_loop(self) -> None:
        try:
            while self._keys:
                self._changed.clear()
                # A request starts a round early; the pulse keeps its period.
                if monotonic() - self._pulse_at_s >= PERIOD_S - MIN_PERIOD_S:
                    self._pulse_at_s = monotonic()
                    self._text_or_error(lambda: self._send_to_all(_json_text(self._pulse())))
                for shared in list(self._shared.values()):
                    answer = self._text_or_error(lambda view=shared.view: _json_text({"data": view.data()}))  # type: ignore[misc]
                    for page, serial in list(shared.pages.items()):
                        if shared.sent.get(page) != answer:
                            shared.sent[page] = answer
                            self._answer(page, serial, answer)
                    gevent.sleep(0)  # serve clients between two views
                gevent.sleep(MIN_PERIOD_S)
                self._changed.wait(PERIOD_S - MIN_PERIOD_S)
        except ClosedError:
            pass  # the hub of the console was closed, with the connections of its pages
        finally:
            self._updating = None

    def _text_or_error(self, call: Callable[[], Any]) -> str:
        try:
            return str(call())
        except (ArgumentError, ClosedError) as error:
            return _json_text({"error": str(error)})
        except Exception:
            log.exception("a view of the console failed")
            return _json_text({"error": _FAILED})

    def _answer(self, page: int, serial: int, answer: str) -> None:
        if len(answer) > _MAX_ANSWER_BYTES:
            answer = _json_text(
                {"error": f"The answer is too long for a page ({len(answer):,} bytes): narrow the search."}
            )
        pieces = [answer[at : at + _MAX_PIECE_BYTES] for at in range(0, len(answer), _MAX_PIECE_BYTES)]
        for number, piece in enumerate(pieces, 1):
            self._send(f"{serial} {number} {len(pieces)}\n{piece}", page)


def _json_text(value: Snapshot) -> str:
    """Return JSON in ASCII, which has as many bytes as characters."""
    return json.dumps(value, separators=(",", ":"))
