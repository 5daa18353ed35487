"""Declarations of a folder of pipelines: `load(folder)` gives its `Catalog`."""

from __future__ import annotations

import difflib
import importlib.util
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import PathEntryFinder
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from smqrt.errors import PipelineError
from smqrt.pipeline import api
from smqrt.pipeline.api import Declaration

_EARLY = (
    "this needs Spark, which starts when all pipelines have been read: give a function's type as an object, such as "
    "F.udf(IntegerType()) of pyspark.sql.types for F.udf('int'), and do the rest inside of the query."
)


class Catalog:
    """The declarations of one folder, checked: every input exists, and nothing reads itself.

    Args:
        folder: where the files are; paths of references are relative to it.
        declarations: in the order of the files and lines.

    Raises:
        PipelineError: two have one name, an input isn't declared, or there is a circle.
    """

    def __init__(self, folder: Path, declarations: Iterable[Declaration]) -> None:
        self.folder = folder
        self.declarations: dict[str, Declaration] = {}
        for declaration in declarations:
            self._add(declaration)
        for declaration in self.declarations.values():
            self._check_inputs(declaration)
        for declaration in self.declarations.values():
            self._check_sources(declaration)

    def _add(self, declaration: Declaration) -> None:
        earlier = self.declarations.get(declaration.name)
        if earlier is not None:
            raise PipelineError(
                f"{declaration.where}: {declaration.name} is also declared at {earlier.where}; rename one of them."
            )
        self.declarations[declaration.name] = declaration

    def _check_inputs(self, declaration: Declaration) -> None:
        for name in declaration.inputs:
            found = self.declarations.get(name)
            if found is None:
                raise PipelineError(f"{declaration.where}: {declaration.name} reads {name!r}, {self._unknown(name)}")
            if found.kind == "alert":
                message = f"{declaration.name} reads the alert {name}; let it read what {name} reads."
                raise PipelineError(f"{declaration.where}: {message}")

    def _check_sources(self, declaration: Declaration) -> None:
        if not self.sources_of(declaration) and declaration.is_query:
            raise PipelineError(f"{declaration.where}: {declaration.name} reads no @source: there is nothing to run.")

    def _unknown(self, name: str) -> str:
        return f"which no @source, @reference or function declares; {self._hint(name)}"

    def _hint(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.declarations, 1)
        return f"did you mean {near[0]!r}?" if near else f"declared are {', '.join(self.declarations) or 'none'}."

    def queries(self) -> list[Declaration]:
        """Return what runs by itself: the declarations of @publish, @table and @alert."""
        return [declaration for declaration in self.declarations.values() if declaration.is_query]

    def get(self, name: str) -> Declaration:
        """Return a declaration by name.

        Raises:
            PipelineError: there is none.
        """
        if name not in self.declarations:
            raise PipelineError(f"There is no pipeline {name!r} in {self.folder}; {self._hint(name)}")
        return self.declarations[name]

    def select(self, names: Iterable[str] = ()) -> list[Declaration]:
        """Return the queries with these names, or all when none is given.

        Raises:
            PipelineError: a name is unknown or isn't that of a query, or there is no query at all.
        """
        found = [self.get(name) for name in names] or self.queries()
        for declaration in found:
            if not declaration.is_query:
                raise PipelineError(
                    f"{declaration.where}: {declaration.name} is a {declaration.kind}, which doesn't run by itself; "
                    f"the queries are {', '.join(query.name for query in self.queries()) or 'none'}."
                )
        if not found:
            raise PipelineError(f"There is no query in {self.folder}: nothing has @publish, @table or @alert.")
        return found

    def walk(self, declaration: Declaration) -> list[Declaration]:
        """Return a declaration after everything that it reads, each once.

        Raises:
            PipelineError: it reads itself.
        """
        found: dict[str, Declaration] = {}
        self._visit(declaration, found, [])
        return list(found.values())

    def _visit(self, declaration: Declaration, found: dict[str, Declaration], path: list[str]) -> None:
        if declaration.name in path:
            circle = " reads ".join([*path[path.index(declaration.name) :], declaration.name])
            raise PipelineError(f"{declaration.where}: {circle}; a pipeline can't read itself.")
        for name in declaration.inputs:
            self._visit(self.declarations[name], found, [*path, declaration.name])
        found.setdefault(declaration.name, declaration)

    def sources_of(self, declaration: Declaration) -> list[Declaration]:
        """Return the sources that a declaration reads, directly or not."""
        return [each for each in self.walk(declaration) if each.kind == "source"]


def load(folder: Path) -> Catalog:
    """Read every `*.py` and `*.sql` of a folder; names that begin with `_` or `test_` are left out.

    Args:
        folder: usually `<application>/pipelines`; one file may be given too.

    Returns:
        What they declare.

    Raises:
        PipelineError: there is no such folder, a file can't be run, or what it declares is wrong. The message begins
            with file:line.
    """
    if not folder.exists():
        raise PipelineError(f"There is no {folder}: pipelines are its .py and .sql files; see smqrt pipeline init.")
    home = folder.parent if folder.is_file() else folder
    return Catalog(home, [found for path in _files(folder) for found in _declared(path)])


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    found = [path for path in folder.iterdir() if path.suffix in (".py", ".sql") and path.is_file()]
    return sorted(path for path in found if not path.name.startswith(("_", "test_", ".")))


def _declared(path: Path) -> list[Declaration]:
    if path.suffix == ".sql":
        found = load_sql(path)
        return [found] if found else []
    module = _imported(path)
    own = [value for value in vars(module).values() if _is_of(value, path)]
    declared = {each.name: each for value in own if (each := api.declaration_of(value))}
    return sorted(_with_views(declared, own), key=lambda each: each.line)


def _is_of(value: Any, path: Path) -> bool:
    return callable(value) and getattr(getattr(value, "__code__", None), "co_filename", "") == str(path)


def _with_views(declared: dict[str, Declaration], own: list[Any]) -> Iterator[Declaration]:
    """A plain function that another one names as an input is a view."""
    plain = {value.__name__: value for value in own if value.__name__ not in declared}
    waiting = list(declared.values())
    while waiting:
        each = waiting.pop()
        yield each
        for name in each.inputs:
            if name in plain:
                waiting.append(api.implied_view(plain.pop(name)))


def _imported(path: Path) -> ModuleType:
    """Run a file as a module that sys.modules does not know: what it defines goes to Spark's workers by value."""
    name = f"smqrt_pipelines_{path.stem}"
    loader = _SourceLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with _modules_of(path.parent):
        try:
            loader.exec_module(module)
        except PipelineError:
            raise
        except Exception as error:
            raise PipelineError(f"{_error_line(error, path)}: {_sentence(error)}") from error
    return module


class _SourceLoader(SourceFileLoader):
    """Compiles a file each time. Python's bytecode counts as current while the file's size and the second of its change
    are the same, and an edit may leave both as they were.
    """

    def get_code(self, fullname: str) -> CodeType:
        """See `InspectLoader.get_code`."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


@contextmanager
def _modules_of(folder: Path) -> Iterator[None]:
    """Files may import what lies beside them, which is as it is now, and forgotten afterwards."""
    loaders = (ExtensionFileLoader, EXTENSION_SUFFIXES), (_SourceLoader, SOURCE_SUFFIXES)
    find = FileFinder.path_hook(*loaders)

    def hook(path: str) -> PathEntryFinder:
        if not Path(path).is_relative_to(folder):
            raise ImportError(path)
        return find(path)

    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    sys.path_hooks.insert(0, hook)
    _forget_finders(folder)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.path_hooks.remove(hook)
        _forget_finders(folder)
        _forget(folder, set(sys.modules) - before)


def _forget_finders(folder: Path) -> None:
    for path in [path for path in sys.path_importer_cache if Path(path).is_relative_to(folder)]:
        del sys.path_importer_cache[path]


def _forget(folder: Path, names: set[str]) -> None:
    for name in names:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(folder):
            del sys.modules[name]


def _error_line(error: Exception, path: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    lines = [entry.lineno for entry in traceback.extract_tb(error.__traceback__) if entry.filename == str(path)]
    return f"{path}:{lines[-1] if lines else 1}"


def _asks_spark(error: Exception) -> bool:
    """Return whether pyspark says that Spark doesn't run; many of its functions only assert it."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return "SESSION_OR_CONTEXT_NOT_EXISTS" in str(error) or (isinstance(error, AssertionError) and "/pyspark/" in last)


def _sentence(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"it isn't Python: {error.msg}."
    if isinstance(error, TypeError) and "required positional argument" in str(error):
        return f"{error}; give it to the decorator."
    if _asks_spark(error):
        return _EARLY
    return f"it can't be loaded: {type(error).__name__}: {error}."


# ---- SQL files as parts of a pipeline: what their first comments declare, and which inputs their FROM and JOIN name.
#
#     -- @publish to=alerts/{topic} mode=append
#     -- @expect "temp is not null"
#     SELECT topic, temp, ts FROM STREAM readings WHERE temp > 80
#
# The name is the file's name. `STREAM` before an input is allowed and means nothing: whether an input is a stream is
# known. Values with spaces are quoted; lists are written with commas.

_DECORATORS = ("source", "view", "publish", "table", "alert", "reference", "expect")
_BODILESS = ("source", "reference")
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
        The declaration, or None when the file declares nothing.

    Raises:
        PipelineError: a header is wrong, or the name is none.
    """
    text = path.read_text("utf-8")
    headers = list(_headers(path, text))
    if not headers:
        return None
    kinds = [header for header in headers if header[1] != "expect"]
    if len(kinds) != 1:
        raise PipelineError(f"{path}:{headers[0][0]}: a SQL file declares one thing, and this one {len(kinds)}.")
    if not path.stem.isidentifier():
        raise PipelineError(f"{path}:1: {path.stem!r} can't be a name; use letters, digits and underscores.")
    line, kind, rest = kinds[0]
    found = _declare(path, line, kind, rest, text)
    for number, _, condition in (header for header in headers if header[1] == "expect"):
        found.expectations.append(_expectation(f"{path}:{number}", condition))
    return found


def inputs(query: str) -> list[str]:
    """Return the names that the FROM and JOIN of a query read, in order, without those of its WITH."""
    names, local = [], set(re.findall(r"(?:\bWITH\b|,)\s*(\w+)\s+AS\s*\(", query, re.IGNORECASE))
    for start, end in _spans(query):
        name = query[start:end].strip("`")
        if name not in local and name not in names:
            names.append(name)
    return names


def _headers(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if match := _HEADER.fullmatch(line):
            if match[1] not in _DECORATORS:
                raise PipelineError(f"{path}:{number}: there is no @{match[1]}; there are @{', @'.join(_DECORATORS)}.")
            yield number, match[1], match[2]


def _declare(path: Path, line: int, kind: str, rest: str, text: str) -> api.Declaration:
    where = f"{path}:{line}"
    query = _without_streams("\n".join("" if _HEADER.fullmatch(row) else row for row in text.splitlines()))
    empty = not re.sub(r"--[^\n]*|/\*.*?\*/|[\s;]", "", query, flags=re.DOTALL)
    if empty != (kind in _BODILESS):
        raise PipelineError(f"{where}: @{kind} {'needs a query below it' if empty else 'takes no query'}.")
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
    found.inputs = () if kind in _BODILESS else tuple(inputs(query))
    return found


def _expectation(where: str, rest: str) -> api.Expectation:
    positional, options = _arguments(where, rest)
    try:
        return api.expectation(where, *positional, **options)
    except TypeError as error:
        raise PipelineError(f"{where}: @expect: {str(error).split('() ', 1)[-1]}.") from None


def _arguments(where: str, rest: str) -> tuple[list[str], dict[str, Any]]:
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise PipelineError(f"{where}: {rest!r} can't be read: {error}; quote values that have spaces.") from None
    positional = [word for word in words if not re.match(r"\w+=", word)]
    pairs = (word.split("=", 1) for word in words if re.match(r"\w+=", word))
    return positional, {name: _value(name, value) for name, value in pairs}


def _value(name: str, value: str) -> Any:
    if name in _LISTS:
        return [item.strip() for item in value.split(",")]
    if value in ("true", "false"):
        return value == "true"
    return int(value) if name in _NUMBERS and value.isdecimal() else value


def _function(query: str, names: Sequence[str]) -> Any:
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

    # What a decorator looks at: a SQL file has any number of inputs.
    run.__signature__ = _signature(names or ("frame",))  # type: ignore[attr-defined]
    return run


def _signature(names: Sequence[str]) -> Any:
    from inspect import Parameter, Signature

    return Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])


def _without_streams(query: str) -> str:
    query = re.sub(r"\bSTREAM\s*\(\s*(\w+)\s*\)", r"\1", query, flags=re.IGNORECASE)
    return re.sub(r"\b(FROM|JOIN|,)(\s+)STREAM\s+(?=\w)", r"\1\2", query, flags=re.IGNORECASE).strip().rstrip(";")


def _spans(query: str) -> Iterator[tuple[int, int]]:
    """Yield where the inputs of a query stand."""
    openers: list[str] = [""]
    before = ["", ""]
    expected = False
    listing = [False]
    for match in _TOKEN.finditer(query):
        if match["skip"]:
            continue
        text = match[0].upper()
        if match["word"]:
            named = expected and text not in _NOT_A_NAME
            if named:
                yield match.span()
            listing[-1] = named or (listing[-1] and text not in _ENDS_LIST)
            expected = _opens(text, before, openers[-1])
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


def _opens(word: str, before: Sequence[str], opener: str) -> bool:
    if word == "JOIN":
        return True
    return word == "FROM" and before[-1] != "DISTINCT" and opener not in _FROM_INSIDE
