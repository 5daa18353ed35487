"""The identity of a worker: number, label, and files of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from smqrt import app, hub
from smqrt.errors import ArgumentError
from smqrt.workers.worker_rpc import WorkerPlace, next_place, take_place, worker_place


@pytest.fixture
def second() -> Iterator[WorkerPlace]:
    """This process is the second one of three."""
    take_place(place := WorkerPlace(1, 3, b"s" * 32, Path("/run/x")))
    yield place
    take_place(WorkerPlace())


def test_a_process_is_alone() -> None:
    alone = worker_place()
    assert (alone.number, alone.count, alone.label, alone.is_first) == (0, 1, "", True)
    assert alone.share(7) == 7
    assert alone.own_file("a") == "a"
    assert app.worker is alone


def test_a_worker_has_number_and_label(second: WorkerPlace) -> None:
    assert app.worker is second
    assert second.label == "w1"
    assert not second.is_first
    assert (second.share(0), second.share(7), second.share(9)) == (0, 3, 3)
    assert second.socket_path(2) == Path("/run/x/worker-2.sock")
    assert next_place(second).start == 1
    assert "ssss" not in repr(second), "secrets are not for logs"


def test_each_worker_has_its_own_file(tmp_path: Path, second: WorkerPlace) -> None:
    names, journal = str(tmp_path / "names"), str(tmp_path / "journal")
    take_place(WorkerPlace(0, 3))
    first = hub.create(persist=names, journal={"path": journal, "name": "a"})
    with pytest.raises(ArgumentError):
        hub.create(persist=names)
    take_place(second)
    other = hub.create(persist=names, journal={"path": journal, "name": "b"})
    assert sorted(one.name for one in (tmp_path / "journal" / "wal").iterdir()) == ["n1", "n1-w1"]
    assert (tmp_path / "names").exists()
    assert (tmp_path / "names.w1").exists()
    for one in (first, other):
        one.shutdown()
