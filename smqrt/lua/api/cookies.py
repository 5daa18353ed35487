"""Cookies: the Python half (spec: bas-api §2.1, §2.2)."""

from __future__ import annotations

from smqrt.http.cookies import cookie_of, set_cookie_field
from smqrt.lua.api.exchange import Exchanges
from smqrt.lua.api.text import from_latin1, latin1
from smqrt.lua.bridge import ArgumentError
from smqrt.lua.vm import Vm


def install(vm: Vm, exchanges: Exchanges) -> None:
    """Give Lua the cookies of exchanges."""

    def cookie(handle: int, name: bytes) -> bytes | None:
        value = cookie_of(exchanges.request(handle).get("cookie") or "", from_latin1(name))
        return None if value is None else latin1(value)

    def add_cookie(handle: int, name: bytes, value: bytes, *attributes: bytes | bool) -> None:
        """`attributes`: names and values in turn; the value of one that has none is True."""
        texts = (None if isinstance(text, bool) else from_latin1(text) for text in attributes[1::2])
        names = (from_latin1(bytes(key)) for key in attributes[::2])
        try:
            field = set_cookie_field(from_latin1(name), from_latin1(value), dict(zip(names, texts, strict=True)))
        except ValueError as error:
            raise ArgumentError(str(error)) from None
        exchanges.request(handle).response.headers.add("Set-Cookie", field)

    vm.namespace("ba.cookies", {"cookie": cookie, "add_cookie": add_cookie})
