"""What the code of Python applications gets: variables, file responses and threads."""

from __future__ import annotations

from typing import Any

import gevent
import pytest
from gevent import monkey

from smqrt.apps.python.exports import Namespace, in_thread, send_file
from smqrt.errors import ArgumentError
from smqrt.http.headers import HttpError
from smqrt.http.resources import VirtualIo
from smqrt.loop import threads
from smqrt.process.current_process import AppScope, running_app
from tests.apps.lua.app_server import AppServer

_thread_id = monkey.get_original("_thread", "get_ident")

SENDING = """
import time
from smqrt.app import HttpError, dir, in_thread, io, send_file
from smqrt.http.disk import DiskIo

photos = DiskIo(io.realpath(".photos"))

def square(number, plus=0):
    time.sleep(0.05)
    if number < 0:
        raise ValueError("negative")
    return number * number + plus

def answer(request, relpath):
    what, _, rest = relpath.partition("/")
    if what == "photo":
        send_file(request, rest, photos, download_as=request.query.get("as"))
    elif what == "own":
        send_file(request, rest)
    elif what == "square":
        request.response.json(in_thread(square, int(rest), plus=1))
    else:
        return False

dir.setfunc(answer)
"""


def test_files_and_threads(server: AppServer) -> None:
    files = {".photos/a b.png": "png", ".photos/in/c.txt": "text", "note.txt": "note", "x.db": "db", ".secret": "x"}
    application = server.app({".preload.py": SENDING, **files}, "send")
    assert application.error is None, application.error
    photo = server.ask("/send/photo/a%20b.png")
    assert (photo.text, photo.headers["Content-Type"]) == ("png", "image/png")
    again = server.ask("/send/photo/a%20b.png", headers={"If-None-Match": photo.headers["ETag"]})
    assert again.status == 304
    part = server.ask("/send/photo/in/c.txt", headers={"Range": "bytes=1-2"})
    assert (part.status, part.text) == (206, "ex")
    saved = server.ask("/send/photo/a%20b.png?as=gr%C3%BCn%22.png")
    assert saved.headers["Content-Disposition"] == "attachment; filename*=UTF-8''gr%C3%BCn%22.png"
    assert server.ask("/send/own/note.txt").text == "note"
    for hidden in ("own/x.db", "own/none", "photo/../note.txt", "own/.preload.py", "photo/in", "own/"):
        assert server.ask(f"/send/{hidden}").status == 404, hidden
    assert server.ask("/send/own/note.txt", "POST").status == 405
    jobs = [gevent.spawn(server.ask, f"/send/square/{number}") for number in range(20)]
    assert [job.get().text for job in jobs] == [str(number * number + 1) for number in range(20)]
    assert "ValueError: negative" in server.ask("/send/square/-1").text
    application.unload()


def test_variables_are_attributes_and_items() -> None:
    variables: dict[str, Any] = {"__name__": "app", "price": 1}
    app = Namespace(variables)
    app.price += 1
    app["name"] = "shop"
    assert (app["price"], app.name, variables["name"], len(app)) == (2, "shop", "shop", 3)
    assert (repr(app), "none" in app, app.get("none")) == ("<application with price, name>", False, None)
    del app.name
    del app["price"]
    assert list(app) == ["__name__"]
    for use in (lambda: app.name, lambda: delattr(app, "name")):
        with pytest.raises(AttributeError, match="the application defines no 'name'"):
            use()
    with pytest.raises(KeyError):
        app["name"]


def test_a_file_without_an_application_needs_an_io() -> None:
    request: Any = None
    with pytest.raises(ArgumentError, match="io: required outside of a Python application"):
        send_file(request, "x")
    with running_app(AppScope(None)), pytest.raises(ArgumentError):
        send_file(request, "x")


def test_the_last_folders_of_an_application_are_kept() -> None:
    scope, request = AppScope(None), None
    ios = [VirtualIo({}) for _ in range(9)]

    def send(io: VirtualIo) -> None:
        with running_app(scope), pytest.raises(HttpError) as missing:
            send_file(request, "none", io)  # type: ignore[arg-type]
        assert missing.value.status == 404

    for io in (*ios[:8], ios[0], ios[8]):
        send(io)
    assert list(scope.kept) == [*ios[2:8], ios[0], ios[8]]


def test_a_function_in_a_thread_gives_value_or_error() -> None:
    assert in_thread(lambda *args, **named: (args, named), 1, a=2) == ((1,), {"a": 2})
    with pytest.raises(LookupError, match="oh"):
        in_thread(failing)
    assert in_thread(thread_of) != thread_of()


def failing() -> None:
    raise LookupError("oh")


def test_in_another_thread_a_function_runs_at_once() -> None:
    def nested() -> bool:
        return in_thread(thread_of) == thread_of()

    assert threads.in_thread(nested)


def thread_of() -> int:
    return int(_thread_id())
