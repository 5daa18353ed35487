"""WebDAV methods, conditions, locks and properties (RFC 4918)."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

import pytest

from smqrt.http.dav import share
from smqrt.http.dav.directory import DavDirectory
from smqrt.http.disk import DiskIo
from tests.http.dav.dav_client import LOCK, Answer, Client, D, longest_turn_s
from tests.http.http_bench import Bench


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


def test_conditions(dav: Client) -> None:
    tag = dav("GET", "/fs/a.txt").headers["ETag"]
    assert dav("PUT", "/fs/a.txt", b"x", If_None_Match="*").status == 412
    assert dav("PUT", "/fs/a.txt", b"x", If_Match='"other"').status == 412
    made = dav("PUT", "/fs/a.txt", b"longer", If_Match=tag)
    assert made.status == 204
    assert made.headers["ETag"] == dav("GET", "/fs/a.txt").headers["ETag"] != tag
    assert dav("PUT", "/fs/a.txt", b"x", Content_Range="bytes 0-1/2").status == 400


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


def test_header_fields_that_cost_time(dav: Client) -> None:
    for field in ("If", "Timeout"):
        assert dav("PUT", "/fs/a.txt", b"x", **{field: "<" * 5000}).status == 400
    for field in ("If-Modified-Since", "If-Unmodified-Since"):
        assert dav("PUT", "/fs/a.txt", b"x", **{field: "Sat, 29 Oct 99999 19:43:31 GMT"}).status == 204
    assert dav("PUT", "/fs/a.txt", b"x", If_Unmodified_Since="Sat, 29 Oct 1994 19:43:31 GMT").status == 412
    assert dav("PUT", "/fs/" + "a" * 300, b"x").status == 400
    assert dav("PUT", "/fs/", b"x").status == 405


def test_many_entries_delay_no_others(dav: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "MAX_ENTRIES", 3000)
    for number in range(3000):
        (dav.folder / f"{number:05}").touch()
    answers: list[Answer] = []
    assert longest_turn_s(lambda: answers.append(dav("PROPFIND", "/fs/", Depth="1"))) < 0.05
    assert answers[0].body.count(b"<D:response>") == 3003
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


def test_a_lock_inside_keeps_the_folder(dav: Client) -> None:
    token = dav.locked("/fs/sub/deep/c.txt")
    assert dav("DELETE", "/fs/sub/").status == 423
    assert dav("MOVE", "/fs/sub", Destination="/fs/moved").status in (207, 423)
    assert (dav.folder / "sub/deep/c.txt").exists()
    assert dav("UNLOCK", "/fs/sub/deep/c.txt", Lock_Token=token).status == 204
    assert dav("DELETE", "/fs/sub/").status == 204


def test_a_replaced_folder_loses_its_content(dav: Client) -> None:
    assert dav("MKCOL", "/fs/other").status == 201
    assert dav("PUT", "/fs/other/new.txt", b"new").status == 201
    assert dav("COPY", "/fs/other/", Destination="/fs/sub/").status == 204
    assert [path.name for path in (dav.folder / "sub").iterdir()] == ["new.txt"]
    assert dav("COPY", "/fs/other/", Destination="/fs/a.txt").status == 204
    assert (dav.folder / "a.txt").is_dir()


def test_what_was_created_is_a_201_without_body(dav: Client) -> None:
    for method, path, headers in (
        ("PUT", "/fs/new", {}),
        ("MKCOL", "/fs/made", {}),
        ("COPY", "/fs/a.txt", {"Destination": "/fs/b"}),
    ):
        answer = dav(method, path, b"x" if method == "PUT" else None, **headers)
        assert (answer.status, answer.body) == (201, b""), method
