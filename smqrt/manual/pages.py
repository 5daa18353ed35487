"""Pages of the manual and their search."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
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
    ("Build", "Devices", "clients javascript asyncio devices modbus"),
    ("Build", "MQTT", "mqtt-hub mqtt-broker mqtt-python mqtt-lua mqtt-bridge sparkplug"),
    ("Data", "Journal", "journal duckdb"),
    (
        "Data",
        "Pipelines",
        "pipelines pipeline-rules pipeline-state exactly-once declarative-pipelines pipeline-cluster",
    ),
    ("Operate", "Run", "serving deployment workers cluster hot-restart upgrading"),
    ("Operate", "Secure", "security identity tls-server"),
    ("Operate", "Watch", "console metrics trace-logger troubleshooting"),
    ("Reference", "APIs", "hub-api lua-api http protocol"),
    ("Reference", "Commands and settings", "command-line settings limits mako-conf pipeline-commands format-smq"),
    ("Reference", "Releases", "changelog conformance client-conformance"),
    ("Specification", "", "specification specification/*"),
    ("Decisions", "", "decisions decisions/*"),
)
"""(part, title within the part, names of pages in their order). A name with `*` matches all pages of a folder."""
REST = "More"
"""The part for pages that are not in the table."""
_BACKGROUND = ("changelog", "conformance", "client-conformance", "specification*", "decisions*")
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
        names: list[str] = []
        for pattern in patterns.split():
            if "*" in pattern:
                names += [name for name in remaining if fnmatchcase(name, pattern)]
            elif pattern in remaining:
                names.append(pattern)
        for name in names:
            del remaining[name]
        if names:
            found.append(Group(part, heading, tuple(names)))
    return found


def is_background(name: str) -> bool:
    """Whether a page describes history or reasons; searches list such pages last."""
    return any(fnmatchcase(name, pattern) for pattern in _BACKGROUND)


def title(page: str) -> str:
    """Return the heading of a page."""
    return _MARKS.sub("", page.partition("\n")[0].lstrip("# "))


def short_title(page: str) -> str:
    """Return the heading of a page up to its colon; the whole heading for a decision ("0001: …")."""
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


# ---- Search
#
# `smqrt help WORD` uses this module. The pages at `/help/` and the static site search in the browser, with the same
# sections and weights (`smqrt/rtl/manual.js`).

_NOT_IN_A_SLUG = re.compile(r"[^\w\- ]")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_HEADING = re.compile(r"(#{1,6})\s+(.*?)(?:\s+#+)?\s*$")
_RULE_OF_TABLE = re.compile(r"\|?[\s:|-]*-[\s:|-]*")
_COMMENT = re.compile(r"<!--.*?-->")
_TITLE_WEIGHT, _HEADING_WEIGHT = 8.0, 5.0
_PART_WEIGHT = 0.5  # of the page's title for a section: "journal compaction" finds "Compaction" in "The journal"
_WHOLE_WORD = 2.0  # the query "log" matches the word "log" better than "logins"
_MAX_OCCURRENCES = 4  # further occurrences do not raise the score
_BACKGROUND_WEIGHT = 0.3
_NEAR = 0.7  # ratio of difflib: "setings" and "settings" have 0.93
INDEX_VARIABLE = "smqrtManual"
"""The variable that the index script defines."""


class Slugs:
    """The anchors of a page, as GitHub makes them, without duplicates."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, heading: str) -> str:
        """Return the anchor of the next heading in Markdown, such as `tls-and-more` for `## TLS, and more`."""
        slug = _NOT_IN_A_SLUG.sub("", heading.lower()).replace(" ", "-")
        count = self._counts[slug] = self._counts.get(slug, -1) + 1
        return f"{slug}-{count}" if count else slug


@dataclass(frozen=True)
class Section:
    """A heading of a page with the text up to the next heading.

    Args:
        page: name of the page.
        title: title of the page.
        heading: the heading without marks; the title for the text before the first heading.
        anchor: anchor of the heading; empty for the text before the first heading.
        lines: the text without marks; lines of a paragraph are joined, rows of tables are lines.
    """

    page: str
    title: str
    heading: str
    anchor: str
    lines: tuple[str, ...]


def sections(name: str, page: str) -> Iterator[Section]:
    """Yield the sections of a page.

    Args:
        name: the name of the page.
        page: its text in Markdown.
    """
    slugs, page_title = Slugs(), title(page)
    heading, anchor, lines = page_title, "", list[str]()
    fence = ""
    joins = False  # whether the next line continues the paragraph
    for line in page.splitlines():
        mark = _FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence, joins = "" if fence else mark[1], False
        elif fence:
            lines.append(line.strip())
        elif found := _HEADING.match(line):
            slug = slugs.add(found[2])
            if len(found[1]) > 1:
                yield Section(name, page_title, heading, anchor, tuple(filter(None, lines)))
                heading, anchor, lines = plain(found[2]), slug, []
            joins = False
        else:
            text = _text(line)
            if text and joins and not line.lstrip().startswith(("* ", "- ", "|")):
                lines[-1] += f" {text}"
            else:
                lines.append(text)
            joins = bool(text) and not line.startswith("|")
    yield Section(name, page_title, heading, anchor, tuple(filter(None, lines)))


def _text(line: str) -> str:
    """Return a line outside of code blocks without marks; for a row of a table, its cells."""
    line = _COMMENT.sub("", line).strip()
    if line.startswith("|"):
        if _RULE_OF_TABLE.fullmatch(line):
            return ""
        line = " · ".join(cell.strip() for cell in line.strip("|").split(" | "))
    return plain(line).removeprefix("- ").strip()


def all_sections(pages: Mapping[str, str]) -> list[Section]:
    """Return the sections of all pages, in the order of the manual."""
    return [section for group in groups(pages) for name in group.names for section in sections(name, pages[name])]


def index_script(pages: Mapping[str, str]) -> str:
    """Return the index as a script, since pages opened from a folder may load scripts, but not fetch files.

    It sets a global variable to `{"pages": [[name, title, weight], …], "sections": [[number of the page, anchor,
    heading, text], …]}`.
    """
    names = [name for group in groups(pages) for name in group.names]
    numbers = {name: number for number, name in enumerate(names)}
    index = {
        "pages": [[name, title(pages[name]), _weight(name)] for name in names],
        "sections": [
            [numbers[section.page], section.anchor, section.heading, "\n".join(section.lines)]
            for section in all_sections(pages)
        ],
    }
    return f"var {INDEX_VARIABLE} = {json.dumps(index, ensure_ascii=False, separators=(',', ':'))};\n"


def _weight(name: str) -> float:
    return _BACKGROUND_WEIGHT if is_background(name) else 1.0


@dataclass(frozen=True)
class Found:
    """A section that matches a query.

    Args:
        section: the section.
        line: the line with the most words of the query; empty when only the headings contain them.
        score: the quality of the match.
    """

    section: Section
    line: str
    score: float


def find(found_in: Iterable[Section], query: str) -> list[Found]:
    """Return the sections that contain all words of a query, the best matches first.

    A word of the query matches the beginning of words: "log" matches "logins" and "close_log", but not "catalog". Case
    does not matter.
    """
    words = [re.compile(rf"(?<![^\W_]){re.escape(word)}(?P<end>\w)?") for word in query.lower().split()]
    scored = (_match(section, words) for section in found_in) if words else ()
    return sorted((found for found in scored if found), key=lambda found: -found.score)


def _match(section: Section, words: list[re.Pattern[str]]) -> Found | None:
    """Match a section that contains at least one of the words; the title of its page may contain the others."""
    lines = [line.lower() for line in section.lines]
    text, heading = "\n".join(lines), section.heading.lower() if section.anchor else ""
    page = f"{section.title.lower()}\n{section.page}"
    title_weight = _PART_WEIGHT if section.anchor else _TITLE_WEIGHT
    score, is_here = 0.0, not section.anchor
    for word in words:
        times = min(len(word.findall(text)), _MAX_OCCURRENCES)
        own = _HEADING_WEIGHT * _points(word, heading) + times * _points(word, text) / _WHOLE_WORD
        points = own + title_weight * _points(word, page)
        if not points:
            return None
        score += points
        is_here = is_here or own > 0
    if not is_here:
        return None
    counts = [sum(bool(word.search(line)) for word in words) for line in lines]
    line = section.lines[counts.index(max(counts))] if any(counts) else ""
    return Found(section, line, score * _weight(section.page))


def _points(word: re.Pattern[str], text: str) -> float:
    """Return 0 for a text without the word, 1 for a prefix of a word, 2 for a whole word."""
    found = [match["end"] is None for match in word.finditer(text)]
    return _WHOLE_WORD if any(found) else float(bool(found))


def near_names(pages: Mapping[str, str], word: str) -> list[str]:
    """Return the names of pages with a similar spelling, the most similar first."""
    short = {name.rpartition("/")[2]: name for name in reversed(list(pages))}
    near = get_close_matches(word.lower().replace(" ", "-").rpartition("/")[2], short, n=4, cutoff=_NEAR)
    return [short[name] for name in near]


def excerpt(line: str, query: str, width: int) -> str:
    """Return the part of a line around the first word of a query, at most `width` characters."""
    if len(line) <= width:
        return line
    places = [place for word in query.lower().split() if (place := line.lower().find(word)) >= 0]
    begin = min(max(0, min(places, default=0) - width // 3), len(line) - width + 1)
    if begin:
        begin = line.find(" ", begin) + 1 or begin
    part, rest = line[begin : begin + width - 2], line[begin + width - 2 :]
    if rest:
        part = part.rpartition(" ")[0] or part
    return ("…" if begin else "") + part.strip() + ("…" if rest else "")
