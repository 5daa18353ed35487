"""Printable text: bytes of strangers steer no terminal."""

from __future__ import annotations

import json
import logging
import time
import unicodedata

import pytest

from smqrt.printable import PrintableFormatter, json_line, printable

EVIL = "a\x1b]0;title\x07\x1b[2J\x9b31m\x7f\u202egnp.exe\u2066\u2028\r\nnext"


def is_harmless(text: str) -> bool:
    kinds = {unicodedata.category(character) for character in text if character not in "\t\n"}
    turns = {unicodedata.bidirectional(character) for character in text}
    return not kinds & {"Cc", "Cs", "Zl", "Zp"} and not turns & {"RLO", "LRO", "RLE", "LRE", "RLI", "LRI"}


def test_one_line() -> None:
    shown = printable(EVIL)
    assert shown == r"a\x1b]0;title\x07\x1b[2J\x9b31m\x7f\u202egnp.exe\u2066\u2028\r\nnext"
    assert is_harmless(shown)
    assert is_harmless(printable("".join(map(chr, range(0x3000)))))


def test_lines_may_stay() -> None:
    assert printable("a\r\nb\tc\x1b", lines=True) == "a\\r\nb\tc\\x1b"


def test_bytes() -> None:
    assert printable(b"\xff\x00ok\xc2\x9b") == r"\xff\x00ok\x9b"


@pytest.mark.parametrize("text", ["plain", "Grüße, 你好 👩‍👩‍👧", "a\\x1b", "tab\there", "עברית", ""])
def test_the_rest_stays(text: str) -> None:
    assert printable(text) == text


def test_json_says_the_same() -> None:
    line = json_line({"a": EVIL, "b": "\ud800", "c": b"x"})
    assert is_harmless(line)
    assert "\n" not in line
    assert json.loads(line) == {"a": EVIL, "b": "\ud800", "c": "b'x'"}


def test_the_log_keeps_its_lines() -> None:
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "of %s", ("\x1b[2J\u202e",), None)
    assert PrintableFormatter().format(record) == r"of \x1b[2J\u202e"
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "two\nlines", (), None)
    assert PrintableFormatter().format(record) == "two\nlines"


def test_a_megabyte_of_it_takes_no_time() -> None:
    begin = time.process_time()
    assert len(printable("\x1b" * 65536)) == 4 * 65536
    assert time.process_time() - begin < 0.2
