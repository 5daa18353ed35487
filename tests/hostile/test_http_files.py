"""Large files, from the disk and from a ZIP archive, taken as fast as it goes and taken by nobody."""

from __future__ import annotations

import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.conftest import APPS, Besieged

LARGE_BYTES = 32 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An application as folder and as ZIP file."""
    folder = tmp_path_factory.mktemp("large")
    line = random.Random(1).randbytes(1 << 16).hex().encode()
    (folder / "app").mkdir()
    (folder / "app" / ".preload").write_text("-- nothing\n")
    (folder / "app" / "large.txt").write_bytes(line * (LARGE_BYTES // len(line)))
    with zipfile.ZipFile(folder / "packed.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in (".preload", "large.txt"):
            archive.write(folder / "app" / name, name)
    return folder


@pytest.mark.parametrize("name", ["app", "packed.zip"])
def test_a_large_file(folder: Path, besiege: Callable[..., Besieged], name: str) -> None:
    besieged = besiege(folder / name)
    path = "/" + name.removesuffix(".zip") + "/large.txt"
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{besieged.port}\r\n".encode()
    last = b"Range: bytes=33000000-33000009\r\nConnection: close\r\n\r\n"
    with besieged.attack(f"32 MiB of {name}, read at once and by 20 who do not read", grows_bytes=96 << 20) as attack:
        idle = [besieged.open() for _ in range(20)]
        for sock in idle:
            sock.sendall(request + b"\r\n")
        answer = besieged.exchange(request + b"Connection: close\r\n\r\n", attack)
        assert len(answer) > LARGE_BYTES
        assert b" 206 " in besieged.exchange(request + last, attack)
        for sock in idle:
            sock.close()


@pytest.mark.parametrize("kind", ["folder", "packed"])
def test_a_folder_of_many_files_that_many_list(besiege: Callable[..., Besieged], tmp_path: Path, kind: str) -> None:
    names = [f"files/{number}.txt" for number in range(10_000)]
    if kind == "packed":
        app = tmp_path / "many.zip"
        with zipfile.ZipFile(app, "w") as archive:
            archive.write(APPS / "lua" / "files.lsp", "files.lsp")
            for name in names:
                archive.writestr(name, b"x")
    else:
        app = tmp_path / "many"
        (app / "files").mkdir(parents=True)
        shutil.copy(APPS / "lua" / "files.lsp", app)
        for name in names:
            (app / name).write_bytes(b"x")
    besieged = besiege(app)
    head = b"GET /many/files.lsp?folder=files HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with besieged.attack(f"8 who list 10,000 files ({kind})") as attack:
        asking = [besieged.open(60) for _ in range(8)]
        for sock in asking:
            sock.sendall(head)
            attack.sent(len(head))
        answers = [sock.makefile("rb").read() for sock in asking]
    assert all(b"10000\t11000" in answer for answer in answers)
