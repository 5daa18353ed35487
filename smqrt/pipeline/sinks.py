"""Sinks of queries: rows become messages, in one idempotent commit for each micro-batch, or rows of a table.

The hub keeps (query, number of the micro-batch) in the same write as the rows. When a pipeline dies between that and
Spark's own note of it, Spark does the micro-batch again, and the hub sees that it has it already.

Source: design of the pipeline §5 (help/exactly-once.md is the page for users).
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
from smqrt.journal.commit import MOST_NAME_BYTES, MOST_PAYLOAD_BYTES, OutRow
from smqrt.journal.files import HubAddress, Unreachable
from smqrt.journal.record import COLUMNS
from smqrt.pipeline import checkpoint, process
from smqrt.pipeline.api import Declaration, Template
from smqrt.pipeline.checkpoint import PublishGate
from smqrt.pipeline.failures import is_too_large
from smqrt.pipeline.references import column

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from smqrt.pipeline.tables import LakeTable


_KEPT = ("topic", "ts", "payload")
BOOKKEEPING = frozenset(column.name for column in COLUMNS) - set(_KEPT)
"""Columns of the journal that say nothing to who receives the message."""

JSON_TIMES = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSXXX"}


def as_messages(frame: DataFrame, declaration: Declaration) -> DataFrame:
    """Return the columns `topic`, `subtopic` and `payload` (binary) of what a query publishes.

    Args:
        frame: its result.
        declaration: says where to: "to" and "subtopic".

    Raises:
        PipelineError: the template names a column that the result doesn't have.
    """
    from pyspark.sql import functions as F

    options = declaration.options
    subtopic = options.get("subtopic")
    return frame.select(
        # A topic needs a name, and a row without one shall not end the query.
        F.coalesce(F.nullif(_filled_template(frame, declaration, options["to"]), F.lit("")), F.lit("null")).alias(
            "topic"
        ),
        (_filled_template(frame, declaration, subtopic) if subtopic else F.lit(None).cast("string")).alias("subtopic"),
        _payload(frame).alias("payload"),
    )


def outgoing(frame: DataFrame, declaration: Declaration) -> DataFrame:
    """Return what a query gives to its sink. Raises as `as_messages` and `partitioned`."""
    return partitioned(frame, declaration) if declaration.kind == "table" else as_messages(frame, declaration)


def collected_messages(frame: DataFrame) -> Iterator[OutRow]:
    """Yield the messages of what `as_messages` returned, through Arrow."""
    for batch in frame.toArrow().to_batches():
        for topic, subtopic, payload in zip(*(each.to_pylist() for each in batch.columns), strict=True):
            yield topic.encode(), None if subtopic is None else subtopic.encode(), payload or b""


def _payload(frame: DataFrame) -> Column:
    from pyspark.sql import functions as F

    if "payload" in frame.columns:
        kind = dict(frame.dtypes)["payload"]
        if kind in ("binary", "string"):
            return F.col("payload").cast("binary")
        nested = kind.startswith(("struct", "array", "map", "variant"))
        return (F.to_json("payload", JSON_TIMES) if nested else F.col("payload").cast("string")).cast("binary")
    return F.to_json(F.struct(*(column(name) for name in _payload_columns(frame.columns))), JSON_TIMES).cast("binary")


def _payload_columns(columns: list[str]) -> list[str]:
    """A result that still has all of the journal's columns never asked for them; one that has some, did."""
    if set(columns) >= BOOKKEEPING:
        return [name for name in columns if name not in BOOKKEEPING] or columns
    return columns


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
    return F.make_valid_utf8(F.concat(*pieces))  # a column may be made of any bytes


_QUERY_ID = "sql.streaming.queryId"
_PAUSE_S = 0.5
MANY_ROWS = 50_000
"""A micro-batch of more isn't collected on the driver."""
_NULLABLE = (("subtopic", "string"), ("payload", "binary"))
RETRY_S = 60.0
"""So long a micro-batch waits for a hub that is away before the query is started anew."""


class Stopped(PipelineError):
    """What is waited for isn't wanted any more: the query is to stop."""


@dataclass
class CommitClient:
    """The hub that results are given to.

    Attributes:
        journal: path or URL of its journal.
        token: what it asks for; None takes the one in the journal's folder.
        retry_s: seconds to wait for it when it is away.
        stopping: set when nobody shall wait any longer.
        away: is told why, while the hub is waited for.
        cafile: as for `HubAddress.of`.
        letters: topic for rows that are too long for a message; None when they are only left out.
        left_out: is told how many rows these are.
    """

    journal: str
    token: str | None
    retry_s: float
    stopping: threading.Event
    away: Callable[[str], None] = lambda why: None
    cafile: str | None = None
    letters: str | None = None
    left_out: Callable[[int], None] = lambda rows: None

    def fitting(self, rows: Sequence[OutRow]) -> Sequence[OutRow]:
        """Return the rows, with letters in place of those that are too long for a message, or without them."""
        if not (unfit := sum(map(is_too_long, rows))):
            return rows
        self.left_out(unfit)
        if self.letters is None:
            return [row for row in rows if not is_too_long(row)]
        return [_too_long_letter(self.letters, row) if is_too_long(row) else row for row in rows]

    def commit(self, query: str, batch: int, rows: Sequence[OutRow]) -> int:
        """Publish the results of a micro-batch once, however often it is called.

        Args:
            query: Spark's id of the query, which lasts as long as its checkpoint.
            batch: number of the micro-batch.
            rows: the messages.

        Returns:
            How many the hub didn't have already.

        Raises:
            Unreachable: the hub is away, for longer than `retry_s`.
            Stopped: `stopping` was set meanwhile.
            JournalError: the hub refuses them.
        """
        deadline, stored = time.monotonic() + self.retry_s, 0
        for name, part in commit.parts(query, rows):
            while (new := self._once(name, batch, part, deadline)) is None:
                pass
            stored += len(part) if new else 0
        return stored

    def has(self, query: str, batch: int) -> bool:
        """Return whether a micro-batch was published; arguments as for `commit`.

        Raises:
            Unreachable: the hub is away.
            JournalError: its list of commits can't be read.
        """
        return commit.last_batch(self._address, query) >= batch

    @property
    def _address(self) -> HubAddress:
        return HubAddress.of(self.journal, self.token, self.cafile)

    def _once(self, query: str, batch: int, rows: Sequence[OutRow], deadline: float) -> bool | None:
        try:
            # The address each time: a hub that comes back may have another port.
            return commit.commit(self._address, query, batch, rows, retry_s=0)
        except Unreachable as error:
            if time.monotonic() > deadline:
                raise Unreachable(f"{error} What is to be published waits in the journal.") from error
            self.away(str(error))
            if self.stopping.wait(_PAUSE_S):
                raise Stopped("It was stopped while the hub was away.") from error
            return None


class PublishSink:
    """Publishes micro-batches of what `as_messages` returned: what `foreachBatch` calls.

    Args:
        hub: where to.
        gate: which micro-batches are old.
        published: is told how many rows the hub has taken.

    Attributes:
        error: what went wrong in the last call; Spark is only told that something did.
    """

    def __init__(
        self, hub: CommitClient, gate: PublishGate, published: Callable[[int], None] = lambda rows: None
    ) -> None:
        self._hub, self._gate, self._published, self._many = hub, gate, published, False
        self.error: Exception | None = None

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Publish one micro-batch, or only computes it (for windows and the like) when it is old."""
        try:
            if self._gate.is_old(batch):
                frame.write.format("noop").mode("overwrite").save()
            else:
                self._publish(frame, batch)
        except Exception as error:
            self.error = error
            # Spark looks through this text with a regular expression that overflows its stack when it is long.
            raise RuntimeError(type(error).__name__) from None

    def _publish(self, frame: DataFrame, batch: int) -> None:
        query = str(frame.sparkSession.sparkContext.getLocalProperty(_QUERY_ID))
        self._gate.save_commit(query, batch)
        checkpoint.keep_batch(self._gate.query, batch)
        many = self._many or self._gate.rows(batch) > MANY_ROWS
        stored = publish(frame, self._hub, query, batch, many)
        self._many = stored > MANY_ROWS
        self._published(stored)


def publish(frame: DataFrame, hub: CommitClient, query: str, batch: int, many: bool) -> int:
    """Publish the rows of what `as_messages` returned, once, however often it is called.

    Few rows come to the driver, which is quick; many are sorted by Spark and published by one of its tasks, so that
    nobody ever has all of them in memory. Either way they come in the same parts.

    Args:
        frame, query, batch: what, and its name, as for `CommitClient.commit`.
        hub: where to.
        many: whether many rows are expected.

    Returns:
        How many the hub didn't have already; of many, how many there are.

    Raises:
        JournalError, Stopped: as `CommitClient.commit`.
    """
    if not many:
        try:
            rows = list(collected_messages(frame))
        except Exception as error:
            if not is_too_large(error):
                raise
        else:
            return _commit(hub, query, batch, hub.fitting(rows))
    return _by_task(frame, hub, query, batch)


def _commit(hub: CommitClient, query: str, batch: int, rows: Sequence[OutRow]) -> int:
    if not rows:
        return 0
    process.crash_at("before_commit", batch)
    stored = hub.commit(query, batch, rows)
    process.crash_at("after_commit", batch)
    return stored


def _by_task(frame: DataFrame, hub: CommitClient, query: str, batch: int) -> int:
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    # Without nulls, which Spark would sort apart from the empty ones that they are published as.
    whole = frame.select("topic", *(F.coalesce(name, F.lit("").cast(kind)).alias(name) for name, kind in _NULLABLE))
    counted, unfit = Observation(), _is_too_long_column()
    # Counted before they are left out: Spark would else compute each payload twice, as it filters as early as it can.
    kept = whole.observe(counted, F.count(F.lit(1)).alias("rows"), F.count_if(unfit).alias("unfit"))
    kept = kept.where(~unfit) if hub.letters is None else kept.select(*_with_letters(hub.letters, unfit))
    ordered = kept.repartition(1).sortWithinPartitions("topic", "subtopic", "payload")
    writer = ordered.write.format("smq").mode("append")
    writer = writer.option("txnAppId", query).option("txnVersion", batch).option("retry", f"{hub.retry_s}s")
    given = {"token": hub.token, "cafile": hub.cafile}
    writer.options(**{name: value for name, value in given.items() if value}).save(hub.journal)
    found = counted.get
    if found["unfit"]:
        hub.left_out(int(found["unfit"]))
    return int(found["rows"]) - (int(found["unfit"]) if hub.letters is None else 0)


# ---- rows that no message can carry

FITS_MESSAGE = "fits a message"
"""How the status calls what each row that is published must meet."""
_SHOWN_CHARACTERS = 100
_TOO_LONG = (
    f'{{"reason":"a message carries at most {MOST_PAYLOAD_BYTES} bytes, and a name {MOST_NAME_BYTES}",'
    '"topic":"%s","topic_bytes":%d,"payload_bytes":%d}'
)
_NOT_IN_JSON = r'[\x00-\x1f"\\]'


def is_too_long(row: OutRow) -> bool:
    """Return whether a row is too long for a message."""
    topic, subtopic, payload = row
    names = max(len(topic), len(subtopic or b""))
    return len(payload) > MOST_PAYLOAD_BYTES or names > MOST_NAME_BYTES


def _too_long_letter(topic: str, row: OutRow) -> OutRow:
    shown = re.sub(_NOT_IN_JSON, "?", row[0].decode(errors="replace")[:_SHOWN_CHARACTERS])
    return topic.encode(), None, (_TOO_LONG % (shown, len(row[0]), len(row[2]))).encode()


def _is_too_long_column() -> Column:
    """The same as `is_too_long`, of the columns of messages."""
    from pyspark.sql import functions as F

    names = F.greatest(F.octet_length("topic"), F.octet_length("subtopic"))
    return (F.octet_length("payload") > MOST_PAYLOAD_BYTES) | (names > MOST_NAME_BYTES)


def _with_letters(topic: str, unfit: Column) -> list[Column]:
    """The same as `_too_long_letter`, byte by byte: a micro-batch that is done again may go the other way."""
    from pyspark.sql import functions as F

    shown = F.regexp_replace(F.substring("topic", 1, _SHOWN_CHARACTERS), F.lit(_NOT_IN_JSON), F.lit("?"))
    letter = F.format_string(_TOO_LONG, shown, F.octet_length("topic"), F.octet_length("payload"))
    return [
        F.when(unfit, F.lit(topic)).otherwise(F.col("topic")).alias("topic"),
        F.when(unfit, F.lit("")).otherwise(F.col("subtopic")).alias("subtopic"),
        F.when(unfit, letter.cast("binary")).otherwise(F.col("payload")).alias("payload"),
    ]


class TableSink:
    """Appends micro-batches to a table that has commits: what `foreachBatch` calls.

    Args:
        table: what it is.
        query: `<state>/<name>` of the query.

    Attributes:
        error: as of `PublishSink`.
    """

    def __init__(self, table: LakeTable, query: Path) -> None:
        self._table, self._query = table, query
        self.error: Exception | None = None

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Append one micro-batch, or does nothing when the table has it already."""
        try:
            key = f"{self._query.name}:{frame.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)}"
            checkpoint.keep_batch(self._query, batch)
            self._table.append(frame, key, batch, checkpoint.committed_offsets(self._query, batch))
        except Exception as error:
            self.error = error
            raise RuntimeError(type(error).__name__) from None


def table_writer(frame: DataFrame, declaration: Declaration, location: str) -> DataStreamWriter:
    """Return the writer of a table's stream: Spark's own file sink, which is exactly once.

    Args:
        frame: the result.
        declaration: the query.
        location: folder or URI of the table.

    Raises:
        PipelineError: it is to be partitioned by a column that isn't there.
    """
    writer: Any = partitioned(frame, declaration).writeStream.format("parquet").option("path", location)
    by = declaration.options["partition_by"]
    return cast("DataStreamWriter", writer.partitionBy(*by) if by else writer)


def partitioned(frame: DataFrame, declaration: Declaration) -> DataFrame:
    """Return the frame with what it is partitioned by: `date` and `hour` are made of `ts` when they aren't columns.

    Raises:
        PipelineError: another column isn't there.
    """
    from pyspark.sql import functions as F

    made = {"date": F.to_date("ts"), "hour": F.date_format("ts", "HH")}
    for name in declaration.options["partition_by"]:
        if name in frame.columns:
            continue
        if name not in made or "ts" not in frame.columns:
            raise PipelineError(
                f"{declaration.where}: {declaration.name} is partitioned by {name!r}, which its result doesn't have; "
                f"it has {', '.join(frame.columns)}."
            )
        frame = frame.withColumn(name, made[name])
    return frame
