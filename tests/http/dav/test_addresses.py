"""The address of a file server without its last slash, and the folders above it, where Windows asks first."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.http.dav.directory import DavDirectory, WfsDirectory
from smqrt.http.disk import DiskIo
from smqrt.http.logins import Authenticator, FunctionAuthorizer
from smqrt.http.message import Request
from smqrt.http.tree import Directory, ResourceReader
from tests.http.dav.dav_client import LOCK, Client
from tests.http.http_bench import Bench

ROUTES = {
    "top": "/fs",
    "inside": "/shop/files/fs",
    "dotted": "/my.files",
    "umlaut": "/%C3%A4",
    "twice": "//shop//files/fs",
}


@pytest.fixture(params=[DavDirectory, WfsDirectory])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], DavDirectory]:
    """`make(name)` gives a file server."""
    (tmp_path / "a.txt").write_text("alpha")
    return lambda name: request.param(name, io=DiskIo(tmp_path), lockdir=".LOCK")


@pytest.fixture
def dav(bench: Bench, tmp_path: Path, make: Callable[[str], DavDirectory]) -> Client:
    """Clients of a server with a file server at each of `ROUTES`, below an application that would answer all else."""
    for name in ("fs", "my.files", "ä"):
        bench.root.insert(make(name))
    shop, files = ResourceReader("shop", io=DiskIo(tmp_path)), Directory("files")
    bench.root.insert(shop)
    shop.insert(files)
    files.insert(make("fs"))
    bench.handle(_everything)
    return Client(bench, tmp_path)


def _everything(request: Request, relpath: str) -> bool:
    if relpath in ("fs", "my.files", "ä", "shop/files/fs") or relpath.startswith("shop"):
        return False
    request.response.write(f"{request.method} {relpath}")
    return True


@pytest.mark.parametrize("path", ROUTES.values(), ids=ROUTES)
def test_its_methods_need_no_slash(dav: Client, path: str) -> None:
    listed = dav("PROPFIND", path, Depth="1")
    assert listed.status == 207
    assert listed.hrefs == [f"{path.replace('//', '/')}/", f"{path.replace('//', '/')}/a.txt"]
    options = dav("OPTIONS", path)
    assert (options.status, options.headers["DAV"], options.headers["MS-Author-Via"]) == (200, "1,2", "DAV")
    assert "LOCK" in options.headers["Allow"]
    token = dav.locked(path, Depth="0")
    assert dav("UNLOCK", path, Lock_Token=token).status == 204
    assert dav("MKCOL", path).status == 405  # it is there
    assert dav("PUT", path, b"x").status == 405
    assert dav("DELETE", path).status == 403
    assert dav("MOVE", path, Destination=f"{path}x").status == 403
    assert dav("COPY", f"{path}/a.txt", Destination=path.replace("//", "/")).status == 403
    assert dav("PROPPATCH", path, b"<propertyupdate xmlns='DAV:'/>").status in (200, 207)
    assert dav("REPORT", path).status == 405
    for method in ("GET", "HEAD", "POST"):
        answer = dav(method, f"{path}?a=1")
        assert (answer.status, answer.headers["Location"].partition("://")[2].partition("/")[2]) == (
            302,
            f"{path[1:]}/?a=1",
        )
    assert dav("PROPFIND", f"{path}x").status != 207


@pytest.mark.parametrize("path", ["/", "*", "/shop", "/shop/", "/shop/files", "/shop/files/", "//shop//"])
def test_options_announce_dav_above(dav: Client, path: str) -> None:
    answer = dav("OPTIONS", path)
    assert answer.status in (200, 204)
    assert answer.headers.get_all("DAV") == ["1,2"]
    assert answer.headers.get_all("MS-Author-Via") == ["DAV"]
    assert dav("GET", path).headers["DAV"] is None if path != "*" else True


def test_and_nowhere_else(bench: Bench, dav: Client) -> None:
    for path in ("/none/", "/s", "/shop2/", "/f"):
        assert dav("OPTIONS", path).headers["DAV"] is None
    for directory in bench.root.children:
        if directory.name:
            directory.unlink()
    assert dav("OPTIONS", "/").headers["DAV"] is None
    assert dav("OPTIONS", "*").headers["DAV"] is None


def test_one_at_the_top(bench: Bench, tmp_path: Path, make: Callable[[str], DavDirectory]) -> None:
    bench.root.insert(make(""))
    client = Client(bench, tmp_path)
    for path in ("/", "*"):
        assert client("OPTIONS", path).headers.get_all("DAV") == ["1,2"]
    (tmp_path / "sub").mkdir()
    assert client("PROPFIND", "/sub", Depth="0").hrefs == ["/sub/"]


def test_a_failing_application_above_still_reports(bench: Bench, tmp_path: Path) -> None:
    bench.root.insert(DavDirectory("fs", io=DiskIo(tmp_path)))
    bench.handle(lambda request, relpath: request.response.error(405))
    answer = Client(bench, tmp_path)("OPTIONS", "/")
    assert (answer.status, answer.headers["DAV"]) == (405, "1,2")


def test_logins_and_rights_hold_without_the_slash(bench: Bench, tmp_path: Path) -> None:
    outer, files = ResourceReader("shop", io=DiskIo(tmp_path)), DavDirectory("fs", io=DiskIo(tmp_path), lockdir=".LOCK")
    bench.root.insert(outer)
    outer.insert(files)
    asked: list[str] = []

    def allows(name: str, method: str, path: str, session: object) -> bool:
        asked.append(path)
        return method != "LOCK"

    outer.setauth(Authenticator({"ann": "secret"}, "basic"), FunctionAuthorizer(allows))
    client = Client(bench, tmp_path)
    assert client("PROPFIND", "/shop/fs", Depth="0").status == 401
    ann = "Basic " + b64encode(b"ann:secret").decode()
    assert client("PROPFIND", "/shop/fs", Depth="0", Authorization=ann).status == 207
    assert client("LOCK", "/shop/fs", LOCK % b"exclusive", Authorization=ann).status == 403
    assert asked == ["fs/", "fs/"]


def test_a_session_url_needs_no_slash(bench: Bench, tmp_path: Path) -> None:
    files = DavDirectory("fs", io=DiskIo(tmp_path))
    bench.root.insert(files)
    told: list[str] = []

    def open_session(request: Request, relpath: str) -> None:
        told.append(request.session(create=True).id)  # type: ignore[attr-defined]

    bench.handle(open_session, "open")
    client = Client(bench, tmp_path)
    client("GET", "/open/")
    assert client("PROPFIND", f"/fs/{told[0]}", Depth="0").hrefs == [f"/fs/{told[0]}/"]
    assert client("OPTIONS", f"/fs/{told[0]}").headers["DAV"] == "1,2"
