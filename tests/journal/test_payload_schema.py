"""DDL texts: read, written, and refused with one clear sentence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.errors import ArgumentError
from smqrt.journal.payload_schema import ArrayType, ScalarType, StructType, parse_ddl

NAMES = st.text(min_size=1, max_size=8)
SCALARS = st.sampled_from(["boolean", "tinyint", "int", "bigint", "float", "double", "string", "date", "timestamp"])
STRUCTS = st.deferred(
    lambda: st.lists(st.tuples(NAMES, TYPES), min_size=1, max_size=3, unique_by=lambda field: field[0].lower()).map(
        lambda fields: StructType(tuple(fields))
    )
)
TYPES = st.deferred(lambda: SCALARS.map(ScalarType) | TYPES.map(ArrayType) | STRUCTS)


def test_what_people_write() -> None:
    read = parse_ddl("device STRING, temp: double,gps struct<lat: Long, `my lon` real>, all array<array<int>>")
    assert read.ddl() == "device string, temp double, gps struct<lat: bigint, `my lon`: float>, all array<array<int>>"


@settings(max_examples=50)
@given(STRUCTS)
def test_what_is_written_is_read(struct: StructType) -> None:
    assert parse_ddl(struct.ddl()) == struct


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a name is missing"),
        ("temp", "'the end' is not a type"),
        ("temp dubble", "'dubble' is not a type of JSON; the types are boolean"),
        ("temp double humidity double", "'humidity' is unexpected"),
        ("temp double,", "a name is missing before 'the end'"),
        ("temp double, Temp int", "'Temp' occurs twice"),
        ("a array<int", "'>' is missing before 'the end'"),
        ("a array int", "'<' is missing before 'int'"),
        ("a decimal(10,2)", "'(10,2)' can't be read"),
        ("a " + "array<" * 100 + "int" + ">" * 100, "deeper than 64"),
    ],
)
def test_what_is_wrong_is_said(text: str, says: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        parse_ddl(text)
    assert says in str(raised.value)
    assert "it must look like 'device string, temp double'" in str(raised.value)
