"""Hot restart as clients and operators meet it: real processes, real sockets."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.wire import smq as wire
from smqrt.wire import websocket
from smqrt.wire.smq import Type
from tests.server.restart.hot import HotServed, application, has_ended, heard
from tests.support.device import RAW, WS, Device, connect_packet, masked, publish
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Serve = Callable[..., HotServed]


def test_clients_go_on_with_their_sessions(serve_hot: Serve, tmp_path: Path) -> None:
    served = serve_hot(application(tmp_path / "app"), "--tls-port", "0")
    listener = served.device(b"listen")
    met = listener.subscribe(b"met")
    raw, ws, tls = served.device(b"raw-01"), served.device(b"ws-001", WS), served.device(b"tls-01", "tls")
    assert [heard(listener) for _ in range(3)] == [(met, b"false")] * 3
    topic, sub = raw.subscribe(b"news"), raw.createsub(b"sport")
    assert ws.subscribe(b"news") == topic
    raw.send(*(wire.with_id(Type.OBSERVE, number) for number in (ws.etid, tls.etid, topic)))
    raw.expect(wire.change(topic, 2))
    etids = raw.etid, ws.etid
    served.restart()

    assert [heard(listener) for _ in range(3)] == [(met, b"true")] * 3  # the application knows them again
    tls.expect_end()  # bare: clients that get a Disconnect stay away
    raw.expect(wire.change(tls.etid, 0))
    raw.publish(topic, b"one", sub)
    assert [heard(one) for one in (raw, ws)] == [(topic, b"one")] * 2
    ws.publish(etids[0], b"to the etid")
    assert heard(raw) == (etids[0], b"to the etid")
    assert ws.ask(Type.CREATESUB, b"sport").number == sub
    echo = raw.create(b"echo")
    raw.publish(echo, b"x")
    assert heard(raw)[1] == b"echo:x"  # the application of the new process
    assert ws.ask(Type.SUBSCRIBE, b"secret").denied
    again = served.device(b"tls-01", "tls")
    assert again.subscribe(b"news") == topic
    raw.expect(wire.change(topic, 3))
    ws.disconnect()
    assert sorted([raw.receive(), raw.receive()]) == sorted([wire.change(etids[1], 0), wire.change(topic, 2)])
    # The process before told of nobody's end but that of the client over TLS, if it came to that.
    assert [heard(listener) for _ in range(2)] in ([(met, b"false"), (met, b"left")], [(met, b"left"), (met, b"false")])


def test_unfinished_input_is_transferred(serve_hot: Serve, tmp_path: Path) -> None:
    """Half a frame, half a WebSocket message in fragments, PubFrag packets, a request for a page, a queue."""
    served = serve_hot(application(tmp_path / "app", hello="hello"))
    reader, raw, ws, frag = (
        served.device(name, kind)
        for name, kind in ((b"reader", RAW), (b"raw-01", RAW), (b"ws-001", WS), (b"frag-1", RAW))
    )
    topic = reader.subscribe(b"news")
    frame = wire.frame(publish(topic, raw.etid, b"raw"))
    message = publish(topic, ws.etid, b"websocket")
    page = socket.create_connection(("127.0.0.1", served.port))
    slow = served.device(b"slow-1")
    slow.subscribe(b"bulk")
    bulk = raw.create(b"bulk")
    for number in range(40):  # more than the buffers of a socket hold
        raw.publish(bulk, number.to_bytes(2, "big") * 32_000)
    raw.sync()

    middle = masked(message[5:9], websocket.CONTINUATION, fin=False)
    raw.send_bytes(frame[:7])
    ws.send_bytes(masked(message[:5], fin=False) + middle[:-2])
    frag.send(publish(0, frag.etid, b"in ", kind=Type.PUBFRAG))
    page.sendall(b"GET /hello.lsp HTTP/1.1\r\nHost: te")
    for one in (frag, reader):
        one.sync()
    served.restart()

    raw.send_bytes(frame[7:])
    assert heard(reader) == (topic, b"raw")
    ws.send_bytes(middle[-2:] + masked(message[9:], websocket.CONTINUATION))
    assert heard(reader) == (topic, b"websocket")
    frag.send(publish(topic, frag.etid, b"pieces", kind=Type.PUBFRAG))
    assert heard(reader) == (topic, b"in pieces")
    page.sendall(b"st\r\nConnection: close\r\n\r\n")
    answer = b""
    while data := page.recv(4096):
        answer += data
    page.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert answer.endswith(b"hello")
    received = [heard(slow)[1][:2] for _ in range(16)]
    assert received == [number.to_bytes(2, "big") for number in range(16)]


def test_the_old_process_continues_when_the_new_fails(serve_hot: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app")
    served = serve_hot(app, "--restart-load-s", "15")
    device = served.device()
    topic = device.subscribe(b"news")
    for preload, why in (("this is no Lua", "application app: "), ("while true do ba.sleep(100) end", "sent nothing")):
        (app / ".preload").write_text(preload)
        os.kill(served.pid, signal.SIGUSR2)
        served.wait_for(f"restart: failed, this process continues: .*{why}")
        failed = re.findall(r"restart: process (\d+) starts", served.output)[-1]
        assert has_ended(int(failed)), "the next restart may end who looks after it"
        device.publish(topic, b"still here")
        assert heard(device) == (topic, b"still here")
    application(app)
    served.restart()
    device.publish(topic, b"now")
    assert heard(device) == (topic, b"now")


def test_a_server_that_is_stopped_meanwhile_has_no_successor(serve_hot: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app")
    served = serve_hot(app, "--restart-socket", tmp_path / "r.sock")
    device = served.device()
    (app / ".preload").write_text('print "it loads" while true do ba.sleep(100) end')
    os.kill(served.pid, signal.SIGUSR2)
    child = int(served.wait_for(r"restart: process (\d+) starts")[1])
    served.wait_for("it loads")
    os.kill(served.pid, signal.SIGTERM)
    assert served.process.wait(served.stop_s) == 0
    wait_until(lambda: has_ended(child), "the end of the new process")
    device.until_end()


def test_a_handshake_under_way_finishes_at_the_old_process(serve_hot: Serve, tmp_path: Path) -> None:
    served = serve_hot(application(tmp_path / "app"))
    port = served.port
    waiting = Device(("127.0.0.1", port), RAW).start(target="/smq.lsp")
    os.kill(served.pid, signal.SIGUSR2)
    served.wait_for(r"restart: process \d+ starts")
    waiting.send(connect_packet(b"waited"))
    waiting.accepted()
    topic = waiting.subscribe(b"news")
    served.next_process()
    waiting.publish(topic, b"here")
    assert heard(waiting) == (topic, b"here")


def test_ended_processes_are_distinguished() -> None:
    assert has_ended(1 << 22)
    assert not has_ended(os.getpid())
