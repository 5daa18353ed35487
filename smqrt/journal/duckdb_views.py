"""DuckDB views of a journal: `messages` for all rows, `compacted` for the compacted files.

DuckDB itself reads the Parquet files of the manifest, and only the columns and pages that a query needs. Rows that are
not compacted, and all rows of a remote journal, are a stream of Arrow batches. A few of them are in memory at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smqrt.errors import JournalError
from smqrt.journal import parquet_files, tables
from smqrt.journal.planning import PARQUET, Chunk, Filter
from smqrt.journal.reader import Journal, Offsets
from smqrt.journal.record import COLUMNS
from smqrt.journal.remote import RemoteJournal

if TYPE_CHECKING:
    import pyarrow as pa

NEEDS_DUCKDB = "DuckDB is not installed: pip install 'smqrt[query]', or use Spark with --spark."
BATCH_ROWS = 8192
"""Number of rows of a result batch, which has 512 MB with the longest payloads."""

_COLUMNS = ", ".join(tables.NAMES)
_TEXT = "try(decode(payload))"
_LENIENT = r"'(?:^|[:,\[])\s*-?[nN][aA]|(?:^|[:,\[])\s*-?[iI]|,\s*[\]\x7d]'"
"""Text outside of strings that DuckDB accepts as JSON, though it is invalid: NaN, Infinity, trailing commas."""
_STRING = r"""'"(?:[^"\\]|\\.)*"'"""
_JSON = (
    f"case when regexp_matches(text, {_LENIENT}) "
    f"and regexp_matches(regexp_replace(text, {_STRING}, '\"\"', 'gs'), {_LENIENT}) "
    "then null else try_cast(text as json) end"
)
_VIEW = (
    "create or replace view {name} as "
    f"select *, {_JSON} as json from (select {_COLUMNS}, {_TEXT} as text from ({{rows}}))"
)


class DuckDB:
    """A DuckDB connection with the views of a journal.

    Args:
        journal: the journal.
        start, end: the range of rows by node; `end` is exclusive.
        topics: patterns of the topics in the views; None for all rows, also messages to one client.

    Raises:
        JournalError: DuckDB is missing, or the journal can't be read.
        ImportError: pyarrow is missing.
    """

    def __init__(self, journal: Journal, start: Offsets, end: Offsets, topics: Sequence[str] | None = None) -> None:
        self._journal, self._range = journal, (start, end)
        self._topics = Filter(topics) if topics else None
        try:
            import duckdb
        except ImportError:
            raise JournalError(NEEDS_DUCKDB) from None
        self._duckdb: Any = duckdb
        self._connection = self._duckdb.connect()
        self._connection.execute("set timezone = 'UTC'; set enable_progress_bar = true")
        self._connection.execute("set enable_progress_bar_print = false; set progress_bar_time = 0")
        self._files: list[Path] = []
        self._compacted_rows = 0
        self._thread = ThreadPoolExecutor(1, "journal")
        self._stream = _Stream(journal, [], None, self._thread)

    def __enter__(self) -> DuckDB:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stream.stopped = True
        self._connection.close()
        self._thread.shutdown()

    def run(self, sql: str) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Run SQL statements.

        Args:
            sql: one or more statements; the last one returns the rows.

        Returns:
            A pyarrow.Schema, and an iterator of pyarrow.RecordBatches.

        Raises:
            JournalError: the SQL is invalid, or the journal is damaged. The iterator raises this, too.
        """
        try:
            found = self._execute(sql)
        except JournalError:
            if all(path.exists() for path in self._files):
                raise
            found = self._execute(sql)  # files were merged meanwhile: the second call plans again
        return found.schema, self._batches_of(found)

    def cancel(self) -> None:
        """Cancel the running query; its thread gets a JournalError."""
        self._stream.stopped = True
        with suppress(self._duckdb.Error):  # the query has ended meanwhile
            self._connection.interrupt()

    def share(self) -> float:
        """Return the approximate completed share of the query, from 0 to 1."""
        compacted = max(0.0, self._connection.query_progress()) / 100 * self._compacted_rows
        return float(min(1.0, (compacted + self._stream.read_rows) / max(1, self._compacted_rows + self._stream.rows)))

    def _batches_of(self, batches: Any) -> Iterator[Any]:
        while (batch := self._checked_call(lambda: next(batches, None))) is not None:
            yield batch

    def _checked_call(self, work: Any) -> Any:
        """Call a function; turn an error of DuckDB into a JournalError."""
        try:
            return work()
        except (self._duckdb.Error, OSError, ValueError) as error:  # the last two are pyarrow's
            if self._stream.error:
                raise self._stream.error from None
            if not all(path.exists() for path in self._files):
                raise JournalError(
                    "Compacted files were merged or have expired during the query: run it again."
                ) from None
            raise JournalError(_error_message(error)) from None

    # ---- views

    def _execute(self, sql: str) -> Any:
        """Create the views for the current files, and return a reader of the query's batches."""
        parts = self._journal.plan(*self._range, topics=self._topics, max_rows=1 << 62)  # one task
        chunks = [chunk for part in parts for chunk in part]
        native = [] if isinstance(self._journal, RemoteJournal) else [one for one in chunks if one.kind == PARQUET]
        self._files = [self._journal.path / chunk.file for chunk in native]
        self._compacted_rows = sum(chunk.rows for chunk in native)
        self._stream = _Stream(
            self._journal, [one for one in chunks if one not in set(native)], self._topics, self._thread
        )
        self._checked_call(lambda: self._connection.register("smqrt_stream", self._stream))  # may be canceled already
        missing = self._missing_columns()
        rows = f"(select *{missing} from {self._parquet(False)})"
        selects = [f"select {_COLUMNS} from {rows} where {self._where(native)}"] if native else []
        selects.append(f"select {_COLUMNS} from smqrt_stream")
        self._checked_call(
            lambda: self._connection.execute(_VIEW.format(name="messages", rows=" union all ".join(selects)))
        )
        compacted = (
            f"select *{missing} from {self._parquet(True)} where {self._where(native)}"
            if native
            else f"select {_COLUMNS} from smqrt_stream where false"
        )
        self._checked_call(lambda: self._connection.execute(f"create or replace view compacted as {compacted}"))
        relation = self._checked_call(lambda: self._connection.sql(sql))
        if relation is None:
            raise JournalError("There is no SQL: write a query, such as select count(*) from messages.")
        return self._checked_call(lambda: relation.to_arrow_reader(BATCH_ROWS))

    def _missing_columns(self) -> str:
        """Return SQL for the columns that no compacted file has, because all are older than them: null."""
        if not self._files:
            return ""
        newest = self._checked_call(lambda: parquet_files.plain_schema(self._files[-1]))
        if tables.NAMES[-1] in newest.names:  # usually; otherwise all footers are read
            return ""
        found = self._checked_call(lambda: self._connection.sql(f"select * from {self._parquet(False)}").columns)
        return "".join(f", null::{one.type} as {one.name}" for one in COLUMNS if one.name not in found)

    def _parquet(self, folders: bool) -> str:
        """Return the table function for the compacted files; `folders`: with the columns of their folder names."""
        escaped = (re.sub(r"([*?\[])", r"[\1]", str(path)) for path in self._files)  # a path may have wildcards
        names = ", ".join(map(_quoted, escaped))
        return f"read_parquet([{names}], union_by_name = true, hive_partitioning = {str(folders).lower()})"

    def _where(self, chunks: Iterable[Chunk]) -> str:
        """Return the condition for the rows of a plan, since a file may have more rows."""
        bounds: dict[str, tuple[int, int]] = {}
        for chunk in chunks:
            first, last = bounds.get(chunk.node, (chunk.start, chunk.end))
            bounds[chunk.node] = min(first, chunk.start), max(last, chunk.end)
        ranges = (
            f"(node = {_quoted(node)} and seq >= {first} and seq < {last})" for node, (first, last) in bounds.items()
        )
        where = f"({' or '.join(ranges)})"
        if self._topics is None:
            return where
        if (names := self._topics.literal()) is not None:
            return f"{where} and topic in ({', '.join(map(_quoted, names))})"
        return f"{where} and regexp_full_match(topic, {_quoted(self._topics.regex())}, 's')"


class _Stream:
    """A stream of rows for DuckDB, which reads it once for each use of the view in the SQL.

    Args:
        journal: the journal.
        chunks: the rows to read, from a plan.
        topics: their topics.
        thread: the thread that reads.

    Attributes:
        rows: number of rows.
        read_rows: number of rows that were read.
        stopped: whether reading was canceled.
        error: an error of the journal.
    """

    def __init__(self, journal: Journal, chunks: Sequence[Chunk], topics: Filter | None, thread: Executor) -> None:
        self._journal, self._chunks, self._topics, self._thread = journal, chunks, topics, thread
        self.rows = sum(chunk.rows for chunk in chunks)
        self.read_rows = 0
        self.stopped = False
        self.error: JournalError | None = None

    def __arrow_c_schema__(self) -> Any:
        return tables.schema().__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        import pyarrow

        reader = pyarrow.RecordBatchReader.from_batches(tables.schema(), self._batches())
        return reader.__arrow_c_stream__(requested_schema)

    def _batches(self) -> Iterator[Any]:
        """Read in one thread: DuckDB calls this in its own threads, where LuaJIT must not run."""
        batches = self._read()
        while (batch := self._thread.submit(next, batches, None).result()) is not None:
            yield batch

    def _read(self) -> Iterator[Any]:
        try:
            for chunk in self._chunks:
                for batch in self._journal.tables(chunk, topics=self._topics):
                    if self.stopped:
                        return
                    yield batch
                    self.read_rows += batch.num_rows
        except JournalError as error:
            self.error = error
            raise


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


_NO_TABLE = re.compile(r"Table with name (\S+) does not exist")


def _error_message(error: Exception) -> str:
    """Return DuckDB's error message as one line, without the quoted position in the SQL."""
    if missing := _NO_TABLE.search(str(error)):
        return (
            f"There is no table or view {missing[1]}: the messages of the journal are in the view messages, those of "
            "its compacted files also in compacted."
        )
    lines = str(error).partition("\n\nLINE ")[0].split("\n")
    return " ".join(line.strip() for line in lines if line.strip()).rstrip(".") + "."
