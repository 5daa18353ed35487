"""The directory tree: the resource that answers a path (spec: bas-api §4, runtime §5, §11)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import ArgumentError
from smqrt.http.disk import DiskIo
from smqrt.http.message import Request
from smqrt.http.tree import Directory, DispatchError, ResourceReader, Root


def says(text: str) -> Callable[[Request, str], object]:
    return lambda request, relpath: request.response.write(f"{text}:{relpath}".encode())


def directory(name: str | None = None, priority: int = 0, text: str | None = None) -> Directory:
    made = Directory(name, priority)
    made.func = says(text) if text else None
    return made


@pytest.fixture
def site(tmp_path: Path) -> Path:
    files = {
        "index.html": "index",
        "a.txt": "a",
        "sub/index.htm": "sub index",
        "sub/deep.txt": "deep",
        ".part.html": "part",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "empty").mkdir()
    (tmp_path / "page.lsp").write_text("source")
    return tmp_path


# directories


def test_priorities(bench: Any) -> None:
    for name, priority, text in [("", -1, "last"), ("", 5, "first"), ("", 0, "middle"), ("rtl", 127, "rtl")]:
        bench.root.insert(directory(name, priority, text))
    wire = bench.connect()
    assert wire.ask("/rtl/smq.js").body == b"rtl:smq.js"
    assert wire.ask("/x").body == b"first:x"
    bench.root.children[1].func = lambda request, relpath: False
    assert wire.ask("/x").body == b"middle:x"


def test_named_directories_precede_unnamed_ones_of_equal_priority(bench: Any) -> None:
    bench.root.insert(directory(None, 0, "root"))
    bench.root.insert(directory("chat", 0, "chat"))
    assert bench.connect().ask("/chat/x").body == b"chat:x"


def test_names_match_whole_segments(bench: Any) -> None:
    bench.root.insert(directory("chat", 0, "chat"))
    wire = bench.connect()
    assert wire.ask("/chat/").body == b"chat:"
    assert wire.ask("/chat/users/5").body == b"chat:users/5"
    assert wire.ask("/chatter/").status == 404
    assert wire.ask("/Chat/").status == 404


@pytest.mark.parametrize("result", [None, True, 0, "", "x"])
def test_only_false_means_not_handled(bench: Any, result: object) -> None:
    bench.handle(lambda request, relpath: result)
    assert bench.connect().ask("/x").status == 200


def test_children_named_then_unnamed(bench: Any) -> None:
    parent = directory("p")
    bench.root.insert(parent)
    parent.insert(directory(None, 0, "any"))
    parent.insert(directory("c", 0, "c"))
    wire = bench.connect()
    assert wire.ask("/p/c/x").body == b"c:x"
    assert wire.ask("/p/d/x").body == b"any:d/x"


def test_baseuri() -> None:
    root, outer, inner, unnamed = Root(), Directory("outer"), Directory("inner"), Directory()
    root.insert(outer)
    outer.insert(unnamed)
    unnamed.insert(inner)
    assert [each.baseuri() for each in (outer, unnamed, inner)] == ["/outer/", "/outer/", "/outer/inner/"]


def test_unlink_and_insert_again(bench: Any) -> None:
    gone = directory("x", 0, "x")
    assert not gone.unlink()
    bench.root.insert(gone)
    with pytest.raises(ArgumentError, match="alreadyinserted"):
        bench.root.insert(gone)
    assert gone.unlink()
    assert bench.connect().ask("/x/").status == 404
    bench.root.insert(gone)
    assert bench.connect().ask("/x/").status == 200


def test_a_directory_may_unlink_itself_while_it_answers(bench: Any) -> None:
    once = Directory()

    def func(request: Request, relpath: str) -> None:
        once.unlink()
        request.response.write(b"once")

    once.func = func
    bench.root.insert(once)
    wire = bench.connect()
    assert wire.ask("/x").body == b"once"
    assert wire.ask("/x/").status == 404


@pytest.mark.parametrize(("name", "priority"), [("a/b", 0), ("x", 128), ("x", -128)])
def test_wrong_arguments(name: str, priority: int) -> None:
    with pytest.raises(ArgumentError, match="use"):
        Directory(name, priority)


# nobody answered


def test_a_slash_is_added(bench: Any, site: Path) -> None:
    bench.root.insert(directory("chat", 0, "chat"))
    bench.root.insert(ResourceReader(io=DiskIo(site)))
    wire = bench.connect()
    for path in ("/chat", "/sub", "/nothing"):
        answer = wire.ask(path)
        assert (answer.status, answer.fields["location"]) == (302, f"http://test{path}/")
    assert wire.ask("/ch%61t?a=/b").fields["location"] == "http://test/ch%61t/?a=/b"
    assert wire.ask("/nothing/").status == 404
    assert wire.ask("/nothing.txt").status == 404


def test_a_slash_never_redirects_to_another_host(bench: Any) -> None:
    assert bench.connect().ask("//evil").fields["location"] == "http://test//evil/"
    wire = bench.connect().send(b"GET //evil HTTP/1.0\r\n\r\n")
    assert wire.answer().fields["location"] == f"http://127.0.0.1:{bench.listener.address[1]}//evil/"


def test_the_fallback_is_asked_before_a_slash_is_added(bench: Any, site: Path) -> None:
    reader = ResourceReader(io=DiskIo(site))
    bench.root.insert(reader)
    reader.insert(directory(None, 0, "fallback"))
    wire = bench.connect()
    assert wire.ask("/api").body == b"fallback:api"
    assert wire.ask("/a.txt").body == b"a", "files come first"


# resource readers


def test_index_files(bench: Any, site: Path) -> None:
    reader = ResourceReader("app", io=DiskIo(site))
    bench.root.insert(reader)
    wire = bench.connect()
    assert wire.ask("/app/").body == b"index"
    assert wire.ask("/app/sub/").body == b"sub index"
    assert wire.ask("/app/sub/deep.txt").body == b"deep"
    assert wire.ask("/app/empty/").status == 404
    assert wire.ask("/app/a.txt/").status == 404
    (site / "sub" / "index.htm").unlink()
    (site / "sub" / "index.lsp").write_text("source")
    assert wire.ask("/app/sub/").status == 404
    reader.pages = lambda request, io, name, where: request.response.write(f"{name} in {where.name}".encode())
    assert wire.ask("/app/sub/").body == b"sub/index.lsp in app"
    assert wire.ask("/app/page.lsp?x").body == b"page.lsp in app"


def test_the_function_of_a_reader_falls_through(bench: Any, site: Path) -> None:
    reader = ResourceReader(io=DiskIo(site))
    reader.func = lambda request, relpath: relpath == "mine" and request.response.write(b"mine") is None
    bench.root.insert(reader)
    wire = bench.connect()
    assert wire.ask("/mine").body == b"mine"
    assert wire.ask("/a.txt").body == b"a"


def test_what_a_function_set_before_it_declined_stays(bench: Any, site: Path) -> None:
    def func(request: Request, relpath: str) -> bool:
        request.response.headers.set("X-Mine", "yes")
        return False

    reader = ResourceReader(io=DiskIo(site))
    reader.func = func
    bench.root.insert(reader)
    for _ in range(2):
        answer = bench.connect().ask("/a.txt")
        assert (answer.body, answer.fields["x-mine"]) == (b"a", "yes")


def test_prologue_is_asked_before_files(bench: Any, site: Path) -> None:
    reader = ResourceReader(io=DiskIo(site))
    reader.insertprolog(directory("sub", 0, "prologue"))
    bench.root.insert(reader)
    wire = bench.connect()
    assert wire.ask("/sub/deep.txt").body == b"prologue:deep.txt"
    assert wire.ask("/a.txt").body == b"a"


def test_headers_of_a_reader(bench: Any, site: Path) -> None:
    reader = ResourceReader(io=DiskIo(site))
    reader.headers = {"X-Content-Type-Options": "nosniff"}
    reader.pages = lambda request, io, name, where: request.response.write(b"page")
    bench.root.insert(reader)
    wire = bench.connect()
    for _ in range(2):
        assert wire.ask("/a.txt").fields["x-content-type-options"] == "nosniff"
    assert wire.ask("/page.lsp").fields["x-content-type-options"] == "nosniff"
    reader.headers = {}
    assert "x-content-type-options" not in wire.ask("/a.txt").fields


# forward, include, redirect


class Calls:
    """A page handler that does one internal call."""

    def __init__(self, bench: Any, path: str, mode: str) -> None:
        self.bench, self.path, self.mode = bench, path, mode
        self.error: DispatchError | None = None

    def __call__(self, request: Request, io: Any, name: str, where: Directory) -> None:
        request.response.write(b"<before>")
        try:
            self.bench.root.internal(request, self.path, where, self.mode)
        except DispatchError as error:
            self.error = error
            request.response.write(error.word.encode())
        request.response.write(b"<behind>")


@pytest.fixture
def call(bench: Any, site: Path) -> Callable[[str, str], bytes]:
    """`call(path, mode)` asks for a page that makes this call, and gives the body."""
    reader = ResourceReader("app", io=DiskIo(site))
    bench.root.insert(reader)
    bench.root.insert(directory("other", 0, "other"))

    def ask(path: str, mode: str) -> bytes:
        reader.pages = Calls(bench, path, mode)
        body: bytes = bench.connect().ask("/app/page.lsp").body
        return body

    return ask


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("a.txt", b"a"),
        ("sub/deep.txt", b"deep"),
        ("sub/../a.txt", b"a"),
        ("./a.txt", b"a"),
        ("sub/", b"sub index"),
        ("", b"index"),
        ("/app/a.txt", b"a"),
        ("/other/x/y", b"other:x/y"),
        ("../other/x", b"other:x"),
        (".part.html", b"part"),
        ("/app/.part.html", b"part"),
    ],
)
def test_include(call: Any, path: str, body: bytes) -> None:
    assert call(path, "include") == b"<before>" + body + b"<behind>"


@pytest.mark.parametrize("path", ["/other/x", "../other/x"])
def test_forward(call: Any, path: str) -> None:
    assert call(path, "forward") == b"other:x<behind>"


@pytest.mark.parametrize("path", ["a.txt", "/app/a.txt", "sub/../a.txt"])
def test_forward_to_a_file_is_a_whole_answer(call: Any, path: str) -> None:
    assert call(path, "forward") == b"a"


@pytest.mark.parametrize("mode", ["forward", "include", "redirect"])
@pytest.mark.parametrize(
    "path", ["none.txt", "/none/", "../../../../etc/passwd", "/../../etc/passwd", "a.txt/x", "sub"]
)
def test_a_page_that_is_not_there(call: Any, mode: str, path: str) -> None:
    assert b"pagenotfound<behind>" in call(path, mode)


@pytest.mark.parametrize("path", [".part.html", "/app/.part.html"])
def test_redirect_shows_nothing_hidden(call: Any, path: str) -> None:
    assert b"pagenotfound" in call(path, "redirect")


def test_redirect_searches_like_a_new_request(bench: Any, call: Any) -> None:
    assert call("a.txt", "redirect") == b"a"
    assert call("/other/x", "redirect") == b"other:x<behind>"


@pytest.mark.parametrize(("mode", "word"), [("include", b"toomanyincludes"), ("forward", b"toomanyforwards")])
def test_nesting_ends_at_ten(bench: Any, call: Any, mode: str, word: bytes) -> None:
    body = call("page.lsp", mode)
    assert word in body
    assert body.count(b"<behind>") == 11


def test_no_forward_behind_the_head(bench: Any, site: Path) -> None:
    reader = ResourceReader(io=DiskIo(site))
    bench.root.insert(reader)

    def page(request: Request, io: Any, name: str, where: Directory) -> None:
        request.response.flush()
        with pytest.raises(DispatchError, match="iscommitted"):
            bench.root.internal(request, "a.txt", where, "forward")
        bench.root.internal(request, "a.txt", where, "include")

    reader.pages = page
    assert bench.connect().ask("/page.lsp").body == b"a"


def test_depth_is_reported_and_restored(bench: Any, site: Path) -> None:
    seen = []
    reader = ResourceReader(io=DiskIo(site))
    bench.root.insert(reader)

    def page(request: Request, io: Any, name: str, where: Directory) -> None:
        seen.append((name, request.initial, request.includes, request.forwards))
        if name == "page.lsp":
            bench.root.internal(request, "other.lsp", where, "include")
            seen.append(("back", request.initial, request.includes, request.forwards))

    (site / "other.lsp").write_text("source")
    reader.pages = page
    bench.connect().ask("/page.lsp")
    assert seen == [("page.lsp", True, 0, 0), ("other.lsp", False, 1, 0), ("back", True, 0, 0)]


def test_a_function_does_not_get_its_own_forwards(bench: Any, site: Path) -> None:
    """`dir:setfunc(function(_ENV, path) response:forward(".login.html") end)` ends at the file."""
    reader = ResourceReader("app", io=DiskIo(site))
    reader.func = lambda request, relpath: bench.root.internal(request, ".part.html", reader, "forward")
    bench.root.insert(reader)
    assert bench.connect().ask("/app/x").body == b"part"
    reader.func = lambda request, relpath: bench.root.internal(request, "/app/.part.html", reader, "forward")
    assert bench.connect().ask("/app/x").body == b"part"


def test_prologues_are_for_initial_requests(bench: Any, site: Path) -> None:
    reader = ResourceReader(io=DiskIo(site))
    prologue = directory("sub", 0, "prologue")
    reader.insertprolog(prologue)
    reader.pages = Calls(bench, "sub/deep.txt", "include")
    bench.root.insert(reader)
    assert bench.connect().ask("/page.lsp").body == b"<before>deep<behind>"
