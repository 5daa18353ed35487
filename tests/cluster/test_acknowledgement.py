"""Acknowledgements of processed bytes, while the link waits repeatedly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.engines import Place, opened, pair

MESSAGES, SIZE_BYTES = 600, 7001
"""So that reads end within messages."""


def link(place: Place, engine: Any) -> Any:
    (found,) = engine.node_of(place).links.values()
    return found


@pytest.mark.parametrize("name", ["tcp", "unix", pytest.param("nats", marks=pytest.mark.servers)])
def test_exactly_the_processed_bytes_are_acknowledged(name: str, tmp_path: Path) -> None:
    with opened(name, tmp_path) as engine:
        one, other = pair(engine)
        sending, receiving = link(one, engine), link(other, engine)
        subscriber, delivered = other.client(), [0]
        before: list[tuple[int, int]] = []
        put = subscriber.ear.put

        def deliver(run: bytes) -> None:
            before.append((delivered[0], receiving.transport.processed_bytes))
            delivered[0] += len(run) // SIZE_BYTES
            if len(before) % 10 == 0:
                receiving.transport.defer()
            put(run)

        subscriber.ear.put = deliver  # type: ignore[method-assign]
        subscriber.subscribe(b"topic")
        engine.until(lambda: one.wanted_by(b"topic"), "interest")
        publisher = one.client()
        for count in range(MESSAGES):
            publisher.publish(b"topic", b"x" * SIZE_BYTES)
            if count % 20 == 0:
                engine.settle()
        engine.until(lambda: len(subscriber.data) == MESSAGES, "all messages")
        for count, processed_bytes in before:
            assert sending.sent_bytes - processed_bytes >= (MESSAGES - count) * SIZE_BYTES, "this run is in work"
        engine.until(lambda: not sending.unacked, "everything was acknowledged")
        assert sending.unacked_bytes < 1000, "pings alone"
