"""File server directories: limits, logins, session URLs and the file manager (spec: bas-api §4, §17)."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from smqrt.errors import ArgumentError
from smqrt.http.dav import share
from smqrt.http.dav.directory import DavDirectory, WfsDirectory
from smqrt.http.disk import DiskIo, ZipIo
from smqrt.http.logins import Acl, Authenticator, UserTable
from smqrt.http.message import Request
from smqrt.http.sessions import COOKIE
from smqrt.http.tree import Directory, ResourceReader
from tests.http.dav.dav_client import LOCK, Client
from tests.http.http_bench import Bench
from tests.support.waiting import wait_until


def test_options(dav: Client) -> None:
    answer = dav("OPTIONS", "/fs/")
    assert answer.status == 200
    assert answer.headers["DAV"] == "1,2"
    assert answer.headers["MS-Author-Via"] == "DAV"
    assert "PROPFIND" in answer.headers["Allow"]


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


def test_unknown_methods(dav: Client) -> None:
    for method in ("POST", "REPORT", "PATCH"):
        answer = dav(method, "/fs/a.txt", b"x")
        assert answer.status in (400, 405), method
    assert dav("POST", "/fs/").headers["Allow"].startswith("OPTIONS")


def test_files_run_no_scripts(dav: Client) -> None:
    (dav.folder / "x.html").write_text("<script>")
    assert dav("GET", "/fs/x.html").headers["Content-Security-Policy"].startswith("sandbox")
    assert dav("GET", "/fs/a.txt").headers["X-Content-Type-Options"] == "nosniff"


def test_a_page_of_another_host_changes_nothing(dav: Client) -> None:
    for method in ("PUT", "DELETE", "MKCOL", "PROPFIND"):
        assert dav(method, "/fs/a.txt", Origin="https://evil.example").status == 403


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


@pytest.mark.parametrize("limits", [{"max_uploads": 0}, {"max_locks": 0}])
def test_limits_of_file_servers_are_at_least_one(folder: Path, limits: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="must be at least 1"):
        DavDirectory("fs", io=DiskIo(folder), **limits)  # type: ignore[arg-type]


def test_sizes_have_three_digits_at_most(bench: Bench, tmp_path: Path) -> None:
    sizes = {999: "999 B", 1000: "1.0 kB", 9940: "9.9 kB", 12_345: "12 kB", 999_499: "999 kB", 999_500: "1.0 MB"}
    for size in sizes:
        with (tmp_path / f"{size}").open("wb") as file:
            file.truncate(size)
    bench.root.insert(WfsDirectory("fs", io=DiskIo(tmp_path)))
    page = Client(bench, tmp_path)("GET", "/fs/").body.decode()
    found = re.findall(r'data-name="(\d+)".*?<td class="size">([^<]*)<', page)
    assert {int(name): size for name, size in found} == sizes


def test_hooks_of_a_file_manager_come_first(bench: Bench, folder: Path) -> None:
    """The filter sees each request, the command only those with a parameter `cmd`; what answers ends the request."""
    seen: list[tuple[str, str]] = []

    def hook(name: str, answers: bool) -> Callable[[Request, str], bool]:
        def call(request: Request, path: str) -> bool:
            seen.append((name, path))
            if answers:
                request.response.write(name)
            return answers

        return call

    directory = WfsDirectory("fs", io=DiskIo(folder))
    directory.filterservice, directory.dircmd = hook("filter", False), hook("command", True)
    bench.root.insert(directory)
    dav = Client(bench, folder)
    assert dav("GET", "/fs/a.txt?commands=1").body == b"alpha"
    assert dav("GET", "/fs/sub/?x&cmd").body == b"command"
    assert seen == [("filter", "a.txt"), ("filter", "sub/"), ("command", "sub/")]
    directory.filterservice = hook("filter", True)
    assert dav("DELETE", "/fs/a.txt?cmd=1").body == b"filter"
    assert (folder / "a.txt").exists()


def test_a_folder_with_too_many_entries_is_403(dav: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "MAX_LISTED", 2)
    dav.bench.root.insert(WfsDirectory("wfs", io=DiskIo(dav.folder / "sub")))
    assert dav("GET", "/wfs/").status == 200
    (dav.folder / "sub/third").touch()
    assert dav("GET", "/wfs/").status == 403
    assert dav("PROPFIND", "/fs/sub/", Depth="1").status == 403
