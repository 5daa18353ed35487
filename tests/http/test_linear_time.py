"""The time that heads take: it grows with their size, and is short at the largest size allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.http.access import hidden
from smqrt.http.disk import DiskIo
from smqrt.http.forms import boundary_of
from smqrt.http.head import Head, decode_path
from smqrt.http.headers import parse_date, parse_ranges
from smqrt.http.resources import segments
from smqrt.http.static_files import StaticFiles, _matches
from smqrt.http.tree import normalize
from tests.http.cpu import linear, seconds

LARGEST = 16384  # of a whole head

WORK: dict[str, Callable[[str], object]] = {
    "escapes in a path": lambda text: decode_path("/" + text),
    "folders of a path": segments,
    "folders of a forward": normalize,
    "hidden parts": hidden,
    "ranges": lambda text: parse_ranges("bytes=" + text, 1000),
    "entity tags": lambda text: _matches(text, '"x"'),
    "a date": parse_date,
    "a content type": lambda text: boundary_of("multipart/form-data" + text),
    "a Host": lambda text: Head(f"GET / HTTP/1.1\r\nHost: {text}\r\n\r\n".encode()),
    "a field": lambda text: Head(f"GET / HTTP/1.1\r\nHost: a\r\nX: {text}\r\n\r\n".encode()),
    "a Connection": lambda text: Head(f"GET / HTTP/1.1\r\nHost: a\r\nConnection: {text}\r\n\r\n".encode()),
    "a request line": lambda text: Head(f"GET /{text} HTTP/1.1\r\nHost: a\r\n\r\n".encode()),
}
UNITS = ["%41", "a/", "../", "0-0,", '"a",', "1 ", "; a=", '; a="', "[:", "9", " ", "a, ", ":", "%", "-"]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", WORK)
def test_it_grows_with_the_size(name: str, unit: str) -> None:
    work = WORK[name]

    def run(size: int) -> object:
        return work(unit * (size // len(unit)))

    assert seconds(lambda: run(LARGEST)) < 0.02
    assert linear(run, LARGEST)


@pytest.mark.parametrize("unit", ["a/", "../", "./", "there/", "there/../"])
def test_files_in_deep_folders(tmp_path: Path, unit: str) -> None:
    (tmp_path / "there").mkdir()
    files = StaticFiles(DiskIo(tmp_path))
    for size in (1000, 2000, 4000, LARGEST):
        path = unit * (size // len(unit)) + "x"
        assert files.find(path) is None
        assert seconds(lambda path=path: files.find(path)) < 0.02
