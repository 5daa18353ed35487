"""Equal requests for small files get the same response without a parser, until anything changes."""

from __future__ import annotations

import gc
import logging
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.apps.python import directory as app_directory
from smqrt.http import access, repeats
from smqrt.http.access import Access
from smqrt.http.disk import DiskIo
from smqrt.http.logins.authenticator import Authenticator
from smqrt.http.logins.registry import Login
from smqrt.http.message import Request
from smqrt.http.tree import Directory, ResourceReader
from smqrt.process.current_process import AppScope
from smqrt.transport.origins import Hosts
from tests.http.http_bench import Bench, Wire, get


class Site:
    """A server with one folder, and how many requests it has parsed."""

    def __init__(self, bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench, self.folder, self.parsed = bench, folder, 0
        (folder / "a.txt").write_text("first")
        self.reader = ResourceReader(io=DiskIo(folder))
        bench.root.insert(self.reader)
        self.wire = bench.connect()
        init = Request.__init__

        def counted(request: Request, *args: Any) -> None:
            self.parsed += 1
            init(request, *args)

        monkeypatch.setattr(Request, "__init__", counted)

    def warm(self, path: str = "/a.txt", headers: str = "") -> None:
        """Request a file, so that its response is kept."""
        self.wire.ask(path, headers=headers)

    def is_repeated(self, path: str = "/a.txt", headers: str = "") -> bool:
        """Whether the next request is answered without being parsed."""
        before = self.parsed
        self.wire.ask(path, headers=headers)
        return self.parsed == before


@pytest.fixture
def site(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(bench, tmp_path, monkeypatch)


def test_an_equal_request_gets_the_same_response(site: Site) -> None:
    first = site.wire.ask("/a.txt")
    time.sleep(1.1)
    assert site.is_repeated()
    again = site.wire.ask("/a.txt")
    assert again.body == first.body == b"first"
    assert again.fields.pop("date") > first.fields.pop("date")
    assert again.fields == first.fields


def test_other_connections_and_pipelines(site: Site) -> None:
    site.warm()
    before = site.parsed
    wire = site.bench.connect()
    wire.send(get("/a.txt") * 50)
    assert [wire.answer().body for _ in range(50)] == [b"first"] * 50
    assert site.parsed == before


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/a.txt", "If-None-Match: x\r\n"),
        ("/a.txt", "Range: bytes=0-1\r\n"),
        ("/a.txt", "Connection: close\r\n"),
        ("/a.txt", "Expect: 100-continue\r\n"),
        ("/a.txt", f"X-Long: {'x' * repeats.MAX_HEAD_BYTES}\r\n"),
        ("/large.bin", ""),
        ("/", ""),
        ("/missing.txt", ""),
        ("/.hidden", ""),
        ("/.well-known/a.txt", ""),
    ],
)
def test_what_is_not_kept(site: Site, path: str, headers: str) -> None:
    (site.folder / "index.html").write_text("index")
    (site.folder / "large.bin").write_bytes(bytes(repeats.MAX_BODY_BYTES + 1))
    (site.folder / ".well-known").mkdir()
    (site.folder / ".well-known/a.txt").write_text("challenge")
    site.wire.ask(path, headers=headers)
    assert not site.bench.server.repeats.by_head


@pytest.mark.parametrize(
    "request_bytes", [get("/a.txt", b"Connection: keep-alive\r\n", b"1.0"), b"HEAD" + get("/a.txt")[3:]]
)
def test_other_methods_and_versions_are_not_kept(site: Site, request_bytes: bytes) -> None:
    site.wire.send(request_bytes).answer("HEAD")
    assert not site.bench.server.repeats.by_head


def test_a_request_with_a_body(site: Site) -> None:
    """Its body is not the next request."""
    head = get("/a.txt", b"Content-Length: 4\r\n")
    for _ in range(3):
        assert site.wire.send(head + b"body").answer().body == b"first"
    assert not site.bench.server.repeats.by_head


def test_compressed_and_plain(site: Site) -> None:
    (site.folder / "long.txt").write_text("text " * 1000)
    for accepted in ("", "Accept-Encoding: gzip\r\n"):
        site.warm("/long.txt", accepted)  # the file is compressed in a thread
        first = site.wire.ask("/long.txt", headers=accepted)
        assert site.is_repeated("/long.txt", accepted)
        assert site.wire.ask("/long.txt", headers=accepted).body == first.body
        assert ("content-encoding" in first.fields) is bool(accepted)


# ---- changes

CHANGES: dict[str, Callable[[Site], object]] = {}


def change(function: Callable[[Site], object]) -> Callable[[Site], object]:
    CHANGES[function.__name__] = function
    return function


@change
def other_content(site: Site) -> None:
    (site.folder / "a.txt").write_text("other")


@change
def same_size_and_second(site: Site) -> None:
    info = (site.folder / "a.txt").stat()
    (site.folder / "a.txt").write_text("FIRST")
    os.utime(site.folder / "a.txt", ns=(info.st_atime_ns, info.st_mtime_ns + 1))


@change
def removed(site: Site) -> None:
    (site.folder / "a.txt").unlink()


@change
def replaced(site: Site) -> None:
    (site.folder / "b.txt").write_text("b")
    os.replace(site.folder / "b.txt", site.folder / "a.txt")


@change
def header_fields(site: Site) -> None:
    site.reader.headers["X-New"] = "1"


@change
def unlinked(site: Site) -> None:
    site.reader.unlink()


@change
def a_directory_before_it(site: Site) -> None:
    directory = Directory("a.txt", 10)
    directory.prefix = "a.txt"
    directory.setfunc(lambda request, relpath: request.response.write("function"))
    site.bench.root.insert(directory)


@change
def another_folder_before_it(site: Site) -> None:
    (site.folder / "other").mkdir()
    (site.folder / "other/a.txt").write_text("before")
    site.bench.root.insert(ResourceReader(None, 10, io=DiskIo(site.folder / "other")))


@change
def a_service(site: Site) -> None:
    site.reader.service = lambda request, relpath: bool(request.response.write("service")) or True  # type: ignore


@change
def a_function(site: Site) -> None:
    site.reader.setfunc(lambda request, relpath: request.response.write("function"))


@change
def an_assigned_function(site: Site) -> None:
    site.reader.func = lambda request, relpath: request.response.write("function")


@change
def a_prologue(site: Site) -> None:
    prologue = Directory(None)
    prologue.setfunc(lambda request, relpath: request.response.write("prologue"))
    site.reader.insertprolog(prologue)


@change
def a_login(site: Site) -> None:
    site.reader.setauth(Authenticator({"ann": "secret"}, "basic"))


@change
def other_hosts(site: Site) -> None:
    site.bench.server.access = Access(hosts=Hosts(["example.com"]))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_by_the_next_request(site: Site, name: str) -> None:
    site.warm()
    assert site.is_repeated()
    before = site.wire.ask("/a.txt")
    CHANGES[name](site)
    after = site.wire.ask("/a.txt")
    assert (after.status, after.body, len(after.fields)) != (before.status, before.body, len(before.fields))


def test_cors_rules(site: Site) -> None:
    origin = "Origin: https://example.com\r\n"
    site.warm(headers=origin)
    site.reader.setcors("https://example.com")
    assert site.wire.ask("/a.txt", headers=origin).fields["access-control-allow-origin"] == "https://example.com"
    assert not site.is_repeated(headers=origin)


@pytest.mark.parametrize("protect", [True, False])
def test_a_protected_folder_is_never_kept(site: Site, protect: bool) -> None:
    """Neither for the one who has logged in, nor for somebody who repeats that request without a login."""
    if protect:
        site.reader.setauth(Authenticator({"ann": "secret"}, "basic"))
    login = "Authorization: Basic YW5uOnNlY3JldA==\r\n"
    for _ in range(3):  # the first one waits for the check of the password
        assert site.wire.ask("/a.txt", headers=login).body == b"first"
    assert site.is_repeated(headers=login) is not protect
    assert site.wire.ask("/a.txt").status == (401 if protect else 200)


def test_a_class_with_checks_of_its_own(site: Site) -> None:
    class Checked(ResourceReader):
        pass

    site.reader.unlink()
    site.bench.root.insert(Checked(io=DiskIo(site.folder)))
    site.warm()
    assert not site.is_repeated()


def test_an_authenticator_of_its_own(site: Site) -> None:
    class OneTime(Authenticator):
        is_used = False

        def authenticate(self, request: Request, path: str = "", directory: object = None) -> Login | None:
            if self.is_used:
                request.response.error(401)
                return None
            self.is_used = True
            session: Any = None
            return Login("ann", None, "basic", request.peer[0], session)

    site.reader.setauth(OneTime({}, "basic"))
    assert [site.wire.ask("/a.txt").status for _ in range(2)] == [200, 401]


def test_a_file_of_a_child(site: Site) -> None:
    """The folder above may have such a file later, which has precedence."""
    (site.folder / "child").mkdir()
    (site.folder / "child/c.txt").write_text("child")
    site.reader.insert(ResourceReader("sub", io=DiskIo(site.folder / "child")))
    assert site.wire.ask("/sub/c.txt").body == b"child"
    (site.folder / "sub").mkdir()
    (site.folder / "sub/c.txt").write_text("parent")
    assert site.wire.ask("/sub/c.txt").body == b"parent"


def test_header_fields_that_another_request_has_seen(site: Site) -> None:
    site.warm()
    site.reader.headers["X-New"] = "1"
    assert "x-new" in site.wire.ask("/a.txt", headers="User-Agent: other\r\n").fields
    assert "x-new" in site.wire.ask("/a.txt").fields


def test_a_busy_application(bench: Bench, tmp_path: Path) -> None:
    """Requests for directories in an application are rejected while the server is overloaded."""
    (tmp_path / "c.txt").write_text("c")
    app = app_directory.ApplicationDirectory("app", 0, DiskIo(tmp_path), AppScope(None, "app"), lambda request: None)
    bench.root.insert(app)
    app.insert(ResourceReader("sub", io=DiskIo(tmp_path)))
    wire = bench.connect()
    assert wire.ask("/app/sub/c.txt").status == 200
    app_directory.overload.append("busy")
    try:
        assert wire.ask("/app/sub/c.txt").status == 503
    finally:
        app_directory.overload.clear()


def test_a_file_of_the_second_folder(site: Site) -> None:
    """The first one may have such a file later."""
    (site.folder / "before").mkdir()
    site.bench.root.insert(ResourceReader(None, 10, io=DiskIo(site.folder / "before")))
    site.warm()
    assert not site.is_repeated()
    (site.folder / "before/a.txt").write_text("before")
    assert site.wire.ask("/a.txt").body == b"before"


def test_a_function_that_leaves_the_request_to_the_files(site: Site) -> None:
    called: list[str] = []

    def count(request: Request, relpath: str) -> bool:
        called.append(relpath)
        return False

    site.reader.setfunc(count)
    for _ in range(3):
        assert site.wire.ask("/a.txt").body == b"first"
    assert called == ["a.txt"] * 3


def test_a_host_that_is_not_accepted_at_every_address(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.bench.server.access = Access(loopback=True)
    monkeypatch.setattr(access, "_is_local", lambda request: False)  # a request to another address of this machine
    site.warm()
    assert not site.bench.server.repeats.by_head
    monkeypatch.undo()
    assert site.wire.ask("/a.txt").status == 403


def test_http_and_https_have_responses_of_their_own(site: Site) -> None:
    site.warm()
    server = site.bench.server
    head = get("/a.txt")
    for is_https in (False, True):
        found = server.repeats.find(head, server.access, site.bench.root.version, is_https, turn=1)
        assert (found is None) is is_https


def test_requests_of_one_turn_share_the_check_of_a_file(site: Site) -> None:
    site.warm()
    server, head = site.bench.server, get("/a.txt")

    def is_found(turn: int) -> bool:
        version = site.bench.root.version
        return server.repeats.find(head, server.access, version, is_https=False, turn=turn) is not None

    assert is_found(turn=1)
    (site.folder / "a.txt").write_text("another text")
    assert is_found(turn=1)
    assert not is_found(turn=2)


def test_a_file_is_checked_again_after_a_response_of_a_handler(site: Site) -> None:
    """A page writes a file and responds: the next request finds the new file, even in the same turn of the loop."""

    def write(request: Request, relpath: str) -> bool:
        (site.folder / "a.txt").write_text("a new text")
        request.response.end(b"written")
        return True

    writer = Directory("write")
    writer.setfunc(write)
    site.bench.root.insert(writer)
    site.warm()
    assert site.is_repeated()
    site.wire.send(get("/a.txt") + get("/write/") + get("/a.txt"))
    assert [site.wire.answer().body for _ in range(3)] == [b"first", b"written", b"a new text"]


def test_observers_see_every_request(site: Site) -> None:
    seen: list[str] = []

    class Observer:
        def began(self, request: Request) -> None:
            seen.append(request.path)

        def ended(self, request: Request, is_detached: bool) -> None:
            pass

    site.warm()
    assert site.is_repeated()
    site.bench.server.observers = (Observer(),)
    assert not site.is_repeated()
    assert seen == ["/a.txt"]


def test_a_server_that_drains_closes_the_connection(site: Site) -> None:
    site.warm()
    site.bench.server.draining = True
    assert site.wire.ask("/a.txt").fields["connection"] == "close"


def test_the_number_of_kept_responses_is_limited(site: Site) -> None:
    for number in range(repeats.MAX_KEPT + 20):
        site.warm(f"/a.txt?{number}")
    assert len(site.bench.server.repeats.by_head) == repeats.MAX_KEPT
    assert site.is_repeated(f"/a.txt?{repeats.MAX_KEPT}")


def test_large_files_are_not_kept_in_memory(site: Site) -> None:
    (site.folder / "long.txt").write_text("text " * 20_000)  # compressed, it is small
    for _ in range(3):
        site.wire.ask("/long.txt", headers="Accept-Encoding: gzip\r\n")
    assert not site.bench.server.repeats.by_head


def test_a_removed_folder_is_not_kept_in_memory(site: Site) -> None:
    site.warm()
    files = weakref.ref(site.reader._files)
    site.reader.unlink()
    site.reader = ResourceReader(io=DiskIo(site.folder))
    site.bench.root.insert(site.reader)
    site.warm("/a.txt?other")
    gc.collect()
    assert files() is None


def test_a_client_that_resets_within_a_pipeline(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.warm()
    wire = site.bench.connect()
    gevent.sleep(0.05)
    wire.send(get("/a.txt") * 50)
    wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.close()
    gevent.sleep(0.1)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_client_that_reads_slowly(site: Site) -> None:
    """It gets all responses in order, and the connection still serves requests."""
    body = os.urandom(repeats.MAX_BODY_BYTES)
    (site.folder / "b.bin").write_bytes(body)
    site.warm("/b.bin")
    before = site.parsed
    wire = site.bench.connect()
    writer = gevent.spawn(wire.send, get("/b.bin") * 2000)
    gevent.sleep(0.3)
    for _ in range(2000):
        assert wire.answer().body == body
    writer.get(timeout=10)
    assert site.parsed - before < 1000
    assert wire.ask("/a.txt").body == b"first"


def test_a_client_that_is_gone(site: Site) -> None:
    site.warm()
    wires: list[Wire] = [site.bench.connect() for _ in range(20)]
    for wire in wires:
        wire.send(get("/a.txt") * 100)
        wire.close()
    gevent.sleep(0.1)
    assert site.is_repeated()
    assert len(site.bench.server) == 1
