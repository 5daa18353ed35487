"""States of a connection, and the legal transitions between them.

    OPENING ──▶ OPEN ◀──▶ BLOCKED        data in both directions; BLOCKED while the socket accepts none
        │         │           │
        └─────────┴─────┬─────┘
                        ▼
                    DRAINING             closed for its owner: the last data is sent, then the other side closes
                        │
                        ▼
                     CLOSED              the transport is closed, or passed to another process

DRAINING may be skipped: a broken connection is CLOSED at once. If the socket does not accept the first data, a
connection goes from OPENING to BLOCKED and back to OPENING. OPENING means:

* an SMQ client (raw, WebSocket, over TLS, WSGI): the handshake is not complete;
* HTTP: no request has arrived yet;
* a `Stream`: not used, it is OPEN from the beginning.

Reading is independent of the state: a client that waits for a hook is not read, BLOCKED or not.
"""

from __future__ import annotations

import logging
from enum import Enum

log = logging.getLogger("smqrt.life")


class Life(Enum):
    """State of a connection.

    Attributes:
        over: whether it is closed for its owner: no data is passed on in either direction.
        transitions: the legal next states.
    """

    OPENING = "opening"
    OPEN = "open"
    BLOCKED = "blocked"
    DRAINING = "draining"
    CLOSED = "closed"

    over: bool
    transitions: tuple[Life, ...]


_OVER = (Life.DRAINING, Life.CLOSED)
TRANSITIONS = {
    Life.OPENING: (Life.OPEN, Life.BLOCKED, Life.DRAINING, Life.CLOSED),
    Life.OPEN: (Life.BLOCKED, Life.DRAINING, Life.CLOSED),
    Life.BLOCKED: (Life.OPENING, Life.OPEN, Life.DRAINING, Life.CLOSED),
    Life.DRAINING: (Life.CLOSED,),
    Life.CLOSED: (),
}
for _life, _transitions in TRANSITIONS.items():
    # Attributes, because `over` is read for each batch of messages, and hashing an Enum is a call in Python.
    _life.over, _life.transitions = _life in _OVER, _transitions


def transition(life: Life, to: Life) -> Life:
    """Return `to`, the next state of a connection in the state `life`.

    An illegal transition is a bug in smqrt. It is logged, but takes effect.
    """
    if to not in life.transitions:
        log.error("illegal transition of a connection from %s to %s", life.value, to.value, stack_info=True)
    return to
