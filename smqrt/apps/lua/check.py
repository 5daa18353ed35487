"""Calls of a Barracuda application that are absent here, found by reading its Lua and pages
without running them. Which names there are says `api_table`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from smqrt.apps.lua.api.pages import LspError, to_lua
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm, requirable_source
from smqrt.errors import StartError
from smqrt.http.disk import DiskIo, ZipIo
from smqrt.http.resources import Io, IoError
from smqrt.manual import pages

# ---- The tokens of Lua source text, in linear time whatever the text is.

_TOKEN = re.compile(
    r"""\s+ | --(?!\[=*\[)[^\n]* | (?P<long>(?:--)?\[(?P<level>=*)\[) | (?P<name>[A-Za-z_]\w*)
    | (?P<string>"[^"\\\n]*(?:\\.[^"\\\n]*)*" | '[^'\\\n]*(?:\\.[^'\\\n]*)*')
    | (?P<number>0[xX][\w.]+ | \d[\w.]*) | (?P<mark>\.\.\.|\.\.|::|==|~=|<=|>=|//|<<|>>|.)""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)


class Token(NamedTuple):
    """A token that is neither space nor comment.

    Attributes:
        kind: "name" (keywords too), "string", "number" or "mark".
        text: as written; of strings what is between the quotes or brackets.
        line: where it begins.
    """

    kind: str
    text: str
    line: int


def tokens(source: str) -> Iterator[Token]:
    """The tokens of a text. Behind a long string or comment without an end there are none."""
    at, line = 0, 1
    while found := _TOKEN.match(source, at):
        kind, text, end = found.lastgroup, found[0], found.end()
        if found["long"]:
            close = source.find(f"]{found['level']}]", end)
            if close < 0:
                return
            kind = None if text.startswith("--") else "string"
            text, end = source[end:close], close + len(found["level"]) + 2
        elif kind == "string":
            text = text[1:-1]
        if kind:
            yield Token(kind, text, line)
        line += source.count("\n", at, end)
        at = end


# ---- The API of the Barracuda App Server, read from the rows of the manual's page lua-api, which a test checks.

PAGE = "lua-api"

_ROW = re.compile(r"^\| (.*?) \| (.*?) \| ?(.*?) ?\|$", re.MULTILINE)
_ITEM = re.compile(r"`([^`]+)`")
_NAME = re.compile(r"[A-Za-z_]\w*(?:[.:][A-Za-z_]\w*)*")
_MODULE = re.compile(r'require "([^"]+)"')
_ABSENT = ("not yet", "no")


@dataclass
class ApiTable:
    """The names of the API, and whether they are there.

    Attributes:
        there: those that are, such as "ba.json.encode" and "dir:insert".
        absent: those that are not, with what the page says about it.
        modules, absent_modules: the same for `require`.
    """

    there: set[str] = field(default_factory=set)
    absent: dict[str, str] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    absent_modules: dict[str, str] = field(default_factory=dict)

    def row_of(self, name: str) -> str | None:
        """The row that tells about `name`: itself, or what it is a part of; None when there is none."""
        while name not in self.there and name not in self.absent:
            name, dot, _ = name.rpartition(".")
            if not dot:
                return None
        return name

    def is_namespace(self, name: str) -> bool:
        """Whether `name` is the first part of other names, as "ba.create" is."""
        return any(known.startswith(f"{name}.") for known in (*self.there, *self.absent))

    def has_object(self, kind: str) -> bool:
        """Whether the methods of objects of this kind are known."""
        return any(known.startswith(f"{kind}:") for known in self.there)


def read(page: str | None = None) -> ApiTable:
    """Returns the table of a page, the manual's by default."""
    table = ApiTable()
    for items, there, note in _ROW.findall(pages.pages()[PAGE] if page is None else page):
        for item in _ITEM.findall(items):
            _add(table, item, there in _ABSENT, pages.plain(note))
    return table


def _add(table: ApiTable, item: str, is_absent: bool, note: str) -> None:
    if module := _MODULE.fullmatch(item):
        if is_absent:
            table.absent_modules[module[1].replace("/", ".")] = note
        else:
            table.modules.add(module[1].replace("/", "."))
    elif name := _NAME.fullmatch(item.removesuffix("()")):
        if is_absent:
            table.absent[name[0]] = note
        else:
            table.there.add(name[0])


MAX_FILE_BYTES = 2 << 20
MAX_FILES = 10_000
MAX_DEPTH = 32

_CODE = (".lua", ".lsp", ".xlua")
_SPECIAL = (".preload", ".config")
_OTHERS = (".git", ".hg", "node_modules", "__pycache__")

_LUA_ERROR = re.compile(r"page:(\d+): (.*)")

SYNTAX, ABSENT, UNKNOWN, SKIPPED = "syntax", "absent", "unknown", "skipped"


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One line of the report.

    Attributes:
        path: the file, from the application's folder.
        line: in it; 0 for all of it.
        kind: "syntax", "absent", "unknown" or "skipped".
        name: what is meant, such as "ba.create.wfs" or 'require "lpeg"'.
        note: a sentence; for a syntax error what Lua says.
        is_tested: whether the file tests for it, so that it may do without.
    """

    path: str
    line: int
    kind: str
    name: str
    note: str = ""
    is_tested: bool = False


@dataclass
class Report:
    """What was found, and how many files were read."""

    findings: list[Finding] = field(default_factory=list)
    files: int = 0

    def count(self, kind: str) -> int:
        """How many findings there are of a kind."""
        return sum(finding.kind == kind for finding in self.findings)


def check(path: Path, table: ApiTable) -> Report:
    """Read the applications in a folder or ZIP file.

    Raises:
        StartError: there is no such folder or ZIP file.
    """
    try:
        io: Io = DiskIo(path) if path.is_dir() else ZipIo(path)
    except IoError as error:
        raise StartError(f"{path} is neither a folder nor a ZIP file ({error}).") from None
    checker = _Checker(table)
    checker.read_all(io)
    return Report(sorted(set(checker.findings())), checker.files)


class _Checker:
    """Reads files, then tells what is missing: what one of them defines the others may use."""

    def __init__(self, table: ApiTable) -> None:
        self._table = table
        self._vm = Vm()
        self._found: list[Finding] = []
        self._uses: list[tuple[str, Uses]] = []
        self._modules: set[str] = set()
        self._folders: set[tuple[str, str]] = set()
        self.files = 0

    def read_all(self, io: Io, prefix: str = "", folder: str = "", depth: int = 0) -> None:
        """Read a folder and those in it."""
        if depth > MAX_DEPTH or self.files > MAX_FILES:
            self._skip(prefix + folder, f"more than {MAX_FILES} files, or {MAX_DEPTH} folders deep")
            return
        real = prefix, os.path.realpath(io.realpath(folder))
        if real in self._folders:  # a link leads back
            return
        self._folders.add(real)
        try:
            entries = sorted(io.files(folder), key=lambda entry: entry.name)
        except IoError as error:
            self._skip(prefix + folder, str(error))
            return
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.isdir:
                if entry.name not in _OTHERS:
                    self.read_all(io, prefix, name, depth + 1)
            elif entry.name.endswith(".zip") and not prefix:
                self._read_zip(io, name, depth)
            elif entry.name.endswith(_CODE) or entry.name in _SPECIAL:
                self._read(io, prefix, name, entry.size)

    def _read_zip(self, io: Io, name: str, depth: int) -> None:
        try:
            self.read_all(io.sub(name), f"{name}/", "", depth + 1)
        except IoError:
            pass  # a ZIP file inside another, or none at all: data of the application

    def _read(self, io: Io, prefix: str, name: str, size_bytes: int) -> None:
        path = prefix + name
        try:
            if size_bytes > MAX_FILE_BYTES:
                raise IoError("toomuchdata", f"a file may have {MAX_FILE_BYTES >> 20} MiB")
            with io.open(name) as file:
                data = file.read(MAX_FILE_BYTES)
        except IoError as error:
            self._skip(path, str(error))
            return
        self.files += 1
        if module := re.search(r"(?:^|/)\.lua/(.+)\.lua$", path):
            self._modules.add(module[1].replace("/", "."))
        try:
            source = to_lua(data) if name.endswith(".lsp") else data
        except LspError as error:
            self._found.append(Finding(path, _line_in(str(error)), SYNTAX, "", str(error)))
            return
        self._compile(path, source)
        self._uses.append((path, uses(source.decode("latin-1"))))

    def _compile(self, path: str, source: bytes) -> None:
        try:
            self._vm.free(self._vm.compile(source, "=page"))
        except LuaError as error:
            message = str(error).partition("\n")[0]
            found = _LUA_ERROR.fullmatch(message)
            self._found.append(Finding(path, int(found[1]) if found else 0, SYNTAX, "", found[2] if found else message))

    def _skip(self, path: str, why: str) -> None:
        self._found.append(Finding(path, 0, SKIPPED, "", why))

    def findings(self) -> Iterator[Finding]:
        """Everything that was found."""
        yield from self._found
        own = {name for _, used in self._uses for name in used.defined}
        for path, used in self._uses:
            for name, line in used.names:
                yield from self._name(path, line, name, used, own)
            for module, line in used.modules:
                yield from self._module(path, line, module, used)

    def _name(self, path: str, line: int, name: str, used: Uses, own: set[str]) -> Iterator[Finding]:
        if any(part in own for part in prefixes(name)):
            return
        kind, colon, method = name.partition(":")
        row = self._row_of_method(kind, method) if colon else self._table.row_of(name)
        is_tested = any(part in used.tested for part in prefixes(name))
        if row in self._table.absent:
            yield Finding(path, line, ABSENT, name, self._table.absent[row], is_tested)
        elif row is None and self._is_ours(kind, colon, name):
            yield Finding(path, line, UNKNOWN, name, "", is_tested)

    def _row_of_method(self, kind: str, method: str) -> str | None:
        kinds = ("request", "response") if kind in ("request", "response", "cmd") else (kind,)
        known = [f"{one}:{method}" for one in kinds]
        there = [name for name in known if name in self._table.there]
        return next(iter(there + [name for name in known if name in self._table.absent]), None)

    def _is_ours(self, kind: str, colon: str, name: str) -> bool:
        """Whether the table would have a row for such a name."""
        if colon:
            method = name.partition(":")[2]
            return not _STRING_METHODS.fullmatch(method) and (kind == "cmd" or self._table.has_object(kind))
        return name.partition(".")[0] in ("ba", "mako") and not self._table.is_namespace(name)

    def _module(self, path: str, line: int, module: str, used: Uses) -> Iterator[Finding]:
        name = module.replace("/", ".")
        if name in self._modules or name in self._table.modules or name in _STANDARD or requirable_source(name):
            return
        is_tested = module in used.tested_modules
        if name in self._table.absent_modules:
            yield Finding(path, line, ABSENT, f'require "{module}"', self._table.absent_modules[name], is_tested)
        else:
            yield Finding(path, line, UNKNOWN, f'require "{module}"', "", is_tested)


def _line_in(text: str) -> int:
    found = re.search(r"line# (\d+)", text)
    return int(found[1]) if found else 0


def prefixes(name: str) -> list[str]:
    """The name and what it is a part of: "ba.tpm.sign", "ba.tpm", "ba"."""
    parts = re.split(r"(?=[.:])", name)
    return ["".join(parts[:count]) for count in range(len(parts), 0, -1)]


# ---- one file

_STANDARD = ("string", "table", "math", "os", "coroutine", "utf8", "debug", "package", "io", "luasql")
_STRING_METHODS = re.compile(r"byte|find|format|gmatch|gsub|len|lower|match|pack|rep|reverse|sub|unpack|upper")
_ROOTS = ("ba", "mako", "luasql", "io", "os", "package", "debug", "string", "require")
_OBJECTS = {"request": "request", "response": "response", "cmd": "cmd", "dir": "dir", "io": "io"}
"""What variables of these names hold, by custom."""
_MAKERS = {
    "ba.create.dir": "dir",
    "ba.create.resrdr": "dir",
    "ba.openio": "io",
    "ba.mkio": "io",
    "ba.socket.connect": "sock",
    "ba.socket.bind": "sock",
    "ba.socket.udpcon": "sock",
    "ba.socket.req2sock": "sock",
    "ba.socket.event": "sock",
    "ba.socket.getsock": "sock",
    "ba.socket.http2sock": "sock",
    "ba.timer": "timer",
    "ba.thread.create": "thread",
    "request:session": "session",
    "io:open": "file",
}
"""What the value of a call is."""
_TESTS_BEFORE = ("if", "elseif", "not", "and", "or", "while", "until", "==", "~=")
_TESTS_BEHIND = ("then", "and", "or", "==", "~=", "do")


@dataclass
class Uses:
    """What a file uses of the server.

    Attributes:
        names: names such as "ba.json.encode" and "dir:insert", with their lines.
        modules: what it requires, with the lines.
        tested, tested_modules: names and modules that it tests for.
        defined: names that it assigns.
    """

    names: list[tuple[str, int]] = field(default_factory=list)
    modules: list[tuple[str, int]] = field(default_factory=list)
    tested: set[str] = field(default_factory=set)
    tested_modules: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)


def uses(source: str) -> Uses:
    """Returns what Lua source text uses."""
    return _Reader(list(tokens(source))).read()


class _Reader:
    """Goes over the tokens of a file once, from one chain of names to the next."""

    def __init__(self, found: list[Token]) -> None:
        self._tokens = found
        self._uses = Uses()
        self._aliases: dict[str, str] = {}
        self._kinds: dict[str, str] = {}

    def read(self) -> Uses:
        """Returns what was found."""
        at = 0
        while at < len(self._tokens):
            token = self._tokens[at]
            if token.kind != "name" or self._text(at - 1) in (".", ":"):
                at += 1
            else:
                at = self._chain(at)
        return self._uses

    def _text(self, at: int) -> str:
        if not 0 <= at < len(self._tokens) or self._tokens[at].kind == "string":
            return ""
        return self._tokens[at].text

    def _chain(self, begin: int) -> int:
        """Read `a.b:c` from `begin`; returns what is behind it."""
        at, parts = begin + 1, [self._tokens[begin].text]
        while self._text(at) in (".", ":") and at + 1 < len(self._tokens) and self._tokens[at + 1].kind == "name":
            parts += (self._text(at), self._tokens[at + 1].text)
            at += 2
        if parts[:2] == ["_G", "."]:
            parts = parts[2:]
        if parts[0] == "require":
            self._require(begin, at)
        elif name := self._meaning(parts):
            self._used(name, begin, at)
            if len(parts) == 1:
                return at
        self._assigned(begin, parts)
        return at

    def _meaning(self, parts: list[str]) -> str:
        """What the server calls `a.b:c`; empty when it is not the server's."""
        if ":" in parts:
            colon = parts.index(":")
            kind = self._kinds.get(parts[colon - 1], _OBJECTS.get(parts[colon - 1], ""))
            return f"{kind}:{parts[colon + 1]}" if kind else ""
        name = self._aliases.get(parts[0], parts[0]) + "".join(parts[1:])
        return name if name.partition(".")[0] in _ROOTS and "." in name else ""

    def _used(self, name: str, begin: int, end: int) -> None:
        before, behind = self._text(begin - 1), self._text(end)
        line = self._tokens[begin].line
        is_call = behind in ("(", "{") or (end < len(self._tokens) and self._tokens[end].kind == "string")
        if before == "function" or (behind == "=" and before not in (",", "{", "(")):
            self._uses.defined.add(name)
        elif not is_call and (before in _TESTS_BEFORE or behind in _TESTS_BEHIND or self._is_type_of(begin)):
            self._uses.tested.add(name)
        else:
            self._uses.names.append((name, line))

    def _is_type_of(self, at: int) -> bool:
        return self._text(at - 1) == "(" and self._text(at - 2) == "type"

    def _require(self, begin: int, end: int) -> None:
        at = end + 1 if self._text(end) in ("(", ",") else end
        if at < len(self._tokens) and self._tokens[at].kind == "string":
            module = self._tokens[at].text
            self._uses.modules.append((module, self._tokens[begin].line))
            if self._text(begin - 2) in ("pcall", "xpcall"):
                self._uses.tested_modules.add(module)

    def _assigned(self, begin: int, parts: list[str]) -> None:
        """Remember what `x = ba.create` and `x = ba.create.dir(...)` make of x."""
        if self._text(begin - 1) != "=" or begin < 2 or self._tokens[begin - 2].kind != "name":
            return
        variable, name = self._tokens[begin - 2].text, self._meaning(parts) or "".join(parts)
        end = begin + len(parts)
        if self._text(end) in ("(", "{") or (end < len(self._tokens) and self._tokens[end].kind == "string"):
            self._kinds[variable] = _MAKERS.get(name, "")
        elif name.partition(".")[0] in _ROOTS[:3]:
            self._aliases[variable] = name
        elif parts[-1] in _OBJECTS and len(parts) > 1:
            self._kinds[variable] = _OBJECTS[parts[-1]]
