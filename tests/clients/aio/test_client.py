"""The client for asyncio against a real broker."""

from __future__ import annotations

import asyncio
import gc

import pytest
from greenlet import greenlet

from smqrt.aio import Message, SmqClient
from smqrt.clients.smq.asyncio_guard import called_by_asyncio
from smqrt.errors import ArgumentError, ClosedError, DeniedError, NoAnswer
from tests.clients.aio.conftest import client
from tests.conftest import free_port


def test_publish_and_subscribe(run, url):
    async def program():
        async with client(url) as smq:
            async with smq.subscribe("news") as news:
                await smq.publish("hällo", "news")
                await smq.publish({"a": [1, None]}, "news")
                await smq.pubjson("text", "news")
                first, second, third = [await anext(news) for _ in range(3)]
            assert (first.text, second.json, third.json) == ("hällo", {"a": [1, None]}, "text")
            assert (first.topic, first.etid, first.tid) == ("news", smq.gettid(), smq.topic2tid("news"))
            with pytest.raises(StopAsyncIteration):
                await anext(news)

    run(program)


def test_calls_before_the_connection_wait_for_it(run, url):
    async def program():
        smq = client(url)
        await smq.publish("early", "self")
        own = smq.subscribe("self")
        async with smq:
            assert (await anext(own)).text == "early"

    run(program)


def test_subtopics_have_their_own_subscriptions(run, url):
    async def program():
        async with client(url) as smq:
            indoors, all_of_it = await smq.subscribe("temp", "indoors"), await smq.subscribe("temp")
            await smq.publish("21", "temp", "indoors")
            await smq.publish("3", "temp", "outdoors")
            await smq.publish("0", "temp")
            assert (await anext(indoors)).text == "21"
            assert [(await anext(all_of_it)).text for _ in range(2)] == ["3", "0"]
            indoors.stop()
            await smq.publish("22", "temp", "indoors")
            assert (await anext(all_of_it)).text == "22"

    run(program)


def test_two_loops_over_one_topic_both_get_all(run, url):
    async def program():
        async with client(url) as smq:
            one, two = await smq.subscribe("t"), await smq.subscribe("t")
            await smq.publish("a", "t")
            assert (await anext(one)).text == (await anext(two)).text == "a"
            one.stop()
            await smq.publish("b", "t")
            assert (await anext(two)).text == "b"

    run(program)


def test_request_and_reply(run, url):
    async def program():
        async with client(url) as smq, client(url) as other:

            @other.on("self")
            async def add(message: Message) -> None:
                await message.reply(sum(message.json))

            assert await other.wait_connected(10)
            answers = await asyncio.gather(*(smq.request(other.gettid(), [n, 1]) for n in range(50)))
            assert [answer.json for answer in answers] == [n + 1 for n in range(50)]

    run(program)


def test_a_request_without_an_answer(run, broker):
    async def program():
        async with client(broker.url) as smq:
            with pytest.raises(NoAnswer, match=r"no answer from 1 in 0\.05 s"):
                await smq.request(1, "?", 0.05)
            waiting = asyncio.create_task(smq.request(1, "?"))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await smq.flush(10)

    run(program)


def test_names_and_numbers(run, url):
    async def program():
        async with client(url) as smq:
            tid, stid = await smq.create("a"), await smq.createsub("b")
            assert (smq.topic2tid("a"), smq.tid2topic(tid)) == (tid, "a")
            assert (smq.subtopic2tid("b"), smq.tid2subtopic(stid)) == (stid, "b")
            with pytest.raises(ArgumentError):
                await smq.create(7)

    run(program)


def test_observe_a_topic_and_a_client(run, url):
    async def program():
        async with client(url) as smq:
            counts = smq.observe("t")
            await smq.create("t")
            assert await smq.flush(10)
            async with client(url) as other:
                kept = await other.subscribe("t")
                async for number in counts:  # the first one may be from before the subscription
                    if number == 1:
                        break
                kept.stop()
                assert await anext(counts) == 0
                etid = other.gettid()
                gone = smq.observe(etid)
                assert await smq.flush(10)
            assert [number async for number in gone] == [0]
            smq.unobserve("t")
            assert [number async for number in counts] == []

    run(program)


def test_denied_names_raise(run, start_broker):
    broker = start_broker(permittop=lambda topic, issub, peer: topic != "secret")

    async def program():
        async with client(broker.url) as smq:
            with pytest.raises(DeniedError, match="'secret'"):
                await smq.subscribe("secret")
            with pytest.raises(DeniedError, match="'secret'"):
                async for _ in smq.subscribe("secret"):
                    pass
            with pytest.raises(DeniedError, match="the topic 'secret'"):
                await smq.create("secret")

    run(program)


def test_a_rejected_client_ends_all_waiters(run, start_broker):
    broker = start_broker(authenticate=lambda credentials, info: 3)

    async def program():
        async with client(broker.url) as smq:
            own = smq.subscribe("self")
            with pytest.raises(ClosedError, match="incorrect credentials"):
                await anext(own)
            assert not await smq.wait_connected()
            assert smq.end.code
            with pytest.raises(ClosedError, match="create a new one"):
                await smq.publish("x", "t")

    run(program)


def test_credentials(run, start_broker):
    given = []
    broker = start_broker(authenticate=lambda credentials, info: given.append(credentials) or 0)

    async def onauth(rnd, ip):
        await asyncio.sleep(0)
        return "secret"

    async def program():
        async with client(broker.url, onauth=onauth, info="device") as smq:
            assert await smq.wait_connected(10)

    run(program)
    assert [bytes(one) for one in given] == [b"secret"]


def test_a_lost_connection_restores_subscriptions(run, start_broker, in_broker):
    port = free_port()
    broker = start_broker(port)

    def restart():
        broker.close()
        start_broker(port)

    async def program():
        events = []
        async with client(broker.url, onconnect=lambda *_: events.append("connect")) as smq:
            smq.onreconnect = lambda *_: events.append("reconnect")
            smq.onclose = lambda word, can_reconnect: events.append((word, can_reconnect))
            news = await smq.subscribe("news")
            asking = asyncio.create_task(smq.request(1, "?"))
            await asyncio.sleep(0.05)
            await in_broker(restart)
            with pytest.raises(NoAnswer, match="the connection is lost"):
                await asking
            await smq.publish("after", "news")
            assert (await anext(news)).text == "after"
        assert events[0] == "connect"
        assert events[-1] == "reconnect"
        assert events[1][1] is True

    run(program)


def test_cleanstart_ends_the_loops(run, start_broker, in_broker):
    port = free_port()
    broker = start_broker(port)

    async def program():
        async with client(broker.url, cleanstart=True) as smq:
            news = await smq.subscribe("news")
            await in_broker(broker.close)
            with pytest.raises(ClosedError, match="cleanstart"):
                await anext(news)
            await in_broker(start_broker, port)
            assert await smq.subscribe("news")

    run(program)


def test_a_subscription_without_a_reference_ends(run, broker, caplog):
    async def program():
        async with client(broker.url) as smq:
            news = await smq.subscribe("news")
            await smq.publish("x", "news")
            while not news.waiting:
                await asyncio.sleep(0.001)
            del news
            gc.collect()
            await asyncio.sleep(0)
            assert "the subscription to 'news' ended with 1 messages" in caplog.text
            caplog.clear()
            other = smq.subscribe("news")
            await smq.publish("y", "news")
            async for message in other:
                assert message.text == "y"
                break

    run(program)


def test_the_guard_names_this_client():
    """In the thread of the asyncio loop the gevent client would block both."""
    import smqrt.client

    async def program():
        with pytest.raises(RuntimeError, match=r"use smqrt\.aio\.SmqClient$"):
            smqrt.client.SmqClient("http://127.0.0.1:1/")
        assert called_by_asyncio()
        assert not greenlet(called_by_asyncio).switch()  # a loop of another greenlet, as that of Playwright

    asyncio.run(program())
    assert not called_by_asyncio()


@pytest.mark.parametrize("options", [{"slow": "fast"}, {"max_messages": 0}, {"max_messages": True}])
def test_wrong_options_of_a_subscription(run, options):
    async def program():
        with pytest.raises(ArgumentError):
            SmqClient("http://127.0.0.1:1/").subscribe("t", **options)

    run(program)
