"""Results that are staged by tasks and committed by name: decided once, published once, and bounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gevent
import pytest

from smqrt.journal import committed, service
from smqrt.journal.commit import commit_staged, last_batch, stage
from smqrt.journal.files import HubAddress
from tests.journal.shelf import Shelf, record

PART = f"{7:016x}.0"


def address(shelf: Shelf, token: str = "") -> HubAddress:
    url = f"http://127.0.0.1:{shelf.bench.listener.address[1]}/rtl/journal/main"
    return HubAddress.of(url, token or shelf.token)


def in_thread(function: Callable[..., object], *args: object) -> object:
    return gevent.get_hub().threadpool.apply(function, args)


def stage_payloads(shelf: Shelf, *payloads: bytes, batch: int = 0) -> list[str]:
    rows = [(b"t", None, payload) for payload in payloads]
    found = in_thread(stage, address(shelf), "q", batch, rows, 5.0)
    assert isinstance(found, list)
    return found


def commit_parts(
    shelf: Shelf, parts: list[str], batch: int = 0, before: Callable[[int], None] = lambda number: None
) -> None:
    in_thread(commit_staged, address(shelf), "q", batch, parts, 5.0, before)


def payloads(shelf: Shelf) -> list[bytes]:
    return [payload for _, _, payload, _ in shelf.rows()]


def folder(shelf: Shelf) -> Path:
    return shelf.writer.path / committed.STAGED_FOLDER


def test_what_is_staged_is_published_when_it_is_committed(shelf: Shelf) -> None:
    parts = [*stage_payloads(shelf, b"1", b"2"), *stage_payloads(shelf, b"3")]
    assert payloads(shelf) == []
    commit_parts(shelf, parts)
    assert shelf.rows() == [("t", None, b"3", "q.1:0"), ("t", None, b"1", "q:0"), ("t", None, b"2", "q:0")]
    assert not any(folder(shelf).iterdir()), "what was committed needs no room"
    commit_parts(shelf, stage_payloads(shelf, b"1", b"2", b"3"))
    assert len(payloads(shelf)) == 3, "the hub has this micro-batch"
    commit_parts(shelf, stage_payloads(shelf, b"4", batch=1), batch=1)
    assert payloads(shelf)[3:] == [b"4"]
    assert not any(folder(shelf).iterdir())


def test_a_repetition_publishes_the_sealed_parts(shelf: Shelf) -> None:
    class Killed(Exception):
        pass

    def kill(number: int) -> None:
        if number == 2:
            raise Killed

    parts = [name for payload in (b"1", b"2", b"3") for name in stage_payloads(shelf, payload)]
    with pytest.raises(Killed):
        commit_parts(shelf, parts, before=kill)
    assert payloads(shelf) == [b"2"]
    commit_parts(shelf, [*stage_payloads(shelf, b"3", b"2"), *stage_payloads(shelf, b"1")])
    assert sorted(payloads(shelf)) == [b"1", b"2", b"3"]
    assert last_batch(HubAddress.of(shelf.writer.path), "q") == 0


def test_parts_that_are_not_there(shelf: Shelf) -> None:
    assert "is not staged; stage the micro-batch again" in shelf.refused(
        400, "main/seal?query=q&batch=0", "POST", data=json.dumps([PART])
    )
    assert "is not staged" in shelf.refused(400, f"main/commit?query=q&batch=0&of=q&part={PART}", "POST")


@pytest.mark.parametrize("part", ["..%2f..%2ftoken", "sealed.json", "", "0123456789abcdef.0.x"])
def test_names_that_are_none(shelf: Shelf, part: str) -> None:
    for path in (f"stage?query=q&batch=0&part={part}", f"commit?query=q&batch=0&of=q&part={part}"):
        assert "is not the name of a part" in shelf.refused(400, f"main/{path}", "POST", data=record(b"t", b"x"))
    for body in (b"{}", b"[]", b"[", b'["x"]', b"[1]"):
        assert "part" in shelf.refused(400, "main/seal?query=q&batch=0", "POST", data=body)
    assert not folder(shelf).exists()


def test_no_token_stages_for_others(shelf: Shelf) -> None:
    path = shelf.writer.path / service.TOKENS_FILE
    path.write_text("site1 writer-of-some-topics write site1/#\n")
    path.chmod(0o600)
    where = f"main/stage?query=q&batch=0&part={PART}"
    gevent.sleep(service.TOKENS_CHECK_S)
    assert "may not write to 't'" in shelf.refused(
        403, where, "POST", data=record(b"t", b"x"), token="writer-of-some-topics"
    )
    body = record(b"site1/x", b"x")
    assert shelf.ask(where, "POST", data=body, token="writer-of-some-topics").json() == {"rows": 1}
    assert [path.name for path in folder(shelf).iterdir()] == ["q@site1"]


def test_there_is_a_limit(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed, "MAX_STAGED_BYTES", 5 * committed.MIN_PART_BYTES)
    for _ in range(4):
        stage_payloads(shelf, b"x")
    text = shelf.refused(503, f"main/stage?query=r&batch=0&part={PART}", "POST", data=record(b"t", bytes(40_000)))
    assert "of uncommitted results" in text
    commit_parts(shelf, stage_payloads(shelf, b"y", batch=1), batch=1)
    assert len(stage_payloads(shelf, bytes(40_000), batch=2)) == 1, "a commit makes room"
