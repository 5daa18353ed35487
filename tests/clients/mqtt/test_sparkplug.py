"""Sparkplug B payloads: fields and types there and back, known bytes, faults, bounds."""

from __future__ import annotations

from time import thread_time
from typing import Any

import pytest

from smqrt.clients.mqtt.sparkplug import MAX_BYTES, TYPES, decode, encode, payload_class
from smqrt.errors import ArgumentError


def metric(kind: str | None, value: Any, **more: Any) -> dict[str, Any]:
    return {"name": "m", "datatype": kind, "value": value, **more}


def back(one: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = decode(encode({"metrics": [one]}))["metrics"][0]
    return found


def test_known_bytes() -> None:
    payload = {"timestamp": 1, "seq": 2, "metrics": [{"name": "a", "timestamp": 3, "datatype": "Int8", "value": -1}]}
    # field 1 = 1; field 2, of 13 bytes: 1 = "a", 3 = 3, 4 = 1, 10 = 0xffffffff; field 3 = 2
    data = b"\x08\x01\x12\x0d\x0a\x01a\x18\x03\x20\x01\x50\xff\xff\xff\xff\x0f\x18\x02"
    assert encode(payload) == data
    assert decode(data) == payload


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("Int8", -128), ("Int16", -32768), ("Int32", -(1 << 31)), ("Int64", -(1 << 63)), ("UInt8", 255),
        ("UInt16", 65535), ("UInt32", (1 << 32) - 1), ("UInt64", (1 << 64) - 1), ("Float", 1.5), ("Double", 0.1),
        ("Boolean", False), ("String", "täxt"), ("DateTime", 1_700_000_000_000), ("Text", ""), ("UUID", "u"),
        ("Bytes", b"\0\xff"), ("File", b"x"), ("Int8Array", [-1, 2]), ("Int16Array", [-3]), ("Int32Array", [4, -5]),
        ("Int64Array", [-6]), ("UInt8Array", [255]), ("UInt16Array", [65535]), ("UInt32Array", [1 << 31]),
        ("UInt64Array", [1 << 63]), ("FloatArray", [0.5]), ("DoubleArray", [0.1]), ("DateTimeArray", [7]),
        ("BooleanArray", [True, False, True, True, False, False, False, False, True]),
        ("StringArray", ["a", "", "ü"]), ("Int32Array", []),
        ("DataSet", {"columns": ["a", "b"], "types": ["Int8", "String"], "rows": [[-1, "x"], [None, "y"]]}),
        ("Template", {
            "version": "1", "template_ref": "t", "is_definition": False, "metrics": [metric("Int8", 1)],
            "parameters": [{"name": "p", "type": "Boolean", "value": True}],
        }),
    ],
)  # fmt: skip
def test_every_type_there_and_back(kind: str, value: Any) -> None:
    assert back(metric(kind, value)) == metric(kind, value)
    assert back(metric(TYPES.index(kind), value)) == metric(kind, value)  # type: ignore[arg-type]


def test_arrays_have_the_bytes_of_the_specification() -> None:
    data = encode({"metrics": [metric("BooleanArray", [0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1])]})
    assert data.endswith(b"\x0c\0\0\0\x34\xd0")
    assert encode({"metrics": [metric("Int16Array", [-30647, 30647])]}).endswith(b"\x49\x88\xb7\x77")


def test_the_other_fields() -> None:
    one = metric(
        "Int32",
        None,
        alias=7,
        is_historical=True,
        is_transient=False,
        metadata={"is_multi_part": True, "content_type": "x", "size": 3, "md5": "0"},
        properties={
            "unit": {"type": "String", "value": "°C"},
            "none": {"type": "Int8"},
            "set": {"type": "PropertySet", "value": {"low": {"type": "Float", "value": -1.0}}},
            "sets": {"type": "PropertySetList", "value": [{}, {"x": {"type": "Int8", "value": -2}}]},
        },
    )
    found = back(one)
    assert found.pop("is_null") is True
    del one["value"]
    assert found == one
    payload = decode(encode({"uuid": "u", "body": b"\xff", "metrics": []}))
    assert payload == {"uuid": "u", "body": b"\xff", "metrics": []}


@pytest.mark.parametrize(
    ("value", "kind"), [(True, "Boolean"), (3, "Int64"), (0.5, "Double"), ("x", "String"), (b"x", "String")]
)
def test_a_type_that_is_not_named_suits_the_value(value: Any, kind: str) -> None:
    assert back({"name": "m", "value": value})["datatype"] == kind


def test_a_metric_by_alias_alone() -> None:
    assert decode(b"\x12\x04\x10\x05\x50\x09")["metrics"] == [{"alias": 5, "value": 9}]


@pytest.mark.parametrize(
    ("one", "sentence"),
    [
        (metric("Int8", 128), r"metrics\[1\].value must be a whole number from -128 to 127 for Int8, not 128"),
        (metric("Int8", True), "must be a whole number"),
        (metric("Boolean", 1), "must be true or false, not 1"),
        (metric("Float", "x"), "must be a number for Float, not 'x'"),
        (metric("String", b"\xff"), "must be UTF-8"),
        (metric("Odd", 1), "the data type must be one of Int8, .*, not 'Odd'"),
        (metric(None, {}), "the data type must be one of"),
        (metric("Int8Array", [200]), "an item does not fit into Int8Array"),
        (metric("DataSet", {"columns": ["a"], "types": []}), "has 1 columns and 0 types"),
        (metric("PropertySet", 1), "the data type PropertySet is not allowed here"),
        (metric("Bytes", 1), "must be bytes, not 1"),
        ({"name": 1, "value": 1}, r"metrics\[1\].name must be a string, not 1"),
        ({"name": "a", "alias": -1, "value": 1}, r"metrics\[1\].alias: -1 does not fit"),
        ("x", r"metrics\[1\] must be a table, not 'x'"),
    ],
)
def test_what_does_not_fit(one: Any, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        encode({"metrics": [one]})


def nested(depth: int) -> dict[str, Any]:
    one = metric("Int8", 1)
    for _ in range(depth):
        one = metric("Template", {"metrics": [one]})
    return one


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"\xff", "not a Sparkplug B payload"),
        (b"\0" * (MAX_BYTES + 1), "at most 262144 bytes"),
        (b"\x12\x00" * 10_001, "at most 10000 values"),
    ],
)
def test_what_is_no_payload_or_too_large(data: bytes, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        decode(data)


def test_a_bit_may_be_a_value() -> None:
    """An array is counted before it is unpacked: 250 KB are two million booleans."""
    message = payload_class()()
    one = message.metrics.add()
    one.datatype, one.bytes_value = TYPES.index("BooleanArray"), b"\xff" * 250_000
    data, begin_s = message.SerializeToString(), thread_time()
    with pytest.raises(ArgumentError, match="at most 10000 values"):
        decode(data)
    assert thread_time() - begin_s < 0.05
    one.Clear()
    one.datatype = TYPES.index("DataSet")
    one.dataset_value.types.extend([1] * 10_001)
    with pytest.raises(ArgumentError, match="at most 10000 values"):
        decode(message.SerializeToString())


def test_depth_is_bounded() -> None:
    assert back(nested(7))
    with pytest.raises(ArgumentError, match="nested more than 8 levels deep"):
        encode({"metrics": [nested(8)]})
