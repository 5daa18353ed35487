"""Rows of a frame as messages, and how a task and the driver hand them to the hub."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import commit
from smqrt.journal.commit import MAX_COMMIT_ROWS, OutRow
from smqrt.pipeline.smq_source import writing
from smqrt.pipeline.smq_source.options import WriteOptions
from smqrt.pipeline.smq_source.writing import DRIVER_BYTES, BatchWriter, StreamWriter, TaskCommit

SCHEMA = StructType().add("topic", "string").add("payload", "binary")


def batch(*rows: tuple[Any, ...], names: tuple[str, ...] = ("topic", "payload")) -> pa.RecordBatch:
    return pa.record_batch([pa.array(column) for column in zip(*rows, strict=True)], names=list(names))


class Hub:
    """What writers ask of the hub."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.published: list[list[OutRow]] = []
        self.commits: list[tuple[str, int, list[OutRow]]] = []
        self.staged: list[tuple[str, int, int]] = []
        self.sealed: list[tuple[str, int, list[str]]] = []
        for name in ("publish", "commit", "stage", "commit_staged"):
            monkeypatch.setattr(commit, name, getattr(self, name))

    def publish(self, hub: object, rows: list[OutRow], retry_s: float) -> None:
        self.published.append(rows)

    def commit(self, hub: object, query: str, number: int, rows: Iterable[OutRow], retry_s: float) -> None:
        self.commits.append((query, number, list(rows)))

    def stage(self, hub: object, query: str, number: int, rows: Iterable[OutRow], retry_s: float) -> list[str]:
        self.staged.append((query, number, len(list(rows))))
        return [f"part{len(self.staged)}"]

    def commit_staged(
        self, hub: object, query: str, number: int, parts: list[str], retry_s: float, before: object
    ) -> None:
        self.sealed.append((query, number, parts))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr(writing, "_property", {writing.QUERY_ID: "id", writing.BATCH: "7"}.__getitem__)
    return Hub(monkeypatch)


@pytest.fixture
def options(tmp_path: Path) -> WriteOptions:
    return WriteOptions(str(tmp_path))


# ---- rows


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"topic": "string"}, 'there is no "payload"'),
        ({"payload": "string"}, 'there is no "topic"'),
        ({"topic": "string", "payload": "string", "temp": "double"}, 'not "temp": put the content of the message'),
        ({"topic": "string", "payload": "double"}, "column payload as string or binary, not double: cast it"),
    ],
)
def test_a_frame_has_the_columns_of_messages(columns: dict[str, str], told: str) -> None:
    wrong, right = StructType(), StructType()
    for name, kind in columns.items():
        wrong.add(name, kind)
    with pytest.raises(ArgumentError, match=told):
        writing.check_schema(wrong)
    for name in ("payload", "subtopic", "topic"):
        right.add(name, "binary")
    writing.check_schema(right)


def test_texts_and_nulls_become_bytes() -> None:
    with_subtopics = batch(("t", "ä", "s"), names=("topic", "payload", "subtopic"))
    found = writing.records([batch(("tö", b"x"), ("t", None)), with_subtopics])
    assert list(found) == [("tö".encode(), None, b"x"), (b"t", None, b""), (b"t", b"s", "ä".encode())]


@pytest.mark.parametrize("topic", [None, ""])
def test_a_row_without_a_topic_is_refused(topic: str | None) -> None:
    with pytest.raises(ArgumentError, match="a row whose topic is null or empty: filter such rows out"):
        list(writing.records([batch(("t", b"1"), (topic, b"2"))]))


def test_rows_of_a_repeated_write_are_sorted() -> None:
    rows: list[OutRow] = [(b"\0", None, b"2"), (b"a", b"s", b"1"), (b"a", b"s", b"1"), (b"b", None, b"")]
    assert list(writing.check_order(rows)) == rows
    for wrong in (rows[::-1], [rows[1], rows[0]], [rows[3], rows[2]]):
        with pytest.raises(ArgumentError, match=r"frame\.repartition\(1\)\.sortWithinPartitions"):
            list(writing.check_order(wrong))


# ---- streams


def test_a_stream_only_appends(options: WriteOptions) -> None:
    with pytest.raises(ArgumentError, match=r'supports outputMode\("append"\)'):
        StreamWriter(options, SCHEMA, overwrite=True)
    with pytest.raises(ArgumentError, match="txnAppId and txnVersion are for write"):
        StreamWriter(WriteOptions(options.journal, app_id="a"), SCHEMA, overwrite=False)


def test_few_rows_are_sent_to_the_driver(hub: Hub, options: WriteOptions) -> None:
    writer = StreamWriter(options, SCHEMA, overwrite=False)
    assert writer.write(iter([])) == TaskCommit("id", [])
    few = writer.write(iter([batch(("t", b"1")), batch(("t", b"2"))]))
    assert (few.rows, few.parts, hub.staged) == ([(b"t", None, b"1"), (b"t", None, b"2")], (), [])
    writer.commit([few, None, TaskCommit("id"), few], 7)
    assert hub.commits == [("id", 7, [*few.rows, *few.rows])]
    assert hub.sealed == []


@pytest.mark.parametrize(("rows", "is_staged"), [(1, False), (2, True)])
def test_a_task_of_many_bytes_stages_its_rows(hub: Hub, options: WriteOptions, rows: int, is_staged: bool) -> None:
    """One row of any size is sent to the driver."""
    writer = StreamWriter(options, SCHEMA, overwrite=False)
    done = writer.write(iter([batch(*[("t", bytes(DRIVER_BYTES))] * rows)]))
    assert (len(done.rows), done.parts) == ((0, ["part1"]) if is_staged else (1, ()))
    assert hub.staged == ([("id", 7, rows)] if is_staged else [])


def test_parts_and_rows_of_tasks_are_sealed_together(hub: Hub, options: WriteOptions) -> None:
    writer = StreamWriter(options, SCHEMA, overwrite=False)
    row: OutRow = (b"t", None, b"1")
    writer.commit([TaskCommit("id", parts=["a"]), TaskCommit("id", [row]), TaskCommit("id", parts=["b"])], 8)
    assert hub.staged == [("id", 8, 1)]
    assert hub.sealed == [("id", 8, ["a", "b", "part1"])]
    writer.commit([TaskCommit("id", [row] * MAX_COMMIT_ROWS)], 9)
    assert len(hub.commits) == 1
    writer.commit([TaskCommit("id", [row] * MAX_COMMIT_ROWS), TaskCommit("id", [row])], 10)
    assert hub.staged[1:] == [("id", 10, MAX_COMMIT_ROWS + 1)]
    assert hub.sealed[1:] == [("id", 10, ["part2"])]


def test_a_micro_batch_without_results_is_no_commit(hub: Hub, options: WriteOptions) -> None:
    StreamWriter(options, SCHEMA, overwrite=False).commit([None, TaskCommit("id")], 7)
    assert (hub.commits, hub.sealed) == ([], [])


def test_a_task_without_its_query_is_an_error(options: WriteOptions) -> None:
    with pytest.raises(JournalError, match=r"Spark does not set sql\.streaming\.queryId in the task"):
        StreamWriter(options, SCHEMA, overwrite=False).write(iter([]))


# ---- batches


def test_a_frame_never_replaces_a_journal(options: WriteOptions) -> None:
    with pytest.raises(ArgumentError, match=r'never replaces it: use mode\("append"\)'):
        BatchWriter(options, SCHEMA, overwrite=True)


def test_a_frame_is_published_batch_by_batch(hub: Hub, options: WriteOptions) -> None:
    batches = [batch(("t", b"1"), ("t", b"2")), batch(("u", b"3"))]
    done = BatchWriter(options, SCHEMA, overwrite=False).write(iter(batches))
    assert done == TaskCommit()
    assert hub.published == [[(b"t", None, b"1"), (b"t", None, b"2")], [(b"u", None, b"3")]]


def test_a_repeated_write_is_a_commit_of_its_version(hub: Hub, tmp_path: Path) -> None:
    writer = BatchWriter(WriteOptions(str(tmp_path), app_id="app", version=3), SCHEMA, overwrite=False)
    assert writer.write(iter([])) == TaskCommit()
    assert hub.commits == []
    writer.write(iter([batch(("a", b"1"), ("a", b"2"))]))
    assert hub.commits == [("app", 3, [(b"a", None, b"1"), (b"a", None, b"2")])]
    with pytest.raises(ArgumentError, match="a repeated write needs the same parts"):
        writer.write(iter([batch(("b", b"1"), ("a", b"2"))]))
    many = batch(*[("a", b"%05d" % number) for number in range(MAX_COMMIT_ROWS + 1)])
    hub.commits.clear()
    writer.write(iter([many]))
    assert [(name, number, len(rows)) for name, number, rows in hub.commits] == [
        ("app.1", 3, 1),
        ("app", 3, MAX_COMMIT_ROWS),
    ]
