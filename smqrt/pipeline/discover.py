"""Discovery of pipeline declarations, SQL files and reference tables."""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import PathEntryFinder
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, cast

from smqrt.errors import PipelineError
from smqrt.journal import files as locations
from smqrt.pipeline import api
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.failures import first_line

if TYPE_CHECKING:
    from pyarrow import Schema, Table
    from pyspark.sql import Column, DataFrame, SparkSession


_NEEDS_SPARK = (
    "this needs Spark, which starts after all pipelines are read: give a function's type as an object, such as "
    "F.udf(IntegerType()) of pyspark.sql.types for F.udf('int'), and move other calls into the query."
)


class Catalog:
    """The declarations of one folder. Every input exists, and no declaration reads itself.

    Args:
        folder: the folder of the files; paths of references are relative to it.
        declarations: in the order of the files and lines.

    Raises:
        PipelineError: two declarations have the same name, an input isn't declared, or inputs form a cycle.
    """

    def __init__(self, folder: Path, declarations: Iterable[Declaration]) -> None:
        self.folder = folder
        self.declarations: dict[str, Declaration] = {}
        for declaration in declarations:
            earlier = self.declarations.setdefault(declaration.name, declaration)
            if earlier is not declaration:
                raise PipelineError(
                    f"{declaration.where}: {declaration.name} is also declared at {earlier.where}; rename one of them."
                )
        for declaration in self.declarations.values():
            start = f"{declaration.where}: {declaration.name} reads"
            for name in declaration.inputs:
                found = self.declarations.get(name)
                if found is None:
                    raise PipelineError(
                        f"{start} {name!r}, which no @source, @reference or function declares; {self._hint(name)}"
                    )
                if found.kind == "alert":
                    raise PipelineError(f"{start} the alert {name}; read the inputs of {name} instead.")
        for declaration in self.declarations.values():
            if not self.sources_of(declaration) and declaration.is_query:
                raise PipelineError(f"{declaration.where}: {declaration.name} reads no @source, and so has no rows.")

    def _hint(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.declarations, 1)
        return f"did you mean {near[0]!r}?" if near else f"declared: {', '.join(self.declarations) or 'none'}."

    def queries(self) -> list[Declaration]:
        """Return the queries: the declarations of @publish, @table and @alert."""
        return [declaration for declaration in self.declarations.values() if declaration.is_query]

    def get(self, name: str) -> Declaration:
        """Return a declaration by name.

        Raises:
            PipelineError: the name is unknown.
        """
        if name not in self.declarations:
            raise PipelineError(f"There is no pipeline {name!r} in {self.folder}; {self._hint(name)}")
        return self.declarations[name]

    def select(self, names: Iterable[str] = ()) -> list[Declaration]:
        """Return the queries with these names; without names all queries.

        Raises:
            PipelineError: a name is unknown or is not a query, or the folder has no query.
        """
        found = [self.get(name) for name in names] or self.queries()
        for declaration in found:
            if not declaration.is_query:
                raise PipelineError(
                    f"{declaration.where}: {declaration.name} is a {declaration.kind} and not a query; "
                    f"the queries are {', '.join(query.name for query in self.queries()) or 'none'}."
                )
        if not found:
            raise PipelineError(f"There is no query in {self.folder}: no function has @publish, @table or @alert.")
        return found

    def walk(self, declaration: Declaration) -> list[Declaration]:
        """Return a declaration and all its direct and indirect inputs, inputs first.

        Raises:
            PipelineError: it reads itself.
        """
        found: dict[str, Declaration] = {}
        self._visit(declaration, found, [])
        return list(found.values())

    def _visit(self, declaration: Declaration, found: dict[str, Declaration], path: list[str]) -> None:
        if declaration.name in path:
            cycle = " reads ".join([*path[path.index(declaration.name) :], declaration.name])
            raise PipelineError(f"{declaration.where}: {cycle}; a pipeline can't read itself.")
        for name in declaration.inputs:
            self._visit(self.declarations[name], found, [*path, declaration.name])
        found.setdefault(declaration.name, declaration)

    def sources_of(self, declaration: Declaration) -> list[Declaration]:
        """Return the sources that a declaration reads, directly or indirectly."""
        return [each for each in self.walk(declaration) if each.kind == "source"]


def load(folder: Path) -> Catalog:
    """Read every `*.py` and `*.sql` file of a folder, except names that begin with `_` or `test_`.

    Args:
        folder: usually `<application>/pipelines`, or one file.

    Returns:
        The declarations.

    Raises:
        PipelineError: the folder does not exist, a file can't be run, or a declaration is invalid. The message begins
            with file:line.
    """
    if not folder.exists():
        raise PipelineError(f"{folder} does not exist: pipelines are its .py and .sql files; see smqrt pipeline init.")
    if folder.is_file():
        home, files = folder.parent, [folder]
    else:
        home = folder
        found = sorted(path for path in folder.iterdir() if path.suffix in (".py", ".sql") and path.is_file())
        files = [path for path in found if not path.name.startswith(("_", "test_", "."))]
    return Catalog(home, [each for path in files for each in _declarations(path)])


def _declarations(path: Path) -> list[Declaration]:
    if path.suffix == ".sql":
        declaration = load_sql(path)
        return [declaration] if declaration else []
    # The module is not in sys.modules, so that Spark sends its functions to the workers by value.
    name = f"smqrt_pipelines_{path.stem}"
    loader = _SourceLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with _importable(path.parent):
        try:
            loader.exec_module(module)
        except PipelineError:
            raise
        except Exception as error:
            raise PipelineError(f"{_error_line(error, path)}: {_sentence(error)}") from error
    own = [
        value
        for value in vars(module).values()
        if callable(value) and getattr(getattr(value, "__code__", None), "co_filename", "") == str(path)
    ]
    declared = {each.name: each for value in own if (each := api.declaration_of(value))}
    # An undecorated function that is an input of another one is a view.
    plain = {value.__name__: value for value in own if value.__name__ not in declared}
    waiting, found = list(declared.values()), list[Declaration]()
    while waiting:
        each = waiting.pop()
        found.append(each)
        waiting += [api.implied_view(plain.pop(name)) for name in each.inputs if name in plain]
    return sorted(found, key=lambda each: each.line)


class _SourceLoader(SourceFileLoader):
    """Compiles a file each time, without Python's bytecode cache.

    The cache ignores an edit that changes neither the file's size nor the second of its modification time.
    """

    def get_code(self, fullname: str) -> CodeType:
        """See `InspectLoader.get_code`."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let files import modules of their folder, which are read again and removed from sys.modules afterwards."""
    loaders = (ExtensionFileLoader, EXTENSION_SUFFIXES), (_SourceLoader, SOURCE_SUFFIXES)
    find = FileFinder.path_hook(*loaders)

    def hook(path: str) -> PathEntryFinder:
        if not Path(path).is_relative_to(folder):
            raise ImportError(path)
        return find(path)

    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    sys.path_hooks.insert(0, hook)
    _clear_finders(folder)  # Python caches the finder of the first hook that accepted a folder
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.path_hooks.remove(hook)
        _clear_finders(folder)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).is_relative_to(folder):
                del sys.modules[name]


def _clear_finders(folder: Path) -> None:
    for path in [path for path in sys.path_importer_cache if Path(path).is_relative_to(folder)]:
        del sys.path_importer_cache[path]


def _error_line(error: Exception, path: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    lines = [entry.lineno for entry in traceback.extract_tb(error.__traceback__) if entry.filename == str(path)]
    return f"{path}:{lines[-1] if lines else 1}"


def _sentence(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"it isn't Python: {error.msg}."
    if isinstance(error, TypeError) and "required positional argument" in str(error):
        return f"{error}; add it to the decorator."
    # Many functions of pyspark only assert that Spark is running.
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    is_assert = isinstance(error, AssertionError) and "/pyspark/" in last
    if "SESSION_OR_CONTEXT_NOT_EXISTS" in str(error) or is_assert:
        return _NEEDS_SPARK
    return f"it can't be loaded: {type(error).__name__}: {error}."


# ---- SQL files
#
#     -- @publish to=alerts/{topic} mode=append
#     -- @expect "temp is not null"
#     SELECT topic, temp, ts FROM STREAM readings WHERE temp > 80
#
# The name of the file is the name of the declaration. `STREAM` before an input is ignored. Values with spaces are
# quoted. Lists have commas.

_DECORATORS = ("source", "view", "publish", "table", "alert", "reference", "expect")
_WITHOUT_QUERY = ("source", "reference")
_NUMBERS = ("max_rows", "max_bytes", "min_partitions", "rows_per_partition", "bytes_per_partition")
_LISTS = ("topics", "exclude", "partition_by", "key")
_HEADER = re.compile(r"\s*--\s*@(\w*)\s*(.*)")
_TOKEN = re.compile(
    r"""(?P<skip>\s+|--[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.)*")"""
    r"|(?P<word>[A-Za-z_][A-Za-z_0-9]*|`[^`]+`)|(?P<other>.)",
    re.DOTALL,
)
_FROM_INSIDE = ("EXTRACT", "TRIM", "SUBSTRING", "SUBSTR", "OVERLAY")
_ENDS_LIST = ("WHERE", "GROUP", "HAVING", "ORDER", "LIMIT", "UNION", "ON", "USING", "SELECT", "WINDOW", "SORT")
_NOT_A_NAME = ("LATERAL", "VALUES", "SELECT", "TABLE", "UNNEST", "EXPLODE")


def load_sql(path: Path) -> api.Declaration | None:
    """Read a SQL file.

    Args:
        path: the file; its name without `.sql` is the declaration's name.

    Returns:
        The declaration, or None when the file has no header.

    Raises:
        PipelineError: a header is invalid, or the file's name is not an identifier.
    """
    text = path.read_text("utf-8")
    headers: list[tuple[int, str, str]] = []
    for number, header_line in enumerate(text.splitlines(), 1):
        if match := _HEADER.fullmatch(header_line):
            if match[1] not in _DECORATORS:
                raise PipelineError(f"{path}:{number}: there is no @{match[1]}; there are @{', @'.join(_DECORATORS)}.")
            headers.append((number, match[1], match[2]))
    if not headers:
        return None
    kinds = [header for header in headers if header[1] != "expect"]
    if len(kinds) != 1:
        raise PipelineError(f"{path}:{headers[0][0]}: a SQL file has one declaration, and this one {len(kinds)}.")
    if not path.stem.isidentifier():
        raise PipelineError(f"{path}:1: {path.stem!r} is not a valid name; use letters, digits and underscores.")
    line, kind, rest = kinds[0]
    found = _declare(path, line, kind, rest, text)
    for number, _, condition in (header for header in headers if header[1] == "expect"):
        where = f"{path}:{number}"
        positional, options = _arguments(where, condition)
        try:
            found.expectations.append(api.expectation(where, *positional, **options))
        except TypeError as error:
            raise PipelineError(f"{where}: @expect: {str(error).split('() ', 1)[-1]}.") from None
    return found


def inputs(query: str) -> list[str]:
    """Return the names in FROM and JOIN of a query, in order, without those that its WITH defines."""
    names, local = [], set(re.findall(r"(?:\bWITH\b|,)\s*(\w+)\s+AS\s*\(", query, re.IGNORECASE))
    for start, end in _spans(query):
        name = query[start:end].strip("`")
        if name not in local and name not in names:
            names.append(name)
    return names


def _declare(path: Path, line: int, kind: str, rest: str, text: str) -> api.Declaration:
    where = f"{path}:{line}"
    query = "\n".join("" if _HEADER.fullmatch(row) else row for row in text.splitlines())
    query = re.sub(r"\bSTREAM\s*\(\s*(\w+)\s*\)", r"\1", query, flags=re.IGNORECASE)
    query = re.sub(r"\b(FROM|JOIN|,)(\s+)STREAM\s+(?=\w)", r"\1\2", query, flags=re.IGNORECASE).strip().rstrip(";")
    empty = not re.sub(r"--[^\n]*|/\*.*?\*/|[\s;]", "", query, flags=re.DOTALL)
    if empty != (kind in _WITHOUT_QUERY):
        raise PipelineError(f"{where}: @{kind} {'needs a query below it' if empty else 'must not have a query'}.")
    token = api.DECLARED_AT.set(where)
    try:
        positional, options = _arguments(where, rest)
        function = _function(query, inputs(query))
        found = api.declaration_of(getattr(api, kind)(*positional, **options)(function))
    except TypeError as error:
        raise PipelineError(f"{where}: @{kind}: {str(error).split('() ', 1)[-1]}.") from None
    finally:
        api.DECLARED_AT.reset(token)
    assert found is not None
    found.name, found.file, found.line = path.stem, str(path), line
    found.inputs = () if kind in _WITHOUT_QUERY else tuple(inputs(query))
    return found


def _arguments(where: str, rest: str) -> tuple[list[str], dict[str, Any]]:
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise PipelineError(f"{where}: {rest!r} can't be read: {error}; quote values that have spaces.") from None
    positional, options = list[str](), dict[str, Any]()
    for word in words:
        name, _, value = word.partition("=")
        if not re.match(r"\w+=", word):
            positional.append(word)
        elif name in _LISTS:
            options[name] = [item.strip() for item in value.split(",")]
        elif value in ("true", "false"):
            options[name] = value == "true"
        else:
            options[name] = int(value) if name in _NUMBERS and value.isdecimal() else value
    return positional, options


def _function(query: str, names: Sequence[str]) -> Any:
    from inspect import Parameter, Signature

    def run(frame: Any, *more: Any) -> Any:
        if not names:
            return frame
        session = frame.sparkSession
        for name, each in zip(names, (frame, *more), strict=True):
            each.createOrReplaceTempView(name)
        try:
            return session.sql(query)
        finally:
            for name in names:
                session.catalog.dropTempView(name)

    # Decorators read the signature, and a SQL file can have any number of inputs.
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names or ("frame",)]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


def _spans(query: str) -> Iterator[tuple[int, int]]:
    """Yield the positions of the inputs in a query."""
    openers: list[str] = [""]  # the word before each open parenthesis, since EXTRACT(x FROM y) has no input
    before = ["", ""]  # the last two tokens, since IS DISTINCT FROM x has no input
    expected = False
    listing = [False]  # by parenthesis, whether a comma separates inputs
    for match in _TOKEN.finditer(query):
        if match["skip"]:
            continue
        text = match[0].upper()
        if match["word"]:
            named = expected and text not in _NOT_A_NAME
            if named:
                yield match.span()
            listing[-1] = named or (listing[-1] and text not in _ENDS_LIST)
            is_join = text == "JOIN"
            expected = is_join or (text == "FROM" and before[-1] != "DISTINCT" and openers[-1] not in _FROM_INSIDE)
        elif text == "(":
            openers.append(before[-1])
            listing.append(False)
            expected = False
        elif text == ")" and len(openers) > 1:
            openers.pop()
            listing.pop()
            expected = False
        else:
            expected = text == "," and listing[-1]
        before = [before[-1], text]


# ---- Column names for Spark
#
# Without quotes `service.name` is a field of a struct.


def quoted(name: str) -> str:
    """Return the name of one column in backquotes, so that dots, blanks and backquotes in it are plain characters."""
    return "`" + name.replace("`", "``") + "`"


def column(name: str) -> Column:
    """Return the column of exactly this name."""
    from pyspark.sql import functions as F

    return F.col(quoted(name))


# ---- Reference tables
#
# The driver reads reference tables and sends them with the query plan. Workers on other machines therefore need no
# access to the files, and a micro-batch does not read them again. When a file changes, `ReferenceWatch` reports a new
# version, and its queries are restarted from their checkpoints, which takes about a second.
#
# (help: pipeline-rules)

FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
CHECK_INTERVAL_S = 1.0

Fingerprint = tuple[tuple[str, int, int, int], ...]
"""Name, inode, modification time and size of each file. It changes when the table may have changed."""


def table(spark: SparkSession, declaration: Declaration, folder: Path) -> DataFrame:
    """Read a reference.

    Args:
        spark: the session.
        declaration: a @reference. Its path is a CSV file with a header, a JSON file (one object per line, or a list of
            objects), a Parquet file, or a folder of such files. Spark reads a URI such as s3a://…
        folder: the folder of pipelines, to which the path is relative.

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
        raise PipelineError(f"{_prefix(declaration)}: the name of {path} must end with {', '.join(FORMATS)}.")
    reader = spark.read.format(FORMATS[suffix]).option("header", True)
    ddl = declaration.options["schema"]
    return reader.schema(ddl).load(path) if ddl else reader.option("inferSchema", True).load(path)


class ReferenceWatch:
    """Detects changes of references.

    Args:
        declarations: the references.
        folder: the folder of pipelines.
        report: called once for each change that can't be read; the previous rows stay in use.
    """

    def __init__(self, declarations: Iterable[Declaration], folder: Path, report: Callable[[str], None]) -> None:
        here = [each for each in declarations if not locations.is_elsewhere(each.options["path"])]
        self._files = {each.name: _File(each, folder) for each in here}
        self._report = report
        self._next_check_s = time.monotonic() + CHECK_INTERVAL_S

    def versions(self, names: Iterable[str]) -> list[int]:
        """Return a version number for each of these references; a new number means that it must be read again.

        Files are checked at most once a second. A change is reported when the next check finds the same content, so
        that the file is complete.
        """
        if self._files and time.monotonic() >= self._next_check_s:
            self._next_check_s = time.monotonic() + CHECK_INTERVAL_S
            for file in self._files.values():
                try:
                    file.check()
                except PipelineError as error:
                    self._report(f"{error} The previous rows stay in use.")
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
            self._used = now  # also after an error, which is reported once
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

    prefix, schema, ddl = _prefix(declaration), None, declaration.options["schema"]
    if ddl:
        from pyspark.errors import ParseException
        from pyspark.sql.pandas.types import to_arrow_schema
        from pyspark.sql.types import StructType

        try:
            schema = to_arrow_schema(cast(StructType, StructType.fromDDL(ddl)), timezone="UTC")
        except ParseException as error:
            raise PipelineError(f"{prefix}: schema={ddl!r} can't be read: {first_line(error)}") from None
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
        reason = f"the files in {files[0].parent} have different columns: {first_line(error)}"
        raise PipelineError(f"{prefix}: {reason}") from None


def _files(declaration: Declaration, folder: Path) -> list[Path]:
    prefix = _prefix(declaration)
    path = folder / locations.local_folder(declaration.options["path"], prefix, "Spark reads it")
    files = sorted(each for each in path.iterdir() if each.suffix.lower() in FORMATS) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise PipelineError(
            f"{prefix}: {path} {'has no such file' if path.is_dir() else 'does not exist'}; "
            "a path is relative to the folder of pipelines."
        )
    if files[0].suffix.lower() not in FORMATS:
        raise PipelineError(f"{prefix}: the name of {path} must end with {', '.join(FORMATS)}.")
    return files


def _csv(path: Path, schema: Schema | None) -> Table:
    from pyarrow import csv

    types = {field.name: field.type for field in schema} if schema else None
    options = csv.ConvertOptions(
        column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    # With several threads the error does not have the row of an invalid value.
    return csv.read_csv(path, csv.ReadOptions(use_threads=False), convert_options=options)


def _json(path: Path, schema: Schema | None) -> Table:
    import pyarrow

    text = path.read_text("utf-8")
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("it must contain JSON objects, one per line or in one list.")
    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.table({name: [row.get(name) for row in rows] for name in names})


def _parquet(path: Path, schema: Schema | None) -> Table:
    from pyarrow import parquet

    return parquet.read_table(path, partitioning=None)


_READERS: dict[str, Callable[[Path, Any], Any]] = {"csv": _csv, "json": _json, "parquet": _parquet}


def _prefix(declaration: Declaration) -> str:
    return f"{declaration.where}: @reference {declaration.name}"
