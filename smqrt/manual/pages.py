"""The manual: the Markdown pages in `smqrt/help`, their titles, and the groups they are listed in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from importlib.resources.abc import Traversable

_LINK = re.compile(r"\[([^\]\[]*)\]\([^()]*\)")
_MARKS = re.compile(r"[`*]+")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")

_TABLE = (
    ("Start", "", "quick-start application moving"),
    ("Build", "Hubs and pages", "last-value slow-consumers data-path logins file-servers"),
    ("Build", "Lua", "modules cosockets sockets http-client tls files sql crypto cbor xml-lua processes"),
    ("Build", "Python", "python-api wsgi"),
    ("Build", "Devices", "clients modbus"),
    ("Build", "MQTT", "mqtt-broker mqtt-python mqtt-lua mqtt-bridge sparkplug"),
    ("Data", "Journal", "journal duckdb"),
    (
        "Data",
        "Pipelines",
        "pipelines pipeline-rules pipeline-state exactly-once declarative-pipelines pipeline-cluster",
    ),
    ("Operate", "Run", "serving deployment workers cluster hot-restart upgrading"),
    ("Operate", "Secure", "security identity tls-server"),
    ("Operate", "Watch", "console metrics trace-logger troubleshooting"),
    ("Reference", "APIs", "hub-api lua-api protocol"),
    ("Reference", "Commands and settings", "command-line settings limits mako-conf pipeline-commands format-smq"),
    ("Reference", "Releases", "changelog conformance"),
    ("Specification", "", "specification specification/*"),
    ("Decisions", "", "decisions decisions/*"),
)
"""(part, title below it, names of pages in their order). A name with `*` stands for all pages of a folder."""
REST = "More"
"""The part of pages that the table does not name."""
_BACKGROUND = ("changelog", "conformance", "specification*", "decisions*")
"""Pages that are read to find out why; searches list them below the others."""


@dataclass(frozen=True)
class Group:
    """Pages that are listed together.

    Args:
        part: the part of the manual, such as "Build".
        title: of the group within the part; empty when the part has one group.
        names: of the pages, in the order to read them.
    """

    part: str
    title: str
    names: tuple[str, ...]


def pages() -> dict[str, str]:
    """Returns the pages of the manual by name, such as "quick-start" or "decisions/0001-http-front"."""
    folder = resources.files("smqrt") / "help"
    return dict(sorted(_pages(folder, ""), key=lambda page: ("/" in page[0], page[0])))


def _pages(folder: Traversable, prefix: str) -> list[tuple[str, str]]:
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _pages(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".md"):
            found.append((prefix + entry.name.removesuffix(".md"), entry.read_text("utf-8")))
    return found


def groups(pages: Mapping[str, str]) -> list[Group]:
    """Returns the groups of the manual in their order; each page is in one of them.

    Args:
        pages: as `pages()` returns them.
    """
    found = []
    remaining = dict.fromkeys(pages)
    for part, heading, patterns in (*_TABLE, (REST, "", "*")):
        names = tuple(name for pattern in patterns.split() for name in remaining if fnmatchcase(name, pattern))
        for name in names:
            del remaining[name]
        if names:
            found.append(Group(part, heading, names))
    return found


def is_background(name: str) -> bool:
    """Whether a page tells history or reasons and is no page to begin with."""
    return any(fnmatchcase(name, pattern) for pattern in _BACKGROUND)


def title(page: str) -> str:
    """Returns the heading of a page."""
    return _MARKS.sub("", page.partition("\n")[0].lstrip("# "))


def short_title(page: str) -> str:
    """Returns the heading of a page up to its colon; of a decision ("0001: …") all of it."""
    heading = title(page)
    before, _, _ = heading.partition(": ")
    return heading if before.isdigit() else before


def first_sentence(page: str) -> str:
    """Returns the first sentence below the heading of a page, as plain text; empty when a page begins otherwise."""
    first = next((part for part in page.split("\n\n") if part.strip() and not part.lstrip().startswith("#")), "")
    first = first.lstrip("\n")
    if first.startswith(("|", "```", "    ", "<", "*", "-")):
        return ""
    return _SENTENCE_END.split(plain(" ".join(first.split())), maxsplit=1)[0]


def plain(text: str) -> str:
    """Returns a line of a page without its marks; of links their text."""
    return _MARKS.sub("", _LINK.sub(r"\1", text))
