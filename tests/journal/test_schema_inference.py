"""DDL that describes payloads."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.journal.payload_schema import StructType, fits, infer_schema, parse_ddl
from tests.journal.sensor_rows import readings


def of(*values: object) -> str | None:
    return infer_schema(json.dumps(value).encode() for value in values).ddl


@pytest.mark.parametrize(
    ("values", "ddl"),
    [
        ([{"a": 1}, {"a": 2}], "a bigint"),
        ([{"a": 1}, {"a": 2.5}], "a double"),
        ([{"a": 1}, {"a": None}, {}], "a bigint"),
        ([{"a": None}], "a string"),
        ([{"a": True}], "a boolean"),
        ([{"a": 1}, {"a": "x"}], "a string"),
        ([{"a": 1 << 70}], "a double"),
        ([{"a": {"b": 1}}, {"a": {"c": "x"}}], "a struct<b: bigint, c: string>"),
        ([{"a": [1, 2.5]}, {"a": []}], "a array<double>"),
        ([{"a": [{"b": 1}]}], "a array<struct<b: bigint>>"),
        ([{"a": []}], "a array<string>"),
        ([{"a": {}}], "a string"),
        ([{"Temp": 1}, {"temp": 2}], "Temp bigint"),
        ([{"my field": 1}], "`my field` bigint"),
        ([1, 2], None),
        ([{}], None),
        ([], None),
    ],
)
def test_types_are_found_and_widened(values: list[object], ddl: str | None) -> None:
    assert of(*values) == ddl


def test_what_few_say_does_not_count() -> None:
    found = infer_schema([b'{"temp": 1.5}'] * 99 + [b'{"temp": "n/a"}'])
    assert (found.ddl, found.rows, found.json, found.fitting) == ("temp double", 100, 100, 99)


def test_what_is_no_json_is_counted() -> None:
    found = infer_schema([b'{"temp": 1}', b"\xff", b"", b"warm", b"[" * 100_000, b"null"])
    assert (found.ddl, found.rows, found.json, found.fitting) == ("temp bigint", 6, 2, 1)


def test_a_site_with_sensors() -> None:
    found = infer_schema(row.payload for row in readings(500))
    assert found.fitting == 500
    assert found.ddl == (
        "device string, temp double, humidity double, battery bigint, count bigint, status string, "
        "location struct<lat: double, lon: double>"
    )


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=3), inner, max_size=3),
)


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), min_size=1, max_size=10))
def test_the_ddl_is_valid_and_fitting_rows_are_counted(values: list[dict[str, object]]) -> None:
    found = infer_schema(json.dumps(value).encode() for value in values)
    if found.ddl is not None:
        assert isinstance(found.kind, StructType)
        assert parse_ddl(found.ddl) == found.kind
        assert found.fitting == sum(fits(value, found.kind) for value in values)
