"""File servers: WebDAV (RFC 4918; spec: bas-api §4, §17)."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from http.client import HTTPConnection, HTTPResponse
from itertools import pairwise
from pathlib import Path
from time import thread_time
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree
from zipfile import ZipFile

import gevent
import pytest
from gevent import socket

from smqrt.http.dav.directory import DavDirectory, WfsDirectory
from smqrt.http.disk import DiskIo, ZipIo
from smqrt.http.logins import Acl, Authenticator, UserTable
from smqrt.http.message import Request
from smqrt.http.sessions import COOKIE
from smqrt.http.tree import Directory, ResourceReader
from tests.http.http_bench import Bench
from tests.support.waiting import wait_until

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
    assert answer.hrefs == ["/fs/", "/fs/sub/", "/fs/a.txt"]
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
    url = "/fs/" + quote(name)
    assert dav("MOVE", "/fs/a.txt", Destination=url).status == 201
    assert (dav.folder / name).read_text() == "alpha"
    assert dav("GET", url).body == b"alpha"
    listed = dav("PROPFIND", "/fs/", Depth="1")
    assert name in [each.text for each in ElementTree.fromstring(listed.body).iter(D + "displayname")]
    token = dav.locked(url)
    assert dav("PUT", url, b"x").status == 423
    assert dav("UNLOCK", url, Lock_Token=token).status == 204
    assert dav("MOVE", listed.hrefs[2], Destination="/fs/back").status == 201


# ---- locks


def test_locks(dav: Client) -> None:
    token = dav.locked("/fs/a.txt", Timeout="Second-100")
    for method, headers in (("PUT", {}), ("DELETE", {}), ("MOVE", {"Destination": "/fs/x"}), ("PROPPATCH", {})):
        body = b"<D:propertyupdate xmlns:D='DAV:'/>" if method == "PROPPATCH" else None
        assert dav(method, "/fs/a.txt", body, **headers).status == 423, method
    for other, status in (("/fs/./a.txt", 404), ("/fs//a.txt", 423), ("/fs/sub/../a.txt", 404), ("/fs/%61.txt", 423)):
        assert dav("PUT", other, b"x").status == status, other
    assert dav("COPY", "/fs/sub/b.txt", Destination="/fs/a.txt").status == 423
    assert dav("PUT", "/fs/a.txt", b"mine", If=f"({token})").status == 204
    assert dav("LOCK", "/fs/a.txt", LOCK % b"shared").status == 423
    listed = dav("PROPFIND", "/fs/a.txt", Depth="0").body.decode()
    for part in (
        "<D:exclusive/></D:lockscope><D:depth>infinity<",
        "<D:owner>me</D:owner>",
        ">/fs/a.txt</D:href></D:lockroot>",
    ):
        assert part in listed
    assert 80 < int(listed.partition("Second-")[2].partition("<")[0]) <= 100
    refreshed = dav("LOCK", "/fs/a.txt", If=f"({token})", Timeout="Infinite, Second-4100000000")
    assert refreshed.status == 200
    assert 3500 < int(refreshed.body.decode().partition("Second-")[2].partition("<")[0]) <= 3600
    assert dav("UNLOCK", "/fs/sub", Lock_Token=token).status == 409
    assert dav("UNLOCK", "/fs/a.txt", Lock_Token=token).status == 204
    assert dav("PUT", "/fs/a.txt", b"free").status == 204


def test_a_lock_of_a_folder_guards_what_is_inside(dav: Client) -> None:
    token = dav.locked("/fs/sub/")
    assert dav("PUT", "/fs/sub/deep/c.txt", b"x").status == 423
    assert dav("MKCOL", "/fs/sub/new").status == 423
    assert dav("DELETE", "/fs/sub").status == 423
    assert dav("PUT", "/fs/sub/deep/c.txt", b"x", If=f"({token})").status == 204
    assert dav("DELETE", "/fs/sub", If=f"({token})").status == 204
    dav("MKCOL", "/fs/sub")
    assert dav("PUT", "/fs/sub/b.txt", b"x").status == 201, "the lock went with the folder"


def test_a_lock_makes_a_file(dav: Client) -> None:
    assert dav("LOCK", "/fs/none/x.txt", LOCK % b"exclusive").status == 409
    assert dav("LOCK", "/fs/lua.txt", LOCK % b"exclusive").status == 201
    assert (dav.folder / "lua.txt").read_bytes() == b""
    assert dav("LOCK", "/fs/a.lua", LOCK % b"exclusive").status == 403


def test_locks_are_few_and_survive_a_restart(bench: Bench, folder: Path) -> None:
    first = DavDirectory("fs", io=DiskIo(folder), lockdir=".LOCK/deep", max_locks=2)
    bench.root.insert(first)
    dav = Client(bench, folder)
    token = dav.locked("/fs/a.txt")
    dav.locked("/fs/sub/b.txt", b"shared")
    refused = dav("LOCK", "/fs/sub/deep/c.txt", LOCK % b"exclusive")
    assert (refused.status, refused.headers["Retry-After"]) == (503, "60")
    first.unlink()
    bench.root.insert(DavDirectory("fs", io=DiskIo(folder), lockdir="/.LOCK/deep/"))
    assert dav("PUT", "/fs/a.txt", b"x").status == 423
    assert dav("PUT", "/fs/a.txt", b"x", If=f"({token})").status == 204
    assert dav("UNLOCK", "/fs/a.txt", Lock_Token=token).status == 204
    assert ".LOCK" not in dav("PROPFIND", "/fs/").body.decode()
    assert dav("GET", "/fs/.LOCK/deep/locks.json").status == 404
    assert dav("PUT", "/fs/.LOCK/deep/locks.json", b"[]").status in (403, 409)


def test_damaged_locks_are_none(bench: Bench, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / ".LOCK").mkdir()
    (folder / ".LOCK/locks.json").write_text('[{"token": 1}]')
    bench.root.insert(DavDirectory("fs", io=DiskIo(folder), lockdir=".LOCK"))
    assert Client(bench, folder)("PUT", "/fs/a.txt", b"x").status == 204
    assert "damaged" in caplog.text


def test_without_a_folder_for_locks(bench: Bench, folder: Path) -> None:
    bench.root.insert(DavDirectory("fs", io=DiskIo(folder)))
    dav = Client(bench, folder)
    assert dav("LOCK", "/fs/a.txt", LOCK % b"exclusive").status == 403
    assert dav("PUT", "/fs/a.txt", b"x").status == 204
    assert "lockdiscovery" not in dav("PROPFIND", "/fs/a.txt").body.decode()


# ---- uploads


def test_an_upload_that_breaks_off_leaves_the_old_file(dav: Client) -> None:
    wire = dav.bench.connect()
    wire.send(b"PUT /fs/a.txt HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
    wait_until(lambda: any(path.name.startswith(".smqrt-upload") for path in dav.folder.iterdir()))
    assert "upload" not in dav("PROPFIND", "/fs/").body.decode()
    assert dav("GET", "/fs/a.txt").body == b"alpha"
    wire.close()
    wait_until(lambda: not any(path.name.startswith(".smqrt-upload") for path in dav.folder.iterdir()))
    assert dav("GET", "/fs/a.txt").body == b"alpha"
    assert dav("PUT", "/fs/a.txt", b"x").status == 204


def test_uploads_at_the_same_time(bench: Bench, folder: Path) -> None:
    bench.root.insert(DavDirectory("fs", io=DiskIo(folder), max_uploads=1))
    dav, wire = Client(bench, folder), bench.connect()
    wire.send(b"PUT /fs/slow.txt HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nha")
    wait_until(lambda: any(path.name.startswith(".smqrt-upload") for path in folder.iterdir()))
    refused = dav("PUT", "/fs/other.txt", b"x")
    assert (refused.status, refused.headers["Retry-After"]) == (503, "2")
    assert wire.send(b"lf").answer().status == 201
    assert dav("PUT", "/fs/other.txt", b"x").status == 201


def test_a_chunked_upload(dav: Client) -> None:
    answer = dav("PUT", "/fs/c.txt", iter([b"one", b"two"]))
    assert answer.status == 201
    assert dav("GET", "/fs/c.txt").body == b"onetwo"


def test_conditions(dav: Client) -> None:
    tag = dav("GET", "/fs/a.txt").headers["ETag"]
    assert dav("PUT", "/fs/a.txt", b"x", If_None_Match="*").status == 412
    assert dav("PUT", "/fs/a.txt", b"x", If_Match='"other"').status == 412
    made = dav("PUT", "/fs/a.txt", b"longer", If_Match=tag)
    assert made.status == 204
    assert made.headers["ETag"] == dav("GET", "/fs/a.txt").headers["ETag"] != tag
    assert dav("PUT", "/fs/a.txt", b"x", Content_Range="bytes 0-1/2").status == 400


# ---- strangers


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"<!DOCTYPE a [<!ENTITY b 'cccc'>]><D:propfind xmlns:D='DAV:'>&b;</D:propfind>", 400),
        (b"<a>" * 100 + b"</a>" * 100, 400),
        (b"<a>" + b"<b/>" * 600 + b"</a>", 400),
        (b"<a>" + b"x" * 5000 + b"</a>", 400),
        (b"<a>" + b" " * 70000 + b"</a>", 413),
        (b"<D:propfind xmlns:D='DAV:'><D:prop><x:a xmlns:x=''/></D:prop></D:propfind>", 400),
        (b"<D:propfind xmlns:D='DAV:'/>", 400),
        (b"<D:prop xmlns:D='DAV:'/>", 400),
        (b"no xml", 400),
        (
            b"<D:propfind xmlns:D='DAV:'><D:prop>"
            + b"".join(b"<D:a%d/>" % n for n in range(70))
            + b"</D:prop></D:propfind>",
            400,
        ),
    ],
)
def test_bad_xml(dav: Client, body: bytes, status: int) -> None:
    assert dav("PROPFIND", "/fs/", body, Depth="0").status == status


@pytest.mark.parametrize(
    ("destination", "status"),
    [
        ("http://other.example/fs/x", 502),
        ("/elsewhere/x", 502),
        ("/fs/../../x", 404),
        ("/fs/%2e%2e/%2e%2e/x", 404),
        ("/fs/a%2Fb", 400),
        ("/fs/%00", 400),
        ("/fs/%zz", 400),
        ("fs/x", 400),
        ("/fs/x?query", 400),
        ("/fs/", 403),
        ("/fs/.hidden", 403),
        ("/fs/code.lua", 403),
        ("/fs/page.lsp", 403),
        ("/fs/.LOCK/x", 403),
    ],
)
def test_bad_destinations(dav: Client, destination: str, status: int) -> None:
    for method in ("MOVE", "COPY"):
        answer = dav(method, "/fs/a.txt", Destination=destination)
        assert answer.status in (status, 409), (method, answer.body)
    assert (dav.folder / "a.txt").read_text() == "alpha"


def test_header_fields_that_cost_time(dav: Client) -> None:
    for field in ("If", "Timeout"):
        assert dav("PUT", "/fs/a.txt", b"x", **{field: "<" * 5000}).status == 400
    for field in ("If-Modified-Since", "If-Unmodified-Since"):
        assert dav("PUT", "/fs/a.txt", b"x", **{field: "Sat, 29 Oct 99999 19:43:31 GMT"}).status == 204
    assert dav("PUT", "/fs/a.txt", b"x", If_Unmodified_Since="Sat, 29 Oct 1994 19:43:31 GMT").status == 412
    assert dav("PUT", "/fs/" + "a" * 300, b"x").status == 400
    assert dav("PUT", "/fs/", b"x").status == 405


def test_unknown_methods(dav: Client) -> None:
    for method in ("POST", "REPORT", "PATCH"):
        answer = dav(method, "/fs/a.txt", b"x")
        assert answer.status in (400, 405), method
    assert dav("POST", "/fs/").headers["Allow"].startswith("OPTIONS")


def test_what_is_private_is_not_there(dav: Client) -> None:
    secrets = ["page.lsp", "code.lua", "key.pem", ".env", "sub/.git/config", "data.db"]
    for name in secrets:
        (dav.folder / name).parent.mkdir(exist_ok=True)
        (dav.folder / name).write_text("secret")
    (dav.folder / "out").symlink_to("/etc")
    (dav.folder / "passwd").symlink_to("/etc/passwd")
    listed = dav("PROPFIND", "/fs/").body.decode()
    for name in (*secrets, "out", "passwd"):
        assert name.rpartition("/")[2] not in listed
        for method in ("GET", "PROPFIND", "DELETE", "LOCK"):
            answer = dav(method, f"/fs/{name}", LOCK % b"shared" if method == "LOCK" else None)
            assert answer.status in (302, 403, 404, 409), (method, name)
            assert b"secret" not in answer.body
        assert dav("COPY", f"/fs/{name}", Destination="/fs/copied.txt").status == 404
    for name in secrets:
        assert dav("PUT", f"/fs/{name}", b"x").status in (403, 409), name
        assert (dav.folder / name).read_text() == "secret"
    assert dav("PUT", "/fs/out/x", b"x").status == 409
    assert dav("MOVE", "/fs/sub", Destination="/fs/moved").status == 403
    refused = dav("DELETE", "/fs/sub")
    assert (refused.status, refused.body) == (409, b"409 Conflict: notempty\n"), "nothing about the engine"
    assert (dav.folder / "sub/.git/config").exists()


def test_what_macos_writes_beside_files(dav: Client) -> None:
    for name in ("._a.txt", ".DS_Store", "sub/._b.txt"):
        assert dav("PUT", f"/fs/{name}", b"x").status == 201, name
        assert dav("GET", f"/fs/{name}").body == b"x"
    for name in ("._code.lua", "._/x", ".x/._y"):
        assert dav("PUT", f"/fs/{name}", b"x").status in (403, 409), name


def test_files_run_no_scripts(dav: Client) -> None:
    (dav.folder / "x.html").write_text("<script>")
    assert dav("GET", "/fs/x.html").headers["Content-Security-Policy"].startswith("sandbox")
    assert dav("GET", "/fs/a.txt").headers["X-Content-Type-Options"] == "nosniff"


def test_a_page_of_another_host_changes_nothing(dav: Client) -> None:
    for method in ("PUT", "DELETE", "MKCOL", "PROPFIND"):
        assert dav(method, "/fs/a.txt", Origin="https://evil.example").status == 403


def longest_turn_s(work: Callable[[], object]) -> float:
    """The longest time that a greenlet had to wait meanwhile, of CPU: the machine has other things to do."""
    ticks: list[float] = []

    def tick() -> None:
        while True:
            ticks.append(thread_time())
            gevent.sleep(0.001)

    ticking = gevent.spawn(tick)
    work()
    ticking.kill()
    return max(later - sooner for sooner, later in pairwise(ticks))


def test_many_entries_delay_no_others(dav: Client) -> None:
    for number in range(10_000):
        (dav.folder / f"{number:05}").touch()
    answers: list[Answer] = []
    assert longest_turn_s(lambda: answers.append(dav("PROPFIND", "/fs/", Depth="1"))) < 0.05
    assert answers[0].body.count(b"<D:response>") == 10_003
    deep = dav("PROPFIND", "/fs/")
    assert (deep.status, b"propfind-finite-depth" in deep.body) == (403, True)
    assert dav("COPY", "/fs/", Destination="/fs/sub/all").status == 403
    assert dav("DELETE", "/fs/").status == 403


def test_many_locks_and_names_delay_no_others(bench: Bench, folder: Path) -> None:
    """What one lock or one name adds comes with every entry."""
    bench.root.insert(DavDirectory("fs", io=DiskIo(folder), lockdir=".LOCK"))
    dav = Client(bench, folder)
    for number in range(200):
        (folder / "sub" / f"{number}").touch()
    for _ in range(20):
        dav("LOCK", "/fs/sub/", LOCK.replace(b">me<", b">" + b"x" * 4000 + b"<") % b"shared")
    assert longest_turn_s(lambda: dav("PROPFIND", "/fs/sub/", Depth="1")) < 0.05
    names = b"".join(b"<x%d xmlns='%s'/>" % (at, b"u" * 900) for at in range(64))
    answer = dav("PROPFIND", "/fs/sub/", b"<D:propfind xmlns:D='DAV:'><D:prop>%s</D:prop></D:propfind>" % names)
    assert (answer.status, b"4096 characters" in answer.body) == (400, True)


# ---- logins


def test_the_owner_sees_all(bench: Bench, folder: Path) -> None:
    directory = DavDirectory("fs", io=DiskIo(folder), lockdir=".LOCK")
    users = UserTable({"ann": {"pwd": "secret", "roles": ["admin"]}, "bob": "hunter2"})
    acl = Acl(users, {"all": {"urls": ["/*"], "roles": ["admin"]}})
    directory.setauth(Authenticator(users, "basic"), acl)
    bench.root.insert(directory)
    dav = Client(bench, folder)
    ann = {"Authorization": "Basic " + b64encode(b"ann:secret").decode()}
    bob = {"Authorization": "Basic " + b64encode(b"bob:hunter2").decode()}
    assert dav("PROPFIND", "/fs/.preload").status == 401
    assert dav("PUT", "/fs/.preload", b"x").status == 401
    plain = dav("PROPFIND", "/fs/", **bob)
    assert (plain.status, plain.headers["Content-Type"], plain.body) == (
        403,
        "text/plain; charset=utf-8",
        b"403 Forbidden\n",
    )
    assert b"<h1>403" in dav("GET", "/fs/a.txt", Accept="text/html,*/*", **bob).body
    for name in (".preload", "page.lsp", "x.lua"):
        assert dav("PUT", f"/fs/{name}", b"-- code", **ann).status == 201
        assert dav("GET", f"/fs/{name}", **ann).body == b"-- code"
        assert name in dav("PROPFIND", "/fs/", Depth="1", **ann).body.decode()
    assert ".LOCK" not in dav("PROPFIND", "/fs/", **ann).body.decode()
    assert dav("GET", "/fs/.LOCK/locks.json", **ann).status == 404
    dav.locked("/fs/a.txt", **ann)
    directory.setauth(None)
    assert dav("GET", "/fs/.preload").status == 404
    assert dav("GET", "/fs/.preload", **ann).status == 404


def test_unauthenticated_users_are_no_owners(bench: Bench, folder: Path) -> None:
    """The guard around a file server does not stand before prologues and what is public."""
    (folder / "x.lua").write_text("code")
    reader = ResourceReader("app", io=DiskIo(folder))
    reader.setauth(Authenticator(UserTable({"ann": "secret"}), "basic"))
    public = Directory("public")
    public.insert(DavDirectory("fs", io=DiskIo(folder)))
    reader.insert(public)
    reader.insertprolog(DavDirectory("before", io=DiskIo(folder)))
    reader.insert(DavDirectory("inside", io=DiskIo(folder)))
    bench.root.insert(reader)
    dav = Client(bench, folder)
    ann = {"Authorization": "Basic " + b64encode(b"ann:secret").decode()}
    for path, status in (("public/fs", 404), ("before", 404), ("inside", 207)):
        assert dav("PROPFIND", f"/app/{path}/x.lua", **ann).status == status, path
        assert dav("PROPFIND", f"/app/{path}/.x", **ann).status == 404, path
    assert dav("PROPFIND", "/app/inside/x.lua").status == 401
    assert dav("PROPFIND", "/app/inside/.x").status == 401


def test_session_urls(bench: Bench, folder: Path) -> None:
    directory = WfsDirectory("fs", io=DiskIo(folder), lockdir=".LOCK")
    directory.session_s = 77
    users = UserTable({"ann": "secret"})
    directory.setauth(Authenticator(users, "form", page=lambda request, info: request.response.error(401)))
    bench.root.insert(directory)

    def enter(request: Request, relpath: str) -> None:
        request.login("ann")
        session = request.logins.sessions.of(request)
        assert session is not None
        request.response.write(session.id.encode())

    bench.handle(enter, "enter")
    dav = Client(bench, folder)
    assert dav("PROPFIND", "/fs/").status == 401
    session_id = dav("GET", "/enter/").body.decode()
    assert len(session_id) == 24
    base = f"/fs/{session_id}/"
    assert dav("PROPFIND", base, Depth="1").hrefs == [base, f"{base}sub/", f"{base}a.txt"]
    assert dav("PUT", base + "sub/new.txt", b"new").status == 201
    assert dav("MOVE", base + "sub/new.txt", Destination=base + "moved.txt").status == 201
    assert dav("GET", base + "moved.txt").body == b"new"
    page = dav("GET", base + "sub/").body.decode()
    assert f'href="{base}"' in page
    assert dav("PUT", base + ".preload", b"x").status == 201
    assert bench.server.logins.sessions.find(session_id).max_inactive_s == 77  # type: ignore[union-attr]
    assert dav("PROPFIND", "/fs/" + "x" * 24 + "/").status == 401
    (folder / ("y" * 24)).mkdir()
    cookie = {"Cookie": f"{COOKIE}={session_id}"}
    assert dav("PROPFIND", "/fs/" + "y" * 24 + "/", Depth="0", **cookie).status == 207


# ---- the page


def test_the_page_of_the_file_manager(bench: Bench, folder: Path) -> None:
    name = "<img src=x onerror=alert(1)>\"'&.txt"
    (folder / name).write_text("x")
    (folder / "a;b?c.txt").write_text("x" * 1500)
    bench.root.insert(WfsDirectory("fs", io=DiskIo(folder)))
    dav = Client(bench, folder)
    answer = dav("GET", "/fs/")
    page = answer.body.decode()
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;&quot;&#x27;&amp;.txt" in page
    assert 'href="./a%3Bb%3Fc.txt"' in page
    assert "1.5 kB" in page
    assert dav("HEAD", "/fs/").status == 200
    assert dav("GET", "/fs/sub").headers["Location"] == "/fs/sub/"
    assert dav("GET", "/fs/none/").status == 404
    assert 'aria-current="page"><h1>deep' in dav("GET", "/fs/sub/deep/").body.decode()


def test_a_zip_file_can_only_be_read(bench: Bench, tmp_path: Path) -> None:
    with ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("sub/a.txt", "packed")
    bench.root.insert(WfsDirectory("fs", io=ZipIo(tmp_path / "x.zip"), lockdir=".LOCK"))
    dav = Client(bench, tmp_path)
    assert dav("PROPFIND", "/fs/").hrefs == ["/fs/", "/fs/sub/", "/fs/sub/a.txt"]
    assert dav("GET", "/fs/sub/a.txt").body == b"packed"
    assert b'data-name="a.txt"' in dav("GET", "/fs/sub/").body
    assert dav("LOCK", "/fs/sub/a.txt", LOCK % b"exclusive").status == 200, "in memory"
    for method, path in (("PUT", "/fs/b.txt"), ("MKCOL", "/fs/x")):
        assert dav(method, path, b"" if method == "PUT" else None).status == 403, method


def test_windows_sets_times(dav: Client) -> None:
    body = (
        b"<D:propertyupdate xmlns:D='DAV:' xmlns:Z='urn:schemas-microsoft-com:'><D:set><D:prop>"
        b"<Z:Win32LastModifiedTime>Mon</Z:Win32LastModifiedTime></D:prop></D:set></D:propertyupdate>"
    )
    answer = dav("PROPPATCH", "/fs/a.txt", body)
    assert (answer.status, b"200 OK" in answer.body) == (207, True)


def test_properties_of_clients(bench: Bench, folder: Path) -> None:
    first = DavDirectory("fs", io=DiskIo(folder), lockdir=".LOCK")
    bench.root.insert(first)
    dav = Client(bench, folder)

    def change(path: str, inner: str, verb: str = "set") -> str:
        body = f"<D:{verb}><D:prop>{inner}</D:prop></D:{verb}></D:propertyupdate>"
        answer = dav("PROPPATCH", path, f"<D:propertyupdate xmlns:D='DAV:' xmlns:x='urn:x'>{body}".encode())
        assert answer.status == 207
        return answer.body.decode()

    def values(path: str) -> list[str | None]:
        body = b"<D:propfind xmlns:D='DAV:' xmlns:x='urn:x'><D:prop><x:a/><b/></D:prop></D:propfind>"
        found = ElementTree.fromstring(dav("PROPFIND", path, body, Depth="0").body)
        groups = {
            str(group.findtext(D + "status"))[9:12]: group.find(D + "prop") for group in found.iter(D + "propstat")
        }
        return [each.text for each in groups.get("200", [])]  # type: ignore[union-attr]

    assert "200 OK" in change("/fs/a.txt", "<x:a>1 &lt; 2</x:a><b>two</b>")
    assert values("/fs/a.txt") == ["1 < 2", "two"]
    assert "1 &lt; 2" in dav("PROPFIND", "/fs/a.txt").body.decode()
    assert dav("COPY", "/fs/a.txt", Destination="/fs/sub/b.txt").status == 204
    assert dav("MOVE", "/fs/sub", Destination="/fs/moved").status == 201
    assert values("/fs/moved/b.txt") == ["1 < 2", "two"]
    assert "200 OK" in change("/fs/a.txt", "<x:a/>", "remove")
    assert values("/fs/a.txt") == ["two"]
    assert "403 Forbidden" in change("/fs/a.txt", "<D:getetag>mine</D:getetag>")
    assert "507" in change("/fs/a.txt", f"<x:a>{'x' * 2000}</x:a>")
    first.unlink()
    second = DavDirectory("fs", io=DiskIo(folder), lockdir=".LOCK")
    bench.root.insert(second)
    dav("PUT", "/fs/c.txt", b"x")
    assert values("/fs/moved/b.txt") == ["1 < 2", "two"]
    assert dav("DELETE", "/fs/moved/b.txt").status == 204
    assert dav("PUT", "/fs/moved/b.txt", b"new").status == 201
    assert values("/fs/moved/b.txt") == []
    second.unlink()
    bench.root.insert(DavDirectory("fs", io=DiskIo(folder)))
    assert "403 Forbidden" in change("/fs/a.txt", "<x:a>1</x:a>")


def test_an_acl_is_not_gone_around(bench: Bench, folder: Path) -> None:
    """By the URL of a session, by another spelling, by a Destination."""
    directory = WfsDirectory("fs", io=DiskIo(folder), lockdir=".LOCK")
    users = UserTable({"ann": {"pwd": "secret", "roles": ["user"]}})
    rules = {"all": {"urls": ["/*"], "roles": ["user"]}, "sub": {"urls": ["/sub/*", "/a.txt"], "roles": ["admin"]}}
    directory.setauth(Authenticator(users, "basic"), Acl(users, rules))
    bench.root.insert(directory)
    (folder / "free.txt").write_text("free")
    session_id = bench.server.logins.sessions.create("127.0.0.1").id
    dav, ann = Client(bench, folder), {"Authorization": "Basic " + b64encode(b"ann:secret").decode()}
    for base in ("/fs/", f"/fs/{session_id}/"):
        assert dav("GET", base + "free.txt", **ann).status == 200
        spellings = ("sub//b.txt", "%73ub/b.txt", "/sub/b.txt", "./sub/b.txt", "x/../sub/b.txt", "a.txt/", "./a.txt")
        for name in ("a.txt", "sub/b.txt", "sub/", *spellings):
            for method in ("GET", "PROPFIND", "DELETE", "PUT", "PROPPATCH"):
                assert dav(method, base + name, **ann).status in (403, 404, 409), (base, name, method)
        for name in ("sub/b.txt", "sub/new.txt", "sub//new.txt", "a.txt", "sub"):
            for method in ("COPY", "MOVE"):
                answer = dav(method, base + "free.txt", Destination=base + name, **ann)
                assert answer.status == 403, (base, name, method)
    assert (folder / "sub/b.txt").read_text() == "beta"
    assert dav("MOVE", "/fs/free.txt", Destination="/fs/other.txt", **ann).status == 201


def test_an_acl_of_a_file_server_cannot_be_bypassed(bench: Bench, folder: Path) -> None:
    users = UserTable({"ann": {"pwd": "secret", "roles": ["user"]}})
    rules = {"all": {"urls": ["/*"], "roles": ["user"]}, "sub": {"urls": ["/fs/sub/*"], "roles": ["admin"]}}
    outer = Directory("app")
    outer.setauth(Authenticator(users, "basic"), Acl(users, rules))
    outer.insert(DavDirectory("fs", io=DiskIo(folder)))
    bench.root.insert(outer)
    session_id = bench.server.logins.sessions.create("127.0.0.1").id
    dav, ann = Client(bench, folder), {"Authorization": "Basic " + b64encode(b"ann:secret").decode()}
    for base in ("/app/fs/", f"/app/fs/{session_id}/"):
        assert dav("GET", base + "a.txt", **ann).status == 200
        for name in ("sub/b.txt", "sub/.b", "./sub/b.txt", "sub"):
            assert dav("PROPFIND", base + name, **ann).status in (403, 404), (base, name)
            assert dav("COPY", base + "a.txt", Destination=base + name, **ann).status in (403, 404), (base, name)
    assert (folder / "sub/b.txt").read_text() == "beta"
