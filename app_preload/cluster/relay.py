"""Relay of connections to a server on this machine, without changes of the data."""

import gevent
from gevent.pool import Pool

from smqrt.app import HttpError
from smqrt.errors import StreamError
from smqrt.transport.stream import Stream

MAX_CONNECTIONS = 1000
CONNECT_TIMEOUT_S = 10  # long enough for a server to start
FORWARDED_HEADERS = (
    "SimpleMQ",
    "SendSmqHttpResponse",
    "Connection",
    "Upgrade",
    "Sec-WebSocket-Key",
    "Sec-WebSocket-Version",
)


class Relay:
    def __init__(self):
        self._pool = Pool(MAX_CONNECTIONS)

    def run(self, request, port):
        """Forward the connection of a request for SMQ, in separate greenlets.

        Args:
            request: request of a browser or a device.
            port: function that returns the port of the server, or None while the server is not running.

        Raises:
            HttpError: 403 for a page of another host; 503 for too many connections.
        """
        request.access.check_origin(request)
        if self._pool.full():
            raise HttpError(503, "Too many connections.")
        detached = request.detach()
        detached.watcher.close()
        self._pool.spawn(forward, Stream(detached.transport, detached.data), request, port)

    def close(self):
        self._pool.kill()


def forward(client, request, port):
    server = None
    try:
        if server := connect(port):
            server.push(head(request))
            copy_both_ways(client, server)
    except StreamError:
        pass  # the server has just exited; the client reconnects
    finally:
        client.close()
        if server:
            server.close()


def connect(port):
    """Return a connection to the server as soon as it is running; None after the timeout."""
    for _ in range(CONNECT_TIMEOUT_S * 10):
        if number := port():
            try:
                return Stream.connect("127.0.0.1", number, timeout_s=3)
            except StreamError:
                pass  # the server has just exited
        gevent.sleep(0.1)
    return None


def head(request):
    lines = [f"{name}: {value}" for name in FORWARDED_HEADERS if (value := request.get(name)) is not None]
    return "\r\n".join(["GET /smq HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode("latin-1")


def copy_both_ways(client, server):
    responses = gevent.spawn(copy, server, client)
    try:
        copy(client, server)
    finally:
        responses.kill()


def copy(source, target):
    try:
        while data := source.read():
            target.write(data, timeout_s=30)
    except StreamError:
        pass  # one side has closed; close both
    finally:
        source.close()
        target.close()
