"""Journals over HTTP: whoever shows the token, or doesn't, holds nobody up."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from smqrt.journal import manifest
from smqrt.journal.commit import MAX_COMMIT_ROWS, encode
from smqrt.journal.committed import MAX_PARTS
from smqrt.journal.manifest import DataFile
from smqrt.journal.readers import MAX_NODES
from smqrt.journal.service import MAX_BODY_BYTES, MAX_TOPICS, TOKENS_FILE
from tests.hostile.conftest import Attack, Besieged
from tests.support.waiting import wait_until

BODIES_MIB = 32
APPLICATION = "from smqrt import hub\n\nsmq = hub.create(journal=True)\n"


class Stranger:
    """Who asks the journal of a besieged server."""

    def __init__(self, server: Besieged, journal: Path) -> None:
        self.server = server
        self.token = (journal / "token").read_text().strip()
        self.batch = 0

    def post(self, action: str, body: bytes, attack: Attack, token: str | None = None) -> str:
        """Returns the status line and the sentence of an answer."""
        head = f"POST /rtl/journal/app/{action} HTTP/1.1\r\nHost: 127.0.0.1:{self.server.port}\r\nConnection: close\r\n"
        head += f"Authorization: Bearer {self.token if token is None else token}\r\nContent-Length: {len(body)}\r\n\r\n"
        answer = self.server.exchange(head.encode() + body, attack)
        return answer.partition(b"\r\n")[0].decode() + " " + answer.partition(b"\r\n\r\n")[2].decode()

    def get(self, what: str, attack: Attack) -> dict[str, Any]:
        """Returns the JSON of an answer."""
        head = f"GET /rtl/journal/app/{what} HTTP/1.1\r\nHost: 127.0.0.1:{self.server.port}\r\nConnection: close\r\n"
        answer = self.server.exchange(f"{head}Authorization: Bearer {self.token}\r\n\r\n".encode(), attack)
        found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
        return found

    def status(self, what: str, attack: Attack) -> None:
        """Checks that a question is answered, or refused in one sentence."""
        head = f"GET /rtl/journal/app/{what} HTTP/1.1\r\nHost: 127.0.0.1:{self.server.port}\r\nConnection: close\r\n"
        answer = self.server.exchange(f"{head}Authorization: Bearer {self.token}\r\n\r\n".encode(), attack)
        assert answer[9:12] in (b"200", b"400")

    def commit(self, body: bytes, attack: Attack) -> str:
        self.batch += 1
        return self.post(f"commit?query=q&batch={self.batch}", body, attack)


@pytest.fixture
def stranger(tmp_path: Path, besiege: Callable[..., Besieged]) -> Stranger:
    app = tmp_path / "app"
    app.mkdir()
    (app / ".preload.py").write_text(APPLICATION)
    return Stranger(besiege(app, "--bodies-mib", str(BODIES_MIB)), app / ".journal")


def test_commits_of_many_rows(stranger: Stranger) -> None:
    row = encode([(b"t", None, b"")])
    with stranger.server.attack("journal: commits of the most rows, and of far too many") as attack:
        for _ in range(2):
            assert "200" in stranger.commit(row * MAX_COMMIT_ROWS, attack)
            assert "413" in stranger.commit(row * (MAX_BODY_BYTES // len(row)), attack)


def test_commits_of_many_topics(stranger: Stranger) -> None:
    with stranger.server.attack("journal: commits whose rows all have topics of their own") as attack:
        for number in range(3):
            rows = [(b"t%d-%d" % (number, each), b"s%d" % each, b"x" * 200) for each in range(MAX_COMMIT_ROWS)]
            assert "200" in stranger.commit(encode(rows), attack)


def test_commits_of_many_bytes(stranger: Stranger) -> None:
    rows = [(b"t", None, bytes(65_000))] * (MAX_BODY_BYTES // 65_100)
    with stranger.server.attack("journal: commits of the most bytes") as attack:
        for _ in range(5):
            assert "200" in stranger.commit(encode(rows), attack)


def test_parts_that_are_staged(stranger: Stranger) -> None:
    most = encode([(b"t", None, b"")]) * MAX_COMMIT_ROWS
    names = [f"{number:016x}.0" for number in range(MAX_PARTS)]
    with stranger.server.attack("journal: staged parts, and the longest lists of them") as attack:
        for name in names[:8]:
            assert "200" in stranger.post(f"stage?query=q&batch=0&part={name}", most, attack)
        for body in (json.dumps(names).encode(), b"[" * 500_000, b"[" + b"1," * 250_000 + b"1]"):
            assert "400" in stranger.post("seal?query=q&batch=0", body, attack)
        assert "413" in stranger.post("seal?query=q&batch=0", b" " * (1 << 20), attack)
        assert "200" in stranger.post("seal?query=q&batch=0", json.dumps(names[:8]).encode(), attack)
        for number, name in enumerate(names[:8]):
            assert "200" in stranger.post(f"commit?query=q.{number}&batch=0&of=q&part={name}", b"", attack)


def test_reports_of_progress(stranger: Stranger) -> None:
    nodes = {f"n{number}": number for number in range(MAX_NODES)}
    with stranger.server.attack("journal: nested, huge and wrong reports of progress") as attack:
        assert "not JSON" in stranger.post("progress", b"[" * 65_000, attack)
        assert "not JSON" in stranger.post("progress", b'{"a":' * 13_000, attack)
        assert "not JSON" in stranger.post("progress", b"9" * 65_000, attack)
        assert "413" in stranger.post("progress", b" " * (1 << 20), attack)
        for number in range(100):
            report = {"query": f"q{number}", "offset": nodes}
            assert "200" in stranger.post("progress", json.dumps(report).encode(), attack)
        too_many = {"query": "q", "offset": nodes | {"more": 0}}
        assert "256 at most" in stranger.post("progress", json.dumps(too_many).encode(), attack)


@pytest.mark.parametrize("action", ["commit", "stage"])
def test_many_bodies_that_do_not_end(stranger: Stranger, action: str) -> None:
    """They count as bodies that are held; one that is whole finds room again when they are gone."""
    rows = encode([(b"t", None, b"x" * 1000)] * (MAX_COMMIT_ROWS - 100))
    head = f"POST /rtl/journal/app/{action}?query=q&batch=1&part=0123456789abcdef.0 HTTP/1.1\r\n"
    head += f"Host: 127.0.0.1:{stranger.server.port}\r\nAuthorization: Bearer {stranger.token}\r\n"
    head += f"Content-Length: {len(rows) + 1}\r\n\r\n"
    if action == "commit":
        head = head.replace("&part=0123456789abcdef.0", "")
    with stranger.server.attack(f"journal: {action} with 40 bodies that lack a byte", grows_bytes=96 << 20) as attack:
        waiting = [stranger.server.open() for _ in range(40)]
        for connection in waiting:
            with suppress(OSError):  # it was refused amidst
                connection.sendall(head.encode() + rows)
            attack.sent(len(rows))
        stranger.server.served.wait_for(r"refused: a request body: limit reached: bodies_mib \(" + str(BODIES_MIB))
        for connection in waiting:
            connection.close()
        wait_until(lambda: "200" in stranger.commit(rows, attack), "there is room again")


def test_staged_parts_committed_concurrently(stranger: Stranger) -> None:
    """A request without a body has 4 MiB of rows; they count like a body. In memory they are up to three times that: as
    they were read, as rows, and on their way into the journal.
    """
    rows, part, body_bytes = (
        encode([(b"t", None, b"x" * 1000)] * (MAX_COMMIT_ROWS - 100)),
        "0123456789abcdef.0",
        BODIES_MIB << 20,
    )
    head = f"HTTP/1.1\r\nHost: 127.0.0.1:{stranger.server.port}\r\nAuthorization: Bearer {stranger.token}\r\n"
    name = "journal: 4 MiB that are staged are committed by 100 at a time"
    with stranger.server.attack(name, grows_bytes=3 * body_bytes + (64 << 20)) as attack:
        assert "200" in stranger.post(f"stage?query=q&batch=0&part={part}", rows, attack)
        waiting = [stranger.server.open() for _ in range(100)]
        for number, connection in enumerate(waiting):
            what = f"commit?query=q.{number}&batch=0&of=q&part={part}"
            asked = f"POST /rtl/journal/app/{what} {head}Content-Length: 0\r\n\r\n"
            connection.sendall(asked.encode())
            attack.sent(len(asked))
        answers = [connection.recv(100)[9:12] for connection in waiting]
        for connection in waiting:
            connection.close()
    assert set(answers) == {b"200", b"503"}


def test_numbers_that_are_none(stranger: Stranger) -> None:
    numbers = ["Infinity", "1e999", "-1e999", "NaN", "9" * 5000, '"9"', "[]", "null"]
    with stranger.server.attack("journal: infinite, huge and wrong numbers") as attack:
        for number in numbers:
            stranger.status(f'end?wait_s=0&after={quote(f"""{{"n1":{number}}}""")}', attack)
            report = b'{"query": "q", "offset": {"n1": %s}}' % number.encode()
            assert "400" in stranger.post("progress", report, attack)
        for wait_s in ("nan", "-1", "-inf"):
            assert stranger.get(f"end?wait_s={wait_s}&after=" + quote('{"n1": 9}'), attack) == {"end": {"n1": 0}}
        for batch in ("-1", "1e9", "9" * 19, "9" * 5000):
            assert "400" in stranger.post(f"commit?query=q&batch={batch}", b"", attack)
    assert "Traceback" not in stranger.server.served.output


def test_bodies_in_chunks_of_one_byte(stranger: Stranger) -> None:
    rows = encode([(b"t", None, b"x" * 60_000)] * 2)
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in rows) + b"0\r\n\r\n"
    head = f"POST /rtl/journal/app/commit?query=q&batch=1 HTTP/1.1\r\nHost: 127.0.0.1:{stranger.server.port}\r\n"
    head += f"Connection: close\r\nAuthorization: Bearer {stranger.token}\r\nTransfer-Encoding: chunked\r\n\r\n"
    with stranger.server.attack("journal: a commit in chunks of one byte") as attack:
        assert b'"rows":2' in stranger.server.exchange(head.encode() + body, attack)


def test_wrong_tokens(stranger: Stranger) -> None:
    with stranger.server.attack("journal: wrong tokens, with bodies") as attack:
        for _ in range(100):
            assert "401" in stranger.post("commit?query=q&batch=1", bytes(1000), attack, token="x" * 43)


def test_a_token_for_some_topics(tmp_path: Path, besiege: Callable[..., Besieged]) -> None:
    """Topics as long as can be are compared with as many wildcards as a line may have; names of queries are counted."""
    app, token = tmp_path / "app", "a-token-for-some-topics"
    app.mkdir()
    (app / ".preload.py").write_text(APPLICATION)
    stranger = Stranger(besiege(app), app / ".journal")
    wildcards = [f"{'+/' * number}never{number}" for number in range(30, 30 + MAX_TOPICS - 1)]
    (app / ".journal" / TOKENS_FILE).touch(0o600)
    (app / ".journal" / TOKENS_FILE).write_text(f"few {token} write ok/# {' '.join(wildcards)}\n")
    longest = encode([(b"a/" * 30_000, None, b"")])
    with stranger.server.attack("journal: a token for some topics, long names and many queries") as attack:
        for _ in range(20):
            assert "403" in stranger.post("publish", longest, attack, token)
        for number in range(200):
            assert "200" in stranger.post(
                f"commit?query=q{number}&batch=1", encode([(b"ok", None, b"")]), attack, token
            )


def test_a_long_manifest_requested_repeatedly(tmp_path: Path, besiege: Callable[..., Besieged]) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / ".preload.py").write_text(APPLICATION)
    (app / ".journal").mkdir()
    path = "data/date=2026-11-21/hour={:02}/n0-{:020}-{:020}.parquet"
    files = [
        DataFile(path.format(number % 24, number, number), "n0", number, number, 1, number, number, 1000, ("t",) * 20)
        for number in range(50_000)
    ]
    with manifest.edit(app / ".journal") as changes:
        changes.add(files)
        changes.nodes["n0"] = 50_000
    stranger = Stranger(besiege(app), app / ".journal")
    with stranger.server.attack(
        "journal: a manifest of 50,000 files, with all its pages", grows_bytes=128 << 20
    ) as attack:
        for _ in range(3):
            assert stranger.get("end", attack)["end"]["n0"] == 50_000
            pages = stranger.get("manifest", attack)["manifest"]["pages"]
            assert sum(page["files"] for page in pages) == 50_000
            for page in pages[::10]:
                assert len(stranger.get(f"manifest/{page['name']}", attack)["files"]) == page["files"]
            assert stranger.get("stats", attack)


def test_many_wait_for_rows_that_do_not_come(stranger: Stranger) -> None:
    with stranger.server.attack("journal: 300 readers wait, for nonsense too, and a hundred go amidst") as attack:
        head = "HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nAuthorization: Bearer {}\r\n\r\n"
        rest = head.format(stranger.server.port, stranger.token)
        waiting = [stranger.server.open() for _ in range(300)]
        for at, connection in enumerate(waiting):
            after = "[" * 3000 if at % 10 == 9 else json.dumps({f"n{node}": 1 << 40 for node in range(100)})
            request = f"GET /rtl/journal/app/end?wait_s=1e9&after={quote(after)} {rest}".encode()
            connection.sendall(request)
            attack.sent(len(request))
        for connection in waiting[:100]:
            connection.close()
        assert stranger.get("end?wait_s=0.5&after=" + quote('{"n1": 99}'), attack) == {"end": {"n1": 0}}
        for connection in waiting[100:]:
            connection.close()
