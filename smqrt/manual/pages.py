"""The manual: the Markdown pages in `smqrt/help`, and what they are called."""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable

_LINK = re.compile(r"\[([^\]\[]*)\]\([^()]*\)")
_MARKS = re.compile(r"[`*]+")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")


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


def title(page: str) -> str:
    """Returns the heading of a page."""
    return _MARKS.sub("", page.partition("\n")[0].lstrip("# "))


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
