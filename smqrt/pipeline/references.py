"""Reference tables that streams are joined with: small files beside the pipelines.

The driver reads them and sends them with the query plan, so workers on other machines need no access to the files, and
a micro-batch reads nothing. When a file changes, `ReferenceWatch` reports a new version, and the queries that use it
are restarted from their checkpoints. That takes about a second and loses nothing.

(help: pipeline-rules)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from smqrt.errors import PipelineError
from smqrt.journal import files as locations
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.failures import first_line

if TYPE_CHECKING:
    from pyarrow import Schema, Table
    from pyspark.sql import Column, DataFrame, SparkSession


# ---- Names of columns as Spark needs them. Without quotes `service.name` is a field of a struct.


def quoted(name: str) -> str:
    """Return the name of one column in backquotes, so that dots, blanks and backquotes in it are plain characters."""
    return "`" + name.replace("`", "``") + "`"


def column(name: str) -> Column:
    """Return the column of exactly this name."""
    from pyspark.sql import functions as F

    return F.col(quoted(name))


FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
CHECK_INTERVAL_S = 1.0

Fingerprint = tuple[tuple[str, int, int, int], ...]
"""Name, inode, time of change and size of each file. It changes when the table may have changed."""


def table(spark: SparkSession, declaration: Declaration, folder: Path) -> DataFrame:
    """Read a reference.

    Args:
        spark: the session.
        declaration: a @reference; its path is a CSV file with a header, a JSON file (one object a line, or a list of
            objects), a Parquet file, or a folder of such files; Spark reads a URI such as s3a://…
        folder: the folder of pipelines, which the path is relative to.

    Returns:
        A DataFrame of its columns, or of those in the option "schema" with these types.

    Raises:
        PipelineError: the file does not exist, a column is missing, or a value has another type.
    """
    path = str(declaration.options["path"])
    if not locations.is_elsewhere(path):
        return spark.createDataFrame(_read(declaration, folder))
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise PipelineError(f"{_prefix(declaration)}: {path} must be called {', '.join(FORMATS)}.")
    reader = spark.read.format(FORMATS[suffix]).option("header", True)
    ddl = declaration.options["schema"]
    return reader.schema(ddl).load(path) if ddl else reader.option("inferSchema", True).load(path)


class ReferenceWatch:
    """Detects changes of references.

    Args:
        declarations: the references.
        folder: the folder of pipelines.
        report: called once for each change that can't be read; the rows read before stay in use.
    """

    def __init__(self, declarations: Iterable[Declaration], folder: Path, report: Callable[[str], None]) -> None:
        here = [each for each in declarations if not locations.is_elsewhere(each.options["path"])]
        self._files = {each.name: _File(each, folder) for each in here}
        self._report = report
        self._next_check_s = time.monotonic() + CHECK_INTERVAL_S

    def versions(self, names: Iterable[str]) -> list[int]:
        """Return a version number for each of these references; a new number means that it must be read again.

        Files are checked at most once a second. A change counts when the next check finds no further change, so that
        the file is complete.
        """
        if self._files and time.monotonic() >= self._next_check_s:
            self._next_check_s = time.monotonic() + CHECK_INTERVAL_S
            for file in self._files.values():
                try:
                    file.check()
                except PipelineError as error:
                    self._report(f"{error} The rows read before stay in use.")
        return [self._files[name].version for name in names if name in self._files]


class _File:
    """A watched reference and its version."""

    def __init__(self, declaration: Declaration, folder: Path) -> None:
        self._declaration, self._folder = declaration, folder
        self._used = self._seen = fingerprint(declaration, folder)
        self.version = 0

    def check(self) -> None:
        """Increase the version after a change that is complete.

        Raises:
            PipelineError: the new content can't be read.
        """
        now = fingerprint(self._declaration, self._folder)
        is_settled, self._seen = now == self._seen, now
        if is_settled and now != self._used:
            self._used = now
            _read(self._declaration, self._folder)
            self.version += 1


def fingerprint(declaration: Declaration, folder: Path) -> Fingerprint | None:
    """Return a value that changes when the files of a reference change; None when there are none."""
    try:
        stats = [(path, path.stat()) for path in _files(declaration, folder)]
    except (OSError, PipelineError):
        return None
    return tuple((path.name, stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in stats)


def _read(declaration: Declaration, folder: Path) -> Table:
    import pyarrow

    prefix, schema = _prefix(declaration), _schema(declaration)
    files = _files(declaration, folder)
    tables = []
    for path in files:
        try:
            found = _READERS[FORMATS[path.suffix.lower()]](path, schema)
            if schema is not None:
                for name in schema.names:
                    if name not in found.column_names:
                        raise ValueError(f"it has no column {name!r}; it has {', '.join(found.column_names)}.")
                found = found.select(schema.names).cast(schema)
            tables.append(found)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise PipelineError(f"{prefix}: {path} can't be read: {first_line(error)}") from None
    try:
        return pyarrow.concat_tables(tables)
    except pyarrow.ArrowException as error:
        why = f"the files in {files[0].parent} don't fit together: {first_line(error)}"
        raise PipelineError(f"{prefix}: {why}") from None


def _files(declaration: Declaration, folder: Path) -> list[Path]:
    prefix = _prefix(declaration)
    path = folder / locations.local_folder(declaration.options["path"], prefix, "Spark reads it")
    files = sorted(each for each in path.iterdir() if each.suffix.lower() in FORMATS) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise PipelineError(
            f"{prefix}: there is {'nothing in' if path.is_dir() else 'no'} {path}; "
            "a path is relative to the folder of pipelines."
        )
    if files[0].suffix.lower() not in FORMATS:
        raise PipelineError(f"{prefix}: {path} must be called {', '.join(FORMATS)}.")
    return files


def _schema(declaration: Declaration) -> Schema | None:
    if not declaration.options["schema"]:
        return None
    from pyspark.errors import ParseException
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    ddl = declaration.options["schema"]
    try:
        return to_arrow_schema(cast(StructType, StructType.fromDDL(ddl)), timezone="UTC")
    except ParseException as error:
        raise PipelineError(f"{_prefix(declaration)}: schema={ddl!r} can't be read: {first_line(error)}") from None


def _csv(path: Path, schema: Schema | None) -> Table:
    from pyarrow import csv

    types = {field.name: field.type for field in schema} if schema else None
    options = csv.ConvertOptions(
        column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    # One thread: with several the error does not name the row of an invalid value.
    return csv.read_csv(path, csv.ReadOptions(use_threads=False), convert_options=options)


def _json(path: Path, schema: Schema | None) -> Table:
    import pyarrow

    text = path.read_text("utf-8")
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("it must hold JSON objects, one a line or in one list.")
    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.table({name: [row.get(name) for row in rows] for name in names})


def _parquet(path: Path, schema: Schema | None) -> Table:
    from pyarrow import parquet

    return parquet.read_table(path, partitioning=None)


_READERS: dict[str, Callable[[Path, Any], Any]] = {"csv": _csv, "json": _json, "parquet": _parquet}


def _prefix(declaration: Declaration) -> str:
    return f"{declaration.where}: @reference {declaration.name}"
