"""Directories of Python applications: texts of errors, and requests at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gevent
import pytest

from smqrt.apps.python import directory
from smqrt.apps.python.directory import APP_REQUESTS, ApplicationDirectory, RequestSlots, describe
from smqrt.errors import ArgumentError
from smqrt.http.headers import HttpError
from smqrt.http.resources import VirtualIo
from smqrt.process.current_process import AppScope
from smqrt.settings.limits import LimitSettings, apply_limits
from tests.support.waiting import let_others_run


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    yield
    apply_limits(LimitSettings(), {})
    directory.overload.clear()


def test_requests_wait_in_order_for_a_bounded_time() -> None:
    apply_limits(LimitSettings(app_requests=2, app_requests_wait_s=0.2), {})
    slots, order = RequestSlots("shop"), list[int]()

    def serve(number: int) -> None:
        slots.take()
        order.append(number)

    for _ in range(2):
        slots.take()
    waiting = [gevent.spawn(serve, number) for number in range(2)]
    gevent.sleep(0)
    slots.release()
    gevent.joinall(waiting[:1], 5)
    assert order == [0]
    with pytest.raises(HttpError) as refused:
        slots.take()
    assert refused.value.status == 503
    assert APP_REQUESTS.count
    killed = gevent.spawn(slots.take)
    gevent.sleep(0)
    killed.kill()
    slots.release()
    slots.take()
    apply_limits(LimitSettings(app_requests=None), {})
    slots.take()


def test_a_killed_request_passes_its_slot_on() -> None:
    """Also when the slot was assigned to it before it could run."""
    apply_limits(LimitSettings(app_requests=1, app_requests_wait_s=5), {})
    slots = RequestSlots("shop")
    slots.take()
    first, second = gevent.spawn(slots.take), gevent.spawn(slots.take)
    gevent.sleep(0)
    first.kill(block=False)
    slots.release()
    second.get(timeout=5)


def test_a_raised_limit_lets_all_waiting_in() -> None:
    apply_limits(LimitSettings(app_requests=2, app_requests_wait_s=5), {})
    slots = RequestSlots("shop")
    for _ in range(2):
        slots.take()
    waiting = [gevent.spawn(slots.take) for _ in range(3)]
    gevent.sleep(0)
    apply_limits(LimitSettings(app_requests=4, app_requests_wait_s=5), {})
    slots.release()
    let_others_run()
    assert [one.ready() for one in waiting] == [True, True, True]


def test_an_overloaded_server_lets_no_request_wait() -> None:
    directory.overload.append("no memory")
    with pytest.raises(HttpError) as refused:
        RequestSlots("shop").take()
    assert (refused.value.status, refused.value.detail, refused.value.headers) == (
        503,
        "no memory",
        {"Retry-After": "5"},
    )


def failure(source: str, file: str = "shop/.preload.py") -> BaseException:
    """The error of some code of an application, called through a file of the server."""
    names: dict[str, Any] = {}
    try:
        exec(compile("def call(function): function()", "smqrt/server.py", "exec"), names)
        names["call"](lambda: exec(compile(source, file, "exec"), {}))
    except BaseException as error:
        return error
    raise AssertionError("no error")


def is_own(file: str) -> bool:
    return file.startswith("shop/")


def test_a_failure_begins_with_file_line_and_error() -> None:
    text = describe(failure("\ndef f():\n    raise KeyError('x')\nf()"), is_own)
    summary, traceback, *lines = text.split("\n")
    assert (summary, traceback) == ("shop/.preload.py:3: KeyError: 'x'", "traceback:")
    assert "smqrt/server.py" not in text
    assert [line.strip() for line in lines if "File" in line] == [
        'File "shop/.preload.py", line 4, in <module>', 'File "shop/.preload.py", line 3, in f',
    ]  # fmt: skip


def test_causes_of_a_failure_show_no_server_either() -> None:
    source = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('bad') from error"
    text = describe(failure(source), is_own)
    assert text.startswith("shop/.preload.py:4: ValueError: bad\n")
    assert "ZeroDivisionError" in text
    error = RuntimeError("wrapped by the server")
    error.__cause__ = failure("1 / 0")
    text = describe(error, is_own, "shop/.preload.py")
    assert text.startswith("shop/.preload.py: RuntimeError: wrapped by the server\n")
    assert 'File "shop/.preload.py", line 1' in text
    assert "smqrt/server.py" not in text


def test_a_syntax_error_names_its_line() -> None:
    text = describe(failure("x = 1\nif:"), is_own)
    assert text.startswith("shop/.preload.py:2: SyntaxError: invalid syntax\n")


def test_a_failure_elsewhere_has_the_position_it_was_given() -> None:
    text = describe(failure("raise ValueError('x')", "elsewhere.py"), is_own, "shop/.preload.py")
    assert text.startswith("shop/.preload.py: ValueError: x\n")


def test_a_failure_is_short_whatever_it_says() -> None:
    text = describe(failure("raise ValueError('x' * 100_000)"), is_own)
    assert len(text) == 16_384 + len(" …")
    endless = describe(failure("def f(): g()\ndef g(): f()\nf()"), is_own)
    assert len(endless.split("\n")) < 120


def test_only_callables_are_mounted() -> None:
    folder = ApplicationDirectory("shop", 0, VirtualIo({}), AppScope(None), lambda request: None)
    application: Any = "flask"
    with pytest.raises(ArgumentError, match="a WSGI application is a callable, not str"):
        folder.mount(application)
    mounted = folder.mount(lambda environ, start: [], "api")
    assert mounted.parent is folder
