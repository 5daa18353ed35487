"""The messages of Sparkplug B (Eclipse Sparkplug 3.0, §6.4), as protobuf classes, and its data types by name."""

from __future__ import annotations

from functools import cache
from typing import Any

_PACKAGE = "org.eclipse.tahu.protobuf"
_PLAIN = ["int_value:uint32", "long_value:uint64", "float_value:float", "double_value:double"]
_PLAIN += ["boolean_value:bool", "string_value:string"]
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
_VALUES = {  # the field numbers of `oneof value`, from the first one on
    "Metric": (10, [*_PLAIN, "bytes_value:bytes", "dataset_value:DataSet", "template_value:Template"]),
    "PropertyValue": (3, [*_PLAIN, "propertyset_value:PropertySet", "propertysets_value:PropertySetList"]),
    "Parameter": (3, _PLAIN),
    "DataSetValue": (1, _PLAIN),
}
"""Nested in Payload there; on the wire that makes no difference."""

TYPES = (
    ("Unknown", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float", "Double", "Boolean")
    + ("String", "DateTime", "Text", "UUID", "DataSet", "Bytes", "File", "Template", "PropertySet", "PropertySetList")
    + ("Int8Array", "Int16Array", "Int32Array", "Int64Array", "UInt8Array", "UInt16Array", "UInt32Array")
    + ("UInt64Array", "FloatArray", "DoubleArray", "BooleanArray", "StringArray", "DateTimeArray")
)
"""The names of the data types; the place in it is the number."""


@cache
def payload_class() -> Any:
    """Give the protobuf class of a payload; loads protobuf when it is wanted first."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="smqrt/sparkplug_b.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field in fields.split():
            text, _, number = field.partition("=")
            _add(message, text, int(number))
        if name in _VALUES:
            message.oneof_decl.add(name="value")
            first, values = _VALUES[name]
            for at, text in enumerate(values, first):
                _add(message, text, at).oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Payload"))


def _add(message: Any, text: str, number: int) -> Any:
    """Add a field such as `metrics:Metric*` to a message's description."""
    name, _, kind = text.partition(":")
    field = message.field.add(name=name, number=number)
    field.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
    kind = kind.rstrip("*")
    if kind in _SCHEMA:
        field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = getattr(field, f"TYPE_{kind.upper()}")
    return field
