"""Status codes, the error a handler may raise, and the small error pages."""

from __future__ import annotations

from functools import lru_cache
from html import escape
from http import HTTPStatus

from smqrt.errors import SmqrtError

_HEAD = (
    '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{}</title>'
    '<link rel="icon" href="data:,"><style>:root{{color-scheme:light dark}}'
    "body{{font:1.05rem/1.5 system-ui,sans-serif;max-width:34rem;margin:12vh auto;padding:0 1.2rem}}"
    "h1{{font-size:1.4rem}}</style></head>"
)
REASONS: dict[int, str] = {status.value: status.phrase for status in HTTPStatus}


class HttpError(SmqrtError):
    """A request that is answered with an error status.

    Args:
        status: the status code of the answer.
        detail: one sentence for the page and the log.
        headers: further headers of the answer, such as `Allow`.
        close: end the connection behind the answer, because the byte stream can't be trusted any more.
    """

    def __init__(
        self, status: int, detail: str = "", *, headers: dict[str, str] | None = None, close: bool = False
    ) -> None:
        super().__init__(detail or reason(status))
        self.status = status
        self.detail = detail
        self.headers = headers or {}
        self.close = close


class BadRequest(HttpError):
    """The bytes are no request we accept: 400 and the end of the connection."""

    def __init__(self, detail: str, status: int = 400) -> None:
        super().__init__(status, detail, close=True)


class ClientGoneError(ConnectionError):
    """The client of an exchange is gone: nothing can be sent to it any more."""


def reason(status: int) -> str:
    """Give the reason phrase of a status code."""
    return REASONS.get(status, "Unknown")


def error_page(status: int, detail: str = "") -> bytes:
    """Build the small HTML page of an error status; `detail` is escaped."""
    return _page(status, detail) if detail else _page_without_detail(status)


@lru_cache(64)
def _page_without_detail(status: int) -> bytes:
    return _page(status, "")


def _page(status: int, detail: str) -> bytes:
    title = f"{status} {reason(status)}"
    text = f"<p>{escape(detail)}</p>" if detail else ""
    head = _HEAD.format(title)
    return f'<!DOCTYPE html><html lang="en">{head}<body><h1>{title}</h1>{text}</body></html>\n'.encode()
