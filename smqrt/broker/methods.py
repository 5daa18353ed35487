"""Table of the methods of a broker, from which the objects of Python (`smqrt.hub`) and Lua (`smq.hub`) derive.

A binding converts each argument from its language's values by its kind, and the result back; what a value may be is
checked by `smqrt.broker.broker.Broker`.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What an argument or a result is."""

    NAME = "name"
    """The name of a topic or sub-topic, or another text: bytes."""
    NUMBER = "number"
    """An id, an ETID, seconds or a count: int."""
    DESTINATION = "destination"
    """A topic or sub-topic by name (bytes) or by id (int)."""
    PAYLOAD = "payload"
    """What a message carries: bytes."""
    FUNCTION = "function"
    """A function of the application."""
    FLAG = "flag"
    """True, false or None."""
    ROOM = "room"
    """`(free, used)` places."""
    COUNTS = "counts"
    """Numbers by word: `dict[str, int]`."""
    NAMES = "names"
    """An iterator of `(id, name)`."""
    PEER = "peer"
    """A client, or the server's own."""
    PEERS = "peers"
    """An iterator of clients."""
    NOTHING = "nothing"


REQUIRED = object()


class Argument(NamedTuple):
    """One argument of a method.

    Attributes:
        name: as Python users may write it.
        default: its value when it is left out.
        optional: whether it may be None, or nil.
    """

    name: str
    kind: Kind
    default: object = REQUIRED
    optional: bool = False


class Method(NamedTuple):
    """One method of a broker."""

    name: str
    arguments: tuple[Argument, ...] = ()
    returns: Kind = Kind.NOTHING


_TOPIC = Argument("topic", Kind.DESTINATION)
_MESSAGE = (
    Argument("data", Kind.PAYLOAD),
    _TOPIC,
    Argument("subtopic", Kind.DESTINATION, None, True),
    Argument("ptid", Kind.NUMBER, None, True),
)

_ALL = (
    Method("create", (Argument("topic", Kind.NAME), Argument("tid", Kind.NUMBER, 0)), Kind.NUMBER),
    Method(
        "createsub", (Argument("subtopic", Kind.NAME, optional=True), Argument("stid", Kind.NUMBER, 0)), Kind.NUMBER
    ),
    Method("gettid", (), Kind.NUMBER),
    Method("tid2topic", (Argument("tid", Kind.NUMBER),), Kind.NAME),
    Method("topic2tid", (Argument("name", Kind.NAME),), Kind.NUMBER),
    Method("tid2subtopic", (Argument("stid", Kind.NUMBER),), Kind.NAME),
    Method("subtopic2tid", (Argument("name", Kind.NAME),), Kind.NUMBER),
    Method("topics", (), Kind.NAMES),
    Method("subtopics", (), Kind.NAMES),
    Method("publish", _MESSAGE, Kind.NUMBER),
    Method("publish_threadsafe", _MESSAGE, Kind.FLAG),
    Method(
        "pubon",
        (
            Argument("data", Kind.PAYLOAD),
            Argument("totid", Kind.NUMBER),
            Argument("fromtid", Kind.NUMBER),
            Argument("subtid", Kind.NUMBER, 0),
        ),
        Kind.FLAG,
    ),
    Method("unsubscribe", (_TOPIC,)),
    Method("onmsg", (Argument("function", Kind.FUNCTION, optional=True),)),
    Method("observe", (_TOPIC, Argument("function", Kind.FUNCTION)), Kind.FLAG),
    Method("unobserve", (_TOPIC,)),
    Method("queuesize", (), Kind.ROOM),
    Method("peers", (), Kind.PEERS),
    Method("etid2peer", (Argument("etid", Kind.NUMBER),), Kind.PEER),
    Method("setkeepalive", (Argument("idle", Kind.NUMBER), Argument("intv", Kind.NUMBER, 0))),
    Method("shutdown", (Argument("msg", Kind.NAME, None, True), Argument("etid", Kind.NUMBER, None, True))),
    Method("drops", (), Kind.COUNTS),
    Method("refused", (), Kind.COUNTS),
)

METHODS = {method.name: method for method in _ALL}
"""By name. `connect`, `subscribe` and `close` are not here: each language has a form of its own for them."""
