"""Cookies: the Python half (spec: bas-api §2.1, §2.2)."""

from __future__ import annotations

import re

from smqrt.lua.api.exchange import Exchanges
from smqrt.lua.api.text import from_latin1, latin1
from smqrt.lua.bridge import ArgumentError
from smqrt.lua.vm import Vm

_COOKIE = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+=[^\x00-\x1f\x7f;]*(?:; [A-Za-z\-]+(?:=[^\x00-\x1f\x7f;]*)?)*")


def cookie_of(fields: str, name: str) -> str | None:
    """The value of cookie `name` in a Cookie header field, without quotes; None when it is not there."""
    for part in fields.split(";"):
        key, equals, value = part.strip().partition("=")
        if equals and key == name:
            return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
    return None


def install(vm: Vm, exchanges: Exchanges) -> None:
    """Give Lua the cookies of exchanges."""

    def cookie(handle: int, name: bytes) -> bytes | None:
        value = cookie_of(exchanges.request(handle).get("cookie") or "", from_latin1(name))
        return None if value is None else latin1(value)

    def add_cookie(handle: int, text: bytes) -> None:
        field = from_latin1(text)
        if _COOKIE.fullmatch(field) is None:
            raise ArgumentError(f"cookie {field!r}: the name must be a token, the rest without ';' and controls")
        exchanges.request(handle).response.headers.add("Set-Cookie", field)

    vm.namespace("ba.cookies", {"cookie": cookie, "add_cookie": add_cookie})
