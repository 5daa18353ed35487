"""The beginning of a client's session, the same for every way in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smqrt.broker.hub import Hub
from smqrt.broker.session import Session
from smqrt.net import datapath
from smqrt.wire import smq

if TYPE_CHECKING:
    from smqrt.net.broker import Broker


@dataclass(slots=True)
class Origin:
    """What `authenticate` and `onconnect` may want to know of the request that opened a connection."""

    request: Any
    arg: Any
    info: Any = None
    """What was made of it for the application."""


def open_session(broker: Broker, connection: Any, origin: Origin) -> Session:
    """The session of a new connection, whose handshake clock runs from now."""
    hub: Hub = broker.hub
    if broker.options.budget_bytes is not None:
        connection.budget_bytes = broker.options.budget_bytes
    needed = hub.hooks.authenticate or hub.hooks.onconnect
    session = Session(hub, connection, broker.hub.random_u32(), origin if needed else None)
    connection.session = session
    datapath.handshake_begins(connection, broker.options.readtmo_ms / 1000)
    return session


def init(session: Session, address: str) -> bytes:
    """The Init packet; the C client needs at least three bytes of address."""
    return smq.init(session.seed, address.ljust(3))
