"""No spelling of a path leaves the root or shows what is hidden, from a folder or a ZIP archive (help: security)."""

from __future__ import annotations

import os
import sqlite3
import time
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from smqrt.http.access import Private
from smqrt.http.disk import DiskIo, ZipIo
from smqrt.http.resources import Io, IoError
from smqrt.http.tree import ResourceReader

SECRET = "SECRET"
FILES = {
    "index.html": "open",
    "open.txt": "open",
    "sub/open.txt": "open",
    "sub/.hidden": SECRET,
    "sub/page.lsp": SECRET,
    ".preload": SECRET,
    ".preload.py": SECRET,
    ".config": SECRET,
    ".lua/module.lua": SECRET,
    ".git/config": SECRET,
    ".certificate/key.pem": SECRET,
    "page.lsp": SECRET,
    "Upper.LSP": SECRET,
    "part.shtml": SECRET,
    "...": SECRET,
    "module.lua": SECRET,
    "Module.LUA": SECRET,
    "odd.lua.": SECRET,
    "odd.lua::$DATA": SECRET,
    "sub/module.lua": SECRET,
    "tool.py": SECRET,
    "__pycache__/tool.cpython-311.pyc": SECRET,
    "smqrt.toml": SECRET,
    "server.pem": SECRET,
    "server.key": SECRET,
    "names.db": SECRET,
    "names.db-wal": SECRET,
    "names.db-shm": SECRET,
    "names.sqlite3-journal": SECRET,
    "page.lsp~": SECRET,
    "page.lsp.bak": SECRET,
    "module.lua.orig": SECRET,
    "module.lua.~1~": SECRET,
    "tool.py.swp": SECRET,
    "00000000000000000001.arrows": SECRET,
    "00000000000000000001.idx": SECRET,
    "rows.parquet": SECRET,
    "names": "SQLite format 3\0" + SECRET,
}
PRIVATE = [name for name, text in FILES.items() if SECRET in text and "/." not in f"/{name}" and name != "part.shtml"]
HIDDEN = [".preload", ".preload.py", ".config", ".lua/module.lua", ".git/config", ".certificate/key.pem", "sub/.hidden"]
PAGES = ["page.lsp", "sub/page.lsp", "Upper.LSP"]


def climbing() -> list[str]:
    """Ways to the file `outside.txt` beside the root, and to /etc/passwd."""
    ups = [
        "..",
        "%2e%2e",
        "%2E.",
        ".%2e",
        "%252e%252e",
        "..;",
        "..%00",
        "..%20",
        "..%c0%af",
        "%c0%ae%c0%ae",
        "%uff0e%uff0e",
        "....",
    ]
    slashes = ["/", "//", "/./", "%2f", "%252f", "%5c", "\\", "%c0%af", "%ef%bc%8f", "/%2e/", ";/"]
    ways = [f"/{up}{slash}outside.txt" for up in ups for slash in slashes]
    ways += [f"/sub/{up}/{up}/outside.txt" for up in ups]
    ways += [f"/sub{slash}..{slash}..{slash}outside.txt" for slash in slashes]
    ways += ["/" + "../" * depth + "etc/passwd" for depth in (1, 3, 9)]
    ways += ["//etc/passwd", "///etc/passwd", "/%2fetc/passwd", "/.//../outside.txt", "/open.txt/../../outside.txt"]
    ways += [
        "/file:///etc/passwd",
        "/C:/outside.txt",
        "/sub/..",
        "/..",
        "/.",
        "/sub/../../",
        "/%2e%2e/",
        "/~root/.profile",
    ]
    return ways


def hidden() -> list[str]:
    """Ways to hidden files."""
    ways = []
    for name in HIDDEN:
        coded = quote(name).replace(".", "%2e")
        ways += [
            f"/{name}",
            f"/{coded}",
            f"/{coded.upper()}",
            f"//{name}",
            f"/./{name}",
            f"/sub/../{name}",
            f"/%2e/{name}",
        ]
        ways += [
            f"/{name}/",
            f"/{name}%00.txt",
            f"/{name}%20",
            f"/{name}.",
            f"/{name}::$DATA",
            f"/{name.upper()}",
            f"/{name}?x",
        ]
        ways += [
            f"/open.txt/../{name}",
            f"/{name}%23.txt",
            f"/{name};.txt",
            f"/%252e{name[1:]}",
            f"/{name}%0a",
            f"/\\{name}",
        ]
    ways += [
        "/.lua",
        "/.lua/",
        "/.lua//module.lua",
        "/.lua/./module.lua",
        "/%2elua/module.lua",
        "/.",
        "/...",
        "/%2e%2e%2e",
    ]
    ways += ["/part.shtml", "/part.shtm%6c", "/PART.SHTML", "/part.SHTML", "/part.shtml/", "/part.shtml."]
    return ways


def pages() -> list[str]:
    """Ways to the source of pages."""
    ways = []
    for name in PAGES:
        stem, dot, end = name.rpartition(".")
        ways += [
            f"/{name}",
            f"/{name}/",
            f"/{name}%00.txt",
            f"/{name}%00",
            f"/{name}.",
            f"/{name}%20",
            f"/{name}%2e",
            f"/{name}%20.",
        ]
        ways += [
            f"/{stem}.{end.swapcase()}",
            f"/{stem}.{end.title()}",
            f"/{stem}%2e{end}",
            f"/{stem}.%6c%73%70",
            f"/{name}::$DATA",
        ]
        ways += [
            f"/{name}%3a%3a$DATA",
            f"/{name};.txt",
            f"/{name}%3b.txt",
            f"/{name}%23.txt",
            f"/{name}%3f.txt",
            f"/{name}/x.txt",
        ]
        ways += [
            f"//{name}",
            f"/./{name}",
            f"/sub/../{name}",
            f"/{name}/.",
            f"/{name}/..",
            f"/{name}%5c",
            f"/{name}\\",
            f"/{name}%0a",
        ]
        ways += [
            f"/{name}~",
            f"/{name}.bak",
            f"/{name}%09",
            f"/{name}%7f",
            f"/{name}?.txt",
            f"/{name}?%00.txt",
            f"/{stem}%252e{end}",
        ]
    return ways


LINKS = {
    "out.txt": "../outside.txt",
    "absolute.txt": "/etc/passwd",
    "up": "..",
    "system": "/etc",
    "preload.txt": ".preload",
    "modules": ".lua",
    "source.txt": "page.lsp",
    "hop.txt": "out.txt",
    "part.html": "part.shtml",
    "self": "self",
    "module.txt": "module.lua",
    "names.txt": "names",
    "code": "sub",
}
LINK_WAYS = ["/out.txt", "/absolute.txt", "/up/outside.txt", "/system/passwd", "/preload.txt", "/modules/module.lua"]
LINK_WAYS += ["/source.txt", "/hop.txt", "/part.html", "/self", "/self/x", "/up/", "/modules/", "/up/app/.preload"]
LINK_WAYS += ["/module.txt", "/names.txt", "/code/module.lua"]


def private() -> list[str]:
    """Ways to code, keys and data."""
    ways = []
    for name in PRIVATE:
        plain = quote(name)
        ways += [f"/{plain}", f"/{plain.replace('.', '%2e')}", f"//{plain}", f"/./{plain}", f"/sub/../{plain}"]
        ways += [f"/{plain}{end}" for end in ("/", ".", "%20", "::$DATA", "?x.html")] + [f"/{plain.upper()}"]
    return ways


WAYS = sorted({*climbing(), *hidden(), *pages(), *private()})


def test_there_are_enough() -> None:
    assert len(WAYS) >= 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("paths")
    (base / "outside.txt").write_text(SECRET)
    for name, text in FILES.items():
        path = base / "app" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, target in LINKS.items():
        (base / "app" / name).symlink_to(target)
    (base / "app" / "inside.txt").symlink_to("sub/open.txt")
    os.mkfifo(base / "app" / "pipe.txt")
    return base / "app"


@pytest.fixture(scope="module")
def archive(folder: Path) -> Path:
    path = folder.parent / "app.zip"
    with zipfile.ZipFile(path, "w") as file:
        for name, text in FILES.items():
            file.writestr(name, text)
        for name, target in LINKS.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o120777 << 16
            file.writestr(info, target)
    return path


@pytest.fixture(params=["folder", "zip"])
def io(request: Any, folder: Path, archive: Path) -> Io:
    return DiskIo(folder) if request.param == "folder" else ZipIo(archive)


@pytest.mark.parametrize("with_pages", [False, True], ids=["pages off", "pages on"])
def test_never_shown(bench: Any, io: Io, with_pages: bool) -> None:
    reader = ResourceReader(io=io)
    if with_pages:
        reader.pages = lambda request, io, name, directory: request.response.write(b"a page ran")
    bench.root.insert(reader)
    shown = []
    for way in WAYS:
        wire = bench.connect()
        wire.send(f"GET {way} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".encode())
        answer = wire.answer()
        if answer.status not in (200, 302, 400, 404) or SECRET.encode() in answer.body or b"root:" in answer.body:
            shown.append((way, answer))
        if answer.status == 200 and answer.body not in (b"open", b"a page ran"):
            shown.append((way, answer))
        if b"a page ran" in answer.body and "lsp" not in way.lower().replace("%6c%73%70", "lsp"):
            shown.append((way, answer))
        wire.close()
    assert shown == []


@pytest.mark.parametrize("way", HIDDEN + ["part.shtml", "..."])
def test_hidden_is_404_before_a_fallback_sees_it(bench: Any, io: Io, way: str) -> None:
    bench.root.insert(ResourceReader(io=io))
    bench.handle(lambda request, relpath: request.response.write(b"fallback"))
    assert bench.connect().ask("/" + way).status == 404
    assert bench.connect().ask("/nothing").body == b"fallback"


@pytest.mark.parametrize("way", LINK_WAYS)
def test_links_show_nothing_more(bench: Any, folder: Path, way: str) -> None:
    bench.root.insert(ResourceReader(io=DiskIo(folder)))
    answer = bench.connect().ask(way)
    assert answer.status in (302, 404), answer
    assert SECRET.encode() not in answer.body


@pytest.mark.parametrize("name", LINKS)
def test_links_in_an_archive_are_no_files(bench: Any, archive: Path, name: str) -> None:
    bench.root.insert(ResourceReader(io=ZipIo(archive)))
    assert bench.connect().ask("/" + name).status in (302, 404)


SERVED = ["module.lua", "Module.LUA", "tool.py", "names.db", "names", "sub/module.lua"]


@pytest.mark.parametrize("name", SERVED)
def test_served_when_asked_for(bench: Any, io: Io, name: str) -> None:
    io.private = Private("*.lua, *.PY, names*")
    bench.root.insert(ResourceReader(io=io))
    assert SECRET.encode() in bench.connect().ask("/" + name).body
    for other in ("server.key", "page.lsp", ".preload", ".lua/module.lua", "rows.parquet"):
        assert SECRET.encode() not in bench.connect().ask("/" + other).body


def test_folders_below_have_the_same_rules(bench: Any, io: Io) -> None:
    io.private = Private("*.lua")
    bench.root.insert(ResourceReader(io=io.sub("sub")))
    assert bench.connect().ask("/module.lua").body == SECRET.encode()


def test_an_archive_below_has_the_same_rules(bench: Any, archive: Path) -> None:
    io = DiskIo(archive.parent)
    io.private = Private("*.lua")
    bench.root.insert(ResourceReader(io=io.sub("app.zip")))
    assert bench.connect().ask("/module.lua").body == SECRET.encode()
    assert bench.connect().ask("/tool.py").status == 404


def test_a_file_that_becomes_a_database(bench: Any, folder: Path) -> None:
    """What was shown a moment ago is looked at again."""
    file = folder / "growing"
    file.write_text("open")
    bench.root.insert(ResourceReader(io=DiskIo(folder)))
    wire = bench.connect()
    assert wire.ask("/growing").body == b"open"
    file.unlink()
    database = sqlite3.connect(file)
    database.execute("CREATE TABLE secret (secret)")
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("INSERT INTO secret VALUES (1)")
    database.commit()
    for name in ("growing", "growing-wal", "growing-shm"):
        assert (folder / name).stat().st_size
        assert wire.ask("/" + name).status in (302, 404), name
    database.close()
    file.unlink()


OPEN = ["python.html", "lua", "intro.lua.html", "data.json", "backup.png.bak", "my-journal", "key.html", "arrow.svg"]


@pytest.mark.parametrize("name", OPEN)
def test_what_only_looks_like_it_is_served(bench: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("open")
    bench.root.insert(ResourceReader(io=DiskIo(tmp_path)))
    assert bench.connect().ask("/" + name).body == b"open"


@pytest.mark.parametrize("part", ["a/", "wal/", "pipelines/", "~", ".1~", "./a/", ".bak", "a.lua/", "x" * 250 + "/"])
def test_long_paths_take_no_time(io: Io, part: str) -> None:
    """As long as a head may be."""
    for end in ("", "x", ".sql", ".py"):
        name = (part * (16000 // len(part))) + end
        begin = time.process_time()
        with pytest.raises(IoError):
            io.published(name)
        with pytest.raises(IoError):
            io.published(name[:4000])
        assert time.process_time() - begin < 0.04


def test_a_link_inside_works(bench: Any, folder: Path) -> None:
    bench.root.insert(ResourceReader(io=DiskIo(folder)))
    assert bench.connect().ask("/inside.txt").body == b"open"


def test_a_link_that_is_turned_outside(bench: Any, folder: Path) -> None:
    """What was good a moment ago and lies in the cache is checked again."""
    link = folder / "turned.txt"
    link.symlink_to("open.txt")
    bench.root.insert(ResourceReader(io=DiskIo(folder)))
    wire = bench.connect()
    assert wire.ask("/turned.txt").body == b"open"
    link.unlink()
    link.symlink_to("../outside.txt")
    assert wire.ask("/turned.txt").status == 404
    link.unlink()


def test_a_pipe_does_not_hold_the_server(bench: Any, folder: Path) -> None:
    bench.root.insert(ResourceReader(io=DiskIo(folder)))
    assert bench.connect().ask("/pipe.txt").status == 404


def test_the_open_ones_are_shown(bench: Any, io: Io) -> None:
    bench.root.insert(ResourceReader(io=io))
    wire = bench.connect()
    for way in ("/", "/index.html", "/open.txt", "/sub/open.txt", "/%6fpen.txt", "/open.txt?.preload"):
        assert wire.ask(way).body == b"open", way
