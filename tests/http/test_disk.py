"""Folders and ZIP archives behind one interface (spec: bas-api §6, §15)."""

from __future__ import annotations

import os
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from smqrt.http import disk
from smqrt.http.disk import MAX_RATIO, DiskIo, ZipIo
from smqrt.http.open_files import Disks
from smqrt.http.resources import Io, IoError

FILES = {"a.txt": b"one", "sub/b.txt": b"two two", "sub/deep/c.bin": bytes(5000), ".preload": b"hidden is not for us"}


def word(call: Callable[[], object]) -> str:
    with pytest.raises(IoError) as raised:
        call()
    return raised.value.word


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        path = tmp_path / "app" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "outside.txt").write_text("outside")
    return tmp_path / "app"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "app.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in FILES.items():
            file.writestr(name, data)
        file.mkdir("empty")
    return path


@pytest.fixture(params=["folder", "zip"])
def io(request: pytest.FixtureRequest, folder: Path, archive: Path) -> Io:
    (folder / "empty").mkdir()
    return DiskIo(folder) if request.param == "folder" else ZipIo(archive)


# both


@pytest.mark.parametrize("name", FILES)
def test_reading(io: Io, name: str) -> None:
    assert io.read(name) == FILES[name]
    assert io.read("/" + name) == FILES[name]
    with io.open(name) as file:
        assert file.read(2) == FILES[name][:2]
        file.seek(1)
        assert file.read() == FILES[name][1:]
    stat = io.stat(name)
    assert (stat.name, stat.size, stat.isdir) == (name.rpartition("/")[2], len(FILES[name]), False)
    assert stat.mtime > 1_600_000_000


def test_directories(io: Io) -> None:
    assert {entry.name: entry.isdir for entry in io.files("")} == {
        "a.txt": False,
        "sub": True,
        ".preload": False,
        "empty": True,
    }
    assert {entry.name: entry.size for entry in io.files("sub") if not entry.isdir} == {"b.txt": 7}
    assert list(io.files("empty/")) == []
    for name in ("", "/", "sub", "sub/", "/sub/deep/", "sub/../sub/./deep"):
        assert io.stat(name).isdir, name


def test_sub(io: Io) -> None:
    sub = io.sub("sub")
    assert sub.read("b.txt") == b"two two"
    assert sub.read("deep/c.bin") == bytes(5000)
    assert word(lambda: sub.read("../a.txt")) == "invalidname"
    assert word(lambda: sub.read("a.txt")) == "notfound"
    assert word(lambda: io.sub("none")) == "notfound"


@pytest.mark.parametrize(
    "name", ["..", "../outside.txt", "/..", "sub/../../outside.txt", "a\0b", "sub\\b.txt", "..\\outside.txt"]
)
def test_names_that_lead_elsewhere(io: Io, name: str) -> None:
    for call in (
        io.read,
        io.stat,
        io.sub,
        io.realpath,
        lambda name: list(io.files(name)),
        io.published,
        io.open_published,
    ):
        assert word(lambda call=call: call(name)) == "invalidname"  # type: ignore[misc]
    assert io.version(name) is None


@pytest.mark.parametrize("name", ["none", "sub/none", "a.txt/x", "none/none"])
def test_not_found(io: Io, name: str) -> None:
    assert word(lambda: io.read(name)) == "notfound"
    assert word(lambda: io.stat(name)) == "notfound"
    assert word(lambda: list(io.files(name))) == "notfound"
    assert io.version(name) is None


def test_a_directory_is_no_file(io: Io) -> None:
    assert word(lambda: io.read("sub")) == "noaccess"
    assert word(lambda: list(io.files("a.txt"))) == "notfound"


# folders


def test_writing(folder: Path) -> None:
    io = DiskIo(folder)
    with io.open("new.txt", "w") as file:
        file.write(b"12345")
    with io.open("new.txt", "a") as file:
        file.write(b"6")
    with io.open("new.txt", "r+") as file:
        file.write(b"X")
    assert io.read("new.txt") == b"X23456"
    io.rename("new.txt", "sub/newer.txt")
    assert (folder / "sub/newer.txt").read_bytes() == b"X23456"
    io.remove("sub/newer.txt")
    io.mkdir("made")
    io.rmdir("made")
    assert io.realpath("/sub/../a.txt") == str(folder / "a.txt")
    assert io.realpath() == str(folder)
    assert io.kind == "disk"


def test_words_of_the_system(folder: Path) -> None:
    io = DiskIo(folder)
    assert word(lambda: io.mkdir("sub")) == "exist"
    assert word(lambda: io.rmdir("sub")) == "notempty"
    assert word(lambda: io.remove("none")) == "notfound"
    assert word(lambda: io.rename("none", "other")) == "notfound"
    assert word(lambda: io.open("none/x", "w")) == "notfound"
    assert word(lambda: io.open("x" * 300, "w")) == "invalidname"
    assert word(lambda: io.open("a.txt", "z")) == "invalidname"
    assert word(lambda: DiskIo(folder / "none")) == "notfound"
    assert word(lambda: DiskIo(folder / "a.txt")) == "notfound"


def test_a_zip_in_a_folder(folder: Path, archive: Path) -> None:
    assert DiskIo(archive.parent).sub("app.zip").read("a.txt") == b"one"
    assert word(lambda: DiskIo(folder).sub("a.txt")) == "ziperror"


# archives


def test_archives_are_read_only(archive: Path) -> None:
    io = ZipIo(archive)
    for call in (
        lambda: io.open("a.txt", "w"),
        lambda: io.mkdir("x"),
        lambda: io.remove("a.txt"),
        lambda: io.rmdir("empty"),
        lambda: io.rename("a.txt", "b.txt"),
    ):
        assert word(call) == "noaccess"
    assert io.realpath("sub/b.txt") == f"{archive}/sub/b.txt"
    assert io.kind == "zip"


def test_a_replaced_archive_is_seen(archive: Path) -> None:
    io = ZipIo(archive)
    before = io.version("a.txt")
    new = archive.with_suffix(".new")
    with zipfile.ZipFile(new, "w") as file:
        file.writestr("a.txt", "new")
    assert io.read("a.txt") == b"one"
    os.replace(new, archive)
    assert io.version("a.txt") != before
    assert io.read("a.txt") == b"new"
    assert io.version("sub/b.txt") is None


def test_an_archive_being_written_keeps_its_old_state(archive: Path) -> None:
    io = ZipIo(archive)
    assert io.stat("a.txt").size == 3
    archive.write_bytes(archive.read_bytes()[:50])
    assert io.stat("a.txt").size == 3


def write(path: Path, *entries: tuple[zipfile.ZipInfo | str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for info, data in entries:
            file.writestr(info, data)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/x",
        "a/../../x",
        "./../x",
        "a\\..\\x",
        "..",
        "C:\\x",
        "c:/x",
        "d:",
        "\\x",
        "\\\\server\\x",
        "a/../b",
    ],
)
def test_an_archive_with_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    info = zipfile.ZipInfo("x")
    info.filename = name
    with pytest.raises(IoError, match="leads out of the archive") as caught:
        ZipIo(write(tmp_path / "bad.zip", (info, b"x")))
    assert caught.value.word == "ziperror"
    assert repr(name) in str(caught.value)


class RawInfo(zipfile.ZipInfo):
    """An entry whose name is any bytes."""

    raw, flags = b"", 0

    def _encodeFilenameFlags(self) -> tuple[bytes, int]:
        return self.raw, self.flags


def raw(path: Path, *names: bytes, flags: int = 0) -> Path:
    """An archive whose entries have these bytes as names and as content."""
    with zipfile.ZipFile(path, "w") as file:
        for at, name in enumerate(names):
            info = RawInfo(str(at))
            info.raw, info.flags = name, flags
            file.writestr(info, name)
    return path


def listed(io: ZipIo, path: str = "") -> list[str]:
    """All files, with their folders."""
    found = []
    for stat in io.files(path):
        inner = f"{path}/{stat.name}".lstrip("/")
        found += listed(io, inner) if stat.isdir else [inner]
    return sorted(found)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([b"./.preload", b"./a/b.lsp"], [".preload", "a/b.lsp"]),
        ([b"a\\", b"a\\b\\c.txt", b".\\.lua\\m.lua"], [".lua/m.lua", "a/b/c.txt"]),
        ([b"./", b".", b"a/./b.txt", b"a//c.txt"], ["a/b.txt", "a/c.txt"]),
        ([b"a\\b.txt", b"A\\b.txt", b"a/c.txt"], ["A/b.txt", "a/b.txt", "a/c.txt"]),
        ([b"gr\xc3\xbc\xc3\x9fe\\x.txt"], ["gr\u00fc\u00dfe/x.txt"]),
        ([b"gr\x81\xe1e.txt"], ["gr\u00fc\u00dfe.txt"]),  # code page 437
        ([b"a:b.txt"], ["a:b.txt"]),
    ],
)
def test_names_in_an_archive(tmp_path: Path, names: list[bytes], expected: list[str]) -> None:
    """As packers of Windows and of old times write them."""
    io = ZipIo(raw(tmp_path / "a.zip", *names))
    assert listed(io) == expected
    assert len({io.read(name) for name in expected}) == len(expected)
    assert {io.read(name) for name in expected} <= set(names)


def test_a_name_that_is_marked_as_utf8(tmp_path: Path) -> None:
    assert listed(ZipIo(raw(tmp_path / "a.zip", "gr\u00fc\u00dfe\\x".encode(), flags=1 << 11))) == ["gr\u00fc\u00dfe/x"]
    assert word(lambda: ZipIo(raw(tmp_path / "b.zip", b"\xff.txt", flags=1 << 11))) == "ziperror"


@pytest.mark.parametrize("second", [b"a\\b.txt", b"./a/b.txt", b"a//b.txt"])
def test_names_that_are_the_same(tmp_path: Path, second: bytes) -> None:
    with pytest.raises(IoError, match=r"duplicate entry 'a/b.txt'"):
        ZipIo(raw(tmp_path / "a.zip", b"a/b.txt", second))


def test_an_archive_with_a_nul_in_a_name(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.zip", ("abcdef.txt", b"x"))
    path.write_bytes(path.read_bytes().replace(b"abcdef.txt", b"abc\0ef.txt"))
    assert word(lambda: ZipIo(path)) == "ziperror"


def test_readers_of_an_entry_share_its_content(tmp_path: Path) -> None:
    io = ZipIo(write(tmp_path / "a.zip", ("x", os.urandom(1 << 20))))
    tracemalloc.start()
    try:
        readers = [io.open("x") for _ in range(50)]
        assert {reader.read(100) for reader in readers} == {io.read("x")[:100]}
        assert tracemalloc.get_traced_memory()[0] < 4 << 20
        readers.clear()
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def test_bombs(tmp_path: Path) -> None:
    assert word(lambda: ZipIo(write(tmp_path / "bomb.zip", ("x", bytes(8 << 20))))) == "ziperror"
    small = write(tmp_path / "small.zip", ("x", bytes(100_000)))
    assert len(ZipIo(small).read("x")) == 100_000, f"dense but small is fine, although over {MAX_RATIO}"


def test_an_entry_that_is_larger_than_it_says(tmp_path: Path) -> None:
    path = write(tmp_path / "liar.zip", ("x", os.urandom(1000)))
    data = path.read_bytes().replace(struct.pack("<L", 1000), struct.pack("<L", 10))
    path.write_bytes(data)
    assert word(lambda: ZipIo(path).read("x")) == "ziperror"


def test_damaged_content(tmp_path: Path) -> None:
    path = write(tmp_path / "damaged.zip", ("x", b"hello " * 100))
    packed = zlib.compressobj(6, zlib.DEFLATED, -15)
    content = packed.compress(b"hello " * 100) + packed.flush()
    data = path.read_bytes()
    path.write_bytes(data.replace(content, bytes(len(content))))
    assert path.read_bytes() != data
    assert word(lambda: ZipIo(path).read("x")) == "ziperror"


def test_things_that_are_no_archive(tmp_path: Path, folder: Path) -> None:
    nonsense = tmp_path / "nonsense.zip"
    nonsense.write_bytes(b"PK\x03\x04 nonsense")
    empty = tmp_path / "empty.zip"
    empty.touch()
    assert word(lambda: ZipIo(nonsense)) == "ziperror"
    assert word(lambda: ZipIo(empty)) == "ziperror"
    assert word(lambda: ZipIo(tmp_path / "none.zip")) == "notfound"
    assert word(lambda: ZipIo(folder)) == "ziperror"


def test_an_entry_that_is_there_twice(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        path = write(tmp_path / "twice.zip", ("x", b"1"), ("x", b"2"))
    assert word(lambda: ZipIo(path)) == "ziperror"
    assert word(lambda: ZipIo(write(tmp_path / "both.zip", ("x", b"1"), ("x/y", b"2")))) == "ziperror"


def test_what_encrypted_archives_hold_is_not_served(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zip", ("x", b"secret"))
    data = path.read_bytes()
    at = data.index(b"PK\x01\x02") + 8  # the flags of the entry in the directory
    path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    with pytest.raises(IoError, match="is encrypted") as caught:
        ZipIo(path)
    assert caught.value.word == "ziperror"


def test_an_archive_in_memory_needs_no_file(archive: Path) -> None:
    io = ZipIo("bundle", data=archive.read_bytes())
    archive.unlink()
    assert io.read("a.txt") == b"one"
    assert io.sub("sub").read("b.txt") == b"two two"
    assert io.disk_path("a.txt") == ""
    assert word(lambda: ZipIo("bundle", "a.txt", io_data(io))) == "notfound"


def io_data(io: ZipIo) -> bytes:
    """The content of an archive, packed again."""
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name in listed(io):
            file.writestr(name, io.read(name))
    return packed.getvalue()


def test_links_are_left_to_calls_that_may_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`open_now` and `stat_now` run on the loop: a link may lead to a disk that hangs."""
    (folder / "link").symlink_to(folder / "a.txt")
    os.mkfifo(folder / "pipe")
    disks = Disks(lambda: {"/": True})
    monkeypatch.setattr(disk, "disks", disks)
    io = DiskIo(folder)
    assert (io.stat_now("a.txt"), io.open_now("a.txt")) == (None, None), "on a disk that nobody has looked at yet"
    disks.find_mount(str(folder / "a.txt"))
    assert [io.open_now(name) for name in ("link", "pipe", "sub")] == [None] * 3
    assert io.stat_now("link") is None
    stat = io.stat_now("a.txt")
    assert stat is not None
    assert (stat.size, stat.version) == (3, io.version("a.txt"))
    assert word(lambda: io.stat_now("none")) == "notfound"
    assert word(lambda: io.open_now("none")) == "notfound"


def test_entries_removed_while_listing_are_left_out(folder: Path) -> None:
    entries = DiskIo(folder).files("sub")
    (folder / "sub/b.txt").unlink()
    assert [entry.name for entry in entries] == ["deep"]


def test_published_reads_stop_at_their_limit(io: Io) -> None:
    stat, data = io.read_published("sub/b.txt", 3)
    assert (stat.name, stat.size, data) == ("b.txt", 7, b"two")
