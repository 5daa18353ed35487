"""An application with pipelines, beside a real hub."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from smqrt.journal import commit, files
from smqrt.journal.reader import Journal
from smqrt.pipeline import status
from smqrt.pipeline.discover import Catalog, load
from smqrt.pipeline.runner import Runner, RunOptions
from tests.pipeline.hubs import JournalingHub

HEAD = (
    "from smqrt.pipeline import alert, expect, publish, reference, source, table, view\n"
    "from pyspark.sql import functions as F\n"
)


class Application:
    """A folder with pipelines, which read and write topics of their own in the journal of a hub.

    Args:
        folder: of the application.
        hub: whose journal is read.
        spark: the session.

    Attributes:
        told: what was reported, one sentence each.
        topic: how its topics begin: messages in `<topic>/in/…`, results in `<topic>/out/…`.
        first: the seq of the journal's first row that may be one of its messages.
    """

    def __init__(self, folder: Path, hub: JournalingHub, spark: Any) -> None:
        self.folder, self.hub, self.spark = folder, hub, spark
        self.journal = str(hub.journal)
        self.told: list[str] = []
        self.topic = folder.name
        self.first = self.end
        (folder / "pipelines").mkdir()

    @property
    def source(self) -> str:
        """The first line of a source that reads the application's messages; they come by way of a commit."""
        return f"topics='{self.topic}/in/#', include_pipeline=True"

    def write(self, text: str, name: str = "p.py") -> None:
        """Make a file of pipelines, in which OUT stands for the topic of results."""
        (self.folder / "pipelines" / name).write_text((HEAD + text).replace("OUT", f"{self.topic}/out"))

    @property
    def catalog(self) -> Catalog:
        return load(self.folder / "pipelines")

    def options(self, **options: Any) -> RunOptions:
        given = {"once": True, "hub_retry_s": 0.5, "start": "earliest", "report": self.told.append, **options}
        return RunOptions(self.journal, self.folder, self.folder / ".pipelines", **given)

    def run(self, *names: str, **options: Any) -> int:
        """Works off what there is; returns the exit code."""
        runner = Runner(self.catalog, self.options(**options), threading.Event(), self.spark)
        return runner.run(names)

    def send(self, *payloads: Any, below: str = "x") -> None:
        """Publish messages; what isn't bytes becomes JSON."""
        bodies = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in payloads]
        topic = f"{self.topic}/in/{below}".encode()
        commit.publish(files.HubAddress.of(self.hub.journal), [(topic, None, body) for body in bodies])

    @property
    def end(self) -> int:
        """The seq of the journal's next row."""
        return Journal(self.journal).end().get("n1", 0)

    def results(self, below: str = "#") -> list[Any]:
        """Return what was published, as JSON, in order."""
        rows = self.hub.rows(f"{self.topic}/out/{below}")
        return [json.loads(row.payload) for row in rows]

    def status(self, name: str) -> status.Status:
        found = status.read(self.folder / ".pipelines" / name)
        assert found is not None
        return found
