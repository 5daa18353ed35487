"""Writers of `format("smq")`: rows become messages, which the journal's hub publishes.

Columns: `topic` (string), `payload` (string or binary) and optionally `subtopic` (string).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import commit, files
from smqrt.journal.commit import OutRow
from smqrt.pipeline import status
from smqrt.pipeline.smq_source.options import WriteOptions, without_traceback

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql.types import StructType

COLUMNS = {"topic": ("string", "binary"), "subtopic": ("string", "binary"), "payload": ("string", "binary")}
REQUIRED = ("topic", "payload")
_UNSORTED = (
    "smq divides a write with txnAppId into parts, and a repeated write needs the same parts: write "
    'frame.repartition(1).sortWithinPartitions("topic", "subtopic", "payload"), without nulls in these columns.'
)
QUERY_ID, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
"""Local properties of every task of a stream. The query's id stays the same as long as the checkpoint exists."""
DRIVER_BYTES = 64 << 10
"""A task with at most this many bytes sends its rows to the driver, which saves two requests to the hub. A larger task
stages its rows at the hub."""


@dataclass
class TaskCommit(WriterCommitMessage):
    """The message of a task to the driver.

    Attributes:
        query: the stream's id; empty for a batch write, whose tasks publish the rows.
        rows: the rows to be published, if they are few.
        parts: the names of the staged parts otherwise.
    """

    query: str = ""
    rows: Sequence[OutRow] = ()
    parts: Sequence[str] = ()


def check_schema(schema: StructType) -> None:
    """Raise ArgumentError when the frame has other columns than those of messages."""
    here = {field.name: field.dataType.simpleString() for field in schema.fields}
    for name in REQUIRED:
        if name not in here:
            raise ArgumentError(f'smq writes columns topic, payload and optionally subtopic: there is no "{name}".')
    for name, kind in here.items():
        if name not in COLUMNS:
            raise ArgumentError(
                f'smq writes columns topic, payload and optionally subtopic, not "{name}": '
                "put the content of the message into payload, such as to_json(struct(...))."
            )
        if kind not in COLUMNS[name]:
            raise ArgumentError(f"smq writes column {name} as string or binary, not {kind}: cast it.")


def records(batches: Iterable[RecordBatch]) -> Iterator[OutRow]:
    """Yield the rows of pyarrow.RecordBatches as messages.

    Raises:
        ArgumentError: a topic is null. A null payload is an empty one.
    """
    for batch in batches:
        names = batch.schema.names
        topics, payloads = as_bytes(batch, "topic"), as_bytes(batch, "payload")
        subtopics = as_bytes(batch, "subtopic") if "subtopic" in names else [None] * batch.num_rows
        for topic, subtopic, payload in zip(topics, subtopics, payloads, strict=True):
            if not topic:
                raise ArgumentError("smq can't publish a row whose topic is null or empty: filter such rows out.")
            yield topic, subtopic, payload or b""


def check_order(rows: Iterable[OutRow]) -> Iterator[OutRow]:
    """Yield the rows; raise ArgumentError when they are not sorted."""
    before: tuple[bytes, bytes, bytes] = b"", b"", b""
    for row in rows:
        if (now := commit.sort_key(row)) < before:
            raise ArgumentError(_UNSORTED)
        before = now
        yield row


def _target(options: WriteOptions) -> files.HubAddress:
    return files.HubAddress.of(options.journal, options.token, options.cafile)


def _property(name: str) -> str:
    context = TaskContext.get()
    found = context.getLocalProperty(name) if context else None
    if not found:
        raise JournalError(f"Spark does not set {name} in the task: without it a repeated batch isn't recognized.")
    return found


def as_bytes(batch: RecordBatch, name: str) -> list[bytes | None]:
    """Return the values of a column; text as UTF-8."""
    import pyarrow as pa

    found: list[bytes | None] = batch.column(name).cast(pa.binary()).to_pylist()
    return found


class StreamWriter(DataSourceStreamArrowWriter):
    """Publishes each micro-batch exactly once, in commits with the stream's id and the batch's number.

    Args:
        options: the options of the write.
        schema: the schema of the frame.
        overwrite: set by Spark in output mode "complete".

    Raises:
        ArgumentError: the frame's columns or the output mode are not supported.
    """

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise ArgumentError('smq supports outputMode("append"): for other modes publish in foreachBatch.')
        if options.app_id:
            raise ArgumentError("smq options txnAppId and txnVersion are for write: a stream sets both itself.")
        check_schema(schema)
        self.options = options

    @without_traceback
    def write(self, iterator: Iterator[RecordBatch]) -> TaskCommit:
        # A repetition of the micro-batch has the same id and number, by which the hub recognizes it.
        query, batch = _property(QUERY_ID), _property(BATCH)
        rows = records(iterator)
        first_rows: list[OutRow] = []
        size_bytes = 0
        while size_bytes < DRIVER_BYTES and (row := next(rows, None)) is not None:
            size_bytes += commit.size_bytes(row)
            first_rows.append(row)
        if (more := next(rows, None)) is None:
            return TaskCommit(query, first_rows)
        return TaskCommit(query, parts=self._stage(query, int(batch), chain(first_rows, [more], rows)))

    def _stage(self, query: str, batch: int, rows: Iterable[OutRow]) -> list[str]:
        return commit.stage(_target(self.options), query, batch, rows, self.options.retry_s)

    @without_traceback
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        written = [message for message in messages if isinstance(message, TaskCommit)]
        rows = [row for message in written for row in message.rows]
        parts = [part for message in written for part in message.parts]
        if not rows and not parts:
            return
        status.crash_at("before_commit", batchId, of_worker=True)
        query = written[0].query
        if not parts and commit.is_one_part(rows):
            # One part is one commit: the hub stores all of it or nothing.
            commit.commit(_target(self.options), query, batchId, rows, retry_s=self.options.retry_s)
        else:
            # Several parts are staged, since a repetition of the micro-batch may divide it differently.
            parts += self._stage(query, batchId, rows) if rows else []
            kill = partial(status.crash_at, "before_part", of_worker=True)
            commit.commit_staged(_target(self.options), query, batchId, parts, self.options.retry_s, kill)
        status.crash_at("after_commit", batchId, of_worker=True)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: only a commit publishes."""


class BatchWriter(DataSourceArrowWriter):
    """Publishes a frame: at least once, as a repeated task publishes again; with txnAppId exactly once.

    Args:
        options: the options of the write.
        schema: the schema of the frame.
        overwrite: set by Spark in mode "overwrite".

    Raises:
        ArgumentError: the frame's columns or the mode are not supported.
    """

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise ArgumentError('smq appends to a journal and never replaces it: use mode("append").')
        check_schema(schema)
        self.options = options

    @without_traceback
    def write(self, iterator: Iterator[RecordBatch]) -> TaskCommit:
        target, app_id = _target(self.options), self.options.app_id
        if not app_id:
            for batch in iterator:
                commit.publish(target, list(records([batch])), retry_s=self.options.retry_s)
            return TaskCommit()
        # Sorted rows are divided into parts by their content, so a repeated write has the same parts.
        rows = records(iterator)
        if (first := next(rows, None)) is None:
            return TaskCommit()
        if (context := TaskContext.get()) and context.partitionId():
            raise ArgumentError(_UNSORTED)
        for number, (name, part) in enumerate(commit.sorted_parts(app_id, check_order(chain([first], rows)))):
            status.crash_at("before_part", number, of_worker=True)
            commit.commit(target, name, self.options.version, part, retry_s=self.options.retry_s)
        return TaskCommit()

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: the tasks have published everything."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: messages that tasks have published stay published."""
