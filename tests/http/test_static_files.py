"""Static files: conditions, ranges, methods, what is kept in memory (spec: runtime §5.6)."""

from __future__ import annotations

import gzip
import os
import re
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from smqrt.http import static_files
from smqrt.http.disk import DiskIo
from smqrt.http.static_files import accepts_gzip, content_type
from smqrt.http.tree import ResourceReader

TEXT = bytes(range(32, 122)) * 10  # 900 bytes
MTIME = 1_700_000_000


@pytest.fixture
def folder(bench: Any, tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "big.bin").write_bytes(os.urandom(3 << 20))
    for path in tmp_path.iterdir():
        os.utime(path, (MTIME, MTIME))
    bench.root.insert(ResourceReader(io=DiskIo(tmp_path)))
    return tmp_path


@pytest.fixture
def wire(bench: Any, folder: Path) -> Any:
    return bench.connect()


def test_a_whole_file(wire: Any, folder: Path) -> None:
    for _ in range(3):
        answer = wire.ask("/a.txt")
        assert (answer.status, answer.body) == (200, TEXT)
        assert answer.fields["content-length"] == "900"
        assert answer.fields["content-type"] == "text/plain; charset=utf-8"
        assert answer.fields["last-modified"] == formatdate(MTIME, usegmt=True)
        assert answer.fields["accept-ranges"] == "bytes"
        assert re.fullmatch('"[0-9a-f]+-384"', answer.fields["etag"])
    assert wire.ask("/big.bin").body == (folder / "big.bin").read_bytes()
    assert wire.ask("/empty.bin").body == b""


def test_head(wire: Any) -> None:
    for path in ("/a.txt", "/big.bin", "/empty.bin"):
        fields = wire.ask(path, "HEAD").fields
        assert fields == wire.ask(path).fields | {"date": fields["date"]}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_other_methods(wire: Any, method: str) -> None:
    answer = wire.ask("/a.txt", method)
    assert (answer.status, answer.fields["allow"]) == (405, "GET, HEAD, OPTIONS")


def test_options(wire: Any) -> None:
    answer = wire.ask("/a.txt", "OPTIONS")
    assert (answer.status, answer.fields["allow"]) == (204, "GET, HEAD, OPTIONS")


# conditions


def test_not_modified(wire: Any) -> None:
    tag = wire.ask("/a.txt").fields["etag"]
    later, earlier = formatdate(MTIME + 9, usegmt=True), formatdate(MTIME - 9, usegmt=True)
    same = formatdate(MTIME, usegmt=True)
    for headers, status in [
        (f"If-None-Match: {tag}", 304),
        (f'If-None-Match: "x", W/{tag}', 304),
        ("If-None-Match: *", 304),
        ('If-None-Match: "x"', 200),
        (f"If-Modified-Since: {same}", 304),
        (f"If-Modified-Since: {later}", 304),
        (f"If-Modified-Since: {earlier}", 200),
        ("If-Modified-Since: nonsense", 200),
        (f'If-None-Match: "x"\r\nIf-Modified-Since: {later}', 200),
        (f"If-Match: {tag}", 200),
        ('If-Match: "x"', 412),
        (f"If-Unmodified-Since: {earlier}", 412),
        (f"If-Unmodified-Since: {later}", 200),
    ]:
        for method in ("GET", "HEAD"):
            answer = wire.ask("/a.txt", method, headers + "\r\n")
            assert answer.status == status, headers
            if status == 304:
                assert answer.fields["etag"] == tag
                assert "last-modified" in answer.fields
                assert "content-length" not in answer.fields


# ranges


@pytest.mark.parametrize(
    ("header", "first", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=0-99", 0, 100),
        ("bytes=100-", 100, 900),
        ("bytes=-10", 890, 900),
        ("bytes=-9999", 0, 900),
        ("bytes=890-9999", 890, 900),
        ("Bytes = 5-9", 5, 10),
    ],
)
def test_one_range(wire: Any, header: str, first: int, end: int) -> None:
    answer = wire.ask("/a.txt", headers=f"Range: {header}\r\n")
    assert (answer.status, answer.body) == (206, TEXT[first:end])
    assert answer.fields["content-range"] == f"bytes {first}-{end - 1}/900"
    assert answer.fields["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    "header",
    [
        "bytes=9-5", "bytes=a-b", "bytes=-", "bytes=", "lines=1-2", "bytes", "bytes=0-1,", "bytes=+1-2", "bytes=1--2",
        "bytes=0-899,0-899", "bytes=" + ",".join(["0-1"] * 11), "bytes=0x1-2", "bytes=" + "9" * 20 + "-",
    ],
)  # fmt: skip
def test_ranges_that_are_ignored(wire: Any, header: str) -> None:
    assert wire.ask("/a.txt", headers=f"Range: {header}\r\n").body == TEXT


@pytest.mark.parametrize("header", ["bytes=900-", "bytes=5000-6000", "bytes=-0"])
def test_ranges_beyond_the_end(wire: Any, header: str) -> None:
    answer = wire.ask("/a.txt", headers=f"Range: {header}\r\n")
    assert (answer.status, answer.fields["content-range"]) == (416, "bytes */900")
    assert wire.ask("/empty.bin", headers=f"Range: {header}\r\n").status == 416


def test_several_ranges(wire: Any) -> None:
    answer = wire.ask("/a.txt", headers="Range: bytes=0-9, 100-109, -5, 5000-\r\n")
    assert answer.status == 206
    kind, _, boundary = answer.fields["content-type"].partition("; boundary=")
    assert kind == "multipart/byteranges"
    parts = answer.body.split(b"--" + boundary.encode())
    assert parts[-1] == b"--\r\n"
    expected = [(0, 10), (100, 110), (895, 900)]
    assert len(parts) == len(expected) + 2
    for part, (first, end) in zip(parts[1:-1], expected, strict=True):
        head, _, body = part.partition(b"\r\n\r\n")
        assert f"Content-Range: bytes {first}-{end - 1}/900".encode() in head
        assert body == TEXT[first:end] + b"\r\n"
    assert wire.ask("/a.txt").body == TEXT


def test_if_range(wire: Any) -> None:
    tag = wire.ask("/a.txt").fields["etag"]
    for condition, status in [
        (tag, 206),
        ('"x"', 200),
        (f"W/{tag}", 200),
        (formatdate(MTIME, usegmt=True), 206),
        (formatdate(MTIME + 1, usegmt=True), 200),
    ]:
        assert wire.ask("/a.txt", headers=f"Range: bytes=0-9\r\nIf-Range: {condition}\r\n").status == status


def test_range_of_a_big_file(wire: Any, folder: Path) -> None:
    data = (folder / "big.bin").read_bytes()
    assert wire.ask("/big.bin", headers="Range: bytes=1000000-2999999\r\n").body == data[1_000_000:3_000_000]


def test_a_range_of_head_is_ignored(wire: Any) -> None:
    assert wire.ask("/a.txt", "HEAD", "Range: bytes=0-9\r\n").fields["content-length"] == "900"


# freshness and memory


def test_a_changed_file_is_seen_at_once(wire: Any, folder: Path) -> None:
    for number in range(5):
        text = f"version {number}".encode() * (number + 1)
        (folder / "a.txt").write_bytes(text)
        answer = wire.ask("/a.txt")
        assert answer.body == text
    (folder / "a.txt").unlink()
    assert wire.ask("/a.txt").status == 404
    (folder / "a.txt").write_bytes(b"again")
    assert wire.ask("/a.txt").body == b"again"


def test_a_file_replaced_with_the_same_size_and_time(wire: Any, folder: Path) -> None:
    assert wire.ask("/a.txt").body == TEXT
    other = folder / "other"
    other.write_bytes(TEXT.swapcase())
    os.utime(other, (MTIME, MTIME))
    other.rename(folder / "a.txt")
    assert wire.ask("/a.txt").body == TEXT.swapcase()


def test_memory_is_bounded(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_files, "MAX_KEPT_BYTES", 5000)
    monkeypatch.setattr(static_files, "MAX_KNOWN", 20)
    reader = ResourceReader(io=DiskIo(tmp_path))
    bench.root.insert(reader)
    wire = bench.connect()
    for number in range(50):
        (tmp_path / f"{number}.txt").write_bytes(b"%d" % number * 500)
    for _ in range(2):
        for number in range(50):
            assert wire.ask(f"/{number}.txt").body == b"%d" % number * 500
    kept = reader._files
    assert sum(len(entry.body or b"") for entry in kept._known.values()) == kept._kept_bytes <= 5000
    assert len(kept._known) <= 20


def test_a_file_that_shrinks_while_it_is_sent(bench: Any, wire: Any, folder: Path) -> None:
    """The client can tell that something is missing: the connection ends before the announced length."""
    (folder / "big.bin").write_bytes(bytes(100 << 20))
    wire.send(b"GET /big.bin HTTP/1.1\r\nHost: test\r\n\r\n")
    assert wire.more(), "it has begun"
    os.truncate(folder / "big.bin", 10)
    with pytest.raises(AssertionError, match="ended within a body"):
        wire.answer()


PAGE = b"<p>one of many lines</p>\n" * 400


@pytest.fixture
def page(folder: Path) -> Path:
    path = folder / "page.html"
    path.write_bytes(PAGE)
    return path


def test_text_is_compressed_once_for_gzip_clients(wire: Any, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bytes] = []
    compress = static_files._gzip
    monkeypatch.setattr(static_files, "_gzip", lambda body: runs.append(body) or compress(body))
    plain = wire.ask("/page.html")
    assert (plain.body, plain.fields.get("content-encoding")) == (PAGE, None)
    for _ in range(3):
        packed = wire.ask("/page.html", headers="Accept-Encoding: br, gzip\r\n")
        assert (packed.status, gzip.decompress(packed.body)) == (200, PAGE)
        assert packed.fields["content-encoding"] == "gzip"
        assert packed.fields["content-length"] == str(len(packed.body))
    assert len(packed.body) < len(PAGE) / 10
    assert plain.fields["vary"] == packed.fields["vary"] == "Accept-Encoding"
    assert plain.fields["etag"] != packed.fields["etag"]
    assert runs == [PAGE]
    head = wire.ask("/page.html", "HEAD", headers="Accept-Encoding: gzip\r\n").fields
    assert head == packed.fields | {"date": head["date"]}


def test_conditions_and_ranges_of_compressed_text(wire: Any, page: Path) -> None:
    gzipped = "Accept-Encoding: gzip\r\n"
    tag = wire.ask("/page.html", headers=gzipped).fields["etag"]
    same = wire.ask("/page.html", headers=gzipped + f"If-None-Match: {tag}\r\n")
    assert (same.status, same.fields["etag"]) == (304, tag)
    part = wire.ask("/page.html", headers=gzipped + "Range: bytes=0-3\r\n")
    assert (part.status, part.body, part.fields.get("content-encoding")) == (206, PAGE[:4], None)
    page.write_bytes(PAGE[:-1])
    new = wire.ask("/page.html", headers=gzipped)
    assert gzip.decompress(new.body) == PAGE[:-1]
    assert new.fields["etag"] != tag


def test_what_does_not_shrink_is_left_as_it_is(wire: Any, folder: Path) -> None:
    noise = os.urandom(4000)
    for name, body in {"noise.txt": noise, "small.txt": b"x" * 1000, "image.png": PAGE, "big.txt": PAGE * 40}.items():
        (folder / name).write_bytes(body)
        answer = wire.ask(f"/{name}", headers="Accept-Encoding: gzip\r\n")
        assert (answer.body, answer.fields.get("content-encoding")) == (body, None)


@pytest.mark.parametrize(
    ("field", "takes"),
    [
        ("gzip", True),
        ("GZIP;q=0.5, br", True),
        ("br, *", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000, *", False),
        ("*;q=0", False),
        ("br, deflate", False),
        ("gzipped", False),
    ],
)
def test_gzip_negotiation(field: str, takes: bool) -> None:
    assert accepts_gzip(field) is takes


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.html", "text/html; charset=utf-8"),
        ("a.HTM", "text/html; charset=utf-8"),
        ("a.css", "text/css; charset=utf-8"),
        ("a.js", "text/javascript; charset=utf-8"),
        ("a.mjs", "text/javascript; charset=utf-8"),
        ("a.json", "application/json"),
        ("a.svg", "image/svg+xml; charset=utf-8"),
        ("a.png", "image/png"),
        ("a.woff2", "font/woff2"),
        ("a.wasm", "application/wasm"),
        ("a.tar.gz", "application/gzip"),
        ("a.xyz123", "application/octet-stream"),
        ("noextension", "application/octet-stream"),
    ],
)
def test_content_types(name: str, kind: str) -> None:
    assert content_type(name) == kind
