"""The beginning of a client's session, the same for every way in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smqrt.broker.hub import Hub
from smqrt.broker.session import Session
from smqrt.broker.stats import Refusal
from smqrt.net import datapath
from smqrt.net.origins import is_loopback
from smqrt.wire import smq

if TYPE_CHECKING:
    from smqrt.net.broker import Broker

MAX_UNFINISHED = 256
"""Handshakes of one address that may be under way."""


@dataclass(slots=True)
class Origin:
    """What `authenticate` and `onconnect` may want to know of the request that opened a connection."""

    request: Any
    arg: Any
    info: Any = None
    """What was made of it for the application."""


def too_many(broker: Broker, address: str) -> bool:
    """Whether `address` has as many unfinished handshakes as it may; counted and logged then. Addresses of this machine
    may have any number: they are those of everybody behind a proxy on it.
    """
    if datapath.unfinished[address] < MAX_UNFINISHED or is_loopback(address):
        return False
    broker.hub.refuse(None, Refusal.HANDSHAKES)
    return True


def open_session(broker: Broker, connection: Any, origin: Origin, address: str) -> Session:
    """The session of a new connection, whose handshake clock runs from now."""
    hub: Hub = broker.hub
    if broker.options.budget_bytes is not None:
        connection.budget_bytes = broker.options.budget_bytes
    needed = hub.hooks.authenticate or hub.hooks.onconnect
    session = Session(hub, connection, broker.hub.random_u32(), origin if needed else None)
    connection.session = session
    datapath.handshake_begins(connection, broker.options.readtmo_ms / 1000, address)
    return session


def init(session: Session, address: str) -> bytes:
    """The Init packet; the C client needs at least three bytes of address."""
    return smq.init(session.seed, address.ljust(3))
