"""Pages of the manual, their titles and their groups; the Markdown files are in `smqrt/help`."""

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
"""(part, title within the part, names of pages in their order). A name with `*` stands for all pages of a folder."""
REST = "More"
"""The part for pages that are not in the table."""
_BACKGROUND = ("changelog", "conformance", "specification*", "decisions*")
"""Background pages, which searches list after the other pages."""


@dataclass(frozen=True)
class Group:
    """Pages that are listed together.

    Args:
        part: the part of the manual, such as "Build".
        title: title of the group within the part; empty when the part has one group.
        names: names of the pages, in reading order.
    """

    part: str
    title: str
    names: tuple[str, ...]


def pages() -> dict[str, str]:
    """Return the pages of the manual by name, such as "quick-start" or "decisions/0001-http-front"."""
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
    """Return the groups of the manual in order; each page is in one of them.

    Args:
        pages: the pages, from `pages()`.
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
    """Whether a page is about history or reasons."""
    return any(fnmatchcase(name, pattern) for pattern in _BACKGROUND)


def title(page: str) -> str:
    """Return the heading of a page."""
    return _MARKS.sub("", page.partition("\n")[0].lstrip("# "))


def short_title(page: str) -> str:
    """Return the heading of a page up to its colon; of a decision ("0001: …") the whole heading."""
    heading = title(page)
    before, _, _ = heading.partition(": ")
    return heading if before.isdigit() else before


def first_sentence(page: str) -> str:
    """Return the first sentence of a page as plain text; empty when the page does not begin with a paragraph."""
    first = next((part for part in page.split("\n\n") if part.strip() and not part.lstrip().startswith("#")), "")
    first = first.lstrip("\n")
    if first.startswith(("|", "```", "    ", "<", "*", "-")):
        return ""
    return _SENTENCE_END.split(plain(" ".join(first.split())), maxsplit=1)[0]


def plain(text: str) -> str:
    """Return a line of a page without Markdown marks; links become their text."""
    return _MARKS.sub("", _LINK.sub(r"\1", text))
