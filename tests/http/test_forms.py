"""Queries, cookies and forms: any split gives the same, in a time that grows with the size."""

from __future__ import annotations

from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smqrt.http import forms
from smqrt.http.forms import (
    Field,
    File,
    MissingFieldError,
    MultipartError,
    QueryText,
    as_text,
    boundary_of,
    cookies_of,
    parse_parameters,
    read_form,
)
from smqrt.http.headers import BadRequest
from tests.http.cpu import linear, seconds

FORM = (
    b"preamble\r\n--XX\r\n"
    b'Content-Disposition: form-data; name="a"\r\n\r\n1\r\n'
    b'--XX\r\nContent-Disposition: form-data; name="empty"\r\n\r\n\r\n'
    b'--XX\r\nContent-Disposition: form-data; name="f"; filename="C:\\dir\\x%22.txt"\r\n'
    b"Content-Type: text/plain\r\n\r\n"
    b"line\r\n--X not yet\r\n--\r\n"
    b"\r\n--XX\r\ncontent-disposition: form-data; filename=n.bin; name=g\r\n\r\n\r\n"
    b"--XX--\r\nepilogue"
)


def joined(pieces: list[bytes], boundary: bytes = b"XX") -> list[object]:
    """The events, content of a file in one piece."""
    events: list[object] = []
    for event in read_form(pieces, boundary):
        if isinstance(event, bytes) and isinstance(events[-1], bytes):
            events[-1] += event
        else:
            events.append(event)
    return events


PART = b"--XX\r\nContent-Disposition: form-data; name=a\r\n\r\n"

WANTED = [
    Field("a", b"1"),
    Field("empty", b""),
    File("f", 'x".txt', "text/plain", "binary"),
    b"line\r\n--X not yet\r\n--\r\n",
    File("g", "n.bin", "application/octet-stream", "binary"),
]


def test_a_form_is_read():
    assert joined([FORM]) == WANTED


def test_byte_by_byte():
    assert joined([bytes([byte]) for byte in FORM]) == WANTED


@given(st.lists(st.integers(1, 60), max_size=30))
def test_any_split_gives_the_same(sizes):
    pieces, rest = [], FORM
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert joined([piece for piece in [*pieces, rest] if piece]) == WANTED


@given(st.binary(max_size=300).filter(lambda data: b"\r\n--XX" not in data), st.integers(1, 40))
def test_any_content_comes_out_as_it_was(content, size):
    form = b'--XX\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\n' + content + b"\r\n--XX--"
    events = joined([form[at : at + size] for at in range(0, len(form), size)])
    assert events[1:] == ([content] if content else [])


@pytest.mark.parametrize(
    ("form", "error"),
    [
        (b"", "ends in the middle"),
        (b"--XX", "ends in the middle"),
        (b"--XX\r\n", "ends in the middle"),
        (b"--XX\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n", "ends in the middle"),
        (b"--XX\r\nContent-Type: x\r\n\r\n1\r\n--XX--", "Missing Content-Disposition"),
        (b"--XXY\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--XX--", "byte after first boundary"),
        (b"--XX\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--XXYY", "bytes after boundary"),
        (b"--XX\r\nA: " + b"x" * 9000, "the head of a part has a line of over"),
        (b"--XX\r\n" + b"A: b\r\n" * 9, "the head of a part has more than 8 lines"),
        (PART + b"x" * 1100000, "field 'a' is longer"),
        ((PART + b"x" * 1000000 + b"\r\n") * 5, "fields of the form have more than 4194304 bytes"),
        ((PART + b"\r\n") * 1001 + b"--XX--", "more than 1000 parts"),
    ],
)
def test_broken_forms_are_named(form, error):
    with pytest.raises(MultipartError, match=error):
        joined([form])


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('Multipart/Form-Data; charset=x; boundary="a b"', b"a b"),
        ("multipart/mixed; boundary=abc", None),
        ("multipart/form-data", None),
        ("", None),
    ],
)
def test_boundaries(content_type, boundary):
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize("unit", [b"\\", b'\\"', b'; a="', b'; a="\\', b";", b" ", b"; a ", b"=", b'"', b"a;"])
@pytest.mark.parametrize("begin", [b'; filename="', b"; name", b"; a=", b""])
def test_no_parameter_takes_long(begin, unit):
    """60 backslashes once took longer than the age of the universe."""
    head = b"--XX\r\nContent-Disposition: form-data" + begin + unit * (8000 // len(unit))
    assert seconds(lambda: joined([head + b"\r\n\r\n\r\n--XX--"])) < 0.005


@pytest.mark.parametrize("unit", [b"\\", b'\\"', b'; boundary="', b"; boundary", b";", b" "])
def test_no_content_type_takes_long(unit):
    value = "multipart/form-data" + (unit * (16384 // len(unit))).decode()
    assert seconds(lambda: boundary_of(value)) < 0.005


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
    assert linear(parse, 1 << 15)


@pytest.mark.parametrize(
    ("options", "filename"),
    [
        (b"filename*=utf-8''%C3%A4.txt", "ä.txt"),
        (b"filename=\"a.txt\"; filename*=UTF-8'en'..%2F%c3%a4", "ä"),
        (b"filename*=iso-8859-1''%e4", "ä"),
        (b"filename=\"a.txt\"; filename*=utf-8''%00", "a.txt"),
    ],
)
def test_an_extended_name_of_a_file(options: bytes, filename: str) -> None:
    body = b"--x\r\nContent-Disposition: form-data; name=f; %b\r\n\r\nhi\r\n--x--\r\n" % options
    file = next(iter(read_form([body], b"x")))
    assert isinstance(file, File)
    assert (file.name, file.filename) == ("f", filename)


def test_a_query_is_text_and_parameters() -> None:
    query = QueryText("a=1&b=%C3%A4+x&a=2&c&bad=%ff")
    assert (query[0], query[:3], query.split("&")[0]) == ("a", "a=1", "a=1")
    assert (query["a"], query.getall("a"), query["c"], query["bad"]) == ("1", ["1", "2"], "", "\ufffd")
    assert ("a" in query, "1" in query, query.get("d"), query.get("d", "x")) == (True, False, None, "x")
    assert list(query.items()) == [("a", "1"), ("b", "ä x"), ("c", ""), ("bad", "\ufffd")]
    with pytest.raises(MissingFieldError, match=r"^The field 'd' is missing\.$") as missing:
        query["d"]
    assert missing.value.status == 400
    assert isinstance(missing.value, KeyError)


def test_cookies_lose_one_pair_of_quotes() -> None:
    cookies = cookies_of('a=1;b="two" ; c="; d=""; =x; bad; e=f=g')
    assert dict(cookies) == {"a": "1", "b": "two", "c": '"', "d": "", "e": "f=g"}


def test_a_boundary_has_at_most_70_bytes() -> None:
    assert boundary_of("multipart/form-data; boundary=" + "x" * 70) == b"x" * 70
    assert boundary_of("multipart/form-data; boundary=" + "x" * 71) is None
