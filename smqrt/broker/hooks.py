"""Every way in for others: the hooks of a broker, what they see of a client, and `Pending`, the answer of a hook that
has to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from smqrt.broker.outbox import Outbox
from smqrt.errors import CloseReason

Continuation = Callable[[Any, BaseException | None], None]


class Pending:
    """An answer that comes later. Resolved or rejected once; later calls are ignored."""

    __slots__ = ("_done", "_error", "_value", "_waiting")

    def __init__(self) -> None:
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiting: list[Continuation] = []

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self._done

    @property
    def failed(self) -> bool:
        """Whether it was rejected."""
        return self._error is not None

    def result(self) -> Any:
        """The value, once `done`; raises what it was rejected with."""
        if self._error is not None:
            raise self._error
        return self._value

    def then(self, continuation: Continuation) -> None:
        """Call `continuation(value, error)` when the answer comes, at once if it is there already."""
        if self._done:
            continuation(self._value, self._error)
        else:
            self._waiting.append(continuation)

    def resolve(self, value: object = None) -> None:
        """Give the answer `value`."""
        self._finish(value, None)

    def reject(self, error: BaseException) -> None:
        """Give `error` instead of an answer."""
        self._finish(None, error)

    def _finish(self, value: object, error: BaseException | None) -> None:
        if self._done:
            return
        self._done, self._value, self._error = True, value, error
        waiting, self._waiting = self._waiting, []
        failure: Exception | None = None
        for continuation in waiting:
            try:
                continuation(value, error)
            except Exception as fault:  # the others wait for the answer as well
                failure = failure or fault
        if failure is not None:
            raise failure


class Peer(Protocol):
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


class Client(Peer, Protocol):
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

    A hook may answer with `Pending`; the client's input waits meanwhile. A hook does not raise: the bindings (Python,
    Lua) catch and log what the application's function raises, and answer in its place.
    """

    authenticate: Callable[[bytes, Client], Verdict | Pending] | None = None
    """`(credentials, session)` gives `(code, text)`: 0 accepts, 1 to 6 refuse."""
    permittop: Callable[[bytes, bool, Client], object] | None = None
    """`(topic, issub, session)` gives whether the client may subscribe (or create)."""
    permitsubtop: Callable[[bytes, Client], object] | None = None
    """`(subtopic, session)` gives whether the client may create a new sub-topic."""
    onconnect: Callable[[Client], object] | None = None
    """`(session)`, after Connack."""
    onclose: Callable[[Client, CloseReason], object] | None = None
    """`(session, reason)` for every ended connection that had been accepted."""
    onpublish: Callable[[bytes, int, int, Peer], bytes | Pending | None] | None = None
    """`(run, tid, ptid, peer)` gives the frames of the run that may pass, once per run."""
    ondrop: Callable[[bytes, int, int, Peer], object] | None = None
    """`(run, tid, ptid, peer)` for messages that nobody received."""
    log: Callable[[Peer | None, str], object] | None = None
    """`(peer, text)` for what an operator may want to know; None when it is about nobody in particular."""
