"""Passes a connection on to a server on this machine, both ways, byte for byte."""

import gevent
from gevent.pool import Pool

from smqrt.app import HttpError
from smqrt.errors import StreamError
from smqrt.transport.stream import Stream

MOST = 1000  # connections at once
WAIT_S = 10  # for a server that starts
PASSED = ("SimpleMQ", "SendSmqHttpResponse", "Connection", "Upgrade", "Sec-WebSocket-Key", "Sec-WebSocket-Version")


class Relay:
    def __init__(self):
        self._pool = Pool(MOST)

    def run(self, request, port):
        """Take the connection of a request for SMQ, and pass it on, in greenlets of its own.

        Args:
            request: of a browser or a device.
            port: a function that gives the port of the server, None while it doesn't run.

        Raises:
            HttpError: 403, a page of another host; 503, too many connections.
        """
        request.access.check_origin(request)
        if self._pool.full():
            raise HttpError(503, "Too many connections.")
        taken = request.detach()
        taken.watcher.close()
        self._pool.spawn(connect, Stream(taken.transport, taken.data), request, port)

    def close(self):
        self._pool.kill()


def connect(visitor, request, port):
    server = None
    try:
        if server := reach(port):
            server.push(head(request))
            both_ways(visitor, server)
    except StreamError:
        pass  # it has just died; the visitor comes again
    finally:
        visitor.close()
        if server:
            server.close()


def reach(port):
    """A connection to the server as soon as it runs; None when it doesn't."""
    for _ in range(WAIT_S * 10):
        if number := port():
            try:
                return Stream.connect("127.0.0.1", number, timeout_s=3)
            except StreamError:
                pass  # it has just died
        gevent.sleep(0.1)
    return None


def head(request):
    lines = [f"{name}: {value}" for name in PASSED if (value := request.get(name)) is not None]
    return "\r\n".join(["GET /smq HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode("latin-1")


def both_ways(visitor, server):
    back = gevent.spawn(pump, server, visitor)
    try:
        pump(visitor, server)
    finally:
        back.kill()


def pump(source, target):
    try:
        while data := source.read():
            target.write(data, timeout_s=30)
    except StreamError:
        pass  # one of them is gone, and the other goes
    finally:
        source.close()
        target.close()
