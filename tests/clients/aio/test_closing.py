"""Closing and cancelling: messages are delivered, or the program is told; nothing waits any longer."""

from __future__ import annotations

import asyncio

import pytest

from smqrt.errors import ClosedError, DeliveryError, NoAnswer
from smqrt.wire.smq import Type
from tests.clients.aio.conftest import client
from tests.conftest import free_port
from tests.support.scripted_broker import ScriptedBroker
from tests.support.waiting import wait_until


@pytest.fixture
def scripted():
    brokers = []

    def start(*scripts):
        brokers.append(ScriptedBroker(*scripts))
        return brokers[-1]

    yield start
    for one in brokers:
        one.close()


def silent(conversation):
    conversation.accept()
    conversation.wait_closed()


def test_with_delivers_five_thousand(run, url, broker):
    received = []
    broker.smq.subscribe("t", lambda data, *_: received.append(data))

    async def program():
        async with client(url) as smq:
            for n in range(5000):
                await smq.publish(str(n), "t")

    run(program)
    wait_until(lambda: len(received) >= 5000, received)
    assert received == [str(n).encode() for n in range(5000)]


def test_disconnect_delivers_too(run, url, broker):
    received = []
    broker.smq.subscribe("t", lambda data, *_: received.append(data))

    async def program():
        smq = await client(url).start()
        await smq.publish("hello", "t")
        smq.disconnect("bye")
        assert await smq.wait_closed(10)
        await smq.close()

    run(program)
    assert received == [b"hello"]


def test_close_without_a_broker_raises(run):
    async def program():
        smq = await client(f"http://127.0.0.1:{free_port()}/").start()
        await smq.publish("x", "t")
        with pytest.raises(DeliveryError, match=r"did not confirm 1 message: .*is the server running there"):
            await smq.close(0.2)
        await smq.close()
        assert smq.closed

    run(program)


def test_close_proves_that_the_broker_has_it(run, scripted):
    def never_confirms(conversation):
        conversation.accept()
        while conversation.receive()[0] != Type.PING:
            pass
        conversation.wait_closed()

    async def program():
        smq = await client(scripted(never_confirms).url).start()
        await smq.publish("x", 7)
        with pytest.raises(DeliveryError, match="1 message"):
            await smq.close(0.3)

    run(program)


def test_a_client_that_was_never_started_closes(run):
    async def program():
        smq = client("http://127.0.0.1:1/")
        waiting = smq.subscribe("t")
        await smq.close()
        assert [message async for message in waiting] == []
        with pytest.raises(ClosedError):
            await smq.start()

    run(program)


def test_close_ends_all_waiters(run, scripted):
    async def program():
        smq = await client(scripted(silent).url, queue_bytes=1000).start()
        assert await smq.wait_connected(10)
        subscription, observation = smq.subscribe("t"), smq.observe(5)

        async def loop(receiver):
            return [item async for item in receiver]

        calls = [
            loop(subscription), loop(observation), smq.subscribe("u"), smq.create("v"), smq.createsub("w"),
            smq.request(1, "?"), smq.flush(), smq.wait_closed(),
        ]  # fmt: skip
        tasks = [asyncio.ensure_future(one) if asyncio.iscoroutine(one) else None for one in calls]
        tasks = [task or asyncio.create_task(_await(call)) for task, call in zip(tasks, calls, strict=True)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in tasks)
        with pytest.raises(DeliveryError):  # the request
            await smq.close(0.2)
        messages, numbers, *rest = await asyncio.gather(*tasks, return_exceptions=True)
        assert (messages, numbers) == ([], [])
        assert [type(one) for one in rest] == [ClosedError, ClosedError, ClosedError, NoAnswer, bool, bool]
        assert rest[-2:] == [False, True]

    run(program)


async def _await(awaitable):
    return await awaitable


def test_a_cancelled_close_closes_at_once(run, scripted):
    async def program():
        smq = await client(scripted(silent).url).start()
        await smq.publish("x", 7)
        closing = asyncio.create_task(smq.close(None))
        await asyncio.sleep(0.05)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert await smq.wait_closed(10)

    run(program)


def test_cancelled_waits_leave_the_client_usable(run, broker):
    async def program():
        async with client(broker.url) as smq:
            news = await smq.subscribe("news")
            for wait in (lambda: anext(news), smq.wait_closed, lambda: smq.request(1, "?"), lambda: smq.create("new")):
                task = asyncio.create_task(_await(wait()))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
            await smq.publish("x", "news")
            assert (await anext(news)).text == "x"

    run(program)


def test_a_cancelled_subscription_ends(run, scripted):
    """It was not accepted, and the program has no other name for it."""

    async def program():
        smq = await client(scripted(silent).url).start()
        subscription = smq.subscribe("t")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_await(subscription), 0.05)
        assert [message async for message in subscription] == []
        with pytest.raises(NoAnswer, match=r"no answer in 0\.05 s"):
            await smq.subscribe("t", timeout_s=0.05)
        smq.disconnect()
        assert await smq.close(0.2) is None

    run(program)


def test_close_in_a_callback_does_not_wait(run, broker):
    async def program():
        smq = client(broker.url)
        smq.onconnect = lambda *_: smq.close()
        await smq.start()
        assert await smq.wait_closed(10)
        await smq.close()

    run(program)


def test_tasks_end_with_the_event_loop(broker):
    """A program that forgets `close` ends nevertheless."""
    import gevent

    async def program():
        smq = await client(broker.url).start()
        assert await smq.wait_connected(10)
        return smq

    assert gevent.get_hub().threadpool.apply(lambda: asyncio.run(program())).closed


def test_onclose_decides(run, scripted):
    def refuses_service(conversation):
        conversation.bootstrap()

    async def program():
        attempts = []

        async def onclose(word, can_reconnect):
            await asyncio.sleep(0)
            attempts.append(word)
            return 0.01 if len(attempts) < 3 else False

        smq = await client(scripted(refuses_service).url, onclose=onclose).start()
        assert not await smq.wait_connected()
        assert attempts == ["socketclosed"] * 3
        await smq.close()

    run(program)


def test_a_callback_that_never_returns_is_cancelled(run, broker):
    async def program():
        cancelled = asyncio.Event()

        async def onconnect(*_):
            try:
                await asyncio.sleep(1000)
            finally:
                cancelled.set()

        async with client(broker.url, onconnect=onconnect) as smq:
            assert await smq.wait_connected(10)
            await smq.close(0.3)
        await cancelled.wait()

    run(program)


def test_callbacks_that_fail_are_logged(run, broker, caplog):
    async def program():
        async with client(broker.url) as smq:
            got = asyncio.Event()

            @smq.on("t")
            def fails(message):
                if message.text == "1":
                    raise ValueError("the first one")
                got.set()

            await smq.publish("1", "t")
            await smq.publish("2", "t")
            await got.wait()

    run(program)
    assert "the first one" in caplog.text
