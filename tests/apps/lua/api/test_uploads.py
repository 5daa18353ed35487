"""Uploads of an application: `ba.create.upload` (spec: bas-api §4, §17)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gevent import socket

from smqrt.apps.lua.applications import Application
from tests.apps.lua.app_server import Answer, AppServer
from tests.support.waiting import wait_until

APP = Path(__file__).parents[2] / "examples" / "upload"
BOUNDARY = "b0undary"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


class Uploads:
    """The application, its server and the folder its files go to."""

    def __init__(self, server: AppServer) -> None:
        folder = server.folder / "upload"
        shutil.copytree(APP, folder)
        self.server = server
        self.application: Application = server.applications.load("", folder)
        assert self.application.error is None, self.application.error
        self.files = folder / "files"

    @property
    def names(self) -> list[str]:
        return sorted(file.name for file in self.files.iterdir() if file.name != ".keep")

    def ask(self, path: str, body: bytes | None, method: str = "PUT", **headers: str) -> Answer:
        return self.server.ask(
            f"/up/{path}", method, body, {name.replace("_", "-"): value for name, value in headers.items()}
        )

    def form(self, path: str, *parts: tuple[str, bytes], **headers: str) -> Answer:
        body = b"".join(
            f"--{BOUNDARY}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content + b"\r\n"
            for head, content in parts
        )
        return self.ask(path, body + f"--{BOUNDARY}--\r\n".encode(), "POST", Content_Type=FORM, **headers)

    def events(self) -> list[str]:
        """What the application was told since the last call."""
        text = self.server.vm.eval(
            "local told = table.concat(uploads_app.events, '\\n') uploads_app.events = {} return told"
        )[0]
        assert isinstance(text, bytes)
        return text.decode().split("\n") if text else []

    def stored(self, name: str) -> bytes | None:
        value = self.server.vm.eval(f"return store['{name}']")
        return value[0] if value else None  # type: ignore[return-value]


@pytest.fixture
def uploads(server: AppServer) -> Uploads:
    made = Uploads(server)
    made.server.write("upload", {"expose.lsp": "<?lsp _G.uploads_app = app ?>"})
    assert server.ask("/expose.lsp").status == 200
    return made


def test_a_put(uploads: Uploads):
    data = bytes(range(256)) * 8192
    answer = uploads.ask("disk/a.bin", data)
    assert (answer.status, answer.text, answer.headers["X-Name"]) == (200, "stored a.bin", "a.bin")
    assert (uploads.files / "a.bin").read_bytes() == data
    url = f"http://127.0.0.1:{uploads.server.port}/up/disk/a.bin"
    assert uploads.events() == [f"started a.bin false {url} nil", "done a.bin marked"]
    assert uploads.ask("disk/a.bin", b"").status == 200  # replaces, also by nothing
    assert (uploads.files / "a.bin").read_bytes() == b""
    assert uploads.ask("lua/b.bin", b"x" * 100_000).text == "stored b.bin"
    assert uploads.stored("b.bin") == b"x" * 100_000


def test_a_form_names_its_file(uploads: Uploads):
    file = 'name="f"; filename="C:\\dir\\own name.txt"', b"content\r\n--" * 30_000
    answer = uploads.form("disk/", ('name="a"', b"field"), file, ('name="z"', b"last"))
    assert (answer.status, answer.text) == (200, "stored own name.txt")
    assert (uploads.files / "own name.txt").read_bytes() == file[1]
    assert [line.split(" http")[0] for line in uploads.events()] == [
        "started own name.txt true",
        "done own name.txt marked",
    ]
    assert uploads.form("disk/given", file).text == "stored given"
    assert uploads.names == ["given", "own name.txt"]


def test_a_form_with_several_files(uploads: Uploads):
    """The beginning of each is told, and the end of all."""
    parts = [(f'name="f"; filename="{name}"', name.encode() * 1000) for name in ("one", "two", "")]
    assert uploads.form("disk/", *parts[:2]).text == "stored two"
    told = [line.split(" http")[0] for line in uploads.events()]
    assert told == ["started one true", "started two true", "done two marked"]
    assert uploads.names == ["one", "two"]
    assert uploads.form("disk/", *parts).text == "invalidname"
    assert uploads.names == ["one", "two"]  # what was complete stays


@pytest.mark.parametrize("filename", ["", ".preload", "..", "../../x"])
def test_a_form_names_no_hidden_file_and_none_elsewhere(uploads: Uploads, filename: str):
    answer = uploads.form("disk/", (f'name="f"; filename="{filename}"', b"x"))
    if filename == "../../x":  # folders in front are dropped, as browsers once sent them
        assert uploads.names == ["x"]
    else:
        assert (answer.status, answer.text) == (507, "invalidname")
        assert uploads.names == []
        assert uploads.events() == ["failed  invalidname string"]


def test_failures_are_reported_and_leave_no_file(uploads: Uploads):
    cases = [
        (uploads.ask("disk/none/x", b"x"), "notfound"),
        (uploads.ask("disk/", b"x"), "invalidname"),
        (uploads.ask("lua/forbidden", b"x"), "noaccess"),
        (uploads.ask("lua/full", b"x" * 2_000_000), "nospace"),
        (uploads.form("disk/nothing"), "failed"),
        (uploads.form("disk/empty", ('name="a"', b"field")), "failed"),
        (
            uploads.ask(
                "disk/cut", b"--b0undary\r\nContent", "POST", Content_Type="multipart/form-data; boundary=b0undary"
            ),
            "failed",
        ),
    ]
    for answer, word in cases:
        assert (answer.status, answer.text) == (507, word)
    assert uploads.names == []
    assert uploads.stored("full") is None
    assert all(line.endswith("string") for line in uploads.events() if line.startswith("failed"))


def test_an_application_that_does_not_answer_or_fails(uploads: Uploads, caplog: pytest.LogCaptureFixture):
    assert uploads.ask("disk/a", b"x", X_Mode="silent").status == 500
    assert uploads.names == ["a"]
    assert uploads.ask("disk/none/x", b"x", X_Mode="silent").status == 500
    assert uploads.ask("disk/b", b"x", X_Mode="crash").status == 500
    assert "in startcb" in caplog.text
    refused = uploads.ask("disk/c", b"x" * 3_000_000, X_Mode="refuse")
    assert (refused.status, refused.text) == (403, "not wanted")
    assert uploads.names == ["a"]


def test_a_response_that_is_forgotten_is_complete(uploads: Uploads):
    answer = uploads.ask("disk/a", b"x", X_Mode="forget")
    assert (answer.status, answer.text) == (200, "forgotten")


def test_the_page_ends_or_goes_on(uploads: Uploads):
    assert uploads.ask("disk/a", b"x", X_Cont="1").text == "stored a"
    assert uploads.events()[0] == "went on"
    assert uploads.ask("disk/a", b"x", X_Catch="1").text == "stored a"
    assert "this never runs" not in uploads.events()
    assert uploads.ask("disk/a", b"x", X_Mode="bare").text == "stored a"
    assert uploads.events()[-1] == "done a nil"


def test_what_is_no_upload(uploads: Uploads):
    assert uploads.ask("disk/a", None, "GET").status == 405
    assert uploads.ask("disk/a", b"x", "POST").status == 405
    code = """
      print(pcall(ba.create.upload)) print(pcall(ba.create.upload, io, 0))
      local take = ba.create.upload(io)
      print(pcall(take)) print(pcall(take, request, "x")) print(pcall(take, request, "x", print, print, print, 1))
    """
    uploads.server.write("upload", {"wrong.lsp": f"<?lsp {code} ?>"})
    lines = uploads.server.ask("/wrong.lsp", "PUT", b"x").text.splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == [
        "bad argument #1 to 'upload' (io expected, got no value)",
        "bad argument #2 to 'upload' (a number above 0 expected, got 0)",
        "bad argument #1 to 'uploader' (request expected, got no value)",
        "bad argument #3 to 'uploader' (function expected, got no value)",
        "bad argument #6 to 'uploader' (table expected, got number)",
    ]


def begun(uploads: Uploads, path: str, length: int = 1000) -> socket.socket:
    """An upload of which one byte has come."""
    client = socket.create_connection(("127.0.0.1", uploads.server.port), timeout=5)
    client.sendall(f"PUT /up/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\nx".encode())
    wait_until(lambda: any(line.startswith("started") for line in uploads.events()))
    return client


def test_a_client_that_goes_away(uploads: Uploads):
    begun(uploads, "disk/gone").close()
    told: list[str] = []
    wait_until(lambda: told.extend(uploads.events()) or told)
    assert told == ["failed gone socketreadfailed string"]
    wait_until(lambda: uploads.names == [])


def test_an_aborted_upload_keeps_the_previous_file(uploads: Uploads):
    (uploads.files / "kept").write_bytes(b"old")
    begun(uploads, "disk/kept").close()
    wait_until(lambda: uploads.events() == ["failed kept socketreadfailed string"])
    wait_until(lambda: uploads.names == ["kept"])
    assert (uploads.files / "kept").read_bytes() == b"old"
    assert uploads.ask("disk/kept", b"new").status == 200
    assert (uploads.files / "kept").read_bytes() == b"new"
    assert uploads.names == ["kept"]


def test_one_above_the_limit_is_refused_later_ones_accepted(uploads: Uploads):
    first = begun(uploads, "lua/first", 3)
    answer = uploads.ask("lua/second", b"xx")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    first.sendall(b"yz")
    assert b"stored first" in first.recv(1000)
    first.close()
    assert uploads.ask("lua/second", b"xx").text == "stored second"


def test_an_upload_ends_with_its_application(uploads: Uploads):
    client = begun(uploads, "disk/cut")
    uploads.application.unload()
    assert client.recv(1000) == b""
    wait_until(lambda: uploads.names == [])
    client.close()


def test_facts_stay_and_the_response_ends(uploads: Uploads):
    uploads.ask("disk/a", b"x")
    code = "local up = app.last print(up:name(), up:multipart(), up:response():valid()) print(pcall(up.session, up))"
    uploads.server.write("upload", {"last.lsp": f"<?lsp {code} ?>"})
    lines = uploads.server.ask("/last.lsp").text.splitlines()
    assert lines == ["a\tfalse\tfalse", "false\tlast.lsp:1: the upload has ended"]
