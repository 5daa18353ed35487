"""Payloads as typed columns: the fast way and the slow way agree, and nothing a payload holds can harm others."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.errors import ArgumentError
from smqrt.journal import payload_schema
from smqrt.journal.payload_schema import TypedColumn, cast, load_json

DDL = (
    "device string, temp double, n int, big bigint, on boolean, at timestamp, day date, all array<double>, "
    "gps struct<lat: double>"
)


def columns(payloads: list[bytes], ddl: str = DDL) -> list[Any]:
    column = TypedColumn({"#": ddl})
    array = column.column(pa.array(["t"] * len(payloads)), pa.array(payloads, pa.binary()))
    array.validate(full=True)
    return array.to_pylist()


def slowly(payloads: list[bytes], ddl: str = DDL) -> list[Any]:
    column = TypedColumn({"#": ddl})
    return pa.array([cast(load_json(one), column.struct) for one in payloads], column.field.type).to_pylist()


ODD = [
    b'{"device":"a","temp":1,"n":2,"at":"2026-01-01T00:00:00Z","day":"2026-01-01","all":[1,2.5,null],"gps":{"lat":1}}',
    b'{"temp":"warm","n":2}',
    b'{"n":2.5,"device":5}',
    b'{"n":2147483648,"big":2147483648}',
    b'{"big":99999999999999999999}',
    b'{"temp":1e400}',
    b'{"device":null,"gps":[],"all":{}}',
    b'{"on":true,"at":"2026-01-01 00:00:00"}',
    b'{"at":"tomorrow","day":"today","on":0}',
    b'{"device":"\\ud800"}',
    b'{"device":"\xff"}',
    b'{"n":1,"n":2}',
    b'{"n":1}{"n":2}',
    b'{"n":\n1}',
    b' {"n":1} ',
    b"{}",
    b"",
    b"5",
    b"null",
    b"[1]",
    b"not JSON",
    b'{"n":',
    b'{"x":' + b"[" * 200_000,
    b'{"n":7,"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
]


def test_each_odd_payload_alone_and_all_together() -> None:
    alone = [columns([one])[0] for one in ODD]
    assert columns(ODD) == alone
    assert alone == slowly(ODD)
    assert alone[0]["all"] == [1, 2.5, None]
    assert alone[1]["temp"] is None
    assert alone[1]["n"] == 2
    assert [one is None for one in alone[16:23]] == [True] * 7


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
)
OBJECTS = st.dictionaries(st.sampled_from([*"abcd", "device", "temp", "n", "big", "on", "all"]), VALUES, max_size=6)


@settings(max_examples=50)
@given(st.lists(OBJECTS.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=12), max_size=8))
def test_the_fast_and_slow_paths_agree(payloads: list[bytes]) -> None:
    ddl = "device string, temp double, n int, big bigint, on boolean, all array<double>"
    assert columns(payloads, ddl) == slowly(payloads, ddl)


def test_one_odd_payload_among_many_costs_only_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    good = [json.dumps({"device": f"d{n}", "temp": n / 2, "n": n}).encode() for n in range(5000)]
    good[2500] = b"odd"
    slow: list[int] = []
    before = TypedColumn._slow
    monkeypatch.setattr(TypedColumn, "_slow", lambda self, rows: slow.append(len(rows)) or before(self, rows))
    parsed = columns(good, "device string, temp double, n int")
    assert [one and one["n"] for one in parsed] == [None if n == 2500 else n for n in range(5000)]
    assert slow == [1024]


def test_no_payload_passes_for_the_rows_of_others() -> None:
    """Cut where the lines are joined, these would be as many rows as there are payloads, in other places."""
    payloads = [b'{"n":1,"x":[', b'{"n":5}]}', b'{"n":2}{"n":66}', b'{"n":3}']
    assert [one and one["n"] for one in columns(payloads, "n int")] == [None, None, None, 3]


def test_only_topics_that_match_are_parsed() -> None:
    column = TypedColumn({"site1/#": "temp double", "door/+": "open boolean"})
    topics = ["site1/a", None, "door/x", "other", "site1"]
    payloads = [b'{"temp":1}', b'{"temp":2}', b'{"open":true}', b'{"temp":3}', b'{"temp":4,"open":false}']
    array = column.column(pa.array(topics), pa.array(payloads, pa.binary()))
    parsed = [{"temp": 1.0, "open": None}, None, {"temp": None, "open": True}, None, {"temp": 4.0, "open": False}]
    assert array.to_pylist() == parsed
    assert column.column(pa.array(["other"]), pa.array([b"{}"], pa.binary())).to_pylist() == [None]
    assert column.column(pa.array([None], pa.string()), pa.array([b"{}"], pa.binary())).to_pylist() == [None]


def test_long_payloads_are_parsed_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_schema, "_BLOCK_BYTES", 1000)
    payloads = [json.dumps({"n": n, "x": "-" * 300}).encode() for n in range(50)]
    assert [one["n"] for one in columns(payloads, "n int")] == list(range(50))


def test_one_name_has_one_type() -> None:
    with pytest.raises(ArgumentError, match="'temp' is double for 'a/#' and 'temp' is string for 'b/#'"):
        TypedColumn({"a/#": "temp double", "b/#": "temp string"})
    assert TypedColumn({"a/#": "temp double", "b/#": "temp double, n int"}).struct.ddl() == "temp double, n int"
