"""Signatures of the Lua API, the manual's tables of them, and annotations for editors.

The files in `api_signatures` have a line for each function and variable; the head of server.txt describes their format.
The tables of the manual's page lua-api are made from them, and the annotation files (stubs) for the Lua language
server LuaLS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from smqrt.manual import pages

FILES = ("server.txt", "modules.txt")
SUPPORTED = "yes"
TABLES = (
    "pages", "request", "response", "applications", "directories", "logins", "files", "helpers", "clients", "objects",
    "messaging", "modules",
)  # fmt: skip
"""The tables of the manual's page, in its order."""

_OPENING, _CLOSING = "(<{[", ")>}]"
_NAME = re.compile(r"[A-Za-z_]\w*(?:[.:][A-Za-z_]\w*)*")
_NAMED_RESULT = re.compile(r"(.*[^\s:|,]) (\w+)")
_SUPPORT = re.compile(r"^(.*?)  !(.*)$")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function, or a field of a class.

    Attributes:
        name: the name; "..." for further arguments.
        type: the type, as in LuaLS annotations.
        is_optional: whether it may be nil.
    """

    name: str
    type: str
    is_optional: bool = False

    def __str__(self) -> str:
        return f"{self.name}{'?' if self.is_optional else ''}: {self.type}"


@dataclass(frozen=True)
class Result:
    """A result of a function: its type, and its name or an empty string."""

    type: str
    name: str = ""


@dataclass(frozen=True)
class Entry:
    """A function or a variable.

    Attributes:
        name: the name, such as "ba.json.encode" and "dir:insert"; those of modules begin with "M".
        text: the signature.
        parameters: of a function, without `self`; None for a variable.
        results: of a function; of a variable its type.
        support: "yes", "not yet", "no", or a condition.
        note: a sentence in Markdown, perhaps empty.
    """

    name: str
    text: str
    parameters: tuple[Parameter, ...] | None
    results: tuple[Result, ...]
    support: str = SUPPORTED
    note: str = ""

    @property
    def is_present(self) -> bool:
        """Whether some configuration has it."""
        return self.support not in ("not yet", "no")

    @property
    def owner(self) -> str:
        """The name before the last dot or colon; empty for a global."""
        return re.split(r"[.:](?=\w+$)", self.name)[0] if re.search(r"[.:]", self.name) else ""


@dataclass
class ClassOf:
    """A class: the kind of an object or of a table of options.

    Attributes:
        name: the name of the type.
        parents: the types that it inherits from.
        fields: its fields.
    """

    name: str
    parents: str = ""
    fields: list[Parameter] = field(default_factory=list)


@dataclass
class Section:
    """A part of the data: a table of the manual, further globals and classes ("stubs"), or a module.

    Attributes:
        name: its name, such as "request" or "module smq.hub".
        rows: entries, and rows of the manual's table as text, in order.
        classes: the classes by their names.
        aliases: names of types, with the types.
        value: an expression of Lua in place of a module's table; empty for none.
    """

    name: str
    rows: list[Entry | str] = field(default_factory=list)
    classes: dict[str, ClassOf] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    value: str = ""

    @property
    def module(self) -> str:
        """The name of the module; empty for another section."""
        return self.name.partition(" ")[2]

    def entries(self) -> list[Entry]:
        """Return the functions and variables."""
        return [row for row in self.rows if isinstance(row, Entry)]


@cache
def sections() -> dict[str, Section]:
    """Return the sections of all files by their names."""
    found: dict[str, Section] = {}
    for file in FILES:
        text = (resources.files("smqrt.apps.lua") / "api_signatures" / file).read_text("utf-8")
        found |= {section.name: section for section in read(text)}
    return found


def read(text: str) -> list[Section]:
    """Return the sections of a file.

    Raises:
        ValueError: a line is invalid; the message has its number.
    """
    found: list[Section] = []
    latest: ClassOf | None = None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if not line or line.startswith(";"):
                continue
            if line.startswith("== "):
                found.append(Section(line[3:]))
            elif line.startswith("|"):
                found[-1].rows.append(line)
            elif line.startswith("class "):
                name, _, parents = line[6:].partition(": ")
                latest = found[-1].classes[name] = ClassOf(name, parents)
            elif line.startswith("alias "):
                name, _, meaning = line[6:].partition(" ")
                found[-1].aliases[name] = meaning
            elif line.startswith("M = "):
                found[-1].value = line[4:]
            elif line.startswith("  ") and latest is not None:
                latest.fields.append(_parameter(line.strip()))
            else:
                found[-1].rows.append(entry_of(line))
        except (ValueError, IndexError) as error:
            raise ValueError(f"line {number}: {line}: {error}") from None
    return found


def entry_of(line: str) -> Entry:
    """Return the function or variable of a line.

    Raises:
        ValueError: the line is invalid.
    """
    text, _, note = line.partition("  # ")
    support = SUPPORTED
    if found := _SUPPORT.match(text):
        text, support = found[1], found[2]
    name = _NAME.match(text)
    if name is None:
        raise ValueError("a name is needed")
    rest = text[name.end() :]
    if not rest.startswith("("):
        if not rest.startswith(": "):
            raise ValueError("parameters or a type are needed after the name")
        return Entry(name[0], text, None, (Result(rest[2:]),), support, note)
    close = _closing(rest)
    parameters = tuple(_parameter(one) for one in _split(rest[1:close]))
    rest = rest[close + 1 :]
    if rest and not rest.startswith(": "):
        raise ValueError("results begin with a colon")
    return Entry(name[0], text, parameters, tuple(map(_result, _split(rest[2:]))), support, note)


def _closing(text: str) -> int:
    """Return the position of the bracket that closes the one at the beginning."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0:
            return at
    raise ValueError("a bracket is not closed")


def _split(text: str) -> list[str]:
    """Return the parts between commas outside of brackets."""
    depth, parts = 0, [""]
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _parameter(text: str) -> Parameter:
    name, colon, kind = text.partition(": ")
    if not colon:
        raise ValueError(f"{text}: a type is needed")
    return Parameter(name.removesuffix("?"), kind, name.endswith("?"))


def _result(text: str) -> Result:
    found = _NAMED_RESULT.fullmatch(text)
    return Result(found[1], found[2]) if found and not text.endswith(")") else Result(text)


# ---- The tables of the manual


def manual(table: str) -> str:
    """Return a table of the page lua-api in Markdown, as `scripts/fix` writes it."""
    lines = ["| call | there | notes |", "|---|---|---|"]
    for row in sections()[table].rows:
        if isinstance(row, str):
            lines.append(row)
        else:
            # A "|" would end the cell; `|` of a union reads as "or".
            lines.append(f"| `{row.text.replace('|', ' or ')}` | {row.support} | {row.note}{' ' if row.note else ''}|")
    return "\n".join(lines) + "\n"


# ---- Annotations for editors

_GLOBALS = ("ba", "mako", "luasql", "io")
_STANDARD = ("os",)
"""Libraries of Lua that the language server knows already."""
_CLASS_NAMES = {"thread": "thread_queue"}
"""Other names of classes: "thread" is a type of Lua."""
_GLOBAL_MODULES = ("socket", "mime")
STUBS = "smqrt.lua"
PLUGIN = "plugin.lua"


def stubs() -> dict[str, str]:
    """Return the annotation files by their paths: one of the globals, one of each module, and the plugin for pages."""
    plain = [section for section in sections().values() if not section.module]
    files = {STUBS: _globals(plain)}
    for section in sections().values():
        if section.module:
            files[section.module.replace(".", "/") + ".lua"] = _module(section)
    return files | {PLUGIN: (resources.files("smqrt.apps.lua") / "api_signatures" / PLUGIN).read_text("utf-8")}


def luarc(stubs_folder: str) -> str:
    """Return the file `.luarc.json` of an application.

    Args:
        stubs_folder: the folder of the stubs, relative to the application's.
    """
    settings = {
        "runtime.version": "Lua 5.4",
        "runtime.path": ["?.lua", ".lua/?.lua"],
        "runtime.builtin": {"io": "disable"},  # `io` is an io object, which has `popen` too
        "runtime.plugin": f"{stubs_folder}/{PLUGIN}",
        "workspace.library": [stubs_folder],
        "workspace.checkThirdParty": False,
        "files.associations": {"*.lsp": "lua", ".preload": "lua", ".config": "lua"},
        "diagnostics.globals": ["onunload", "_emit"],
        "diagnostics.disable": ["lowercase-global"],  # global variables of `.preload` are those of the application
    }
    return json.dumps(settings, indent=2) + "\n"


def _globals(parts: list[Section]) -> str:
    rows = [row for part in parts for row in part.entries() if row.is_present]
    classes = _classes(parts, rows)
    tables = dict.fromkeys(
        ".".join(owner[:count])
        for row in rows
        if (owner := row.owner.split("."))[0] in _GLOBALS and ":" not in row.name and row.owner not in classes
        for count in range(1, len(owner) + 1)
    )
    lines = ["---@meta _", ""]
    for part in parts:
        lines += [f"---@alias {name} {meaning}" for name, meaning in part.aliases.items()]
    for one in classes.values():
        lines += ["", *_class(one, "io" if one.name == "io" else f"local {_variable(one.name)}")]
    for table in tables:
        if table not in classes:
            lines += ["", f"---@class {table}", f"{table} = {{}}"]
    for row in rows:
        if row.name.partition(".")[0] not in _STANDARD:
            lines += ["", *_entry(row, classes)]
    lines += ["", *(f'{name} = require "{name}"' for name in _GLOBAL_MODULES)]
    return "\n".join(lines) + "\n"


def _module(section: Section) -> str:
    if section.value:
        return f"---@meta\n\nreturn {section.value}\n"
    rows = section.entries()
    classes = _classes([section], [row for row in rows if not row.name.startswith("M")])
    calls = [row for row in rows if row.name == "M"]
    lines = ["---@meta", ""]
    for one in classes.values():
        lines += [*_class(one, f"local {_variable(one.name)}"), ""]
    lines.append(f"---@class module.{section.module}")
    lines += [f"---@overload fun{row.text.removeprefix('M')}" for row in calls]
    lines.append("local M = {}")
    for row in rows:
        if row.name != "M":
            lines += ["", *_entry(row, classes)]
    return "\n".join([*lines, "", "return M", ""])


def _classes(parts: list[Section], rows: list[Entry]) -> dict[str, ClassOf]:
    """Return the classes of sections, with those that only have methods."""
    classes = {name: one for part in parts for name, one in part.classes.items()}
    for row in rows:
        if ":" in row.name:
            classes.setdefault(row.owner, ClassOf(row.owner))
    return classes


def _class(one: ClassOf, variable: str) -> Iterator[str]:
    name = _CLASS_NAMES.get(one.name, one.name)
    yield f"---@class {name}{': ' if one.parents else ''}{one.parents}"
    for item in one.fields:
        yield f"---@field {item.name}{'?' if item.is_optional else ''} {item.type}"
    yield f"{variable} = {{}}"


def _variable(name: str) -> str:
    return _CLASS_NAMES.get(name, name).replace(".", "_")


def _entry(row: Entry, classes: dict[str, ClassOf]) -> Iterator[str]:
    if row.note:
        yield f"--- {pages.plain(row.note)}"
    target = row.name
    if row.owner in classes and row.owner != "io":
        target = _variable(row.owner) + row.name[len(row.owner) :]
    if row.parameters is None:
        yield f"---@type {row.results[0].type}"
        yield f"{target} = nil"
        return
    for item in row.parameters:
        yield f"---@param {item.name}{'?' if item.is_optional else ''} {item.type}"
    for result in row.results:
        kind = f"{result.type.removesuffix('...')} ..." if result.type.endswith("...") else result.type
        yield f"---@return {kind}{' ' if result.name else ''}{result.name}"
    yield f"function {target}({', '.join(item.name for item in row.parameters)}) end"
