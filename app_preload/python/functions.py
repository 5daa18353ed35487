"""Functions for remote calls from pages and devices."""

import time
from collections.abc import Callable
from typing import Any

import gevent

MAX_SLEEP_MS = 2000


def add(a, b):
    """add(a, b): the sum of two numbers"""
    return a + b


def reverse(text):
    """reverse(text): the text in reverse order"""
    return text[::-1]


def clock():
    """clock(): date and time of the server"""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def slow(ms):
    """slow(ms): waits for ms milliseconds, while other calls continue"""
    ms = min(ms, MAX_SLEEP_MS)
    gevent.sleep(ms / 1000)
    return f"waited {ms} ms"


def list_all():
    """list(): all functions"""
    return [{"name": name, "example": EXAMPLES[name], "help": FUNCTIONS[name].__doc__} for name in sorted(FUNCTIONS)]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": add,
    "reverse": reverse,
    "clock": clock,
    "slow": slow,
    "list": list_all,
}
EXAMPLES = {"add": "2, 40", "reverse": '"stressed"', "clock": "", "slow": "1500", "list": ""}


def value_of(call):
    name = call.get("name")
    if not isinstance(name, str) or name not in FUNCTIONS:
        raise LookupError(f"there is no function {name}")
    return FUNCTIONS[name](*call.get("arguments", []))
