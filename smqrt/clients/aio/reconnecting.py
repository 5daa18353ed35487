"""Connections, reconnection and closing of the asyncio client."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from smqrt.clients.aio.connection import Connection, Connector
from smqrt.clients.aio.inbox import Callbacks, Inbox, Room
from smqrt.clients.backoff import Backoff
from smqrt.clients.smq.common import EndLog, KnownNames, checked_credentials, checked_decision
from smqrt.clients.smq.options import SmqClientOptions, broker_url, to_bytes
from smqrt.clients.smq.protocol import Accepted, Ack, Change, ConnectionEnd, Event, Init, Pong, Published
from smqrt.clients.smq.session import ClientSession
from smqrt.errors import ClosedError, DeliveryError, DeniedError, NoAnswer
from smqrt.smq.messages import OpenRequests

log = logging.getLogger("smqrt.client")

T = TypeVar("T")

_STOP_S = 2.0  # for the end of a connection after the time limit of `close`
# Reading stops while a queue is full. It continues up to these limits while a call waits for the broker, or while the
# client closes.
_MAX_READS = 1000  # of 16 KiB each


class ReconnectingSmqClient(KnownNames):
    """Base class of `SmqClient`: connections, reconnection and closing, without the methods for applications.

    Attributes:
        end: the `ConnectionEnd` of the last connection or failed attempt; None before the first one.
    """

    def __init__(self, url: str, options: SmqClientOptions) -> None:
        self._url, self._options = broker_url(url), options
        self.onauth, self.onconnect, self.onreconnect = options.onauth, options.onconnect, options.onreconnect
        self.onclose, self.onmsg = options.onclose, options.onmsg
        self.end: ConnectionEnd | None = None
        self._session = ClientSession(options.queue_bytes, options.cleanstart)
        self._connector = Connector(self._url, options)
        self._backoff = Backoff(options.reconnect_delay, options.reconnect_delay_max)
        self._connection: Connection | None = None
        self._seed_and_address: tuple[int, str] = (0, "")  # of Init, for onconnect
        self._connections = self._reads_ahead = self._undelivered = 0
        self._end_log = EndLog()
        self._room = Room()
        self._callbacks = Callbacks(self._room)
        self._requests = OpenRequests()
        self._flushes: set[asyncio.Future[bool]] = set()  # waiting calls of `flush`
        self._acknowledgements: set[asyncio.Future[int]] = set()  # of names and subscriptions
        self._waiting_calls = 0
        self._inboxes: dict[Inbox[Any], object] = {}  # each with its topic
        self._send_room = asyncio.Event()
        self._disconnect_text = b""
        self._deadline: asyncio.TimerHandle | None = None
        self._settled = asyncio.Event()  # connected, or ended permanently
        self._closing = asyncio.Event()  # closed by the application, or ended; queued messages may still be sent
        self._closed = asyncio.Event()  # ended permanently
        self._stopped = ConnectionEnd("closed", "the time limit was reached")
        self._by_application = False
        self._task: asyncio.Task[None] | None = None

    # ---- state

    @property
    def connected(self) -> bool:
        """Whether the connection is open and accepted by the broker."""
        return self._session.etid != 0

    @property
    def closing(self) -> bool:
        """Whether the client was closed or has ended; it then rejects messages."""
        return self._closing.is_set()

    @property
    def closed(self) -> bool:
        """Whether the client has ended permanently."""
        return self._closed.is_set()

    async def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait until the client is connected or has ended (see `end`), at most `timeout` seconds.

        Returns:
            Whether the client is connected.
        """
        await _wait(self._settled, timeout)
        return self.connected

    async def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until the client has ended permanently, at most `timeout` seconds; return whether it has."""
        return await _wait(self._closed, timeout)

    # ---- start and close

    async def start(self) -> Self:
        """Connect in the background; `async with` calls it. A second call does nothing.

        Returns:
            The client.

        Raises:
            ArgumentError: a file with certificates can't be read or is not valid.
            ClosedError: the client was closed.
        """
        self._check_open()
        await self._connector.prepare()
        self._check_open()  # it may have been closed meanwhile
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"smqrt client of {self._url}")
            self._task.add_done_callback(self._finish)
        return self

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            await self.close()
        except DeliveryError:
            if kind is None:  # an exception of the block takes precedence; the loss is in the log
                raise

    async def close(self, timeout: float | None = 5.0) -> None:
        """Deliver the queued messages, send Disconnect, and wait until the connection has ended.

        Without a connection, the client connects to deliver the messages. All waiting calls and loops of the client
        end. A second call only waits. A call in a callback of this client does not wait, because the client ends after
        all callbacks. When the call is cancelled, the connection is closed at once.

        Args:
            timeout: seconds for the delivery and for the callbacks that are queued; None for no limit.

        Raises:
            DeliveryError: the client has ended, and the delivery of some messages failed or is uncertain. Only the
                first call raises it.
        """
        self._by_application = True
        self._begin_close()
        if self._callbacks.is_current or asyncio.current_task() is self._task:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._closed.wait()
                await self._callbacks.wait_finished()
        except TimeoutError:
            self._stop()
            await _wait(self._closed, _STOP_S)
        finally:
            self._stop()
            self._callbacks.cancel()
        count, self._undelivered = self._undelivered, 0
        if count:
            raise DeliveryError(self._undelivered_text(count))

    def disconnect(self, text: str | bytes = "") -> None:
        """Close the client in the background. Returns at once; `onclose` is not called.

        Queued messages are sent first, over a new connection if necessary, within the option `timeout`. Messages that
        the broker has not confirmed by then are lost and logged; `close` raises an error for them.

        Args:
            text: the reason, for the broker.
        """
        self._by_application = True
        if self.closing:
            return
        self._disconnect_text = to_bytes(text)
        if self._task is not None:
            self._deadline = asyncio.get_running_loop().call_later(self._options.timeout, self._stop)
        self._begin_close()

    def _begin_close(self) -> None:
        if self.closing:
            return
        self._closing.set()
        self._room.changed.set()
        self._send_room.set()
        if self._task is None:
            self._finish()
        elif self.connected:
            self._session.when_drained(self._send_disconnect)
        elif self._connection is not None and not self._session.has_held:  # a handshake without messages to send
            self._stop()

    def _stop(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def _send_disconnect(self) -> None:
        connection, session = self._connection, self._session
        assert connection is not None
        if session.confirmed < session.sent:  # a closed connection could lose messages that the broker has not read
            self._confirm(lambda: connection.disconnect(self._disconnect_text))
        else:
            connection.disconnect(self._disconnect_text)

    def _finish(self, task: asyncio.Task[None] | None = None) -> None:
        """End the client permanently. Runs once, however the task ended."""
        if task is not None and not task.cancelled() and (error := task.exception()) is not None:
            log.error("the client failed", exc_info=error)
        self._closing.set()
        self._closed.set()
        self._session.abandon()  # ends the calls that wait for an acknowledgement
        self._undelivered += self._session.in_doubt
        if self._undelivered:
            log.warning("%s", self._undelivered_text(self._undelivered))
        if self._deadline is not None:
            self._deadline.cancel()
        self._settled.set()
        self._send_room.set()
        self._fail_waiting("the client has ended")
        self._end_inboxes(None if self._by_application else self._closed_error())
        self._callbacks.finish()

    def _undelivered_text(self, count: int) -> str:
        items = "message" if count == 1 else "messages"
        return f"the broker did not confirm {count} {items}: {self.end or 'the time limit was reached'}"

    def _check_open(self) -> None:
        if self.closing:
            raise self._closed_error()

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"the client has ended{f': {self.end}' if self.end else ''}; create a new one")

    # ---- waiting

    async def flush(self, timeout: float | None = None) -> bool:
        """Wait until the broker has processed everything sent so far.

        Args:
            timeout: seconds; None for no limit.

        Returns:
            False after the timeout, when the connection was lost meanwhile, or when the client has ended.
        """
        if self.closed:
            return False
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def confirmed() -> None:
            if not answer.done():
                answer.set_result(True)

        def drained() -> None:
            self._confirm(confirmed)

        self._flushes.add(answer)
        try:
            self._session.when_drained(drained)
            return await self._answer(answer, timeout)
        except NoAnswer:
            return False
        finally:
            self._flushes.discard(answer)
            self._session.forget_drained(drained)

    def _confirm(self, then: Callable[[], object]) -> None:
        """Call `then()` when the broker has processed everything sent so far.

        The broker processes packets in order, so its response to a Ping confirms all earlier packets.
        """
        session, sent = self._session, self._session.sent

        def confirmed() -> None:
            session.confirmed = sent
            then()

        if self._connection is not None:
            self._connection.protocol.ping(confirmed)

    async def _answer(self, answer: asyncio.Future[T], timeout_s: float | None) -> T:
        """Wait for an answer of the broker. The client reads meanwhile, although queues may be full.

        Raises:
            NoAnswer: there is none in time, or the connection was lost.
        """
        try:
            with self._reading_while_waiting():
                async with asyncio.timeout(timeout_s):
                    return await answer
        except NoAnswer:
            raise
        except TimeoutError:
            state = "" if self.connected else f" (not connected{f': {self.end}' if self.end else ''})"
            raise NoAnswer(f"no answer in {timeout_s:g} s{state}") from None

    def _acknowledgement(self, what: str) -> tuple[asyncio.Future[int], Callable[[int], None]]:
        """Return the future number of a name, and the function that receives it from the session."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def done(number: int) -> None:
            if future.done():
                return
            if number:
                future.set_result(number)
            else:
                future.set_exception(self._closed_error() if self.closed else DeniedError(f"the broker denied {what}"))

        def settled(_: asyncio.Future[int]) -> None:
            self._acknowledgements.discard(future)
            if not future.cancelled():
                future.exception()  # no message in the log when the program does not wait for it

        self._acknowledgements.add(future)
        future.add_done_callback(settled)
        return future, done

    @contextmanager
    def _reading_while_waiting(self) -> Iterator[None]:
        """Context manager: continue reading although queues are full, because a call waits for the broker."""
        self._waiting_calls += 1
        self._room.changed.set()
        try:
            yield
        finally:
            self._waiting_calls -= 1

    def _fail_waiting(self, why: str) -> None:
        """Fail the waiting calls of `request` and `flush`."""
        self._requests.give_up(why)
        for answer in self._flushes:
            if not answer.done():
                answer.set_exception(NoAnswer(why))

    def _end_inboxes(self, error: Exception | None) -> None:
        for inbox in tuple(self._inboxes):
            inbox.end(error)
        self._inboxes.clear()

    # ---- connections

    @property
    def _needs_connection(self) -> bool:
        return not self.closing or self._session.has_held

    async def _run(self) -> None:
        while self._needs_connection:
            end = await self._run_connection()
            delay_s = await self._delay_after(end)
            if delay_s is None:
                return
            # `close` ends the delay. A delay that begins later is not shortened: a failed broker needs time.
            await (asyncio.sleep(delay_s) if self.closing else _wait(self._closing, delay_s))

    async def _run_connection(self) -> ConnectionEnd:
        connection = Connection(self._url, self._options, self._connector, self._send_room.set)
        self._connection = connection
        end = self._stopped
        try:
            await connection.open()
            end = await connection.run(lambda event: _HANDLERS[type(event)](self, event), self._wait_for_room)
        except ConnectionEnd as failure:
            end = failure
        except Exception as error:
            log.exception("the connection failed")
            end = ConnectionEnd("failed", f"{type(error).__name__}: {error}")
        finally:  # also when `_stop` cancels the task
            connection.abort()
            if end is not self._stopped or connection.accepted or self.end is None:
                self.end = end  # otherwise the failure of the attempt before says more
            self._connection = None
            if self._session.etid:
                self._session.lost()
                self._settled.clear()
                self._fail_waiting(f"the connection is lost: {end}")
                if self._options.cleanstart:
                    self._drop_subscriptions(f"the connection is lost, and cleanstart drops subscriptions: {end}")
        return end

    def _drop_subscriptions(self, why: str) -> None:
        """End all subscriptions and observations, because the session has dropped them."""
        error = ClosedError(f"{why}; subscribe again in onconnect")
        for acknowledgement in tuple(self._acknowledgements):
            if not acknowledgement.done():
                acknowledgement.set_exception(error)
        self._end_inboxes(error)

    async def _delay_after(self, end: ConnectionEnd) -> float | None:
        self._end_log.add(end, self.onclose is not None or self.closing, self._connections)
        decision: bool | float | None = None
        if self.onclose is not None and not self.closing:
            try:
                decision = checked_decision(await result_of(self.onclose(end.word, end.can_reconnect)))
            except Exception:
                log.exception("onclose failed")
        if not self._needs_connection:
            return None
        if decision is None or self.closing:
            decision = self._options.reconnect and end.can_reconnect
        if isinstance(decision, bool):
            return self._backoff.next_s() if decision else None
        return decision

    async def _wait_for_room(self) -> None:
        """Wait while a queue is full, unless a call waits for the next packets of the broker."""
        room = self._room
        self._send_room.set()  # acknowledgements may have released held messages
        while room.is_full:
            if self._waiting_calls or self.closing:
                self._reads_ahead += 1
                if self._reads_ahead < _MAX_READS and not room.is_overfull:
                    return
                self._fail_waiting("the application processes messages too slowly")
            room.changed.clear()
            await room.changed.wait()
        self._reads_ahead = 0

    # ---- events of the connection

    async def _on_init(self, event: Init) -> None:
        self._seed_and_address = (event.seed, event.address)
        connection = self._connection
        assert connection is not None
        info = connection.local_address if self._options.info is None else self._options.info
        credentials = b""
        if self.onauth is not None:
            try:
                async with asyncio.timeout(max(connection.handshake_s, 0.001)):
                    credentials = checked_credentials(await result_of(self.onauth(event.seed, event.address)))
            except TimeoutError:
                text = f"onauth did not return within {self._options.timeout:g} s"
                raise ConnectionEnd("timeout", text) from None
            except ConnectionEnd:
                raise
            except Exception as error:
                log.exception("onauth failed")
                raise ConnectionEnd("onauth", f"onauth failed: {error}", can_reconnect=False) from None
        connection.protocol.connect(to_bytes(self._options.uid), credentials, to_bytes(info))

    def _on_accepted(self, event: Accepted) -> None:
        assert self._connection is not None
        self._connection.accepted = True
        self._backoff.reset()
        self._connections += 1
        self._session.open(self._connection.protocol, event.etid, self._call_onconnect)
        self._settled.set()
        if self.closing:
            self._session.when_drained(self._send_disconnect)

    def _call_onconnect(self) -> None:
        """Queue `onconnect` or `onreconnect`, after the names and subscriptions are restored."""
        callback = self.onconnect
        if self._connections > 1:
            callback = self.onreconnect or (self.onconnect if self._options.cleanstart else None)
        if callback is not None and not self.closing:
            self._callbacks.post(callback, self._session.etid, *self._seed_and_address)

    def _on_ack(self, event: Ack) -> None:
        self._session.acked(event)

    def _on_message(self, event: Published) -> None:
        data, ptid, tid, subtid = event
        if subtid and tid == self._session.etid and self._requests.take(data, ptid, subtid):  # a reply for `request`
            return
        if (handler := self._session.route(tid, subtid)) is not None:
            handler(data, ptid, tid, subtid)
        elif self.onmsg is not None:
            self._callbacks.post(self.onmsg, data, ptid, tid, subtid)

    def _on_change(self, event: Change) -> None:
        if observer := self._session.changed(event):
            observer(event.subscribers)

    def _on_pong(self, event: Pong) -> None:
        if callable(event.token):
            event.token()


_HANDLERS: dict[type[Event], Callable[[ReconnectingSmqClient, Any], Awaitable[None] | None]] = {
    Init: ReconnectingSmqClient._on_init,
    Accepted: ReconnectingSmqClient._on_accepted,
    Ack: ReconnectingSmqClient._on_ack,
    Published: ReconnectingSmqClient._on_message,
    Change: ReconnectingSmqClient._on_change,
    Pong: ReconnectingSmqClient._on_pong,
}


async def _wait(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait for an event, at most `timeout_s` seconds; return whether it is set."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
    return event.is_set()


async def result_of(value: object) -> object:
    """Return the result of a function or coroutine function."""
    return await value if inspect.isawaitable(value) else value
