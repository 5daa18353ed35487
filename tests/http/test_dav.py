"""File servers: WebDAV (RFC 4918; spec: bas-api §4, §17)."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from gevent import socket

from smqrt.http.dav.directory import DavDirectory
from smqrt.http.disk import DiskIo
from tests.http.http_bench import Bench

D = "{DAV:}"
LOCK = (
    b"<D:lockinfo xmlns:D='DAV:'><D:lockscope><D:%b/></D:lockscope><D:locktype><D:write/></D:locktype>"
    b"<D:owner>me</D:owner></D:lockinfo>"
)


class Answer:
    def __init__(self, response: HTTPResponse) -> None:
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    @property
    def hrefs(self) -> list[str]:
        return [str(each.text) for each in ElementTree.fromstring(self.body).iter(D + "href")]


class Client:
    """Sends one request a connection."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench, self.folder = bench, folder

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        address = self.bench.listener.address
        client = HTTPConnection(*address)
        client.sock = socket.create_connection(address, timeout=5)
        try:
            client.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            return Answer(client.getresponse())
        finally:
            client.close()

    def locked(self, path: str, scope: bytes = b"exclusive", **headers: str) -> str:
        answer = self("LOCK", path, LOCK % scope, **headers)
        assert answer.status in (200, 201), answer.body
        return str(answer.headers["Lock-Token"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "share"
    for name, text in {"a.txt": "alpha", "sub/b.txt": "beta", "sub/deep/c.txt": "gamma"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def dav(bench: Bench, folder: Path) -> Client:
    bench.root.insert(DavDirectory("fs", io=DiskIo(folder), lockdir=".LOCK"))
    return Client(bench, folder)


def test_options(dav: Client) -> None:
    answer = dav("OPTIONS", "/fs/")
    assert answer.status == 200
    assert answer.headers["DAV"] == "1,2"
    assert answer.headers["MS-Author-Via"] == "DAV"
    assert "PROPFIND" in answer.headers["Allow"]


def test_listing(dav: Client) -> None:
    assert dav("PROPFIND", "/fs/", Depth="0").hrefs == ["/fs/"]
    answer = dav("PROPFIND", "/fs/", Depth="1")
    assert answer.status == 207
    assert answer.hrefs == ["/fs/", "/fs/a.txt", "/fs/sub/"]
    assert len(dav("PROPFIND", "/fs/").hrefs) == 6
    assert dav("PROPFIND", "/fs/none").status == 404
    assert dav("PROPFIND", "/fs/", Depth="2").status == 400
    text = dav("PROPFIND", "/fs/a.txt", Depth="0").body.decode()
    for part in ("<D:getcontentlength>5<", "<D:getcontenttype>text/plain; charset=utf-8<", "<D:displayname>a.txt<"):
        assert part in text


def test_files(dav: Client) -> None:
    assert dav("PUT", "/fs/new.txt", b"new").status == 201
    assert dav("PUT", "/fs/new.txt", b"newer").status == 204
    assert dav("GET", "/fs/new.txt").body == b"newer"
    assert dav("GET", "/fs/new.txt", Range="bytes=1-2").body == b"ew"
    assert dav("PUT", "/fs/none/x", b"").status == 409
    assert dav("PUT", "/fs/sub/", b"").status == 405
    assert dav("MKCOL", "/fs/made/").status == 201
    assert dav("MKCOL", "/fs/made").status == 405
    assert dav("MKCOL", "/fs/x/y").status == 409
    assert dav("MKCOL", "/fs/x", b"body").status == 415
    assert dav("DELETE", "/fs/new.txt").status == 204
    assert dav("DELETE", "/fs/new.txt").status == 404
    assert dav("DELETE", "/fs/sub").status == 204
    assert sorted(path.name for path in dav.folder.iterdir()) == [".LOCK", "a.txt", "made"]


def test_copy_and_move(dav: Client) -> None:
    assert dav("COPY", "/fs/a.txt", Destination="/fs/copy.txt").status == 201
    assert dav("COPY", "/fs/sub/b.txt", Destination="/fs/copy.txt").status == 204
    assert dav("COPY", "/fs/a.txt", Destination="/fs/copy.txt", Overwrite="F").status == 412
    assert (dav.folder / "copy.txt").read_text() == "beta"
    assert dav("COPY", "/fs/sub", Destination="/fs/all").status == 201
    assert (dav.folder / "all/deep/c.txt").read_text() == "gamma"
    assert dav("COPY", "/fs/sub", Destination="/fs/empty", Depth="0").status == 201
    assert list((dav.folder / "empty").iterdir()) == []
    assert dav("MOVE", "/fs/all", Destination="/fs/moved/").status == 201
    assert (dav.folder / "moved/b.txt").exists()
    assert dav("MOVE", "/fs/a.txt", Destination="/fs/moved").status == 204
    assert (dav.folder / "moved").read_text() == "alpha"
    assert dav("MOVE", "/fs/sub/deep", Destination="/fs/sub").status == 403
    assert dav("MOVE", "/fs/sub", Destination="/fs/sub/deep/x").status == 403
    assert dav("MOVE", "/fs/sub", Destination="/fs/none/x").status == 409
    assert dav("MOVE", "/fs/sub").status == 400


@pytest.mark.parametrize(
    "name", ["a;b.txt", "a?b.txt", "a#b.txt", "a%41.txt", "ä €.txt", "a&b<c>.txt", "a'\"b.txt", " x "]
)
def test_odd_names(dav: Client, name: str) -> None:
    from urllib.parse import quote

    url = "/fs/" + quote(name)
    assert dav("MOVE", "/fs/a.txt", Destination=url).status == 201
    assert (dav.folder / name).read_text() == "alpha"
    assert dav("GET", url).body == b"alpha"
    listed = dav("PROPFIND", "/fs/", Depth="1")
    assert name in [each.text for each in ElementTree.fromstring(listed.body).iter(D + "displayname")]
    token = dav.locked(url)
    assert dav("PUT", url, b"x").status == 423
    assert dav("UNLOCK", url, Lock_Token=token).status == 204
    assert dav("MOVE", listed.hrefs[1], Destination="/fs/back").status == 201
