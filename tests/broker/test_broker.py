"""The table of a broker's methods, and what derives from it."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

import pytest

from smqrt import hub
from smqrt.broker.broker import METHODS, REQUIRED, Kind
from smqrt.errors import ArgumentError
from smqrt.smq.gevent_broker import GeventBroker

TABLE = pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)


@TABLE
def test_a_broker_has_the_method(method: Any) -> None:
    parameters = list(signature(getattr(GeventBroker, method.name)).parameters.values())[1:]
    assert len(parameters) == len(method.arguments)
    for parameter, argument in zip(parameters, method.arguments, strict=True):
        assert (parameter.default is Parameter.empty) >= (argument.default is REQUIRED)


@TABLE
def test_python_methods_have_names_and_defaults_of_the_table(method: Any) -> None:
    declared = list(signature(getattr(hub.Smq, method.name)).parameters.values())[1:]
    if method.name in ("publish", "publish_threadsafe"):  # those for MQTT clients follow; Lua has a table for them
        declared = declared[: len(method.arguments)]
    assert [one.name for one in declared] == [one.name for one in method.arguments]
    for parameter, argument in zip(declared, method.arguments, strict=True):
        expected = Parameter.empty if argument.default is REQUIRED else argument.default
        assert parameter.default is expected or parameter.default == expected


@TABLE
def test_the_method_is_documented(method: Any) -> None:
    assert getattr(hub.Smq, method.name).__doc__


WRONG = {Kind.NAME: 5, Kind.NUMBER: "x", Kind.DESTINATION: 1.5, Kind.PAYLOAD: object(), Kind.FUNCTION: "x"}
RIGHT = {
    Kind.NAME: "a",
    Kind.NUMBER: 1,
    Kind.DESTINATION: "a",
    Kind.PAYLOAD: b"x",
    Kind.FUNCTION: print,
    Kind.FLAG: True,
}


@TABLE
def test_an_argument_of_the_wrong_kind_is_named(method: Any) -> None:
    with hub.create() as smq:
        for argument in (one for one in method.arguments if one.kind is not Kind.FLAG):
            values = {one.name: (WRONG if one is argument else RIGHT)[one.kind] for one in method.arguments}
            with pytest.raises(ArgumentError) as caught:
                getattr(smq, method.name)(**values)
            assert str(caught.value).startswith((f"{argument.name}: ", f"{method.name}: "))
