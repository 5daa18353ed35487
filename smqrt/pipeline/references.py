"""Tables that streams are joined with: small files beside the pipelines, read by the driver, sent along with the plan.

So workers on other machines need no access to the file, and a micro-batch reads nothing. When a file changes,
`ReferenceWatch` tells so, and the queries that use it start anew from their checkpoints: that takes about a second and
loses nothing.

Source: design of the pipeline §7 (help/pipeline-rules.md is the page for users).
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


# ---- Names of columns as Spark wants them: `service.name` without quotes is a field of a struct to it.


def quoted(name: str) -> str:
    """Return the name of one column in backquotes, so that dots, blanks and backquotes in it are only characters."""
    return "`" + name.replace("`", "``") + "`"


def column(name: str) -> Column:
    """Return the column of exactly this name."""
    from pyspark.sql import functions as F

    return F.col(quoted(name))


KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
LOOK_S = 1.0

Stamp = tuple[tuple[str, int, int, int], ...]
"""Name, inode, time of change and size of each file: different when the table may be."""


def table(spark: SparkSession, declaration: Declaration, folder: Path) -> DataFrame:
    """Read a reference.

    Args:
        spark: the session.
        declaration: a @reference; its path is a CSV file with a head line, a JSON file (one object a line, or a list
            of them), a Parquet file, or a folder of such files; a URI such as s3a://… is read by Spark.
        folder: of the pipelines, which the path is relative to.

    Returns:
        A DataFrame of its columns, or of those in the option "schema" with these types.

    Raises:
        PipelineError: there is no such file, a column is missing, or a value is of another type.
    """
    path = str(declaration.options["path"])
    if locations.is_elsewhere(path):
        return _remote(spark, path, declaration)
    return spark.createDataFrame(_read(declaration, folder))


class ReferenceWatch:
    """Tells when references have changed.

    Args:
        declarations: the references.
        folder: of the pipelines.
        report: is told, once for each change, of a file that can't be read; the rows read before stay in use.
    """

    def __init__(self, declarations: Iterable[Declaration], folder: Path, report: Callable[[str], None]) -> None:
        here = [each for each in declarations if not locations.is_elsewhere(each.options["path"])]
        self._files = {each.name: _File(each, folder) for each in here}
        self._report = report
        self._next_s = time.monotonic() + LOOK_S

    def versions(self, names: Iterable[str]) -> list[int]:
        """Return a number for each of these references, another one when it should be read again.

        It looks at most once a second, and waits until a file has been left alone for as long, so that it is whole.
        """
        if self._files and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + LOOK_S
            for file in self._files.values():
                self._look(file)
        return [self._files[name].version for name in names if name in self._files]

    def _look(self, file: _File) -> None:
        try:
            file.look()
        except PipelineError as error:
            self._report(f"{error} The rows read before stay in use.")


class _File:
    """A reference that is watched, and how often it has changed."""

    def __init__(self, declaration: Declaration, folder: Path) -> None:
        self._declaration, self._folder = declaration, folder
        self._used = self._seen = stamp(declaration, folder)
        self.version = 0

    def look(self) -> None:
        """Count a change that has settled.

        Raises:
            PipelineError: what is there now can't be read.
        """
        now = stamp(self._declaration, self._folder)
        settled, self._seen = now == self._seen, now
        if settled and now != self._used:
            self._used = now
            _read(self._declaration, self._folder)
            self.version += 1


def stamp(declaration: Declaration, folder: Path) -> Stamp | None:
    """Return what changes when the files of a reference do; None when there are none."""
    try:
        stats = [(path, path.stat()) for path in _files(declaration, folder)]
    except (OSError, PipelineError):
        return None
    return tuple((path.name, stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in stats)


def _read(declaration: Declaration, folder: Path) -> Table:
    import pyarrow

    schema = _schema(declaration)
    files = _files(declaration, folder)
    tables = []
    for path in files:
        try:
            tables.append(_typed(_READERS[KINDS[path.suffix.lower()]](path, schema), schema, path))
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise PipelineError(f"{_begins(declaration)}: {path} can't be read: {first_line(error)}") from None
    try:
        return pyarrow.concat_tables(tables)
    except pyarrow.ArrowException as error:
        raise PipelineError(
            f"{_begins(declaration)}: the files in {files[0].parent} don't fit together: {first_line(error)}"
        ) from None


def _files(declaration: Declaration, folder: Path) -> list[Path]:
    path = folder / locations.local_folder(declaration.options["path"], _begins(declaration), "Spark reads it")
    files = sorted(each for each in path.iterdir() if each.suffix.lower() in KINDS) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise PipelineError(
            f"{_begins(declaration)}: there is {'nothing in' if path.is_dir() else 'no'} {path}; "
            "a path is relative to the folder of pipelines."
        )
    if files[0].suffix.lower() not in KINDS:
        raise PipelineError(f"{_begins(declaration)}: {path} must be called {', '.join(KINDS)}.")
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
        raise PipelineError(f"{_begins(declaration)}: schema={ddl!r} can't be read: {first_line(error)}") from None


def _csv(path: Path, schema: Schema | None) -> Table:
    from pyarrow import csv

    types = {field.name: field.type for field in schema} if schema else None
    options = csv.ConvertOptions(
        column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    # One thread, as only then it says in which row a value is wrong.
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


def _typed(found: Table, schema: Schema | None, path: Path) -> Table:
    if schema is None:
        return found
    for name in schema.names:
        if name not in found.column_names:
            raise ValueError(f"it has no column {name!r}; it has {', '.join(found.column_names)}.")
    return found.select(schema.names).cast(schema)


def _remote(spark: SparkSession, path: str, declaration: Declaration) -> DataFrame:
    suffix = Path(path).suffix.lower()
    if suffix not in KINDS:
        raise PipelineError(f"{_begins(declaration)}: {path} must be called {', '.join(KINDS)}.")
    reader = spark.read.format(KINDS[suffix]).option("header", True)
    ddl = declaration.options["schema"]
    return reader.schema(ddl).load(path) if ddl else reader.option("inferSchema", True).load(path)


def _begins(declaration: Declaration) -> str:
    return f"{declaration.where}: @reference {declaration.name}"
