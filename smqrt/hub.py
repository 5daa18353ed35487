"""SMQ brokers for Python applications: `from smqrt import hub; smq = hub.create()`.

The names and meanings are those of the Lua module `smq.hub` (specification: smq.md §2). Topic names are `str` or
`bytes` and come back as `str` (bytes that are no UTF-8 as `bytes`); payloads are `bytes`, a `str` is sent as UTF-8, a
`dict` or `list` as JSON. Callbacks may block in gevent's way.
"""

from __future__ import annotations

import json as jsonlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

from gevent import get_hub
from greenlet import getcurrent

from smqrt import place
from smqrt.broker.hooks import Hooks, Pending
from smqrt.broker.server_client import ServerClient
from smqrt.broker.session import Session
from smqrt.errors import ArgumentError, CloseReason
from smqrt.journal import writer
from smqrt.net import workers
from smqrt.net.broker import Broker, Options
from smqrt.net.handover import is_smq
from smqrt.net.origins import Origins
from smqrt.wire import smq as wire
from smqrt.wire.smq import ConnackCode

__all__ = ["Peer", "Smq", "create", "isSMQ"]

log = logging.getLogger("smqrt.hub")

Text = str | bytes
Topic = str | bytes | int
Payload = str | bytes | bytearray | memoryview | dict[str, Any] | list[Any]

_CALLBACKS = (
    "authenticate",
    "permittop",
    "permitsubtop",
    "onconnect",
    "onclose",
    "onpublish",
    "ondrop",
    "onmsg",
    "log",
)


def isSMQ(request: Any) -> bool:
    """Whether `request` (of smqrt, or a WSGI environ) asks for SMQ or a WebSocket (specification: smq.md §2.1)."""
    return is_smq(request)


def create(**options: Any) -> Smq:
    """Create a broker.

    Args:
        authenticate: `f(credentials: bytes, info: dict) -> code | (code, reason)`; 0 accepts, 1 to 6 refuse, None is 6.
        permittop: `f(topic, issub: bool, peer) -> bool`.
        permitsubtop: `f(subtopic, peer) -> bool`.
        onconnect: `f(etid, info, peer)`.
        onclose: `f(etid, sock, peer, err[, reason])`; `err` is a word, `"reconnect"` after a take-over, 0 when there is
            none; `reason` says it more finely.
        onpublish: `f(data, ptid, tid, subtid, peer) -> bool`, before each message is routed.
        ondrop: `f(data, ptid, tid, subtid, peer)` for messages that nobody received.
        onmsg: `f(data, ptid, tid, subtid)`, the first global message handler.
        log: `f(sock, text)`.
        keepidle, keepintv: TCP keep-alive in seconds (230, a tenth).
        readtmo: time for Connect in ms (4000).
        queuesize: places of the server's publish queue (200).
        rndtid: a random ETID for the server instead of 1.
        persist: file that keeps topic names and their numbers over restarts.
        budget: bytes that may wait for a client that does not read (1 MiB).
        origins: pages of other hosts that may connect, such as `["https://example.com"]`; `"*"` for all.
        journal: true, a folder or a dict of settings: what is published is recorded (help: journal).

    Raises:
        ArgumentError: an unknown option, a callback that can't be called, a number out of range, a `persist` file that
            can't be used.
        JournalError: a journal that can't be used, or that another process writes to.
    """
    journal = options.pop("journal", None)
    callbacks = {name: options.pop(name, None) for name in _CALLBACKS}
    for name, function in callbacks.items():
        if function is not None:
            _function(name, function)
    return Smq(callbacks, _options(options), journal)


_NUMBERS = {
    "keepidle": "keepidle_s",
    "keepintv": "keepintv_s",
    "readtmo": "readtmo_ms",
    "queuesize": "queuesize",
    "budget": "budget_bytes",
}


def _options(given: dict[str, Any]) -> Options:
    options = Options()
    for name, value in given.items():
        if name in _NUMBERS:
            setattr(options, _NUMBERS[name], _positive(name, value))
        elif name == "rndtid":
            options.rndtid = bool(value)
        elif name == "persist":
            options.persist = None if value is None else _path(value)
        elif name == "origins":
            options.origins = None if value is None else Origins(value)
        else:
            known = ", ".join((*_CALLBACKS, *_NUMBERS, "rndtid", "persist", "origins", "journal"))
            raise ArgumentError(f"{name}: no such option of create(); there are {known}")
    return options


def _positive(what: str, value: Any) -> int:
    if _is_number(value) and value > 0:
        return int(value)
    raise ArgumentError(f"{what}: a positive whole number is needed, not {value!r}")


def _path(value: Any) -> str:
    if isinstance(value, str | bytes | os.PathLike) and value:
        return os.fsdecode(value)
    raise ArgumentError(f"persist: the path of a file is needed, not {value!r}")


def _bytes(what: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return value
    raise ArgumentError(f"{what}: a str or bytes is needed, not {type(value).__name__}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(what: str, value: Any) -> int:
    if _is_number(value):
        return int(value)
    raise ArgumentError(f"{what}: a number is needed, not {type(value).__name__}")


def _name(what: str, value: Any) -> bytes | int:
    if _is_number(value):
        return int(value)
    if isinstance(value, str | bytes):
        return _bytes(what, value)
    raise ArgumentError(f"{what}: a name (str or bytes) or an id is needed, not {type(value).__name__}")


def _function(what: str, value: Any) -> Callable[..., Any]:
    if callable(value):
        return value  # type: ignore[no-any-return]
    raise ArgumentError(f"{what}: a function is needed, not {type(value).__name__}")


def _text(name: Any) -> Any:
    try:
        return name.decode() if isinstance(name, bytes) else name
    except UnicodeDecodeError:
        return name


def _payload(data: Any) -> bytes:
    if isinstance(data, dict | list):
        return _json(data)
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    return _bytes("data", data)


def _json(data: Any) -> bytes:
    try:
        return jsonlib.dumps(data, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"data: {error}; only what JSON knows can be sent as a dict or list") from None


@dataclass
class Peer:
    """A connected client, as callbacks see it; `data` is free for the application.

    Attributes:
        tid: the ETID.
        uid: as the client sent it.
        info: the client's own description.
        sock: its socket; `sock.getpeername()` tells the address. None for the server's own client.
    """

    tid: int
    uid: bytes
    info: str | bytes
    sock: Any
    _session: Any = field(repr=False)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def topics(self) -> dict[int, str] | None:
        """The topics it subscribes to: id to name; None when there are none."""
        return {tid: _text(topic.name) for tid, topic in (self._session.topics or {}).items()} or None

    @property
    def dropped(self) -> int:
        """How many messages it missed because it did not read."""
        return int(self._session.outbox.dropped)


def _peer(session: Session | ServerClient) -> Peer:
    peer = session.extra
    if not isinstance(peer, Peer):
        sock = getattr(session.outbox, "sock", None)
        peer = session.extra = Peer(session.etid, session.uid, _text(session.info), sock, session)
    peer.tid = session.etid
    return peer


def _takes_reason(onclose: Callable[..., Any]) -> bool:
    """Whether the function takes a fifth argument: the original's has four."""
    try:
        signature(onclose).bind(*range(5))
    except (TypeError, ValueError):
        return False
    return True


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call what may block: in the Hub greenlet, which may not, in a worker."""
    return workers.call(function, *arguments) if getcurrent() is get_hub() else function(*arguments)


def _guarded(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of an application's function; an error is logged and counts as None."""
    try:
        answer = _call(function, *arguments)
    except Exception:
        log.exception("error in %s", what)
        return None
    if isinstance(answer, Pending):
        answer.then(partial(_log_error, what))
    return answer


def _log_error(what: str, value: Any, error: BaseException | None) -> None:
    if error:
        log.error("error in %s", what, exc_info=error)


class Smq:
    """A broker; see `create`. Close to the Lua object in names and meaning.

    Attributes:
        journal: what writes the journal (`smqrt.journal.writer.JournalWriter`), None without one.
    """

    def __init__(self, callbacks: dict[str, Any], options: Options, journal: Any = None) -> None:
        self._callbacks = callbacks
        self._takes_reason = _takes_reason(callbacks["onclose"])
        self._broker = Broker(self._hooks(callbacks), options)
        try:
            self.journal = writer.record(self._broker, journal)
        except BaseException:
            self._broker.close()  # its `persist` file may be wanted by the next
            raise
        self._global: Callable[..., Any] | None = None
        if callbacks["onmsg"] is not None:
            self.onmsg(callbacks["onmsg"])
        place.own(self)

    # ---- hooks

    def _hooks(self, callbacks: dict[str, Any]) -> Hooks:
        adapters: dict[str, Any] = {
            "authenticate": self._authenticate,
            "permittop": lambda topic, issub, session: self._call("permittop", _text(topic), issub, _peer(session)),
            "permitsubtop": lambda subtopic, session: self._call("permitsubtop", _text(subtopic), _peer(session)),
            "onconnect": lambda session: self._call("onconnect", session.etid, self._info(session), _peer(session)),
            "onclose": self._onclose,
            "onpublish": self._onpublish,
            "ondrop": self._ondrop,
        }
        hooks = Hooks(**{name: adapter for name, adapter in adapters.items() if callbacks[name] is not None})
        hooks.log = self._log
        return hooks

    def _call(self, name: str, *arguments: Any) -> Any:
        return _guarded(name, self._callbacks[name], *arguments)

    def _log(self, session: Session | None, text: str) -> None:
        if self._callbacks["log"] is not None:
            self._call("log", getattr(session.outbox, "sock", None) if session else None, text)
        else:
            log.debug("%s", text)

    def _info(self, session: Session) -> dict[str, Any]:
        origin = session.origin
        request = origin.request if origin else None
        info = {
            "arg": origin.arg if origin else None,
            "seed": session.seed,
            "uid": session.uid,
            "info": _text(session.info),
        }
        info["sock"] = getattr(session.outbox, "sock", None)
        info["request"] = request
        return info

    def _authenticate(self, credentials: bytes, session: Session) -> Any:
        answer = self._call("authenticate", credentials, self._info(session))
        if not isinstance(answer, Pending):
            return _verdict(answer)
        verdict = Pending()
        answer.then(lambda value, error: verdict.resolve(_verdict(value)))
        return verdict

    def _onclose(self, session: Session, reason: CloseReason) -> None:
        sock = getattr(session.outbox, "sock", None)
        finer = (reason.value,) if self._takes_reason else ()
        self._call("onclose", session.etid, sock, _peer(session), reason.word or 0, *finer)

    def _onpublish(self, run: bytes, tid: int, ptid: int, session: Any) -> Any:
        return _guarded("onpublish", _filter, self._callbacks["onpublish"], run, _peer(session))

    def _ondrop(self, run: bytes, tid: int, ptid: int, session: Any) -> None:
        _guarded("ondrop", _each, "ondrop", self._callbacks["ondrop"], run, _peer(session))

    # ---- connections

    def connect(self, request: Any, arg: Any = None) -> None:
        """Turn an HTTP request into an SMQ connection (specification: smq.md §2.3).

        Args:
            request: the request of a directory function, or a WSGI environ whose `wsgi.websocket` is
                gevent-websocket's.
            arg: is found as `info["arg"]` in `authenticate` and `onconnect`.

        Blocks until the handshake ended (for an environ: until the connection ends). A request that is not SMQ gets
        404.
        """
        self._broker.connect(request, arg)

    def peers(self) -> Iterator[tuple[Any, Peer]]:
        """`(sock, peer)` of every client and of the server's own client."""
        for session in self._broker.peers():
            peer = _peer(session)
            yield peer.sock, peer

    def sock2peer(self, sock: Any) -> Peer | None:
        """The peer that has this socket."""
        return next((peer for one, peer in self.peers() if one is sock), None)

    def etid2peer(self, etid: int) -> Peer | None:
        """The peer with this ETID."""
        session = self._broker.etid2peer(_number("etid", etid))
        return _peer(session) if session else None

    def drops(self) -> dict[str, int]:
        """How many copies of messages were not delivered so far, by reason (help: data-path)."""
        return self._broker.drops()

    def setkeepalive(self, idle: int, intv: int = 0) -> None:
        """TCP keep-alive of new connections, in seconds; the interval is a tenth of `idle` by default, at least 3."""
        self._broker.setkeepalive(_positive("idle", idle), _positive("intv", intv) if intv else 0)

    def shutdown(self, msg: Text | None = None, etid: int | None = None) -> None:
        """Send Disconnect with `msg` to the client `etid`, or to all, and close; without `msg` just close."""
        chosen = None if etid is None else _number("etid", etid)
        self._broker.shutdown(None if msg is None else _bytes("msg", msg), chosen)

    def close(self) -> None:
        """End the hub: its clients are closed without a word, so that they come back when there is a hub again, and
        the journal is written to its end, for which this blocks.

        From then on what would begin something (`publish`, `subscribe`, …) raises ClosedError. A second call does
        nothing. A hub that an application made is closed when the application ends.
        """
        self._broker.close()
        if self.journal:
            self.journal.close()

    def __enter__(self) -> Smq:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- names

    def create(self, topic: Text, tid: int = 0) -> int:
        """Get or create a topic and give its id; a new one gets `tid` when that is free."""
        return self._broker.create(_bytes("topic", topic), _number("tid", tid))

    def createsub(self, subtopic: Text | None, stid: int = 0) -> int:
        """Get or create a sub-topic and give its id; 0 for None."""
        name = None if subtopic is None else _bytes("subtopic", subtopic)
        return self._broker.createsub(name, _number("stid", stid))

    def gettid(self) -> int:
        """The server's own ETID."""
        return self._broker.gettid()

    def tid2topic(self, tid: int) -> Any:
        """The name of a topic id; None when there is none."""
        return _text(self._broker.tid2topic(_number("tid", tid)))

    def topic2tid(self, name: Text) -> int | None:
        """The id of a topic name; None when it does not exist."""
        return self._broker.topic2tid(_bytes("name", name))

    def tid2subtopic(self, stid: int) -> Any:
        """The name of a sub-topic id; None when there is none."""
        return _text(self._broker.tid2subtopic(_number("stid", stid)))

    def subtopic2tid(self, name: Text) -> int | None:
        """The id of a sub-topic name; None when it does not exist."""
        return self._broker.subtopic2tid(_bytes("name", name))

    def topics(self) -> Iterator[tuple[int, Any]]:
        """`(tid, name)` of every named topic."""
        return ((tid, _text(name)) for tid, name in self._broker.topics())

    def subtopics(self) -> Iterator[tuple[int, Any]]:
        """`(stid, name)` of every sub-topic."""
        return ((stid, _text(name)) for stid, name in self._broker.subtopics())

    # ---- publish and subscribe

    def publish(self, data: Payload, topic: Topic, subtopic: Topic | None = None, ptid: int | None = None) -> int:
        """Publish to a topic name, an id, an ETID or `"self"`; gives the number of messages that wait in the server's
        queue.

        Raises:
            ArgumentError: data over 0xFFF0 bytes, or an argument of the wrong kind.
        """
        sub = None if subtopic is None else _name("subtopic", subtopic)
        sender = None if ptid is None else _number("ptid", ptid)
        return self._broker.publish(_payload(data), _name("topic", topic), sub, sender)

    def pubon(self, data: Payload, totid: int, fromtid: int, subtid: int = 0) -> bool:
        """Send to one client on behalf of another; false unless both are connected."""
        to, sender = _number("totid", totid), _number("fromtid", fromtid)
        return self._broker.pubon(_payload(data), to, sender, _number("subtid", subtid))

    def subscribe(
        self,
        topic: Topic,
        onmsg: Callable[..., Any] | None = None,
        subtopic: Topic | None = None,
        json: bool = False,
    ) -> int:
        """Receive a topic and give its id.

        Args:
            topic: name, id, or `"self"` for the server's own ETID.
            onmsg: `f(data, ptid, tid, subtid)`; without it the global handler gets the messages.
            subtopic: only messages with this sub-topic; without it the handler is the topic's catch-all.
            json: decode the payload; what is no JSON goes to the global handler, as bytes.
        """
        sub = None if subtopic is None else _name("subtopic", subtopic)
        handler = None if onmsg is None else self._handler("onmsg", _function("onmsg", onmsg), json)
        return self._broker.subscribe(_name("topic", topic), handler, sub)

    def _handler(self, what: str, function: Callable[..., Any], json: bool = False) -> Callable[..., Any]:
        def handle(data: bytes, ptid: int, tid: int, stid: int) -> Any:
            value: Any = data
            if json:
                try:
                    value = jsonlib.loads(data)
                except ValueError:
                    log.warning("a message to %s is no JSON: it goes to the global onmsg", tid)
                    return self._broker.hub.server.deliver_default(data, ptid, tid, stid)
            return _guarded(what, function, value, ptid, tid, stid)

        return handle

    def unsubscribe(self, topic: Topic) -> None:
        """Stop receiving a topic and forget its handlers; nothing happens when it is unknown."""
        self._broker.unsubscribe(_name("topic", topic))

    def onmsg(self, function: Callable[..., Any] | None) -> None:
        """Set the global handler `f(data, ptid, tid, subtid)`."""
        self._broker.onmsg(None if function is None else self._handler("onmsg", _function("onmsg", function)))

    def observe(self, topic: Topic, function: Callable[[int, Any], Any]) -> bool | None:
        """Call `function(subscribers, topic)` on every change; once, with 0, when an ETID's client goes away."""
        _function("function", function)
        return self._broker.observe(
            _name("topic", topic), lambda count, name: _guarded("observe", function, count, _text(name))
        )

    def unobserve(self, topic: Topic) -> None:
        """Stop observing a topic."""
        self._broker.unobserve(_name("topic", topic))

    def queuesize(self) -> tuple[int, int]:
        """`(free, used)` places of the publish queue."""
        return self._broker.queuesize()


def _verdict(answer: Any) -> tuple[int, bytes]:
    code, text = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    if not _is_number(code) or not 0 <= code <= 6 or not isinstance(text, str | bytes | None):
        if answer is not None:
            log.error("authenticate: a code from 0 to 6, or a code and a reason, is needed, not %r", answer)
        return ConnackCode.ACCESS_DENIED, b""
    return code, _bytes("reason", text or b"") if code else b""


def _each(what: str, function: Callable[..., Any], run: bytes, peer: Peer) -> list[bytes]:
    """Call `function` for each message of `run`; gives the frames for which it answered yes. An error of its is logged
    and counts as no for that message only.
    """
    kept = []
    for frame in wire.frames(run):
        tid, ptid, stid, data = wire.unpack_publish(frame)
        try:
            if function(data, ptid, tid, stid, peer):
                kept.append(frame)
        except Exception:
            log.exception("error in %s", what)
    return kept


def _filter(allowed: Callable[..., Any], run: bytes, peer: Peer) -> bytes:
    """The frames of `run` that `allowed` lets pass."""
    kept = _each("onpublish", allowed, run, peer)
    return run if sum(map(len, kept)) == len(run) else b"".join(kept)
