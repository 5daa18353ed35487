"""Forms with files: any split gives the same events; what breaks the rules is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smqrt.http.forms import Field, File, MultipartError, boundary_of, read_form
from tests.http.cpu import seconds

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
