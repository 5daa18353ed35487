"""`request:multipart`: forms with files, read as they arrive (spec: bas-api §2.1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smqrt.http.multipart import FORM_TYPE, Event, Field, File, MultipartError, boundary_of, read_form
from smqrt.http.status import HttpError
from smqrt.lua.api.exchange import Exchanges
from smqrt.lua.api.text import utf8
from smqrt.lua.bridge import ArgumentError
from smqrt.lua.vm import Vm


def install(vm: Vm, exchanges: Exchanges) -> None:
    """Give Lua the forms of exchanges."""
    forms: dict[int, Iterator[Event]] = {}

    def open_form(handle: int, size_bytes: int) -> None:
        exchange = exchanges.of(handle)
        request = exchange.request
        boundary = boundary_of(request.get("content-type") or "")
        if boundary is None:
            raise exchange.mismatched(415, f"multipart: the body is not {FORM_TYPE}", Accept=FORM_TYPE)
        if request.response.committed:
            raise ArgumentError("multipart: iscommitted")
        if size_bytes < 1:
            raise ArgumentError("multipart: the buffer size must be at least 1")
        forms[handle] = read_form(request.chunks(size_bytes), boundary, request.hold)

    def next_event(handle: int) -> Any:
        """The kind of the next event and its values: "field", "file", "data", "end", "error"; False when refused."""
        try:
            return _for_lua(next(forms[handle], None))
        except MultipartError as error:
            return b"error", str(error).encode()
        except HttpError as error:
            exchanges.of(handle).refusal = error
            return False

    def close_form(handle: int) -> None:
        forms.pop(handle, None)

    vm.namespace("ba.multipart", {"open_form": open_form, "close_form": close_form}, {"next_event": next_event})


def _for_lua(event: Event | None) -> tuple[bytes, ...]:
    if event is None:
        return (b"end",)
    if isinstance(event, Field):
        return b"field", utf8(event.name), event.value
    if isinstance(event, File):
        return b"file", *map(utf8, event)
    return b"data", event
