"""Ios whose operations are Lua functions (spec: bas-api §6, §17)."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.apps.lua.api.luaio import LuaFile, LuaIo, LuaIoCallbacks
from smqrt.apps.lua.vm import Vm
from smqrt.http.resources import IoError
from smqrt.loop import threads
from tests.apps.lua.app_server import AppServer
from tests.support.waiting import wait_until

APP = Path(__file__).parents[2] / "examples" / "luaio"


@pytest.fixture
def app(server: AppServer) -> AppServer:
    server.applications.load("", APP)
    return server


def test_every_call_from_lua(app: AppServer):
    lines = app.ask("/io.lsp").text.removesuffix("\n").split("\n")
    expected = [
        "userdata\tlua\tlinux",
        "13\ttrue\tdirectory\ttrue\tindex.html",
        "nil\tnotfound",
        "nil\tinvalidname",
        "nil\tnotfound",
        "nil\tioerror",
        "nil\tioerror",
        "userdata\ttrue\t<h1>\tHome</h1>\tnil\ttrue\th1>Home</h1>\tnil",
        "true\tfalse\tfalse\tio.lsp:12: attempt to use a closed file in 'read'",
        "true\ttrue\ttrue\ta12.5",
        "nil\tnospace",
        "true\tnil\texist",
        "true\tnil\tnotfound",
        "true\tnil\tenoent",
        "nil\tnoimplementation",
        "big:false:1000:0 d:true:1000:0 hello.lsp:false:1000:77 index.html:false:1000:13 large.bin:false:1000:400000 "
        "lib:true:1000:0",
        "false\tio.lsp:24: notfound",
        "42\tnil",
        "nil\tnotfound",
        "userdata\tlua\t30\tnil\tinvalidname",
        "nil\tnotfound",
        "local",
        "nil\tnoimplementation",
        "false\tio.lsp:32: bad argument #1 to 'read' (a size expected, got -1)",
        "true",
        "false\tio.lsp:34: bad argument #1 to 'luaio' (table expected, got no value)",
        "false\tio.lsp:34: bad argument #1 to 'luaio.open' (function expected, got number)",
        "nil\tnoimplementation",
        "nil\tnoimplementation",
        "true",
        "nil\tnoimplementation",
    ]
    assert lines[: len(expected)] == expected
    assert lines[len(expected) :] == ["nil"]  # the callback sleeps, and a comparator can't wait: that is logged


def test_files_and_pages_are_served_from_it(app: AppServer):
    for _ in range(2):
        assert app.ask("/site/").text == "<h1>Home</h1>"
        assert app.ask("/site/hello.lsp").text == "hello\thello.lsp\tlua\tlinux\n"
    large = app.ask("/site/large.bin")
    assert (large.status, large.body) == (200, b"0123456789" * 40000)
    part = app.ask("/site/large.bin", headers={"Range": "bytes=399995-"})
    assert (part.status, part.body) == (206, b"56789")
    assert app.ask("/site/none.html").status == 404
    assert app.ask("/site/index.html", "HEAD").headers["Content-Length"] == "13"


def test_python_uses_it_from_greenlets_and_threads(app: AppServer):
    reader = next(child for child in app.root.children[0].children if child.name == "site")
    store = reader.io

    def use() -> list[object]:
        with store.open("t", "w") as file:
            file.write(b"from Python")
        store.mkdir("p")
        store.rename("t", "p/t")
        below = store.sub("p")
        with below.open("t") as file:
            file.seek(-6, 2)
            data = file.read()
        told = [data, [entry.name for entry in store.files("p")], below.stat("t").size, file.closed]
        store.remove("p/t")
        for wrong in (
            lambda: store.stat("p/t"),
            lambda: store.open("crash"),
            lambda: store.rmdir("p"),
            lambda: store.stat("../x"),
        ):
            with pytest.raises(IoError) as caught:
                wrong()
            told.append(caught.value.word)
        return told

    expected = [b"Python", ["t"], 11, True, "notfound", "ioerror", "noimplementation", "invalidname"]
    assert gevent.spawn(use).get(timeout=5) == expected
    seen = threads.in_thread(lambda: (store.stat("index.html").size, store.open("index.html").read(2)))
    assert seen == (13, b"<h")


def test_file_servers_and_uploads_take_it(app: AppServer):
    answer = app.ask("/up/up.txt", "PUT", b"uploaded")
    assert (answer.status, answer.text) == (200, "up.txt")
    assert app.ask("/files/up.txt").text == "uploaded"
    assert app.ask("/files/dav.txt", "PUT", b"by WebDAV").status == 201
    assert app.ask("/site/dav.txt").text == "by WebDAV"
    listed = app.ask("/files/", "PROPFIND", headers={"Depth": "1"})
    assert listed.status == 207
    assert "dav.txt" in listed.text
    assert app.ask("/files/dav.txt", "DELETE").status == 204
    assert app.ask("/files/dav.txt").status == 404


def test_a_forgotten_file_is_closed_by_its_callback(app: AppServer):
    assert app.ask("/forget.lsp").text == "forgotten\n"
    wait_until(lambda: app.ask("/asked.lsp").text.endswith("close index.html\n"))


def test_an_archive_in_a_folder_closes_with_the_application(server: AppServer):
    application = server.applications.load("", APP)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("d/a.txt", "zipped")
    assert server.ask("/up/z.zip", "PUT", packed.getvalue()).status == 200
    assert server.ask("/zip.lsp").text == "zip\tzipped\tnil\tnotfound\nnil\tziperror\n"
    files = server.root.children[0].children[0].io
    with files.sub("z.zip").sub("d").open("a.txt") as file:
        assert file.read() == b"zipped"
    application.unload()
    with pytest.raises(IoError, match="ended"):
        files.stat("index.html")


class Callbacks:
    """Callbacks that answer with what the test gives them for each operation."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[Any, ...]] = []

    def ask(self, operation: bytes, *args: Any) -> Any:
        self.asked.append((operation, *args))
        answer = self.answers.get(operation.decode(), ())
        return answer(*args) if callable(answer) else answer

    def start(self, operation: bytes, *args: Any) -> None:
        self.asked.append((b"start", operation, *args))


def opened(mode: str, **answers: Any) -> tuple[Callbacks, LuaFile]:
    callbacks: Any = Callbacks(open=(7,), **answers)
    file: Any = LuaIo(callbacks).open("d/a.txt", mode)
    assert callbacks.asked == [(b"open", b"d/a.txt", mode.replace("b", "").encode())]
    callbacks.asked.clear()
    return callbacks, file


def test_a_read_asks_for_small_pieces_until_the_end() -> None:
    pieces = iter([b"x" * 65536, b"y" * 10, b"", None])
    callbacks, file = opened("rb", read=lambda number, size: (next(pieces),))
    assert file.read(100_000) == b"x" * 65536 + b"y" * 10
    assert callbacks.asked == [(b"read", 7, 65536), (b"read", 7, 100_000 - 65536), (b"read", 7, 100_000 - 65546)]
    assert file.read(1) == b""
    assert file.tell() == 65546


def test_a_read_of_too_much_is_an_error() -> None:
    _, file = opened("r", read=(b"123",))
    with pytest.raises(IoError, match=r"read returned more than 2 bytes") as error:
        file.read(2)
    assert error.value.word == "ioerror"


def test_only_a_changed_position_needs_a_seek_callback() -> None:
    callbacks, file = opened("r", read=lambda number, size: (b"x" * size,), stat=(1000, 10, False))
    file.read(4)
    callbacks.asked.clear()
    assert [file.seek(4), file.seek(0, 1)] == [4, 4]
    assert callbacks.asked == []
    assert [file.seek(-3, 2), file.seek(2, 1)] == [7, 9]
    assert [call for call in callbacks.asked if call[0] != b"stat"] == [
        (b"operate", 7, b"seek", 7),
        (b"operate", 7, b"seek", 9),
    ]


def test_a_mode_says_what_a_file_allows() -> None:
    kinds = {mode: opened(mode)[1] for mode in ("r", "w", "a", "r+")}
    assert [mode for mode, file in kinds.items() if file.readable()] == ["r", "r+"]
    assert [mode for mode, file in kinds.items() if file.writable()] == ["w", "a", "r+"]
    callbacks, file = opened("r")
    file.flush()
    assert callbacks.asked == []


def test_a_file_is_closed_once_also_when_forgotten() -> None:
    callbacks, file = opened("w")
    with file:
        file.write(b"data")
    file.close()
    assert callbacks.asked == [(b"operate", 7, b"write", b"data"), (b"close", 7)]
    callbacks, forgotten = opened("w")
    del forgotten
    assert callbacks.asked == [(b"start", b"close", 7)]


def test_entries_of_a_folder_are_new_versions_each_time() -> None:
    entry = (
        b"\0\0\0\3\xc3\xa4x" + struct.pack(">?qQ", False, -5, 1 << 40) + b"\0\0\0\1d" + struct.pack(">?qQ", True, 0, 0)
    )
    store: Any = LuaIo(Callbacks(files=(entry,)), "below")  # type: ignore[arg-type]
    first, again = list(store.files("x/")), list(store.files("/x"))
    assert store.callbacks.asked == [(b"files", b"below/x")] * 2
    assert [(stat.name, stat.mtime, stat.size, stat.isdir) for stat in first] == [
        ("äx", -5, 1 << 40, False),
        ("d", 0, 0, True),
    ]
    assert first[0].version != again[0].version
    assert store.realpath("a") == "lua:/below/a"


def test_failing_callbacks_are_errors_with_a_word(vm: Vm) -> None:
    serve = vm.compile("local ref, operation, word = ... if word == 'fail' then error 'oh' end return nil, word, 1")
    callbacks = LuaIoCallbacks(vm, serve, vm.compile("return"))
    words = []
    for argument in (b"nospace", b"fail"):
        with pytest.raises(IoError) as error:
            callbacks.ask(b"open", argument)
        words.append(error.value.word)
    assert callbacks.ask(b"stat") == (None, None, 1)
    callbacks.close()
    callbacks.close()
    with pytest.raises(IoError, match="the application of this io has ended"):
        callbacks.ask(b"open", b"x")
    assert words == ["nospace", "ioerror"]
