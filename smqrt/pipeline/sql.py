"""SQL files as parts of a pipeline: what their first comments declare, and which inputs their FROM and JOIN name.

    -- @publish to=alerts/{topic} mode=append
    -- @expect "temp is not null"
    SELECT topic, temp, ts FROM STREAM readings WHERE temp > 80

The name is the file's name. `STREAM` before an input is allowed and means nothing: whether an input is a stream is
known. Values with spaces are quoted; lists are written with commas.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from smqrt.errors import PipelineError
from smqrt.pipeline import api

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


def load(path: Path) -> api.Declaration | None:
    """Reads a SQL file.

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
    """Returns the names that the FROM and JOIN of a query read, in order, without those of its WITH."""
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
    """Yields where the inputs of a query stand."""
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
