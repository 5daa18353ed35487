"""The network of `smqrt journal replay`: a client that publishes, and waits as gevent does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import gevent

from smqrt.cli.connect import Failure, RefusedByBroker, failure, open_client
from smqrt.cli.terminal import only_this_greenlet
from smqrt.client import SmqClient
from smqrt.errors import ArgumentError, ClosedError
from smqrt.journal.inspect import Recorded
from smqrt.journal.replay import Publish
from smqrt.journal.timestamps import iso
from smqrt.wire.smq import MAX_PAYLOAD_BYTES

_BACKLOG_BYTES = 1 << 18
_SCHEMES = {"smq://": "http://", "smqs://": "https://"}


@contextmanager
def publishing(url: str, **connection: Any) -> Iterator[tuple[Publish, Callable[[float], object], int]]:
    """Connects to a hub; at the end it has got everything.

    Args:
        url: the hub's address.
        connection: as `open_client` takes it.

    Returns:
        What publishes, what waits some seconds, and how long a payload may be, bytes.

    Raises:
        Failure: no connection, a lost one, or the hub refuses messages.
    """
    for scheme, known in _SCHEMES.items():
        url = known + url.removeprefix(scheme) if url.startswith(scheme) else url
    with only_this_greenlet(), open_client(url, **connection) as client:
        yield _publisher(client), gevent.sleep, MAX_PAYLOAD_BYTES
        if not client.flush():
            raise failure(client.end)
        if client.dropped:
            raise RefusedByBroker(f"the hub refused {client.dropped} messages")


@contextmanager
def position(rows: Iterable[Recorded]) -> Iterator[Iterator[Recorded]]:
    """Yields the same rows; who interrupts what takes them is told where to go on.

    Raises:
        KeyboardInterrupt: it came, and says so.
    """
    at_us: int | None = None

    def noted() -> Iterator[Recorded]:
        nonlocal at_us
        for recorded in rows:
            at_us = recorded.row.ts_us
            yield recorded

    try:
        yield noted()
    except KeyboardInterrupt as interrupt:
        where = "Nothing was published yet." if at_us is None else f"--from {iso(at_us)} goes on."
        raise type(interrupt)(f"Interrupted. {where}") from None


def _publisher(client: SmqClient) -> Publish:
    def publish(topic: str, subtopic: str | None, payload: bytes) -> None:
        try:
            client.publish(payload, topic, subtopic)
        except ArgumentError as error:
            raise Failure(str(error)) from None
        except ClosedError:
            raise failure(client.end) from None
        if client.backlog_bytes > _BACKLOG_BYTES and not client.flush():
            raise failure(client.end)
        if not client.connected:
            raise failure(client.end)

    return publish
