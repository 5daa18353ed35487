"""Cookies: the Cookie field of requests, the Set-Cookie field of responses (RFC 6265)."""

from __future__ import annotations

import re

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NEVER_IN_A_VALUE = re.compile(r"[\x00-\x1f\x7f;]")


def cookie_of(fields: str, name: str) -> str | None:
    """The value of cookie `name` in a Cookie header field, without quotes; None when it is not there."""
    for part in fields.split(";"):
        key, equals, value = part.strip().partition("=")
        if equals and key == name:
            return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
    return None


def set_cookie_field(name: str, value: str, attributes: dict[str, str | None]) -> str:
    """Build the value of a Set-Cookie field.

    Args:
        name, value: of the cookie.
        attributes: by name, such as `{"Path": "/", "Max-Age": "60", "Secure": None}`; None for one without a value.

    Raises:
        ValueError: a part has what would end it and begin another: the name is no token, or something else has a
            semicolon or a control character.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"cookie name {name!r} is no token: use letters, digits, '-' and '_'")
    for what, text in {"value": value, **attributes}.items():
        if text is not None and _NEVER_IN_A_VALUE.search(text) is not None:
            fault = f"{what} {text!r} of cookie {name} has a semicolon or a control character"
            raise ValueError(f"{fault}: percent-encode it")
    parts = [f"{key}={text}" if text is not None else key for key, text in attributes.items()]
    return "; ".join([f"{name}={value}", *parts])
