"""The log: its two forms, its levels, and what never stands in it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from io import StringIO

import pytest

from smqrt.operations.logs import HIDDEN, JsonFormatter, ServerLog, TextFormatter, without_secrets
from smqrt.settings.server_settings import LogSettings

TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhZGEifQ.dBjftJeZ4CVP"


@pytest.fixture
def server_log() -> Iterator[Callable[[LogSettings], StringIO]]:
    made = []

    def make(settings: LogSettings) -> StringIO:
        out = StringIO()
        made.append(ServerLog(settings, stream=out))
        return out

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", f"Authorization: {HIDDEN}"),
        ("cookie: z9ZAqJtI=abc; x=y", f"cookie: {HIDDEN}"),
        ("{'Authorization': 'Bearer abcdefghijklmnop'}", "{'Authorization': '" + HIDDEN + "'}"),
        ("login with Bearer abcdefghijklmnopqrst failed", f"login with Bearer {HIDDEN} failed"),
        ("mqtt://ada:secret@example.com:1883/x", f"mqtt://ada:{HIDDEN}@example.com:1883/x"),
        (f"token {TOKEN} has expired", f"token {HIDDEN} has expired"),
        ("hash $argon2id$v=19$m=65536,t=3,p=4$c29t$aGFzaA", "hash " + HIDDEN),
        ('{"user": "ada", "password": "lovelace", "x": 1}', '{"user": "ada", "password": ' + HIDDEN + ', "x": 1}'),
        ("?user=ada&access_token=abc&x=1", f"?user=ada&access_token={HIDDEN}&x=1"),
        ("client_secret = 'a b'", f"client_secret = {HIDDEN}"),
        ("the token was refused; the passage is free: no", "the token was refused; the passage is free: no"),
    ],
)
def test_secrets_are_hidden(line: str, shown: str) -> None:
    assert without_secrets(line).split("=65536")[0] == shown.split("=65536")[0]


@pytest.mark.parametrize("piece", ["password", "password=", "eyJ", "$argon2id$", "Basic ", "://a:", "a.-", "cookie:'"])
def test_a_long_line_is_searched_in_linear_time(piece: str) -> None:
    began_s = time.thread_time()
    without_secrets(piece * (16384 // len(piece)))
    assert time.thread_time() - began_s < 0.25


def test_json_has_stable_keys(server_log: Callable[[LogSettings], StringIO]) -> None:
    out = server_log(LogSettings(format="json"))
    log = logging.getLogger("smqrt.close")
    log.warning("who %s", "x\x1b\u202ey", extra={"event": "close", "fields": {"uid": "a\nb", "token": TOKEN, "n": 1}})
    try:
        raise ValueError("password=hunter2")
    except ValueError:
        log.exception("failed")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert list(first) == ["time", "level", "logger", "event", "message", "uid", "token", "n"]
    assert first["time"].endswith("Z")
    assert len(first["time"]) == 24
    assert (first["level"], first["event"], first["token"], first["n"]) == ("warning", "close", HIDDEN, 1)
    assert list(second) == ["time", "level", "logger", "event", "message", "error"]
    assert "ValueError" in second["error"]
    assert "hunter2" not in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_text_and_levels(server_log: Callable[[LogSettings], StringIO]) -> None:
    out = server_log(LogSettings(level="warning", levels="smqrt.close=debug, smqrt.lua=error"))
    for name in ("smqrt", "smqrt.close", "smqrt.lua", "other.library"):
        logging.getLogger(name).info("%s info", name)
        logging.getLogger(name).warning("%s warning", name)
    assert out.getvalue().splitlines() == [
        "smqrt warning",
        "smqrt.close info",
        "smqrt.close warning",
        "other.library warning",
    ]


def test_levels_can_change(server_log: Callable[[LogSettings], StringIO]) -> None:
    out = StringIO()
    log = ServerLog(LogSettings(levels="smqrt.close=debug"), stream=out)
    log.apply(LogSettings(level="error"))
    logging.getLogger("smqrt.close").info("unseen")
    log.apply(LogSettings(level="debug"))
    logging.getLogger("smqrt.close").debug("seen")
    log.close()
    assert out.getvalue() == "seen\n"


def test_text_may_have_time_and_color() -> None:
    record = logging.LogRecord("smqrt", logging.ERROR, "", 0, "x" * 20_000, None, None)
    line = TextFormatter(has_time=True, is_colored=True).format(record)
    assert line.startswith("\x1b[31m2")
    assert "Z error   xxx" in line
    assert line.endswith("… (3616 more characters)\x1b[0m")
    assert len(JsonFormatter().format(record)) < 17_000
