"""What Lua is told of a certificate."""

from __future__ import annotations

import json

from smqrt.net import certificates


def describe(data: bytes | None) -> bytes | None:
    """What `certificates.describe` says as JSON text, from which the Lua half makes a table."""
    fields = certificates.describe(data)
    return json.dumps(fields).encode() if fields else None
