"""Tables of queries: their folders, the files that count, Delta and Iceberg behind one interface, and upkeep."""

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
from smqrt.settings.options import parse_duration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


FOLDER = ".tables"
"""In the application's folder. Its name keeps it from being served."""

BACKFILL = "@"
"""Between the name of a table's folder and the key of a backfill, or of a later stream: `silver/readings@3f2a…`."""

VERSION = "@v."
"""Between the name of a table's folder and the key of a backfill that replaces rows. Such a folder counts when
`VERSIONS_FILE` says so."""

VERSIONS_FILE = "@versions.json"
"""Behind the name of a table's folder: {"version": 3, "shown": [folders with VERSION], "hidden": [other folders]}."""

_LOG = "_spark_metadata"
_EMPTY_ENTRY = "v1"
"""An entry of `_LOG` without files: the version of its format."""
_WHOLE = "_SUCCESS"
"""Spark writes it at last."""


def location(declaration: Declaration, app: Path, root: str | None = None) -> str:
    """Return the folder or URI of a table.

    Args:
        declaration: of the table.
        app: the application's folder.
        root: folder or URI that a relative path is below; `.tables` of the application without it.
    """
    path = str(declaration.options["path"])
    if is_relative(declaration):
        path = f"{(root or str(app / FOLDER)).rstrip('/')}/{path}"
    return path if locations.is_elsewhere(path) else str(_local(path).absolute())


def is_relative(declaration: Declaration) -> bool:
    """Return whether the path of a table leaves open what it is relative to."""
    path = str(declaration.options["path"])
    return not locations.scheme(path) and not path.startswith("/")


def frame(spark: SparkSession, path: Path | str) -> DataFrame:
    """Return the rows of a table, those of backfills included.

    Args:
        spark: the session, which knows the file systems.
        path: the table's folder or URI.

    Raises:
        PipelineError: nothing has been written.
    """
    if is_lake_table(path):
        return lake_frame(spark, str(path))
    frames = [_read_files(spark, folder) for folder in _readable(spark, path)]
    if not frames:
        raise PipelineError(f"There is no table in {path}: run its query first.")
    return reduce(lambda one, more: one.unionByName(more, allowMissingColumns=True), frames)


def _read_files(spark: SparkSession, folder: str) -> DataFrame:
    """A column that came later is null in files of before; Spark by itself looks at one file only, and takes a column
    that is never null there for one that every file has.
    """
    from pyspark.sql.types import StructField, StructType

    merged = spark.read.option("mergeSchema", "true").parquet(folder).schema
    return spark.read.schema(StructType([StructField(one.name, one.dataType) for one in merged])).parquet(folder)


def make_parent(location: str) -> None:
    """Make the folder that a table is to be in, unless it is one that only Spark sees.

    Raises:
        PipelineError: it can't be made or written.
    """
    if locations.is_elsewhere(location):
        return
    parent = Path(location).parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(parent, os.W_OK) else "may not be written by this user"
    except OSError as error:
        why = f"can't be made: {error.strerror}"
    if why:
        raise PipelineError(f"The folder of tables {parent} {why}; name another with --tables, or in @table(…).")


def check_types(frame: DataFrame, path: str, partition_by: Sequence[str]) -> None:
    """Compare the columns of a result with those of a table of Parquet files: nobody could read one of two types.

    Args:
        frame: the result.
        path: folder or URI of the table.
        partition_by: columns that are names of folders, whose types Spark guesses.

    Raises:
        PipelineError: a column has another type.
    """
    for folder in _readable(frame.sparkSession, path):
        known = _types(frame.sparkSession, folder)
        for name, kind in frame.dtypes:
            is_kept = name not in partition_by and "variant" not in kind  # which Parquet has as a struct
            if is_kept and known.get(name, kind) != kind:
                raise PipelineError(
                    f"The table in {path} has the column {name} as {known[name]}, and the result has it as {kind}: "
                    "give it another name, or the table another path."
                )


def _types(spark: SparkSession, folder: str) -> dict[str, str]:
    from pyspark.errors import AnalysisException

    try:
        return dict(spark.read.parquet(folder).dtypes)
    except AnalysisException:  # there is no file yet
        return {}


def folders(path: Path | str) -> list[Path]:
    """Return the folders that make up a table: its stream's, those of streams that went on after a reset, and one for
    each backfill, also if it was interrupted.

    Args:
        path: the table's folder.

    Raises:
        ArgumentError: it is a URI of something that only Spark sees.
    """
    path = _local(path)
    return [folder for folder in (path, *sorted(path.parent.glob(f"{path.name}{BACKFILL}*"))) if folder.is_dir()]


def is_whole(folder: Path) -> bool:
    """Return whether what is in a folder counts: that of a stream, or of a backfill that was written to its end."""
    return (folder / _WHOLE).exists() or (folder / _LOG).is_dir()


def is_streamed(spark: SparkSession, location: str) -> bool:
    """Return whether a stream has written to a folder: Spark would leave out the first micro-batches of another one.

    Args:
        spark: the session, which knows the file systems.
        location: folder or URI.
    """
    if not locations.is_elsewhere(location):
        return (Path(location) / _LOG).is_dir()
    return bool(jvm.glob(spark, f"{location}/{_LOG}"))


def last_batch(location: str) -> int:
    """Return the number of the last micro-batch that a stream has written to a folder; -1 when it isn't known."""
    if locations.is_elsewhere(location):
        return -1
    log = Path(location) / _LOG
    names = [path.name.removesuffix(".compact") for path in log.iterdir()] if log.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def files(path: Path | str) -> list[Path]:
    """Return the Parquet files of a table that are committed, those of backfills included.

    Spark itself reads no others. Other programs should take this list: after a crash, files of a micro-batch that was
    done again may lie beside them.

    Args:
        path: the table's folder.

    Raises:
        ArgumentError: it is a URI of something that only Spark sees.
    """
    if is_lake_table(_local(path)):
        return [Path(file) for file in lake_table_files(str(_local(path)))]
    return sorted(file for folder in _read(path) for file in _files(folder))


def counts(folder: Path) -> bool:
    """Return whether the rows in a folder of a table are rows of the table: they are whole, and not replaced."""
    shown, hidden = set[str](), set[str]()
    for file in folder.parent.glob(f"*{VERSIONS_FILE}"):
        found = _versions(file)
        shown.update(found["shown"])
        hidden.update(found["hidden"])
    return is_whole(folder) and folder.name not in hidden and (VERSION not in folder.name or folder.name in shown)


def _local(path: Path | str) -> Path:
    return locations.local_folder(path, "The table", "smqrt.pipeline.tables.frame(spark, URI) reads it with Spark")


def _read(path: Path | str) -> list[Path]:
    replaced = versions_file(_local(path)).exists()
    return [folder for folder in folders(path) if counts(folder) or (folder == _local(path) and not replaced)]


def _readable(spark: SparkSession, path: Path | str) -> list[str]:
    """The folders that have rows which count; those that only Spark sees count as they do here."""
    if not locations.is_elsewhere(path):
        return [str(folder) for folder in _read(path) if any(_files(folder))]
    marks = (f"{path}{end}/{name}" for end in ("", f"{BACKFILL}*") for name in (_WHOLE, _LOG))
    return sorted({mark.rpartition("/")[0] for pattern in marks for mark in jvm.glob(spark, pattern)})


def _files(folder: Path) -> Iterator[Path]:
    if (folder / _LOG).is_dir():
        return _logged(folder)
    return (file for file in folder.rglob("*.parquet") if file.is_file())


def _logged(path: Path) -> Iterator[Path]:
    for entry in _entries(path / _LOG):
        for line in entry.read_text("utf-8").splitlines()[1:]:
            status = json.loads(line)
            if status["action"] == "add":
                yield Path(unquote(urlsplit(status["path"]).path))


def _entries(log: Path) -> Iterator[Path]:
    """The newest compacted entry stands for all before it."""
    compacted = [int(entry.stem) for entry in log.glob("*.compact") if entry.stem.isdecimal()]
    newest = max(compacted, default=-1)
    if newest >= 0:
        yield log / f"{newest}.compact"
    plain = [int(entry.name) for entry in log.iterdir() if entry.name.isdecimal()]
    yield from (log / str(number) for number in sorted(plain) if number > newest)


# ---- versions: rows of plain files that were replaced. One file says which folders count, and is replaced as a whole


def versions_file(path: Path) -> Path:
    """Return the file that says which folders of a table count, which needn't be there."""
    return path.with_name(path.name + VERSIONS_FILE)


def _versions(file: Path) -> dict[str, Any]:
    try:
        return {"version": 0, "shown": [], "hidden": []} | dict(json.loads(file.read_text("utf-8")))
    except FileNotFoundError:
        return {"version": 0, "shown": [], "hidden": []}
    except (OSError, ValueError) as error:
        raise PipelineError(f"{file} can't be read ({error}): nobody knows which folders of the table count.") from None


def show_version(location: str, folder: str, replaced: Iterable[str]) -> int:
    """Let a folder count instead of others, from one moment to the next.

    Args:
        location: folder of the table.
        folder: one with `VERSION` in its name.
        replaced: those whose rows it replaces. They stay until the next replacement, for who reads them.

    Returns:
        The number of the version.
    """
    file, gone = versions_file(Path(location)), {Path(one).name for one in replaced}
    now = _versions(file)
    now["version"] += 1
    now["shown"] = [*(name for name in now["shown"] if name not in gone), Path(folder).name]
    now["hidden"] = sorted({*now["hidden"], *gone})
    fresh = file.with_name(file.name + ".new")
    with fresh.open("w", encoding="utf-8") as opened:
        json.dump(now, opened)
        opened.flush()
        os.fsync(opened.fileno())
    fresh.rename(file)
    return int(now["version"])


def remove_hidden(location: str) -> None:
    """Remove the folders that the version before last was made of, and what interrupted replacements have left."""
    found = _versions(versions_file(Path(location)))
    for folder in folders(location):
        is_leftover = VERSION in folder.name and folder.name not in found["shown"]
        if folder.name in found["hidden"] or is_leftover:
            shutil.rmtree(folder, ignore_errors=True)


def continue_log(folder: str, fresh: str) -> None:
    """Make a folder where the stream of another one can go on: Spark's sink looks for the numbers of all its
    micro-batches in its log, whose entries here are empty.

    Args:
        folder: where it has written.
        fresh: where it goes on.
    """
    log = Path(fresh) / _LOG
    log.mkdir(parents=True)
    for entry in (Path(folder) / _LOG).iterdir():
        if entry.name.removesuffix(".compact").isdecimal():
            (log / entry.name).write_text(_EMPTY_ENTRY, "utf-8")


def folder_frame(spark: SparkSession, folder: str) -> DataFrame:
    """Return the rows of one folder of a table of plain files."""
    return _read_files(spark, folder)


# ---- tables with commits of their own: Delta's and Iceberg's

LAKE_FORMATS: dict[str, type[delta.DeltaTable | iceberg.IcebergTable]] = {
    "delta": delta.DeltaTable,
    "iceberg": iceberg.IcebergTable,
}


class LakeTable(Protocol):
    """What a pipeline needs of a table; `delta.DeltaTable` says what each method does."""

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
        declaration: of a table.
        location: its folder or URI.

    Raises:
        PipelineError: a library is missing, or there is something else in the folder.
    """
    made = LAKE_FORMATS.get(declaration.options["format"])
    return made(location, declaration.options["partition_by"]) if made else None


def check_format_installed(declaration: Declaration) -> None:
    """Raise PipelineError or JournalError when the library is missing that the table of a query needs."""
    if declaration.options["format"] == "delta":
        import_deltalake()
    elif declaration.options["format"] == "iceberg":
        iceberg.check_installed()


def is_lake_table(location: Path | str) -> bool:
    """Return whether a folder or URI is such a table."""
    return is_delta(location) or iceberg.is_table(location)


def is_delta(location: Path | str) -> bool:
    """Return whether a folder or URI is a Delta table."""
    if not locations.is_elsewhere(location):
        return (Path(location) / "_delta_log").is_dir()
    return delta.is_table(str(location))


def lake_frame(spark: SparkSession, location: str) -> DataFrame:
    """Return the rows of such a table.

    Raises:
        PipelineError: a library is missing, or rows can't be read without the format's own jar.
    """
    return delta.frame(spark, location) if is_delta(location) else iceberg.frame(spark, location)


def lake_table_files(location: str) -> list[str]:
    """Return the Parquet files that such a table is made of.

    Raises:
        PipelineError: as `lake_frame`.
    """
    return delta.files(location) if is_delta(location) else iceberg.files(location)


# ---- upkeep: few large files for many small ones, and an end for what nobody reads

LEAST_RETENTION = timedelta(hours=1)
"""Of what a vacuum leaves alone: a micro-batch under way has written files that no commit names yet."""


def retention(text: str) -> timedelta:
    """Return the time that files are kept after they have been replaced.

    Raises:
        ArgumentError: it is no duration.
        PipelineError: it is shorter than `LEAST_RETENTION`.
    """
    found = timedelta(seconds=parse_duration(text))
    if found < LEAST_RETENTION:
        raise PipelineError(f"--vacuum {text}: give 1h or more, since a query may be writing files that are newer.")
    return found


def chosen_lake_tables(queries: Sequence[Declaration], app: Path, root: str | None) -> Iterator[tuple[str, LakeTable]]:
    """Yield the Delta and Iceberg tables among queries, each with the name of its query.

    Args:
        queries: what was asked for.
        app, root: as for `tables.location`.

    Raises:
        PipelineError: there is none, or a library is missing.
    """
    chosen = [one for one in queries if one.kind == "table" and one.options["format"] in LAKE_FORMATS]
    if not chosen:
        raise PipelineError(
            "None of these is a Delta or Iceberg table: that is a query with @table(…, format='delta' or 'iceberg')."
        )
    for query in chosen:
        path = location(query, app, root)
        with _one_sentence(path):
            found = open_lake_table(query, path)
        if found is not None:
            yield query.name, found


def check_condition(table: LakeTable, condition: str) -> None:
    """Say whether rows can be deleted by a condition, without deleting any.

    Raises:
        PipelineError: the table is not there, or it is no condition of it.
    """
    with _one_sentence(table.location):
        table.check_condition(condition)


def optimized(table: LakeTable, condition: str | None, retain: timedelta | None) -> str:
    """Delete rows, joins files and removes old ones, as far as it is wanted; returns what was done.

    Raises:
        PipelineError: something can't be done.
    """
    with _one_sentence(table.location):
        return _upkeep(table, condition, retain)


@contextmanager
def _one_sentence(location: str) -> Iterator[None]:
    """The libraries raise errors of many classes: of their own, of the system, of object stores."""
    try:
        yield
    except SmqrtError:
        raise
    except Exception as error:
        why = one_line(error)
        raise PipelineError(f"The table in {location} can't be opened or written: {why}. It stays as it was.") from None


def _upkeep(table: LakeTable, condition: str | None, retain: timedelta | None) -> str:
    told = [f"rows deleted: {table.delete(condition):,}"] if condition else []
    joined = table.optimize()
    told.append(f"small files joined: {joined.small:,} to {joined.large:,}")
    if retain is not None:
        told.append(f"old files removed: {table.vacuum(retain):,}")
    return "; ".join(told)
