"""`smqrt pub`, `smqrt sub` and `smqrt bench` as a script runs them, against a running server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Served
from tests.support.waiting import wait_until

APP = Path(__file__).parent.parent / "browser" / "smqjs" / "app"

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

    def __init__(self, url, *arguments, stdout=subprocess.PIPE):
        command = [sys.executable, "-m", "smqrt", "sub", url, "self", *arguments]
        self.process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE)
        self.etid = self.process.stderr.readline().decode().strip().removeprefix("self is ETID ")

    def end(self):
        out, err = self.process.communicate(timeout=20)
        return out, err.decode(), self.process.returncode


def test_a_message_from_the_command_line(url):
    subscriber = Subscriber(url, "lamp", "--count", "1")
    assert smqrt("pub", url, "lamp", "on").returncode == 0
    assert subscriber.end() == (b"on\n", "", 0)


def test_standard_input_lines_arrive_whole_and_in_order(url):
    lines = b"".join(b"%d\n" % n for n in range(20000))
    subscriber = Subscriber(url, "n", "--count", "20001")
    assert smqrt("pub", "ws" + url.removeprefix("http"), "n", stdin=lines + b"no newline").returncode == 0
    out, _, code = subscriber.end()
    assert (out == lines + b"no newline\n", code) == (True, 0)


EVIL = "\x1b]0;owned\x07\x9b31m\u202e".encode() + b"\xff"


class OnTerminal(Subscriber):
    """`smqrt sub` whose standard output is a terminal."""

    def __init__(self, url, *arguments):
        self.terminal, theirs = os.openpty()
        super().__init__(url, *arguments, stdout=theirs)
        os.close(theirs)

    def shown(self):
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while more := os.read(self.terminal, 65536):
                shown += more
        os.close(self.terminal)
        self.process.communicate(timeout=20)
        return shown


def test_client_text_does_not_control_the_terminal(url):
    """A pipe gets what came: it may be a picture."""
    terminal, raw = OnTerminal(url, "e", "-v", "--count", "1"), OnTerminal(url, "e", "--raw", "--count", "1")
    pipe, as_json = Subscriber(url, "e", "--count", "1"), Subscriber(url, "e", "--json", "--count", "1")
    assert smqrt("pub", url, "e", stdin=EVIL).returncode == 0
    assert terminal.shown() == rb"e \x1b]0;owned\x07\x9b31m\u202e\xff" + b"\r\n"
    assert raw.shown() == EVIL + b"\r\n"
    assert pipe.end()[0] == EVIL + b"\n"
    assert as_json.end()[0].isascii()


def test_json_lines(url):
    subscriber = Subscriber(url, "j", "--json", "--count", "3")
    for data in (b'{"a": 1}', b"text", b"\xff"):
        assert smqrt("pub", url, "j", stdin=data).returncode == 0
    out, _, _ = subscriber.end()
    first, second, third = map(json.loads, out.splitlines())
    assert (first["topic"], first["json"], first["subtopic"]) == ("j", {"a": 1}, None)
    assert first["payload"] == '{"a": 1}'
    assert (second["payload"], third["payload_hex"]) == ("text", "ff")
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
    assert json.loads(out)["payload"] == "right"
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
        (("pub", "{url}", "secret", "x"), 3, "the broker rejected 'secret'"),
        (("pub", "{url}", "t", "x", "--subtopic", "secret"), 3, "the broker rejected 't' or 'secret'"),
        (("sub", "{url}", "secret"), 3, "the broker rejected the subscription to 'secret'"),
        (("sub", "{url}", "t", "--count", "1", "--timeout", "0.1"), 4, "0 of 1 messages received within 0.1 seconds"),
        (("pub", "ftp://x/", "t", "x"), 2, "must look like http://host:port/path"),
        (("pub", "{url}", "t", "x", "--uid", "short"), 2, "must be 6 to 255 bytes"),
        (("pub", "{url}", "t", "x", "--id"), 2, "'t' must be a number with --id"),
        (("pub", "{url}", "t", "x" * 65521), 1, "a message carries at most 65520"),
        (("bench", "http://127.0.0.1:1/"), 1, "connection refused"),
        (("pub", "{url}", "t", "x", "--qos", "1"), 2, "--qos is for MQTT brokers only"),
        (("pub", "{url}", "t", "x", "--retain"), 2, "--retain is for MQTT brokers only"),
        (("sub", "{url}", "t", "--qos", "0"), 2, "--qos is for MQTT brokers only"),
        (("sub", "{url}", "t", "--mqtt", "5"), 2, "--mqtt is for MQTT brokers only"),
        (("pub", "{url}", "t", "x", "--file", __file__), 2, "pass either DATA or --file"),
        (("pub", "{url}", "t", "--repeat", "2"), 2, "--repeat requires DATA or --file"),
        (("pub", "{url}", "t", "--file", "nowhere"), 2, "'nowhere' does not exist"),
        (("request", "mqtt://127.0.0.1:1", "t"), 2, "request is for SMQ brokers only"),
        (("request", "{url}", "t", "--timeout", "0.1"), 4, "no reply to 't' within 0.1 seconds"),
        (("request", "{url}", "secret"), 3, "the broker rejected 'secret'"),
    ],
)
def test_failures_are_one_clear_sentence_and_an_exit_code(url, arguments, code, words):
    result = smqrt(*(argument.format(url=url) for argument in arguments))
    *_, last = result.stderr.decode().splitlines()
    assert result.returncode == code
    assert words in last
    assert "Traceback" not in result.stderr.decode()


def test_an_application_broker_is_found_below_its_address(server, url):
    """`smq.lsp` is the page; `nothing/` has none, and says what was tried."""
    subscriber = Subscriber(f"{server.url}/", "lamp", "--count", "1")
    assert smqrt("pub", server.url, "lamp", "on").returncode == 0
    assert subscriber.end() == (b"on\n", "", 0)
    wrong = smqrt("pub", f"{server.url}/nothing/", "t", "x")
    assert wrong.returncode == 1
    sentence = f"{server.url}/nothing/ is not an SMQ broker: it answered 404 Not Found. Use the URL of the page"
    assert sentence in wrong.stderr.decode()


def test_the_index_page_of_an_application_is_not_run(tmp_path):
    """Where there is a broker at `smq.lsp`, or at `smq` as in Python applications; an index page may be one itself."""
    index, connects = "<?lsp trace('the index page runs') ?>", "<?lsp app.smq:connect(request) ?>"
    create = 'smq = require "smq.hub".create()'
    of_python = (
        "from smqrt import hub\nfrom smqrt.app import dir\nsmq = hub.create()\n"
        "dir.setfunc(lambda request, path: path == 'smq' and bool(smq.connect(request) or True))\n"
    )
    files = {
        "lua": {".preload": create, "index.lsp": index, "smq.lsp": connects},
        "python": {".preload.py": of_python, "index.lsp": index},
        "index": {".preload": create, "index.lsp": connects},
    }
    for app, texts in files.items():
        (tmp_path / app).mkdir()
        for name, text in texts.items():
            (tmp_path / app / name).write_text(text)
    served = Served(tmp_path)
    try:
        for path in ("lua/", "lua", "lua/smq.lsp", "python/", "python", "python/smq", "index/"):
            result = smqrt("pub", f"{served.url}/{path}", "t", "x")
            assert result.returncode == 0, (path, result.stderr)
        assert "the index page runs" not in served.output
    finally:
        served.stop()


def test_a_file_is_one_message(url, tmp_path):
    (tmp_path / "picture").write_bytes(bytes(range(256)))
    subscriber = Subscriber(url, "f", "--count", "1")
    assert smqrt("pub", url, "f", "--file", str(tmp_path / "picture")).returncode == 0
    assert subscriber.end() == (bytes(range(256)) + b"\n", "", 0)


def test_a_message_is_repeated_at_a_pace(url):
    subscriber = Subscriber(url, "r", "--count", "3")
    began = time.monotonic()
    assert smqrt("pub", url, "r", "tick", "--repeat", "3", "--every", "0.3").returncode == 0
    assert time.monotonic() - began > 0.6
    assert subscriber.end() == (b"tick\n" * 3, "", 0)


def test_a_request_is_answered(url):
    """By a Python client that answers to whom it may concern, with the sub-topic id of the question."""
    answering = (
        "import sys, gevent; from smqrt.client import SmqClient; smq = SmqClient(sys.argv[1]);"
        "smq.subscribe('double', datatype='text', onack=lambda *_: print('ready', flush=True),"
        "onmsg=lambda text, ptid, tid, subtid: smq.publish(text * 2, ptid, subtid)); gevent.wait()"
    )
    command = [sys.executable, "-c", answering, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as answerer:
        assert answerer.stdout.readline() == b"ready\n"
        assert smqrt("request", url, "double", "ab").stdout == b"abab\n"
        fields = json.loads(smqrt("request", url, "double", "ab", "--json").stdout)
        etid = str(fields["ptid"])
        assert (fields["topic"], fields["payload"]) == ("double", "abab")
        assert smqrt("request", url, etid, "x", "--id", "--timeout", "0.1").returncode == 4
        answerer.terminate()


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
    assert "reconnecting" in subscriber.process.stderr.readline().decode()
    second = Served(APP, "--port", str(first.port))
    try:
        second.wait_for("listening on")
        published = lambda: smqrt("pub", url, "t", "hello").returncode == 0  # noqa: E731
        wait_until(lambda: published() and subscriber.process.poll() is not None, patience_s=60)
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
