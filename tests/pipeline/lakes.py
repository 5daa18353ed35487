"""An application with one table in a format that has commits, and a server of S3 for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.conftest import free_port
from tests.pipeline.applications import Application
from tests.pipeline.hubs import JournalingHub
from tests.support.waiting import wait_until

KEPT = (
    "@source({source}, json='n int, k string')\ndef rows(df): return df\n"
    "@table('kept', format='{format}', partition_by=['date', 'k'])\n"
    "def kept(rows): return rows.select('n', 'k', 'ts')\n"
)


class LakeApplication(Application):
    """Its query `kept` keeps numbers, with a text for each remainder of three.

    Args:
        folder, hub, spark: as of `Application`.
        table_format: "delta" or "iceberg".
    """

    def __init__(self, folder: Path, hub: JournalingHub, spark: Any, table_format: str) -> None:
        super().__init__(folder, hub, spark)
        self._text = KEPT.format(source=self.source, format=table_format)
        self.write(self._text)

    def change(self, before: str = "", after: str = "") -> None:
        """Write the file of pipelines with something else in it, or as it was."""
        assert before in self._text
        self.write(self._text.replace(before, after))

    @property
    def place(self) -> Path:
        """The folder of the table."""
        return self.folder / ".tables" / "kept"

    @property
    def state(self) -> Path:
        """What the query remembers."""
        return self.folder / ".pipelines" / "kept"

    def numbers(self, *numbers: int) -> None:
        """Publish messages with these."""
        self.send(*({"n": n, "k": ["a b/c%", "ü", None][n % 3]} for n in numbers))

    def keep(self, *numbers: int, **options: Any) -> None:
        """Publish them, and lets the query work them off."""
        self.numbers(*numbers)
        assert self.run(**options) == 0, self.told

    def forget_last_batch(self) -> None:
        """As after `kill -9` between the commit of the table and that of Spark."""
        commits = self.state / "checkpoint" / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
        for path in (commits / str(last), commits / f".{last}.crc"):
            path.unlink(missing_ok=True)

    def killed(self, point: str) -> None:
        """Run the query in a process of its own, which is killed with its helpers at a point of the first batch."""
        command = [sys.executable, "-m", "smqrt", "pipeline", "run", "--once", "--from", "earliest"]
        command += ["--app", str(self.folder), "--journal", self.journal]
        env = os.environ | {"SMQRT_FAULT": f"{point}:0"}
        killed = subprocess.run(command, env=env, start_new_session=True, capture_output=True, timeout=200)
        assert killed.returncode == -9, killed.stderr


@contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a server of S3, a process of its own: deltalake keeps Python's lock while it asks."""
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stderr=-3)
    settings = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    try:
        wait_until(lambda: _answers(port), "the server of S3 answers")
        urlopen(Request(f"http://127.0.0.1:{port}/lake", method="PUT")).close()  # importing boto3 takes a second
        yield "s3://lake"
    finally:
        server.terminate()
        server.wait()


def _answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0
