"""The crossing between Lua and Python: texts, errors and the guard, without a runtime."""

from __future__ import annotations

import logging

import pytest

from smqrt.apps.lua import bridge
from smqrt.apps.lua.bridge import LuaError, LuaValue
from smqrt.errors import ArgumentError, ClosedError, StreamError

MARKER = object()


def test_the_message_and_the_traceback_of_an_error() -> None:
    error = LuaError(b"app/.preload:3: boom\nstack traceback:\n\tapp/.preload:3: in main chunk")
    assert (error.message, error.traceback) == ("app/.preload:3: boom", "\tapp/.preload:3: in main chunk")
    assert (LuaError("plain").message, LuaError("plain").traceback) == ("plain", "")
    assert str(LuaError(b"\xff")) == "\ufffd"
    assert str(LuaError(5)) == "5"


def test_failures_are_nil_and_words() -> None:
    assert bridge.fail("timeout") == (None, b"timeout")
    assert bridge.fail("failed", "\u00e9", 5, None) == (None, b"failed", "\u00e9".encode(), 5, None)


def test_a_guarded_function_gives_its_value() -> None:
    assert bridge.guarded(lambda a, b: a + b, MARKER)(1, 2) == 3


@pytest.mark.parametrize("error", [ArgumentError("bad argument #1"), ClosedError("it is closed"), LuaError("x:1: y")])
def test_expected_errors_become_their_text(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    assert bridge.guarded(_raiser(error), MARKER)() == (MARKER, str(error).encode())
    assert caplog.records == []


def test_others_are_logged_with_their_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    assert bridge.guarded(_raiser(KeyError("k")), MARKER)() == (MARKER, b"internal error: KeyError: 'k'")
    assert caplog.records[0].exc_info


def test_a_failed_connection_is_nil_and_words() -> None:
    assert bridge.with_error_words(lambda: True)() is True
    assert bridge.with_error_words(_raiser(StreamError("timeout")))() == (None, b"timeout")
    assert bridge.with_error_words(_raiser(StreamError("cannotconnect", "refused")))() == (
        None,
        b"cannotconnect",
        b"refused",
    )


def test_options_are_names_and_values_in_turn() -> None:
    assert bridge.options_of((b"timeout", 5, b"header:X-\xe9", b"v")) == {"timeout": 5, "header:X-\u00e9": b"v"}
    with pytest.raises(ValueError, match="shorter"):
        bridge.options_of((b"timeout",))


class Binding:
    def one(self) -> LuaValue:
        return 1

    def gone(self) -> LuaValue:
        raise StreamError("socketclosed")


def test_methods_of_a_binding() -> None:
    methods = bridge.methods(Binding(), "one gone", bridge.with_error_words)
    assert (methods["one"](), methods["gone"]()) == (1, (None, b"socketclosed"))
    assert bridge.methods(Binding(), "one")["one"]() == 1


@pytest.mark.parametrize("data", [b"", b"plain", "\u00e9".encode(), b"\xff\xfe"])
def test_binary_bytes_are_returned_unchanged(data: bytes) -> None:
    assert bridge.utf8(bridge.from_utf8(data)) == data
    assert bridge.latin1(bridge.from_latin1(data)) == data


def test_addresses() -> None:
    assert bridge.address("127.0.0.1", 80) == (b"127.0.0.1", 80, False)
    assert bridge.address("::1", 80) == (b"::1", 80, True)


def _raiser(error: Exception) -> bridge.Function:
    def fail() -> LuaValue:
        raise error

    return fail
