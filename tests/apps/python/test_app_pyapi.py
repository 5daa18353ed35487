"""The application in examples/pyapi: what Python's directory functions get and answer, the modules beside them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.http.access import Access
from smqrt.http.body import MAX_JSON_VALUES
from smqrt.wire.websocket import BINARY, CLOSE, CLOSE_TOO_BIG, CONTINUATION, PING, TEXT, encode_masked
from tests.apps.lua.app_server import Answer, AppServer
from tests.apps.lua.websocket_client import Client
from tests.support.waiting import wait_until

APP = Path(__file__).parent.parent / "examples" / "pyapi"
URLENCODED = {"Content-Type": "application/x-www-form-urlencoded"}
MULTIPART = {"Content-Type": "multipart/form-data; boundary=edge"}


@pytest.fixture
def app(server: AppServer) -> Iterator[AppServer]:
    shutil.copytree(APP, server.folder / "pyapi", ignore=shutil.ignore_patterns("__pycache__"))
    application = server.applications.load("pyapi", server.folder / "pyapi")
    assert application.error is None, application.error
    yield server
    application.unload()


def part(name: str, content: str, filename: str | None = None) -> str:
    file = f'; filename="{filename}"\r\nContent-Type: text/x-test' if filename is not None else ""
    return f'--edge\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n{content}\r\n'


def multipart(*parts: str) -> bytes:
    return ("".join(parts) + "--edge--\r\n").encode()


def post(app: AppServer, what: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
    return app.ask(f"/pyapi/{what}", "POST", body, headers)


def value(answer: Answer) -> Any:
    assert answer.status == 200, answer.text
    return json.loads(answer.text)


def test_what_a_head_says(app: AppServer) -> None:
    headers = {"Cookie": 'a=1; b="two"; a=3; bad; =x'}
    assert value(app.ask("/pyapi/names?q=gr%C3%BCn+x&q=2&r=%ff&s", headers=headers)) == {
        "method": "GET",
        "path": "/pyapi/names",
        "query": "q=gr%C3%BCn+x&q=2&r=%ff&s",
        "q": "grün x",
        "all": ["grün x", "2"],
        "index": "grün x",
        "missing": "none",
        "names": ["q", "r", "s"],
        "cookie": "1",
        "cookies": [["a", "1"], ["b", "two"], ["a", "3"]],
    }
    assert value(app.ask("/pyapi/names"))["index"] is False
    assert app.ask("/pyapi/names?" + "a&" * 1000).status == 413


def test_json(app: AppServer) -> None:
    assert value(post(app, "json", b'{"a": [1, "\xc3\xbc"]}')) == {
        "value": {"a": [1, "ü"]},
        "again": {"a": [1, "ü"]},
        "bytes": 16,
    }
    for bad in (b"", b"{", b'{"a": NaN}', b"\xff", b"[" * 100_000, b"1" * 5000):
        answer = post(app, "json", bad)
        assert answer.status == 400, bad[:20]
        assert "JSON" in answer.text
    assert post(app, "json", b"[" + b"1," * MAX_JSON_VALUES + b"1]").status == 413
    assert post(app, "json", b" " * (4 << 20) + b"1").status == 413
    assert value(post(app, "caught", b"{"))["status"] == 400


def test_forms(app: AppServer) -> None:
    seen = value(post(app, "form", b"a=1&b=gr%C3%BCn+x&a=2", URLENCODED))
    assert seen == {"fields": [["a", "1"], ["b", "grün x"], ["a", "2"]], "files": [], "again": True}
    body = multipart(part("a", "1"), part("up", "content", "../../x.txt"), part("b", "ü"), part("none", "", ""))
    seen = value(post(app, "form", body, MULTIPART))
    assert seen["fields"] == [["a", "1"], ["b", "ü"]]
    assert seen["files"] == [["up", "x.txt", "text/x-test", "content"], ["none", "", "text/x-test", ""]]
    assert value(app.ask("/pyapi/form"))["fields"] == []
    assert value(post(app, "missing", b"a=1", URLENCODED)) == ["1", False, "1", {"a": "1"}]
    missing = post(app, "missing", b"b=1", URLENCODED)
    assert missing.status == 400
    assert "The field &#x27;a&#x27; is missing." in missing.text
    assert value(post(app, "twice", body, MULTIPART)) == [[], 2, 2, [["a", "1"], ["b", "ü"]]]
    assert post(app, "twice", b"x", {"Content-Type": "text/plain"}).status == 415


FAULTY = [
    (b"{}", {"Content-Type": "application/json"}, 415),
    (b"x", {}, 415),
    (b"a&" * 1000, URLENCODED, 413),
    (b"--edge\r\nnonsense", MULTIPART, 400),
    (multipart(part("a", "1"))[:-20], MULTIPART, 400),
    (b"x", {"Content-Type": "multipart/form-data"}, 400),
    (multipart(part("a", "x" * (1 << 20) + "x")), MULTIPART, 413),
    (multipart(part("a", "x" * (4 << 20), "big")), MULTIPART, 413),
]


def test_forms_that_are_none(app: AppServer) -> None:
    for body, headers, status in FAULTY:
        assert post(app, "form", body, headers).status == status, body[:50]
    assert value(app.ask("/pyapi/form")) == {"fields": [], "files": [], "again": True}


def test_files_as_they_arrive(app: AppServer) -> None:
    body = multipart(
        part("a", "1"), part("one", "x" * 90_000, "c.txt"), part("b", "2"), part("two", "y" * 90_000, "skip"),
        part("three", "z", "d"), part("c", "3"),
    )  # fmt: skip
    seen = value(post(app, "files", body, MULTIPART))
    assert seen["seen"] == [["c.txt", 90_000, ["a", "b"]], ["d", 1, ["a", "b", "c"]]]
    assert seen["fields"] == [["a", "1"], ["b", "2"], ["c", "3"]]
    folder = app.folder / "pyapi"
    assert (folder / "saved-one").read_bytes() == b"x" * 90_000
    assert (folder / "saved-three").read_bytes() == b"z"
    assert post(app, "files", multipart(part("big", "x" * 100_001, "f")), MULTIPART).status == 413
    assert post(app, "files", multipart(*[part("s", "x" * 90_000, "skip")] * 3), MULTIPART).status == 413
    assert post(app, "files", multipart(part("cut", "x" * 90_000, "f"))[:50_000], MULTIPART).status == 400
    assert value(post(app, "files", b"a=1", URLENCODED)) == {"seen": [], "fields": [["a", "1"]]}
    assert post(app, "files", b"{}", {"Content-Type": "application/json"}).status == 415
    assert sorted(one.name for one in folder.iterdir() if "saved" in one.name) == ["saved-one", "saved-three"]


def test_answers(app: AppServer) -> None:
    text = app.ask("/pyapi/text")
    assert (text.text, text.headers["Content-Type"]) == ("<p>grün", "text/html; charset=utf-8")
    assert app.ask("/pyapi/bytes").headers["Content-Type"] is None
    created = app.ask("/pyapi/created")
    assert (created.status, created.text) == (201, '{"done":null}')
    assert created.headers["Content-Type"] == "application/json"
    assert created.headers["Cache-Control"] == "no-store"
    assert created.headers["Set-Cookie"] == "kept=1; Path=/; SameSite=Lax; HttpOnly"
    away = app.ask("/pyapi/cookies")
    assert (away.status, away.headers["Location"]) == (302, "text")
    assert away.headers.get_all("Set-Cookie") == [
        "a=b; Path=/pyapi/; Max-Age=60; SameSite=Strict; HttpOnly",
        "old=; Path=/; Max-Age=0; SameSite=Lax; HttpOnly",
    ]
    stream = app.ask("/pyapi/stream")
    assert (stream.text, stream.headers["Transfer-Encoding"]) == ("first,second,third", "chunked")
    assert value(app.ask("/pyapi/closed")) == 1
    assert app.ask("/pyapi/endless", "HEAD").status == 200
    assert value(app.ask("/pyapi/streaming")) is False
    assert app.ask("/pyapi/below/x").text == "below x of /pyapi/below/"
    teapot = app.ask("/pyapi/teapot")
    assert (teapot.status, teapot.headers["X-Pot"]) == (418, "tea")
    assert "Short &amp; stout." in teapot.text
    assert app.ask("/pyapi/store.py").status == 404


def test_websockets(app: AppServer, caplog: pytest.LogCaptureFixture) -> None:
    client = Client(app.port, "/pyapi/ws/echo")
    client.send(TEXT, "grün".encode())
    assert client.receive() == ("nürg".encode(), True, 0, 0)
    client.send(BINARY, b"ab" * 90_000)
    data = b""
    while len(data) < 180_000:
        piece = client.receive()
        assert piece
        data += piece.data
    assert data == b"ba" * 90_000
    client.send(TEXT, b"on", fin=False)
    client.send(CONTINUATION, b"e")
    client.send(PING, b"still there?")
    assert client.receive() == (b"eno", True, 0, 0)
    client.sock.sendall(encode_masked(CLOSE, (4000).to_bytes(2, "big")))
    assert client.closed() == 4000
    wait_until(lambda: len(value(app.ask("/pyapi/said"))) == 2, "the end")
    assert value(app.ask("/pyapi/said")) == [[4000, None], "the WebSocket is closed: socketclosed"]
    large = Client(app.port, "/pyapi/ws/echo")
    large.send(BINARY, b"x" * 200_001)
    assert large.closed() == CLOSE_TOO_BIG
    assert Client(app.port, "/pyapi/ws/bye").closed() == 4001
    assert Client(app.port, "/pyapi/forgotten").closed() == 1000
    waits = Client(app.port, "/pyapi/ws/waits")
    assert waits.receive() == (b"no message within 0.01 s", True, 0, 0)
    gone = Client(app.port, "/pyapi/ws/echo")
    gone.sock.close()
    wait_until(lambda: len(value(app.ask("/pyapi/said"))) == 8, "the ends")
    assert Client(app.port, "/pyapi/ws/fails").closed() == 1011
    assert "while a WebSocket was open" in caplog.text
    with pytest.raises(AssertionError, match=r"HTTP/1.1 403"):
        Client(app.port, "/pyapi/ws/echo", "Origin: http://elsewhere.example\r\n")
    plain = app.ask("/pyapi/ws/echo")
    assert (plain.status, plain.headers["Upgrade"]) == (426, "websocket")
    app.applications.all[-1].unload()
    assert waits.closed() == 1000


def test_a_request_that_is_over(app: AppServer) -> None:
    assert post(app, "kept", b"a=1", URLENCODED).text == "kept"
    said = value(app.ask("/pyapi/kept/late"))
    assert all(text.startswith("the request has ended: ") for text in said[:4]), said
    assert "must come before it" in said[4]


def test_errors_are_shown_as_those_of_lua(app: AppServer, caplog: pytest.LogCaptureFixture) -> None:
    answer = app.ask("/pyapi/nested?values=[0]")
    assert answer.status == 500
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    lines = answer.text.splitlines()
    assert lines[0] == "Python error: pyapi/store.py:24: LookupError: no such thing"
    assert 'File "pyapi/.preload.py", line' in answer.text
    assert "ZeroDivisionError: division by zero" in answer.text
    assert "    return 1 / values[0]" in answer.text
    assert "smqrt/http" not in answer.text
    assert len([record for record in caplog.records if "no such thing" in record.getMessage()]) == 1
    script = app.ask("/pyapi/nested?values=[0]", headers={"X-Requested-With": "XMLHttpRequest"})
    assert json.loads(script.text)["error"] == "python"
    assert json.loads(script.text)["emsg"].startswith("pyapi/store.py:24: LookupError")
    assert "pyapi/.preload.py" in app.ask("/pyapi/unknown").text
    assert app.ask("/pyapi/late").text.startswith("<p>xxx")
    assert "ValueError: in the &lt;middle&gt;" in app.ask("/pyapi/late").text
    app.server.access = Access(debug=False)
    assert "such thing" not in app.ask("/pyapi/nested?values=[0]").text


def test_a_download_that_fails_is_seen_to_be_cut(app: AppServer) -> None:
    with pytest.raises(Exception, match="IncompleteRead"):
        app.ask("/pyapi/download")


def test_modules_beside_it(app: AppServer) -> None:
    names = [True, "the store of pyapi, an item", "an item", "tag of an item", 0, "smqrt_app_pyapi.store"]
    assert value(app.ask("/pyapi/modules")) == names
    assert "store" not in sys.modules
    assert "models" not in sys.modules
