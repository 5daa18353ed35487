"""Names of a file server, and the files that its clients see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smqrt.http.dav import share as module
from smqrt.http.dav.share import DavShare, canonical, destination, escaped, href, unescaped, xml_text
from smqrt.http.disk import DiskIo
from smqrt.http.headers import HttpError
from smqrt.http.resources import IoError, VirtualIo
from tests.http.dav.dav_client import LOCK, Client


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


def status_of(header: str, bases: tuple[str, ...] = ("/fs/",)) -> int:
    with pytest.raises(HttpError) as error:
        destination(header, ("a.example",), bases)
    return error.value.status


def test_a_destination_is_a_path_in_the_share() -> None:
    bases = ("/fs/session/", "/fs/")
    for header, path in (
        ("/fs/a%20b", "a b"),
        ("HTTP://A.example/fs/x/", "x"),
        ("/fs/session/x", "x"),
        ("/fs/session", ""),
        (" /fs//x/./y ", "x/y"),
    ):
        assert destination(header, ("a.example",), bases) == path, header
    assert [status_of(header) for header in ("/fsx/y", "/", "ftp://a.example/fs/x", "/fs/ä")] == [502, 502, 400, 400]


@pytest.mark.parametrize("name", ["a%3Fb?c", "50%;#", "\udcff\udc80x", "ä/b"])
def test_escaped_names_come_back_as_they_were(name: str) -> None:
    assert unescaped(escaped(name)) == name
    assert not set("?;#") & set(escaped(name))
    escaped(name).encode()
    assert href(name).isascii()


def test_names_have_one_form() -> None:
    assert canonical("//a/./b//c/") == canonical("a/b/c") == "a/b/c"
    for name in ("../a", "a/../../b", "a\0b"):
        with pytest.raises(HttpError) as error:
            canonical(name)
        assert error.value.status == 404


def test_characters_that_xml_lacks_are_replaced() -> None:
    assert xml_text("<a&b>\x00\x1f\udcff\uffff\t") == "&lt;a&amp;b&gt;\ufffd\ufffd\ufffd\ufffd\t"


def word(call: Callable[[], object]) -> str:
    with pytest.raises(IoError) as raised:
        call()
    return raised.value.word


def test_owners_see_all_but_the_folder_of_locks(folder: Path) -> None:
    io = DiskIo(folder)
    (folder / ".env").write_text("secret")
    for owner in (False, True):
        share = DavShare(io, ".LOCK", owner)
        assert [share.shows(name) for name in (".env", "page.lsp", ".LOCK", ".LOCK/x", ".LOCKx")] == [
            owner, owner, False, False, owner,
        ]  # fmt: skip
        assert (share.stat(".env") is not None) is owner
    assert io.private.is_private("code.lua"), "the rules of the application stay"


def test_listings_have_folders_first_regardless_of_case(folder: Path) -> None:
    for name in ("B.txt", "c.txt", "Zoo/x", ".hidden", "e.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "out").symlink_to("/etc")
    share = DavShare(DiskIo(folder))
    assert [name for name, _ in share.list("")] == ["sub", "Zoo", "a.txt", "B.txt", "c.txt", "e.txt"]
    assert [name for name, _ in share.list("sub")] == ["sub/deep", "sub/b.txt"]


def test_operations_on_whole_folders_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 5)
    share = DavShare(DiskIo(folder))
    assert [name for name, _ in share.walk("")] == ["sub", "a.txt", "sub/deep", "sub/b.txt", "sub/deep/c.txt"]
    (folder / "more").touch()
    assert word(lambda: list(share.walk(""))) == "toomuchdata"


def test_a_tree_with_invisible_files_is_not_removed(folder: Path) -> None:
    (folder / "sub/deep/.git").mkdir()
    share = DavShare(DiskIo(folder))
    assert share.has_invisible("sub")
    assert word(lambda: share.remove_tree("sub")) == "notempty"
    assert (folder / "sub/deep/.git").exists()
    assert not DavShare(DiskIo(folder), owner=True).has_invisible("sub")
    assert DavShare(DiskIo(folder), "sub/.LOCK", owner=True).has_invisible("sub")


def test_what_is_invisible_cannot_be_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("outside")
    (folder / "link").symlink_to(tmp_path / "target")
    share = DavShare(DiskIo(folder))
    assert share.stat("link") is None
    for call in (
        lambda: share.copy("a.txt", "link"),
        lambda: share.rename("a.txt", "link"),
        lambda: share.rename("a.txt", "page.lsp"),
        lambda: share.mkdir(".hidden"),
        lambda: share.remove("", True),
    ):
        assert word(call) == "noaccess"
    assert (tmp_path / "target").read_text() == "outside"
    assert (folder / "link").is_symlink()


def test_a_large_file_is_copied_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COPIED_BYTES", 1 << 20)
    data = bytes(range(256)) * 10_000
    (folder / "large").write_bytes(data)
    DavShare(DiskIo(folder)).copy("large", "a.txt")
    assert (folder / "a.txt").read_bytes() == data
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "large", "sub"]


def test_the_root_is_a_folder_without_an_entry() -> None:
    class Rootless(VirtualIo):
        def published(self, name: str) -> Any:
            if not name:
                raise IoError("notfound", "no entry for the root")
            return super().published(name)

    share = DavShare(Rootless({"a.txt": lambda: b"x"}))
    root = share.stat("")
    assert root is not None
    assert root.isdir
    assert share.stat("none") is None
