"""The client against a real broker, over raw sockets and WebSocket."""

import json
import os
import subprocess
import sys
import textwrap
import threading

import gevent
import pytest
from gevent.event import Event
from gevent.queue import Queue

from smqrt.client import ConnectionEnd, SMQClient, SmqClient
from smqrt.errors import ArgumentError, NoAnswer
from tests.support.waiting import wait_until


@pytest.fixture(params=["raw", "websocket"])
def url(request, broker):
    return broker.url if request.param == "raw" else broker.ws_url


def collect(queue):
    return lambda *arguments: queue.put(arguments)


def test_connect_reports_etid_seed_and_address(url, make_client):
    calls = Queue()
    client = make_client(url, onconnect=collect(calls))
    etid, seed, address = calls.get(timeout=5)
    assert client.wait_connected(5)
    assert (client.gettid(), client.connected, address) == (etid, True, "127.0.0.1")
    assert 0 < seed <= 0xFFFFFFFF


def test_uid_info_and_credentials_reach_the_broker(start_broker, make_client):
    seen = []
    broker = start_broker(authenticate=lambda credentials, info: seen.append((credentials, info)) or 0)
    client = make_client(broker.url, uid="sensor-1", info="kitchen", onauth=lambda rnd, ip: f"{rnd}@{ip}")
    assert client.wait_connected(5)
    ((credentials, info),) = seen
    assert credentials == f"{info['seed']}@127.0.0.1".encode()
    assert (info["uid"], info["info"]) == ("sensor-1", "kitchen")


def test_publish_and_subscribe(url, make_client):
    received, acks = Queue(), Queue()
    subscriber, publisher = make_client(url), make_client(url)
    subscriber.subscribe("news", onmsg=collect(received), onack=collect(acks))
    accepted, name, tid = acks.get(timeout=5)
    assert (accepted, name) == (True, "news")
    for payload in (b"\0\xff", "gr\u00fc\u00df", {"a": [1, None]}, b""):
        publisher.publish(payload, "news")
    got = [received.get(timeout=5) for _ in range(4)]
    assert [item[0] for item in got] == [b"\0\xff", "gr\u00fc\u00df".encode(), b'{"a":[1,null]}', b""]
    assert {item[1:] for item in got} == {(publisher.gettid(), tid, 0)}
    assert subscriber.topic2tid("news") == tid
    assert subscriber.tid2topic(tid) == "news"


def test_subtopics_and_the_general_handler(url, make_client):
    light, rest, general, acks = Queue(), Queue(), Queue(), Queue()
    client = make_client(url, onmsg=collect(general))
    client.subscribe("room", "light", {"onmsg": collect(light), "onack": collect(acks)})
    client.subscribe("room", {"onmsg": collect(rest)})
    client.subscribe("hall", "light")
    client.subscribe("hall", "sound", onmsg=collect(light))
    client.publish("1", "room", "light")
    client.publish("2", "room")
    client.publish("3", "room", "heat")
    client.publish("4", "hall", "light")
    assert client.flush(5)
    accepted, topic, tid, subtopic, stid = acks.get(timeout=5)
    assert (accepted, topic, subtopic) == (True, "room", "light")
    assert light.get(timeout=5) == (b"1", client.gettid(), tid, stid)
    assert [rest.get(timeout=5)[0] for _ in range(2)] == [b"2", b"3"]
    assert general.get(timeout=5)[0] == b"4"
    assert client.subtopic2tid("light") == stid
    assert client.tid2subtopic(stid) == "light"


def test_json_and_text_are_decoded_or_handled_generally(url, make_client):
    values, texts, general = Queue(), Queue(), Queue()
    client = make_client(url, onmsg=collect(general))
    client.subscribe("j", onmsg=collect(values), datatype="json")
    client.subscribe("t", onmsg=collect(texts), datatype="text")
    client.pubjson("text", "j")
    client.publish("{broken", "j")
    client.publish("[" * 30000, "j")
    client.publish("\u00fc", "t")
    client.publish(b"\xff", "t")
    assert values.get(timeout=5)[0] == "text"
    assert texts.get(timeout=5)[0] == "\u00fc"
    assert [general.get(timeout=5)[0] for _ in range(3)] == [b"{broken", b"[" * 30000, b"\xff"]
    assert values.empty()
    assert texts.empty()


def test_request_and_reply_by_etid(url, make_client):
    replies = Queue()
    server, caller = make_client(url), make_client(url)
    server.subscribe("double", onmsg=lambda data, ptid, *_: server.publish(str(2 * int(data)), ptid, "reply"))
    server.flush(5)
    caller.subscribe("self", "reply", onmsg=collect(replies))
    caller.publish("21", "double")
    data, ptid, tid, _ = replies.get(timeout=5)
    assert (data, ptid, tid) == (b"42", server.gettid(), caller.gettid())


def test_names_resolved_earlier_are_still_subscribed_at_the_broker(broker, url, make_client):
    received = Queue()
    client = make_client(url)
    client.create("a")
    client.publish("lost", "b")
    assert client.flush(5)
    client.subscribe("a", onmsg=collect(received))
    client.subscribe("b", onmsg=collect(received))
    assert client.flush(5)
    broker.smq.publish("one", "a")
    broker.smq.publish("two", "b")
    assert [received.get(timeout=5)[0] for _ in range(2)] == [b"one", b"two"]


def test_binary_names(url, make_client):
    received, acks = Queue(), Queue()
    client = make_client(url)
    for name in (b"\xff\x00", "", b"plain"):
        client.subscribe(name, onmsg=collect(received), onack=collect(acks))
        client.publish("x", name)
    names = [acks.get(timeout=5)[1] for _ in range(3)]
    assert names == [b"\xff\x00", "", b"plain"]
    tids = [received.get(timeout=5)[2] for _ in range(3)]
    assert [client.tid2topic(tid) for tid in tids] == [b"\xff\x00", "", "plain"]


def test_observe_a_topic_and_an_etid(url, make_client):
    changes = Queue()
    watcher, other = make_client(url), make_client(url)
    watcher.observe("room", collect(changes))
    assert changes.get(timeout=5) == (0, "room")
    other.subscribe("room")
    assert changes.get(timeout=5) == (1, "room")
    watcher.observe(other.gettid(), collect(changes))
    assert watcher.flush(5)
    etid = other.gettid()
    other.close()
    assert {changes.get(timeout=5) for _ in range(2)} == {(0, "room"), (0, etid)}
    watcher.unobserve("room")


def test_unsubscribe(broker, url, make_client):
    received = Queue()
    client = make_client(url)
    client.subscribe("a", onmsg=collect(received))
    assert client.flush(5)
    client.unsubscribe("a")
    client.unsubscribe("never heard of")
    assert client.flush(5)
    broker.smq.publish("x", "a")
    client.subscribe("b", onmsg=collect(received))
    assert client.flush(5)
    broker.smq.publish("y", "b")
    assert received.get(timeout=5)[0] == b"y"


def test_refused_names(start_broker, make_client):
    acks = Queue()
    broker = start_broker(permittop=lambda topic, issub, peer: topic != "secret", permitsubtop=lambda name, peer: False)
    client = make_client(broker.url)
    client.create("secret", collect(acks))
    client.subscribe("secret", onack=collect(acks))
    client.createsub("any", collect(acks))
    client.subscribe("open", "any", onack=collect(acks))
    client.publish("lost", "secret")
    client.publish("lost", "open", "any")
    expected = [(False, "secret", 0)] * 2 + [(False, "any", 0), (False, "open", 0, "any", 0)]
    assert [acks.get(timeout=5) for _ in range(4)] == expected
    assert client.flush(5)
    assert client.dropped == 2


def test_the_largest_message(url, make_client):
    received = Queue()
    client = make_client(url)
    client.subscribe("big", onmsg=collect(received))
    payload = os.urandom(0xFFF0)
    client.publish(payload, "big")
    assert received.get(timeout=5)[0] == payload
    with pytest.raises(ArgumentError, match="65520"):
        client.publish(payload + b"x", "big")


def test_order_and_number_of_many_messages(url, make_client):
    received = []
    subscriber, publisher = make_client(url), make_client(url)
    subscriber.subscribe("n", onmsg=lambda data, *_: received.append(int(data)))
    assert subscriber.flush(5)
    for n in range(20000):
        assert publisher.publish(str(n), "n")
    assert publisher.flush(10)
    wait_until(lambda: len(received) == 20000)
    assert received == list(range(20000))


def test_what_is_published_before_disconnect_arrives(broker, url):
    received = Queue()
    broker.smq.subscribe("last words", onmsg=collect(received))
    client = SmqClient(url)
    client.publish("hello", "last words")
    client.wait_connected(5)
    client.disconnect("bye")
    assert received.get(timeout=5)[0] == b"hello"
    wait_until(lambda: client.closed)


def test_callbacks_may_block_and_call_back(url, make_client):
    done = Queue()
    client = make_client(url)

    def onmsg(data, *_):
        gevent.sleep(0.02)
        client.publish(data, "echo")
        done.put(client.flush(5))

    client.subscribe("in", onmsg=onmsg)
    client.publish("x", "in")
    assert done.get(timeout=5) is True


def test_callback_errors_are_logged_and_the_next_one_runs(url, make_client, caplog):
    received = Queue()
    client = make_client(url)
    client.subscribe("bad", onmsg=lambda *_: 1 / 0)
    client.subscribe("good", onmsg=collect(received))
    client.publish("x", "bad")
    client.publish("y", "good")
    assert received.get(timeout=5)[0] == b"y"
    assert "ZeroDivisionError" in caplog.text


def test_a_slow_callback_pauses_reading_within_bounded_memory(url, make_client):
    gate, count = Event(), [0]
    client, publisher = make_client(url), make_client(url, queue_bytes=1 << 25)

    def onmsg(*_):
        gate.wait()
        count[0] += 1

    client.subscribe("flood", onmsg=onmsg)
    assert client.flush(5)
    for _ in range(3000):
        publisher.publish(bytes(100), "flood")
    assert publisher.flush(5)
    gevent.sleep(0.05)  # it could read everything meanwhile
    assert len(client._callbacks._jobs) < 1800, "the limit and what one receive brought"
    gate.set()
    wait_until(lambda: count[0] == 3000)


def test_factory_alias_and_context_manager(url):
    with SmqClient.create(url, {"uid": "1234567"}, info="x") as client:
        assert client.wait_connected(5)
    assert client.closed
    assert client.flush(1) is False
    assert SMQClient is SmqClient


def test_wrong_arguments_are_named(url, make_client):
    client = make_client(url)
    for call, word in [
        (lambda: SmqClient("ftp://host/"), "url .ftp://host/. .*must look like"),
        (lambda: SmqClient(url, uid="short"), "uid"),
        (lambda: SmqClient(url, pung=1), "pung"),
        (lambda: SmqClient(url, timeout=0), "timeout"),
        (lambda: SmqClient(url, ping=-1), "ping"),
        (lambda: SmqClient(url, pong=float("nan")), "pong"),
        (lambda: SmqClient(url, reconnect_delay="5"), "reconnect_delay must be a number"),
        (lambda: SmqClient(url, queue_bytes=True), "queue_bytes"),
        (lambda: client.publish("x", None), "topic"),
        (lambda: client.publish("x", True), "topic"),
        (lambda: client.publish("x", 0), "topic"),
        (lambda: client.publish({1, 2}, "t"), "data"),
        (lambda: client.subscribe("t", 3.5), "subtopic"),
        (lambda: client.subscribe("t", onmessage=print), "onmessage"),
        (lambda: client.subscribe("t", datatype="xml"), "xml"),
        (lambda: client.create("x" * 70000), "topic"),
    ]:
        with pytest.raises(ArgumentError, match=word):
            call()


def test_tls_is_verified(start_broker, make_client, tmp_path):
    from smqrt.transport.tls_contexts import self_signed_pair
    from tests.support.pki import server_context

    cert, key = self_signed_pair("127.0.0.1", tmp_path)
    broker = start_broker(context=server_context(cert, key))
    for url in (broker.url, broker.ws_url):
        distrustful = make_client(url)
        assert not distrustful.wait_connected(5)
        assert (distrustful.end.word, distrustful.end.can_reconnect) == ("sslnottrusted", False)
        assert make_client(url, verify=False).wait_connected(5)
        trusting = make_client(url, cafile=cert)
        assert trusting.wait_connected(5)
        received = Queue()
        trusting.subscribe("t", onmsg=collect(received))
        trusting.publish(bytes(60000), "t")
        assert received.get(timeout=5)[0] == bytes(60000)


def test_a_certificate_for_another_name_is_not_trusted(start_broker, make_client, tmp_path):
    from smqrt.transport.tls_contexts import self_signed_pair
    from tests.support.pki import server_context

    cert, key = self_signed_pair("somewhere.example", tmp_path)
    broker = start_broker(host="127.0.0.2", context=server_context(cert, key))
    client = make_client(broker.url, cafile=cert)
    assert not client.wait_connected(5)
    assert client.end.word == "sslnottrusted"


@pytest.mark.parametrize("patched", [False, True])
def test_it_works_with_and_without_monkey_patching(broker, patched):
    script = textwrap.dedent(f"""
        if {patched}:
            from gevent import monkey; monkey.patch_all()
        from smqrt.client import SmqClient
        import json, gevent
        got = []
        with SmqClient({broker.url!r}) as client:
            client.subscribe("t", onmsg=lambda data, *_: got.append(data.decode()))
            client.publish("hi", "t")
            assert client.flush(5)
            gevent.sleep(0.05)
        print(json.dumps(got))
    """)
    result = []

    def run():
        result.append(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20))

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: not thread.is_alive(), 25)
    assert result[0].returncode == 0, result[0].stderr
    assert json.loads(result[0].stdout) == ["hi"]


def test_ends_are_exceptions_with_words():
    assert isinstance(ConnectionEnd("pong", "no answer"), Exception)


def test_on_gives_messages_that_can_be_replied_to(url, make_client):
    replies, texts = Queue(), Queue()
    lamp, asker = make_client(url), make_client(url)

    @lamp.on("lamp", "set")
    def set_lamp(message):
        texts.put((message.text, message.data, message.json, message.etid, message.topic))
        message.reply({"now": message.json})

    @asker.on("self")
    def answered(message):
        replies.put((message.json, message.subtid))

    assert callable(set_lamp)
    assert lamp.flush(5)
    asker.publish({"on": True}, "lamp", "set")
    expected = ('{"on":true}', b'{"on":true}', {"on": True})
    assert texts.get(timeout=5) == (*expected, asker.gettid(), "lamp")
    assert replies.get(timeout=5) == ({"now": {"on": True}}, asker.subtopic2tid("set"))


def test_request_finds_its_answer_among_many(url, make_client):
    server, asker = make_client(url), make_client(url)
    general = Queue()
    asker.subscribe("self", onmsg=collect(general))

    @server.on("self")
    def double(message):
        gevent.spawn_later(0.01 * (5 - message.json), message.reply, 2 * message.json)

    assert server.wait_connected(5)
    asked = [gevent.spawn(asker.request, server.gettid(), n) for n in range(5)]
    assert [job.get(timeout=5).json for job in asked] == [0, 2, 4, 6, 8]
    assert general.empty()


def test_the_server_and_its_clients_ask_each_other(broker, url, make_client):
    client = make_client(url)
    broker.smq.on("self")(lambda message: message.reply(message.json + 1))
    client.on("self")(lambda message: message.reply(message.text.upper()))
    assert client.request(1, 41).json == 42
    assert broker.smq.request(client.gettid(), "hello").text == "HELLO"


def test_request_may_be_asked_in_a_callback(url, make_client):
    server, asker, answers = make_client(url), make_client(url), Queue()
    server.on("self")(lambda message: message.reply(message.text + "!"))
    assert server.wait_connected(5)
    asker.on("start")(lambda message: answers.put(asker.request(server.gettid(), message.text).text))
    asker.publish("hello", "start")
    assert answers.get(timeout=5) == "hello!"


def test_request_without_an_answer(broker, url, make_client):
    client = make_client(url)
    with pytest.raises(NoAnswer, match="no answer from 1 in 0.05 s"):
        client.request(1, "x", 0.05)
    job = gevent.spawn(client.request, 1, "x", 5)
    gevent.sleep(0)
    assert client.flush(5), "the broker has the question"
    broker.close()
    with pytest.raises(NoAnswer, match="connection is lost"):
        job.get(timeout=2)


def test_what_is_no_number_is_null(url, make_client):
    received = Queue()
    client = make_client(url)
    client.subscribe("t", onmsg=collect(received))
    client.publish({"a": [float("nan"), float("inf"), 1.5]}, "t")
    client.pubjson(float("nan"), "t")
    assert [received.get(timeout=5)[0] for _ in range(2)] == [b'{"a":[null,null,1.5]}', b"null"]
