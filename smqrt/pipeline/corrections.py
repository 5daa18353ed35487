"""Versions of what backfills publish: of the results of a range, those are published that are not out already.

<state>/<query>/versions/v2.3f2a9c1b5d7e/results        Parquet: all results of the range, in order, each with its hash
<state>/<query>/versions/v2.3f2a9c1b5d7e/version.json   number, range, versions that it is compared with, done or not

The folder is complete before the first result is published, and its name is the key of the commit. So a call that was
interrupted is finished from the folder by the next one, whatever has become of the query meanwhile.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from smqrt.errors import PipelineError
from smqrt.pipeline import checkpoint, process, sinks
from smqrt.pipeline.checkpoint import Offsets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOLDER = "versions"
_FILE, _RESULTS, _UNFINISHED = "version.json", "results", ".new"
_MESSAGE = ("topic", "subtopic", "payload")

Publish = Callable[["DataFrame", str, bool], int]
"""Publishes messages under the key of a commit, many or few; returns how many the hub didn't have."""


@dataclass(frozen=True)
class Version:
    """One set of results.

    Attributes:
        name: of its folder, never used again.
        number: 1, 2, …
        start, end: the range of the journal, the next seq of each node.
        known: names of the versions whose results were out already.
        rows, new: how many results there are, and how many of them are published with this version.
        done: whether they have been.
    """

    name: str
    number: int
    start: Offsets
    end: Offsets
    known: list[str]
    rows: int
    new: int
    done: bool = False


class Corrections:
    """The versions of one query.

    Args:
        spark: the session.
        query: `<state>/<name>`.
        publish: as `Publish` says; the key begins with the name of the query.

    Raises:
        PipelineError: another process is publishing some.
    """

    def __init__(self, spark: SparkSession, query: Path, publish: Publish) -> None:
        self._spark, self._query, self._publish = spark, query, publish
        self._folder = query / FOLDER

    def publish(self, messages: DataFrame, start: Offsets, end: Offsets) -> Iterator[str]:
        """Publishes the results of a range that are not out, under a new version.

        Args:
            messages: all results, of what `sinks.as_messages` returned.
            start, end: the range.

        Yields:
            What was done, one sentence each.
        """
        with self._alone():
            for leftover in self._folder.glob(f"*{_UNFINISHED}"):
                shutil.rmtree(leftover)
            for version in self._versions():
                if not version.done:
                    yield f"{self._finish(version)}, with which an earlier call did not come to its end"
            yield self._new(messages, start, end)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        working = process.running(self._folder)
        if working is not None:
            raise PipelineError(
                f"{self._query.name}: results are being published already, by process {working}; wait for its end."
            )
        process.claim(self._folder)
        try:
            yield
        finally:
            process.release(self._folder)

    def _new(self, messages: DataFrame, start: Offsets, end: Offsets) -> str:
        versions = self._versions()
        known = [
            one
            for one in versions
            if self._counts(one, versions) and checkpoint.overlap(start, end, one.start, one.end)
        ]
        number = max((one.number for one in versions), default=0) + 1
        name = f"v{number}.{secrets.token_hex(6)}"
        fresh = self._folder / f"{name}{_UNFINISHED}"
        _numbered(messages).write.parquet(_path(fresh / _RESULTS))
        version = Version(name, number, start, end, [one.name for one in known], 0, 0)
        rows = self._results(fresh).count()
        version = replace(version, rows=rows, new=self._unpublished(version, fresh).count())
        if not version.new:
            shutil.rmtree(fresh)
            return _nothing_new(version, known)
        checkpoint.write_json(fresh / _FILE, asdict(version))
        fresh.rename(self._folder / name)
        return self._finish(version)

    def _finish(self, version: Version) -> str:
        folder = self._folder / version.name
        messages = self._unpublished(version, folder).orderBy("at").select(*_MESSAGE)
        key = f"backfill.{self._query.name}.{version.name}"
        self._publish(messages, key, version.new > sinks.MANY_ROWS)
        checkpoint.write_json(folder / _FILE, asdict(replace(version, done=True)))
        for other in self._versions():
            if not self._counts(other, [version]):
                shutil.rmtree(self._folder / other.name)
        same = version.rows - version.new
        as_before = f"; {same:,} more are out already, as they are" if same else ""
        return f"{version.new:,} published as version {version.number}{as_before}"

    def _versions(self) -> list[Version]:
        files = [path for path in self._folder.glob(f"v*/{_FILE}") if path.parent.suffix != _UNFINISHED]
        found = [cast("dict[str, Any]", checkpoint.read_json(path)) for path in files]
        return sorted((Version(**one) for one in found), key=lambda one: one.number)

    @staticmethod
    def _counts(version: Version, others: list[Version]) -> bool:
        """Whether no later version has all of its range, and takes its place."""
        later = [one for one in others if one.number > version.number]
        return not any(checkpoint.covers(one.start, one.end, version.start, version.end) for one in later)

    def _results(self, folder: Path) -> DataFrame:
        return self._spark.read.parquet(_path(folder / _RESULTS))

    def _unpublished(self, version: Version, folder: Path) -> DataFrame:
        """Of results that are alike so many are out as other versions have of them."""
        from pyspark.sql import functions as F

        found = self._results(folder)
        there = [self._folder / name for name in version.known if (self._folder / name).is_dir()]
        if not there:
            return found
        known = self._results(there[0])
        for other in there[1:]:
            known = known.unionByName(self._results(other))
        counts = known.groupBy("hash").agg(F.count("*").alias("known"))
        return found.join(counts, "hash", "left").where(F.col("nth") > F.coalesce("known", F.lit(0)))


def _numbered(messages: DataFrame) -> DataFrame:
    """Adds the place of each message, a hash of it, and which one it is of those that are alike."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    whole = F.to_json(F.struct("topic", "subtopic", F.base64("payload").alias("payload")))
    placed = messages.select(*_MESSAGE, F.monotonically_increasing_id().alias("at"), F.sha2(whole, 256).alias("hash"))
    return placed.withColumn("nth", F.row_number().over(Window.partitionBy("hash").orderBy("at")))


def _path(folder: Path) -> str:
    return f"file://{folder.absolute()}"


def _nothing_new(version: Version, known: list[Version]) -> str:
    if not version.rows:
        return "nothing published: there are no results in this range"
    numbers = " and ".join(str(one.number) for one in known)
    return f"nothing published: all {version.rows:,} results are out already, with version {numbers}"
