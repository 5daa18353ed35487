"""Sparkplug B payloads of industrial devices over MQTT, as dicts (Eclipse Sparkplug 3.0).

    data = encode({"seq": 0, "metrics": [{"name": "temperature", "datatype": "Float", "value": 21.5}]})
    decode(data)["metrics"][0]["value"]

A metric has the fields of the specification, with `value` in place of its typed fields:

| datatype | value |
|---|---|
| Int8 … Int64, UInt8 … UInt64, DateTime (ms since 1970) | int |
| Float, Double | float |
| Boolean | bool |
| String, Text, UUID | str |
| Bytes, File | bytes |
| Int8Array … DateTimeArray | list |
| DataSet | {"columns": [names], "types": [data types], "rows": [[values]]} |
| Template | {"version", "metrics", "parameters": [{"name", "type", "value"}], "template_ref", "is_definition"} |

`properties` is {name: {"type", "value"}}. A value of type PropertySet is such a dict, one of type PropertySetList a
list of them. A metric, property or element of a data set that is null has no `value`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from smqrt.errors import ArgumentError

# ---- Messages of Sparkplug B (Eclipse Sparkplug 3.0, §6.4) as protobuf classes, and data types by name.

_PACKAGE = "org.eclipse.tahu.protobuf"
_PLAIN_FIELDS = ["int_value:uint32", "long_value:uint64", "float_value:float", "double_value:double"]
_PLAIN_FIELDS += ["boolean_value:bool", "string_value:string"]
_SCHEMA = {
    "Payload": "timestamp:uint64=1 metrics:Metric*=2 seq:uint64=3 uuid:string=4 body:bytes=5",
    "Metric": "name:string=1 alias:uint64=2 timestamp:uint64=3 datatype:uint32=4 is_historical:bool=5 "
    "is_transient:bool=6 is_null:bool=7 metadata:MetaData=8 properties:PropertySet=9",
    "MetaData": "is_multi_part:bool=1 content_type:string=2 size:uint64=3 seq:uint64=4 file_name:string=5 "
    "file_type:string=6 md5:string=7 description:string=8",
    "PropertySet": "keys:string*=1 values:PropertyValue*=2",
    "PropertySetList": "propertyset:PropertySet*=1",
    "PropertyValue": "type:uint32=1 is_null:bool=2",
    "Template": "version:string=1 metrics:Metric*=2 parameters:Parameter*=3 template_ref:string=4 is_definition:bool=5",
    "Parameter": "name:string=1 type:uint32=2",
    "DataSet": "num_of_columns:uint64=1 columns:string*=2 types:uint32*=3 rows:Row*=4",
    "Row": "elements:DataSetValue*=1",
    "DataSetValue": "",
}
"""The specification nests these messages in Payload; the bytes are the same."""
_VALUE_FIELDS = {  # the field numbers of `oneof value`, from the first one on
    "Metric": (10, [*_PLAIN_FIELDS, "bytes_value:bytes", "dataset_value:DataSet", "template_value:Template"]),
    "PropertyValue": (3, [*_PLAIN_FIELDS, "propertyset_value:PropertySet", "propertysets_value:PropertySetList"]),
    "Parameter": (3, _PLAIN_FIELDS),
    "DataSetValue": (1, _PLAIN_FIELDS),
}

TYPES = (
    ("Unknown", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float", "Double", "Boolean")
    + ("String", "DateTime", "Text", "UUID", "DataSet", "Bytes", "File", "Template", "PropertySet", "PropertySetList")
    + ("Int8Array", "Int16Array", "Int32Array", "Int64Array", "UInt8Array", "UInt16Array", "UInt32Array")
    + ("UInt64Array", "FloatArray", "DoubleArray", "BooleanArray", "StringArray", "DateTimeArray")
)
"""Names of the data types; the index of a name is its number."""


@cache
def payload_class() -> Any:
    """Return the protobuf class of a payload; the first call loads protobuf."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="smqrt/sparkplug_b.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field in fields.split():
            text, _, number = field.partition("=")
            _add_field(message, text, int(number))
        if name in _VALUE_FIELDS:
            message.oneof_decl.add(name="value")
            first, values = _VALUE_FIELDS[name]
            for value_number, text in enumerate(values, first):
                _add_field(message, text, value_number).oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Payload"))


def _add_field(message: Any, text: str, number: int) -> Any:
    """Add a field such as `metrics:Metric*` to the descriptor of a message."""
    name, _, kind = text.partition(":")
    field = message.field.add(name=name, number=number)
    field.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
    kind = kind.rstrip("*")
    if kind in _SCHEMA:
        field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = getattr(field, f"TYPE_{kind.upper()}")
    return field


MAX_BYTES = 256 << 10  # of a payload; protobuf decodes even the slowest payload of this size in 10 ms
MAX_VALUES = 10_000  # metrics, properties and elements of a payload; Lua processes this number in 20 ms
MAX_DEPTH = 8  # of nested templates and property sets

Fields = dict[str, Any]
_TYPE_NUMBERS = {name: number for number, name in enumerate(TYPES)}
_INT_BITS = {"Int8": 8, "Int16": 16, "Int32": 32, "Int64": 64, "UInt8": 8, "UInt16": 16, "UInt32": 32, "UInt64": 64}
_INT_BITS["DateTime"] = 64
_SIGNED_TYPES = frozenset(("Int8", "Int16", "Int32", "Int64"))
_TEXT_TYPES = frozenset(("String", "Text", "UUID"))
_BYTE_TYPES = frozenset(("Bytes", "File"))
_ARRAY_FORMATS = {
    "Int8Array": "b", "Int16Array": "h", "Int32Array": "i", "Int64Array": "q", "UInt8Array": "B", "UInt16Array": "H",
    "UInt32Array": "I", "UInt64Array": "Q", "FloatArray": "f", "DoubleArray": "d", "DateTimeArray": "q",
}  # fmt: skip
_METRIC_FIELDS = ("name", "alias", "timestamp", "is_historical", "is_transient", "is_null")
_METADATA_FIELDS = ("is_multi_part", "content_type", "size", "seq", "file_name", "file_type", "md5", "description")
_UINT64 = 1 << 64
_COUNT_BYTES = 4  # the number of items at the start of a BooleanArray


def encode(payload: Mapping[str, Any], on_metric: Callable[[], object] = bool) -> bytes:
    """Encode a payload.

    Args:
        payload: the fields; see the docstring of the module.
        on_metric: called before each metric, so that other greenlets run.

    Raises:
        ArgumentError: an invalid field; the message names it.
    """
    return _Encoder(on_metric).payload(payload)


def decode(data: bytes, on_metric: Callable[[], object] = bool) -> Fields:
    """Decode a payload.

    Args:
        data: the payload.
        on_metric: called before each metric, so that other greenlets run.

    Raises:
        ArgumentError: an invalid payload, or one larger than `MAX_BYTES` or `MAX_VALUES`.
    """
    if len(data) > MAX_BYTES:
        raise ArgumentError(f"a payload must have at most {MAX_BYTES} bytes, not {len(data)}")
    message = payload_class()()
    try:
        message.ParseFromString(data)
    except Exception as error:  # DecodeError of protobuf, which is imported on first use
        raise ArgumentError(f"not a Sparkplug B payload: {error}") from None
    return _Decoder(on_metric).payload(message)


class _ValueCounter:
    """Counts the values of one payload and checks its limits."""

    def __init__(self, on_metric: Callable[[], object]) -> None:
        self._on_metric = on_metric
        self._count = 0

    def _count_values(self, count: int, depth: int) -> None:
        self._count += count
        if self._count > MAX_VALUES:
            raise ArgumentError(f"a payload must have at most {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise ArgumentError(f"templates and property sets are nested more than {MAX_DEPTH} levels deep")


class _Encoder(_ValueCounter):
    def payload(self, fields: Mapping[str, Any]) -> bytes:
        message = payload_class()()
        _set_fields(message, fields, ("timestamp", "seq", "uuid", "body"), "payload")
        for number, metric in enumerate(_list(fields.get("metrics"), "metrics"), 1):
            self._metric(message.metrics.add(), _mapping(metric, f"metrics[{number}]"), f"metrics[{number}]", 1)
        data: bytes = message.SerializeToString()
        return data

    def _metric(self, message: Any, fields: Mapping[str, Any], where: str, depth: int) -> None:
        self._count_values(1, depth)
        self._on_metric()
        _set_fields(message, fields, _METRIC_FIELDS, where)
        if fields.get("metadata") is not None:
            _set_fields(
                message.metadata,
                _mapping(fields["metadata"], f"{where}.metadata"),
                _METADATA_FIELDS,
                f"{where}.metadata",
            )
        if fields.get("properties") is not None:
            self._properties(message.properties, fields["properties"], f"{where}.properties", depth + 1)
        value = fields.get("value")
        message.datatype = _type_number(fields.get("datatype"), value, where)
        if value is None:
            message.is_null = True
        else:
            self._value(message, _type_name(message.datatype), value, f"{where}.value", depth)

    def _value(self, message: Any, kind: str, value: Any, where: str, depth: int) -> None:
        if kind == "DataSet":
            self._data_set(message.dataset_value, _mapping(value, where), where, depth)
        elif kind == "Template":
            self._template(message.template_value, _mapping(value, where), where, depth + 1)
        elif kind in _BYTE_TYPES:
            message.bytes_value = _bytes(value, where)
        elif kind.endswith("Array"):
            items = _list(value, where)
            self._count_values(len(items), depth)
            message.bytes_value = _pack_array(kind, items, where)
        else:
            _set_value(message, kind, value, where)

    def _properties(self, message: Any, properties: Any, where: str, depth: int) -> None:
        for key, item in _mapping(properties, where).items():
            fields, here = _mapping(item, f"{where}.{key}"), f"{where}.{key}"
            self._count_values(1, depth)
            message.keys.append(_text(key, where))
            entry, value = message.values.add(), fields.get("value")
            entry.type = _type_number(fields.get("type"), value, here)
            kind = _type_name(entry.type)
            if value is None:
                entry.is_null = True
            elif kind == "PropertySet":
                entry.propertyset_value.SetInParent()  # protobuf would omit an empty one
                self._properties(entry.propertyset_value, value, here, depth + 1)
            elif kind == "PropertySetList":
                for each in _list(value, here):
                    self._properties(entry.propertysets_value.propertyset.add(), each, here, depth + 1)
            else:
                _set_value(entry, kind, value, here)

    def _data_set(self, message: Any, fields: Mapping[str, Any], where: str, depth: int) -> None:
        columns = [_text(name, f"{where}.columns") for name in _list(fields.get("columns"), f"{where}.columns")]
        types = [_type_number(kind, None, where) for kind in _list(fields.get("types"), f"{where}.types")]
        if len(types) != len(columns):
            raise ArgumentError(f"{where} has {len(columns)} columns and {len(types)} types")
        message.num_of_columns = len(columns)
        message.columns.extend(columns)
        message.types.extend(types)
        for row in _list(fields.get("rows"), f"{where}.rows"):
            elements = message.rows.add().elements
            cells = row if isinstance(row, Mapping) else dict(enumerate(_list(row, f"{where}.rows"), 1))
            self._count_values(len(columns) + 1, depth)
            for column, kind in enumerate(types, 1):
                element, cell = elements.add(), cells.get(column)
                if cell is not None:
                    _set_value(element, _type_name(kind), cell, f"{where}.rows")

    def _template(self, message: Any, fields: Mapping[str, Any], where: str, depth: int) -> None:
        _set_fields(message, fields, ("version", "template_ref", "is_definition"), where)
        message.SetInParent()  # protobuf would omit an empty one
        for number, metric in enumerate(_list(fields.get("metrics"), f"{where}.metrics"), 1):
            here = f"{where}.metrics[{number}]"
            self._metric(message.metrics.add(), _mapping(metric, here), here, depth)
        for parameter in _list(fields.get("parameters"), f"{where}.parameters"):
            self._count_values(1, depth)
            entry, given = message.parameters.add(), _mapping(parameter, f"{where}.parameters")
            entry.name = _text(given.get("name"), f"{where}.parameters")
            entry.type = _type_number(given.get("type"), given.get("value"), where)
            if given.get("value") is not None:
                _set_value(entry, _type_name(entry.type), given["value"], f"{where}.parameters")


class _Decoder(_ValueCounter):
    def payload(self, message: Any) -> Fields:
        fields = _get_fields(message, ("timestamp", "seq", "uuid", "body"))
        fields["metrics"] = [self._metric(entry, 1) for entry in message.metrics]
        return fields

    def _metric(self, message: Any, depth: int) -> Fields:
        self._count_values(1, depth)
        self._on_metric()
        fields = _get_fields(message, _METRIC_FIELDS)
        if message.HasField("datatype"):
            fields["datatype"] = _type_name(message.datatype)
        if message.HasField("metadata"):
            fields["metadata"] = _get_fields(message.metadata, _METADATA_FIELDS)
        if message.HasField("properties"):
            fields["properties"] = self._properties(message.properties, depth + 1)
        if not message.is_null:
            fields["value"] = self._value(message, _type_name(message.datatype), depth)
        return fields

    def _value(self, message: Any, kind: str, depth: int) -> Any:
        which = message.WhichOneof("value")
        if which == "dataset_value":
            return self._data_set(message.dataset_value, depth)
        if which == "template_value":
            return self._template(message.template_value, depth + 1)
        if which == "bytes_value" and kind.endswith("Array"):
            self._count_values(_count_items(kind, message.bytes_value), depth)
            return _unpack_array(kind, message.bytes_value)
        return _get_value(message, which, kind)

    def _properties(self, message: Any, depth: int) -> Fields:
        found: Fields = {}
        for key, entry in zip(message.keys, message.values, strict=False):
            self._count_values(1, depth)
            found[key] = {"type": _type_name(entry.type)}
            which = entry.WhichOneof("value")
            if which == "propertyset_value":
                found[key]["value"] = self._properties(entry.propertyset_value, depth + 1)
            elif which == "propertysets_value":
                sets = entry.propertysets_value.propertyset
                found[key]["value"] = [self._properties(each, depth + 1) for each in sets]
            elif which and not entry.is_null:
                found[key]["value"] = _get_value(entry, which, _type_name(entry.type))
        return found

    def _data_set(self, message: Any, depth: int) -> Fields:
        self._count_values(len(message.columns) + len(message.types), depth)
        kinds = [_type_name(kind) for kind in message.types]
        rows = []
        for row in message.rows:
            self._count_values(len(row.elements) + 1, depth)
            cells = zip(row.elements, kinds, strict=False)
            rows.append([_get_value(entry, entry.WhichOneof("value"), kind) for entry, kind in cells])
        return {"columns": list(message.columns), "types": kinds, "rows": rows}

    def _template(self, message: Any, depth: int) -> Fields:
        fields = _get_fields(message, ("version", "template_ref", "is_definition"))
        fields["metrics"] = [self._metric(entry, depth) for entry in message.metrics]
        fields["parameters"] = []
        for entry in message.parameters:
            self._count_values(1, depth)
            value = _get_value(entry, entry.WhichOneof("value"), _type_name(entry.type))
            fields["parameters"].append({"name": entry.name, "type": _type_name(entry.type), "value": value})
        return fields


def _shortened(value: object) -> str:
    """Return a value for an error message."""
    text = repr(value[:40] if isinstance(value, str | bytes) else value)
    return text if len(text) < 80 else f"{text[:60]}..."


def _type_name(number: int) -> str:
    return TYPES[number] if number < len(TYPES) else "Unknown"


def _type_number(given: Any, value: Any, where: str) -> int:
    """Return the number of a data type given by name or number, by default the one for the Python type of the value."""
    if given is None:
        kinds = {bool: "Boolean", int: "Int64", float: "Double", str: "String", bytes: "String"}
        given = kinds.get(type(value))
    if isinstance(given, bytes):
        given = given.decode("utf-8", "replace")
    number = _TYPE_NUMBERS.get(given) if isinstance(given, str) else given
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < len(TYPES):
        raise ArgumentError(f"{where}: the data type must be one of {', '.join(TYPES[1:])}, not {_shortened(given)}")
    return number


def _set_fields(message: Any, fields: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        field = message.DESCRIPTOR.fields_by_name[name]
        try:
            if field.type == field.TYPE_STRING:
                value = _text(value, f"{where}.{name}")
            elif field.type == field.TYPE_BYTES:
                value = _bytes(value, f"{where}.{name}")
            setattr(message, name, value)
        except (TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):  # of `_text` and `_bytes`; it is a ValueError too
                raise
            raise ArgumentError(f"{where}.{name}: {_shortened(value)} does not fit") from None


def _get_fields(message: Any, names: Sequence[str]) -> Fields:
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _set_value(message: Any, kind: str, value: Any, where: str) -> None:
    """Set the typed field for a number, boolean or text."""
    if kind in _INT_BITS:
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        bits = _INT_BITS[kind]
        lowest, highest = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind in _SIGNED_TYPES else (0, (1 << bits) - 1)
        if bits == 64:
            lowest = -(1 << 63)  # Lua's integers are signed: large unsigned values are negative there
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise ArgumentError(
                f"{where} must be a whole number from {lowest} to {highest} for {kind}, not {_shortened(value)}"
            )
        name = "long_value" if bits == 64 else "int_value"
        setattr(message, name, value % (_UINT64 if name == "long_value" else 1 << 32))
    elif kind in ("Float", "Double"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentError(f"{where} must be a number for {kind}, not {_shortened(value)}")
        setattr(message, f"{kind.lower()}_value", float(value))
    elif kind == "Boolean":
        if not isinstance(value, bool):
            raise ArgumentError(f"{where} must be true or false, not {_shortened(value)}")
        message.boolean_value = value
    elif kind in _TEXT_TYPES:
        message.string_value = _text(value, where)
    else:
        raise ArgumentError(f"{where}: the data type {kind} is not allowed here")


def _get_value(message: Any, which: str | None, kind: str) -> Any:
    value = getattr(message, which) if which else None
    if kind in _INT_BITS and isinstance(value, int):  # the fields are unsigned: restore the sign
        value %= 1 << _INT_BITS[kind]
        if kind in _SIGNED_TYPES and value >> _INT_BITS[kind] - 1:
            value -= 1 << _INT_BITS[kind]
    return value


def _pack_array(kind: str, items: Sequence[Any], where: str) -> bytes:
    try:
        if kind == "StringArray":
            return b"".join(_text(item, where).encode() + b"\0" for item in items)
        if kind == "BooleanArray":
            bits = "".join("1" if item else "0" for item in items)
            packed = bytes(int(bits[at : at + 8].ljust(8, "0"), 2) for at in range(0, len(bits), 8))
            return struct.pack("<I", len(items)) + packed
        return struct.pack(f"<{len(items)}{_ARRAY_FORMATS[kind]}", *items)
    except (struct.error, OverflowError):
        raise ArgumentError(f"{where}: an item does not fit into {kind}") from None


def _count_items(kind: str, data: bytes) -> int:
    """Return the number of items without unpacking them: in a BooleanArray a bit is an item."""
    if kind == "StringArray":
        return data.count(b"\0")
    if kind == "BooleanArray":
        return min(int.from_bytes(data[:_COUNT_BYTES], "little"), 8 * max(len(data) - _COUNT_BYTES, 0))
    return len(data) // struct.calcsize(f"<{_ARRAY_FORMATS[kind]}")


def _unpack_array(kind: str, data: bytes) -> list[Any]:
    if kind == "StringArray":
        return [text.decode("utf-8", "replace") for text in data.split(b"\0")[:-1]]
    count = _count_items(kind, data)
    if kind == "BooleanArray":
        # The first item is the highest bit of the first byte.
        return [bool(data[_COUNT_BYTES + at // 8] >> 7 - at % 8 & 1) for at in range(count)]
    code = f"<{count}{_ARRAY_FORMATS[kind]}"
    return list(struct.unpack(code, data[: struct.calcsize(code)]))  # without the bytes of an incomplete last item


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{where} must be a table, not {_shortened(value)}")
    return value


def _list(value: Any, where: str) -> Sequence[Any]:
    """Return a list, also from a Lua table with the keys 1, 2, ..."""
    if value is None:
        return ()
    if isinstance(value, Mapping) and all(at in value for at in range(1, len(value) + 1)):
        return [value[at] for at in range(1, len(value) + 1)]
    if not isinstance(value, list | tuple):
        raise ArgumentError(f"{where} must be a list, not {_shortened(value)}")
    return value


def _text(value: Any, where: str) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ArgumentError(f"{where} must be UTF-8") from None
    if not isinstance(value, str):
        raise ArgumentError(f"{where} must be a string, not {_shortened(value)}")
    return value


def _bytes(value: Any, where: str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray):
        raise ArgumentError(f"{where} must be bytes, not {_shortened(value)}")
    return bytes(value)
