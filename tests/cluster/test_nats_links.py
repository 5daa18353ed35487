"""Links whose bytes travel in messages of NATS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smqrt.backplane.nats import portions
from tests.cluster.engines import NatsEngine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[NatsEngine]:
    made = NatsEngine(tmp_path, "max_payload: 4KB\n")
    try:
        yield made
    finally:
        made.close()


@pytest.mark.servers
def test_messages_that_are_larger_than_nats_takes(engine: NatsEngine) -> None:
    one, other = engine.place("one"), engine.place("other")
    engine.joined(one, other)
    publisher, subscriber = one.client(), other.client()
    subscriber.subscribe(b"topic")
    engine.until(lambda: one.wanted_by(b"topic"), "interest")
    sent = [bytes((65 + count % 26,)) * size for count, size in enumerate((1, 4000, 60_000, 300, 9000) * 20)]
    for data in sent:
        publisher.publish(b"topic", data)
    engine.until(lambda: len(subscriber.data) == len(sent), "all messages")
    assert subscriber.data == sent
    assert not any(one.hub.drops().values())


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 40))
def test_portions_hold_the_same_bytes(runs: list[bytes], portion_bytes: int) -> None:
    made = [b"".join(pieces) for pieces in portions(runs, portion_bytes)]
    assert b"".join(made) == b"".join(runs)
    assert all(len(one) == portion_bytes for one in made[:-1])
    assert all(0 < len(one) <= portion_bytes for one in made[-1:])
