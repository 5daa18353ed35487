"""SQL on a journal by DuckDB: the view `messages` of all rows, and `compacted` of the compacted files as they are.

DuckDB itself reads the Parquet files that the manifest names, and so only the columns and pages that a question needs.
Rows that are not compacted yet, and all rows of a journal on another machine, come to it as a stream of Arrow batches:
a few at a time are in memory, however many there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smqrt.errors import JournalError
from smqrt.journal import tables
from smqrt.journal.filters import Filter
from smqrt.journal.planning import PARQUET, Chunk
from smqrt.journal.reader import Journal, Offsets
from smqrt.journal.remote import RemoteJournal

if TYPE_CHECKING:
    import pyarrow as pa

NEEDS_DUCKDB = "DuckDB is not installed: pip install 'smqrt[query]', or ask Spark with --spark."
BATCH_ROWS = 8192
"""Of a result at a time: of the longest payloads they are 512 MB."""

_COLUMNS = ", ".join(tables.NAMES)
_TEXT = "try(decode(payload))"
_LENIENT = r"'(?:^|[:,\[])\s*-?[nN][aA]|(?:^|[:,\[])\s*-?[iI]|,\s*[\]\x7d]'"
"""What DuckDB takes for JSON, and nobody else does, when it is outside of texts."""
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
    """A DuckDB that knows a journal.

    Args:
        journal: the journal.
        start, end: from where to where (exclusive), by node.
        topics: patterns of the topics that the views have; None for all, also messages to one client.

    Raises:
        JournalError: DuckDB is missing, or the journal can't be read.
        ImportError: pyarrow is missing.
    """

    def __init__(self, journal: Journal, start: Offsets, end: Offsets, topics: Sequence[str] | None = None) -> None:
        self._journal, self._range = journal, (start, end)
        self._topics = Filter(topics) if topics else None
        self._duckdb = _imported()
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
        """Answer a question.

        Args:
            sql: a statement; of several the last one gives the rows.

        Returns:
            A pyarrow.Schema, and the pyarrow.RecordBatches as they come.

        Raises:
            JournalError: DuckDB can't do it, or the journal is damaged; so does the iterator.
        """
        try:
            found = self._started(sql)
        except JournalError:
            if all(path.exists() for path in self._files):
                raise
            found = self._started(sql)  # files were joined to larger ones meanwhile
        return found.schema, self._told(found)

    def cancel(self) -> None:
        """End the question under way; its thread gets a JournalError."""
        self._stream.stopped = True
        with suppress(self._duckdb.Error):  # it has ended meanwhile
            self._connection.interrupt()

    def share(self) -> float:
        """Return how much of the question is done, about: 0 to 1."""
        compacted = max(0.0, self._connection.query_progress()) / 100 * self._compacted_rows
        return float(min(1.0, (compacted + self._stream.read_rows) / max(1, self._compacted_rows + self._stream.rows)))

    def _started(self, sql: str) -> Any:
        self._plan()
        relation = self._tell(lambda: self._connection.sql(sql))
        if relation is None:
            raise JournalError("There is no SQL: write a question, such as select count(*) from messages.")
        return self._tell(lambda: relation.to_arrow_reader(BATCH_ROWS))

    def _told(self, batches: Any) -> Iterator[Any]:
        while (batch := self._tell(lambda: next(batches, None))) is not None:
            yield batch

    def _tell(self, work: Any) -> Any:
        """Do something; what DuckDB says of it becomes one sentence."""
        try:
            return work()
        except (self._duckdb.Error, OSError, ValueError) as error:  # the last two are pyarrow's
            raise self._stream.error or JournalError(self._sentence(error)) from None

    def _sentence(self, error: Exception) -> str:
        if not all(path.exists() for path in self._files):
            return "Compacted files were joined to larger ones, or expired, while the question was answered: ask again."
        return _sentence(error)

    # ---- views

    def _plan(self) -> None:
        parts = self._journal.plan(*self._range, topics=self._topics, max_rows=1 << 62)
        chunks = [chunk for part in parts for chunk in part]
        native = [] if isinstance(self._journal, RemoteJournal) else [one for one in chunks if one.kind == PARQUET]
        self._files = [self._journal.path / chunk.file for chunk in native]
        self._compacted_rows = sum(chunk.rows for chunk in native)
        self._stream = _Stream(
            self._journal, [one for one in chunks if one not in set(native)], self._topics, self._thread
        )
        self._connection.register("smqrt_stream", self._stream)
        selects = [f"select {_COLUMNS} from {self._parquet(False)} where {self._where(native)}"] if native else []
        selects.append(f"select {_COLUMNS} from smqrt_stream")
        self._tell(lambda: self._connection.execute(_VIEW.format(name="messages", rows=" union all ".join(selects))))
        compacted = (
            f"select * from {self._parquet(True)} where {self._where(native)}"
            if native
            else f"select {_COLUMNS} from smqrt_stream where false"
        )
        self._tell(lambda: self._connection.execute(f"create or replace view compacted as {compacted}"))

    def _parquet(self, folders: bool) -> str:
        names = ", ".join(_quoted(_literal(str(path))) for path in self._files)
        return f"read_parquet([{names}], union_by_name = true, hive_partitioning = {str(folders).lower()})"

    def _where(self, chunks: Iterable[Chunk]) -> str:
        """Return the rows of a plan; a file may have others."""
        bounds: dict[str, tuple[int, int]] = {}
        for chunk in chunks:
            first, last = bounds.get(chunk.node, (chunk.start, chunk.end))
            bounds[chunk.node] = min(first, chunk.start), max(last, chunk.end)
        ranges = (
            f"(node = {_quoted(node)} and seq >= {first} and seq < {last})" for node, (first, last) in bounds.items()
        )
        return f"({' or '.join(ranges)})" + self._of_topics()

    def _of_topics(self) -> str:
        if self._topics is None:
            return ""
        if (names := self._topics.literal()) is not None:
            return f" and topic in ({', '.join(map(_quoted, names))})"
        return f" and regexp_full_match(topic, {_quoted(self._topics.regex())}, 's')"


class _Stream:
    """Rows for DuckDB, which asks for them anew for each mention of the view.

    Args:
        journal, topics: where rows are, and which.
        chunks: of a plan.
        thread: the one that reads.

    Attributes:
        rows: how many there are.
        read_rows: how many were given.
        stopped: nobody wants more.
        error: what was wrong with the journal.
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
        """Return what DuckDB asks for in threads of its own, in which LuaJIT's kernel must not run."""
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


def _imported() -> Any:
    try:
        import duckdb
    except ImportError:
        raise JournalError(NEEDS_DUCKDB) from None
    return duckdb


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _literal(path: str) -> str:
    """A path in which DuckDB finds no wildcard."""
    return re.sub(r"([*?\[])", r"[\1]", path)


_NO_TABLE = re.compile(r"Table with name (\S+) does not exist")


def _sentence(error: Exception) -> str:
    """Return what DuckDB says, without the place in the text that it draws."""
    if missing := _NO_TABLE.search(str(error)):
        return (
            f"There is no table or view {missing[1]}: the messages of the journal are in the view messages, those of "
            "its compacted files also in compacted."
        )
    lines = str(error).partition("\n\nLINE ")[0].split("\n")
    return " ".join(line.strip() for line in lines if line.strip()).rstrip(".") + "."
