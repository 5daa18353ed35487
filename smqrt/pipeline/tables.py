"""Tables of queries: folders, committed files, one interface for Delta and Iceberg, and maintenance."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

from smqrt.errors import PipelineError, SmqrtError
from smqrt.journal import files as locations
from smqrt.journal.delta_table import import_deltalake, one_line
from smqrt.journal.reader import Offsets
from smqrt.pipeline import delta, iceberg, jvm
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.lake_files import Joined
from smqrt.settings.option_types import parse_duration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


FOLDER = ".tables"
"""The folder of tables in the application's folder. Files are not served from names with a dot."""

BACKFILL = "@"
"""Separates the name of a table's folder from the key of a backfill or a later stream: `silver/readings@3f2a…`."""

VERSION = "@v."
"""Separates the name of a table's folder from the key of a backfill that replaces rows. `VERSIONS_FILE` lists the
folders whose rows are shown."""

VERSIONS_FILE = "@versions.json"
"""Suffix of a file beside the table's folder: {"version": 3, "shown": [folders with VERSION], "hidden": [others]}."""

_LOG = "_spark_metadata"
_EMPTY_ENTRY = "v1"
"""Content of an entry of `_LOG` without files: the version of its format."""
_SUCCESS = "_SUCCESS"
"""Spark writes it after all other files."""


def location(declaration: Declaration, app: Path, root: str | None = None) -> str:
    """Return the folder or URI of a table.

    Args:
        declaration: the query of the table.
        app: the application's folder.
        root: folder or URI for relative paths; by default `.tables` of the application.
    """
    path = str(declaration.options["path"])
    if is_relative(declaration):
        path = f"{(root or str(app / FOLDER)).rstrip('/')}/{path}"
    return path if locations.is_elsewhere(path) else str(_local(path).absolute())


def is_relative(declaration: Declaration) -> bool:
    """Return whether the path of a table is a relative one."""
    path = str(declaration.options["path"])
    return not locations.scheme(path) and not path.startswith("/")


def frame(spark: SparkSession, path: Path | str) -> DataFrame:
    """Return the rows of a table, including those of backfills.

    Args:
        spark: the session, which can access the file systems.
        path: the table's folder or URI.

    Raises:
        PipelineError: there is no table yet.
    """
    if is_lake_table(path):
        return lake_frame(spark, str(path))
    frames = [folder_frame(spark, folder) for folder in _readable(spark, path)]
    if not frames:
        raise PipelineError(f"There is no table in {path}: run its query first.")
    return reduce(lambda one, more: one.unionByName(more, allowMissingColumns=True), frames)


def folder_frame(spark: SparkSession, folder: str) -> DataFrame:
    """Return the rows of one folder of a table of plain files.

    They have the columns of all its files; files without a newer column have NULL there.
    """
    from pyspark.sql.types import StructField, StructType

    # Without the merged schema Spark uses the schema of one file, and its columns without NULL for all files.
    merged = spark.read.option("mergeSchema", "true").parquet(folder).schema
    return spark.read.schema(StructType([StructField(one.name, one.dataType) for one in merged])).parquet(folder)


def make_parent(location: str) -> None:
    """Create the parent folder of a table, unless only Spark can access it.

    Raises:
        PipelineError: the folder can't be created or written.
    """
    if locations.is_elsewhere(location):
        return
    parent = Path(location).parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(parent, os.W_OK) else "can't be written by this user"
    except OSError as error:
        problem = f"can't be created: {error.strerror}"
    if problem:
        raise PipelineError(f"The folder of tables {parent} {problem}; use another one with --tables or in @table(…).")


def check_types(frame: DataFrame, path: str, partition_by: Sequence[str]) -> None:
    """Compare the columns of a result with those of a table of Parquet files, which can't be read with two types.

    Args:
        frame: the result.
        path: folder or URI of the table.
        partition_by: columns that become names of folders, whose types Spark infers.

    Raises:
        PipelineError: a column has another type.
    """
    from pyspark.errors import AnalysisException

    for folder in _readable(frame.sparkSession, path):
        try:
            known = dict(frame.sparkSession.read.parquet(folder).dtypes)
        except AnalysisException:  # the folder has no file yet
            known = {}
        for name, kind in frame.dtypes:
            # Parquet stores a VARIANT as a struct.
            is_compared = name not in partition_by and "variant" not in kind
            if is_compared and known.get(name, kind) != kind:
                raise PipelineError(
                    f"The table in {path} has the column {name} as {known[name]}, and the result has it as {kind}: "
                    "use another name for the column, or another path for the table."
                )


def folders(path: Path | str) -> list[Path]:
    """Return the folders of a table: those of its streams and of its backfills, including interrupted backfills.

    Args:
        path: the table's folder.

    Raises:
        ArgumentError: it is a URI that only Spark can access.
    """
    path = _local(path)
    return [folder for folder in (path, *sorted(path.parent.glob(f"{path.name}{BACKFILL}*"))) if folder.is_dir()]


def is_complete(folder: Path) -> bool:
    """Return whether the rows in a folder are valid: those of a stream or of a completed backfill."""
    return (folder / _SUCCESS).exists() or (folder / _LOG).is_dir()


def is_streamed(spark: SparkSession, location: str) -> bool:
    """Return whether a stream has written to a folder; Spark would skip the first micro-batches of another stream.

    Args:
        spark: the session, which can access the file systems.
        location: folder or URI.
    """
    if not locations.is_elsewhere(location):
        return (Path(location) / _LOG).is_dir()
    return bool(jvm.glob(spark, f"{location}/{_LOG}"))


def last_batch(location: str) -> int:
    """Return the number of the last micro-batch that a stream has written to a folder; -1 when it is unknown."""
    if locations.is_elsewhere(location):
        return -1
    log = Path(location) / _LOG
    names = [path.name.removesuffix(".compact") for path in log.iterdir()] if log.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def files(path: Path | str) -> list[Path]:
    """Return the committed Parquet files of a table, including those of backfills.

    Spark reads only these files, and other programs should use this list: after a crash, files of a repeated
    micro-batch may exist beside them.

    Args:
        path: the table's folder.

    Raises:
        ArgumentError: it is a URI that only Spark can access.
    """
    if is_lake_table(_local(path)):
        return [Path(file) for file in lake_table_files(str(_local(path)))]
    return sorted(file for folder in _local_folders(path) for file in _files(folder))


def is_shown(folder: Path) -> bool:
    """Return whether the rows in a folder are rows of the table: they are complete, and not replaced."""
    shown, hidden = set[str](), set[str]()
    for file in folder.parent.glob(f"*{VERSIONS_FILE}"):
        found = _versions(file)
        shown.update(found["shown"])
        hidden.update(found["hidden"])
    return is_complete(folder) and folder.name not in hidden and (VERSION not in folder.name or folder.name in shown)


def _local(path: Path | str) -> Path:
    return locations.local_folder(path, "The table", "smqrt.pipeline.tables.frame(spark, URI) reads it with Spark")


def _local_folders(path: Path | str) -> list[Path]:
    replaced = versions_file(_local(path)).exists()
    return [folder for folder in folders(path) if is_shown(folder) or (folder == _local(path) and not replaced)]


def _readable(spark: SparkSession, path: Path | str) -> list[str]:
    if not locations.is_elsewhere(path):
        return [str(folder) for folder in _local_folders(path) if any(_files(folder))]
    # In other file systems a marker file shows that a folder is valid. Versions exist only on this machine.
    marks = (f"{path}{end}/{name}" for end in ("", f"{BACKFILL}*") for name in (_SUCCESS, _LOG))
    return sorted({mark.rpartition("/")[0] for pattern in marks for mark in jvm.glob(spark, pattern)})


def _files(folder: Path) -> Iterator[Path]:
    log = folder / _LOG
    if not log.is_dir():
        yield from (file for file in folder.rglob("*.parquet") if file.is_file())
        return
    # The newest compacted entry includes all entries before it.
    newest = max((int(entry.stem) for entry in log.glob("*.compact") if entry.stem.isdecimal()), default=-1)
    plain = sorted(int(entry.name) for entry in log.iterdir() if entry.name.isdecimal())
    entries = [log / f"{newest}.compact"] if newest >= 0 else []
    for entry in [*entries, *(log / str(number) for number in plain if number > newest)]:
        for line in entry.read_text("utf-8").splitlines()[1:]:  # after the version of the format
            status = json.loads(line)
            if status["action"] == "add":
                yield Path(unquote(urlsplit(status["path"]).path))


# ---- Versions of tables of plain files. One file lists the shown folders; it is replaced atomically.


def versions_file(path: Path) -> Path:
    """Return the path of the file that lists the shown folders of a table; it need not exist."""
    return path.with_name(path.name + VERSIONS_FILE)


def _versions(file: Path) -> dict[str, Any]:
    try:
        return {"version": 0, "shown": [], "hidden": []} | dict(json.loads(file.read_text("utf-8")))
    except FileNotFoundError:
        return {"version": 0, "shown": [], "hidden": []}
    except (OSError, ValueError) as error:
        raise PipelineError(f"{file} can't be read ({error}): the shown folders of the table are unknown.") from None


def show_version(location: str, folder: str, replaced: Iterable[str]) -> int:
    """Show a folder instead of others, atomically.

    Args:
        location: folder of the table.
        folder: a folder with `VERSION` in its name.
        replaced: the folders whose rows it replaces. Current readers can use them until the next replacement.

    Returns:
        The number of the version.
    """
    file, replaced_names = versions_file(Path(location)), {Path(one).name for one in replaced}
    now = _versions(file)
    now["version"] += 1
    now["shown"] = [*(name for name in now["shown"] if name not in replaced_names), Path(folder).name]
    now["hidden"] = sorted({*now["hidden"], *replaced_names})
    fresh = file.with_name(file.name + ".new")
    with fresh.open("w", encoding="utf-8") as opened:
        json.dump(now, opened)
        opened.flush()
        os.fsync(opened.fileno())  # before the rename, so that a power failure leaves a complete list
    fresh.rename(file)
    return int(now["version"])


def remove_hidden(location: str) -> None:
    """Remove the folders that earlier replacements have hidden, and those of interrupted replacements."""
    found = _versions(versions_file(Path(location)))
    for folder in folders(location):
        is_leftover = VERSION in folder.name and folder.name not in found["shown"]
        if folder.name in found["hidden"] or is_leftover:
            shutil.rmtree(folder, ignore_errors=True)


def continue_log(folder: str, fresh: str) -> None:
    """Create a folder in which the stream of another folder can continue.

    Spark's sink expects the numbers of all its micro-batches in its log; the entries in the new log are empty.

    Args:
        folder: the previous folder of the stream.
        fresh: the new folder.
    """
    log = Path(fresh) / _LOG
    log.mkdir(parents=True)
    for entry in (Path(folder) / _LOG).iterdir():
        if entry.name.removesuffix(".compact").isdecimal():
            (log / entry.name).write_text(_EMPTY_ENTRY, "utf-8")


# ---- Tables with commits: Delta and Iceberg

LAKE_FORMATS: dict[str, type[delta.DeltaTable | iceberg.IcebergTable]] = {
    "delta": delta.DeltaTable,
    "iceberg": iceberg.IcebergTable,
}


class LakeTable(Protocol):
    """Interface of a table with commits; `delta.DeltaTable` documents the methods."""

    location: str

    def exists(self) -> bool: ...
    def end(self, name: str) -> Offsets | None: ...
    def append(self, frame: DataFrame, query: str, batch: int, end: Offsets | None) -> int: ...
    def replace(self, frame: DataFrame, query: str) -> int: ...
    def optimize(self, target_bytes: int | None = None) -> Joined: ...
    def vacuum(self, retain: timedelta) -> int: ...
    def check_condition(self, condition: str) -> None: ...
    def delete(self, condition: str) -> int: ...


def open_lake_table(declaration: Declaration, location: str) -> LakeTable | None:
    """Return the table of a query; None when it is one of plain Parquet files.

    Args:
        declaration: the query of the table.
        location: its folder or URI.

    Raises:
        PipelineError: a library is missing, or the folder contains a table of another format.
    """
    table_class = LAKE_FORMATS.get(declaration.options["format"])
    return table_class(location, declaration.options["partition_by"]) if table_class else None


def check_format_installed(declaration: Declaration) -> None:
    """Raise PipelineError or JournalError when the library for the table of a query is missing."""
    if declaration.options["format"] == "delta":
        import_deltalake()
    elif declaration.options["format"] == "iceberg":
        iceberg.check_installed()


def is_lake_table(location: Path | str) -> bool:
    """Return whether a folder or URI is a table with commits."""
    return is_delta(location) or iceberg.is_table(location)


def is_delta(location: Path | str) -> bool:
    """Return whether a folder or URI is a Delta table."""
    if not locations.is_elsewhere(location):
        return (Path(location) / "_delta_log").is_dir()
    return delta.is_table(str(location))


def lake_frame(spark: SparkSession, location: str) -> DataFrame:
    """Return the rows of a table with commits.

    Raises:
        PipelineError: a library is missing, or rows can't be read without the format's own jar.
    """
    return delta.frame(spark, location) if is_delta(location) else iceberg.frame(spark, location)


def lake_table_files(location: str) -> list[str]:
    """Return the Parquet files of a table with commits.

    Raises:
        PipelineError: as `lake_frame`.
    """
    return delta.files(location) if is_delta(location) else iceberg.files(location)


# ---- Maintenance: small files are joined, and unused files are removed

MIN_RETENTION = timedelta(hours=1)
"""A vacuum keeps younger files: the current micro-batch may have written files that are not committed yet."""


def retention(text: str) -> timedelta:
    """Return the time for which replaced files are kept.

    Raises:
        ArgumentError: it is not a duration.
        PipelineError: it is shorter than `MIN_RETENTION`.
    """
    found = timedelta(seconds=parse_duration(text))
    if found < MIN_RETENTION:
        raise PipelineError(f"--vacuum {text}: use 1h or more, since a query may be writing newer files.")
    return found


def chosen_lake_tables(queries: Sequence[Declaration], app: Path, root: str | None) -> Iterator[tuple[str, LakeTable]]:
    """Yield the Delta and Iceberg tables among queries, each with the name of its query.

    Args:
        queries: the selected queries.
        app, root: as for `tables.location`.

    Raises:
        PipelineError: none of them is one, or a library is missing.
    """
    chosen = [one for one in queries if one.kind == "table" and one.options["format"] in LAKE_FORMATS]
    if not chosen:
        raise PipelineError(
            "None of these queries has a Delta or Iceberg table: use @table(…, format='delta' or 'iceberg')."
        )
    for query in chosen:
        path = location(query, app, root)
        with _as_pipeline_errors(path):
            found = open_lake_table(query, path)
        if found is not None:
            yield query.name, found


def check_condition(table: LakeTable, condition: str) -> None:
    """Check whether rows can be deleted by a condition, without deleting any.

    Raises:
        PipelineError: the table does not exist, or the condition is invalid for it.
    """
    with _as_pipeline_errors(table.location):
        table.check_condition(condition)


def optimized(table: LakeTable, condition: str | None, retain: timedelta | None) -> str:
    """Delete rows, join files and remove old files, as requested; return a sentence with the numbers.

    Raises:
        PipelineError: a step fails.
    """
    with _as_pipeline_errors(table.location):
        done = [f"rows deleted: {table.delete(condition):,}"] if condition else []
        joined = table.optimize()
        done.append(f"small files joined: {joined.small:,} to {joined.large:,}")
        if retain is not None:
            done.append(f"old files removed: {table.vacuum(retain):,}")
        return "; ".join(done)


@contextmanager
def _as_pipeline_errors(location: str) -> Iterator[None]:
    """Convert errors of the libraries, of the system and of object stores to PipelineError."""
    try:
        yield
    except SmqrtError:
        raise
    except Exception as error:
        reason = one_line(error)
        raise PipelineError(f"The table in {location} can't be opened or written: {reason}. It is unchanged.") from None
