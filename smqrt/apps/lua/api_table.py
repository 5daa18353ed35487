"""The table of the Barracuda App Server's API for programs: the rows of the manual's page lua-api, which a test holds
to the truth."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from smqrt.manual import pages

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
