"""Clients that log in to the application examples/logins."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from urllib.parse import urlencode

from tests.apps.lua.app_server import Answer, AppServer
from tests.support.digest import challenges

FORM_TYPE = {"Content-Type": "application/x-www-form-urlencoded"}


APPLICATION = Path(__file__).parent.parent / "examples" / "logins"


def sign_in(server: AppServer, path: str, **fields: str) -> Answer:
    body = urlencode({f"ba_{name}": value for name, value in fields.items()}).encode()
    return server.ask(path, "POST", body, FORM_TYPE)


def cookie(answer: Answer) -> dict[str, str]:
    return {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + b64encode(f"{user}:{password}".encode()).decode()}


def digest_of(server: AppServer, path: str) -> dict[str, dict[str, str]]:
    return challenges(server.ask(path, headers={"PrefAuth": "digest"}).headers.get_all("WWW-Authenticate") or [])
