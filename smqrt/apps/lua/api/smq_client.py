"""`require"smq.client"`: SMQ clients for Lua applications (spec: smq §3). The other half is
lib/smq/client.lua.

Lua knows a client by an integer. Its callbacks run one after the other in the greenlet of the client's dispatcher, so
they may block; `create` and all methods return at once.
"""

from __future__ import annotations

import logging
from functools import partial

import gevent
from gevent.event import AsyncResult

from smqrt.apps.lua.api.httpc import proxy_of
from smqrt.apps.lua.bridge import LuaValue, encoded, from_latin1, methods, options_of
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import LuaFunction, Vm
from smqrt.client import ConnectionEnd, SmqClient
from smqrt.clients.smq.options import SmqClientOptions
from smqrt.errors import StreamError
from smqrt.transport.stream import Stream

log = logging.getLogger("smqrt.lua")

_HEADER = "header:"
_PROXY = ("proxy", "proxyport", "socks", "proxyuser", "proxypass")


class UntrustedHint:
    """Tells once how to reach a broker whose certificate nobody vouches for."""

    def __init__(self) -> None:
        self._was_told = False

    def tell(self, end: ConnectionEnd | None) -> None:
        """A connection has ended."""
        if end is None or end.word != "sslnottrusted" or self._was_told:
            return
        self._was_told = True
        log.error("SMQ client: %s; to connect nevertheless: create(url, {trusted = false})", end)


class SmqClientBinding:
    """The Python binding: clients by their integers."""

    def __init__(self, vm: Vm, services: Services) -> None:
        self._vm = vm
        self._services = services
        services.smq_clients = self
        self._openings: dict[int, AsyncResult[Stream]] = {}
        self._clients: dict[int, SmqClient] = {}
        self._last = 0
        self._on_event: LuaFunction | None = None

    def on_event(self, ref: int) -> None:
        """Set the Lua function that gets what concerns a client as a whole: `f(number, event, ...)`."""
        self._on_event = LuaFunction(self._vm, ref)

    def _event(self, number: int, event: str, *arguments: LuaValue | str) -> LuaValue:
        assert self._on_event  # the Lua half sets it before it makes clients
        return self._on_event.run(f"on{event} of an SMQ client", number, event, *arguments)

    def create(self, url: bytes | None, *options: LuaValue) -> int:
        """Make a client that connects in the background.

        Args:
            url: None when the application makes the connections, see `opened`.
            options: keys and values in turn; `header:NAME` is a header field, times are seconds, `shark` is the number
                of a TLS client, and the proxy has the names of httpc.
        """
        chosen = options_of(options)
        fields = [key for key in chosen if key.startswith(_HEADER)]
        headers = {key.removeprefix(_HEADER): from_latin1(chosen.pop(key)) for key in fields}
        timeout_s = chosen.get("timeout", SmqClientOptions.timeout)
        proxy = proxy_of({key: chosen.pop(key) for key in _PROXY if key in chosen})
        tls = self._services.tls[chosen.pop("shark")] if "shark" in chosen else None
        self._last = number = self._last + 1
        event, hint = partial(partial, self._event, number), UntrustedHint()
        client = SmqClient(
            url.decode("utf-8", "replace") if url is not None else lambda: self._open(number, timeout_s),
            chosen,
            cleanstart=True,
            headers=headers,
            proxy=proxy,
            tls=tls,
            onauth=event("auth"),
            onconnect=event("connect"),
            onreconnect=event("reconnect"),
            onclose=lambda word, can_reconnect: self._on_close(number, word, can_reconnect, hint),
            onmsg=event("msg"),
        )
        client.on_end(lambda: self._forget(number))
        self._clients[number] = client
        return number

    def _open(self, number: int, timeout_s: float) -> Stream:
        """Have Lua make a connection."""
        opening: AsyncResult[Stream] = AsyncResult()
        self._openings[number] = opening
        try:
            with gevent.Timeout(timeout_s, StreamError("timeout", "the application made no connection in time")):
                self._event(number, "open")
                stream = opening.get()
        finally:
            self._openings.pop(number, None)
        assert stream is not None
        return stream

    def opened(self, number: int, socket: int | None, word: bytes | None, detail: bytes | None) -> bool:
        """Lua has made a connection, or not. False: nobody waits for it any more.

        Args:
            socket: the number of a bare socket; None when there is none.
            word: what went wrong; with a socket, what was received from it already.
        """
        opening = self._openings.pop(number, None)
        if opening is None:
            return False
        if socket is None:
            opening.set_exception(StreamError(_text(word) or "cannotconnect", _text(detail)))
            return True
        try:
            stream: Stream = self._services.sockets.stream(socket)
            stream.unread(word or b"")
            opening.set(stream)
        except StreamError as error:
            opening.set_exception(error)
        return True

    def _on_close(self, number: int, word: str | None, can_reconnect: bool, hint: UntrustedHint) -> bool | float | None:
        """What Lua's onclose decides: seconds until the next attempt, True for the usual delays, False to stay away;
        None when it failed: an error must not lose the client.
        """
        end = self._clients[number].end
        hint.tell(end)
        by_broker = end is not None and end.by_broker
        answer = self._event(number, "close", None if by_broker else word, can_reconnect, word if by_broker else None)
        assert not isinstance(answer, bytes)
        return answer if isinstance(answer, bool) or answer is None else answer / 1000

    def _forget(self, number: int) -> None:
        self._clients.pop(number, None)
        self._event(number, "end")

    def _of(self, number: int) -> SmqClient | None:
        """The client, None when it is not connected, or has been closed."""
        client = self._clients.get(number)
        return client if client is not None and client.connected and not client.closing else None

    def _function(self, ref: int | None, name: str) -> LuaFunction | None:
        return None if ref is None else LuaFunction(self._vm, ref, f"{name} of an SMQ client")

    def number_topic(self, number: int, topic: bytes | int, onack_ref: int | None) -> bool:
        """`smq:create`: whether there is a connection."""
        onack = self._function(onack_ref, "onack of create")
        if (client := self._of(number)) is None:
            return False
        client.create(topic, onack)
        return True

    def number_subtopic(self, number: int, subtopic: bytes, onack_ref: int | None) -> bool:
        """`smq:createsub`: whether there is a connection."""
        onack = self._function(onack_ref, "onack of createsub")
        if (client := self._of(number)) is None:
            return False
        client.createsub(subtopic, onack)
        return True

    def subscribe(
        self,
        number: int,
        topic: bytes | int,
        subtopic: bytes | int | None,
        onmsg_ref: int | None,
        onack_ref: int | None,
    ) -> bool:
        """`smq:subscribe`: whether there is a connection."""
        settings = {
            "onmsg": self._function(onmsg_ref, "onmsg of subscribe"),
            "onack": self._function(onack_ref, "onack of subscribe"),
        }
        if (client := self._of(number)) is None:
            return False
        client.subscribe(topic, subtopic, settings)
        return True

    def publish(self, number: int, data: bytes, topic: bytes | int, subtopic: bytes | int | None) -> bool:
        """`smq:publish`: False without a connection, or when the send queue is full."""
        client = self._of(number)
        return client is not None and client.publish(data, topic, subtopic)

    def unsubscribe(self, number: int, topic: bytes | int) -> None:
        """`smq:unsubscribe`."""
        if client := self._of(number):
            client.unsubscribe(topic)

    def observe(self, number: int, topic: bytes | int, ref: int) -> None:
        """`smq:observe`."""
        onchange = LuaFunction(self._vm, ref, "the function of observe of an SMQ client")
        if client := self._of(number):
            client.observe(topic, onchange)

    def unobserve(self, number: int, topic: bytes | int) -> None:
        """`smq:unobserve`."""
        if client := self._of(number):
            client.unobserve(topic)

    def gettid(self, number: int) -> int | None:
        """One's own ETID, None while not connected."""
        client = self._of(number)
        return client.gettid() if client else None

    def topic2tid(self, number: int, topic: bytes) -> int | None:
        """The number of a topic this client knows."""
        client = self._of(number)
        return client.topic2tid(topic) if client else None

    def tid2topic(self, number: int, tid: int) -> LuaValue:
        """The name of a topic this client knows."""
        client = self._of(number)
        return encoded(client.tid2topic(tid)) if client else None

    def subtopic2tid(self, number: int, subtopic: bytes) -> int | None:
        """The number of a sub-topic this client knows."""
        client = self._of(number)
        return client.subtopic2tid(subtopic) if client else None

    def tid2subtopic(self, number: int, stid: int) -> LuaValue:
        """The name of a sub-topic this client knows."""
        client = self._of(number)
        return encoded(client.tid2subtopic(stid)) if client else None

    def close(self, number: int) -> None:
        """`smq:close`: after what was published; the client does not come back."""
        if client := self._clients.get(number):
            client.disconnect()

    def end(self, most_s: float) -> None:
        """The server stops: close every client, and wait until the brokers have what was published."""
        clients = list(self._clients.values())
        for client in clients:
            client.disconnect()
        with gevent.Timeout(most_s, False):  # type: ignore[arg-type]  # False: leave the block quietly
            for client in clients:
                client.wait_closed()


_FUNCTIONS = (
    "on_event create opened number_topic number_subtopic subscribe publish unsubscribe observe unobserve gettid "
    "topic2tid tid2topic subtopic2tid tid2subtopic close"
)


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def install_smq_client(vm: Vm, services: Services) -> None:
    """Give Lua `smq.client`."""
    binding = SmqClientBinding(vm, services)
    vm.namespace("smq.client", methods(binding, _FUNCTIONS))
