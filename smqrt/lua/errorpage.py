"""What the client sees when a page or a directory function failed (spec: runtime §4)."""

from __future__ import annotations

import json
from html import escape
from typing import Any


def show(request: Any, failure: str) -> None:
    """Put the failure into the response of `request`.

    failure: the message with file and line, and the traceback below it.
    Nothing sent yet: status 500 and plain text, or `{"error":"lua","emsg":...}` for a request by script.
    Already under way: a block of HTML behind what was sent.
    """
    response = request.response
    if response.committed:
        response.write(f"\n<pre>Lua error: {escape(failure)}</pre>\n".encode())
        return
    response.reset()
    if (request.get("X-Requested-With") or "").lower() == "xmlhttprequest":
        response.headers.set("Content-Type", "application/json")
        response.write(json.dumps({"error": "lua", "emsg": failure}).encode())
        return
    response.status = 500
    response.headers.set("Content-Type", "text/plain; charset=utf-8")
    response.write(f"Lua error: {failure}\n".encode())
