"""The application in examples/pylogin: sessions and logins of Python applications."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.apps.lua.app_server import Answer, AppServer

APP = Path(__file__).parent.parent / "examples" / "pylogin"


class Browser:
    """Keeps cookies."""

    def __init__(self, server: AppServer) -> None:
        self._server = server
        self.cookies: dict[str, str] = {}

    def ask(self, path: str, method: str = "GET", user: str = "", **form: str) -> Answer:
        headers = {"Cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
        body = None
        if form:
            method, body = "POST", urlencode(form).encode()
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        if user:
            headers["Authorization"] = "Basic " + b64encode(user.encode()).decode()
        answer = self._server.ask(f"/app/{path}", method, body, {name: text for name, text in headers.items() if text})
        for field in answer.headers.get_all("Set-Cookie") or ():
            self.cookies |= {name: morsel.value for name, morsel in SimpleCookie(field).items()}
        return answer

    def json(self, path: str) -> Any:
        return json.loads(self.ask(path).text)


@pytest.fixture
def app(server: AppServer) -> Iterator[AppServer]:
    application = server.applications.load("app", APP)
    assert application.error is None, application.error
    yield server
    application.unload()


def test_a_session_is_a_visitor_s(app: AppServer) -> None:
    one, two = Browser(app), Browser(app)
    assert one.json("me") == {"user": None, "visits": None, "relogin": []}
    assert not one.cookies
    assert [one.json("visit")[0] for _ in range(3)] == [1, 2, 3]
    assert two.json("visit") == [1, True, 7, 1]
    assert one.json("me")["visits"] == 3
    field = Browser(app).ask("visit").headers["Set-Cookie"]
    assert "HttpOnly" in field
    assert "SameSite=Lax" in field
    assert one.json("out") is False
    assert one.json("me")["visits"] is None
    assert "must come before it" in two.ask("late").text or two.ask("late").text == "x"
    assert "must come before it" in Browser(app).ask("late").text


def test_logins_by_program(app: AppServer) -> None:
    browser = Browser(app)
    browser.ask("visit")
    before = dict(browser.cookies)
    assert browser.json("in?name=ann") is True
    assert browser.cookies != before, "the session's id changes"
    assert browser.json("me") == {"user": ["ann", "?"], "visits": 1, "relogin": ["ann"]}
    assert browser.json("in?name=bob") == "ann"
    assert browser.ask("form/x").text == "hello ann at x"
    assert browser.json("out") is True
    assert browser.json("me")["user"] is None
    assert browser.ask("form/x").text.startswith("login")


def test_a_form_protects_what_is_in_its_directory(app: AppServer) -> None:
    browser = Browser(app)
    assert browser.ask("form/x?a=1").text == "login The vault None 0 True"
    wrong = browser.ask("form/x", ba_username="ann", ba_password="wrong")
    assert (wrong.status, wrong.text) == (200, "login The vault ann 1 True")
    right = browser.ask("form/x?a=1", ba_username="ann", ba_password="secret")
    assert (right.status, right.headers["Location"].rpartition("/app/")[2]) == (302, "form/x?a=1")
    assert browser.ask("form/x").text == "hello ann at x"
    other = Browser(app)
    assert other.ask("form/x", ba_username="bob", ba_password="hunter2").status == 302
    assert other.ask("form/x").status == 403
    assert other.json("out?all") is True


def test_users_from_a_function(app: AppServer) -> None:
    browser = Browser(app)
    assert browser.ask("wsgi/").status == 401
    assert browser.ask("wsgi/", user="slow:blocks").text.split() == ["slow", "basic"]
    assert browser.ask("wsgi/", user="slow:other").status == 401
    failed = browser.ask("wsgi/", user="broken:x")
    assert failed.status == 500
    assert failed.text.startswith("Python error: pylogin/.preload.py:")
    assert "ValueError: no database" in failed.text.splitlines()[0]
    assert browser.ask("chosen/yes", user="ann:secret").text.split() == ["ann", "basic"]
    assert browser.ask("chosen/no", user="ann:secret").status == 403
    assert browser.ask("chosen/yes", "POST", user="ann:secret").status == 403


def test_a_form_of_a_mounted_application_comes_whole(app: AppServer) -> None:
    browser = Browser(app)
    assert browser.ask("posted/", a="1").text.startswith("login")
    assert browser.ask("posted/", ba_username="ann", ba_password="secret").status == 302
    assert browser.ask("posted/", a="1", b="2").text == "ann form a=1&b=2"


def test_the_folder_can_be_locked_at_any_time(app: AppServer) -> None:
    browser = Browser(app)
    assert browser.ask("note.txt").text == "a note\n"
    browser.ask("lock")
    assert browser.ask("note.txt").text == "login Barracuda Server None 0 True"
    assert browser.ask("form/x").text.startswith("login Barracuda")
    assert browser.json("me")["user"] is None, "the function of the directory itself is asked before"
    assert browser.ask("note.txt", ba_username="ann", ba_password="secret").status == 302
    assert browser.ask("note.txt").text == "a note\n"
    browser.ask("unlock")
    assert Browser(app).ask("note.txt").text == "a note\n"
