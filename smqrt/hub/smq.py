"""The hub of the Python API: `create` and `Smq`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from smqrt.cluster.engines.process_cluster import cluster
from smqrt.errors import ArgumentError
from smqrt.hub.callbacks import (
    Authenticate,
    CallbackHooks,
    Guard,
    Log,
    OnClose,
    OnCloseWithReason,
    OnConnect,
    OnMessage,
    OnNode,
    OnPublish,
    PermitSubtop,
    PermitTop,
    calling_line,
    renamed,
)
from smqrt.hub.conversions import Text, as_number, as_text
from smqrt.hub.methods import MessageMethods
from smqrt.hub.peer import Peer, PeerSocket, peer_of
from smqrt.journal.writer import HubJournal, JournalWriter
from smqrt.process import current_application
from smqrt.settings.options import function as function_rule
from smqrt.settings.options import make
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from smqrt.smq.handshake import NOT_SMQ, is_smq
from smqrt.smq.messages import Requests

JournalOption = bool | str | os.PathLike[str] | Mapping[str, object] | None
"""True, a folder or settings (help: journal)."""


def isSMQ(request: object) -> bool:
    """Return whether `request` (of smqrt, or a WSGI environ) asks for SMQ or a WebSocket (spec: smq §2.1)."""
    return is_smq(request)


def create(
    options: Mapping[str, Any] | None = None,
    /,
    *,
    authenticate: Authenticate | None = None,
    permittop: PermitTop | None = None,
    permitsubtop: PermitSubtop | None = None,
    onconnect: OnConnect | None = None,
    onclose: OnClose | OnCloseWithReason | None = None,
    onpublish: OnPublish | None = None,
    ondrop: OnPublish | None = None,
    onmsg: OnMessage | None = None,
    onnode: OnNode | None = None,
    log: Log | None = None,
    keepidle: int | None = None,
    keepintv: int | None = None,
    readtmo: int | None = None,
    queuesize: int | None = None,
    budget: int | None = None,
    maxnames: int | None = None,
    clientnames: int | None = None,
    auth: bool | None = None,
    name: str | None = None,
    keep: bool | None = None,
    rndtid: bool | None = None,
    persist: str | bytes | os.PathLike[str] | None = None,
    slow: str | None = None,
    lastvalue: str | Iterable[str] | None = None,
    origins: str | Iterable[str] | None = None,
    cluster: str | None = None,
    observe: str | None = None,
    journal: JournalOption = None,
) -> Smq:
    """Create a broker (spec: smq §2.2).

    Args:
        options: a dict of the options below, like Lua's option table. A keyword argument that is not None replaces the
            entry of the same name.
        authenticate: `f(credentials: bytes, info: Info) -> code | (code, reason)`; 0 accepts, 1 to 6 reject, None is 6.
            It may raise `Refused(code, reason)` instead.
        permittop: `f(topic, issub: bool, peer) -> bool`.
        permitsubtop: `f(subtopic, peer) -> bool`.
        onconnect: `f(etid, info, peer)`; `info` is the object that `authenticate` got.
        onclose: `f(etid, sock, peer, err[, reason])`; `err` is a word, `"reconnect"` after a take-over, or 0; `reason`
            is the close reason.
        onpublish: `f(data, ptid, tid, subtid, peer) -> bool`, before each message is routed.
        ondrop: `f(data, ptid, tid, subtid, peer)` for messages without a receiver.
        onmsg: `f(data, ptid, tid, subtid)`, the first global message handler.
        onnode: `f(node, event, why)`; another node of the cluster has "joined", is "lost", is "back", or has "left".
        log: `f(sock, text)`; `sock` may be None.
        keepidle, keepintv, readtmo, queuesize, budget, maxnames, clientnames, auth, name, keep, rndtid: see
            `smqrt.smq.gevent_broker.HubOptions` (help: hub-api).
        slow, lastvalue, persist, origins: see there.
        cluster: name of the cluster that the hub joins (help: cluster).
        observe: "node" or "cluster": the subscribers of which are counted.
        journal: True, a folder or a dict of settings: published messages are recorded (help: journal).

    Raises:
        ArgumentError: a callback is not callable, a number is out of range, the `persist` file can't be used, or
            `options` is not a dict.
        JournalError: the journal can't be used, or another process writes to it.
        TypeError: unknown option.
    """
    callbacks = {
        "authenticate": authenticate, "permittop": permittop, "permitsubtop": permitsubtop, "onconnect": onconnect,
        "onclose": onclose, "onpublish": onpublish, "ondrop": ondrop, "onmsg": onmsg, "onnode": onnode, "log": log,
    }  # fmt: skip
    settings = {
        "keepidle": keepidle, "keepintv": keepintv, "readtmo": readtmo, "queuesize": queuesize, "budget": budget,
        "maxnames": maxnames, "clientnames": clientnames, "auth": auth, "name": name, "keep": keep, "rndtid": rndtid,
        "persist": persist, "slow": slow, "lastvalue": lastvalue, "origins": origins, "cluster": cluster,
        "observe": observe,
    }  # fmt: skip
    # None means "not given": only given options override those of the dict and the defaults of `HubOptions`.
    if options is not None:
        if not isinstance(options, Mapping):
            raise ArgumentError(f"options: a dict is needed, not {type(options).__name__}")
        keywords = {**callbacks, **settings, "journal": journal}
        return create(**{**options, **{name: value for name, value in keywords.items() if value is not None}})
    rule = function_rule()
    checked = {name: rule.check(name, value) for name, value in callbacks.items() if value is not None}
    given = {name: value for name, value in settings.items() if value is not None}
    return Smq(checked, make(HubOptions, given), journal)


class Smq(MessageMethods):
    """A hub; see `create`. Its methods have the names and meanings of the Lua object.

    Here are the methods of connections and of the hub as a whole; the bases have the others.
    """

    def __init__(
        self, callbacks: Mapping[str, Callable[..., Any]], options: HubOptions, journal: JournalOption = None
    ) -> None:
        made_at = calling_line()
        self._guard = Guard(f"the hub made at {made_at}")
        self._requests = Requests()
        self._broker = GeventBroker(CallbackHooks(callbacks, self._guard).hooks(), options, made_at)
        try:
            cluster.join(self._broker, options)
            self._journal = HubJournal(self._broker, journal)
        except BaseException:
            self._broker.abandon()  # releases the `persist` file for the next hub
            raise
        self._broker.server.answers = self._requests.take  # before the handlers of the application
        if "onmsg" in callbacks:
            self.onmsg(callbacks["onmsg"])
        current_application.close_with_app(self)

    @property
    def journal(self) -> JournalWriter | None:
        """The writer of the journal; None without a journal, and while another process writes it."""
        return self._journal.writer

    @property
    def broker(self) -> GeventBroker:
        """The broker of the hub."""
        return self._broker

    @renamed(request="cmd")
    def connect(self, cmd: object, arg: object = None) -> bool:
        """Turn an HTTP request into an SMQ connection (spec: smq §2.3).

        Args:
            cmd: the request of a directory function, or a WSGI environ (help: wsgi).
            arg: available as `info["arg"]` in `authenticate` and `onconnect`.

        Blocks until the handshake has ended (under gevent-websocket, until the connection is closed). A request that is
        not SMQ gets 404.

        Returns:
            False when the WSGI server can't hand connections over, and nothing was sent; see `wsgi` and `smqrt.wsgi`.
        """
        return self._broker.connect(cmd, arg)

    def wsgi(self, environ: dict[str, Any], start_response: Callable[..., object]) -> list[bytes]:
        """Run `connect` as a WSGI application, mounted or returned by a view.

        A request that is not SMQ gets 404. An SMQ client gets 501 when the WSGI server can't hand connections over.
        """
        status, text = "200 OK", ""  # ignored: `connect` has sent the response
        if not self._broker.connect(environ):
            status, text = "404 Not Found", NOT_SMQ
            if is_smq(environ):
                status, text = "501 Not Implemented", "This WSGI server needs the handler of smqrt.wsgi to serve SMQ."
        body = f"{text}\n".encode()
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
        return [body]

    def peers(self, phantoms: bool = False) -> Iterator[tuple[PeerSocket, Peer]]:
        """Iterate over `(sock, peer)` of all clients and of the server's own client.

        Args:
            phantoms: also include the clients of other nodes of the cluster; the methods of their sockets return None.
        """
        for session in self._broker.peers(phantoms):
            peer = peer_of(session)
            yield peer.sock, peer

    def sock2peer(self, sock: object) -> Peer | None:
        """Return the peer with this socket, or None."""
        peer = self.etid2peer(sock.etid) if isinstance(sock, PeerSocket) else None
        return peer if peer and peer.sock is sock else None

    def etid2peer(self, etid: int) -> Peer | None:
        """Return the peer with this ETID, or None."""
        session = self._broker.etid2peer(as_number("etid", etid))
        return peer_of(session) if session else None

    def drops(self) -> dict[str, int]:
        """Return the numbers of undelivered copies of messages, by reason (help: data-path)."""
        return self._broker.drops()

    def refused(self) -> dict[str, int]:
        """Return how often each limit was reached (help: limits)."""
        return self._broker.refused()

    @renamed(idle="time")
    def setkeepalive(self, time: int, intv: int = 0) -> None:
        """Set TCP keep-alive of new connections, in seconds; the interval is `time` by default."""
        self._broker.setkeepalive(as_number("time", time), as_number("intv", intv))

    def shutdown(self, msg: Text | None = None, etid: int | None = None, everywhere: bool = True) -> None:
        """Close clients, with a Disconnect packet when `msg` is given.

        Args:
            msg: text of the Disconnect packet.
            etid: close this client only; by default all clients, of all workers and nodes of the cluster.
            everywhere: False closes the clients of this hub only, as while the application is being unloaded.
        """
        self._broker.shutdown(
            None if msg is None else as_text("msg", msg),
            None if etid is None else as_number("etid", etid),
            bool(everywhere),
        )

    def close(self) -> None:
        """Close the hub. Blocks until the journal is written.

        Clients are closed without a Disconnect packet, so that they reconnect. `publish`, `subscribe` and the like
        raise ClosedError from now on. A second call does nothing. A hub is closed when its application ends.
        """
        self._broker.close()
        # Greenlets that wait for answers would wait until their timeout.
        self._requests.give_up("no answer: the hub was closed")
        self._journal.close()

    def _end_with_app(self) -> None:
        """Close the hub at the end of its application; with `keep` its clients stay connected for a reload."""
        self._broker.keep_clients()
        self.close()

    def __enter__(self) -> Smq:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
