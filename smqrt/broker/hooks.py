"""Extension points of a broker: hooks, the recorder of a journal, and what both see of a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from smqrt.broker.deferred import Deferred
from smqrt.broker.outbox import Outbox
from smqrt.broker.topics import Topic
from smqrt.errors import CloseReason


class BrokerPeer(Protocol):
    """Whoever publishes and subscribes at a broker, as hooks see it: a client's session, or the server's own client.

    Attributes:
        etid: its ephemeral topic id; 0 before a client is accepted.
        uid, info: what a client said of itself.
        topics: the topics it subscribes to, by id; None for none.
        outbox: its way out.
        extra: a place for the layer above.
    """

    etid: int
    extra: Any

    @property
    def uid(self) -> bytes: ...
    @property
    def info(self) -> bytes: ...
    @property
    def topics(self) -> Mapping[int, object] | None: ...
    @property
    def outbox(self) -> Outbox: ...


class BrokerClient(BrokerPeer, Protocol):
    """A client's session, as hooks see it.

    Attributes:
        seed: the u32 that it was sent in Init.
        origin: what the layer above knows of the request that opened the connection.
        closed: whether it has ended.
    """

    seed: int
    origin: Any

    @property
    def closed(self) -> bool: ...

    def disconnect(self, reason: CloseReason, text: bytes | None = None) -> None:
        """End the connection; `text` goes out in a Disconnect packet first."""
        ...

    def forget_routes(self) -> None:
        """Look every destination up again when it is used next."""
        ...


Verdict = tuple[int, bytes]
"""What `authenticate` answers: 0 accepts, 1 to 6 refuse; and a text for the client."""


@dataclass(slots=True)
class Hooks:
    """Every extension point of a broker (specification: smq.md §2.2). An unset hook costs nothing.

    A hook may answer with `Deferred`; the client's input waits meanwhile. A hook does not raise: the bindings (Python,
    Lua) catch and log what the application's function raises, and answer in its place.
    """

    authenticate: Callable[[bytes, BrokerClient], Verdict | Deferred[Verdict]] | None = None
    """`(credentials, session)` gives `(code, text)`: 0 accepts, 1 to 6 refuse."""
    permittop: Callable[[bytes, bool, BrokerClient], object] | None = None
    """`(topic, issub, session)` gives whether the client may subscribe (or create)."""
    permitsubtop: Callable[[bytes, BrokerClient], object] | None = None
    """`(subtopic, session)` gives whether the client may create a new sub-topic."""
    onconnect: Callable[[BrokerClient], object] | None = None
    """`(session)`, after Connack."""
    onclose: Callable[[BrokerClient, CloseReason], object] | None = None
    """`(session, reason)` for every ended connection that had been accepted."""
    onpublish: Callable[[bytes, int, int, BrokerPeer], bytes | Deferred[bytes] | None] | None = None
    """`(run, tid, ptid, peer)` gives the frames of the run that may pass, once per run."""
    ondrop: Callable[[bytes, int, int, BrokerPeer], object] | None = None
    """`(run, tid, ptid, peer)` for messages that nobody received."""
    log: Callable[[BrokerPeer | None, str], object] | None = None
    """`(peer, text)` for what an operator may want to know; None when it is about nobody in particular."""


class Recorder(Protocol):
    """Keeps what is published: the broker's side of a journal.

    Attributes:
        full: it can take no more for now; publishers have to wait.
    """

    full: bool

    def selects(self, topic: Topic | None) -> bool:
        """Whether messages to `topic` are recorded; None is a number that belongs to nobody."""
        ...

    def record(self, run: bytes) -> None:
        """Keep a run, in the order of the calls."""
        ...

    def record_large(self, run: bytes) -> None:
        """As `record`, for runs of many kilobytes."""
        ...

    def record_unrouted(self, run: bytes) -> None:
        """Keep a run that nobody receives."""
        ...

    def record_assembled(self, deliver: Callable[[bytes], bool | None], run: bytes) -> bool:
        """Call `deliver(run)`; what it records was assembled from PubFrag packets."""
        ...

    def skipped(self, run: bytes) -> None:
        """Count the messages of a run that was not selected."""
        ...

    def hold(self, publisher: BrokerPeer) -> bool:
        """Let the outbox of `publisher` resume once there is room again; gives true."""
        ...

    @property
    def waits_for_disk(self) -> bool:
        """Nobody receives a message before the disk has it: `send_later` delivers what is recorded."""

    def send_later(self, deliver: Callable[[bytes], bool | None], run: bytes, publisher: BrokerPeer) -> bool:
        """Deliver a run when the disk has it, and let the outbox of `publisher` resume then; gives whether it waits."""
        ...

    def left(self, client: BrokerPeer) -> None:
        """A client is gone; what it published is still to be written with its name."""
        ...
