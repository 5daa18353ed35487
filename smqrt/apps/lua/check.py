"""Check of Barracuda applications for calls that smqrt does not support.

It reads the Lua files and pages of an application without running them. The supported names are in the manual's page
lua-api.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from smqrt.apps.lua.api.dirs import LspError, to_lua
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm, requirable_source
from smqrt.errors import StartError
from smqrt.http.disk import DiskIo, ZipIo
from smqrt.http.resources import Io, IoError
from smqrt.manual import pages

# ---- Tokens of Lua source text, in linear time for any text

_TOKEN = re.compile(
    r"""\s+ | --(?!\[=*\[)[^\n]* | (?P<long>(?:--)?\[(?P<level>=*)\[) | (?P<name>[A-Za-z_]\w*)
    | (?P<string>"[^"\\\n]*(?:\\.[^"\\\n]*)*" | '[^'\\\n]*(?:\\.[^'\\\n]*)*')
    | (?P<number>0[xX][\w.]+ | \d[\w.]*) | (?P<mark>\.\.\.|\.\.|::|==|~=|<=|>=|//|<<|>>|.)""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)


class Token(NamedTuple):
    """A token. Spaces and comments are not tokens.

    Attributes:
        kind: "name" (also keywords), "string", "number" or "mark".
        text: the text; of strings without the quotes or brackets.
        line: its first line.
    """

    kind: str
    text: str
    line: int


def tokens(source: str) -> Iterator[Token]:
    """Yield the tokens of a text, up to a long string or comment without an end."""
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


# ---- The API of the Barracuda App Server, from the tables of the manual's page lua-api, which a test verifies

PAGE = "lua-api"

_ROW = re.compile(r"^\| (.*?) \| (.*?) \| ?(.*?) ?\|$", re.MULTILINE)
_ITEM = re.compile(r"`([^`]+)`")
_NAME = re.compile(r"([A-Za-z_]\w*(?:[.:][A-Za-z_]\w*)*)(?:\(.*|: .*)?")  # the rest is the signature
_MODULE = re.compile(r'require "([^"]+)"')
_ABSENT = ("not yet", "no")


@dataclass
class ApiTable:
    """The names of the API and whether they are supported.

    Attributes:
        supported: supported names, such as "ba.json.encode" and "dir:insert".
        absent: absent names, with the note of the page.
        modules, absent_modules: the same for `require`.
    """

    supported: set[str] = field(default_factory=set)
    absent: dict[str, str] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    absent_modules: dict[str, str] = field(default_factory=dict)

    def row_of(self, name: str) -> str | None:
        """Return the name with a row for `name`: itself or its longest prefix; None without a row."""
        while name not in self.supported and name not in self.absent:
            name, dot, _ = name.rpartition(".")
            if not dot:
                return None
        return name

    def is_namespace(self, name: str) -> bool:
        """Return whether `name` is a prefix of other names, such as "ba.create"."""
        return any(known.startswith(f"{name}.") for known in (*self.supported, *self.absent))

    def has_object(self, kind: str) -> bool:
        """Return whether the table has methods of this kind of object."""
        return any(known.startswith(f"{kind}:") for known in self.supported)


def read_table(page: str | None = None) -> ApiTable:
    """Return the table of a page; by default the manual's page lua-api."""
    table = ApiTable()
    for items, support, note in _ROW.findall(pages.pages()[PAGE] if page is None else page):
        for item in _ITEM.findall(items):
            is_absent = support in _ABSENT
            if module := _MODULE.fullmatch(item):
                if is_absent:
                    table.absent_modules[module[1].replace("/", ".")] = pages.plain(note)
                else:
                    table.modules.add(module[1].replace("/", "."))
            elif name := _NAME.fullmatch(item):
                if is_absent:
                    table.absent[name[1]] = pages.plain(note)
                else:
                    table.supported.add(name[1])
    return table


MAX_FILE_BYTES = 2 << 20
MAX_FILES = 10_000
MAX_DEPTH = 32

_CODE = (".lua", ".lsp", ".xlua")
_SPECIAL = (".preload", ".config")
_SKIPPED_FOLDERS = (".git", ".hg", ".luals", "node_modules", "__pycache__")

_LUA_ERROR = re.compile(r"page:(\d+): (.*)")

SYNTAX, ABSENT, UNKNOWN, SKIPPED = "syntax", "absent", "unknown", "skipped"


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A line of the report.

    Attributes:
        path: path of the file in the application's folder.
        line: line in the file; 0 for the whole file.
        kind: "syntax", "absent", "unknown" or "skipped".
        name: the name or call, such as "ba.create.wfs" or 'require "lpeg"'.
        note: a note; for a syntax error Lua's message.
        is_tested: whether the file tests that the name exists, and may work without it.
    """

    path: str
    line: int
    kind: str
    name: str
    note: str = ""
    is_tested: bool = False


@dataclass
class Report:
    """The findings, and the number of files that were read."""

    findings: list[Finding] = field(default_factory=list)
    files: int = 0

    def count(self, kind: str) -> int:
        """Return the number of findings of a kind."""
        return sum(finding.kind == kind for finding in self.findings)


def check_application(path: Path, table: ApiTable) -> Report:
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
    """Reads all files before it searches for missing names, since files may use names that other files define."""

    def __init__(self, table: ApiTable) -> None:
        self._table = table
        self._vm = Vm()
        self._found: list[Finding] = []
        self._uses: list[tuple[str, Uses]] = []
        self._modules: set[str] = set()
        self._folders: set[tuple[str, str]] = set()
        self.files = 0

    def read_all(self, io: Io, prefix: str = "", folder: str = "", depth: int = 0) -> None:
        """Read a folder and its sub-folders."""
        if depth > MAX_DEPTH or self.files > MAX_FILES:
            self._skip(prefix + folder, f"more than {MAX_FILES} files, or {MAX_DEPTH} folders deep")
            return
        real = prefix, os.path.realpath(io.realpath(folder))
        if real in self._folders:  # through a symbolic link
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
                if entry.name not in _SKIPPED_FOLDERS:
                    self.read_all(io, prefix, name, depth + 1)
            elif entry.name.endswith(".zip") and not prefix:
                with suppress(IoError):  # a broken ZIP file, or a ZIP file in a ZIP file: data of the application
                    self.read_all(io.sub(name), f"{name}/", "", depth + 1)
            elif entry.name.endswith(_CODE) or entry.name in _SPECIAL:
                self._read(io, prefix, name, entry.size)

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
            at = re.search(r"line# (\d+)", str(error))
            self._found.append(Finding(path, int(at[1]) if at else 0, SYNTAX, "", str(error)))
            return
        try:
            self._vm.free(self._vm.compile(source, "=page"))
        except LuaError as error:
            message = str(error).partition("\n")[0]
            found = _LUA_ERROR.fullmatch(message)
            self._found.append(Finding(path, int(found[1]) if found else 0, SYNTAX, "", found[2] if found else message))
        self._uses.append((path, uses(source.decode("latin-1"))))

    def _skip(self, path: str, reason: str) -> None:
        self._found.append(Finding(path, 0, SKIPPED, "", reason))

    def findings(self) -> Iterator[Finding]:
        """Yield all findings."""
        yield from self._found
        own = {name for _, used in self._uses for name in used.defined}
        for path, used in self._uses:
            for name, line in used.names:
                yield from self._name(path, line, name, used, own)
            for module, line in used.modules:
                name = module.replace("/", ".")
                known = name in self._modules or name in self._table.modules or name in _STANDARD
                if known or requirable_source(name):
                    continue
                is_tested, call = module in used.tested_modules, f'require "{module}"'
                if name in self._table.absent_modules:
                    yield Finding(path, line, ABSENT, call, self._table.absent_modules[name], is_tested)
                else:
                    yield Finding(path, line, UNKNOWN, call, "", is_tested)

    def _name(self, path: str, line: int, name: str, used: Uses, own: set[str]) -> Iterator[Finding]:
        if any(part in own for part in prefixes(name)):
            return
        kind, colon, method = name.partition(":")
        if colon:
            # In pages, request and response are the same object, which applications also call cmd.
            kinds = ("request", "response") if kind in ("request", "response", "cmd") else (kind,)
            rows = [f"{one}:{method}" for one in kinds]
            supported = [one for one in rows if one in self._table.supported]
            row = next(iter(supported + [one for one in rows if one in self._table.absent]), None)
            is_of_server = kind == "cmd" or self._table.has_object(kind)
            is_unknown = row is None and is_of_server and not _STRING_METHODS.fullmatch(method)
        else:
            row = self._table.row_of(name)
            is_of_server = name.partition(".")[0] in ("ba", "mako")
            is_unknown = row is None and is_of_server and not self._table.is_namespace(name)
        is_tested = any(part in used.tested for part in prefixes(name))
        if row in self._table.absent:
            yield Finding(path, line, ABSENT, name, self._table.absent[row], is_tested)
        elif is_unknown:
            yield Finding(path, line, UNKNOWN, name, "", is_tested)


def prefixes(name: str) -> list[str]:
    """Return a name and its prefixes: "ba.tpm.sign", "ba.tpm", "ba"."""
    parts = re.split(r"(?=[.:])", name)
    return ["".join(parts[:count]) for count in range(len(parts), 0, -1)]


# ---- one file

_STANDARD = ("string", "table", "math", "os", "coroutine", "utf8", "debug", "package", "io", "luasql")
_STRING_METHODS = re.compile(r"byte|find|format|gmatch|gsub|len|lower|match|pack|rep|reverse|sub|unpack|upper")
_ROOTS = ("ba", "mako", "luasql", "io", "os", "package", "debug", "string", "require")
_OBJECTS = {"request": "request", "response": "response", "cmd": "cmd", "dir": "dir", "io": "io"}
"""Kinds of objects that variables with these names hold by convention."""
_RESULT_KINDS = {
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
"""Kinds of objects that these calls return."""
# Words beside a name that show that the file only tests whether it exists.
_TESTS_BEFORE = ("if", "elseif", "not", "and", "or", "while", "until", "==", "~=")
_TESTS_AFTER = ("then", "and", "or", "==", "~=", "do")


@dataclass
class Uses:
    """The names of the server that a file uses.

    Attributes:
        names: names such as "ba.json.encode" and "dir:insert", with their lines.
        modules: required modules, with their lines.
        tested, tested_modules: names and modules whose existence the file tests.
        defined: names that the file assigns.
    """

    names: list[tuple[str, int]] = field(default_factory=list)
    modules: list[tuple[str, int]] = field(default_factory=list)
    tested: set[str] = field(default_factory=set)
    tested_modules: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)


def uses(source: str) -> Uses:
    """Return the names that Lua source text uses."""
    return _Reader(list(tokens(source))).read()


class _Reader:
    """Reads the tokens of a file once, from one chain of names to the next."""

    def __init__(self, found: list[Token]) -> None:
        self._tokens = found
        self._uses = Uses()
        self._aliases: dict[str, str] = {}
        self._kinds: dict[str, str] = {}

    def read(self) -> Uses:
        """Read all tokens and return the uses."""
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
        """Read a chain `a.b:c` from `begin`; return the position after it."""
        at, parts = begin + 1, [self._tokens[begin].text]
        while self._text(at) in (".", ":") and at + 1 < len(self._tokens) and self._tokens[at + 1].kind == "name":
            parts += (self._text(at), self._tokens[at + 1].text)
            at += 2
        if parts[:2] == ["_G", "."]:
            parts = parts[2:]
        if parts[0] == "require":
            argument = at + 1 if self._text(at) in ("(", ",") else at  # "," in `pcall(require, "name")`
            if argument < len(self._tokens) and self._tokens[argument].kind == "string":
                module = self._tokens[argument].text
                self._uses.modules.append((module, self._tokens[begin].line))
                if self._text(begin - 2) in ("pcall", "xpcall"):
                    self._uses.tested_modules.add(module)
        elif name := self._meaning(parts):
            self._used(name, begin, at)
            if len(parts) == 1:
                return at
        self._assigned(begin, parts)
        return at

    def _meaning(self, parts: list[str]) -> str:
        """Return the server's name of a chain `a.b:c`; empty when it does not belong to the server."""
        if ":" in parts:
            colon = parts.index(":")
            kind = self._kinds.get(parts[colon - 1], _OBJECTS.get(parts[colon - 1], ""))
            return f"{kind}:{parts[colon + 1]}" if kind else ""
        name = self._aliases.get(parts[0], parts[0]) + "".join(parts[1:])
        return name if name.partition(".")[0] in _ROOTS and "." in name else ""

    def _used(self, name: str, begin: int, end: int) -> None:
        before, after = self._text(begin - 1), self._text(end)
        is_call = after in ("(", "{") or (end < len(self._tokens) and self._tokens[end].kind == "string")
        is_type_test = before == "(" and self._text(begin - 2) == "type"
        if before == "function" or (after == "=" and before not in (",", "{", "(")):
            self._uses.defined.add(name)
        elif not is_call and (before in _TESTS_BEFORE or after in _TESTS_AFTER or is_type_test):
            self._uses.tested.add(name)
        else:
            self._uses.names.append((name, self._tokens[begin].line))

    def _assigned(self, begin: int, parts: list[str]) -> None:
        """Store the meaning of the variable after `x = ba.create` and `x = ba.create.dir(...)`."""
        if self._text(begin - 1) != "=" or begin < 2 or self._tokens[begin - 2].kind != "name":
            return
        variable, name = self._tokens[begin - 2].text, self._meaning(parts) or "".join(parts)
        end = begin + len(parts)
        if self._text(end) in ("(", "{") or (end < len(self._tokens) and self._tokens[end].kind == "string"):  # a call
            self._kinds[variable] = _RESULT_KINDS.get(name, "")
        elif name.partition(".")[0] in _ROOTS[:3]:
            self._aliases[variable] = name
        elif parts[-1] in _OBJECTS and len(parts) > 1:
            self._kinds[variable] = _OBJECTS[parts[-1]]
