"""SMQ client for MicroPython, in one file; the page "Devices" of smqrt's manual describes it."""

import os
import select
import socket
import struct
import sys
import time

_INIT, _CONNECT, _CONNACK, _SUBSCRIBE, _SUBACK, _CREATE, _CREATEACK, _PUBLISH, _UNSUBSCRIBE = range(1, 10)
_DISCONNECT, _PING, _PONG, _CREATESUB, _CREATESUBACK = 11, 12, 13, 17, 18
_SIZES = {1: 8, _CONNACK: 8, _SUBACK: 8, _CREATEACK: 8, 18: 8, _PUBLISH: 15, 11: 3, _PING: 3, _PONG: 3}  # at least


def _bytes(value):
    return value.encode() if isinstance(value, str) else value


def _after(seconds):
    return time.ticks_add(time.ticks_ms(), int(seconds * 1000))


class SmqClient:
    """A client that connects, reconnects, sends, and calls functions while `poll` runs.

    Attributes: `connected`, `closed`, `etid`, `dropped` (lost and too large messages), options (seconds, bytes).
    """

    uid = onauth = onconnect = onreconnect = onclose = onmsg = tls = None
    info, headers, reconnect, max_message, queue_bytes = sys.platform, "", True, 2048, 2048
    timeout, ping, pong, reconnect_delay, reconnect_delay_max = 5, 120, 10, 5, 60
    closed, dropped, _failures, _was_connected, _sock, _ponged = False, 0, 0, False, None, None

    def __init__(self, url, **options):
        for name in options:
            getattr(SmqClient, name)  # an AttributeError names an unknown option
            setattr(self, name, options[name])
        scheme, _, rest = url.partition("://")
        authority, _, path = rest.partition("/")
        self._host, _, port = authority.partition(":")
        if scheme != ("https" if self.tls else "http"):
            raise ValueError("the URL must begin with http, or with https and the option tls: " + url)
        self._port = int(port or (443 if self.tls else 80))
        self._request = f"GET /{path} HTTP/1.1\r\nHost: {authority}\r\nSimpleMQ: 1\r\n{self.headers}\r\n".encode()
        self.uid = _bytes(self.uid or "".join(f"{byte:02x}" for byte in os.urandom(8)))
        self._at, self._buffer = time.ticks_ms(), memoryview(bytearray(self.max_message + 12))
        self._handlers, self._queue, self._poller, self._task = {}, [], select.poll(), self._run()
        self._shut()

    def publish(self, data, topic, subtopic=None):
        """Queue str or bytes for a topic or etid. Return False when the queue is full or the client is closed."""
        data = _bytes(data)
        if len(data) > 0xFFF0:
            raise ValueError(f"a message has at most 65520 bytes, not {len(data)}")
        queued_bytes = sum(len(message[2]) + 32 for message in self._queue)  # 32 for the tuple
        if self.closed or (self._queue and queued_bytes + len(data) > self.queue_bytes):
            return False
        self._queue.append((_bytes(topic), _bytes(subtopic), data))
        return True

    def subscribe(self, topic, subtopic=None, onmsg=None, onack=None):
        """Receive `onmsg(data, ptid, tid, subtid)`, also after reconnects; `onack(accepted, topic, tid)` comes once."""
        topic, subtopic = _bytes(topic), _bytes(subtopic)
        self._handlers[topic, subtopic] = [onmsg, onack]
        if self.connected:
            self._number(_CREATESUB, subtopic, self._subtopics)
            if topic != b"self":
                self._send(_SUBSCRIBE, topic)

    def unsubscribe(self, topic):
        """End all subscriptions of a topic."""
        for key in [key for key in self._handlers if key[0] == _bytes(topic)]:
            del self._handlers[key]
        if self._topics.get(_bytes(topic)):
            self._send(_UNSUBSCRIBE, struct.pack(">I", self._topics[_bytes(topic)]))

    def close(self, timeout=5):
        """Send what is queued, then disconnect; return whether the broker has received it. In callbacks: `close(0)`."""
        end = _after(timeout)
        while not self._ponged and time.ticks_diff(end, time.ticks_ms()) > 0 and self.poll(100):
            if self.connected and not self._queue and not self._pinged and self._ponged is None:
                self._ponged = False
                self._send(_PING)
        self._send(_DISCONNECT)
        self._call(self._flush)
        self.closed = True
        self._shut()
        return bool(self._ponged)

    def poll(self, wait_ms=0):
        """Connect when it is time, send, and handle what arrives within `wait_ms`; return False after the end."""
        wait_ms, ready = max(0, min(wait_ms, time.ticks_diff(self._at, time.ticks_ms()))), None
        if self._sock:
            self._poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._fill() else 0))
            ready = self._poller.poll(wait_ms)
        elif not self.closed:
            time.sleep_ms(wait_ms)
        for _ in range(32):  # packets; then the program gets its turn
            if self.closed or not self._task.send(ready):
                break
        if self._sock and time.ticks_diff(self._at, time.ticks_ms()) <= 0:
            if not self.connected or self._pinged:
                self._task.throw(OSError("pong" if self.connected else "timeout"))
            else:
                self._pinged, self._at = True, _after(self.pong)
                self._send(_PING)
        return not self.closed

    def _run(self):
        """Run the connections. Yields when it has to wait for time or the socket, and True after each packet."""
        while True:
            try:
                yield from self._connection()
            except Exception as error:
                reason = str(error)
            delay = min(self.reconnect_delay * 2**self._failures, self.reconnect_delay_max)
            self._failures, self._at = min(self._failures + 1, 9), _after(delay * (1 - os.urandom(1)[0] / 512))
            self._shut()
            again = None if self.closed else self._call(self.onclose, reason, self._may_reconnect)
            self.closed = self.closed or not (self.reconnect and self._may_reconnect if again is None else again)
            while time.ticks_diff(self._at, time.ticks_ms()) > 0:
                yield

    def _shut(self):
        if self._sock:
            self._poller.unregister(self._sock)
            self._sock.close()
            self.dropped += len([frame for frame in self._out if frame[2] == _PUBLISH])
        self._sock, self._out, self.connected, self.etid = None, [], False, 0
        self._topics, self._subtopics = {}, {}  # numbers by name, and names by number

    def _connection(self):
        self._started, self._pinged, self._ponged, self._may_reconnect = None, False, None, True
        self._out, self._at = [self._request], _after(self.timeout)
        address = socket.getaddrinfo(self._host, self._port, 0, socket.SOCK_STREAM)[0]
        self._sock = socket.socket(*address[:3])
        self._sock.setblocking(False)
        try:
            self._sock.connect(address[-1])
        except OSError:
            pass  # EINPROGRESS; the first write raises other errors
        while not (yield):
            pass
        if self.tls:
            self._poller.unregister(self._sock)
            self._sock = self.tls.wrap_socket(self._sock, server_hostname=self._host, do_handshake_on_connect=False)
        while True:
            size, kind = struct.unpack(">HB", (yield from self._receive(3)))
            if size < _SIZES.get(kind, 0x10000):
                raise OSError("protocolerror" if self._started else "nonsmq")
            body = yield from self._receive(size - 3)
            self.dropped += len(body) < size - 3
            self._handle(kind if len(body) == size - 3 else None, body)
            yield True

    def _receive(self, size):
        used = 0
        while used < size:
            self._flush()
            start = used if size <= len(self._buffer) else 0  # a packet that is too large is not kept
            count = self._sock.readinto(self._buffer[start : start + size - used]) if self._sock else 0
            if count == 0:
                raise OSError("socketclosed")
            if count is None:
                yield
            used += count or 0
        return self._buffer[:size]

    def _send(self, kind, body=b""):
        self._out.append(struct.pack(">HB", len(body) + 3, kind) + body)

    def _flush(self):
        while self._sock and self._fill():
            count = self._sock.write(self._out[0])
            if count is None:
                return
            self._out[:1] = [self._out[0][count:]] if count < len(self._out[0]) else []

    def _fill(self):
        """Take messages from the queue when nothing else is to be sent; return whether there is something."""
        while self._queue and self.connected and not self._out:
            topic, subtopic, data = self._queue[0]
            tid = self._number(_CREATE, topic, self._topics)
            subtid = self._number(_CREATESUB, subtopic, self._subtopics)
            if tid is None or subtid is None:
                break
            self._queue.pop(0)
            if tid and (subtid or not subtopic):
                self._send(_PUBLISH, struct.pack(">III", tid, self.etid, subtid) + data)
            else:
                self.dropped += 1
        return bool(self._out)

    def _number(self, kind, name, table):
        """Return the number of a name, 0 when it is denied, None until the broker has answered."""
        if name is None or isinstance(name, int):
            return name or 0
        if name not in table:
            table[name] = None
            self._send(kind, name)
        return table[name]

    def _call(self, function, *arguments):
        try:
            return function(*arguments) if function else None
        except Exception as error:
            sys.print_exception(error)

    def _handle(self, kind, body):
        if kind == _INIT and not self._started:
            self._started = struct.unpack(">I", body[1:5])[0], str(body[5:], "utf-8")
            credentials = _bytes(self._call(self.onauth, *self._started) or b"")
            fields = b"\1", bytes([len(self.uid)]), self.uid, bytes([len(credentials)]), credentials, _bytes(self.info)
            self._send(_CONNECT, b"".join(fields))
        elif kind == _CONNACK and not self.connected:
            if body[0]:
                self._may_reconnect = body[0] == 2
                raise OSError(f"refused with code {body[0]}")
            self.connected, self.etid, self._failures = True, struct.unpack(">I", body[1:5])[0], 0
            self._topics = {b"self": self.etid, self.etid: b"self"}
            for key, handler in list(self._handlers.items()):
                self.subscribe(*key, *handler)
            onconnect, self._was_connected = self.onreconnect if self._was_connected else self.onconnect, True
            self._call(onconnect, self.etid, *self._started)
        elif kind == _DISCONNECT:
            self._may_reconnect = body == b"sysshutdown"
            raise OSError(str(body, "utf-8"))
        elif kind == _PUBLISH:
            tid, ptid, subtid = struct.unpack(">III", body[:12])
            key = self._topics.get(tid), self._subtopics.get(subtid or -1)
            handler = self._handlers.get(key) or self._handlers.get((key[0], None))
            self._call((handler and handler[0]) or self.onmsg, bytes(body[12:]), ptid, tid, subtid)
        elif kind == _PING and len(self._out) < 9:
            self._send(_PONG)
        elif kind in (_SUBACK, _CREATEACK, _CREATESUBACK):
            number, name = struct.unpack(">I", body[1:5])[0], bytes(body[5:])
            table = self._subtopics if kind == _CREATESUBACK else self._topics
            asked = name in table if kind != _SUBACK else any(key[0] == name for key in self._handlers)
            if asked and not table.get(name) and (number or kind != _SUBACK):
                table[number], table[name] = name, number
            for (topic, subtopic), handler in list(self._handlers.items()) if kind == _SUBACK else ():
                subtid = self._number(_CREATESUB, subtopic, self._subtopics)
                if topic == name and handler[1] and subtid is not None:
                    onack, handler[1] = handler[1], None
                    self._call(onack, bool(number and (subtid or not subtopic)), str(name, "utf-8"), number)
        elif kind == _PONG:
            self._pinged, self._ponged = False, None if self._ponged is None else True
        if self.connected and not self._pinged:
            self._at = _after(self.ping)
