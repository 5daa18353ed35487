"""Files that are made when somebody reads them."""

from __future__ import annotations

import pytest

from smqrt.http.resources import IoError, VirtualIo, server_io


def _absent() -> bytes:
    raise FileNotFoundError(2, "gone")


FILES = VirtualIo({"a.txt": lambda: b"one", "sub/b.txt": lambda: b"three", "sub/none.txt": _absent})


def test_a_file_is_what_its_function_gives() -> None:
    assert FILES.read("/a.txt") == b"one"
    stat = FILES.stat("sub/b.txt")
    assert (stat.name, stat.size, stat.isdir) == ("b.txt", 5, False)
    assert FILES.realpath("a.txt") == "vm:/a.txt"


def test_folders_are_the_names_before_a_slash() -> None:
    assert sorted(stat.name for stat in VirtualIo({"x": bytes, "d/y": bytes}).files()) == ["d", "x"]
    assert FILES.stat("sub").isdir
    below = FILES.sub("sub")
    assert below.read("b.txt") == b"three"


@pytest.mark.parametrize("name", ["nothing", "sub/nothing", "sub/none.txt", "a.txt/x"])
def test_what_is_not_there(name: str) -> None:
    with pytest.raises(IoError) as caught:
        FILES.read(name)
    assert caught.value.word == "notfound"


def test_nothing_is_written() -> None:
    for change in (lambda: FILES.open("a.txt", "w"), lambda: FILES.remove("a.txt"), lambda: FILES.mkdir("d")):
        with pytest.raises(IoError, match="noaccess"):
            change()
    with pytest.raises(IoError, match="notfound"):
        FILES.sub("a.txt")


def test_every_server_has_a_certificate_to_try_tls_with() -> None:
    io = server_io()
    assert b"BEGIN CERTIFICATE" in io.read(".certificate/MakoServer.pem")
    assert b"PRIVATE KEY" in io.read(".certificate/MakoServer.key")
