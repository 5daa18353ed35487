"""The same journal over HTTP: a real server in this process, readers in a thread beside it."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import gevent
import pytest

from smqrt.errors import JournalError
from smqrt.http.disk import DiskIo
from smqrt.http.tree import ResourceReader
from smqrt.journal import arrow, compact, files, manifest, parquet_files, remote, segment
from smqrt.journal.commit import commit
from smqrt.journal.files import HubAddress
from smqrt.journal.planning import Filter
from smqrt.journal.reader import Journal
from smqrt.journal.remote import RemoteJournal, open_journal
from smqrt.journal.service import JournalService
from tests.http.http_bench import Bench
from tests.journal import written
from tests.journal.test_reader import as_rows
from tests.support.scripted_http import CLOSE, ScriptedHttp

ROWS = 300
T = TypeVar("T")


def there(work: Callable[[], T], patience_s: float = 20) -> T:
    """Does something that blocks in a thread, while the server goes on here."""
    with gevent.Timeout(patience_s):
        return gevent.get_hub().threadpool.apply(work)


class Served:
    """A journal's folder that a server of this process serves, without anybody writing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def end(self) -> dict[str, int]:
        return {}

    def committed(self, query: str) -> int:
        return -1

    def read_other_commits(self) -> None:
        pass

    def queries(self) -> list[str]:
        return []


class Hub:
    """A server with a journal."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal"
        self.path.mkdir()
        self.token = files.journal_token(self.path)
        self.bench = Bench()
        self.requests: list[str] = []
        rtl = ResourceReader("rtl", 127, io=DiskIo(folder))
        service = JournalService({"main": Served(self.path)})
        rtl.insert(service)
        self.bench.root.insert(rtl)
        answer = service.func

        def counted(request: Any, relpath: str) -> Any:
            self.requests.append(relpath.removeprefix("main/"))
            return answer(request, relpath)

        service.setfunc(counted)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.bench.listener.address[1]}/rtl/journal/main"

    def open(self, **options: Any) -> RemoteJournal:
        found = open_journal(self.url, self.token, **{"retry_s": 0, **options})
        assert isinstance(found, RemoteJournal)
        return found


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(tmp_path)
    yield hub
    hub.bench.close()


def read(journal: Journal, start: dict[str, int], end: dict[str, int], most: int = 1 << 19, **options: Any) -> Any:
    plan = journal.plan(start, end, max_rows=most)
    return [row for part in plan for chunk in part for row in as_rows(journal.tables(chunk, **options))]


@pytest.mark.parametrize("seed", range(4))
def test_random_ranges(hub: Hub, seed: int) -> None:
    random_ = random.Random(seed)
    written.write(hub.path, written.random_ends(random_, ROWS))
    written.to_parquet(hub.path, sorted({random_.randint(1, ROWS) for _ in range(seed)}) or [])
    remote, here = hub.open(), Journal(hub.path)
    assert there(remote.nodes) == here.nodes()
    assert there(remote.begin) == here.begin()
    assert there(remote.end) == here.end() == {"n1": ROWS}
    for _ in range(10):
        start, end = sorted((random_.randint(0, ROWS), random_.randint(0, ROWS)))
        most = random_.randint(20, 200)
        assert there(lambda: read(remote, {"n1": start}, {"n1": end}, most)) == written.rows(start, end)  # noqa: B023
    moment = written.START_US + 123_000
    assert there(lambda: remote.offsets_at(moment)) == {"n1": 123}
    chosen = Filter(["site1/#"])
    wanted = [row for row in written.rows(0, ROWS) if row.topic and chosen.matches(row.topic)]
    assert there(lambda: list(remote.rows({}, {"n1": ROWS}, chosen))) == wanted
    assert there(lambda: read(remote, {}, {"n1": ROWS}, topics=chosen)) == wanted


def test_segments_with_messages_of_mqtt_clients(hub: Hub) -> None:
    """Beside others without their columns."""
    written.write(hub.path, [[9]])
    rows = [row._replace(qos=2, retain=False, properties="{}") if row.seq % 2 else row for row in written.rows(9, 30)]
    opened = segment.SegmentFile.open(hub.path / "wal/n1", 9, "n1", "hub", 2)
    opened.append(arrow.encode(rows, arrow.WITH_MQTT), 9, 21, rows[0].ts_us, rows[-1].ts_us, 0)
    opened.close()
    remote = hub.open()
    assert there(lambda: list(remote.rows({}, {"n1": 30}))) == [*written.rows(0, 9), *rows]
    plan = there(lambda: remote.plan({}, {"n1": 30}))
    batches = there(lambda: [batch for part in plan for chunk in part for batch in remote.tables(chunk, ["qos"])])
    found = [qos for batch in batches for qos in batch.column("qos").to_pylist()]
    assert found == [None] * 9 + [row.qos for row in rows]


def test_a_journal_that_grows(hub: Hub) -> None:
    """Only what is new is asked for."""
    remote, at = hub.open(), 0
    opened = segment.SegmentFile.open(hub.path / "wal/n1", 0, "n1", "hub")
    for end in range(5, 60, 5):
        written.append(opened, written.rows(at, end))
        hub.requests.clear()
        assert there(lambda: list(remote.rows({"n1": at}, {"n1": end}))) == written.rows(at, end)  # noqa: B023
        assert len(hub.requests) <= 5
        at = end
    opened.close()


def test_an_index_that_the_hub_has_rewritten(hub: Hub) -> None:
    """Power failed, and other rows took the numbers: what was known of the index doesn't count any more."""
    remote = hub.open()
    written.write(hub.path, [[5, 9, 13]])
    assert there(lambda: list(remote.rows({}, {"n1": 13}))) == written.rows(0, 13)
    written.write(hub.path, [[4, 9, 20, 30]])
    assert there(lambda: list(remote.rows({}, {"n1": 30}))) == written.rows(0, 30)


def test_plans_are_read_in_other_processes(hub: Hub) -> None:
    written.write(hub.path, [[10, 20], [30]])
    remote = hub.open()
    plan = there(lambda: remote.plan({}, {"n1": 30}, max_rows=15))
    other: RemoteJournal = pickle.loads(pickle.dumps(remote))
    rows = there(lambda: [row for part in plan for chunk in part for row in as_rows(other.tables(chunk))])
    assert rows == written.rows(0, 30)


def test_a_segment_that_was_compacted_since(hub: Hub) -> None:
    written.write(hub.path, [[10], [20], [30]])
    remote = hub.open()
    plan = there(lambda: remote.plan({}, {"n1": 30}))
    written.to_parquet(hub.path, [12, 20])
    written.drop_compacted(hub.path)
    rows = there(lambda: [row for part in plan for chunk in part for row in as_rows(remote.tables(chunk))])
    assert rows == written.rows(0, 30)


def test_what_does_not_change_is_not_sent_again(hub: Hub) -> None:
    written.write(hub.path, [[10]])
    remote = hub.open()
    there(lambda: remote.plan({}, {"n1": 10}))
    hub.requests.clear()
    there(lambda: remote.plan({}, {"n1": 10}))
    assert hub.requests == ["manifest", f"wal/n1/{0:020d}.idx"]


def test_a_micro_batch_takes_one_request_per_page(hub: Hub) -> None:
    """As Spark's source does it: where it begins, where it ends, a plan; for two nodes, one of them compacted."""
    written.write(hub.path, [[10], [20], [30]])
    written.write(hub.path, [[10], [20]], "n2")
    written.to_parquet(hub.path, [12, 20])
    remote = hub.open()

    def batch() -> None:
        assert remote.begin() == {"n1": 0, "n2": 0}
        assert remote.end() == {"n1": 30, "n2": 20}
        assert sum(chunk.rows for part in remote.plan({}, {"n1": 30, "n2": 20}) for chunk in part) == 50

    there(batch)
    assert len([name for name in hub.requests if name.startswith("manifest/")]) == 1
    hub.requests.clear()
    there(batch)
    newest = [f"wal/n1/{20:020d}.idx", f"wal/n2/{10:020d}.idx"]
    assert hub.requests == ["manifest", "end", "manifest", *newest]


def test_times_of_segments_come_with_the_listing(hub: Hub) -> None:
    written.write(hub.path, [[at] for at in range(10, 310, 10)], step_us=1_000_000)
    remote, second_us = hub.open(), 1_000_000
    times = (written.START_US + 105 * second_us, written.START_US + 108 * second_us)
    plan = there(lambda: remote.plan({}, {"n1": 300}, ts_us=times))
    assert [(chunk.start, chunk.end) for part in plan for chunk in part] == [(100, 110)]
    assert hub.requests == ["manifest", f"wal/n1/{100:020d}.idx", f"wal/n1/{290:020d}.idx"]


def test_a_plan_of_whole_segments_takes_one_request(hub: Hub) -> None:
    written.write(hub.path, [[at] for at in range(10, 310, 10)])
    remote, here = hub.open(), Journal(hub.path)
    plan = there(lambda: remote.plan({}, {"n1": 290}))
    assert hub.requests == ["manifest"]
    assert plan == here.plan({}, {"n1": 290})
    rows = there(lambda: [row for part in plan for chunk in part for row in as_rows(remote.tables(chunk))])
    assert rows == written.rows(0, 290)


def test_a_file_that_was_joined_to_others_since(hub: Hub) -> None:
    written.write(hub.path, [[10], [20], [30]])
    written.to_parquet(hub.path, [12, 20])
    written.drop_compacted(hub.path)
    remote = hub.open()
    plan = there(lambda: remote.plan({}, {"n1": 30}))
    compact.compact(hub.path, compact.CompactOptions(grace_s=60))
    assert len(list(manifest.load(hub.path).all_files())) == 1

    def rows() -> Any:
        return [row for part in plan for chunk in part for row in as_rows(remote.tables(chunk))]

    assert there(rows) == written.rows(0, 30)
    assert "manifest" not in hub.requests[-3:]
    parquet_files.remove_retired(hub.path, 0)
    assert there(rows) == written.rows(0, 30)


def test_damage_is_reported_with_the_address(hub: Hub) -> None:
    written.write(hub.path, [[10, 20]])
    path = segment.paths(hub.path / "wal/n1")[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError, match=rf"{hub.url}/wal/n1/0+\.arrows is damaged at offset \d+: .*checksum"):
        there(lambda: list(hub.open().rows({}, {"n1": 20})))


# ---- mistakes


def test_a_wrong_token(hub: Hub) -> None:
    with pytest.raises(
        JournalError, match=r"wrong token: it must be the content of the file `token` in the journal's folder"
    ):
        there(open_journal(hub.url, "wrong").end)


@pytest.mark.parametrize("token", [None, "", "line\nbreak", "ü"])
def test_no_token(token: str | None) -> None:
    with pytest.raises(JournalError, match=r"http://h:1/rtl/journal/x needs a token"):
        open_journal("http://h:1/rtl/journal/x", token)


@pytest.mark.parametrize("url", ["http://", "http://h", "http://h:0/rtl/journal/x", "http://h:x/y", "https://:80/x"])
def test_no_address(url: str) -> None:
    with pytest.raises(
        JournalError, match="is not the address of a journal such as http://127.0.0.1:9357/rtl/journal/"
    ):
        open_journal(url, "token")


def test_another_name(hub: Hub) -> None:
    with pytest.raises(JournalError, match=r"There is no journal 'other' here; this token gives access to: main"):
        there(open_journal(hub.url.replace("main", "other"), hub.token).end)


def ok(body: bytes, *more: str) -> bytes:
    head = "\r\n".join(["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *more])
    return head.encode() + b"\r\n\r\n" + body


DEEP = b"[" * 100_000


@pytest.mark.parametrize("body", [b"<html>", b"{}", DEEP, b'{"wal": [], "manifest": {}}', b"[]"])
def test_a_server_that_is_no_hub(body: bytes) -> None:
    with (
        ScriptedHttp([[ok(body)]] * 9) as server,
        pytest.raises(JournalError, match=rf"{server.url}/x.* is not a journal on a hub"),
    ):
        there(open_journal(f"{server.url}/x", "token", retry_s=0).begin)


def test_a_server_that_sends_us_elsewhere() -> None:
    answer = b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n"
    with (
        ScriptedHttp([[answer]]) as server,
        pytest.raises(JournalError, match="answers 302: it is not a journal on a hub"),
    ):
        there(open_journal(f"{server.url}/x", "token", retry_s=0).end)


@pytest.mark.parametrize("answer", [DEEP, b"3", b"{}", b'{"end": 3}', b'{"end": {"n1": []}}', b'{"end": {"n1": "x"}}'])
def test_an_end_that_is_none(answer: bytes) -> None:
    with ScriptedHttp([[ok(answer)]]) as server, pytest.raises(JournalError, match="/x/end is not a journal on a hub"):
        there(open_journal(f"{server.url}/x", "token", retry_s=0).end)


@pytest.mark.parametrize("answer", [DEEP, b"3", b"{}", b"<html>"])
def test_a_commit_to_another_service(answer: bytes) -> None:
    with (
        ScriptedHttp([[ok(answer)]]) as server,
        pytest.raises(JournalError, match="is not a journal on a hub: it answers b'"),
    ):
        there(lambda: commit(HubAddress.of(f"{server.url}/x", "token"), "q", 0, [], retry_s=0))


@pytest.mark.parametrize("head", ["Content-Length: 9999999999", "Connection: close"])
def test_an_answer_without_end(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_RESPONSE_BYTES", 1000)
    answer = f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode() + bytes(5000)
    with (
        ScriptedHttp([[answer]]) as server,
        pytest.raises(JournalError, match="/x/end: the response has more than 1000 bytes"),
    ):
        there(open_journal(f"{server.url}/x", "token", retry_s=0).end)


# ---- a hub that is away

END = b'{"end": {"n1": 7}}'
BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 14\r\n\r\nthe disk fills"


def test_patience_ends() -> None:
    server = ScriptedHttp([[CLOSE]])
    with pytest.raises(JournalError, match=rf"hasn't answered for 0\.3 s \({server.url}.*start it with `smqrt serve`"):
        there(open_journal(f"{server.url}/x", "token", retry_s=0.3).end)
    server.close()
    assert 2 <= server.connections <= 5
    with pytest.raises(JournalError, match=r"hasn't answered \(.*refused"):
        there(open_journal(f"{server.url}/x", "token", retry_s=0).end)


@pytest.mark.parametrize("trouble", [[CLOSE], [BUSY], [b"nonsense\r\n\r\n", CLOSE], [ok(END)[:-3], CLOSE]], ids=str)
def test_a_hub_that_comes_back(trouble: list[Any]) -> None:
    with ScriptedHttp([trouble], [trouble], [[ok(END)]]) as server:
        assert there(open_journal(f"{server.url}/x", "token", retry_s=10).end) == {"n1": 7}
        assert server.connections == 3
        assert "Authorization: Bearer token" in server.heads[-1]
        assert server.heads[-1].startswith("GET /x/end HTTP/1.1")


def test_connections_are_reused_and_replaced_when_closed() -> None:
    with ScriptedHttp([[ok(END)], [ok(END), CLOSE]], [[ok(END)]]) as server:
        journal = open_journal(f"{server.url}/x", "token", retry_s=0)
        assert [there(journal.end) for _ in range(3)] == [{"n1": 7}] * 3
        assert server.connections == 2
