"""Journals over HTTP: a real server in this process, and `requests` in a thread beside it."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt import hub
from smqrt.errors import JournalError
from smqrt.http.disk import DiskIo
from smqrt.journal import announcer, files
from smqrt.journal.commit import MAX_COMMIT_ROWS, OutRow, RowDecoder, commit, last_batch, report_progress
from smqrt.journal.files import HubAddress
from smqrt.journal.reader import Journal
from smqrt.journal.remote import open_journal
from smqrt.server.runtime import Server
from smqrt.settings.server_settings import Settings
from tests.journal.shelf import SEGMENT, Shelf, record


class Troubled:
    """A journal that takes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def end(self) -> dict[str, int]:
        return {}

    def queries(self) -> list[str]:
        return []

    def committed(self, query: str) -> int:
        return -1

    def read_other_commits(self) -> None:
        pass

    def commit(self, query: str, batch: int, rows: list[OutRow]) -> bool:
        raise JournalError("the disk is full; make room.")


# ---- who may


@pytest.mark.parametrize("token", [None, "wrong", "ü", "x" * 5000])
@pytest.mark.parametrize(
    "path", ["", "main/manifest", "main/stats", f"main/wal/n2/{SEGMENT}.idx", "other/manifest", "main/x"]
)
def test_without_the_token_nothing_is_revealed(shelf: Shelf, path: str, token: str | None) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}".encode()}
    text = shelf.refused(401, path, token=None, headers=headers)
    assert text.startswith("The token is wrong or missing; send")
    assert shelf.refused(401, "main/commit?query=q&batch=1", "POST", data=record(b"t", b""), token="wrong") == text
    assert not shelf.rows()


def test_another_scheme_is_no_token(shelf: Shelf) -> None:
    assert shelf.ask("", token=None, headers={"Authorization": f"bearer  {shelf.token}"}).status_code == 200
    shelf.refused(401, "", token=None, headers={"Authorization": f"Basic {shelf.token}"})
    assert "WWW-Authenticate" in shelf.ask("", token=None).headers


def test_the_names_are_those_that_the_token_opens(shelf: Shelf, tmp_path: Path) -> None:
    second = hub.create(journal={"path": str(tmp_path / "second"), "name": "second"}).journal
    assert shelf.ask("").json() == {"journals": ["main"]}
    shelf.refused(401, "second/stats")
    assert "no journal 'third' here; this token gives access to: main" in shelf.refused(404, "third/stats")
    assert shelf.ask("", token=files.journal_token(second.path)).json() == {"journals": ["second"]}
    second.close()
    shelf.refused(404, "second/stats")


def test_a_reopened_journal_may_have_another_token(shelf: Shelf) -> None:
    assert shelf.ask("main/stats").status_code == 200
    shelf.writer.close()
    (shelf.writer.path / "token").unlink()
    shelf.smq = hub.create(journal={"path": str(shelf.writer.path), "name": "main"})
    shelf.refused(401, "main/stats")
    assert shelf.ask("main/stats", token=files.journal_token(shelf.writer.path)).status_code == 200


def test_a_damaged_token_is_refused_and_reported(shelf: Shelf, caplog: Any) -> None:
    (shelf.writer.path / "token").write_text("")
    for token in ("", None, "x"):
        assert str(shelf.writer.path) not in shelf.refused(401, "main/stats", token=token)
    assert "holds no token" in caplog.text


# ---- reading


def test_readers_of_a_closed_journal_are_asked_to_retry(shelf: Shelf) -> None:
    """Its application is reloading: a pipeline must not take that for a wrong token."""
    assert shelf.ask("main/stats").status_code == 200
    opened = dict(shelf.opened)
    shelf.opened.clear()
    assert "is closed: its application is stopping" in shelf.refused(503, "main/stats")
    shelf.refused(401, "main/stats", token="wrong")
    shelf.refused(401, "other/stats")
    shelf.opened.update(opened)


def test_the_manifest_lists_what_there_is(shelf: Shelf) -> None:
    answer = shelf.ask("main/manifest")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["wal"] == {"n1": [{"first": 0}], "n2": [{"first": 0}]}
    assert answer.json()["manifest"] == {"version": 2, "nodes": {}, "pages": []}
    again = shelf.ask("main/manifest", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_ends_come_from_segments_and_from_what_was_compacted(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "OTHER_ENDS_S", 0.0)
    assert shelf.ask("main/end").json() == {"end": {"n1": 0, "n2": 7}}
    (shelf.wal / f"{7:020d}.arrows").touch()
    compacted = {"version": 1, "nodes": {"n2": {"compacted_through": 5}, "n3": {"compacted_through": 9}}, "files": []}
    (shelf.writer.path / "manifest.json").write_text(json.dumps(compacted))
    assert shelf.ask("main/end").json() == {"end": {"n1": 0, "n2": 7, "n3": 9}}
    answer = shelf.ask("main/manifest").json()
    assert answer["manifest"] == compacted
    sealed = {"first": 0, "idx_bytes": 64, "ts_min_us": 1, "ts_max_us": 2, "end": 7, "bytes": 3_000_000}
    assert answer["wal"]["n2"] == [sealed, {"first": 7}]
    (shelf.writer.path / "manifest.json").write_text("{")
    assert "manifest.json can't be read" in shelf.refused(503, "main/end")


def test_ranges_of_a_segment(shelf: Shelf) -> None:
    path = f"main/wal/n2/{SEGMENT}.arrows"
    data = (shelf.wal / f"{SEGMENT}.arrows").read_bytes()
    whole = shelf.ask(path)
    assert (whole.status_code, whole.content) == (200, data)
    assert whole.headers["accept-ranges"] == "bytes"
    for text, part in {"0-9": data[:10], "100-": data[100:], "-8": data[-8:], "2999999-5000000": data[-1:]}.items():
        answer = shelf.ask(path, headers={"Range": f"bytes={text}"})
        assert (answer.status_code, answer.content == part) == (206, True), text
        assert answer.headers["content-range"].endswith("/3000000")
    assert shelf.ask(path, headers={"Range": "bytes=10-19"}).headers["content-range"] == "bytes 10-19/3000000"
    assert shelf.ask(path, headers={"Range": "bytes=0-1,5-6"}).content == data
    assert "ends at 3000000" in shelf.refused(416, path, headers={"Range": "bytes=3000000-"})
    assert shelf.ask(path, headers={"Range": "bytes=3000000-"}).headers["content-range"] == "bytes */3000000"
    head = shelf.ask(path, "HEAD", headers={"Range": "bytes=0-9"})
    assert (head.status_code, head.headers["content-length"], head.content) == (206, "10", b"")


def test_a_segment_is_served_as_far_as_written(shelf: Shelf) -> None:
    path = shelf.wal / f"{SEGMENT}.idx"
    for size in (68, 128, 192):
        path.write_bytes(b"x" * size)
        assert shelf.ask(f"main/wal/n2/{SEGMENT}.idx").content == b"x" * size


def test_compacted_files(shelf: Shelf) -> None:
    folder = shelf.writer.path / "data" / "date=2026-11-21" / "hour=05"
    folder.mkdir(parents=True)
    (folder / "n1-0-9.parquet").write_bytes(b"PAR1 and so on")
    answer = shelf.ask("main/data/date=2026-11-21/hour=05/n1-0-9.parquet", headers={"Range": "bytes=0-3"})
    assert (answer.status_code, answer.content) == (206, b"PAR1")
    assert "read the manifest again" in shelf.refused(404, "main/data/date=2026-11-21/hour=05/n1-10-19.parquet")


@pytest.mark.parametrize(
    "path",
    [
        "token", "hub.json", "manifest.json", "wal/n1/lock", "wal/n1/", "wal", "wal/n1", "data/x.json", "txn.json",
        "readers/q.json", "data/.x.parquet", "wal/n1/%2e%2e/%2e%2e/token", "data/%2e%2e/%2e%2e/secret.parquet",
        "%2e%2e/", "data//etc/x.parquet", "data/link.parquet", "data/folder.parquet", f"wal/n2/{SEGMENT}.arrows/",
        f"wal/n2/{SEGMENT}.arrows%00", "data/a%5c..%5cx.parquet", "data/out/x.parquet",
    ],
)  # fmt: skip
def test_nothing_else_is_shown(shelf: Shelf, tmp_path: Path, path: str) -> None:
    data = shelf.writer.path / "data"
    data.mkdir()
    (tmp_path / "secret.parquet").write_text("secret")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.parquet").write_text("secret")
    (data / "link.parquet").symlink_to(tmp_path / "secret.parquet")
    (data / "out").symlink_to(tmp_path / "elsewhere")
    (data / "folder.parquet").mkdir()
    wire = shelf.bench.connect()
    answer = wire.ask(f"/rtl/journal/main/{path}", headers=f"Authorization: Bearer {shelf.token}\r\n")
    assert answer.status in (400, 404)
    assert b"secret" not in answer.body
    assert shelf.token.encode() not in answer.body


def test_large_files_do_not_hold_the_loop(shelf: Shelf) -> None:
    path = shelf.wal / f"{SEGMENT}.arrows"
    with open(path, "wb") as file:
        file.truncate(50 << 20)
    pauses: list[float] = []

    def watch() -> None:
        while True:
            before = time.monotonic()
            gevent.sleep(0.002)
            pauses.append(time.monotonic() - before)

    watcher = gevent.spawn(watch)
    answers = [gevent.spawn(shelf.ask, f"main/wal/n2/{SEGMENT}.arrows") for _ in range(2)]
    assert [len(answer.get().content) for answer in answers] == [50 << 20] * 2
    watcher.kill()
    assert len(pauses) > 20
    assert sorted(pauses)[len(pauses) * 9 // 10] < 0.25


# ---- writing


def test_a_commit_is_stored_once(shelf: Shelf) -> None:
    rows = [record(b"agg/a", b"1"), record(b"agg/b", b"", b"sub"), record(b"agg/c", b"\0\xff" * 30000)]
    assert shelf.commit(b"".join(rows), batch=7).json() == {"stored": True, "rows": 3}
    stored = [("agg/a", None, b"1"), ("agg/b", "sub", b""), ("agg/c", None, b"\0\xff" * 30000)]
    assert shelf.rows() == [(*row, "q1:7") for row in stored]
    assert shelf.commit(b"".join(rows), batch=7).json() == {"stored": False, "rows": 0}
    assert shelf.commit(b"", batch=8).json() == {"stored": True, "rows": 0}
    assert shelf.commit(iter(rows), batch=9).json() == {"stored": True, "rows": 3}  # chunked
    assert shelf.rows() == [(*row, txn) for txn in ("q1:7", "q1:9") for row in stored]


def test_what_was_committed_can_be_asked(shelf: Shelf) -> None:
    url = f"http://127.0.0.1:{shelf.bench.listener.address[1]}/rtl/journal/main"
    assert shelf.ask("main/committed?query=q1").json() == {"batch": -1}
    shelf.commit(record(b"a", b"1"), batch=4)
    for address in (HubAddress.of(url, shelf.token), HubAddress.of(shelf.writer.path)):
        assert gevent.get_hub().threadpool.apply(last_batch, (address, "q1")) == 4
        assert gevent.get_hub().threadpool.apply(last_batch, (address, "q2")) == -1
    assert shelf.ask("main/committed").status_code == 400


def test_publish_is_no_commit(shelf: Shelf) -> None:
    got: list[bytes] = []
    shelf.smq.subscribe("t", onmsg=lambda data, *_: got.append(data))
    for _ in range(2):
        assert shelf.ask("main/publish", "POST", data=record(b"t", b"x")).json() == {"rows": 1}
    assert shelf.rows() == [("t", None, b"x", None)] * 2
    assert got == [b"x"] * 2
    assert shelf.ask("main/stats").json()["rows"] == 2


def test_the_clients_of_pipelines(shelf: Shelf) -> None:
    url = f"http://127.0.0.1:{shelf.bench.listener.address[1]}/rtl/journal/main"
    rows = [(b"a", None, b"%d" % number) for number in range(300)]
    pool = gevent.get_hub().threadpool

    def client() -> list[bytes]:
        address = HubAddress.of(url, shelf.token)
        assert [commit(address, "q", 1, rows), commit(address, "q", 1, rows)] == [True, False]
        report_progress(address, "q", "per_minute", {"n1": 5})
        with pytest.raises(JournalError, match="wrong token"):
            commit(HubAddress.of(url, "x" * 40), "q", 2, rows)
        with pytest.raises(JournalError, match="The rows have more than 1048576 bytes; commit fewer"):
            commit(address, "q", 2, [(b"a", None, bytes(60000))] * 200)
        journal = open_journal(url, shelf.token)
        assert journal.end()["n1"] == 300
        return [row.payload for row in journal.rows({"n1": 0}, {"n1": 300})]

    assert pool.apply(client) == [payload for _, _, payload in rows]
    assert json.loads((shelf.writer.path / "readers" / "q.json").read_text())["offset"] == {"n1": 5}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (record(b"t", b"x")[:-1], "row 1: the body ends within this row; send complete rows"),
        (record(b"t", b"x") + b"\0", "row 2: the body ends within this row"),
        (record(b"t", b"x") + record(b"", b"x"), "row 2: the topic is empty; every row needs one."),
        (
            record(b"t", b"x" * 65521),
            "row 1: the payload has 65521 bytes; a message carries at most 65520, split it.",
        ),
    ],
)
def test_bad_rows_store_nothing(shelf: Shelf, body: bytes, sentence: str) -> None:
    answer = shelf.commit(body)
    assert (answer.status_code, answer.text.startswith(sentence)) == (400, True), answer.text
    assert not shelf.rows()


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ("", "query: None is not the id of a query"),
        ("?query=a/b&batch=1", "query: 'a/b' is not the id of a query; use 1 to 100 letters"),
        ("?query=..&batch=1", "query: '..' is not the id"),
        ("?query=q", "batch: '' is not a number"),
        ("?query=q&batch=-1", "batch: '-1' is not a number; send the number of the query's batch."),
        ("?query=q&batch=1e3", "batch: '1e3' is not a number"),
    ],
)
def test_a_commit_says_what_it_is(shelf: Shelf, parameters: str, sentence: str) -> None:
    assert shelf.refused(400, f"main/commit{parameters}", "POST", data=record(b"t", b"x")).startswith(sentence)


def test_a_too_large_commit_is_refused_before_reading(shelf: Shelf) -> None:
    rows = record(b"t", b"x" * 60000) * 20
    wire = shelf.bench.connect()
    head = f"POST /rtl/journal/main/publish HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {shelf.token}\r\n"
    wire.send(f"{head}Content-Length: {len(rows)}\r\nExpect: 100-continue\r\n\r\n".encode())
    answer = wire.answer("POST")
    assert (answer.status, answer.fields["connection"]) == (413, "close")
    assert answer.body.startswith(b"The rows have more than 1048576 bytes; commit fewer")
    assert shelf.commit(rows[: 60000 * 17]).status_code == 400  # within the limit: looked at
    wire = shelf.bench.connect()
    wire.send(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    wire.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(rows), rows))
    assert wire.answer("POST").status == 413
    assert not shelf.rows()


def test_too_many_rows_are_refused(shelf: Shelf) -> None:
    row = record(b"t", b"")
    assert shelf.commit(row * MAX_COMMIT_ROWS).json() == {"stored": True, "rows": MAX_COMMIT_ROWS}
    answer = shelf.commit(row * (MAX_COMMIT_ROWS + 1))
    assert (answer.status_code, answer.text) == (413, "There are more than 4096 rows; commit fewer at once.\n")


@pytest.mark.parametrize("shown", ["\xe9" * 43, "\xff\xfe", "", "a" * 8000, "Bearer", "\x85"])
def test_a_token_of_any_bytes_is_none(shelf: Shelf, shown: str) -> None:
    wire = shelf.bench.connect()
    answer = wire.ask("/rtl/journal/main/stats", headers=f"Authorization: Bearer {shown}\r\n")
    assert answer.status == 401


def test_a_body_that_ends_early_stores_nothing(shelf: Shelf) -> None:
    wire = shelf.bench.connect()
    head = f"POST /rtl/journal/main/publish HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {shelf.token}\r\n"
    wire.send(f"{head}Content-Length: 100\r\n\r\n".encode() + record(b"t", b"x"))
    wire.sock.shutdown(1)
    answer = wire.answer("POST")
    assert (answer.status, answer.body) == (400, b"the body ended early.\n")


def test_a_journal_that_takes_nothing_asks_for_patience(shelf: Shelf) -> None:
    shelf.opened["full"] = Troubled(shelf.writer.path)
    answer = shelf.ask("full/commit?query=q&batch=1", "POST", data=record(b"t", b"x"))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.text == "the disk is full; make room.\n"
    del shelf.opened["full"]


def test_methods(shelf: Shelf) -> None:
    assert "GET is not allowed here; use POST." in shelf.refused(405, "main/commit?query=q&batch=1")
    assert shelf.ask("main/manifest", "POST", data=b"").headers["allow"] == "GET, HEAD"
    assert shelf.ask("main/manifest", "DELETE").status_code == 405
    assert shelf.ask("main/manifest", "HEAD").content == b""


def test_progress_is_kept_for_retention(shelf: Shelf) -> None:
    report = {"query": "q-1", "name": "per_minute", "offset": {"n1": 17, "n2": 0}}
    assert shelf.ask("main/progress", "POST", json=report).status_code == 200
    path = shelf.writer.path / "readers" / "q-1.json"
    kept = json.loads(path.read_text())
    assert abs(kept.pop("time_us") / 1e6 - time.time()) < 60
    assert kept == report | {"results": True}
    newer = report | {"offset": {"n1": 18}, "time_us": 5, "results": False}
    assert shelf.ask("main/progress", "POST", json=newer).status_code == 200
    assert json.loads(path.read_text()) == newer
    assert os.listdir(path.parent) == ["q-1.json"]


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (b"{", "progress: the body is not JSON"),
        (b"[]", "progress: the body is not a JSON object"),
        (b'{"query":"../../token","offset":{}}', "query: '../../token' is not the id"),
        (b'{"query":"q"}', "offset: None is not an object {node: sequence number}"),
        (b'{"query":"q","offset":{"n1":-1}}', "offset: {'n1': -1} is not an object"),
        (b'{"query":"q","offset":{"n1":true}}', "offset: "),
        (b'{"query":"q","offset":{},"name":3}', "name: 3 is not a string"),
        (b"\xff", "progress: the body is not JSON"),
        (b"[" * 60000, "progress: the body is not JSON (maximum recursion depth exceeded"),
        (b'{"query":"q","name":' + b"[" * 900 + b"]" * 900 + b"}", "name: "),
        (b'{"query":"' + b"q" * 60000 + b'"}', f"query: '{'q' * 99}… is not the id"),
        (b'{"query":"q","offset":{},"time_us":' + b"9" * 60000 + b"}", "progress: the body is not JSON"),
    ],
)
def test_bad_progress(shelf: Shelf, report: bytes, sentence: str) -> None:
    assert shelf.refused(400, "main/progress", "POST", data=report).startswith(sentence)
    assert not (shelf.writer.path / "readers").exists()


def test_records_come_in_pieces_of_any_size() -> None:
    rows = [(b"t%d" % n, b"s" * n or None, bytes(n * 7)) for n in range(40)]
    body = b"".join(record(topic, payload, subtopic or b"") for topic, subtopic, payload in rows)
    for size in (1, 2, 3, 7, 64, 1000, len(body)):
        decoder, found = RowDecoder(1000), list[OutRow]()
        for at in range(0, len(body), size):
            found += decoder.feed(body[at : at + size])
        decoder.finish()
        assert found == rows


# ---- hub.json and the token


def test_the_token_stays_and_is_for_its_owner_only(tmp_path: Path) -> None:
    token = files.journal_token(tmp_path)
    assert len(token) > 40
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    (tmp_path / "token").chmod(0o644)
    assert files.journal_token(tmp_path) == token
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["token"]


@pytest.mark.parametrize("content", [b"", b"short\n", b"two words, and long enough", b"\xff" * 40])
def test_a_damaged_token_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(JournalError, match=r"token .*remove"):
        files.journal_token(tmp_path)


# ---- where it ends


def test_waiting_readers_are_answered_on_new_rows(shelf: Shelf) -> None:
    def waited(after: str, wait_s: float) -> Any:
        return gevent.spawn(shelf.ask, "main/end", params={"after": after, "wait_s": str(wait_s)})

    assert waited('{"n1": 0}', 20).get().json() == {"end": {"n1": 0, "n2": 7}}  # n2 is further
    many = [waited('{"n1": 0, "n2": 7}', 20) for _ in range(5)] + [waited('{"n1": 1, "n2": 7}', 20)]
    gevent.sleep(0.2)  # they wait
    assert not any(one.ready() for one in many)
    for payload in (b"1", b"2"):
        shelf.smq.publish("t", payload)
        shelf.writer.flush()
        gevent.joinall(many[:5], timeout=10)
    assert [one.get(timeout=10).json()["end"]["n1"] for one in many[:5]] == [1] * 5
    assert many[5].get(timeout=10).json() == {"end": {"n1": 2, "n2": 7}}


def test_waits_without_new_rows_end_in_time(shelf: Shelf) -> None:
    began_s = time.monotonic()
    answer = shelf.ask("main/end", params={"after": '{"n1": 9, "n2": 9}', "wait_s": "0.3"})
    assert answer.json() == {"end": {"n1": 0, "n2": 7}}
    assert 0.25 < time.monotonic() - began_s < 10


@pytest.mark.parametrize(
    "params",
    [{"after": "3"}, {"after": "{"}, {"after": '{"n1": "x"}'}, {"wait_s": "x"}, {"after": "[" * 3000}],
    ids=str,
)
def test_what_to_wait_for_is_wrong(shelf: Shelf, params: dict[str, str]) -> None:
    assert 'after must be an object such as {"n1": 1000}' in shelf.refused(400, "main/end", params=params)


def test_other_hubs_of_the_folder_are_looked_at_again(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shelf.ask("main/end").json()["end"]["n2"] == 7
    (shelf.wal / f"{20:020d}.arrows").touch()
    answer = shelf.ask("main/end", params={"after": '{"n1": 0, "n2": 7}', "wait_s": "20"})
    assert answer.json()["end"]["n2"] == 20


def test_the_end_is_answered_from_memory(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "OTHER_ENDS_S", 1000.0)
    shelf.ask("main/end")
    monkeypatch.setattr(Journal, "end", None)
    shelf.smq.publish("t", b"1")
    shelf.writer.flush()
    assert shelf.ask("main/end").json() == {"end": {"n1": 1, "n2": 7}}


def test_readers_cause_no_file_search(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    path_of = DiskIo._published_path
    monkeypatch.setattr(DiskIo, "_published_path", lambda io, name: looked.append(name) or path_of(io, name))
    server = Server(Settings(port=0), report=lambda line: None)
    server.start()
    try:
        answers = [shelf.ask(path, port=server.port()) for path in ("main/end", "main/manifest")]
    finally:
        server.stop()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert looked == []
