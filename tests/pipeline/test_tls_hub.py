"""A hub behind TLS whose certificate is of an authority that the system doesn't know: the file is named, or refused."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import functions as F

from smqrt.cli.journal import journal as command
from smqrt.errors import JournalError
from smqrt.journal import commit
from smqrt.journal.files import HubAddress
from smqrt.journal.remote import open_journal
from tests.conftest import Served
from tests.pipeline.hubs import APPLICATION
from tests.support.device import Authority

ROWS = [(b"in", None, b"%d" % number) for number in range(100)]


@dataclass
class TlsHub:
    """Where it is, and who has signed its certificate."""

    url: str
    token: str
    cafile: str

    @property
    def options(self) -> dict[str, str]:
        return {"url": self.url, "token": self.token, "cafile": self.cafile}

    @property
    def address(self) -> HubAddress:
        return HubAddress.of(self.url, self.token, self.cafile)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsHub]:
    folder = tmp_path_factory.mktemp("hub")
    app = folder / "app"
    app.mkdir()
    (app / ".preload.py").write_text(APPLICATION)
    authority = Authority(folder)
    certificate, key = authority.pair("hub")
    served = Served(app, "--tls-port", "0", "--cert", certificate, "--key", key)
    url = f"https://127.0.0.1:{served.tls_port}/rtl/journal/app"
    served.wait_for("listening on http:")
    made = TlsHub(url, (app / ".journal" / "token").read_text().strip(), str(authority.path))
    commit.commit(made.address, "q", 0, ROWS)
    yield made
    served.stop()


def numbers(rows: Any) -> list[int]:
    return sorted(int(row.payload) for row in rows)


def test_it_is_read_and_written_with_its_authority(hub: TlsHub) -> None:
    journal = open_journal(hub.url, hub.token, cafile=hub.cafile)
    text = open_journal(hub.url, hub.token, cafile=Path(hub.cafile).read_text())
    for opened in (journal, text, pickle.loads(pickle.dumps(journal))):
        assert numbers(opened.rows({}, opened.end(), ["in"])) == list(range(100))
    assert commit.last_batch(hub.address, "q") == 0


def test_without_it_that_is_said_at_once(hub: TlsHub) -> None:
    opened = open_journal(hub.url, hub.token, retry_s=60)
    with pytest.raises(JournalError, match=r"its certificate can't be trusted \(.*\); name the file .* --cafile"):
        opened.end()
    with pytest.raises(JournalError, match="can't be trusted"):
        commit.commit(HubAddress.of(hub.url, hub.token), "q", 1, ROWS)


@pytest.mark.parametrize("text", ["", "nothing", "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"])
def test_a_file_without_certificates(hub: TlsHub, tmp_path: Path, text: str) -> None:
    (tmp_path / "none.pem").write_text(text)
    for cafile in (tmp_path / "none.pem", tmp_path / "missing.pem"):
        with pytest.raises(JournalError, match=f"cafile {cafile} is not a PEM file with certificates"):
            open_journal(hub.url, hub.token, cafile=str(cafile))


def test_commands_take_it(hub: TlsHub) -> None:
    shown = CliRunner().invoke(command, ["stats", hub.url, "--token", hub.token, "--cafile", hub.cafile])
    assert shown.exit_code == 0, shown.output
    refused = CliRunner().invoke(command, ["stats", hub.url, "--token", hub.token])
    assert refused.exit_code == 1
    assert "certificate can't be trusted" in str(refused.exception)


def test_spark_reads_and_writes_over_it(spark: Any, hub: TlsHub, tmp_path: Path) -> None:
    assert numbers(spark.read.format("smq").options(**hub.options, topics="in").load().collect()) == list(range(100))
    rows = spark.readStream.format("smq").options(**hub.options, topics="in", startingOffsets="earliest").load()
    long = F.rpad(F.col("payload").cast("string"), 3000, " ")
    made = rows.select(F.lit("out").alias("topic"), long.alias("payload"))
    writer = made.writeStream.format("smq").options(**hub.options).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    assert query.awaitTermination(60)
    journal = open_journal(hub.url, hub.token, cafile=hub.cafile)
    assert numbers(journal.rows({}, journal.end(), ["out"])) == list(range(100))
