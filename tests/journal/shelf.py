"""A server with one journal, and a client of the journal's service."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
import requests

from smqrt import hub
from smqrt.http.disk import DiskIo
from smqrt.http.tree import ResourceReader
from smqrt.journal import files, writer
from smqrt.journal.reader import Journal
from smqrt.journal.segment import INDEX
from smqrt.journal.service import JournalService
from smqrt.journal.writer import JournalWriter
from tests.http.http_bench import Bench

LIMIT = 1 << 20
SEGMENT = f"{0:020d}"


def record(topic: bytes, payload: bytes, subtopic: bytes = b"") -> bytes:
    """A row of a commit, as CONTRACTS say it is sent."""
    lengths = struct.pack(">H", len(topic)), struct.pack(">H", len(subtopic)), struct.pack(">I", len(payload))
    return lengths[0] + topic + lengths[1] + subtopic + lengths[2] + payload


class Shelf:
    """A server with one journal named "main", and who asks it.

    Besides the node that the hub writes there is another one, "n2", with a segment of 3 MB.
    """

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench = bench
        self.smq = hub.create(journal={"path": str(folder / "journal"), "name": "main"})
        self.writer: JournalWriter = self.smq.journal
        self.opened: dict[str, Any] = writer.opened
        rtl = ResourceReader("rtl", 127, io=DiskIo(folder))
        self.service = JournalService(self.opened, LIMIT)
        rtl.insert(self.service)
        bench.root.insert(rtl)
        self.wal = self.writer.path / "wal" / "n2"
        self.wal.mkdir()
        (self.wal / f"{SEGMENT}.arrows").write_bytes(os.urandom(3_000_000))
        (self.wal / f"{SEGMENT}.idx").write_bytes(INDEX.pack(0, 7, 0, 10, 1, 2, 3, 0, 0) + b"torn")
        self.token = files.journal_token(self.writer.path)

    def rows(self) -> list[tuple[str | None, str | None, bytes, str | None]]:
        """What the hub has written: topic, subtopic, payload, txn."""
        self.writer.flush()
        found = Journal(self.writer.path).rows({"n1": 0}, {"n1": self.writer.stats()["next_seq"]})
        return [(row.topic, row.subtopic, row.payload, row.txn) for row in found]

    def ask(
        self, path: str, method: str = "GET", token: str | None = "", port: int = 0, **keywords: Any
    ) -> requests.Response:
        """One request, by a client in a thread; token "" is the right one, None is none."""
        headers = keywords.pop("headers", {})
        if token is not None:
            headers["Authorization"] = f"Bearer {token or self.token}"
        url = f"http://127.0.0.1:{port or self.bench.listener.address[1]}/rtl/journal/{path}"
        pool = gevent.get_hub().threadpool
        with gevent.Timeout(20):
            return pool.apply(requests.request, (method, url), {"headers": headers, "timeout": 20, **keywords})

    def refused(self, status: int, path: str, method: str = "GET", **keywords: Any) -> str:
        """The sentence with which a request is refused."""
        answer = self.ask(path, method, **keywords)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.text.endswith(".\n")
        assert answer.text.count("\n") == 1
        return answer.text

    def commit(self, body: Any, query: str = "q1", batch: object = 0, **keywords: Any) -> requests.Response:
        return self.ask(f"main/commit?query={query}&batch={batch}", "POST", data=body, **keywords)


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    bench = Bench()
    yield Shelf(bench, tmp_path)
    bench.close()
    writer.close_all()
