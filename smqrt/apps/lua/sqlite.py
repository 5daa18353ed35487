"""SQLite databases whose statements run in threads.

The statements of a connection run one at a time. The module uses Python's `sqlite3`, as Python applications do. Another
copy of SQLite in the process, such as that of apsw, would break the locks of files that both have open
(https://sqlite.org/howtocorrupt.html, "multiple copies").
"""

from __future__ import annotations

import itertools
import os
import re
import sqlite3
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any
from urllib.parse import quote

from gevent import get_hub

from smqrt.broker.deferred import Deferred
from smqrt.loop import greenlets
from smqrt.loop.scheduling import NEVER, Deadlines
from smqrt.loop.threads import Threads

Value = None | int | float | str | bytes
Parameters = Sequence[Value] | Mapping[str, Value]

MAX_ROW_BYTES = 16 << 20
"""Copying such a row to Lua blocks the loop for 10 ms."""
MAX_SQL_BYTES = 4 << 20
MAX_CURSORS = 1000
"""Cursors of one connection that are not read to the end."""
STATEMENT_S = 300.0
"""Maximum duration of a statement, or of reading a portion of its rows."""
PORTION_BYTES, PORTION_ROWS = 64 << 10, 500
"""Rows are read in portions, since a call in a thread costs about 40 us."""
BUSY_DELAYS_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025)
"""Waits between attempts at a locked database; the last one repeats."""
BUSY_TIMEOUT_S = 1.0
"""The default; without a timeout, a reader would fail during the commit of another connection."""
CACHED_STATEMENTS = 64

_CODE_NAMES = """
    ABORT AUTH BUSY CANTOPEN CONSTRAINT CORRUPT EMPTY ERROR FORMAT FULL INTERNAL INTERRUPT IOERR LOCKED MISMATCH MISUSE
    NOLFS NOMEM NOTADB NOTFOUND PERM PROTOCOL RANGE READONLY SCHEMA TOOBIG"""
_CODES: dict[int, str] = {getattr(sqlite3, f"SQLITE_{name}"): name for name in _CODE_NAMES.split()}
_FAULTS = (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError)
_COMMIT = re.compile(r"\s*(?:commit|end)\b", re.IGNORECASE)
_TEXT = re.compile(rb"'[^']*(?:''[^']*)*'")
_BINDINGS = re.compile(r"uses (\d+)")
_SEVERAL_STATEMENTS = "You can only execute one statement"  # beginning of a message of `sqlite3`


class SqlFailure(Exception):
    """A statement failed.

    Attributes:
        code: the primary result code of SQLite without its prefix, such as "BUSY".
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def failure_of(error: BaseException) -> BaseException:
    """Return an exception of `sqlite3` as a `SqlFailure`, other exceptions unchanged."""
    if isinstance(error, MemoryError):
        return SqlFailure("NOMEM", "out of memory")
    if not isinstance(error, _FAULTS):
        return error
    is_long = isinstance(error, sqlite3.DataError)  # raised by Python, without a code
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_TOOBIG if is_long else sqlite3.SQLITE_ERROR)
    return SqlFailure(_CODES.get(code & 0xFF, "ERROR"), str(error))


def sql_text(sql: bytes) -> str:
    """Return a statement as str; text literals that are not UTF-8 keep their bytes."""
    try:
        return sql.decode("utf-8")
    except UnicodeDecodeError:
        literals = _TEXT.sub(lambda found: quoted(found[0][1:-1].replace(b"''", b"'")), sql)
        return literals.decode("utf-8", "replace")


def quoted(text: bytes) -> bytes:
    """Return a string as a SQL literal; any bytes are allowed."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return b"CAST(X'%b' AS TEXT)" % text.hex().encode()
    if b"\0" in text:
        return b"CAST(X'%b' AS TEXT)" % text.hex().encode()
    return b"'%b'" % text.replace(b"'", b"''")


# ---- encoding of rows for Lua

_LENGTHS = [length.to_bytes(4, "little") for length in range(257)]
_WITH_NULLS, _PLAIN, _NULL, _VALUE = b"\0", b"\1", b"\0", b"\1"


def text_of(value: int | float) -> bytes:
    """Return the text of a number in SQLite's format."""
    if type(value) is int:
        return b"%d" % value
    digits = b"%.15g" % value
    if b"." in digits and b"e" not in digits:
        return digits
    text = digits.decode()
    if text in ("inf", "-inf"):
        return text.title().encode()
    mantissa, mark, exponent = text.partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}{mark}{exponent}".encode()


def put_row(parts: list[bytes], row: Sequence[Value | bytes]) -> int:
    """Append a row to `parts`: the byte 1, then for each value its length (4 bytes, little endian) and its text.

    With NULLs, the row begins with the byte 0, and each value with the byte 1 (a text follows) or 0 (NULL).

    Returns:
        The approximate size in bytes.
    """
    size = 1
    has_nulls = None in row
    parts.append(_WITH_NULLS if has_nulls else _PLAIN)
    for value in row:
        if has_nulls:
            parts.append(_NULL if value is None else _VALUE)
            if value is None:
                continue
        if type(value) is not bytes:
            value = text_of(value)  # type: ignore[arg-type]
        length = len(value)
        size += length + 1
        parts += _LENGTHS[length] if length < 257 else length.to_bytes(4, "little"), value
    return size


# ---- code that runs in threads


class Rows:
    """The result of a statement, or a further portion of it.

    Attributes:
        columns: the number of columns; 0 for a further portion.
        packed: the names of the columns, except in a further portion, then rows; see `put_row`.
        cursor: number of the cursor that returns the next portion; 0 for none.
    """

    __slots__ = ("columns", "cursor", "packed")

    def __init__(self, columns: int, packed: bytes, cursor: int) -> None:
        self.columns, self.packed, self.cursor = columns, packed, cursor


class Database:
    """A database. Its methods block, and only one thread at a time may call them, except `interrupt`.

    Args:
        path: the file, created if it does not exist; ":memory:" for a database in memory.
        mode: "ro" or "rw" to open only an existing file.

    Attributes:
        is_open: whether it is open.
        may_wait: whether a statement that found the database locked may wait. As in SQLite, it may not when the
            connection already has a lock: two such connections could wait for each other forever.
    """

    def __init__(self, path: str, mode: str = "") -> None:
        self._path, self._mode = path, mode
        self._connection: sqlite3.Connection
        self._cursors: dict[int, sqlite3.Cursor] = {}
        self._numbers = itertools.count(1)
        self._is_manual = False
        self._has_lock = False
        self.is_open = False
        self.may_wait = False

    def open(self) -> None:
        """Open the database if it is not open."""
        if self.is_open:
            return
        name = f"file:{quote(self._path)}?mode={self._mode}" if self._mode else self._path
        self._connection = sqlite3.connect(
            name,
            timeout=0,  # `Connection` waits for locks in the event loop, not in a thread
            isolation_level=None,  # no implicit transactions of Python
            check_same_thread=False,  # jobs run in any thread, one at a time
            cached_statements=CACHED_STATEMENTS,
            uri=bool(self._mode),
        )
        self._connection.text_factory = bytes  # text of applications need not be UTF-8
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_ROW_BYTES)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_SQL_BYTES)
        self.is_open = True

    def interrupt(self) -> None:
        """Abort the running statement, which then fails with INTERRUPT. Callable from any thread."""
        if self.is_open:
            with suppress(sqlite3.ProgrammingError):  # closed meanwhile
                self._connection.interrupt()

    def close(self) -> None:
        """Close the database and its cursors; an open transaction is rolled back."""
        if not self.is_open:
            return
        self.is_open = False
        for cursor in self._cursors.values():
            cursor.close()
        self._cursors.clear()
        self._connection.close()

    def execute(self, sql: bytes, parameters: Parameters = ()) -> Rows | int:
        """Run the first statement of a string; return its rows if it has columns, else the number of changed rows."""
        if len(self._cursors) >= MAX_CURSORS:
            raise SqlFailure("NOMEM", f"{MAX_CURSORS} cursors of this connection are open; close some of them")
        text = sql_text(sql)
        cursor, before = self._run(text, parameters)
        if cursor.description is None:
            changed = cursor.rowcount  # -1 for other statements than INSERT, UPDATE, DELETE and REPLACE
            return changed if changed >= 0 else self._connection.total_changes - before
        names = [column[0].encode("utf-8", "surrogateescape") for column in cursor.description]
        parts: list[bytes] = []
        put_row(parts, names)
        return Rows(len(names), *self._portion(0, cursor, parts))

    def _run(self, text: str, parameters: Parameters = ()) -> tuple[sqlite3.Cursor, int]:
        connection, cursors = self._connection, self._cursors
        was_inside = connection.in_transaction
        self.may_wait = not (was_inside and self._has_lock or cursors) or _COMMIT.match(text) is not None
        before = connection.total_changes
        cursor = self._first_of(text, parameters)
        self._has_lock = was_inside and connection.in_transaction
        return cursor, before

    def _first_of(self, text: str, parameters: Parameters = ()) -> sqlite3.Cursor:
        """Run the first statement of a string; ignore the others, as `sqlite3_prepare` does."""
        try:
            return self._connection.execute(text, parameters)
        except sqlite3.ProgrammingError as error:  # raised before anything has run
            if not str(error).startswith(_SEVERAL_STATEMENTS):
                raise
        first = next(one for one in statements(text) if one.strip("; \t\r\n"))
        return self._connection.execute(first, parameters)

    def fetch(self, number: int) -> Rows:
        """Return the next portion of a cursor's rows."""
        self.may_wait = False
        try:
            return Rows(0, *self._portion(number, self._cursors[number], []))
        except BaseException:
            self.drop(number)
            raise

    def _portion(self, number: int, cursor: sqlite3.Cursor, parts: list[bytes]) -> tuple[bytes, int]:
        size, rows = 0, 0
        for row in cursor:
            size, rows = size + put_row(parts, row), rows + 1
            if size > MAX_ROW_BYTES + PORTION_BYTES:
                raise SqlFailure("TOOBIG", f"a row may have {MAX_ROW_BYTES >> 20} MiB")
            if size >= PORTION_BYTES or rows >= PORTION_ROWS:
                number = number or next(self._numbers)
                self._cursors[number] = cursor
                break
        else:
            self._cursors.pop(number, None)
            number = 0
        return b"".join(parts), number

    def drop(self, number: int) -> None:
        """Close a cursor."""
        if cursor := self._cursors.pop(number, None):
            cursor.close()

    def manual(self, is_manual: bool, kind: str) -> None:
        """Enter manual mode and begin a transaction of this kind, or roll back and leave manual mode."""
        if not is_manual:
            self._is_manual = False
            if self._connection.in_transaction:
                self._run("ROLLBACK")
        else:
            if not self._connection.in_transaction:
                self._run(f"BEGIN {kind}")
            self._is_manual = True

    def end(self, command: str, kind: str) -> None:
        """End the transaction with COMMIT or ROLLBACK; in manual mode begin the next one."""
        if self._connection.in_transaction or not self._is_manual:
            self._run(command)
        if self._is_manual:  # also after a failed BEGIN, which a second call repeats
            self._run(f"BEGIN {kind}")

    def prepare(self, sql: bytes) -> int:
        """Compile a statement and return the number of its parameters."""
        self.may_wait = not (self._has_lock or self._cursors)
        try:
            self._first_of(f"EXPLAIN {sql_text(sql)}").close()  # compiles the statement without running it
        except sqlite3.ProgrammingError as error:
            found = _BINDINGS.search(str(error))  # Python has no other interface for this number
            if not found:
                raise
            return int(found[1])
        return 0

    def execute_all(self, script: SqlScript) -> None:
        """Run several statements; after one that found the database locked, a second call continues with it."""
        while (statement := script.next_statement()) is not None:
            self._run(statement)[0].close()
            script.is_done = True

    def last_id(self) -> int:
        """Return the rowid of the last inserted row."""
        row = self._connection.execute("SELECT last_insert_rowid()").fetchone()
        return int(row[0])

    def tables(self) -> bytes:
        """Return the names of the tables; see `put_row`."""
        self.may_wait = not (self._has_lock or self._cursors)
        parts: list[bytes] = []
        query = (
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY 1"
        )
        for row in self._connection.execute(query):
            put_row(parts, row)
        return b"".join(parts)

    def column_types(self, sql: bytes) -> bytes:
        """Return the declared type of each column of a query, empty for expressions; see `put_row`.

        `sqlite3` has no function for this, but SQLite lists the columns of a view with the same query.
        """
        parts: list[bytes] = []
        try:
            self._first_of(f"CREATE TEMP VIEW smqrt_columns AS {sql_text(sql)}")
        except _FAULTS:
            return b""  # not a query, or a query with parameters
        try:
            for row in self._connection.execute("PRAGMA temp.table_info(smqrt_columns)"):
                put_row(parts, row[2:3])
        finally:
            self._connection.execute("DROP VIEW temp.smqrt_columns")
        return b"".join(parts)


class SqlScript:
    """A text of several statements, some of which have run.

    Attributes:
        is_done: whether the statement that `next_statement` returned has run.
    """

    def __init__(self, sql: bytes) -> None:
        self._statements = statements(sql_text(sql))
        self._last: str | None = None
        self.is_done = True

    def next_statement(self) -> str | None:
        """Return the next statement, or the previous one if it has not run; None at the end."""
        if self.is_done:
            self._last, self.is_done = next(self._statements, None), False
        return self._last


_TOKEN = re.compile(
    r"""'[^']*(?:''[^']*)*(?:'|\Z) | "[^"]*(?:""[^"]*)*(?:"|\Z) | `[^`]*(?:`|\Z) | \[[^\]]*(?:\]|\Z)
    | --[^\n]* | /\*[^*]*(?:\*(?!/)[^*]*)*(?:\*/|\Z) | \w+ | ;""",
    re.VERBOSE | re.DOTALL,
)


def statements(text: str) -> Iterator[str]:
    """Yield the statements of a string; a CREATE TRIGGER statement ends with "; END;"."""
    begin, last = 0, ""
    words: list[str] = []
    for found in _TOKEN.finditer(text):
        token = found[0]
        if token.startswith(("--", "/*")):
            continue
        if token == ";":
            is_trigger = words[:2] == ["CREATE", "TRIGGER"] or (words[:1] == ["CREATE"] and words[2:3] == ["TRIGGER"])
            if not is_trigger or last == "; END":
                yield text[begin : found.end()]
                begin, words, last = found.end(), [], ""
                continue
        if len(words) < 4:  # CREATE [TEMP] TRIGGER
            words.append(token.upper())
        last = f"; {token.upper()}" if last == ";" else ";" if token == ";" else ""
    if text[begin:].strip():
        yield text[begin:]


# ---- code that runs in the event loop


class SqlJob(Deferred[Any]):
    """A call of a connection, rejected with a `SqlFailure`. Cancelling it aborts its statement."""

    __slots__ = ("arguments", "attempts", "connection", "function", "give_up_s", "is_running")

    def __init__(self, connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.connection, self.function, self.arguments = connection, function, arguments
        self.attempts, self.give_up_s, self.is_running = 0, 0.0, False

    def _release(self) -> None:
        if self.is_running:
            self.connection.end_current()


class Connection:
    """Runs the calls of a database in threads, in order; the first call opens the database.

    Args:
        database: the database.
        threads: the threads.
        group: the owner of the connection, see `Threads`.
        deadlines: aborts statements that take too long.
        on_closed: called after the database is closed.

    Attributes:
        busy_timeout_s: seconds that a statement waits for a locked database.
    """

    def __init__(
        self,
        database: Database,
        threads: Threads,
        group: Hashable,
        deadlines: Deadlines[Any],
        on_closed: Callable[[], object],
    ) -> None:
        self.database = database
        self._threads, self._group, self._deadlines, self._on_closed = threads, group, deadlines, on_closed
        self._jobs: deque[SqlJob] = deque()
        self._current: SqlJob | None = None
        self._timer: Any = None
        self._closed: Deferred[None] | None = None
        self.deadline_s = NEVER
        self.busy_timeout_s = BUSY_TIMEOUT_S

    @property
    def is_closed(self) -> bool:
        """Whether `shut` or `close` was called."""
        return self._closed is not None

    def call(self, method: str, *arguments: object) -> SqlJob:
        """Call a method of the database in a thread."""
        job = SqlJob(self, getattr(self.database, method), arguments)
        self._jobs.append(job)
        if self._current is None:
            self._next()
        return job

    def drop_cursor(self, number: int) -> None:
        """Close a cursor after the calls before it."""
        if not self.is_closed:
            self.call("drop", number)

    def shut(self) -> Deferred[None]:
        """Close the database after the calls before it."""
        if self._closed is None:
            closed = self._closed = Deferred()

            def ended(_value: object, _error: BaseException | None) -> None:
                self._on_closed()
                closed.resolve()

            self.call("close").then(ended)
        return self._closed

    def close(self) -> None:
        """Abort all calls and close the database, when its application ends. Blocks."""
        closed, current = self.shut(), self._current
        for job in list(self._jobs):
            if job.function != self.database.close:
                job.reject(SqlFailure("INTERRUPT", "the application ends"))
        if current and current.function != self.database.close:
            self.end_current()
        greenlets.wait(closed)

    def _next(self) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            if not job.done:
                self._current, job.is_running = job, True
                now_s = monotonic()
                job.give_up_s, self.deadline_s = now_s + self.busy_timeout_s, now_s + STATEMENT_S
                self._deadlines.watch(self)
                self._post(job)
                return

    def end_current(self) -> None:
        """Abort the running statement, which then fails with INTERRUPT.

        SQLite ignores an interrupt before the start of a statement, so the deadlines repeat it until the end.
        """
        self.database.interrupt()
        self.deadline_s = monotonic()

    def expired(self) -> None:
        """Abort a statement that takes too long."""
        self.end_current()

    def _post(self, job: SqlJob) -> None:
        if job.done:  # cancelled while waiting for a lock
            self._finished(job, None, None)
            return
        answer = self._threads.submit(self._group, self._in_thread, job)
        answer.then(lambda value, error: self._finished(job, value, error))

    def _in_thread(self, job: SqlJob) -> object:
        if job.done:  # cancelled before its turn
            return None
        if job.function != self.database.close:
            self.database.open()
        return job.function(*job.arguments)

    def _finished(self, job: SqlJob, value: object, error: BaseException | None) -> None:
        if error is not None:
            error = failure_of(error)
            if self._will_wait(job, error):
                return
        self._deadlines.forget(self)
        self._current, job.is_running = None, False
        if job.done and isinstance(value, Rows) and value.cursor:
            self.drop_cursor(value.cursor)  # the job was cancelled, so its rows are never read
        if error is not None:
            job.reject(error)
        else:
            job.resolve(value)
        if self._current is None:  # the receiver of the result may have made the next call
            self._next()

    def _will_wait(self, job: SqlJob, error: BaseException) -> bool:
        """Schedule another attempt at a locked database; return False if the timeout is over or it is not locked."""
        is_busy = isinstance(error, SqlFailure) and error.code == "BUSY"
        left_s = job.give_up_s - monotonic()
        if not (is_busy and self.database.may_wait and left_s > 0) or job.done or self.is_closed:
            return False
        delay_s = BUSY_DELAYS_S[min(job.attempts, len(BUSY_DELAYS_S) - 1)]
        job.attempts += 1
        self._timer = get_hub().loop.timer(min(delay_s, left_s))
        self._timer.start(self._retry, job)
        return True

    def _retry(self, job: SqlJob) -> None:
        self._timer.close()
        self._post(job)


def full_path(path: str, home: str) -> str:
    """Return the path of a database, relative to `home`; "" and ":memory:" stay unchanged."""
    return path if path in ("", ":memory:") else os.path.join(home, path)
