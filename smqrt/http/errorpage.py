"""The answer when a page or a directory function failed: what went wrong, or only the number it has in the log (spec:
runtime §4; design: reliability §5)."""

from __future__ import annotations

import json
import logging
import secrets
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smqrt.http.message import Request

log = logging.getLogger("smqrt")


def report(request: Request, language: str, failure: str) -> None:
    """Logs a failure under a number and puts it into the response; `Access.shows_errors` decides whether the client
    sees more than the number.

    Nothing sent yet: status 500 and plain text, or `{"error": "lua", "emsg": ...}` for a request by script. Already
    under way: a block of HTML behind what was sent.

    Args:
        request: the request that was being answered; its response is open.
        language: of the code that failed, "Lua" or "Python".
        failure: the message with file and line, and the traceback below it.
    """
    number = secrets.token_hex(4)
    log.error("error %s in %s: %s", number, request.path, failure)
    if not request.access.shows_errors(request):
        failure = f"number {number} in the server's log"
    _show(request, language, failure)


def _show(request: Request, language: str, failure: str) -> None:
    response = request.response
    if response.committed:
        response.write(f"\n<pre>{language} error: {escape(failure)}</pre>\n".encode())
        return
    response.reset()
    if (request.get("X-Requested-With") or "").lower() == "xmlhttprequest":
        response.headers.set("Content-Type", "application/json")
        response.write(json.dumps({"error": language.lower(), "emsg": failure}).encode())
        return
    response.status = 500
    response.headers.set("Content-Type", "text/plain; charset=utf-8")
    response.headers.set("Cache-Control", "no-store")
    response.write(f"{language} error: {failure}\n".encode("utf-8", "backslashreplace"))
