"""The file `tokens` of a journal: who may read, and who may write where."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import ArgumentError
from smqrt.journal import files, readers, service
from smqrt.journal.commit import commit, report_progress
from smqrt.journal.files import HubAddress
from smqrt.journal.service import Grant, Tokens
from tests.journal.shelf import Shelf, record

READER, WRITER, BOTH = "reader-of-everything", "writer-of-some-topics", "both-reader-and-writer"
LINES = f"""
# who        token       what
dashboards   {READER}    read
site1        {WRITER}    write site1/# +/shared
app          {BOTH}      read write
"""


def put(folder: Path, text: str, mode: int = 0o600) -> None:
    path = folder / service.TOKENS_FILE
    path.write_text(text)
    path.chmod(mode)


@pytest.fixture(autouse=True)
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "TOKENS_CHECK_S", 0.0)


@pytest.fixture
def shelf(shelf: Shelf) -> Shelf:
    """With tokens."""
    put(shelf.writer.path, LINES)
    return shelf


def found(folder: Path, text: str, **given: Any) -> Tokens:
    put(folder, text, **given)
    made = Tokens(folder)
    made.refresh()
    return made


def test_a_reader_reads_and_nothing_else(shelf: Shelf) -> None:
    for path in ("main/manifest", "main/end", "main/stats", f"main/wal/n2/{0:020d}.idx", "main/committed?query=q"):
        assert shelf.ask(path, token=READER).status_code == 200
    sentence = "The token 'dashboards' may not write: its line in the file tokens lacks 'write'.\n"
    assert shelf.refused(403, "main/commit?query=q&batch=0", "POST", data=record(b"a", b"x"), token=READER) == sentence
    assert shelf.refused(403, "main/publish", "POST", data=record(b"a", b"x"), token=READER) == sentence
    assert shelf.rows() == []


def test_a_writer_writes_to_its_topics(shelf: Shelf) -> None:
    for topic in (b"site1/x", b"site1", b"b/shared"):
        assert shelf.ask("main/publish", "POST", data=record(topic, b"x"), token=WRITER).status_code == 200
    body = record(b"site1/y", b"1") + record(b"site2/y", b"2")
    for path in ("main/publish", "main/commit?query=q&batch=0"):
        assert "may not write to 'site2/y'" in shelf.refused(403, path, "POST", data=body, token=WRITER)
    assert "may not read" in shelf.refused(403, "main/manifest", token=WRITER)
    assert shelf.ask("main/committed?query=q", token=WRITER).json() == {"batch": -1}
    assert [row[0] for row in shelf.rows()] == ["site1/x", "site1", "b/shared"]


def test_no_token_passes_for_another_in_commits_and_reports(shelf: Shelf) -> None:
    """One that knows the name of a query could make its commits look done, or let retention remove what it needs."""
    assert shelf.commit(record(b"a", b"1"), token=BOTH, batch=7).json()["stored"]
    assert shelf.commit(record(b"a", b"2"), batch=7).json()["stored"]
    assert not shelf.commit(record(b"a", b"1"), token=BOTH, batch=7).json()["stored"]
    assert shelf.ask("main/committed?query=q1", token=BOTH).json() == {"batch": 7}
    for token in (READER, ""):
        report = json.dumps({"query": "q1", "name": "n", "offset": {"n1": 1 if token else 0}}).encode()
        assert shelf.ask("main/progress", "POST", data=report, token=token).status_code == 200
    assert {path.name for path in (shelf.writer.path / "readers").iterdir()} == {"q1.json", "q1@dashboards.json"}


def test_the_clients_of_pipelines(shelf: Shelf) -> None:
    import gevent

    url = f"http://127.0.0.1:{shelf.bench.listener.address[1]}/rtl/journal/main"
    apply = gevent.get_hub().threadpool.apply
    hub = HubAddress.of(url, BOTH)
    assert apply(commit, (hub, "q", 0, [(b"a", None, b"x")], 5))
    assert not apply(commit, (hub, "q", 0, [(b"a", None, b"x")], 5))
    apply(report_progress, (hub, "q", "name", {"n1": 1}))
    with pytest.raises(Exception, match="'dashboards' may not write: its line in the file tokens lacks 'write'"):
        apply(commit, (HubAddress.of(url, READER), "q", 0, [(b"a", None, b"x")], 5))


def test_tokens_are_changed_while_the_hub_runs(shelf: Shelf) -> None:
    put(shelf.writer.path, LINES.replace(READER, "a-new-token-for-all"))
    assert shelf.ask("main/stats", token="a-new-token-for-all").status_code == 200
    shelf.refused(401, "main/stats", token=READER)
    (shelf.writer.path / service.TOKENS_FILE).unlink()
    shelf.refused(401, "main/stats", token="a-new-token-for-all")
    assert shelf.ask("main/stats").status_code == 200


def test_a_broken_file_is_reported_once_and_values_stay(shelf: Shelf, caplog: Any) -> None:
    assert shelf.ask("main/stats", token=READER).status_code == 200
    put(shelf.writer.path, "dashboards short read")
    for _ in range(3):
        assert shelf.ask("main/stats", token=READER).status_code == 200
    assert caplog.text.count("line 1: 'dashboards' must be followed by a token of 16 characters or more.") == 1
    put(shelf.writer.path, LINES)
    assert shelf.ask("main/stats", token=READER).status_code == 200


def test_first_requests_wait_for_the_files(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline whose many tasks ask a hub that has just started must not hear that its token is wrong."""
    import gevent

    monkeypatch.setattr(service, "TOKENS_CHECK_S", 60.0)
    asked = [gevent.spawn(shelf.ask, "main/stats", token=READER) for _ in range(8)]
    assert [one.get().status_code for one in asked] == [200] * 8


def test_a_damaged_token_is_reported_once(shelf: Shelf, caplog: Any) -> None:
    (shelf.writer.path / files.TOKEN_FILE).write_text("")
    for _ in range(3):
        shelf.refused(401, "main/stats", token="x")
    assert caplog.text.count("holds no token") == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"a/b {READER} read", "line 1: a line begins with a name of up to 32 letters"),
        ("\na", "line 2: 'a' must be followed by a token of 16 characters or more."),
        (f"a {READER}", "line 1: 'a' must be followed by 'read', 'write' or 'read write'"),
        (f"a {READER} reads", "line 1: 'a' must be followed by 'read', 'write' or 'read write'"),
        (f"a {READER} write a/#/b", "line 1: topics: 'a/#/b' has a '#' inside"),
        (f"a {READER} write" + " t" * 33, "line 1: 'a' has more than 32 topics: use wildcards"),
        (f"a {READER} read\nb {READER} read", "line 2: the name 'b' or its token occurs twice; each line"),
        (f"a {READER} read\na {WRITER} read", "line 2: the name 'a' or its token occurs twice; each line"),
        ("#" * (service.MAX_TOKENS_BYTES + 1), "has more than 65536 bytes; remove unused tokens."),
        ("ü", "can't be read: "),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, sentence: str) -> None:
    broken = found(tmp_path, text)
    assert str(tmp_path / service.TOKENS_FILE) in broken.fault
    assert sentence in broken.fault
    assert READER not in broken.fault
    assert broken.grant(READER) is None


def test_a_file_that_others_can_read(tmp_path: Path) -> None:
    assert "is readable by other users; run chmod 600 on it." in found(tmp_path, LINES, mode=0o640).fault


def test_names_of_queries_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_QUERIES", 2)
    grant = Grant("a")
    assert [grant.stored_name("q"), grant.stored_name("r"), grant.stored_name("q")] == ["q@a", "r@a", "q@a"]
    with pytest.raises(ArgumentError, match="the token 'a' has created 2 query names;"):
        grant.stored_name("s")
    assert Grant().stored_name("any") == "any"


def test_names_of_queries_are_counted_over_all_runs(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_QUERIES", 2)
    assert shelf.commit(record(b"a", b"1"), token=BOTH, query="q").json()["stored"]
    body = json.dumps({"query": "r", "offset": {"n1": 0}})
    assert shelf.ask("main/progress", "POST", data=body, token=BOTH).status_code == 200
    shelf.service._tokens.clear()  # as in a hub that was started anew
    assert "created 2 query names" in shelf.refused(
        400, "main/commit?query=s&batch=0", "POST", data=record(b"a", b"1"), token=BOTH
    )
    assert not shelf.commit(record(b"a", b"1"), token=BOTH, query="q").json()["stored"]


def test_reports_are_bounded_for_every_token(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_QUERIES", 2)
    for query, status in (("a", 200), ("b", 200), ("c", 400), ("a", 200)):
        answer = shelf.ask("main/progress", "POST", data=json.dumps({"query": query, "offset": {"n1": 0}}))
        assert answer.status_code == status
    text = shelf.refused(400, "main/progress", "POST", data=json.dumps({"query": "c", "offset": {"n1": 0}}))
    assert "2 queries have reports" in text
    assert "remove unused ones with `smqrt pipeline reset`" in text


def test_a_change_keeps_the_count_of_names(tmp_path: Path) -> None:
    kept = found(tmp_path, LINES)
    first = kept.grant(READER)
    assert first
    first.stored_name("q")
    put(tmp_path, LINES.replace(READER, "another-token-of-it"))
    os.utime(tmp_path / service.TOKENS_FILE, ns=(1, 1))
    kept.refresh()
    again = kept.grant("another-token-of-it")
    assert again
    assert again.queries == {"q"}
