"""Modes of files: what was said to a hub is for the eyes of the server's user, folders 0700, files 0600."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from smqrt import hub
from smqrt.errors import JournalError
from smqrt.journal import files, manifest, readers, recovery, segment
from smqrt.journal.compact import CompactOptions, compact
from smqrt.journal.files import make_folder
from smqrt.journal.inspection import export
from smqrt.journal.reader import Journal


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """The widest there is: what is not asked for is seen."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(top: Path) -> dict[str, str]:
    """What others than the owner may do with anything there."""
    found = {}
    for path in (top, *top.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode != (0o700 if path.is_dir() else 0o600):
            found[str(path.relative_to(top))] = oct(mode)
    return found


def test_a_hub_and_what_is_made_of_its_journal(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "deep" / "journal"
    (tmp_path / "new").mkdir(0o700)
    smq = hub.create(journal={"path": str(folder), "node": "n1"}, persist=str(tmp_path / "new" / "names"))
    try:
        smq.publish("secret", "topic")
    finally:
        smq.journal.close()
        smq.close()
    readers.save_report(folder, {"query": "q", "name": "q", "offset": {"n1": 1}, "time_us": 0})
    assert modes(tmp_path / "new") == {}
    assert {path.suffix for path in folder.rglob("*.*")} >= {".arrows", ".idx", ".json"}
    compact(folder, CompactOptions(after_s=0, grace_s=0, everything=True))
    assert [*folder.rglob("*.parquet")]
    with manifest.edit(folder):
        pass
    assert modes(tmp_path / "new") == {}


@pytest.mark.parametrize("ending", ["parquet", "arrow", "csv", "jsonl"])
def test_exports(tmp_path: Path, ending: str) -> None:
    smq = hub.create(journal={"path": str(tmp_path / "journal"), "node": "n1"})
    smq.publish("secret", "topic")
    smq.journal.close()
    smq.close()
    journal = Journal(tmp_path / "journal")
    export(journal, journal.begin(), journal.end(), tmp_path / f"out.{ending}")
    assert stat.S_IMODE((tmp_path / f"out.{ending}").stat().st_mode) == 0o600


def test_an_index_that_is_made_again(tmp_path: Path) -> None:
    smq = hub.create(journal={"path": str(tmp_path / "journal"), "node": "n1"})
    smq.publish("secret", "topic")
    smq.journal.close()
    smq.close()
    [index] = (tmp_path / "journal").rglob("*.idx")
    index.unlink()
    recovery.recover(index.parent)
    assert index.stat().st_size
    assert modes(tmp_path / "journal") == {}


def test_what_is_there_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(0o775)
    make_folder(shared / "a" / "b")
    assert stat.S_IMODE(shared.stat().st_mode) == 0o775
    assert modes(shared / "a") == {}


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="can't be used"):
        segment.lock(tmp_path / "file")


# ---- ages, whole files, checksums


@pytest.mark.parametrize(("ahead_s", "lowest_s", "is_touched"), [(-100, 99, False), (50, -51, False), (70, 0, True)])
def test_a_time_far_in_the_future_is_set_to_now(
    tmp_path: Path, ahead_s: float, lowest_s: float, is_touched: bool
) -> None:
    path = tmp_path / "file"
    path.touch()
    set_s = time.time() + ahead_s
    os.utime(path, (set_s, set_s))
    assert lowest_s <= files.age_s(path) <= lowest_s + 10
    assert (path.stat().st_mtime < set_s - 60) is is_touched
    with pytest.raises(FileNotFoundError):
        files.age_s(tmp_path / "nowhere")


def replace_folder(folder: Path, beside: Path) -> None:
    folder.rename(beside)
    folder.mkdir()


def test_a_folder_must_stay_while_it_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with pytest.raises(FileNotFoundError), files.existing_folder(folder):
        pass
    folder.mkdir()
    with files.existing_folder(folder):
        pass
    with pytest.raises(FileNotFoundError, match="another folder"), files.existing_folder(folder):
        replace_folder(folder, tmp_path / "moved")


def test_a_journal_has_segments_or_a_manifest(tmp_path: Path) -> None:
    assert not files.is_journal(tmp_path)
    (tmp_path / "manifest.json").touch()
    assert files.is_journal(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "wal").mkdir()
    assert files.is_journal(tmp_path)


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_replaced_whole(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / "file"
    for content in (b"one", b"", b"three"):
        files.write_whole(path, content, sync)
        assert path.read_bytes() == content
        assert os.listdir(tmp_path) == ["file"]
    assert modes(tmp_path) == {}


def test_a_failed_replacement_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        files.write_whole(tmp_path / "folder", b"x")
    assert os.listdir(tmp_path) == ["folder"]
    with pytest.raises(FileNotFoundError):
        files.write_whole(tmp_path / "nowhere" / "file", b"x")


def test_the_checksum_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 1, (1 << 20) - 1, 1 << 20, (2 << 20) + 7):
        data = os.urandom(size)
        path.write_bytes(data)
        assert files.crc32_of_file(path) == files.crc32(data)


def test_the_footer_of_a_parquet_file_is_found(tmp_path: Path) -> None:
    footer = b"footer" + (6).to_bytes(4, "little") + b"PAR1"
    path = tmp_path / "file"
    path.write_bytes(b"PAR1" + b"data" + footer)
    assert files.crc32_of_footer(path) == files.crc32(footer)
    with path.open("rb") as file:
        assert files.footer(file) == footer
        files.check_footer(file, None)
        files.check_footer(file, files.crc32(footer))
        assert file.tell() == 0
        with pytest.raises(ValueError, match="checksum of its footer"):
            files.check_footer(file, 1)
    path.write_bytes(b"PAR1" + footer)
    assert files.crc32_of_footer(path) == files.crc32(footer)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes"),
        (b"PAR1\0\0\0PAR1", "11 bytes"),
        (b"PAR1" + bytes(4) + b"PAR2", "no footer"),
        (b"PAR1ooter" + (6).to_bytes(4, "little") + b"PAR1", "no footer"),
    ],
)
def test_a_file_without_a_footer_is_refused(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match=why):
        files.crc32_of_footer(tmp_path / "file")


def test_the_shortest_parquet_file_has_twelve_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"PAR1" + bytes(4) + b"PAR1")
    assert files.crc32_of_footer(tmp_path / "file") == files.crc32(bytes(4) + b"PAR1")


# ---- addresses


@pytest.mark.parametrize(
    "url",
    ["ftp://h/j", "http:///j", "http://h:0/j", "http://h:x/j", "http://h:99999/j", "http://h", "http://h/", "h/j"],
)
def test_a_wrong_address_is_refused(url: str) -> None:
    assert files.checked_url("https://h:9/rtl/journal/x//") == "https://h:9/rtl/journal/x"
    with pytest.raises(JournalError, match="is not the address of a journal"):
        files.checked_url(url)


@pytest.mark.parametrize("token", [None, "", "a\nb", "ä"])
def test_an_address_needs_a_printable_token(token: str | None) -> None:
    assert files.checked_token("http://h/j", "secret") == "secret"
    with pytest.raises(JournalError, match="needs a token"):
        files.checked_token("http://h/j", token)


def test_the_address_of_a_folder_is_in_its_file(tmp_path: Path) -> None:
    address = files.HubAddress.of(tmp_path)
    with pytest.raises(JournalError, match="No hub serves"):
        address.find()
    for text in ("{", "[]", '{"url": "http://h/j"}', '{"token": "t"}'):
        (tmp_path / "hub.json").write_text(text)
        with pytest.raises(JournalError, match="can't be read"):
            address.find()
    (tmp_path / "hub.json").write_text('{"url": "http://h/j/", "token": "t"}')
    assert (address.url, address.token) == ("http://h/j", "t")
    assert files.HubAddress.of("http://h/j/", "given").find() == ("http://h/j", "given", None)


def test_a_token_is_created_once_and_checked(tmp_path: Path) -> None:
    token = files.journal_token(tmp_path)
    assert len(token) == 43
    assert files.journal_token(tmp_path) == token
    assert os.listdir(tmp_path) == ["token"]
    (tmp_path / "token").write_text("x" * 16 + "\n")
    assert files.journal_token(tmp_path) == "x" * 16
    for text in ("x" * 15, "x" * 16 + " y", "x" * 16 + "\0"):
        (tmp_path / "token").write_text(text)
        with pytest.raises(JournalError, match="holds no token"):
            files.journal_token(tmp_path)
    (tmp_path / "token").write_bytes(b"\xff" * 20)
    with pytest.raises(JournalError, match="can't be used"):
        files.journal_token(tmp_path)
