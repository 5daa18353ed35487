"""The applications in examples/wsgi: Flask and Django mounted in a server that runs as users run it."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from smqrt.wire.websocket import CLOSE, TEXT
from tests.apps.lua.websocket_client import Client
from tests.conftest import Served

APPS = Path(__file__).parent.parent / "examples" / "wsgi"

pytestmark = pytest.mark.servers


class Reloading(Served):
    """The server of copies of the applications."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(folder, "--reload")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reloading]:
    folder = tmp_path_factory.mktemp("wsgi") / "apps"
    shutil.copytree(APPS, folder, ignore=shutil.ignore_patterns("__pycache__", "db.sqlite3"))
    running = Reloading(folder)
    for name in ("django", "flask", "plain"):
        assert running.wait_for(rf"^app {name} at /{name}/: (.*)$")[1] == "ok", running.output
    yield running
    assert running.stop() == 0


@pytest.fixture
def browser(served: Served) -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def test_flask(served: Served, browser: requests.Session) -> None:
    url = f"{served.url}/flask"
    assert browser.get(f"{url}/").text == '<p>visit 1, <a href="/flask/form">form</a>'
    assert "visit 2" in browser.get(f"{url}/").text
    assert browser.get(f"{url}/file.txt").text == "a file of the folder\n"
    assert browser.get(f"{url}/more/").text == "more at /flask/more/"
    told = browser.post(f"{url}/form?q=grün", data={"a": "1 & 2"}).json()
    assert told == {"fields": {"a": "1 & 2"}, "query": {"q": "grün"}}
    files = {"one": ("a.txt", b"x" * 700_000), "two": ("b.txt", b"")}
    assert browser.post(f"{url}/upload", files=files).json() == {"one": ["a.txt", 700_000], "two": ["b.txt", 0]}
    answer = browser.get(f"{url}/rows")
    assert (answer.text, answer.headers["Transfer-Encoding"]) == ("0\n1\n2\n3\n4\n", "chunked")
    assert browser.post(f"{url}/twice", data=b"x" * 100_000).json() == [100_000, 0]
    failed = browser.get(f"{url}/fails")
    assert failed.status_code == 500
    assert "what Flask" not in failed.text
    served.wait_for("ValueError: what Flask answers itself")
    assert browser.get(f"{url}/nothing").status_code == 404
    assert browser.get(f"{url}/.templates/index.html").status_code == 404


def test_django(served: Served, browser: requests.Session) -> None:
    url = f"{served.url}/django/shop"
    first: dict[str, Any] = browser.get(f"{url}/").json()
    assert (first["visits"], first["url"], first["user"]) == (1, "/django/shop/order/", "AnonymousUser")
    token = browser.get(f"{url}/").json()
    assert token["visits"] == 2
    fields = {"number": "7", "csrfmiddlewaretoken": token["token"]}
    photo = {"photo": ("me.jpg", b"x" * 3_000_000)}  # more than Django keeps in memory
    assert browser.post(f"{url}/order/", data=fields, files=photo).json() == {
        "number": 7,
        "photo": ["me.jpg", 3_000_000],
    }
    assert "photo" in browser.post(f"{url}/order/", data=fields).json()
    assert browser.post(f"{url}/order/", data={"number": "7"}).status_code == 403
    assert browser.get(f"{url}/rows/").text == "0\n1\n2\n3\n4\n"
    assert "SECRET_KEY" in browser.get(f"{url}/source/").text
    assert browser.get(f"{url}/order").url.endswith("/order/")
    failed = browser.get(f"{url}/fails/")
    assert failed.status_code == 500
    assert "Server Error (500)" in failed.text
    assert browser.get(f"{served.url}/django/db.sqlite3").status_code == 404


def test_a_module_that_changes_starts_its_application_anew(served: Reloading, browser: requests.Session) -> None:
    module = served.folder / "flask" / "pages.py"
    source = module.read_text()
    module.write_text(source + "if x\n")
    served.wait_for(r"^app flask at /flask/: not restarted: flask/pages.py:11: expected ':'$")
    assert browser.get(f"{served.url}/flask/more/").text == "more at /flask/more/"
    module.write_text(source.replace("more at", "even more at"))
    served.wait_for(r"^app flask at /flask/: ok(.|\n)*^app flask at /flask/: ok$")
    assert browser.get(f"{served.url}/flask/more/").text == "even more at /flask/more/"
    assert "django" not in served.output.partition("not restarted")[2]


def test_by_hand(served: Served, browser: requests.Session) -> None:
    failed = browser.get(f"{served.url}/plain/fails/")
    assert failed.status_code == 500
    assert failed.text.startswith("Python error: plain/.preload.py:13: ValueError: nobody catches it\n")
    words = browser.get(f"{served.url}/plain/tells/a/b").text
    assert words == "/plain/tells /a/b application: a WSGI application is a callable, not str"
    assert browser.get(f"{served.url}/plain/deep/x.txt").status_code == 404


def test_websockets_of_flask_end_with_the_application(served: Reloading) -> None:
    clients = [Client(served.port, "/flask/ws", host="127.0.0.1") for _ in range(2)]
    for client in clients:
        client.send(TEXT, b"hello")
        assert client.receive() == (b"hello", True, 0, 0)
    clients[0].send(CLOSE, struct.pack(">H", 1000))
    assert clients[0].closed() == 1000
    preload = served.folder / "flask" / ".preload.py"
    preload.write_text(preload.read_text() + "\n")  # it starts anew
    assert clients[1].closed() == 1000
    assert "WebSocketClosedError" not in served.output
