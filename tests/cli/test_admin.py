"""Commands that use the admin listener: what they ask, what they print, and what they say when it fails."""

from __future__ import annotations

import json
import os
import threading
from base64 import b64decode
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from smqrt.cli import admin
from smqrt.cli.admin import PASSWORD_VARIABLE, AdminClient, AdminError, duration_text, fetch, size, trace_line
from smqrt.errors import StartError
from smqrt.operations import server as operations_server
from tests.cli.commands import Command


class Listener:
    """An admin listener that answers what the test says.

    Attributes:
        answers: answers by path, with a status other than 200 as a tuple; a deque has one for each request.
        asked: method, path, arguments and body of each request.
        logins: name and password of each request with some.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.logins: list[str] = []
        listener = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in one packet

            def do_GET(self) -> None:
                listener.respond(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def respond(self, request: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        self.asked.append((request.command, parts.path, dict(parse_qsl(parts.query)), json.loads(body or b"null")))
        if login := request.headers.get("Authorization"):
            self.logins.append(b64decode(login.removeprefix("Basic ")).decode())
        answer = self.answers.get(parts.path.removeprefix("/api/v1/"), (404, {"error": "nothing"}))
        if isinstance(answer, deque):
            answer = answer.popleft()
        status, value = answer if isinstance(answer, tuple) else (200, answer)
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


# ---- the client


def test_empty_arguments_are_not_sent_and_paths_kept(listener: Listener) -> None:
    listener.answers = {"/proxy/api/v1/peers": {"items": []}, "/proxy/api/v1/drain": {}}
    client = AdminClient(listener.url + "/proxy/")
    client.get("peers", hub=0, search="", sort=None, limit=5)
    client.post("drain", on=True)
    assert listener.asked == [
        ("GET", "/proxy/api/v1/peers", {"hub": "0", "limit": "5"}, None),
        ("POST", "/proxy/api/v1/drain", {}, {"on": True}),
    ]
    assert listener.logins == []


def test_a_password_comes_from_url_or_variable(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    listener.answers["hubs"] = []
    monkeypatch.setenv(PASSWORD_VARIABLE, "of the variable")
    in_url = listener.url.replace("//", "//ann:of-the-url@")
    for url, user in ((listener.url, "ann"), (in_url, None), (in_url, "bob")):
        AdminClient(url, user).get("hubs")
    assert listener.logins == ["ann:of the variable", "ann:of-the-url", "bob:of-the-url"]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((401, {}), "{url} requires a login. Pass --user with a user of the group admin."),
        ((400, {"error": "hub: 'x' is not a number"}), "hub: 'x' is not a number"),
        ((500, b"<html>"), "{url} responded 500 Internal Server Error."),
        ((503, {"no": "error"}), "{url} responded 503 Service Unavailable."),
        (
            (404, {"error": "There is no such address; /api/v1/ lists them."}),
            "The server at {url} runs an older release without hubs. Upgrade it first.",
        ),
        ((404, {"error": "hub: there is no hub 9"}), "hub: there is no hub 9"),
    ],
)
def test_an_error_of_the_server_is_a_sentence(listener: Listener, answer: Any, sentence: str) -> None:
    listener.answers["hubs"] = answer
    with pytest.raises(AdminError) as error:
        AdminClient(listener.url).get("hubs")
    assert str(error.value) == sentence.format(url=listener.url)


def test_a_server_that_is_away_has_a_remedy(listener: Listener, tmp_path: Path) -> None:
    listener.close()
    with pytest.raises(AdminError, match=r"^Cannot connect to http://127.0.0.1:.* Is the server running\?$"):
        AdminClient(listener.url).get("hubs")
    for url in ("ftp://a", "localhost:9356", "http:///x"):
        with pytest.raises(AdminError, match="is not an HTTP URL. Example: http://127.0.0.1:9356/"):
            AdminClient(url)
    (tmp_path / "ca.pem").write_text("nonsense")
    with pytest.raises(AdminError, match="ca.pem can't be read as certificates"):
        AdminClient("https://127.0.0.1:1", ca=str(tmp_path / "ca.pem"))


def test_without_a_url_the_newest_server_is_asked(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = [
        {"url": listener.url + "/", "pid": 2, "folder": "/b\x1b"},
        {"url": "http://a.example/", "pid": 1, "folder": "/a"},
    ]
    monkeypatch.setattr(operations_server, "announced", lambda: servers)
    assert AdminClient().url == listener.url
    said = capsys.readouterr().err
    assert "Using the newest; choose another one with --url." in said
    assert said.endswith(f"server {listener.url}/, process 2, in /b\\x1b\n")
    servers.append({"url": "http://b.example/", "pid": 3, "folder": os.getcwd()})
    assert AdminClient().url == "http://b.example"
    assert "Using the newest that was started in this folder; choose another" in capsys.readouterr().err
    servers.clear()
    with pytest.raises(AdminError, match="No server of this user is running on this machine"):
        AdminClient()


def test_the_file_of_a_killed_server_is_not_that_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = operations_server.announce("http://a.example/")
    assert path is not None
    about = {"url": "http://a.example/", "pid": os.getpid(), "folder": os.getcwd()}
    assert operations_server.announced() == [about]
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"started": written["started"] - 1}))  # its number is used again
    assert operations_server.announced() == []
    path.write_text(json.dumps(about))  # of a server of an earlier release
    assert operations_server.announced() == [about]
    path.write_text(json.dumps(about | {"pid": 2**22 + 1}))
    assert operations_server.announced() == []


# ---- what is printed


def test_sizes_have_decimal_prefixes() -> None:
    sizes = {
        None: "",
        0: "0",
        999: "999",
        1000: "1.0k",
        99_949: "99.9k",
        123_456: "123k",
        5e6: "5.0M",
        7e9: "7.0G",
        2e12: "2.0T",
    }
    assert {count: size(count) for count in sizes} == sizes


def test_durations_have_their_two_largest_units() -> None:
    durations = {0.4: "0 s", 59: "59 s", 61: "1 m 1 s", 3_600: "1 h 0 m", 86_400 * 3 + 3600 * 4 + 59: "3 d 4 h"}
    assert {seconds: duration_text(seconds) for seconds in durations} == durations


def test_a_trace_line_of_an_mqtt_packet() -> None:
    event = {"time": "2026-11-23T02:31:08.123456Z", "event": "PUBLISH", "uid": "mqtt:lamp", "topic": "a", "qos": 1}
    event |= {"id": 7, "flags": "dup, retain", "bytes": 2, "payload": "21", "sent": True}
    line = '02:31:08.123  PUBLISH      to mqtt:lamp  a  id 7  qos 1  2 bytes  dup, retain  "21"'
    assert trace_line(event) == line
    connect = {"event": "CONNECT", "uid": "mqtt:lamp", "version": "5", "keepalive_s": 30, "will": "gone"}
    assert trace_line(connect) == "CONNECT      mqtt:lamp  version 5  will gone  keep-alive 30 s"


def test_a_trace_line_has_what_its_event_has() -> None:
    event = {
        "event": "publish",
        "time": "2026-01-01T12:34:56.789Z",
        "etid": 7,
        "uid": "",
        "topic": "a\x1b",
        "subtopic": "s",
    }
    assert trace_line(event | {"bytes": 3, "payload": {"x": "\n"}}) == (
        '12:34:56.789  publish      7  a\\x1b / s  3 bytes  {"x": "\\n"}'
    )
    assert (
        trace_line({"event": "close", "uid": "lamp", "reason": "timeout", "detail": ""}) == "close        lamp  timeout"
    )


def test_tabs_of_clients_add_no_columns(capsys: pytest.CaptureFixture[str]) -> None:
    admin.print_table(("a", "b"), [("x\ty\n", 1)])
    assert capsys.readouterr().out == "a\tb\nx\\ty\\n\t1\n".replace("\\\\", "\\")


PEER = {
    "id": "1.5", "uid": "lamp", "user": "", "address": "192.0.2.1", "transport": "raw", "connected_s": 61, "dropped": 0,
    "subscriptions": 2, "bytes_received": 1500, "bytes_sent": None, "queued_bytes": 0,
}  # fmt: skip


def test_a_list_says_how_many_it_does_not_show(listener: Listener) -> None:
    listener.answers["peers"] = {"items": [PEER], "total": 3}
    result = Command("peers")("--url", listener.url, "--limit", "1")
    assert result.stdout.splitlines()[1] == "1.5\tlamp\t\t192.0.2.1\traw\t1 m 1 s\t2\t1.5k\t\t0\t0"
    assert result.stderr == "1 of 3 shown; see more with --limit or --search.\n"
    assert json.loads(Command("peers").done("--url", listener.url, "--json")) == PEER


def test_topics_need_a_hub_when_there_are_several(listener: Listener) -> None:
    listener.answers["hubs"] = [{"id": 1, "app": "shop", "made_at": ""}, {"id": 2, "app": "", "made_at": "x.py:3"}]
    code, sentence = Command("topics").refused("--url", listener.url)
    assert (code, sentence) == (2, "select a hub with --hub. Hubs of this server: 1 (shop), 2 (x.py:3).")
    listener.answers["hubs"] = [{"id": 7, "key": "shop"}, {"id": 1_000_007, "key": "shop"}]
    listener.answers["topics"] = {"items": [], "total": 0}
    Command("topics").done("--url", listener.url)
    assert listener.asked[-1][2]["hub"] == "7", "the hubs of two workers are one"


def test_rates_of_topics(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = {"name": "lamp", "id": 5, "messages": 10, "subscribers": 2, "observers": 0}
    listener.answers["topics"] = {"items": [topic], "total": 1}
    columns, row = (
        line.split("\t") for line in Command("topics").done("--url", listener.url, "--hub", "7").splitlines()
    )
    assert (columns[1], row[1]) == ("messages", "10")

    def sleep(seconds: float) -> None:
        listener.answers["topics"] = {"items": [topic | {"messages": 10_000}, topic | {"name": "new"}], "total": 2}

    monkeypatch.setattr(admin, "sleep", sleep)
    output = Command("topics").done("--url", listener.url, "--hub", "7", "--rates")
    columns, row, new = (line.split("\t") for line in output.splitlines())
    assert (columns[1], float(row[1]) > 100, new[1]) == ("messages/s", True, "0.0")


def test_a_trace_ends_after_its_count(listener: Listener) -> None:
    events = [{"event": "tracing"}, *({"event": "publish", "number": number} for number in range(5))]
    listener.answers["trace"] = b"\n".join(json.dumps(event).encode() for event in events) + b"\n\n"
    result = Command("trace")("--url", listener.url, "--topic", "a", "--count", "2", "--json")
    assert [json.loads(line)["number"] for line in result.stdout.splitlines()] == [0, 1]
    assert result.stderr == "Tracing; stop with Ctrl-C.\n"
    for words in ((), ("--peer", "1.2", "--topic", "a")):
        assert Command("trace").refused("--url", listener.url, *words) == (2, "pass either --peer or --topic.")


def test_top_shows_rates_from_the_second_look_on(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(0, 100, 2))
    monkeypatch.setattr(admin, "sleep", lambda seconds: None)
    monkeypatch.setattr(admin, "monotonic", times.__next__)
    server = {
        "phase": "serving", "uptime_s": 61, "memory_bytes": 5e7, "loop_lag_worst_s": 0.0123, "connections": 3,
        "peers": 2, "queued_bytes": 0,
    }  # fmt: skip
    listener.answers["server"] = deque([server | {"cpu_s": 1.0}, server | {"cpu_s": 2.0}])
    hub = {"id": 1, "drops": {"oldest": 2, "latest": 3}}
    listener.answers["hubs"] = deque([hub | {"messages": count}] for count in (1, 1, 7))
    words = ("--url", listener.url, "--count")
    assert Command("top").done(*words, "1") == (
        "serving up 1 m 1 s memory 50.0M lag 12 ms connections 3 peers 2 dropped 5 queued 0\n"
    )
    listener.answers["server"] = deque([server | {"cpu_s": 1.0}, server | {"cpu_s": 2.0}])
    first, second = (json.loads(line) for line in Command("top").done(*words, "2", "--json").splitlines())
    assert (first["server"]["cpu_percent"], first["hubs"][0]["messages_per_s"]) == (None, None)
    assert (second["server"]["cpu_percent"], second["hubs"][0]["messages_per_s"]) == (50, 3)


# ---- clusters


def node(number: int, *linked: int, **more: Any) -> dict[str, Any]:
    link = {"via": "mesh", "since_s": 1, "round_trip_ms": None, "queued_bytes": 0, "sent_bytes": 0, "received_bytes": 0}
    return {
        "node": number, "links": [link | {"node": one} for one in linked], "hubs": [], "channels": [], "addresses": [],
        "refused": {}, **more,
    }  # fmt: skip


def test_a_missing_link_is_exit_code_1(listener: Listener) -> None:
    status = Command("cluster")
    listener.answers["clusters"] = [node(1, 2)]
    assert status("status", "--url", listener.url).exit_code == 0
    older = [
        {"address": "a:1", "state": "not linked", "why": "refused"},
        {"address": "b:1", "state": "linked", "why": ""},
    ]
    for facts in ({"missing": [{"to": "a:1", "why": "refused"}]}, {"addresses": older}):
        listener.answers["clusters"] = [node(1, refused={"password": 3}, **facts)]
        result = status("status", "--url", listener.url)
        assert result.exit_code == 1
        assert result.stderr.splitlines() == [
            "node 1 has no link to a:1: refused",
            "node 1: 3 links refused: password",
        ]
    listener.answers["clusters"] = []
    result = status("status", "--url", listener.url)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "This server is not in a cluster.\n")


def test_a_node_without_other_nodes_is_not_drained(listener: Listener) -> None:
    cluster = Command("cluster")
    cases = (
        ([], (), "is not in a cluster: clients can't reconnect elsewhere"),
        ([node(1, 2)], ("2",), "is node 1, not 2"),
        ([node(1)], (), "no other node is linked"),
        ([node(1, 3), node(3, 1)], (), "no other node is linked"),
    )
    for rows, words, sentence in cases:
        listener.answers["clusters"] = rows
        code, said = cluster.refused("drain", "--url", listener.url, *words)
        assert (code, sentence in said) == (1, True), said
    assert [asked for asked in listener.asked if asked[0] == "POST"] == []


def test_a_drain_waits_for_the_last_client(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "sleep", lambda seconds: None)
    drain = Command("cluster")
    listener.answers = {
        "clusters": [node(1, 2)], "drain": {}, "server": deque({"peers": left} for left in (2, 1, 0)),
    }  # fmt: skip
    assert drain.done("drain", "1", "--url", listener.url).startswith("no clients left")
    assert ("POST", "/api/v1/drain", {}, {"on": True}) in listener.asked
    listener.answers["server"] = {"peers": 5}
    assert drain.refused("drain", "--wait-s", "0", "--url", listener.url) == (
        1, "5 clients are still connected after 0 s. List them with smqrt peers.",
    )  # fmt: skip
    listener.answers["clusters"] = [node(1)]
    assert drain.done("drain", "--undo", "--url", listener.url) == "the node accepts clients again\n"
    assert listener.asked[-1] == ("POST", "/api/v1/drain", {}, {"on": False})


# ---- health


def test_health_is_the_status_of_the_probe(listener: Listener) -> None:
    listener.answers = {"/healthz": b"ok\n", "/readyz": (503, b"The applications\nare \x1b being loaded.")}
    health = Command("health")
    assert health("--url", listener.url).output == "ok\n"
    result = health("--url", listener.url, "--ready")
    assert (result.exit_code, result.output) == (1, "The applications are \\x1b being loaded.\n")
    listener.close()
    result = health("--url", listener.url)
    assert result.exit_code == 1
    assert result.output.startswith(f"{listener.url} does not respond: ")


def test_health_asks_where_the_settings_say(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    listener.answers = {"/healthz": b"ok\n"}
    monkeypatch.setenv("SMQRT_ADMIN__PORT", listener.url.rpartition(":")[2])
    monkeypatch.setenv("SMQRT_ADMIN__HOST", "0.0.0.0")
    monkeypatch.setenv("SMQRT_AUTH__USERS", "users.txt")
    assert Command("health")().output == "ok\n"
    monkeypatch.setenv("SMQRT_ADMIN__ENABLED", "false")
    code, sentence = Command("health").refused()
    assert (code, "the admin listener is disabled" in sentence) == (1, True)


def test_a_probe_keeps_the_path_of_a_proxy(listener: Listener) -> None:
    listener.answers = {"/proxy/healthz": b"x" * 500}
    assert fetch(listener.url + "/proxy/", "/healthz", 5) == (200, "x" * 300)
    with pytest.raises(StartError, match="not an HTTP URL"):
        fetch("127.0.0.1:9356", "/healthz", 5)
