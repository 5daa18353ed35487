"""Bounded queues: received messages, callbacks, and messages to send."""

from __future__ import annotations

import asyncio

import pytest

from smqrt.clients.aio.inbox import Inbox, Room
from smqrt.errors import NoAnswer, QueueFullError
from tests.clients.aio.conftest import client
from tests.support.scripted_broker import ScriptedBroker

COUNT = 40_000


def test_a_slow_loop_stops_the_reading(run, url, caplog):
    """The broker keeps what the program does not take; nothing is lost."""

    async def program():
        async with client(url) as smq, client(url) as other:
            slow, mark = await smq.subscribe("t", max_messages=100), await smq.subscribe("mark")
            for n in range(4000):
                await other.publish(str(n).rjust(100), "t")
            await other.publish("x", "mark")
            assert await other.flush(10)
            while slow.waiting < 100:
                await asyncio.sleep(0.001)
            assert mark.waiting == 0  # it is behind the messages that are not read
            assert [int((await anext(slow)).text) for _ in range(4000)] == list(range(4000))
            assert (await anext(mark)).text == "x"

    run(program)
    assert "limit reached: max_messages (100) of the subscription to 't', which stops the reading" in caplog.text
    assert caplog.text.count("limit reached") == 1


@pytest.mark.parametrize(("slow", "expected"), [("oldest", ["4", "5", "6"]), ("newest", ["0", "1", "2"])])
def test_full_queues_drop_and_count(run, broker, slow, expected):
    async def program():
        async with client(broker.url) as smq:
            news, mark = await smq.subscribe("t", max_messages=3, slow=slow), await smq.subscribe("mark")
            for n in range(7):
                await smq.publish(str(n), "t")
            await smq.publish("x", "mark")
            assert (await anext(mark)).text == "x"
            assert (news.waiting, news.dropped) == (3, 4)
            assert [(await anext(news)).text for _ in range(3)] == expected

    run(program)


def test_a_request_in_the_loop_of_a_full_queue(run, broker):
    """The client reads while a call waits for the broker, although the queue is full."""

    async def program():
        async with client(broker.url) as smq, client(broker.url) as other:

            @other.on("self")
            async def answer(message):
                await message.reply(message.data)

            assert await other.wait_connected(10)
            news = await smq.subscribe("t", max_messages=10)
            for n in range(20):
                await other.publish(str(n), "t")
            assert await other.flush(10)
            async for message in news:
                assert (await smq.request(other.gettid(), message.data)).data == message.data
                assert await smq.flush(10)
                if message.text == "19":
                    break

    run(program)


def test_a_waiting_call_fails_before_memory_is_full(run):
    """A broker that sends without an end, while the program waits for its answer."""
    sent = []

    def floods(conversation):
        from smqrt.wire import smq

        conversation.accept(4711)
        frame = smq.publish_frame(4711, 9, 0, b"x" * 10)
        while True:
            conversation.raw(frame * 1000)
            sent.append(1000)

    broker = ScriptedBroker(floods)

    async def program():
        smq = await client(broker.url).start()
        own = smq.subscribe("self", max_messages=100)
        assert await smq.wait_connected(10)
        with pytest.raises(NoAnswer, match="too slowly"):
            await smq.request(9, "?", 15)
        assert own.waiting < 1000 + 6000  # and what was read at once
        smq.disconnect()
        smq._stop()
        assert await smq.wait_closed(10)

    try:
        run(program)
    finally:
        broker.close()


def test_publish_waits_for_room(run, url, broker):
    received = []
    broker.smq.subscribe("t", lambda data, *_: received.append(len(data)))

    async def program():
        async with client(url, queue_bytes=10_000) as smq:
            await asyncio.gather(*(smq.publish(b"x" * 4000, "t") for _ in range(100)))
            for _ in range(100):
                await smq.publish(b"y" * 4000, "t")
            assert smq.dropped == 0

    run(program)
    assert len(received) == 200


def test_publish_raises_without_room(run):
    async def program():
        smq = client("http://127.0.0.1:1/", queue_bytes=1000)
        await smq.publish(b"x" * 900, "t")
        with pytest.raises(QueueFullError, match=r"limit reached: queue_bytes \(1000\): no room within 0\.05 s; not "):
            await smq.publish(b"x" * 900, "t", timeout_s=0.05)
        with pytest.raises(QueueFullError, match="a message of 2000 bytes does not fit"):
            await smq.publish(b"x" * 2000, "t")
        with pytest.raises(QueueFullError, match="await publish waits"):
            smq.publish_nowait(b"x" * 900, "t")
        assert smq.dropped == 3
        waiting = asyncio.create_task(smq.publish(b"x" * 900, "t"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        smq.publish_nowait(b"", "t")
        smq.disconnect()

    run(program)


def test_other_tasks_run_while_messages_flow(run, broker):
    """A program that only publishes, and a loop that only counts, leave turns to others."""

    async def program():
        async with client(broker.url) as smq, client(broker.url) as other:
            news, turns = await other.subscribe("t"), 0

            async def publish():
                for _ in range(COUNT):
                    await smq.publish(b"", "t")

            async def count_turns():
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            publishing, counting = asyncio.create_task(publish()), asyncio.create_task(count_turns())
            for _ in range(COUNT):
                await anext(news)
            counting.cancel()
            await publishing
            await asyncio.wait([counting])
            assert turns > COUNT / 200

    run(program)


def test_two_loops_share_an_inbox(run):
    async def program():
        inbox: Inbox[int] = Inbox("an inbox", Room())
        both = [asyncio.create_task(inbox.get()) for _ in range(2)]
        await asyncio.sleep(0)
        inbox.put(1)
        await asyncio.sleep(0)
        both[1].cancel()
        await asyncio.wait([both[1]])
        assert await both[0] == 1
        waiting = [asyncio.create_task(inbox.get()) for _ in range(2)]
        await asyncio.sleep(0)
        inbox.end(ValueError("over"))
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert list(map(str, results)) == ["over", "over"]

    run(program)
