"""Commits of pipelines: once, whatever happens to the hub meanwhile."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt import hub
from smqrt.errors import ArgumentError, JournalError
from smqrt.http.disk import DiskIo
from smqrt.http.tree import ResourceReader
from smqrt.journal import announcer, committed, files, manifest, readers, writer
from smqrt.journal import commit as commits
from smqrt.journal.commit import RowDecoder, commit, publish, report_progress
from smqrt.journal.files import HubAddress
from smqrt.journal.reader import Journal
from smqrt.journal.service import JournalService
from tests.http.http_bench import Bench
from tests.journal.test_remote import BUSY, ok, there
from tests.support.device import bounded
from tests.support.scripted_http import CLOSE, ScriptedHttp

ROWS: list[commits.OutRow] = [
    (b"agg/a", None, b"1"),
    (b"agg/b", b"minute", b""),
    ("größe".encode(), None, b"\0" * 3000),
]
STORED = ok(b'{"stored": true, "rows": 3}')
REPOSITORY = Path(__file__).parents[2]
DUPLICATE = ok(b'{"stored": false, "rows": 0}')


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """A process that starts again takes its time when others want the machine too."""
    with bounded(100):
        yield


class Running:
    """A hub with a journal, served by this process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal"
        self.bench = Bench()
        self.smq = hub.create(journal={"path": str(self.path), "name": "main"})
        rtl = ResourceReader("rtl", 127, io=DiskIo(folder))
        rtl.insert(JournalService(writer.opened))
        self.bench.root.insert(rtl)
        self.url = f"http://127.0.0.1:{self.bench.listener.address[1]}/rtl/journal/main"
        announcer.announce(self.path, self.url)

    def rows(self) -> list[tuple[str | None, str | None, bytes, str | None]]:
        self.smq.journal.flush()
        journal = Journal(self.path)
        return [(row.topic, row.subtopic, row.payload, row.txn) for row in journal.rows({}, journal.end())]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.bench.close()
    writer.close_all()


def expected(txn: str | None) -> list[Any]:
    return [(topic.decode(), below and below.decode(), payload, txn) for topic, below, payload in ROWS]


def test_rows_are_stored_once(running: Running) -> None:
    address = HubAddress.of(running.path)
    assert there(lambda: commit(address, "q", 4, ROWS)) is True
    assert there(lambda: commit(address, "q", 4, ROWS)) is False
    assert there(lambda: commit(address, "q", 3, ROWS)) is False
    assert there(lambda: commit(address, "other", 4, iter(ROWS))) is True
    assert running.rows() == expected("q:4") + expected("other:4")


def test_rows_of_no_batch(running: Running) -> None:
    address = HubAddress.of(running.url, files.journal_token(running.path))
    there(lambda: publish(address, ROWS))
    there(lambda: publish(address, ROWS))
    assert running.rows() == expected(None) * 2


@pytest.mark.parametrize("over", ["folder", "http"])
def test_progress(running: Running, over: str) -> None:
    address = HubAddress.of(running.path)
    if over == "http":
        address = HubAddress.of(address.url, address.token)
    there(lambda: report_progress(address, "q-1", "hot", {"n1": 5, "n2": 7}))
    assert {each.name: each.offset for each in readers.load(running.path)} == {"q-1": {"n1": 5, "n2": 7}}
    with pytest.raises((ArgumentError, JournalError), match="is not the id of a query"):
        there(lambda: report_progress(address, "../q", "hot", {}))


def test_the_hub_decodes_what_is_sent() -> None:
    decoder = RowDecoder(1 << 20)
    assert list(decoder.feed(commits.encode(ROWS))) == ROWS
    decoder.finish()


@pytest.mark.parametrize("row", [(b"", None, b"x"), (b"t" * 65536, None, b"x"), (b"t", b"s" * 65536, b"")], ids=len)
def test_names_that_can_not_be_sent(row: commits.OutRow) -> None:
    with pytest.raises(ArgumentError, match="row 2: its topic is empty, or a name is longer than 65535 bytes"):
        commits.encode([ROWS[0], row])


# ---- where the hub is


def test_no_hub(tmp_path: Path) -> None:
    address = HubAddress.of(tmp_path)
    with pytest.raises(JournalError, match=rf"No hub serves {tmp_path}; start it with `smqrt serve`"):
        _ = address.url
    with pytest.raises(JournalError, match=rf"hasn't answered for 0\.2 s \(No hub serves {tmp_path}"):
        commit(address, "q", 1, ROWS, retry_s=0.2)
    (tmp_path / "hub.json").write_text("{}")
    with pytest.raises(JournalError, match=rf"{tmp_path}/hub.json can't be read"):
        _ = address.token


def test_an_address_without_a_token() -> None:
    with pytest.raises(JournalError, match="needs a token"):
        HubAddress.of("http://127.0.0.1:1/rtl/journal/x")


def test_a_wrong_token(running: Running) -> None:
    with pytest.raises(JournalError, match="wrong token"):
        there(lambda: commit(HubAddress.of(running.url, "x" * 40), "q", 1, ROWS))


def test_what_the_hub_refuses(running: Running) -> None:
    with pytest.raises(JournalError, match="query: 'a b' is not the id of a query"):
        there(lambda: commit(HubAddress.of(running.path), "a b", 1, ROWS))
    assert there(lambda: commit(HubAddress.of(running.path), "q", 1, ROWS)) is True


def announce(folder: Path, server: ScriptedHttp) -> None:
    values = {"url": f"{server.url}/rtl/journal/x", "token": f"t{server.port}", "pid": 1}
    manifest.write_json(folder / "hub.json", values)


@pytest.mark.parametrize("trouble", [[CLOSE], [BUSY], [STORED[:-5], CLOSE]], ids=["closed", "busy", "answer lost"])
def test_a_hub_that_restarts_elsewhere(tmp_path: Path, trouble: list[Any]) -> None:
    """hub.json is read anew for every try; the batch is sent again, with the same number."""
    with ScriptedHttp([[DUPLICATE]]) as second:

        def move(_: Any) -> None:
            announce(tmp_path, second)

        with ScriptedHttp([[move, *trouble]]) as first:
            announce(tmp_path, first)
            assert there(lambda: commit(HubAddress.of(tmp_path), "q", 17, ROWS, retry_s=10)) is False
            assert first.bodies == second.bodies == [commits.encode(ROWS)]
        assert second.heads[0].startswith("POST /rtl/journal/x/commit?query=q&batch=17 HTTP/1.1")
        assert f"Authorization: Bearer t{second.port}" in second.heads[0]


def test_other_rows_use_a_separate_connection(tmp_path: Path) -> None:
    """One that is kept may have been closed by the hub: then nobody would know whether it took them."""
    with ScriptedHttp([[STORED, CLOSE]], [[STORED]]) as server:
        address = HubAddress.of(f"{server.url}/x", "token")

        def both() -> None:
            commit(address, "q", 1, ROWS, retry_s=0)
            publish(address, ROWS, retry_s=0)

        there(both)
        assert server.connections == 2


def test_rows_of_no_batch_are_not_sent_twice(tmp_path: Path) -> None:
    with ScriptedHttp([[STORED[:-5], CLOSE]]) as server:
        address = HubAddress.of(f"{server.url}/x", "token")
        with pytest.raises(JournalError, match="whether the hub has executed it is not known"):
            there(lambda: publish(address, ROWS, retry_s=5))
        assert server.connections == 1


SERVE = """
import sys
from pathlib import Path
import gevent
from tests.journal.test_commit import Running

running = Running(Path(sys.argv[1]))
print("ready", flush=True)
gevent.sleep(60)
"""


class Killable:
    """A hub in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._command = [sys.executable, "-c", SERVE, str(folder)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, cwd=REPOSITORY)
        assert self.process.stdout
        assert self.process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.servers
def test_a_hub_that_is_killed_amidst_commits(tmp_path: Path) -> None:
    """Killed while it takes a commit, and started again: every batch is stored once."""
    server, random_ = Killable(tmp_path), random.Random(5)
    address = HubAddress.of(tmp_path / "journal")
    kills: list[Any] = []
    for batch in range(60):
        if batch in (20, 40):
            kills.append(gevent.spawn_later(random_.uniform(0, 0.004), lambda: (server.kill(), server.start())))
        there(lambda: commit(address, "q", batch, ROWS, retry_s=80), 90)  # noqa: B023
    gevent.joinall(kills, raise_error=True)
    server.kill()
    journal = Journal(tmp_path / "journal")
    txns = [row.txn for row in journal.rows({}, journal.end()) if row.txn]
    assert txns == [f"q:{batch}" for batch in range(60) for _ in ROWS]


def test_parts_are_the_same_in_any_order() -> None:
    rows = [(f"t{number % 7}".encode(), b"s" if number % 2 else None, bytes([number]) * 10) for number in range(50)]
    assert list(commits.parts("q", rows)) == [("q", rows)]
    found = list(commits.parts("q", rows, 100))
    assert [name for name, _ in found] == [*(f"q.{number}" for number in range(1, len(found))), "q"]
    assert sorted(map(repr, (row for _, part in found for row in part))) == sorted(map(repr, rows))
    assert all(len(commits.encode(part)) <= 100 for _, part in found)
    assert list(commits.parts("q", rows[::-1], 100)) == found


def test_a_part_holds_so_many_messages_at_most() -> None:
    rows: list[commits.OutRow] = [(b"t", None, b"")] * (2 * commits.MAX_COMMIT_ROWS + 1)
    assert [(name, len(part)) for name, part in commits.parts("q", rows)] == [
        ("q.1", commits.MAX_COMMIT_ROWS), ("q.2", 1), ("q", commits.MAX_COMMIT_ROWS),
    ]  # fmt: skip


def test_a_part_holds_at_least_one_message() -> None:
    rows: list[commits.OutRow] = [(b"t", None, b"x" * 500), (b"u", None, b"y")]
    assert list(commits.parts("q", rows, 100)) == [("q.1", rows[1:]), ("q", rows[:1])]


# ---- rows as bytes


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1 << 20])
def test_rows_are_decoded_from_pieces_of_any_size(size: int) -> None:
    body, decoder, found = commits.encode(ROWS), RowDecoder(3000), list[commits.OutRow]()
    for at in range(0, len(body), size):
        found += decoder.feed(body[at : at + size])
        assert decoder.count == len(found)
    decoder.finish()
    assert found == ROWS


def test_a_row_has_its_lengths_before_its_parts() -> None:
    assert commits.encode([(b"ab", b"c", b"def")]) == b"\0\2ab\0\1c\0\0\0\3def"
    assert commits.encode([(b"t" * 65535, b"s" * 65535, b"")])[:2] == b"\xff\xff"
    assert commits.size_bytes((b"ab", b"c", b"def")) == 14
    assert commits.size_bytes((b"ab", None, b"def")) == 13
    assert (commits.MAX_PAYLOAD_BYTES, commits.MAX_NAME_BYTES) == (0xFFF0, 0xFFF7)


def test_a_row_that_is_not_whole_is_refused() -> None:
    body = commits.encode([ROWS[1]] * 2)
    for size in range(1, len(body)):
        decoder = RowDecoder(10)
        count = len(list(decoder.feed(body[:size])))
        if size == len(body) // 2:
            decoder.finish()
        else:
            with pytest.raises(ArgumentError, match=f"row {count + 1}: the body ends within this row"):
                decoder.finish()


def test_a_payload_of_exactly_the_limit_passes() -> None:
    body = commits.encode([(b"t", None, b"x" * 10)])
    assert list(RowDecoder(10).feed(body)) == [(b"t", None, b"x" * 10)]
    with pytest.raises(ArgumentError, match="row 1: the payload has 10 bytes; a message carries at most 9"):
        list(RowDecoder(9).feed(body[:9]))
    with pytest.raises(ArgumentError, match="row 2: the topic is empty"):
        list(RowDecoder(10).feed(body + b"\0\0"))


def test_rows_are_split_at_exactly_the_limit() -> None:
    rows: list[commits.OutRow] = [(b"t", None, b"x" * 11)] * 5
    assert [len(part) for part in commits.split(rows, 40)] == [2, 2, 1]
    assert [len(part) for part in commits.split(rows, 39)] == [1] * 5
    assert commits.is_one_part(rows, 100)
    assert not commits.is_one_part(rows, 99)
    assert list(commits.split([])) == [[]]
    most: list[commits.OutRow] = [(b"t", None, b"")] * 4096
    assert commits.is_one_part(most)
    assert not commits.is_one_part([*most, most[0]])
    assert (commits.MAX_PART_BYTES, commits.sort_key((b"t", None, b"x"))) == (1 << 20, (b"t", b"", b"x"))


# ---- limits


def test_commits_of_50000_queries_are_known() -> None:
    assert (committed.MAX_QUERIES, committed.STALE_S, commits.MAX_COMMIT_ROWS) == (50_000, 86_400.0, 4096)
