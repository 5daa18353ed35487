"""Callbacks of a hub: types, logging of their exceptions, and the hooks that call them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, Protocol, TypeVar

from gevent import get_hub
from greenlet import getcurrent

from smqrt.broker.deferred import Deferred
from smqrt.broker.mqtt.application import MqttAttributes, attributes_of
from smqrt.broker.mqtt.messages import MqttBatch
from smqrt.broker.state import AuthStep, BrokerClient, BrokerPeer, Hooks, Verdict
from smqrt.errors import ArgumentError, CloseReason
from smqrt.hub.peer import Info, Peer, PeerSocket, Refused, as_text, info_of, is_number, peer_of, text_of
from smqrt.loop import greenlets
from smqrt.loop.greenlets import ErrorLimit
from smqrt.loop.scheduling import Turn
from smqrt.settings.limits import LineLimit
from smqrt.settings.option_types import unknown
from smqrt.wire import smq as wire
from smqrt.wire.mqtt.fields import Reason
from smqrt.wire.smq import ConnackCode

log = logging.getLogger("smqrt.hub")

F = TypeVar("F", bound=Callable[..., Any])
CALLS_PER_TIME_CHECK = 4
"""Messages of a batch between two checks of the time slice: one call may take a millisecond."""
CallbackValue = Any
"""Values of several types: a name is str, or bytes when it is not UTF-8; a payload is bytes, or a JSON value; `err` is
a word or 0."""
_PACKAGE = str(Path(__file__).parents[1])


class Authenticate(Protocol):
    """Decides whether a client is accepted."""

    def __call__(self, credentials: bytes, info: Info, /) -> int | tuple[int, str | bytes] | None:
        """Return 0 to accept, or a code from 1 to 6, alone or with a reason. May raise `Refused`."""


class MqttAuth(Protocol):
    """Answers the authentication data of an MQTT 5 client."""

    def __call__(self, method: str, data: bytes, peer: Peer, /) -> object:
        """Return data to ask the client for more, True to accept it, False to reject it, None for another method.

        True may be `(True, data)` or `(True, data, user)`, and False `(False, reason)`.
        """


class PermitTop(Protocol):
    """Decides whether a client may subscribe to a topic (`issub`), or publish to it by name."""

    def __call__(self, topic: CallbackValue, issub: bool, peer: Peer, /) -> object:
        """Return whether it is allowed."""


class PermitSubtop(Protocol):
    """Decides whether a client may create a sub-topic."""

    def __call__(self, subtopic: CallbackValue, peer: Peer, /) -> object:
        """Return whether it is allowed."""


class OnConnect(Protocol):
    """Called when a client is connected."""

    def __call__(self, etid: int, info: Info, peer: Peer, /) -> object:
        """The result is ignored."""


class OnClose(Protocol):
    """Called when a client is disconnected."""

    def __call__(self, etid: int, sock: PeerSocket, peer: Peer, err: CallbackValue, /) -> object:
        """The result is ignored. `err` is a word, or 0."""


class OnCloseWithReason(Protocol):
    """Called when a client is disconnected, with the close reason."""

    def __call__(self, etid: int, sock: PeerSocket, peer: Peer, err: CallbackValue, reason: str, /) -> object:
        """The result is ignored. `reason` is the value of a `CloseReason`."""


class OnPublish(Protocol):
    """Called before a message is delivered (`onpublish`), or when it had no receiver (`ondrop`)."""

    def __call__(self, data: bytes, ptid: int, tid: int, subtid: int, peer: Peer, /) -> object:
        """Return whether to deliver it."""


class OnPublishWithAttributes(Protocol):
    """Called before a message is delivered, with the attributes of a message of an MQTT client."""

    def __call__(
        self, data: bytes, ptid: int, tid: int, subtid: int, peer: Peer, mqtt: MqttAttributes | None, /
    ) -> object:
        """Return whether to deliver it. `mqtt` is None for messages of SMQ."""


class OnMessage(Protocol):
    """Called with a message to the server."""

    def __call__(self, data: CallbackValue, ptid: int, tid: int, subtid: int, /) -> object:
        """The result is ignored."""


class OnMessageWithAttributes(Protocol):
    """Called with a message to the server, and with the attributes of a message of an MQTT client."""

    def __call__(self, data: CallbackValue, ptid: int, tid: int, subtid: int, mqtt: MqttAttributes | None, /) -> object:
        """The result is ignored. `mqtt` is None for messages of SMQ."""


class OnNode(Protocol):
    """Called when another node of the cluster joins, is lost, returns or leaves."""

    def __call__(self, node: int, event: str, why: str, /) -> object:
        """The result is ignored. `event` is "joined", "lost", "back" or "left"."""


class OnMqttGap(Protocol):
    """Called when messages of the session of an MQTT client were lost because too many waited."""

    def __call__(self, client_id: str | None, lost: int, peer: Peer | None, /) -> object:
        """The result is ignored. `peer` is None while the client is not connected.

        `client_id` is None for messages that were kept for another node, see `OnMqttGapWithNode`.
        """


class OnMqttGapWithNode(Protocol):
    """Called when messages of an MQTT session were lost, or messages that were kept for another node of the cluster."""

    def __call__(self, client_id: str | None, lost: int, peer: Peer | None, node: int | None, /) -> object:
        """The result is ignored. Either `client_id` or `node`, the number of the node, is None."""


class Log(Protocol):
    """Called with events for operators."""

    def __call__(self, sock: PeerSocket | None, text: str, /) -> object:
        """The result is ignored."""


def renamed(**names: str) -> Callable[[F], F]:
    """Decorate a method whose arguments had other names in earlier releases.

    Args:
        names: present names by former names. The first use of each former name is logged.
    """

    def decorate(method: F) -> F:
        unused = set(names)

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in kwargs.keys() & names.keys():
                if old in unused:
                    unused.discard(old)
                    line = f"{calling_line()}: the argument {old!r} of smq.{method.__name__}"
                    log.warning("%s is deprecated: its name is %r now", line, names[old])
                if names[old] not in kwargs:  # with both names, the method raises TypeError for the former one
                    kwargs[names[old]] = kwargs.pop(old)
            return method(*args, **kwargs)

        return call  # type: ignore[return-value]  # the signature stays

    return decorate


def suggesting(function: F) -> F:
    """Decorate a function whose error for an unknown keyword argument names the one that was probably meant."""
    known = [name for name, one in signature(function).parameters.items() if one.kind is not Parameter.POSITIONAL_ONLY]
    known = [name for name in known if name != "self"]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{function.__name__}: {unknown(name, known)}")
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]  # the signature stays


def calling_line() -> str:
    """Return where the application called the library, as `file:line`."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"


def takes(callback: Callable[..., object] | None, arguments: int) -> bool:
    """Return whether a callback can be called with this number of arguments; False for None."""
    try:
        return callback is not None and bool(signature(callback).bind(*range(arguments)))
    except (TypeError, ValueError):  # ValueError: a built-in function without a signature
        return False


def takes_attributes(function: Callable[..., object], arguments: int) -> bool:
    """Return whether a callback takes one more argument, the attributes of messages of MQTT clients.

    A function with `*arguments` does not count: it gets the documented arguments only.

    Args:
        function: the callback.
        arguments: the number of the documented arguments before.
    """
    try:
        kinds = [one.kind for one in signature(function).parameters.values()]
    except (TypeError, ValueError):  # ValueError: a built-in function without a signature
        return False
    return sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds) > arguments


class Guard:
    """Calls functions of an application, and logs their exceptions with the names of the callback and the hub.

    After an exception the result is None.

    Args:
        hub: name of the hub in the log.
    """

    def __init__(self, hub: str) -> None:
        self._hub = hub
        self._limit = ErrorLimit()

    def call(self, what: str, function: Callable[..., object], *arguments: object) -> object:
        """Return the result of `function`, or a `Deferred` when it blocks in a call from the loop's greenlet."""
        try:
            if getcurrent() is get_hub():  # the loop's greenlet must not block
                answer = greenlets.call(function, *arguments)
            else:
                answer = function(*arguments)
        except Exception:
            self.log_error(what)
            return None
        if isinstance(answer, Deferred):
            answer.then(lambda value, error: self.log_error(what, error) if error else None)
        return answer

    def log_error(self, what: str, error: BaseException | bool = True) -> None:
        """Log an exception of a callback with its traceback, within the rate limit of such errors."""
        if (others := self._limit.line_suffix()) is not None:
            log.error("error in %s of %s%s", what, self._hub, others, exc_info=error)


def auth_step(answer: object, more: object = None, user: object = None) -> AuthStep:
    """Return the step for the results of `mqttauth`, see `MqttAuth`.

    Raises:
        ArgumentError: they are not valid.
    """
    if isinstance(answer, str | bytes):
        return AuthStep(Reason.CONTINUE_AUTHENTICATION, as_text("data", answer))
    if answer is None:
        return AuthStep(Reason.BAD_AUTHENTICATION_METHOD, text="the hub does not have this authentication method")
    if not isinstance(answer, bool):
        raise ArgumentError(f"data, a boolean or nothing is needed, not {answer!r}")
    more = b"" if more is None else as_text("data" if answer else "reason", more)
    if not answer:
        return AuthStep(Reason.NOT_AUTHORIZED, text=more.decode("utf-8", "replace"))
    return AuthStep(Reason.SUCCESS, more, None if user is None else as_text("user", user).decode("utf-8", "replace"))


class CallbackHooks:
    """The hooks of a broker that call the callbacks of an application.

    Args:
        callbacks: the callbacks by the names of the options of `create`.
        guard: calls them and logs their exceptions.
    """

    def __init__(self, callbacks: Mapping[str, Callable[..., Any]], guard: Guard) -> None:
        self._callbacks, self._guard = callbacks, guard
        self._passes_reason = takes(callbacks.get("onclose"), 5)
        self._passes_node = takes(callbacks.get("onmqttgap"), 4)
        self._passes_attributes = "onpublish" in callbacks and takes_attributes(callbacks["onpublish"], 5)
        self._invalid_answers = LineLimit()

    def hooks(self) -> Hooks:
        """Return hooks for the given callbacks, and always `log`."""
        adapters: dict[str, Any] = {
            "authenticate": self._authenticate,
            "mqttauth": self._mqttauth,
            "permittop": lambda topic, issub, session: self._call("permittop", text_of(topic), issub, peer_of(session)),
            "permitfilter": lambda wanted, session: self._call("permitfilter", text_of(wanted), peer_of(session)),
            "permitsubtop": lambda subtopic, session: self._call("permitsubtop", text_of(subtopic), peer_of(session)),
            "onconnect": self._onconnect,
            "onclose": self._onclose,
            "onpublish": self._onpublish,
            "ondrop": self._ondrop,
            "onmqttgap": self._onmqttgap,
            "onnode": lambda number, event, why: self._call("onnode", number, event, why),
        }
        return Hooks(log=self._log, **{name: hook for name, hook in adapters.items() if name in self._callbacks})

    def _onmqttgap(self, client_id: str | None, count: int, client: BrokerPeer | None, node: int | None) -> object:
        arguments = (client_id, count, None if client is None else peer_of(client), node)
        return self._call("onmqttgap", *(arguments if self._passes_node else arguments[:3]))

    def _call(self, name: str, *arguments: object) -> object:
        return self._guard.call(name, self._callbacks[name], *arguments)

    def _log(self, session: BrokerPeer | None, text: str) -> None:
        if "log" in self._callbacks:
            self._call("log", peer_of(session).sock if session else None, text)
        else:
            log.debug("%s", text)

    def _authenticate(self, credentials: bytes, session: BrokerClient) -> Verdict | Deferred[Verdict]:
        # `Refused` is an answer, so `Guard` must not log it.
        def decide(credentials: bytes, info: Info) -> object:
            try:
                return self._callbacks["authenticate"](credentials, info)
            except Refused as refusal:
                return refusal.code, refusal.reason

        answer = self._guard.call("authenticate", decide, credentials, info_of(session))
        if not isinstance(answer, Deferred):
            return self._verdict(answer)
        verdict: Deferred[Any] = Deferred()
        answer.then(lambda value, error: verdict.resolve(self._verdict(value)))
        return verdict

    def _verdict(self, answer: Any) -> Verdict:
        """Return the code and the reason for what `authenticate` returned; None and invalid answers deny access."""
        code, text = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
        if not is_number(code) or not 0 <= code <= 6 or not isinstance(text, str | bytes | None):
            if answer is not None and (suffix := self._invalid_answers.line_suffix()) is not None:
                log.error(
                    "authenticate: a code from 0 to 6, or a code and a reason, is needed, not %r%s", answer, suffix
                )
            return ConnackCode.ACCESS_DENIED, b""
        return code, as_text("reason", text or b"") if code else b""

    def _mqttauth(self, method: str, data: bytes, session: BrokerClient) -> AuthStep | Deferred[AuthStep]:
        answer = self._call("mqttauth", method, data, peer_of(session))
        if not isinstance(answer, Deferred):
            return self._auth_step(answer)
        step: Deferred[AuthStep] = Deferred()
        answer.then(lambda value, error: step.resolve(self._auth_step(value)))
        return step

    def _auth_step(self, answer: Any) -> AuthStep:
        """Return the step for what `mqttauth` returned; invalid answers reject the client."""
        given = answer if isinstance(answer, tuple) else (answer,)
        try:
            return auth_step(*given)
        except (TypeError, ArgumentError) as error:
            if (suffix := self._invalid_answers.line_suffix()) is not None:
                log.error("mqttauth: %s%s", error, suffix)
            return AuthStep(Reason.NOT_AUTHORIZED)

    def _onconnect(self, session: BrokerClient) -> None:
        info, session.origin = info_of(session), None  # frees the request
        self._call("onconnect", session.etid, info, peer_of(session))

    def _onclose(self, session: BrokerClient, reason: CloseReason) -> None:
        peer = peer_of(session)
        fifth = (reason.value,) if self._passes_reason else ()
        self._call("onclose", session.etid, peer.sock, peer, reason.word or 0, *fifth)

    def _onpublish(self, batch: bytes, tid: int, ptid: int, session: BrokerPeer) -> object:
        """Return the frames of a batch that the callback accepts; None when it raised for the whole batch."""

        sixth: tuple[MqttAttributes | None, ...] = ()
        if self._passes_attributes:
            now_s = monotonic()  # the clock of `GeventBroker`
            sixth = (attributes_of(batch, now_s) if isinstance(batch, MqttBatch) else None,)

        def accepted(peer: Peer) -> bytes:
            frames = self._each("onpublish", batch, peer, *sixth)
            # Usually all are accepted: then nothing is copied.
            return batch if sum(map(len, frames)) == len(batch) else b"".join(frames)

        return self._guard.call("onpublish", accepted, peer_of(session))

    def _ondrop(self, batch: bytes, tid: int, ptid: int, session: BrokerPeer) -> None:
        self._guard.call("ondrop", self._each, "ondrop", batch, peer_of(session))

    def _each(self, name: str, batch: bytes, peer: Peer, *more: object) -> list[bytes]:
        """Call a callback for each message of a batch, and return the frames for which it returned true.

        An exception counts as false for that message only. `more` are further arguments for all messages.
        """
        function, accepted = self._callbacks[name], list[bytes]()
        for count, frame in enumerate(wire.frames(batch), 1):
            if not count % CALLS_PER_TIME_CHECK:
                Turn().yield_if_due()
            tid, ptid, stid, data = wire.unpack_publish(frame)
            try:
                if function(data, ptid, tid, stid, peer, *more):
                    accepted.append(frame)
            except Exception:
                self._guard.log_error(name)
        return accepted
