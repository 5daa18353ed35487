"""`SmqClient` of `smqrt.aio`: the methods for applications."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from smqrt.clients.aio.inbox import ITEMS_PER_TURN, MAX_MESSAGES, Inbox
from smqrt.clients.aio.reconnecting import ReconnectingSmqClient
from smqrt.clients.aio.subscriptions import Fanout, Message, Observation, Subscription, stop_unreferenced
from smqrt.clients.smq.options import SmqClientOptions
from smqrt.clients.smq.session import Subtopic, Topic, subtopic_key, topic_key
from smqrt.errors import ArgumentError, DeniedError, NoAnswer, QueueFullError
from smqrt.settings.option_types import make
from smqrt.smq.messages import Payload, json_bytes, payload

log = logging.getLogger("smqrt.client")

Name = str | bytes | int
"""A topic: a name, or an ID as `int`. `"self"` means the client's own ETID."""
F = TypeVar("F", bound=Callable[[Message], object])
Packet = tuple[bytes, int, int, int]
"""The fields of a received message: `(data, ptid, tid, subtid)`."""
_ANSWER_S = 10.0


class SmqClient(ReconnectingSmqClient):
    """A client of an SMQ broker for asyncio. It connects in the background and reconnects after a lost connection.

        async with SmqClient("http://localhost:9357/chat/smq.lsp") as smq:
            await smq.publish("hello", "say")
            async for message in smq.subscribe("say"):
                print(message.text)

    A client belongs to one event loop. The methods may be called at any time after `start`: messages and requests are
    queued while there is no connection. After a reconnect, topics are numbered and subscribed again before
    `onreconnect` is called. Any waiting call can be cancelled; the client continues.

    The callbacks `onauth`, `onconnect`, `onreconnect`, `onclose` and `onmsg` are options, and may be assigned later.
    They may be coroutine functions. `onauth` and `onclose` run in the client's task, the others one after the other in
    a second one. An exception in a callback is logged, and the client continues.

    Args:
        url: `http(s)://` for raw SMQ, `ws(s)://` for WebSocket.
        options: a mapping of options; see `smqrt.clients.smq.options.SmqClientOptions`.
        more: options as keyword arguments.

    Raises:
        ArgumentError: an invalid URL or option.
    """

    def __init__(self, url: str, options: Mapping[str, object] | None = None, **more: object) -> None:
        super().__init__(url, make(SmqClientOptions, {**(options or {}), **more}))
        self._subscriptions: Fanout[tuple[Topic, Subtopic], Packet] = Fanout()
        self._observations: Fanout[Topic, int] = Fanout()
        self._send_order = asyncio.Lock()  # for the messages that wait for room
        self._published = 0

    # ---- names

    async def create(self, topic: str | bytes, timeout_s: float = _ANSWER_S) -> int:
        """Return the number of `topic`, which the broker assigns.

        Raises:
            DeniedError: the broker denied it.
            NoAnswer: no answer within `timeout_s` seconds.
            ClosedError: the client was closed, or has ended.
        """
        self._check_open()
        key = topic_key(topic)
        if isinstance(key, int):
            raise ArgumentError(f"topic must be a name, not {topic!r}")
        answer, done = self._acknowledgement(f"the topic {topic!r}")
        self._session.create(key, done)
        return await self._answer(answer, timeout_s)

    async def createsub(self, subtopic: str | bytes, timeout_s: float = _ANSWER_S) -> int:
        """Return the number of `subtopic`, which the broker assigns. Raises as `create`."""
        self._check_open()
        key = subtopic_key(subtopic)
        if not isinstance(key, bytes):
            raise ArgumentError(f"subtopic must be a name, not {subtopic!r}")
        answer, done = self._acknowledgement(f"the sub-topic {subtopic!r}")
        self._session.createsub(key, done)
        return await self._answer(answer, timeout_s)

    # ---- messages

    async def publish(
        self, data: Payload, topic: Name, subtopic: Name | None = None, timeout_s: float | None = 10.0
    ) -> None:
        """Send a message. While the send queue is full, wait for room.

        Args:
            data: bytes, text, or a value that is sent as JSON; see `smqrt.smq.messages.payload`. At most 65520 bytes.
            topic: a name, an ID, an ETID, or `"self"`.
            subtopic: a name or ID.
            timeout_s: time limit for room in the queue; None for no limit.

        Raises:
            QueueFullError: there is no room in time; the message is dropped and counted in `dropped`.
            ArgumentError: the message is too large, or a name is invalid.
            ClosedError: the client was closed, or has ended.
        """
        self._check_open()
        made, key, subkey = payload(data), topic_key(topic), subtopic_key(subtopic)
        if self._send_order.locked() or not self._session.has_room(len(made)):
            await self._wait_for_send_room(len(made), timeout_s)
        if not self._session.publish(made, key, subkey):
            raise self._queue_full(f"a message of {len(made)} bytes does not fit")
        self._published += 1
        if self._published % ITEMS_PER_TURN == 0:  # a program that publishes in a loop lets other tasks run
            await asyncio.sleep(0)

    def publish_nowait(self, data: Payload, topic: Name, subtopic: Name | None = None) -> None:
        """Send a message without waiting, for callbacks that are no coroutines. Arguments and errors are as `publish`.

        Raises:
            QueueFullError: the send queue is full; the message is dropped and counted in `dropped`.
        """
        self._check_open()
        if not self._session.publish(payload(data), topic_key(topic), subtopic_key(subtopic)):
            raise self._queue_full("await publish waits for room")

    async def pubjson(self, value: object, topic: Name, subtopic: Name | None = None) -> None:
        """Send `value` as JSON, also a str. See `publish`."""
        await self.publish(json_bytes(value), topic, subtopic)

    async def _wait_for_send_room(self, size_bytes: int, timeout_s: float | None) -> None:
        if size_bytes >= self._options.queue_bytes:
            return  # it never fits
        try:
            with self._reading_while_waiting():
                async with asyncio.timeout(timeout_s), self._send_order:
                    while not self._session.has_room(size_bytes):
                        self._check_open()
                        self._send_room.clear()
                        await self._send_room.wait()
        except TimeoutError:
            self._session.dropped += 1
            state = "" if self.connected else f"; not connected{f': {self.end}' if self.end else ''}"
            raise self._queue_full(f"no room within {timeout_s:g} s{state}") from None
        self._check_open()

    def _queue_full(self, detail: str) -> QueueFullError:
        return QueueFullError(f"limit reached: queue_bytes ({self._options.queue_bytes}): {detail}")

    async def request(self, etid: int, data: Payload, timeout_s: float = _ANSWER_S) -> Message:
        """Send `data` to the client `etid` (1: the server) and wait for its reply (`Message.reply`).

        Returns:
            The reply.

        Raises:
            NoAnswer: no reply within `timeout_s` seconds, or the connection was lost.
            ArgumentError, ClosedError, QueueFullError: as `publish`.
        """
        self._check_open()
        reply, number = self._requests.open(etid)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def settle(value: bytes | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value or b"")

        reply.then(settle)
        try:
            async with asyncio.timeout(timeout_s):
                await self.publish(data, etid, number, None)
                answer = await self._answer(future, None)
        except NoAnswer:
            raise
        except TimeoutError:
            raise NoAnswer(f"no answer from {etid} in {timeout_s:g} s") from None
        finally:
            future.cancel()
            self._requests.end(etid, number)
        return Message(answer, etid, self._session.etid, number, etid, self.publish)

    # ---- subscriptions

    def subscribe(
        self,
        topic: Name,
        subtopic: Name | None = None,
        *,
        max_messages: int = MAX_MESSAGES,
        slow: str = "wait",
        timeout_s: float | None = _ANSWER_S,
    ) -> Subscription:
        """Subscribe to a topic, and return its messages for `async for`.

        `await smq.subscribe(...)` also waits until the broker has accepted the subscription. Without `await`, a denied
        subscription raises DeniedError in the loop. Keep the returned object: the subscription ends with it.

        Args:
            topic: a name, or `"self"` for messages to the client's own ETID.
            subtopic: only messages with this sub-topic. Without it, messages whose sub-topic has a subscription of its
                own are not included.
            max_messages: limit of received messages that the program has not processed.
            slow: what happens at this limit: "wait" (the client does not read from the broker), "oldest" or "newest"
                (the oldest, or the new message is dropped and counted in `Subscription.dropped`).
            timeout_s: time limit of `await` and `async with`; None for no limit.

        Raises:
            ArgumentError, ClosedError: as `publish`.
            DeniedError, NoAnswer: in `await` and `async with`.
        """
        self._check_open()
        key = topic_key(topic), subtopic_key(subtopic)
        what = f"the subscription to {topic!r}" + ("" if subtopic is None else f", {subtopic!r}")
        inbox: Inbox[Message] = Inbox(what, self._room, max_messages, slow)
        accepted, acknowledge = self._acknowledgement(what)

        def receive(packet: Packet) -> None:
            inbox.put(Message(*packet, topic, self.publish))

        def stop() -> None:
            inbox.discard()
            self._inboxes.pop(inbox, None)
            if self._subscriptions.remove(key, receive):
                self._session.remove_handler(*key)

        def stop_and_report() -> None:
            if inbox.waiting and not inbox.ended:
                log.warning("%s ended with %d messages: the program has no reference to it", what, inbox.waiting)
            stop()

        def done(tid: int) -> None:
            acknowledge(tid)
            if not tid and not self.closed:
                self._subscriptions.remove(key, receive)
                self._inboxes.pop(inbox, None)
                inbox.end(DeniedError(f"the broker denied {what}"))

        self._inboxes[inbox] = "subscription", key[0]
        self._subscribe(key, receive, done)
        subscription = Subscription(inbox, stop, lambda: self._answer(asyncio.shield(accepted), timeout_s))
        stop_unreferenced(subscription, stop_and_report)
        return subscription

    def _subscribe(
        self, key: tuple[Topic, Subtopic], receive: Callable[[Packet], None], done: Callable[[int], None]
    ) -> None:
        handle = self._subscriptions.add(key, receive)
        self._session.subscribe(*key, lambda *packet: handle(packet), lambda tid, _stid: done(tid))

    def on(self, topic: Name, subtopic: Name | None = None) -> Callable[[F], F]:
        """Decorate a function or coroutine function that receives each message of a topic as a `Message`.

        Such functions run one after the other, with the other callbacks. They may also be registered before `start`.
        """
        key = topic_key(topic), subtopic_key(subtopic)

        def subscribed(fn: F) -> F:
            self._check_open()

            def receive(packet: Packet) -> None:
                self._callbacks.post(fn, Message(*packet, topic, self.publish))

            def done(tid: int) -> None:
                if not tid and not self.closed:
                    self._subscriptions.remove(key, receive)
                    log.error("the broker denied the subscription to %r", topic)

            self._subscribe(key, receive, done)
            return fn

        return subscribed

    def unsubscribe(self, topic: Name) -> None:
        """End all subscriptions of a topic, and their loops; unknown topics are ignored."""
        key = topic_key(topic)
        self._subscriptions.drop(lambda one: one[0] == key)
        self._session.unsubscribe(key)
        self._end_topic("subscription", key)

    def _end_topic(self, kind: str, key: Topic) -> None:
        for inbox in [one for one, of in self._inboxes.items() if of == (kind, key)]:
            inbox.end()
            del self._inboxes[inbox]

    def observe(self, topic: Name) -> Observation:
        """Observe the number of subscribers of a topic, or the disconnect of the client with an ETID.

        Keep the returned object: the observation ends with it.

        Returns:
            The changed numbers, for `async for`; for an ETID one 0, when its client disconnects.
        """
        self._check_open()
        key = topic_key(topic)
        # A program that does not read them gets the newest ones; these few numbers never stop the reading.
        inbox: Inbox[int] = Inbox(f"the observation of {topic!r}", self._room, slow="oldest")

        def receive(subscribers: int) -> None:
            inbox.put(subscribers)
            if isinstance(key, int) and subscribers == 0:  # the session has removed the observer
                self._observations.remove(key, receive)
                self._inboxes.pop(inbox, None)
                inbox.end()

        def stop() -> None:
            inbox.discard()
            self._inboxes.pop(inbox, None)
            if self._observations.remove(key, receive):
                self._session.unobserve(key)

        self._inboxes[inbox] = "observation", key
        self._session.observe(key, self._observations.add(key, receive))
        observation = Observation(inbox, stop)
        stop_unreferenced(observation, stop)
        return observation

    def unobserve(self, topic: Name) -> None:
        """End all observations of a topic, and their loops."""
        key = topic_key(topic)
        self._observations.drop(lambda one: one == key)
        self._session.unobserve(key)
        self._end_topic("observation", key)

    def _drop_subscriptions(self, why: str) -> None:
        self._subscriptions.drop(lambda _: True)
        self._observations.drop(lambda _: True)
        super()._drop_subscriptions(why)
