"""`smqrt pub`, `smqrt sub` and `smqrt bench` as a script runs them, against a running server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Served

APP = Path(__file__).parent.parent / "browser" / "smqjs_app"

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def server():
    served = Served(APP)
    yield served
    served.stop()


@pytest.fixture
def url(server):
    return f"{server.url}/smq.lsp"


def smqrt(*arguments, stdin=b"", **env):
    command = [sys.executable, "-m", "smqrt", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=20, env=os.environ | env)


class Subscriber:
    """`smqrt sub` in the background, subscribed."""

    def __init__(self, url, *arguments):
        command = [sys.executable, "-m", "smqrt", "sub", url, "self", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.etid = self.process.stderr.readline().decode().strip().removeprefix("self is ETID ")

    def end(self):
        out, err = self.process.communicate(timeout=20)
        return out, err.decode(), self.process.returncode


def test_a_message_from_the_command_line(url):
    subscriber = Subscriber(url, "lamp", "--count", "1")
    assert smqrt("pub", url, "lamp", "on").returncode == 0
    assert subscriber.end() == (b"on\n", "", 0)


def test_lines_of_the_standard_input_arrive_whole_and_in_order(url):
    lines = b"".join(b"%d\n" % n for n in range(20000))
    subscriber = Subscriber(url, "n", "--count", "20001")
    assert smqrt("pub", "ws" + url.removeprefix("http"), "n", stdin=lines + b"no newline").returncode == 0
    out, _, code = subscriber.end()
    assert (out == lines + b"no newline\n", code) == (True, 0)


def test_json_lines(url):
    subscriber = Subscriber(url, "j", "--json", "--count", "3")
    for data in (b'{"a": 1}', b"text", b"\xff"):
        assert smqrt("pub", url, "j", stdin=data).returncode == 0
    out, _, _ = subscriber.end()
    first, second, third = map(json.loads, out.splitlines())
    assert (first["topic"], first["json"], first["subtopic"]) == ("j", {"a": 1}, None)
    assert (second["text"], third["base64"]) == ("text", "/w==")
    assert first["ptid"] > 0
    assert first["tid"] == second["tid"]


def test_self_and_ids(url):
    subscriber = Subscriber(url, "--count", "1", "--verbose")
    assert smqrt("pub", url, subscriber.etid, "psst", "--id").returncode == 0
    assert subscriber.end() == (b"self psst\n", "", 0)


def test_only_one_subtopic(url):
    subscriber = Subscriber(url, "room", "--subtopic", "light", "--count", "1", "--json")
    assert smqrt("pub", url, "room", "wrong", "--subtopic", "sound").returncode == 0
    assert smqrt("pub", url, "room", "right", "--subtopic", "light").returncode == 0
    out, _, _ = subscriber.end()
    assert json.loads(out)["text"] == "right"
    assert json.loads(out)["subtopic"] == "light"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ("pub", "http://127.0.0.1:1/", "t", "x"),
            1,
            "http://127.0.0.1:1/: connection refused; is the server running there?",
        ),
        (("pub", "{url}x.lsp", "t", "x"), 1, "is not an SMQ broker: it answered 404 Not Found"),
        (("pub", "{url}", "secret", "x"), 3, "the broker refused 'secret'"),
        (("pub", "{url}", "t", "x", "--subtopic", "secret"), 3, "the broker refused 't' or 'secret'"),
        (("sub", "{url}", "secret"), 3, "the broker refused the subscription to 'secret'"),
        (("sub", "{url}", "t", "--count", "1", "--timeout", "0.1"), 4, "0 of 1 messages came within 0.1 seconds"),
        (("pub", "ftp://x/", "t", "x"), 2, "must look like http://host:port/path"),
        (("pub", "{url}", "t", "x", "--uid", "short"), 2, "must have 6 to 255 bytes"),
        (("pub", "{url}", "t", "x", "--id"), 2, "'t' must be a number with --id"),
        (("pub", "{url}", "t", "x" * 65521), 1, "a message holds at most 65520"),
        (("bench", "http://127.0.0.1:1/"), 1, "connection refused"),
    ],
)
def test_failures_are_one_clear_sentence_and_an_exit_code(url, arguments, code, words):
    result = smqrt(*(argument.format(url=url) for argument in arguments))
    *_, last = result.stderr.decode().splitlines()
    assert result.returncode == code
    assert words in last
    assert "Traceback" not in result.stderr.decode()


def test_credentials_come_from_the_environment_or_a_file(url, tmp_path):
    wrong = tmp_path / "credentials"
    wrong.write_text("wrong\n")
    for result in (
        smqrt("pub", url, "t", "x", SMQRT_CREDENTIALS="wrong"),
        smqrt("pub", url, "t", "x", "--credentials-file", str(wrong), SMQRT_CREDENTIALS="right"),
    ):
        assert result.returncode == 3
        assert b"refused the connection: incorrect credentials (wrong password)" in result.stderr


def test_sub_comes_back_after_a_restart_of_the_server(tmp_path):
    first = Served(APP)
    url = f"{first.url}/smq.lsp"
    subscriber = Subscriber(url, "t", "--count", "1")
    first.process.kill()
    first.process.wait()
    assert "trying again" in subscriber.process.stderr.readline().decode()
    second = Served(APP, "--port", str(first.port))
    try:
        second.wait_for("listening on")
        while smqrt("pub", url, "t", "hello").returncode or subscriber.process.poll() is None:
            time.sleep(0.3)
        assert subscriber.end()[0] == b"hello\n"
    finally:
        second.stop()


def test_sub_ends_quietly_when_interrupted_or_its_reader_goes(url):
    subscriber = Subscriber(url, "t")
    subscriber.process.send_signal(signal.SIGINT)
    assert subscriber.end() == (b"", "", 130)
    subscriber = Subscriber(url, "t")
    subscriber.process.stdout.close()
    subscriber.process.stdout = None
    assert smqrt("pub", url, "t", "x").returncode == 0
    assert subscriber.end() == (None, "", 0)


def test_bench_measures_and_loses_nothing(url):
    result = smqrt("bench", url, "--seconds", "0.1")
    table = result.stdout.decode()
    assert result.returncode == 0, table + result.stderr.decode()
    rows = [line.split() for line in table.splitlines() if line.strip()]
    shapes = [" ".join(row) for row in rows if row[0] in ("connect", "round", "1")]
    assert len(shapes) == 6
    assert all(row.endswith(" 0 0") for row in shapes)
