"""Databases: statements, rows for Lua, cursors, transactions, and calls that wait their turn."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.apps.lua import sqlite
from smqrt.apps.lua.sqlite import (
    Connection,
    Database,
    Rows,
    SqlFailure,
    SqlScript,
    failure_of,
    full_path,
    put_row,
    quoted,
    sql_text,
    statements,
    text_of,
)
from smqrt.broker.deferred import Deferred
from smqrt.loop.scheduling import Deadlines
from tests.support.waiting import wait_until


def test_statements_are_split_in_linear_time() -> None:
    assert list(statements("a;b';'; c")) == ["a;", "b';';", " c"]
    for hostile in ("'" * 99_999, "/*" * 99_999, ";" * 99_999, "[" * 99_999, "CREATE TRIGGER " + "; END x" * 30_000):
        began_s = time.thread_time()
        assert sum(map(len, statements(hostile))) >= 99_990
        assert time.thread_time() - began_s < 2


def test_a_trigger_is_one_statement() -> None:
    trigger = "CREATE TEMP TRIGGER x AFTER INSERT ON t BEGIN DELETE FROM t; SELECT CASE 1 WHEN 1 THEN 2 END; END;"
    assert list(statements(f"{trigger} SELECT 1")) == [trigger, " SELECT 1"]
    assert list(statements('/* a; */ -- b;\nSELECT [x;], `y;`, "z;"; ')) == ['/* a; */ -- b;\nSELECT [x;], `y;`, "z;";']


def test_a_script_repeats_what_has_not_run() -> None:
    script = SqlScript(b"one; two")
    assert [script.next_statement(), script.next_statement()] == ["one;", "one;"]
    script.is_done = True
    assert script.next_statement() == " two"
    script.is_done = True
    assert script.next_statement() is None


@pytest.mark.parametrize(
    ("number", "text"),
    [(7, b"7"), (-1, b"-1"), (1.0, b"1.0"), (0.1, b"0.1"), (1e20, b"1.0e+20"), (1.5e-9, b"1.5e-09"), (-9e999, b"-Inf")],
)  # fmt: skip
def test_numbers_have_the_text_of_sqlite(number: float, text: bytes) -> None:
    assert text_of(number) == text


def test_a_row_has_lengths_and_texts() -> None:
    parts: list[bytes] = []
    size = put_row(parts, (None, b"", b"ab", 5, b"x" * 300))
    texts = b"\1\0\0\0\0\1\2\0\0\0ab\1\1\0\0\x005\1\x2c\1\0\0" + b"x" * 300
    assert b"".join(parts) == b"\0\0" + texts
    assert 300 < size < 320
    parts.clear()
    put_row(parts, (b"", b"ab", 2.5))
    assert b"".join(parts) == b"\1\0\0\0\0\2\0\0\0ab\3\0\0\x002.5"


@pytest.mark.parametrize("text", [b"it's", b"", b"\xff'", b"a\0b", "ä".encode()])
def test_any_text_comes_back_from_its_literal(text: bytes) -> None:
    database = Database(":memory:")
    database.open()
    rows = database.execute(b"SELECT " + quoted(text))
    assert isinstance(rows, Rows)
    assert rows.packed.endswith(b"\1" + len(text).to_bytes(4, "little") + text)
    assert sql_text(b"SELECT 'it''s \xe9'") == "SELECT CAST(X'" + b"it's \xe9".hex() + "' AS TEXT)"
    database.close()


def test_errors_have_the_primary_code_of_sqlite(database: Database) -> None:
    database.execute(b"CREATE TABLE t(a UNIQUE)")
    codes = []
    for sql in (b"SELEC", b"INSERT INTO t VALUES(1), (1)", b"SELECT ?"):
        with pytest.raises(sqlite3.Error) as error:
            database.execute(sql)
        failure = failure_of(error.value)
        assert isinstance(failure, SqlFailure)
        codes.append(failure.code)
    assert codes == ["ERROR", "CONSTRAINT", "ERROR"]
    assert getattr(failure_of(MemoryError()), "code", "") == "NOMEM"
    fault = LookupError("of the program")
    assert failure_of(fault) is fault


@pytest.fixture
def database() -> Iterator[Database]:
    database = Database(":memory:")
    database.open()
    yield database
    database.close()


NUMBERS = b"WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < %d) SELECT x FROM n"


def test_rows_come_in_portions(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "PORTION_ROWS", 2)
    rows = database.execute(NUMBERS % 3)
    assert isinstance(rows, Rows)
    assert (rows.columns, rows.cursor > 0) == (1, True)
    rest = database.fetch(rows.cursor)
    assert (rest.columns, rest.packed, rest.cursor) == (0, b"\1\1\0\0\x003", 0)
    with pytest.raises(KeyError):
        database.fetch(rows.cursor)


def test_open_cursors_are_bounded(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "PORTION_ROWS", 1)
    monkeypatch.setattr(sqlite, "MAX_CURSORS", 2)
    numbers = [rows.cursor for _ in range(2) if isinstance(rows := database.execute(NUMBERS % 9), Rows)]
    with pytest.raises(SqlFailure, match="2 cursors of this connection are open") as failure:
        database.execute(b"SELECT 1")
    assert failure.value.code == "NOMEM"
    database.drop(numbers[0])
    database.drop(numbers[0])
    database.execute(b"SELECT 1")


def test_parameters_are_counted_without_running(database: Database) -> None:
    database.execute(b"CREATE TABLE t(a)")
    assert database.prepare(b"INSERT INTO t VALUES(?), (?); DELETE FROM t WHERE a = ?") == 2
    assert database.prepare(b"DELETE FROM t") == 0
    assert database.execute(b"SELECT * FROM t").packed == b"\1\1\0\0\0a"  # type: ignore[union-attr]


def test_types_of_columns_are_those_declared(database: Database) -> None:
    database.execute(b"CREATE TABLE t(a VARCHAR(20), b)")
    for _ in range(2):
        assert database.column_types(b"SELECT a, b, 1 FROM t") == b"\1\x0b\0\0\0VARCHAR(20)\1\0\0\0\0\1\0\0\0\0"
    assert database.column_types(b"DELETE FROM t") == b""
    assert database.tables() == b"\1\1\0\0\0t"


def test_leaving_manual_mode_rolls_back(database: Database) -> None:
    def rows() -> int:
        found = database.execute(b"SELECT a FROM t")
        assert isinstance(found, Rows)
        return found.packed.count(b"\1\1\0\0\x001")

    database.execute(b"CREATE TABLE t(a)")
    database.manual(True, "DEFERRED")
    database.execute(b"INSERT INTO t VALUES(1)")
    database.end("COMMIT", "DEFERRED")
    database.execute(b"INSERT INTO t VALUES(1)")
    assert rows() == 2
    database.manual(False, "DEFERRED")
    assert rows() == 1
    with pytest.raises(sqlite3.OperationalError, match="no transaction is active"):
        database.end("COMMIT", "DEFERRED")


def test_a_statement_with_a_lock_may_not_wait(tmp_path: Path) -> None:
    """Two connections that wait for each other's lock would wait for ever; a COMMIT may wait for readers."""
    database = Database(str(tmp_path / "a.db"))
    database.open()
    database.execute(b"CREATE TABLE t(a)")
    assert database.may_wait
    database.execute(b"BEGIN")
    assert database.may_wait
    database.execute(b"INSERT INTO t VALUES(1)")
    database.execute(b"INSERT INTO t VALUES(2)")
    assert not database.may_wait
    database.execute(b" commit")
    assert database.may_wait
    database.close()


def test_a_file_that_must_exist_is_not_made(tmp_path: Path) -> None:
    database = Database(str(tmp_path / "none ?#.db"), "ro")
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        database.open()
    assert list(tmp_path.iterdir()) == []
    assert (full_path("a.db", "/home"), full_path("/x/a.db", "/home")) == ("/home/a.db", "/x/a.db")
    assert (full_path("", "/home"), full_path(":memory:", "/home")) == ("", ":memory:")


class Held:
    """Threads whose jobs run when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Deferred[Any], Callable[[], Any]]] = []

    def submit(self, group: object, function: Callable[..., Any], *args: Any) -> Deferred[Any]:
        answer: Deferred[Any] = Deferred()
        self.jobs.append((answer, lambda: function(*args)))
        return answer

    def run(self) -> None:
        answer, job = self.jobs.pop(0)
        try:
            answer.resolve(job())
        except Exception as error:
            answer.reject(error)


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def connect(tmp_path: Path, held: Held) -> Iterator[Callable[[], Connection]]:
    deadlines = Deadlines()
    ended: list[object] = []
    yield lambda: Connection(
        Database(str(tmp_path / "a.db")),
        held,
        "group",
        deadlines,
        lambda: ended.append(1),  # type: ignore[arg-type]
    )
    deadlines.close()


def outcome(job: Deferred[Any]) -> list[object]:
    told: list[object] = []
    job.then(lambda value, error: told.append(value if error is None else getattr(error, "code", error)))
    return told


def test_calls_of_a_connection_run_in_order(connect: Callable[[], Connection], held: Held) -> None:
    connection = connect()
    first, second = outcome(connection.call("execute", b"CREATE TABLE t(a)")), outcome(connection.call("tables"))
    cancelled = connection.call("execute", b"DROP TABLE t")
    cancelled.cancel()
    assert len(held.jobs) == 1
    held.run()
    assert (first, second) == ([0], [])
    held.run()
    assert second == [b"\1\1\0\0\0t"]
    assert held.jobs == []
    closed = connection.shut()
    assert connection.is_closed
    assert connection.shut() is closed
    held.run()
    assert closed.done


def test_a_locked_database_is_tried_again_until_the_timeout(
    connect: Callable[[], Connection], held: Held, tmp_path: Path
) -> None:
    connection = connect()
    with sqlite3.connect(tmp_path / "a.db", isolation_level=None) as other:
        other.execute("CREATE TABLE t(a)")
        other.execute("BEGIN IMMEDIATE")
        told = outcome(connection.call("execute", b"INSERT INTO t VALUES(1)"))
        held.run()
        assert told == []
        wait_until(lambda: bool(held.jobs))
        other.execute("COMMIT")
        held.run()
        assert told == [1]
        other.execute("BEGIN IMMEDIATE")
        connection.busy_timeout_s = 0
        told = outcome(connection.call("execute", b"INSERT INTO t VALUES(1)"))
        held.run()
        assert told == ["BUSY"]
        other.execute("ROLLBACK")
    connection.shut()
    held.run()


def test_the_end_of_the_application_rejects_what_waits(connect: Callable[[], Connection], held: Held) -> None:
    connection = connect()
    running, waiting = outcome(connection.call("tables")), outcome(connection.call("tables"))
    closing = gevent.spawn(connection.close)
    gevent.sleep(0)
    assert (running, waiting) == ([], ["INTERRUPT"])
    held.run()
    assert len(running) == 1
    held.run()
    closing.get(timeout=5)
    assert not connection.database.is_open
