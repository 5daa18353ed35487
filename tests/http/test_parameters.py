"""Parameters: they come out as the standard library reads them, in a time that grows with the size."""

from __future__ import annotations

from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smqrt.http import forms
from smqrt.http.forms import as_text, parse_parameters
from smqrt.http.headers import BadRequest
from tests.http.cpu import linear, seconds


@given(st.text("ab=&+%41eäö;\udc80 ", max_size=60))
def test_as_the_standard_library_reads_it(text: str) -> None:
    raw = text.encode("utf-8", "surrogateescape")
    # As latin-1: of UTF-8 the library reads escapes by themselves, not with the bytes beside them.
    found = parse_qsl(raw.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
    assert parse_parameters(raw) == [(name.encode("latin-1"), value.encode("latin-1")) for name, value in found]


def test_different_invalid_utf_8_stays_distinct() -> None:
    assert as_text(b"\xe4\xc3\xa4") == "\udce4ä"


@pytest.mark.parametrize("shift", range(6))
def test_an_escape_between_two_pieces(shift: int) -> None:
    text = b"x" * shift + b"%c3%a4" * (2 * forms._PIECE_BYTES // 6)
    assert parse_parameters(b"n=" + text) == [(b"n", b"x" * shift + "ä".encode() * (text.count(b"%") // 2))]


def test_a_long_value_yields_to_others() -> None:
    breaths: list[int] = []
    parse_parameters(b"n=" + b"%41" * 100_000, lambda: breaths.append(1))
    assert len(breaths) > 30


def test_too_many_are_refused() -> None:
    assert len(parse_parameters(b"a&" * 999 + b"a")) == 1000
    with pytest.raises(BadRequest, match="more than 1000 parameters") as refusal:
        parse_parameters(b"a&" * 1000 + b"a")
    assert refusal.value.status == 413


@pytest.mark.parametrize("unit", [b"%41", b"%", b"%zz", b"+", b"\xff", b"=", b"%4"])
def test_the_time_grows_with_the_size(unit: bytes) -> None:
    def parse(size: int) -> object:
        return parse_parameters(b"n=" + unit * (size // len(unit)))

    assert seconds(lambda: parse(16384)) < 0.02
    assert linear(parse, 1 << 17)
