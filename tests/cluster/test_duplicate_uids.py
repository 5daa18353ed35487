"""One uid at two nodes that do not know each other, as a third node sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from smqrt.errors import CloseReason
from tests.cluster.engines import Engine, Place, opened


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Engine, Place, Place, Place]]:
    """Two nodes that have no link to each other, and one that has links to both."""
    with opened("memory", tmp_path) as engine:
        one, other, both = (engine.place(name, number=number) for number, name in enumerate("abc", 1))
        engine.joined(one, other, both)
        engine.cut(one, other)
        yield engine, one, other, both


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_equal_stamps_are_decided_by_the_greater_node(
    places: tuple[Engine, Place, Place, Place], order: tuple[int, int]
) -> None:
    engine, *nodes, both = places
    etids = {}
    for number in order:
        etids[number] = nodes[number].client(b"the same").etid
        engine.settle()
    holder = both.member.holder(b"the same")
    assert holder is not None
    assert holder.etid == etids[1]


def test_the_previous_client_regains_the_uid(places: tuple[Engine, Place, Place, Place]) -> None:
    engine, one, other, both = places
    first, second = one.client(b"the same"), other.client(b"the same")
    engine.settle()
    second.session.disconnect(CloseReason.PEER_CLOSED)
    engine.settle()
    holder = both.member.holder(b"the same")
    assert holder is not None
    assert holder.etid == first.etid
    first.session.disconnect(CloseReason.PEER_CLOSED)
    engine.settle()
    assert both.member.holder(b"the same") is None
    assert not both.member.clients.holders


def test_peers_lists_a_uid_once(places: tuple[Engine, Place, Place, Place]) -> None:
    """A node that starts again lists its clients at once; that its former self is dead others notice seconds later."""
    engine, one, other, both = places
    one.client(b"the same")
    other.client(b"another one")
    engine.settle()
    second = other.client(b"the same")
    engine.settle()

    def listed() -> list[tuple[bytes, int]]:
        return sorted((peer.uid, peer.etid) for peer in both.hub.peers(True) if peer is not both.hub.server)

    assert len(both.member.phantoms) == 3
    assert [uid for uid, _ in listed()] == [b"another one", b"the same"]
    assert (b"the same", second.etid) in listed()
    here = both.client(b"the same")
    assert (b"the same", here.etid) in listed()
    assert len(listed()) == 2
    assert {uid for uid, _ in listed()} == {peer.uid for peer in one.hub.peers(True) if peer is not one.hub.server} | {
        b"another one"
    }
