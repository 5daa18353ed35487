"""Sinks of queries: idempotent commits of messages, and rows of tables.

A micro-batch of messages is one commit. The hub stores (query, number of the micro-batch) in the same write as the
rows. When a pipeline ends between this write and the entry in Spark's checkpoint, Spark repeats the micro-batch, and
the hub recognizes it.

(help: exactly-once)
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from smqrt.errors import PipelineError
from smqrt.journal import commit
from smqrt.journal.commit import MAX_NAME_BYTES, MAX_PAYLOAD_BYTES, OutRow
from smqrt.journal.files import HubAddress, Unreachable
from smqrt.journal.record import COLUMNS
from smqrt.pipeline import checkpoint, status
from smqrt.pipeline.api import Declaration, Template
from smqrt.pipeline.checkpoint import PublishGate
from smqrt.pipeline.discover import column
from smqrt.pipeline.failures import is_too_large

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from smqrt.pipeline.tables import LakeTable


_PUBLISHED_COLUMNS = ("topic", "ts", "payload")
JOURNAL_COLUMNS = frozenset(column.name for column in COLUMNS) - set(_PUBLISHED_COLUMNS)
"""Columns of the journal that a message does not need."""

JSON_TIMES = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSXXX"}


def as_messages(frame: DataFrame, declaration: Declaration) -> DataFrame:
    """Return the messages of a query, with the columns `topic`, `subtopic` and `payload` (binary).

    Args:
        frame: its result.
        declaration: the query, with the options "to" and "subtopic".

    Raises:
        PipelineError: the template names a column that the result doesn't have.
    """
    from pyspark.sql import functions as F

    options = declaration.options
    subtopic = options.get("subtopic")
    topic = F.nullif(_filled_template(frame, declaration, options["to"]), F.lit(""))
    if "payload" in frame.columns:
        kind = dict(frame.dtypes)["payload"]
        if kind in ("binary", "string"):
            payload = F.col("payload")
        elif kind.startswith(("struct", "array", "map", "variant")):
            payload = F.to_json("payload", JSON_TIMES)
        else:
            payload = F.col("payload").cast("string")
    else:
        columns = frame.columns
        # A result with all columns of the journal did not select them; one with some of them did.
        if set(columns) >= JOURNAL_COLUMNS:
            columns = [name for name in columns if name not in JOURNAL_COLUMNS] or columns
        payload = F.to_json(F.struct(*map(column, columns)), JSON_TIMES)
    return frame.select(
        F.coalesce(topic, F.lit("null")).alias("topic"),  # a row without a topic must not end the query
        (_filled_template(frame, declaration, subtopic) if subtopic else F.lit(None).cast("string")).alias("subtopic"),
        payload.cast("binary").alias("payload"),
    )


def sink_frame(frame: DataFrame, declaration: Declaration) -> DataFrame:
    """Return the rows that a query passes to its sink. Raises as `as_messages` and `partitioned`."""
    return partitioned(frame, declaration) if declaration.kind == "table" else as_messages(frame, declaration)


def collect_messages(frame: DataFrame) -> Iterator[OutRow]:
    """Yield the messages of a frame from `as_messages`, through Arrow."""
    for batch in frame.toArrow().to_batches():
        for topic, subtopic, payload in zip(*(each.to_pylist() for each in batch.columns), strict=True):
            yield topic.encode(), None if subtopic is None else subtopic.encode(), payload or b""


def _filled_template(frame: DataFrame, declaration: Declaration, text: str) -> Column:
    from pyspark.sql import functions as F

    template = Template(text)
    for name in template.columns:
        if name not in frame.columns and name.split(".")[0] not in frame.columns:
            raise PipelineError(
                f"{declaration.where}: {declaration.name} publishes to {text!r}, but its result has no column "
                f"{name!r}; it has {', '.join(frame.columns)}."
            )
    columns = {name: column(name) if name in frame.columns else F.col(name) for name in template.columns}
    pieces = [
        F.coalesce(columns[piece].cast("string"), F.lit("null")) if is_column else F.lit(piece)
        for is_column, piece in template.parts
    ]
    return F.make_valid_utf8(F.concat(*pieces))  # a string column may contain arbitrary bytes


_QUERY_ID = "sql.streaming.queryId"
_RETRY_INTERVAL_S = 0.5
MAX_COLLECTED_ROWS = 50_000
"""The maximum size of a micro-batch that is collected on the driver."""
_NULLABLE = (("subtopic", "string"), ("payload", "binary"))
RETRY_S = 60.0
"""The time that a micro-batch waits for an unreachable hub before the query is started again."""


class Stopped(PipelineError):
    """The query was stopped while it waited."""


@dataclass
class CommitClient:
    """Client that publishes results to a hub.

    Attributes:
        journal: path or URL of its journal.
        token: the hub's token; None uses the one in the journal's folder.
        retry_s: how many seconds to wait for an unreachable hub.
        stopping: an event that ends the wait.
        on_unreachable: called with the reason while the hub is unreachable.
        cafile: as for `HubAddress.of`.
        dead_letter_topic: topic for rows that are too long for a message; None only leaves them out.
        on_left_out: called with the number of these rows.
    """

    journal: str
    token: str | None
    retry_s: float
    stopping: threading.Event
    on_unreachable: Callable[[str], None] = lambda why: None
    cafile: str | None = None
    dead_letter_topic: str | None = None
    on_left_out: Callable[[int], None] = lambda rows: None

    def fitting(self, rows: Sequence[OutRow]) -> Sequence[OutRow]:
        """Return the rows; those that are too long for a message are left out or replaced by dead letters."""
        if not (unfit := sum(map(is_too_long, rows))):
            return rows
        self.on_left_out(unfit)
        fitting: list[OutRow] = []
        for row in rows:
            if not is_too_long(row):
                fitting.append(row)
            elif self.dead_letter_topic is not None:
                shown = re.sub(_NOT_IN_JSON, "?", row[0].decode(errors="replace")[:_SHOWN_CHARACTERS])
                letter = _TOO_LONG % (shown, len(row[0]), len(row[2]))
                fitting.append((self.dead_letter_topic.encode(), None, letter.encode()))
        return fitting

    def commit(self, query: str, batch: int, rows: Sequence[OutRow]) -> int:
        """Publish the results of a micro-batch; repeated calls publish them once.

        Args:
            query: Spark's id of the query, which stays the same as long as its checkpoint exists.
            batch: number of the micro-batch.
            rows: the messages.

        Returns:
            The number of messages that were new to the hub.

        Raises:
            Unreachable: the hub is unreachable for longer than `retry_s`.
            Stopped: `stopping` was set meanwhile.
            JournalError: the hub rejects them.
        """
        deadline, stored = time.monotonic() + self.retry_s, 0
        for name, part in commit.parts(query, rows):
            is_new: bool | None = None
            while is_new is None:
                try:
                    # The address is looked up each time: a restarted hub may have another port.
                    is_new = commit.commit(self._address, name, batch, part, retry_s=0)
                except Unreachable as error:
                    if time.monotonic() > deadline:
                        raise Unreachable(f"{error} The results to publish stay in the journal.") from error
                    self.on_unreachable(str(error))
                    if self.stopping.wait(_RETRY_INTERVAL_S):
                        raise Stopped("It was stopped while the hub was unreachable.") from error
            stored += len(part) if is_new else 0
        return stored

    def has(self, query: str, batch: int) -> bool:
        """Return whether a micro-batch is published; arguments as for `commit`.

        Raises:
            Unreachable: the hub is unreachable.
            JournalError: its list of commits can't be read.
        """
        return commit.last_batch(self._address, query) >= batch

    @property
    def _address(self) -> HubAddress:
        return HubAddress.of(self.journal, self.token, self.cafile)


class PublishSink:
    """Function for `foreachBatch` that publishes micro-batches of a frame from `as_messages`.

    Args:
        hub: the client.
        gate: decides which micro-batches are old.
        published: called with the number of rows that the hub accepted.

    Attributes:
        error: the exception of the last call. Spark gets only its type.
    """

    def __init__(
        self, hub: CommitClient, gate: PublishGate, published: Callable[[int], None] = lambda rows: None
    ) -> None:
        self._hub, self._gate, self._published, self._many = hub, gate, published, False
        self.error: Exception | None = None

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Publish one micro-batch. An old one is only computed, for the state of windows and joins."""
        try:
            if self._gate.is_old(batch):
                frame.write.format("noop").mode("overwrite").save()
                return
            query = str(frame.sparkSession.sparkContext.getLocalProperty(_QUERY_ID))
            self._gate.save_commit(query, batch)
            # Without the sync a power failure could lose Spark's record of a micro-batch that the hub has stored.
            checkpoint.sync_batch(self._gate.query, batch)
            many = self._many or self._gate.rows(batch) > MAX_COLLECTED_ROWS
            stored = publish(frame, self._hub, query, batch, many)
            self._many = stored > MAX_COLLECTED_ROWS  # the next micro-batch is probably of a similar size
            self._published(stored)
        except Exception as error:
            self.error = error
            # Spark applies a regular expression to this text, which overflows the stack when the text is long.
            raise RuntimeError(type(error).__name__) from None


def publish(frame: DataFrame, hub: CommitClient, query: str, batch: int, many: bool) -> int:
    """Publish the rows of a frame from `as_messages`; repeated calls publish them once.

    Few rows are collected on the driver, which is fast. Many rows are sorted by Spark and published by one task, so
    that no process needs memory for all of them. Both ways publish the same parts.

    Args:
        frame, query, batch: the rows and their key, as for `CommitClient.commit`.
        hub: the client.
        many: whether many rows are expected.

    Returns:
        The number of rows that were new to the hub; with many rows, the number of all rows.

    Raises:
        JournalError, Stopped: as `CommitClient.commit`.
    """
    if not many:
        try:
            rows = hub.fitting(list(collect_messages(frame)))
        except Exception as error:
            if not is_too_large(error):
                raise
            # More rows than expected: a task publishes them.
        else:
            if not rows:
                return 0
            status.crash_at("before_commit", batch)
            stored = hub.commit(query, batch, rows)
            status.crash_at("after_commit", batch)
            return stored
    return _publish_by_task(frame, hub, query, batch)


def _publish_by_task(frame: DataFrame, hub: CommitClient, query: str, batch: int) -> int:
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    # NULL is published as empty. It is replaced here, because Spark sorts NULL and empty values separately.
    whole = frame.select("topic", *(F.coalesce(name, F.lit("").cast(kind)).alias(name) for name, kind in _NULLABLE))
    names = F.greatest(F.octet_length("topic"), F.octet_length("subtopic"))
    unfit = (F.octet_length("payload") > MAX_PAYLOAD_BYTES) | (names > MAX_NAME_BYTES)  # the same rule as `is_too_long`
    # The rows are counted before the filter: Spark moves filters forward, and would compute each payload twice.
    counted = Observation()
    kept = whole.observe(counted, F.count(F.lit(1)).alias("rows"), F.count_if(unfit).alias("unfit"))
    letters = hub.dead_letter_topic
    if letters is None:
        kept = kept.where(~unfit)
    else:
        # The same bytes as in `CommitClient.fitting`: a repeated micro-batch may be published on the driver.
        shown = F.regexp_replace(F.substring("topic", 1, _SHOWN_CHARACTERS), F.lit(_NOT_IN_JSON), F.lit("?"))
        letter = F.format_string(_TOO_LONG, shown, F.octet_length("topic"), F.octet_length("payload"))
        kept = kept.select(
            F.when(unfit, F.lit(letters)).otherwise(F.col("topic")).alias("topic"),
            F.when(unfit, F.lit("")).otherwise(F.col("subtopic")).alias("subtopic"),
            F.when(unfit, letter.cast("binary")).otherwise(F.col("payload")).alias("payload"),
        )
    # One sorted partition, so that a repeated micro-batch has the same parts.
    ordered = kept.repartition(1).sortWithinPartitions("topic", "subtopic", "payload")
    writer = ordered.write.format("smq").mode("append")
    writer = writer.option("txnAppId", query).option("txnVersion", batch).option("retry", f"{hub.retry_s}s")
    given = {"token": hub.token, "cafile": hub.cafile}
    writer.options(**{name: value for name, value in given.items() if value}).save(hub.journal)
    found = counted.get
    if found["unfit"]:
        hub.on_left_out(int(found["unfit"]))
    return int(found["rows"]) - (int(found["unfit"]) if letters is None else 0)


# ---- Rows that do not fit into a message

FITS_MESSAGE = "fits a message"
"""The name in the status of the rule that published rows must meet."""


_SHOWN_CHARACTERS = 100
_TOO_LONG = (
    f'{{"reason":"a message carries at most {MAX_PAYLOAD_BYTES} bytes, and a name {MAX_NAME_BYTES}",'
    '"topic":"%s","topic_bytes":%d,"payload_bytes":%d}'
)
_NOT_IN_JSON = r'[\x00-\x1f"\\]'


def is_too_long(row: OutRow) -> bool:
    """Return whether a row is too long for a message."""
    topic, subtopic, payload = row
    names = max(len(topic), len(subtopic or b""))
    return len(payload) > MAX_PAYLOAD_BYTES or names > MAX_NAME_BYTES


class TableSink:
    """Function for `foreachBatch` that appends micro-batches to a table with commits.

    Args:
        table: the table.
        query: `<state>/<name>` of the query.

    Attributes:
        error: the exception of the last call, as for `PublishSink`.
    """

    def __init__(self, table: LakeTable, query: Path) -> None:
        self._table, self._query = table, query
        self.error: Exception | None = None

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Append one micro-batch, or do nothing when the table already has it."""
        try:
            key = f"{self._query.name}:{frame.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)}"
            checkpoint.sync_batch(self._query, batch)
            self._table.append(frame, key, batch, checkpoint.committed_offsets(self._query, batch))
        except Exception as error:
            self.error = error
            raise RuntimeError(type(error).__name__) from None


def table_writer(frame: DataFrame, declaration: Declaration, location: str) -> DataStreamWriter:
    """Return the writer of a table's stream: Spark's own file sink, which is exactly-once.

    Args:
        frame: the result.
        declaration: the query.
        location: folder or URI of the table.

    Raises:
        PipelineError: a partition column is missing.
    """
    writer: Any = partitioned(frame, declaration).writeStream.format("parquet").option("path", location)
    by = declaration.options["partition_by"]
    return cast("DataStreamWriter", writer.partitionBy(*by) if by else writer)


def partitioned(frame: DataFrame, declaration: Declaration) -> DataFrame:
    """Return the frame with its partition columns: `date` and `hour` are derived from `ts` when they are missing.

    Raises:
        PipelineError: another column is missing.
    """
    from pyspark.sql import functions as F

    made = {"date": F.to_date("ts"), "hour": F.date_format("ts", "HH")}
    for name in declaration.options["partition_by"]:
        if name in frame.columns:
            continue
        if name not in made or "ts" not in frame.columns:
            raise PipelineError(
                f"{declaration.where}: {declaration.name} is partitioned by {name!r}, which is missing in its result; "
                f"it has {', '.join(frame.columns)}."
            )
        frame = frame.withColumn(name, made[name])
    return frame
