"""The life of a connection, of whatever kind: its states, and the moves between them that are legal.

    OPENING ──▶ OPEN ◀──▶ BLOCKED        bytes go both ways; BLOCKED while the other side takes none of ours
        │         │           │
        └─────────┴─────┬─────┘
                        ▼
                    DRAINING             over for its owner: the last bytes go out, the other side's close is awaited
                        │
                        ▼
                     CLOSED              the transport is closed, or somebody else's

DRAINING may be skipped: a connection that breaks is CLOSED at once. One whose very first bytes are not taken is BLOCKED
before it was OPEN, and OPENING again when they are. OPENING means, of

* an SMQ client (raw, WebSocket, over TLS, WSGI): the handshake is not over;
* HTTP: nothing was asked yet;
* a `Stream`: nothing, it is OPEN from the beginning.

Whether a connection is *read* is another question: who waits for a hook may be blocked or not.
"""

from __future__ import annotations

import logging
from enum import Enum

log = logging.getLogger("smqrt.life")


class Life(Enum):
    """Where a connection stands.

    Attributes:
        over: for its owner: nothing is taken from it or given to it any more.
        moves: the states it may go to.
    """

    OPENING = "opening"
    OPEN = "open"
    BLOCKED = "blocked"
    DRAINING = "draining"
    CLOSED = "closed"

    over: bool
    moves: tuple[Life, ...]


_OVER = (Life.DRAINING, Life.CLOSED)
MOVES = {
    Life.OPENING: (Life.OPEN, Life.BLOCKED, Life.DRAINING, Life.CLOSED),
    Life.OPEN: (Life.BLOCKED, Life.DRAINING, Life.CLOSED),
    Life.BLOCKED: (Life.OPENING, Life.OPEN, Life.DRAINING, Life.CLOSED),
    Life.DRAINING: (Life.CLOSED,),
    Life.CLOSED: (),
}
for _life, _moves in MOVES.items():
    # As attributes: `over` is asked once for each run of messages, and the hash of an Enum is a call in Python.
    _life.over, _life.moves = _life in _OVER, _moves


def moved(life: Life, to: Life) -> Life:
    """`to`, where a connection in `life` goes. An illegal move is a bug of ours, never a stranger's doing: it is
    logged, and made all the same.
    """
    if to not in life.moves:
        log.error("a connection went from %s to %s", life.value, to.value, stack_info=True)
    return to
