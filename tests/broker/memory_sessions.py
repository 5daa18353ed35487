"""Sessions without sockets, and what they meet: rights, a disk, and send queues that count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smqrt.auth.identity import Action, Identity
from smqrt.broker.deferred import Deferred
from smqrt.broker.outbox import dirty
from smqrt.broker.sessions import Session
from smqrt.errors import CloseReason
from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.broker.memory_clients import Crowd, Ear, heard, settle


class CountingEar(Ear):
    """Counts how often its client was to be read again, and was accepted."""

    resumed = accepted = 0

    def settled(self) -> None:
        self.accepted += 1

    def resume(self) -> None:
        self.resumed += 1


class NumbersEar(CountingEar):
    takes_fragments = False


class Rights:
    """Permits what it was made with: (action, name)."""

    def __init__(self, *permitted: tuple[Action, bytes]) -> None:
        self.permitted = set(permitted)

    def permits(self, identity: Identity, name: bytes, *actions: Action) -> bool:
        return any((action, name) in self.permitted for action in actions)

    def permits_filter(self, identity: Identity, topic_filter: bytes, action: Action) -> bool:
        return False


class Disk:
    """A store of names that says when one is safe."""

    def __init__(self) -> None:
        self.pending: list[Deferred[None]] = []

    def load(self, kind: str) -> list[tuple[bytes, int]]:
        return []

    def add(self, kind: str, name: bytes, number: int) -> None:
        self.pending.append(Deferred())

    def unsaved(self, kind: str, name: bytes) -> Deferred[None] | None:
        return self.pending[-1] if self.pending and not self.pending[-1].done else None

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    settle()
    dirty.clear()


def opened(crowd: Crowd, identity: Identity | None = None, ear: Ear | None = None) -> Session:
    """A session that has sent nothing."""
    session = Session(crowd.broker, ear or CountingEar(), 5)
    session.identity = identity
    return session


def came(session: Session) -> list[bytes]:
    settle()
    return heard(session)


def connected(crowd: Crowd, uid: bytes = b"device", identity: Identity | None = None) -> Session:
    session = opened(crowd, identity)
    session.control(smq.connect(uid))
    came(session)
    return session


def names(kind: Type, *names: bytes) -> list[bytes]:
    return [smq.with_name(kind, name) for name in names]


def ends(crowd: Crowd, reason: CloseReason) -> int:
    return crowd.broker.stats.ends[reason]


def with_disk() -> tuple[Crowd, Disk, Session, CountingEar]:
    crowd, disk = Crowd(), Disk()
    crowd.broker.keep_names_in(disk)
    session = opened(crowd, ear=(ear := CountingEar()))
    session.control(smq.connect(b"device"))
    came(session)
    return crowd, disk, session, ear


def fragment(number: int, session: Session, payload: bytes) -> bytes:
    return bytes((Type.PUBFRAG,)) + smq.publish_frame(number, session.etid, 9, payload)[3:]
