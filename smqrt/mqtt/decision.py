"""What `onstatus` is told, and what its answer means."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger("smqrt.mqtt")

DEFAULT_DELAY_S = 5.0
LONGEST_DELAY_S = 86_400.0

OnStatus = Callable[[str, str, Mapping[str, Any]], Any]
"""`f(type, code, status)`, called when a connection stands, was refused, or ended; see `End` for the words.

On `("mqtt", "connect", {"sessionpresent", "reasoncode": 0, "properties"})`: a true value keeps the connection.
Otherwise: None or False gives up, True tries again after 5 seconds, a number after so many seconds. When it raises, or
answers something else, the client goes on as one without `onstatus`, and the log tells; so it does, without a word,
when the answer is NotImplemented."""


def delay_of(answer: Any, default: float | None) -> float | None:
    """Seconds until the next attempt, as `onstatus` wants it; None for never."""
    if answer is None or answer is False:
        return None
    if answer is True:
        return DEFAULT_DELAY_S
    if answer is NotImplemented:
        return default
    if isinstance(answer, int | float) and 0 <= answer <= LONGEST_DELAY_S:
        return float(answer)
    log.error(
        "onstatus answered %r; it must answer None or False, True, or seconds from 0 to %.0f", answer, LONGEST_DELAY_S
    )
    return default
